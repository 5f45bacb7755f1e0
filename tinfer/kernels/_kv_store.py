"""The kernel that quantizes cache rows and stores them, norm and rotation fused.

Rows are held in units, see `_kv_units`. Everything is loaded before the first value is used: a
row takes the latency of two loads, its own and, behind its position, the rotation's.

H200, L2 cold, 4096 rows, with norm and rotation (beside a copy of the same bytes, 6.1 us): e4m3 of
512 channels 7.7 us, e2m1 without the norm 6.9; index keys 5.9 (copy 5.0). Without either 6.4, 6.7
and 5.1. The norm and the rotation are bound by instructions: 40,960 rows take 29.2 us of e4m3 and
24.9 of e2m1 where a copy takes 20.5 and 18.2, and 22.5 and 20.1 without them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._e2m1_bf16 import e2m1_bytes, e2m1_scale
from tinfer.kernels._jit import e4m3_encode, to_bf16, to_fp32
from tinfer.kernels._kv_units import (
    first_cast,
    group_amax,
    inside,
    load_parts,
    load_turns,
    norm_parts,
    rotate_parts,
)
from tinfer.kernels._quant import divide, group_scale


@triton.jit
def _store_scales(at, scale, mask, SCALE: tl.constexpr):
    """One byte each, or the four of an fp32 at addresses of any alignment."""
    if SCALE == "fp32" or SCALE == "fp32_pow2":
        bits = scale.to(tl.uint32, bitcast=True)
        for i in tl.static_range(4):
            tl.store(at + i, ((bits >> (8 * i)) & 0xFF).to(tl.uint8), mask=mask)
    else:
        tl.store(at, scale, mask=mask)


@triton.jit
def _store_parts(
    parts, first, slot, cache_ptr, page_stride, DIM: tl.constexpr, DP: tl.constexpr,
    VALUE: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, PAGE: tl.constexpr,
    DATA_STRIDE: tl.constexpr, SCALE_BASE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    PARTS: tl.constexpr, CHUNK: tl.constexpr, NATIVE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Quantize units and write them into their rows' slots (int64 [units], -1 skips)."""
    live = slot >= 0
    page, row = slot // PAGE, slot % PAGE
    page_ptr = cache_ptr + page * page_stride
    data_ptr = page_ptr + row * DATA_STRIDE
    if VALUE == "bf16":
        for c in tl.static_range(PARTS):
            channel = first + c * CHUNK
            at = (data_ptr + channel)[:, None] + tl.arange(0, CHUNK)[None, :]
            tl.store(at, to_bf16(parts[c]), mask=live[:, None] & inside(channel, DIM, CHUNK))
    else:
        amax = group_amax(parts, PARTS, GROUP // (PARTS * CHUNK))
        if VALUE == "e2m1":
            scale, twice = e2m1_scale(amax, SCALE, NATIVE)
        else:
            scale, value, inverse = group_scale(amax, VALUE, SCALE)
        for c in tl.static_range(PARTS):
            channel = first + c * CHUNK
            if VALUE == "e2m1":
                codes = e2m1_bytes(parts[c], twice, PTX)
            else:
                scaled = divide(parts[c], value[:, None], inverse[:, None], VALUE, SCALE)
                codes = e4m3_encode(scaled, NATIVE)
            mask = live[:, None] & inside(channel, DIM, CHUNK)
            at = channel * codes.shape[1] // CHUNK
            at = (data_ptr + at)[:, None] + tl.arange(0, codes.shape[1])[None, :]
            tl.store(at, codes, mask=mask)
        at = page_ptr + SCALE_BASE + row * SCALE_STRIDE
        each = 4 if SCALE == "fp32" or SCALE == "fp32_pow2" else 1
        mask = live & (first % GROUP == 0) & (first < DIM)
        _store_scales(at + first // GROUP * each, scale, mask, SCALE)


@triton.jit
def _store_units(
    tile, FROM: tl.constexpr, SPAN: tl.constexpr, LIMIT: tl.constexpr, TURN: tl.constexpr,
    x_ptr, weight_ptr, cos_sin_ptr, positions_ptr, slots_ptr, cache_ptr,
    tokens, x_stride, cos_sin_stride, page_stride, eps,
    DIM: tl.constexpr, DP: tl.constexpr, ROPE: tl.constexpr, FIRST_GROUP: tl.constexpr,
    FIRST_SCALE: tl.constexpr, VALUE: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    PAGE: tl.constexpr, DATA_STRIDE: tl.constexpr, SCALE_BASE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
    NATIVE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Channels FROM .. of a tile's rows, SPAN apart from row to row, those below LIMIT."""
    WIDTH: tl.constexpr = PARTS * CHUNK
    UNITS: tl.constexpr = SPAN // WIDTH  # of a row
    unit = tl.arange(0, ROWS * DP // WIDTH)
    first = FROM + unit % UNITS * WIDTH
    token = (tile * (ROWS * DP // SPAN) + unit // UNITS).to(tl.int64)
    exists = token < tokens
    if LIMIT < FROM + SPAN:
        exists = exists & (first < LIMIT)
    parts = load_parts(x_ptr + token * x_stride, first, exists, DIM, DP, PARTS, CHUNK)
    if weight_ptr is not None:
        weights = load_parts(weight_ptr, first, first < DIM, DIM, DP, PARTS, CHUNK)
    tl.debug_barrier()  # else the compiler lets the rows wait for the positions
    slot = tl.load(slots_ptr + token, mask=exists, other=-1).to(tl.int64)
    if TURN:
        position = tl.load(positions_ptr + token, mask=exists, other=0).to(tl.int64)
        coss, sins = load_turns(
            cos_sin_ptr, position, first, slot >= 0, cos_sin_stride, DIM, DP, ROPE, PARTS, CHUNK
        )
        tl.debug_barrier()
    if VALUE != "bf16" or weight_ptr is not None or TURN:
        values = ()
        for c in tl.static_range(PARTS):
            values = values + (to_fp32(parts[c]),)  # noqa: RUF005
        parts = values
    if weight_ptr is not None:
        parts = norm_parts(parts, weights, eps, DIM, UNITS, PARTS, NATIVE)
    if TURN:
        parts = rotate_parts(parts, coss, sins, first, DIM, DP, ROPE, PARTS, CHUNK, NATIVE)
    if FIRST_GROUP > 0:
        parts = first_cast(parts, FIRST_GROUP, FIRST_SCALE, PARTS, CHUNK, NATIVE)
    _store_parts(
        parts, first, slot, cache_ptr, page_stride, DIM, DP, VALUE, GROUP, SCALE, PAGE,
        DATA_STRIDE, SCALE_BASE, SCALE_STRIDE, PARTS, CHUNK, NATIVE, PTX,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def store_kv_kernel(
    x_ptr,  # bf16 [T, DIM]
    weight_ptr,  # [DIM] or None
    cos_sin_ptr,  # fp32 [L, ROPE] or None
    positions_ptr,  # int32 or int64 [T] or None
    slots_ptr,  # int32 or int64 [T]
    cache_ptr,  # uint8 pages, or bf16 pages for bf16 rows
    tokens,
    x_stride,
    cos_sin_stride,
    page_stride,
    eps,
    DIM: tl.constexpr,
    DP: tl.constexpr,
    ROPE: tl.constexpr,
    FIRST_GROUP: tl.constexpr,
    FIRST_SCALE: tl.constexpr,
    VALUE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    PAGE: tl.constexpr,
    DATA_STRIDE: tl.constexpr,
    SCALE_BASE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    NATIVE: tl.constexpr,
    PTX: tl.constexpr,
    SPLIT: tl.constexpr,  # the rotated channels of many rows in programs of their own
):
    if SPLIT:
        turning = tl.cdiv(tokens, ROWS * DP // ROPE)
        if tl.program_id(0) < turning:
            _store_units(
                tl.program_id(0), DIM - ROPE, ROPE, DIM, True,
                x_ptr, weight_ptr, cos_sin_ptr, positions_ptr, slots_ptr, cache_ptr,
                tokens, x_stride, cos_sin_stride, page_stride, eps, DIM, DP, ROPE,
                FIRST_GROUP, FIRST_SCALE, VALUE, GROUP, SCALE, PAGE, DATA_STRIDE, SCALE_BASE,
                SCALE_STRIDE, ROWS, PARTS, CHUNK, NATIVE, PTX,
            )  # fmt: skip
        else:
            _store_units(
                tl.program_id(0) - turning, 0, DP, DIM - ROPE, False,
                x_ptr, weight_ptr, cos_sin_ptr, positions_ptr, slots_ptr, cache_ptr,
                tokens, x_stride, cos_sin_stride, page_stride, eps, DIM, DP, ROPE,
                FIRST_GROUP, FIRST_SCALE, VALUE, GROUP, SCALE, PAGE, DATA_STRIDE, SCALE_BASE,
                SCALE_STRIDE, ROWS, PARTS, CHUNK, NATIVE, PTX,
            )  # fmt: skip
    else:
        _store_units(
            tl.program_id(0), 0, DP, DIM, cos_sin_ptr is not None,
            x_ptr, weight_ptr, cos_sin_ptr, positions_ptr, slots_ptr, cache_ptr,
            tokens, x_stride, cos_sin_stride, page_stride, eps, DIM, DP, ROPE,
            FIRST_GROUP, FIRST_SCALE, VALUE, GROUP, SCALE, PAGE, DATA_STRIDE, SCALE_BASE,
            SCALE_STRIDE, ROWS, PARTS, CHUNK, NATIVE, PTX,
        )  # fmt: skip
