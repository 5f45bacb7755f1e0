"""Device functions for cache rows held in registers as tiles `[ROWS, DP]` of fp32.

DP is a power of two at least DIM, channels beyond DIM are zero; groups of GROUP channels share a
scale. The tile's groups are a reshape of it. `KVLayout` gives the constexprs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._jit import (
    e2m1_decode,
    e4m3_decode,
    nibbles_pack,
    nibbles_unpack,
    round_bf16,
    to_bf16,
    ue8m0_decode,
)
from tinfer.kernels._quant import cast_groups, round_groups


@triton.jit
def norm_tile(x, weight, eps, DIM: tl.constexpr):
    """RMSNorm with a weight, rounded to bf16."""
    mean = tl.sum(x * x, axis=1) / DIM
    one = tl.full(mean.shape, 1.0, tl.float32)
    x = x * tl.div_rn(one, tl.sqrt_rn(mean + eps))[:, None]
    return round_bf16(weight[None, :] * x)


@triton.jit
def load_turns(
    cos_sin_ptr, position, live, stride,
    DIM: tl.constexpr, DP: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """(cos, sin) fp32 [ROWS, DP // 2] of every pair of channels; 1 and 0 where none turns."""
    turn = tl.arange(0, DP // 2) - (DIM - ROPE) // 2
    at = cos_sin_ptr + position[:, None] * stride + turn[None, :]
    mask = live[:, None] & ((turn >= 0) & (turn < ROPE // 2))[None, :]
    cos = tl.load(at, mask=mask, other=1.0)
    sin = tl.load(at + ROPE // 2, mask=mask, other=0.0)
    return cos, sin


@triton.jit
def rotate_tile(
    x, cos, sin, ROWS: tl.constexpr, DIM: tl.constexpr, DP: tl.constexpr, ROPE: tl.constexpr
):
    """Turn the adjacent pairs of the last ROPE channels, rounded to bf16."""
    even, odd = tl.split(tl.reshape(x, [ROWS, DP // 2, 2]))
    turn = tl.arange(0, DP // 2) - (DIM - ROPE) // 2
    turns = ((turn >= 0) & (turn < ROPE // 2))[None, :]
    new_even = tl.where(turns, round_bf16(even * cos - odd * sin), even)
    new_odd = tl.where(turns, round_bf16(even * sin + odd * cos), odd)
    return tl.interleave(new_even, new_odd)


@triton.jit
def first_cast(
    x,
    ROWS: tl.constexpr,
    DP: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The e2m1 quantize-dequantize of `KVLayout.first`; GROUP 0 is none."""
    if GROUP > 0:
        grouped = tl.reshape(x, [ROWS * DP // GROUP, GROUP])
        x = tl.reshape(round_bf16(round_groups(grouped, "e2m1", SCALE, NATIVE)), [ROWS, DP])
    return x


@triton.jit
def store_tile(
    x,
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
    NATIVE: tl.constexpr,
):
    """Quantize a tile and write its rows at `slot` (int64 [ROWS], -1 skips)."""
    live = slot >= 0
    page, row = slot // PAGE, slot % PAGE
    base = cache_ptr + page * page_stride + row * DATA_STRIDE
    channel = tl.arange(0, DP)
    if VALUE == "bf16":
        mask = live[:, None] & (channel < DIM)[None, :]
        tl.store(base[:, None] + channel[None, :], to_bf16(x), mask=mask)
    else:
        GROUPS: tl.constexpr = DP // GROUP
        grouped = tl.reshape(x, [ROWS * GROUPS, GROUP])
        codes, scales = cast_groups(grouped, VALUE, SCALE, NATIVE)
        if VALUE == "e2m1":
            byte = tl.arange(0, DP // 2)
            data = tl.reshape(nibbles_pack(codes), [ROWS, DP // 2])
            mask = live[:, None] & (byte < DIM // 2)[None, :]
        else:
            byte = channel
            data = tl.reshape(codes, [ROWS, DP])
            mask = live[:, None] & (byte < DIM)[None, :]
        tl.store(base[:, None] + byte[None, :], data, mask=mask)
        scales = tl.reshape(scales, [ROWS, GROUPS])
        group = tl.arange(0, GROUPS)
        at = cache_ptr + page * page_stride + SCALE_BASE + row * SCALE_STRIDE
        mask = live[:, None] & (group * GROUP < DIM)[None, :]
        if SCALE == "fp32" or SCALE == "fp32_pow2":
            bits = scales.to(tl.uint32, bitcast=True)
            for i in tl.static_range(4):
                byte_at = at[:, None] + 4 * group[None, :] + i
                tl.store(byte_at, ((bits >> (8 * i)) & 0xFF).to(tl.uint8), mask=mask)
        else:
            tl.store(at[:, None] + group[None, :], scales, mask=mask)


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
