"""Kernels over slices of rows that turn logits into integer masses, and the record of a row.

Every row is cut into slices of BLOCK columns, one program each, which works in tiles:

1. stats    a slice's maximum and its first index; for rows with top-k or top-p the number of
            logits in each of 128 bins of a quarter octave of probability below that maximum.
2. weights  sums of the exact weights, now that the row's maximum is known. The bins' counts tell
            about where the cut is; the exact weights of that range are added up in finer bins.
3. row      (`_sample_row`) the exact last candidate kept and the kept weights' sum; rows without
            a cut are mostly drawn from at once.
4. floors   for the others: sums of the masses after division, whose shortfall goes to the first
            candidate.

Bins only direct the search. Every sum that decides anything is of integers, so neither the
split nor the order of the atomics shows in a result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._jit import to_fp32
from tinfer.kernels._masses import (
    GREEDY_BELOW,
    INFINITY,
    NO_LIMIT,
    divide,
    lane_sum,
    min_p_threshold,
    reciprocal,
    slope_of,
    top_k_limit,
    wants_cut,
    weight_q31,
)

BINS = tl.constexpr(256)  # of an eighth of an octave: 32 octaves, all that have a weight
FINE = tl.constexpr(512)  # bins of the range around the cut
HEAD = tl.constexpr(2048)  # the range reaches down to this many candidates at least
AHEAD = tl.constexpr(8192)  # ... and up to the first one unless more than these come before
# Planes of the per-slice sums.
TOP_BIN, COUNT, ABOVE_COUNT, MASS = (tl.constexpr(i) for i in range(4))
TOTAL, KEPT, ABOVE = (tl.constexpr(i) for i in range(3))
# Columns of the per-row record.
STATUS, ROW_FIRST, CUT_ID, MODE = (tl.constexpr(i) for i in range(4))
ENDED, GREEDY, SAMPLED, DRAWN = (tl.constexpr(i) for i in range(4))


@triton.jit
def load_tile(row_start, column, V):
    """fp32 logits of some columns, -inf beyond the row."""
    return to_fp32(tl.load(row_start + column, mask=column < V, other=-INFINITY))


@triton.jit
def load_slices(part, row, plane, PLANES: tl.constexpr, SLICES: tl.constexpr, PADDED: tl.constexpr):
    """[PADDED] values of one plane of a row's per-slice sums, 0 beyond the slices."""
    s = tl.arange(0, PADDED)
    return tl.load(part + (row * PLANES + plane) * SLICES + s, mask=s < SLICES, other=0)


@triton.jit
def scaled(x, slope):
    """fp32 eighths of an octave of probability on an absolute scale, clamped."""
    return tl.maximum(tl.minimum(x * (slope * 8.0), 536870912.0), -536870912.0)


@triton.jit
def range_edges(ranges, row):
    """(low, high, fine bins per unit) of a row's range: low <= t < high."""
    top_bin, upper = tl.load(ranges + row * 4), tl.load(ranges + row * 4 + 1)
    lower = tl.load(ranges + row * 4 + 2)
    low = tl.where(lower >= BINS - 1, -INFINITY, (top_bin - lower).to(tl.float32))
    scale = (FINE * 1.0) / (lower - upper + 1).to(tl.float32)
    return low, (top_bin + 1 - upper).to(tl.float32), scale


@triton.jit
def fine_bin(t, high, scale):
    """int32 bin 0..FINE-1 of scaled logits within the range."""
    return tl.minimum((high - t) * scale, FINE - 1.0).to(tl.int32)


