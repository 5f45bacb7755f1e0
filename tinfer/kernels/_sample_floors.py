"""The kernels of exact masses: their sums per slice, the draw from them, and all of them.

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
    octaves_and_weight,
    reciprocal,
    slope_of,
)
from tinfer.kernels._sample_slices import (
    BEGIN,
    CUT_ID,
    END,
    ENDED,
    MASS,
    MODE,
    ROW_FIRST,
    SAMPLED,
    await_previous,
    load_slices,
    load_tile,
)


@triton.jit
def load_record(row, temperature, min_p, record32, record_x, kept_total):
    """What `floor_mass` needs of a sampled row, loaded once."""
    total = tl.load(kept_total + row)
    cut, cut_id = tl.load(record_x + row * 2 + 1), tl.load(record32 + row * 6 + CUT_ID)
    slope, top = slope_of(tl.load(temperature + row)), tl.load(record_x + row * 2)
    return slope, tl.load(min_p + row), top, cut, cut_id, total, reciprocal(total)


@triton.jit
def floor_mass(x, column, record, NATIVE: tl.constexpr):
    """uint32 floor(w * 2^31 / W') of a sampled row's logits, 0 where they are cut."""
    slope, floor, top, cut, cut_id, total, inverse = record
    _, w = octaves_and_weight(x, top, slope, NATIVE)
    if (cut > -INFINITY) | (floor > 0):
        keep = (x > cut) | ((x == cut) & (column <= cut_id))
        w = tl.where(keep & (w >= min_p_threshold(floor)), w, 0)
    return divide(w, total, inverse)


@triton.jit
def slice_masses(part32, row, SLICES: tl.constexpr, PADDED: tl.constexpr):
    """int64 [PADDED] sums of the floored masses of every slice."""
    return load_slices(part32, row, MASS, SLICES, PADDED).to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _floors_of_slice(
    source, s, V, record, NATIVE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """The 32 bits of a slice's sum of floored masses."""
    total = lane_sum(tl.zeros([TILE], tl.int32), TILE)
    for i in range(BLOCK // TILE):
        column = s * BLOCK + i * TILE + tl.arange(0, TILE)
        mass = floor_mass(load_tile(source, column, V), column, record, NATIVE)
        total += lane_sum(mass.to(tl.int32, bitcast=True), TILE)
    return tl.sum(total)


@triton.jit
def _sample_floors_kernel(
    logits,  # fp32 | bf16 [B, V]
    temperature,  # fp32 [B]
    min_p,  # fp32 [B]
    record32,  # int32 [B, 6]
    record_x,  # fp32 [B, 2]: the row's maximum, the last kept logit
    kept_total,  # int64 [B]
    part32,  # int32 [B, 3, SLICES]
    stride,
    V,
    NATIVE: tl.constexpr,
    CHAINED: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    await_previous(CHAINED)
    row = (tl.program_id(0) // SLICES).to(tl.int64)
    s = tl.program_id(0) % SLICES
    begin, end = tl.load(record32 + row * 6 + BEGIN), tl.load(record32 + row * 6 + END)
    total = tl.full([], 0, tl.int32)
    if (tl.load(record32 + row * 6 + MODE) == SAMPLED) & (s >= begin) & (s < end):
        record = load_record(row, temperature, min_p, record32, record_x, kept_total)
        total = _floors_of_slice(logits + row * stride, s, V, record, NATIVE, BLOCK, TILE)
    tl.store(part32 + (row * 3 + MASS) * SLICES + s, total)


@triton.jit
def _slice_of(target, part, lump_at):
    """(slice that `target` falls into, mass before it, the lump): what is missing to 2^31 is lumped
    into one slice."""
    s = tl.arange(0, part.shape[0])
    lump = 2147483648 - tl.sum(part)
    part += tl.where(s == lump_at, lump, 0)
    upto = tl.cumsum(part)
    mine = tl.sum((upto <= target).to(tl.int32))
    return mine, tl.sum(tl.where(s == mine, upto - part, 0)), lump


@triton.jit
def _sample_draw_kernel(
    logits,  # fp32 | bf16 [B, V]
    temperature,  # fp32 [B]
    min_p,  # fp32 [B]
    seeds,  # int64 [B]
    positions,  # int64 [B]
    tokens,  # int64 [B]
    record32,  # int32 [B, 6]
    record_x,  # fp32 [B, 2]
    kept_total,  # int64 [B]
    part32,  # int32 [B, 3, SLICES]
    stride,
    V,
    PURPOSE: tl.constexpr,
    NATIVE: tl.constexpr,
    CHAINED: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    await_previous(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(record32 + row * 6 + MODE) == SAMPLED:
        first = tl.load(record32 + row * 6 + ROW_FIRST)
        begin, end = tl.load(record32 + row * 6 + BEGIN), tl.load(record32 + row * 6 + END)
        word = first_word(tl.load(seeds + row), tl.load(positions + row), PURPOSE)
        target, source = word & 0x7FFFFFFF, logits + row * stride
        record = load_record(row, temperature, min_p, record32, record_x, kept_total)
        # Where not all slices have sums, the others lie on one side, the first candidate's.
        lump_at = tl.where(begin > 0, begin - 1, tl.where(end < SLICES, end, first // BLOCK))
        part = slice_masses(part32, row, SLICES, PADDED)
        mine, before, lump = _slice_of(target, part, lump_at)
        if (mine < begin) | (mine >= end):
            # The estimate was too far off.
            for s in range(SLICES):
                total = _floors_of_slice(source, s, V, record, NATIVE, BLOCK, BLOCK)
                tl.store(part32 + (row * 3 + MASS) * SLICES + s, total)
            tl.debug_barrier()
            part = slice_masses(part32, row, SLICES, PADDED)
            mine, before, lump = _slice_of(target, part, first // BLOCK)
        column = mine * BLOCK + tl.arange(0, BLOCK)
        mass = floor_mass(load_tile(source, column, V), column, record, NATIVE)
        mass = mass.to(tl.int32, bitcast=True)
        mass += tl.where(column == first, lump.to(tl.int32), 0)
        # A sum of 2^31 wraps; one less is compared, with a target that is below 2^31.
        passed = tl.cumsum(mass) - 1 >= (target - before).to(tl.int32)
        token = mine * BLOCK + tl.sum((passed == 0).to(tl.int32))
        tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def tile_masses(source, column, V, row, rows, SLICES: tl.constexpr, PADDED: tl.constexpr):
    """int64 masses of some columns of a row; `source` is the row, `rows` what `RowMasses` holds."""
    temperature, min_p, record32, record_x, kept_total, part32 = rows
    mode = tl.load(record32 + row * 6 + MODE)
    first = tl.load(record32 + row * 6 + ROW_FIRST)
    rest = 2147483648 - tl.sum(slice_masses(part32, row, SLICES, PADDED))
    mass = tl.zeros(column.shape, tl.int64)
    if mode == SAMPLED:
        record = load_record(row, temperature, min_p, record32, record_x, kept_total)
        mass = floor_mass(load_tile(source, column, V), column, record, False).to(tl.int64)
    return mass + tl.where((column == first) & (mode != ENDED), rest, 0)


@triton.jit
def _token_masses_kernel(
    logits,  # fp32 | bf16 [B, V]
    temperature,  # fp32 [B]
    min_p,  # fp32 [B]
    record32,  # int32 [B, 6]
    record_x,  # fp32 [B, 2]
    kept_total,  # int64 [B]
    part32,  # int32 [B, 3, SLICES]
    masses,  # int64 [B, V]
    stride,
    V,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = (tl.program_id(0) // SLICES).to(tl.int64)
    rows = (temperature, min_p, record32, record_x, kept_total, part32)
    for i in range(BLOCK // TILE):
        column = (tl.program_id(0) % SLICES) * BLOCK + i * TILE + tl.arange(0, TILE)
        mass = tile_masses(logits + row * stride, column, V, row, rows, SLICES, PADDED)
        tl.store(masses + row * V + column, mass, mask=column < V)
