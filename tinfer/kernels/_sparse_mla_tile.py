"""Device functions of the sparse attention kernels: from listed slots to bf16 tiles.

A cache layout reaches a kernel as one constexpr tuple (`layout_key`), strides in bytes:
    (VALUE, GROUP, SCALE, PAGE, DATA_STRIDE, SCALE_BASE, SCALE_STRIDE, WORDS)
A tile holds BLOCK channels of N rows, `[N, BLOCK]` bf16; dequantizing is exact. A slot that is
not valid is -1: its lane loads zeros without touching memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tinfer.kernels._jit import (
    bf16_mul,
    e2m1_to_bf16_raw,
    e4m3_decode,
    e4m3_to_bf16_raw,
    to_bf16,
    ue8m0_decode,
)
from tinfer.kv_layout import KVLayout

Key = tuple[str, int, str, int, int, int, int, bool]


def layout_key(layout: KVLayout, cache: Tensor) -> Key:
    """The layout as kernels take it; WORDS says that four scales can be loaded at once."""
    head = (layout.value, layout.group, layout.scale, layout.page_size)
    starts = (layout.scale_base, layout.scale_stride, cache.stride(0), cache.storage_offset())
    return (*head, *layout.triple, not any(s % 4 for s in starts))


# ---------------------------------------------------------------- slots
@triton.jit
def load_slots(slots, start, count, rows, BLOCK: tl.constexpr):
    """int32 [BLOCK]: the slots from `start`, -1 where beyond `count` or not in 0..rows-1."""
    at = start + tl.arange(0, BLOCK)
    slot = tl.load(slots + at, mask=at < count, other=-1)
    return tl.where((slot >= 0) & (slot < rows), slot, -1)


@triton.jit
def used_entries(slots, count, rows, WIDTH: tl.constexpr):
    """Entries up to the last valid slot: what follows holds none."""
    slot = load_slots(slots, 0, count, rows, WIDTH)
    return tl.max(tl.where(slot >= 0, tl.arange(0, WIDTH) + 1, 0), axis=0)


# ---------------------------------------------------------------- rows
@triton.jit
def _load(cache, at, valid, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """[N, BLOCK]: COUNT elements from each offset, zeros behind them."""
    column = tl.arange(0, BLOCK)[None, :]
    inside = valid if COUNT == BLOCK else valid & (column < COUNT)
    return tl.load(cache + at[:, None] + column, mask=inside, other=0)


@triton.jit
def _scales(
    cache, base, row, valid,
    FIRST: tl.constexpr, COUNT: tl.constexpr, GROUPS: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """bf16 [N, GROUPS]: the scales of COUNT groups from FIRST, zeros behind them."""
    at = base + row * LAYOUT[6] + (LAYOUT[5] + FIRST)
    if LAYOUT[7] and FIRST % 4 == 0 and COUNT % 4 == 0 and GROUPS % 4 == 0:
        words = (cache + at).to(tl.pointer_type(tl.uint32))
        column = tl.arange(0, GROUPS // 4)[None, :]
        inside = valid if COUNT == GROUPS else valid & (column < COUNT // 4)
        word = tl.load(words[:, None] + column, mask=inside, other=0)
        byte = word[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]
        code = tl.reshape(byte & 255, (word.shape[0], GROUPS))
    else:
        code = _load(cache, at, valid, COUNT, GROUPS)
    value = e4m3_decode(code) if LAYOUT[2] == "e4m3" else ue8m0_decode(code)
    return to_bf16(value)


@triton.jit
def _spread(scale, EACH: tl.constexpr):
    """[N, G] -> [N, G*EACH], every scale repeated."""
    wide = tl.broadcast_to(scale[:, :, None], (scale.shape[0], scale.shape[1], EACH))
    return tl.reshape(wide, (scale.shape[0], scale.shape[1] * EACH))


# Two channels in a 32-bit register at a time: move the code's fields to bf16's (value * 2^-120
# for e4m3, 2^-126 for e2m1), then two exact products, the second with the scale. The addend
# -0.0 turns the fused operation, which sm_80 has, into a product.
_PTX_E4M3 = tl.constexpr("""{
    .reg .b32 lo, hi, t, zero;
    mov.b32 zero, 0x80008000;
    prmt.b32 lo, $2, 0, 0x1404;
    prmt.b32 hi, $2, 0, 0x3424;
    shr.u32 t, lo, 4;
    and.b32 t, t, 0x07f007f0;
    lop3.b32 lo, lo, 0x80008000, t, 0xea;
    shr.u32 t, hi, 4;
    and.b32 t, t, 0x07f007f0;
    lop3.b32 hi, hi, 0x80008000, t, 0xea;
    mov.b32 t, 0x7b807b80;
    fma.rn.bf16x2 lo, lo, t, zero;
    fma.rn.bf16x2 hi, hi, t, zero;
    fma.rn.bf16x2 $0, lo, $3, zero;
    fma.rn.bf16x2 $1, hi, $4, zero;
}""")
_PTX_E2M1 = tl.constexpr("""{
    .reg .b32 x, y, t, u, big, zero;
    mov.b32 zero, 0x80008000;
    mov.b32 big, 0x7e807e80;
    prmt.b32 x, $4, 0, 0x4140;
    prmt.b32 y, $4, 0, 0x4342;
    shl.b32 t, x, 12;
    shl.b32 u, x, 6;
    and.b32 t, t, 0x80008000;
    lop3.b32 t, u, 0x01c001c0, t, 0xea;
    fma.rn.bf16x2 t, t, big, zero;
    fma.rn.bf16x2 $0, t, $5, zero;
    shl.b32 t, y, 12;
    shl.b32 u, y, 6;
    and.b32 t, t, 0x80008000;
    lop3.b32 t, u, 0x01c001c0, t, 0xea;
    fma.rn.bf16x2 t, t, big, zero;
    fma.rn.bf16x2 $1, t, $6, zero;
    shl.b32 t, x, 8;
    shl.b32 u, x, 2;
    and.b32 t, t, 0x80008000;
    lop3.b32 t, u, 0x01c001c0, t, 0xea;
    fma.rn.bf16x2 t, t, big, zero;
    fma.rn.bf16x2 $2, t, $5, zero;
    shl.b32 t, y, 8;
    shl.b32 u, y, 2;
    and.b32 t, t, 0x80008000;
    lop3.b32 t, u, 0x01c001c0, t, 0xea;
    fma.rn.bf16x2 t, t, big, zero;
    fma.rn.bf16x2 $3, t, $6, zero;
}""")


@triton.jit
def _decode_e4m3(code, scale, PTX: tl.constexpr):
    """code * scale in bf16. Rows hold no NaN code: a NaN makes the scale of its group NaN."""
    if PTX:
        value = tl.inline_asm_elementwise(
            _PTX_E4M3, "=r,=r,r,r,r", [code, scale], tl.bfloat16, is_pure=True, pack=4
        )
    else:
        raised = bf16_mul(
            e4m3_to_bf16_raw(code), to_bf16(tl.full(code.shape, 2.0**120, tl.float32))
        )
        value = bf16_mul(raised, scale)
    return value


@triton.jit
def _decode_e2m1(pair, scale, PTX: tl.constexpr):
    """[N, B] bytes, each of two channels of one scale -> bf16 [N, 2B]."""
    if PTX:
        low, high = tl.inline_asm_elementwise(
            _PTX_E2M1, "=r,=r,=r,=r,r,r,r", [pair, scale], (tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=4,
        )  # fmt: skip
    else:
        raise_by = to_bf16(tl.full(pair.shape, 2.0**126, tl.float32))
        low = bf16_mul(bf16_mul(e2m1_to_bf16_raw(pair & 15), raise_by), scale)
        high = bf16_mul(bf16_mul(e2m1_to_bf16_raw(pair >> 4), raise_by), scale)
    return tl.interleave(low, high)


@triton.jit
def load_tile(
    cache, slot, page_stride,
    COLUMN: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """bf16 [N, BLOCK]: channels COLUMN..COLUMN+DIM-1 of the rows, zeros behind them.

    `cache` points to bf16 for bf16 rows (its `page_stride` counts those), else to bytes.
    """
    valid = (slot >= 0)[:, None]
    base = (slot // LAYOUT[3]).to(tl.int64) * page_stride
    row = slot % LAYOUT[3]
    GROUP: tl.constexpr = LAYOUT[1] if LAYOUT[1] else DIM
    FIRST: tl.constexpr = COLUMN // GROUP
    if LAYOUT[0] == "bf16":
        tile = _load(cache, base + row * (LAYOUT[4] // 2) + COLUMN, valid, DIM, BLOCK)
    elif LAYOUT[0] == "e4m3":
        scale = _scales(cache, base, row, valid, FIRST, DIM // GROUP, BLOCK // GROUP, LAYOUT)
        code = _load(cache, base + row * LAYOUT[4] + COLUMN, valid, DIM, BLOCK)
        tile = _decode_e4m3(code, _spread(scale, GROUP), PTX)
    else:
        scale = _scales(cache, base, row, valid, FIRST, DIM // GROUP, BLOCK // GROUP, LAYOUT)
        pair = _load(cache, base + row * LAYOUT[4] + COLUMN // 2, valid, DIM // 2, BLOCK // 2)
        scale = _spread(scale, GROUP // 2)
        tile = _decode_e2m1(pair, scale, PTX)
    return tile
