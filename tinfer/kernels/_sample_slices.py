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
    divide,
    is_bad,
    lane_sum,
    min_p_threshold,
    reciprocal,
    slope_of,
    top_k_limit,
    wants_cut,
    weight_q31,
)

BINS = tl.constexpr(128)  # of a quarter octave: 32 octaves, all that have a weight
FINE = tl.constexpr(1024)  # bins of the range around the cut
HEAD = tl.constexpr(2048)  # the range reaches down to this many candidates at least
AHEAD = tl.constexpr(8192)  # ... and up to the first one unless more than these come before
# Planes of the per-slice sums.
FIRST, TOP_BIN, COUNT, ABOVE_COUNT, MASS = (tl.constexpr(i) for i in range(5))
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
def scaled_bin(x, slope):
    """(int32, fp32): quarter octaves of probability on an absolute scale, clamped."""
    t = tl.maximum(tl.minimum(x * (slope * 4.0), 536870912.0), -536870912.0)
    return tl.floor(t).to(tl.int32), t


@triton.jit
def fine_bin(t, top_bin, upper, lower):
    """int32 bin 0..FINE-1, finer within the coarse bins upper..lower below `top_bin`."""
    depth = (top_bin + 1 - upper).to(tl.float32) - t
    scale = (FINE * 1.0) / (lower - upper + 1).to(tl.float32)
    return tl.maximum(tl.minimum(depth * scale, FINE - 1.0), 0.0).to(tl.int32)


@triton.jit
def _locate(bins, part32, row, top_k, top_p, V, SLICES: tl.constexpr, PADDED: tl.constexpr):
    """(top_bin, upper, lower): the coarse bins of a row that should hold the cut.

    Estimated from the counts and the weights at the bins' middles.
    """
    s = tl.arange(0, PADDED)
    tops = part32 + (row * 5 + TOP_BIN) * SLICES
    top = tl.load(tops + s, mask=s < SLICES, other=-536870912)
    top_bin = tl.max(top)
    j = tl.arange(0, BINS)
    at = j[None, :] - tl.minimum(top_bin - top, BINS)[:, None]
    ok = (s < SLICES)[:, None] & (at >= 0) & (at < BINS - 1)
    counts = tl.load(bins + (row * SLICES + s[:, None]) * BINS + at, mask=ok, other=0)
    count = tl.sum(counts, axis=0)
    weight = count.to(tl.float32) * tl.exp2((j.to(tl.float32) + 0.5) * -0.25)
    before = tl.cumsum(count)
    reached = tl.cumsum(weight) > tl.sum(weight) * tl.minimum(top_p, 1.0)
    reached = reached | (before >= top_k_limit(top_k, V))
    crossing = tl.sum((reached == 0).to(tl.int32))
    lower = tl.maximum(crossing + 1, tl.sum((before <= HEAD).to(tl.int32)) - 1)
    ahead = tl.sum(tl.where(j == crossing - 2, before, 0))
    upper = tl.where(ahead <= AHEAD, 0, crossing - 1)
    return top_bin, upper, tl.minimum(lower, BINS - 1)


