"""Kernels over slices of rows that turn logits into integer weights, and what is kept of a row.

Every row is cut into slices of BLOCK columns, one program each:

1. stats    a slice's maximum, and an estimate of its weights' sum.
2. row      (`_sample_row`) status and first maximum of a row. Rows without a cut are mostly drawn
            from at once; of the others a sample tells about where the cut is.
3. weights  sums of the exact weights; those of the range around the cut also in fine bins.
4. cut      (`_sample_scan`, `_sample_cut`) the exact last candidate kept and the kept weights'
            sum; then most rows are drawn from.
5. floors   (`_sample_floors`) for those that are not: sums of the masses after division, whose
            shortfall goes to the first candidate; then the draw.

Estimates and bins only direct the search. Every sum that decides anything is of integers, so
neither the split nor the order of the atomics shows in a result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._jit import to_fp32
from tinfer.kernels._masses import (
    INFINITY,
    NO_LIMIT,
    lane_sum,
    min_p_threshold,
    octaves_q24,
    slope_of,
    top_k_limit,
    wants_cut,
    weight_of,
)

FINE = tl.constexpr(512)  # bins of the range around the cut
LOWEST = tl.constexpr(-(2.0**127))
# Planes of the per-slice sums.
COUNT, ABOVE_COUNT, MASS = (tl.constexpr(i) for i in range(3))
TOTAL, KEPT, ABOVE = (tl.constexpr(i) for i in range(3))
# Columns of the per-row record.
STATUS, ROW_FIRST, CUT_ID, MODE = (tl.constexpr(i) for i in range(4))
ENDED, GREEDY, SAMPLED, DRAWN = (tl.constexpr(i) for i in range(4))
# Columns of a row's range: its upper edge, its width and log2 of that of a fine bin, all in 2^24 of
# an octave.
START, SPAN, SHIFT = (tl.constexpr(i) for i in range(3))


@triton.jit
def load_tile(row_start, column, V):
    """fp32 logits of some columns, -inf beyond the row."""
    return to_fp32(tl.load(row_start + column, mask=column < V, other=-INFINITY))


@triton.jit
def load_slices(part, row, plane, SLICES: tl.constexpr, PADDED: tl.constexpr):
    """[PADDED] values of one of the three planes of per-slice sums, 0 beyond the slices."""
    s = tl.arange(0, PADDED)
    return tl.load(part + (row * 3 + plane) * SLICES + s, mask=s < SLICES, other=0)


@triton.jit
def _sample_stats_kernel(
    logits,  # fp32 | bf16 [B, V]
    temperature,  # fp32 [B]
    maxima,  # fp32 [B, SLICES]; +inf where the slice holds a NaN
    estimates,  # fp32 [B, SLICES]
    fine_weight,  # int64 [B, FINE]
    fine_count,  # int32 [B, FINE]
    counters,  # int32 [B]
    stride,
    V,
    MAY_CUT: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // SLICES).to(tl.int64)
    s = tl.program_id(0) % SLICES
    x = load_tile(logits + row * stride, s * BLOCK + tl.arange(0, BLOCK), V)
    slope = slope_of(tl.load(temperature + row))
    top = tl.max(tl.where(x != x, INFINITY, x))
    estimate = tl.sum(tl.exp2((x - tl.maximum(top, LOWEST)) * slope))
    tl.store(maxima + row * SLICES + s, top)
    tl.store(estimates + row * SLICES + s, estimate)
    if MAY_CUT:
        if s == 0:
            tl.store(counters + row, 0)
        SHARE: tl.constexpr = FINE // triton.next_power_of_2(SLICES)
        for start in range(s * SHARE, FINE, SLICES * SHARE):
            fine = row * FINE + start + tl.arange(0, SHARE)
            tl.store(fine_weight + fine, tl.zeros([SHARE], tl.int64))
            tl.store(fine_count + fine, tl.zeros([SHARE], tl.int32))


@triton.jit
def _add_to_fine_bins(q, w, fine_weight, fine_count, start, span, shift, counts):
    """Add up the candidates within a range by fine bins; `counts` also counts them."""
    depth = (start - q).to(tl.uint32, bitcast=True)
    inside = depth < span.to(tl.uint32, bitcast=True)
    at = (depth >> shift.to(tl.uint32)).to(tl.int32)
    tl.atomic_add(fine_weight + at, w.to(tl.int64), mask=inside, sem="relaxed")
    if counts:
        tl.atomic_add(fine_count + at, 1, mask=inside, sem="relaxed")


@triton.jit
def _add_weights(
    source,
    begin,
    V,
    top,
    slope,
    floor,
    fine_weight,
    fine_count,
    start,
    span,
    shift,
    counts,
    CUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sums over a slice: (weights, those that min-p keeps, their count, above the range, count)."""
    total, none = (
        lane_sum(tl.zeros([TILE], tl.int64), TILE),
        lane_sum(tl.zeros([TILE], tl.int32), TILE),
    )
    kept, count, above, above_count = total, none, total, none
    least = min_p_threshold(floor)
    for i in range(BLOCK // TILE):
        x = load_tile(source, begin + i * TILE + tl.arange(0, TILE), V)
        q = octaves_q24(x, top, slope)
        w = weight_of(q)
        total += lane_sum(w.to(tl.int64), TILE)
        if floor > 0:
            enough = w >= least
            kept += lane_sum(tl.where(enough, w, 0).to(tl.int64), TILE)
            count += lane_sum(enough.to(tl.int32), TILE)
        if CUTS:
            before = q > start
            above += lane_sum(tl.where(before, w, 0).to(tl.int64), TILE)
            if counts:
                above_count += lane_sum(before.to(tl.int32), TILE)
            _add_to_fine_bins(q, w, fine_weight, fine_count, start, span, shift, counts)
    return tl.sum(total), tl.sum(kept), tl.sum(count), tl.sum(above), tl.sum(above_count)


@triton.jit
def _sample_weights_kernel(
    logits,  # fp32 | bf16 [B, V]
    temperature,  # fp32 [B]
    top_k,  # int32 [B]
    top_p,  # fp32 [B]
    min_p,  # fp32 [B]
    part32,  # int32 [B, 3, SLICES]
    part64,  # int64 [B, 3, SLICES]
    fine_weight,  # int64 [B, FINE]
    fine_count,  # int32 [B, FINE]
    ranges,  # int32 [B, 3]
    record32,  # int32 [B, 4]
    record_x,  # fp32 [B, 2]
    stride,
    V,
    MAY_CUT: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = (tl.program_id(0) // SLICES).to(tl.int64)
    s = tl.program_id(0) % SLICES
    if tl.load(record32 + row * 4 + MODE) == SAMPLED:
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        slope, top = slope_of(tl.load(temperature + row)), tl.load(record_x + row * 2)
        floor, source, begin = tl.load(min_p + row), logits + row * stride, s * BLOCK
        bins = fine_weight + row * FINE, fine_count + row * FINE
        cuts = wants_cut(k, p, V)
        if MAY_CUT & cuts:
            start, span = tl.load(ranges + row * 3 + START), tl.load(ranges + row * 3 + SPAN)
            shift = tl.load(ranges + row * 3 + SHIFT)
            # Counts are for top-k, and for seeing that few candidates are kept.
            counts = (top_k_limit(k, V) < NO_LIMIT) | (start == 0)
            total, kept, count, above, above_count = _add_weights(
                source,
                begin,
                V,
                top,
                slope,
                floor,
                *bins,
                start,
                span,
                shift,
                counts,
                True,
                BLOCK,
                TILE,
            )
            tl.store(part64 + (row * 3 + ABOVE) * SLICES + s, above)
            tl.store(part32 + (row * 3 + ABOVE_COUNT) * SLICES + s, above_count)
        else:
            total, kept, count, above, above_count = _add_weights(
                source, begin, V, top, slope, floor, *bins, 0, 0, 0, False, False, BLOCK, TILE
            )
        tl.store(part64 + (row * 3 + TOTAL) * SLICES + s, total)
        tl.store(part64 + (row * 3 + KEPT) * SLICES + s, tl.where(floor > 0, kept, total))
        columns = tl.minimum(V - begin, BLOCK)
        tl.store(part32 + (row * 3 + COUNT) * SLICES + s, tl.where(floor > 0, count, columns))