@triton.jit
def _sample_stats_kernel(
    logits,  # fp32 | bf16 [B, V]
    temperature,  # fp32 [B]
    top_k,  # int32 [B]
    top_p,  # fp32 [B]
    maxima,  # fp32 [B, SLICES]; +inf where the slice holds a NaN
    estimates,  # fp32 [B, SLICES]
    part32,  # int32 [B, 4, SLICES]
    bins,  # int32 [B, SLICES, BINS]
    fine_weight,  # int64 [B, FINE]
    fine_count,  # int32 [B, FINE]
    counters,  # int32 [B]
    stride,
    V,
    MAY_CUT: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    row = (tl.program_id(0) // SLICES).to(tl.int64)
    s = tl.program_id(0) % SLICES
    source = logits + row * stride
    x = load_tile(source, s * BLOCK + tl.arange(0, BLOCK), V)
    t, p, k = tl.load(temperature + row), tl.load(top_p + row), tl.load(top_k + row)
    top, slope = tl.max(tl.where(x != x, INFINITY, x)), slope_of(t)
    estimate = tl.sum(tl.where(x == -INFINITY, 0.0, tl.exp2((x - top) * slope)))
    tl.store(maxima + row * SLICES + s, top)
    tl.store(estimates + row * SLICES + s, estimate)
    if MAY_CUT & (t >= GREEDY_BELOW) & wants_cut(k, p, V):
        top_bin = tl.floor(scaled(top, slope)).to(tl.int32)
        sampled = load_tile(source, s * BLOCK + tl.arange(0, SAMPLE), V)
        depth = top_bin - tl.floor(scaled(sampled, slope)).to(tl.int32)
        depth = tl.maximum(tl.minimum(depth, BINS - 1), 0)
        tl.store(part32 + (row * 4 + TOP_BIN) * SLICES + s, top_bin)
        tl.store(bins + (row * SLICES + s) * BINS + tl.arange(0, BINS), tl.histogram(depth, BINS))
        SHARE: tl.constexpr = FINE // triton.next_power_of_2(SLICES)
        for start in range(s * SHARE, FINE, SLICES * SHARE):
            fine = row * FINE + start + tl.arange(0, SHARE)
            tl.store(fine_weight + fine, tl.zeros([SHARE], tl.int64))
            tl.store(fine_count + fine, tl.zeros([SHARE], tl.int32))
        if s == 0:
            tl.store(counters + row, 0)


@triton.jit
def _sample_weights_kernel(
    logits,  # fp32 | bf16 [B, V]
    temperature,  # fp32 [B]
    top_k,  # int32 [B]
    top_p,  # fp32 [B]
    min_p,  # fp32 [B]
    part32,  # int32 [B, 4, SLICES]
    part64,  # int64 [B, 3, SLICES]
    fine_weight,  # int64 [B, FINE]
    fine_count,  # int32 [B, FINE]
    ranges,  # int32 [B, 4]
    record32,  # int32 [B, 4]
    record_x,  # fp32 [B, 2]
    stride,
    V,
    CUTS: tl.constexpr,  # serve the rows with top-k or top-p, or the others
    SLICES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = (tl.program_id(0) // SLICES).to(tl.int64)
    s = tl.program_id(0) % SLICES
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    mine = wants_cut(k, p, V) == CUTS
    if mine & (tl.load(record32 + row * 4 + MODE) == SAMPLED):
        slope, top = slope_of(tl.load(temperature + row)), tl.load(record_x + row * 2)
        floor = tl.load(min_p + row)
        least = min_p_threshold(floor)
        total = lane_sum(tl.zeros([TILE], tl.int64), TILE)
        kept, count, above = total, lane_sum(tl.zeros([TILE], tl.int32), TILE), total
        above_count = count
        if CUTS:
            low, high, scale = range_edges(ranges, row)
            # Counts are for top-k, and for seeing that few candidates are kept.
            counts = (top_k_limit(k, V) < NO_LIMIT) | (tl.load(ranges + row * 4 + 1) == 0)
        for i in range(BLOCK // TILE):
            column = s * BLOCK + i * TILE + tl.arange(0, TILE)
            x = load_tile(logits + row * stride, column, V)
            w = weight_q31(x, top, slope)
            total += lane_sum(w.to(tl.int64), TILE)
            if floor > 0:
                enough = w >= least
                kept += lane_sum(tl.where(enough, w, 0).to(tl.int64), TILE)
                count += lane_sum(enough.to(tl.int32), TILE)
            if CUTS:
                t = scaled(x, slope)
                before = (t >= high) & (column < V)
                inside = (t >= low) & (t < high) & (column < V)
                fine = fine_bin(t, high, scale)
                above += lane_sum(tl.where(before, w, 0).to(tl.int64), TILE)
                at = fine_weight + row * FINE + fine
                tl.atomic_add(at, w.to(tl.int64), mask=inside, sem="relaxed")
                if counts:
                    above_count += lane_sum(before.to(tl.int32), TILE)
                    tl.atomic_add(fine_count + row * FINE + fine, 1, mask=inside, sem="relaxed")
        whole, columns = tl.sum(total), tl.minimum(V - s * BLOCK, BLOCK)
        tl.store(part64 + (row * 3 + TOTAL) * SLICES + s, whole)
        kept_sum = tl.where(floor > 0, tl.sum(kept), whole)
        tl.store(part64 + (row * 3 + KEPT) * SLICES + s, kept_sum)
        enough_sum = tl.where(floor > 0, tl.sum(count), columns)
        tl.store(part32 + (row * 4 + COUNT) * SLICES + s, enough_sum)
        if CUTS:
            tl.store(part64 + (row * 3 + ABOVE) * SLICES + s, tl.sum(above))
            tl.store(part32 + (row * 4 + ABOVE_COUNT) * SLICES + s, tl.sum(above_count))


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
        total = tl.sum(load_slices(kept_total, row, KEPT, 3, SLICES, PADDED))
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
def _sample_floors_kernel(
    logits,  # fp32 | bf16 [B, V]
    temperature,  # fp32 [B]
    min_p,  # fp32 [B]
    record32,  # int32 [B, 4]
    record_x,  # fp32 [B, 2]: the row's maximum, the last kept logit
    kept_total,  # int64 [B], or [B, 3, SLICES] where no cut closes the rows
    part32,  # int32 [B, 4, SLICES]
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
    mode = tl.load(record32 + row * 4 + MODE)
    if mode == SAMPLED:
        record = load_record(
            row, temperature, min_p, record32, record_x, kept_total, CLOSED, SLICES, PADDED
        )
        total = lane_sum(tl.zeros([TILE], tl.int32), TILE)
        for i in range(BLOCK // TILE):
            column = s * BLOCK + i * TILE + tl.arange(0, TILE)
            mass = floor_mass(load_tile(logits + row * stride, column, V), column, record)
            total += lane_sum(mass.to(tl.int32, bitcast=True), TILE)
        tl.store(part32 + (row * 4 + MASS) * SLICES + s, tl.sum(total))
    else:
        tl.store(part32 + (row * 4 + MASS) * SLICES + s, 0)