@triton.jit
def _sample_stats_kernel(
    logits,  # fp32 | bf16 [B, V]
    temperature,  # fp32 [B]
    top_k,  # int32 [B]
    top_p,  # fp32 [B]
    maxima,  # fp32 [B, SLICES]
    part32,  # int32 [B, 5, SLICES]
    bins,  # int32 [B, SLICES, BINS]
    fine_weight,  # int64 [B, FINE]
    fine_count,  # int32 [B, FINE]
    members,  # int32 [B]
    stride,
    V,
    SLICES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = (tl.program_id(0) // SLICES).to(tl.int64)
    s = tl.program_id(0) % SLICES
    source = logits + row * stride
    best, at = tl.full([TILE], -INFINITY, tl.float32), tl.zeros([TILE], tl.int32)
    strange = tl.zeros([TILE], tl.int32)
    for i in range(BLOCK // TILE):
        column = s * BLOCK + i * TILE + tl.arange(0, TILE)
        x = load_tile(source, column, V)
        strange |= ((x != x) | (x == INFINITY)).to(tl.int32)
        at = tl.where((x > best) | (i == 0), column, at)
        best = tl.maximum(best, x)
    top = tl.max(best)
    first = tl.min(tl.where(best == top, at, V))
    top = tl.where(tl.max(strange) > 0, INFINITY, top)
    tl.store(maxima + row * SLICES + s, top)
    tl.store(part32 + (row * 5 + FIRST) * SLICES + s, first)

    t = tl.load(temperature + row)
    if (t >= GREEDY_BELOW) & wants_cut(tl.load(top_k + row), tl.load(top_p + row), V):
        slope = slope_of(t)
        top_bin = scaled_bin(top, slope)[0]
        counts = tl.zeros([BINS], tl.int32)
        for i in range(BLOCK // TILE):
            column = s * BLOCK + i * TILE + tl.arange(0, TILE)
            depth = top_bin - scaled_bin(load_tile(source, column, V), slope)[0]
            depth = tl.maximum(tl.minimum(depth, BINS - 1), 0)
            counts += tl.histogram(depth, BINS)
        tl.store(part32 + (row * 5 + TOP_BIN) * SLICES + s, top_bin)
        tl.store(bins + (row * SLICES + s) * BINS + tl.arange(0, BINS), counts)
        SHARE: tl.constexpr = FINE // triton.next_power_of_2(SLICES)
        for start in range(s * SHARE, FINE, SLICES * SHARE):
            fine = row * FINE + start + tl.arange(0, SHARE)
            tl.store(fine_weight + fine, tl.zeros([SHARE], tl.int64))
            tl.store(fine_count + fine, tl.zeros([SHARE], tl.int32))
        if s == 0:
            tl.store(members + row, 0)


@triton.jit
def _sample_weights_kernel(
    logits,  # fp32 | bf16 [B, V]
    temperature,  # fp32 [B]
    top_k,  # int32 [B]
    top_p,  # fp32 [B]
    min_p,  # fp32 [B]
    maxima,  # fp32 [B, SLICES]
    part32,  # int32 [B, 5, SLICES]
    part64,  # int64 [B, 3, SLICES]
    bins,  # int32 [B, SLICES, BINS]
    fine_weight,  # int64 [B, FINE]
    fine_count,  # int32 [B, FINE]
    ranges,  # int32 [B, 3]
    stride,
    V,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = (tl.program_id(0) // SLICES).to(tl.int64)
    s = tl.program_id(0) % SLICES
    t, p = tl.load(temperature + row), tl.load(top_p + row)
    k, floor = tl.load(top_k + row), tl.load(min_p + row)
    slices = tl.arange(0, PADDED)
    tops = tl.load(maxima + row * SLICES + slices, mask=slices < SLICES, other=-INFINITY)
    top = tl.max(tops)
    ended = (top == INFINITY) | (top == -INFINITY) | is_bad(t, p, floor)
    if (ended == 0) & (t >= GREEDY_BELOW):
        slope, least = slope_of(t), min_p_threshold(floor)
        source = logits + row * stride
        is_cut = wants_cut(k, p, V)
        top_bin, upper = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
        lower = tl.full([], 0, tl.int32)
        if is_cut:
            top_bin, upper, lower = _locate(bins, part32, row, k, p, V, SLICES, PADDED)
        total = lane_sum(tl.zeros([TILE], tl.int64), TILE)
        kept, above, above_count, count = total, total, total, total
        for i in range(BLOCK // TILE):
            column = s * BLOCK + i * TILE + tl.arange(0, TILE)
            x = load_tile(source, column, V)
            w = weight_q31(x, top, slope)
            total += lane_sum(w.to(tl.int64), TILE)
            if floor > 0:
                enough = w >= least
                kept += lane_sum(tl.where(enough, w, 0).to(tl.int64), TILE)
                count += lane_sum(enough.to(tl.int64), TILE)
            if is_cut:
                coarse, scaled = scaled_bin(x, slope)
                depth = tl.minimum(top_bin - coarse, BINS - 1)
                before = (depth < upper) & (column < V)
                above += lane_sum(tl.where(before, w, 0).to(tl.int64), TILE)
                above_count += lane_sum(before.to(tl.int64), TILE)
                inside = (depth >= upper) & (depth <= lower) & (column < V)
                fine = row * FINE + fine_bin(scaled, top_bin, upper, lower)
                tl.atomic_add(fine_weight + fine, w.to(tl.int64), mask=inside, sem="relaxed")
                tl.atomic_add(fine_count + fine, 1, mask=inside, sem="relaxed")
        whole, columns = tl.sum(total), tl.minimum(V - s * BLOCK, BLOCK)
        tl.store(part64 + (row * 3 + TOTAL) * SLICES + s, whole)
        kept_sum = tl.where(floor > 0, tl.sum(kept), whole)
        tl.store(part64 + (row * 3 + KEPT) * SLICES + s, kept_sum)
        enough_sum = tl.where(floor > 0, tl.sum(count).to(tl.int32), columns)
        tl.store(part32 + (row * 5 + COUNT) * SLICES + s, enough_sum)
        if is_cut:
            tl.store(part64 + (row * 3 + ABOVE) * SLICES + s, tl.sum(above))
            above_sum = tl.sum(above_count).to(tl.int32)
            tl.store(part32 + (row * 5 + ABOVE_COUNT) * SLICES + s, above_sum)
            if s == 0:
                tl.store(ranges + row * 3, top_bin)
                tl.store(ranges + row * 3 + 1, upper)
                tl.store(ranges + row * 3 + 2, lower)


@triton.jit
def load_record(row, temperature, min_p, record32, record_x, kept_total):
    """What `floor_mass` needs of a sampled row, loaded once."""
    total = tl.load(kept_total + row)
    return (
        slope_of(tl.load(temperature + row)),
        tl.load(min_p + row),
        tl.load(record_x + row * 2),
        tl.load(record_x + row * 2 + 1),
        tl.load(record32 + row * 4 + CUT_ID),
        total,
        reciprocal(total),
    )


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
    kept_total,  # int64 [B]
    part32,  # int32 [B, 5, SLICES]
    stride,
    V,
    SLICES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = (tl.program_id(0) // SLICES).to(tl.int64)
    s = tl.program_id(0) % SLICES
    mode = tl.load(record32 + row * 4 + MODE)
    if mode == SAMPLED:
        record = load_record(row, temperature, min_p, record32, record_x, kept_total)
        total = lane_sum(tl.zeros([TILE], tl.int32), TILE)
        for i in range(BLOCK // TILE):
            column = s * BLOCK + i * TILE + tl.arange(0, TILE)
            mass = floor_mass(load_tile(logits + row * stride, column, V), column, record)
            total += lane_sum(mass.to(tl.int32, bitcast=True), TILE)
        tl.store(part32 + (row * 5 + MASS) * SLICES + s, tl.sum(total))
    else:
        tl.store(part32 + (row * 5 + MASS) * SLICES + s, 0)
