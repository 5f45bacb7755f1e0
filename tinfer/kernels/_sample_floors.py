"""The kernels that draw exactly: sums of floored masses per slice, then the token.

The last one reads the slices' sums, of which it knows the shortfall to 2^31, finds
the slice in which the random word falls, and computes the masses of that slice once more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._masses import (
    INFINITY,
    divide,
    first_word,
    lane_sum,
    min_p_threshold,
    reciprocal,
    slope_of,
    weight_q31,
)
from tinfer.kernels._sample_slices import (
    CUT_ID,
    KEPT,
    MASS,
    MODE,
    ROW_FIRST,
    SAMPLED,
    load_slices,
    load_tile,
)


@triton.jit
def load_record(
    row,
    temperature,
    min_p,
    record32,
    record_x,
    kept_total,
    CLOSED: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
):
    """What `floor_mass` needs of a sampled row, loaded once.

    Rows that nothing closes have no cut; `kept_total` then is their slices' int64 sums.
    """
    cut, cut_id = tl.full([], -INFINITY, tl.float32), tl.full([], 0, tl.int32)
    if CLOSED:
        total = tl.load(kept_total + row)
        cut, cut_id = tl.load(record_x + row * 2 + 1), tl.load(record32 + row * 4 + CUT_ID)
    else:
        total = tl.sum(load_slices(kept_total, row, KEPT, SLICES, PADDED))
    slope, top = slope_of(tl.load(temperature + row)), tl.load(record_x + row * 2)
    return slope, tl.load(min_p + row), top, cut, cut_id, total, reciprocal(total)


@triton.jit
def floor_mass(x, column, record):
    """uint32 floor(w * 2^31 / W') of a sampled row's logits, 0 where they are cut."""
    slope, floor, top, cut, cut_id, total, inverse = record
    w = weight_q31(x, top, slope)
    if (cut > -INFINITY) | (floor > 0):
        keep = (x > cut) | ((x == cut) & (column <= cut_id))
        w = tl.where(keep & (w >= min_p_threshold(floor)), w, 0)
    return divide(w, total, inverse)


@triton.jit
def slice_masses(part32, row, SLICES: tl.constexpr, PADDED: tl.constexpr):
    """int64 [PADDED] sums of the floored masses of every slice."""
    return load_slices(part32, row, MASS, SLICES, PADDED).to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _sample_floors_kernel(
    logits,  # fp32 | bf16 [B, V]
    temperature,  # fp32 [B]
    min_p,  # fp32 [B]
    record32,  # int32 [B, 4]
    record_x,  # fp32 [B, 2]: the row's maximum, the last kept logit
    kept_total,  # int64 [B], or [B, 3, SLICES] where no cut closes the rows
    part32,  # int32 [B, 3, SLICES]
    stride,
    V,
    CLOSED: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = (tl.program_id(0) // SLICES).to(tl.int64)
    s = tl.program_id(0) % SLICES
    total = lane_sum(tl.zeros([TILE], tl.int32), TILE)
    if tl.load(record32 + row * 4 + MODE) == SAMPLED:
        record = load_record(
            row, temperature, min_p, record32, record_x, kept_total, CLOSED, SLICES, PADDED
        )
        for i in range(BLOCK // TILE):
            column = s * BLOCK + i * TILE + tl.arange(0, TILE)
            mass = floor_mass(load_tile(logits + row * stride, column, V), column, record)
            total += lane_sum(mass.to(tl.int32, bitcast=True), TILE)
    tl.store(part32 + (row * 3 + MASS) * SLICES + s, tl.sum(total))


@triton.jit
def _sample_draw_kernel(
    logits,  # fp32 | bf16 [B, V]
    temperature,  # fp32 [B]
    min_p,  # fp32 [B]
    seeds,  # int64 [B]
    positions,  # int64 [B]
    tokens,  # int64 [B]
    record32,  # int32 [B, 4]
    record_x,  # fp32 [B, 2]
    kept_total,  # int64 [B], or [B, 3, SLICES] where no cut closes the rows
    part32,  # int32 [B, 3, SLICES]
    stride,
    V,
    PURPOSE: tl.constexpr,
    CLOSED: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(record32 + row * 4 + MODE) == SAMPLED:
        first = tl.load(record32 + row * 4 + ROW_FIRST)
        word = first_word(tl.load(seeds + row), tl.load(positions + row), PURPOSE)
        target = word & 0x7FFFFFFF
        s = tl.arange(0, PADDED)
        part = slice_masses(part32, row, SLICES, PADDED)
        rest = 2147483648 - tl.sum(part)
        part += tl.where(s == first // BLOCK, rest, 0)
        upto = tl.cumsum(part)
        mine = tl.sum((upto <= target).to(tl.int32))
        before = tl.sum(tl.where(s == mine, upto - part, 0))
        column = mine * BLOCK + tl.arange(0, BLOCK)
        record = load_record(
            row, temperature, min_p, record32, record_x, kept_total, CLOSED, SLICES, PADDED
        )
        mass = floor_mass(load_tile(logits + row * stride, column, V), column, record)
        mass = mass.to(tl.int32, bitcast=True) + tl.where(column == first, rest.to(tl.int32), 0)
        # A sum of 2^31 wraps; one less is compared, with a target that is below 2^31.
        passed = tl.cumsum(mass) - 1 >= (target - before).to(tl.int32)
        token = mine * BLOCK + tl.sum((passed == 0).to(tl.int32))
        tl.store(tokens + row, token.to(tl.int64))
