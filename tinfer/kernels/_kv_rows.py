"""Cache rows loaded by slot into tiles `[ROWS, DP]`.

DP is a power of two at least DIM, channels beyond DIM are zero; groups of GROUP channels share a
scale. The tile's groups are a reshape of it. `KVLayout` gives the constexprs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._jit import e2m1_decode, e4m3_decode, nibbles_unpack, to_bf16, ue8m0_decode


@triton.jit
def load_scales(
    at, live, ROWS: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr, GROUP: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    """fp32 factors [ROWS, DP // GROUP] from the scale pointers `at` [ROWS]; 0 where not live."""
    GROUPS: tl.constexpr = DP // GROUP
    group = tl.arange(0, GROUPS)
    mask = live[:, None] & (group * GROUP < DIM)[None, :]
    if SCALE == "fp32" or SCALE == "fp32_pow2":
        bits = tl.zeros([ROWS, GROUPS], tl.uint32)
        for i in tl.static_range(4):
            byte = tl.load(at[:, None] + 4 * group[None, :] + i, mask=mask, other=0)
            bits |= byte.to(tl.uint32) << (8 * i)
        scales = bits.to(tl.float32, bitcast=True)
    else:
        codes = tl.load(at[:, None] + group[None, :], mask=mask, other=0)
        scales = e4m3_decode(codes) if SCALE == "e4m3" else ue8m0_decode(codes)
    return scales


@triton.jit
def load_tile(
    slot,
    cache_ptr,
    page_stride,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DP: tl.constexpr,
    VALUE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    PAGE: tl.constexpr,
    DATA_STRIDE: tl.constexpr,
    SCALE_BASE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
):
    """Rows at `slot` (int64 [ROWS]) as bf16 [ROWS, DP]; -1 gives zeros without a load."""
    live = slot >= 0
    page, row = slot // PAGE, slot % PAGE
    base = cache_ptr + page * page_stride + row * DATA_STRIDE
    channel = tl.arange(0, DP)
    if VALUE == "bf16":
        mask = live[:, None] & (channel < DIM)[None, :]
        x = tl.load(base[:, None] + channel[None, :], mask=mask, other=0.0)
    else:
        if VALUE == "e2m1":
            byte = tl.arange(0, DP // 2)
            mask = live[:, None] & (byte < DIM // 2)[None, :]
            packed = tl.load(base[:, None] + byte[None, :], mask=mask, other=0)
            value = e2m1_decode(nibbles_unpack(packed))
        else:
            mask = live[:, None] & (channel < DIM)[None, :]
            value = e4m3_decode(tl.load(base[:, None] + channel[None, :], mask=mask, other=0))
        at = cache_ptr + page * page_stride + SCALE_BASE + row * SCALE_STRIDE
        scales = load_scales(at, live, ROWS, DIM, DP, GROUP, SCALE)
        grouped = tl.reshape(value, [ROWS, DP // GROUP, GROUP]) * scales[:, :, None]
        x = to_bf16(tl.reshape(grouped, [ROWS, DP]))
    return x
