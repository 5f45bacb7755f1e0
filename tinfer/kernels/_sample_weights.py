"""The kernel that sums up exact weights, and what the last program of a row learns from the sums.

Where a row is cut, the weights of the range around the cut are also added up in fine bins; the
last program finds the bin in which the cut lies. A row without a cut is closed at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._masses import (
    DEAD,
    INFINITY,
    NO_LIMIT,
    lane_sum,
    min_p_threshold,
    octaves_and_weight,
    slope_of,
    top_k_limit,
    top_p_threshold,
    wants_cut,
)
from tinfer.kernels._sample_slices import (
    ABOVE,
    ABOVE_COUNT,
    COUNT,
    COUNT_BEFORE,
    CUT_ID,
    FEW,
    FINE,
    HIGHEST,
    IN_BIN,
    KEPT,
    LOWEST,
    MEMBERS,
    MISSED,
    MODE,
    NO_ID,
    NOWHERE,
    SAMPLED,
    SHIFT,
    SLICES_DONE,
    SPAN,
    START,
    THRESHOLD,
    TOTAL,
    WEIGHT_BEFORE,
    WHERE,
    await_previous,
    is_last,
    load_slices,
    load_tile,
)


@triton.jit
def _add_inside(depth, w, fine_weight, fine_count, span, shift, counts):
    """`_add_to_fine_bins` in PTX: the few candidates inside branch, the others do nothing more."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred out, uncounted;
        .reg .b32 bin;
        .reg .b64 at, weight;
        mov.b32 $0, 0;
        setp.ge.u32 out, $1, $3;
        @out bra DONE;
        shr.u32 bin, $1, $4;
        cvt.u64.u32 weight, $2;
        mad.wide.u32 at, bin, 8, $6;
        red.relaxed.gpu.global.add.u64 [at], weight;
        setp.eq.s32 uncounted, $5, 0;
        @uncounted bra DONE;
        mad.wide.u32 at, bin, 4, $7;
        red.relaxed.gpu.global.add.u32 [at], 1;
        DONE:
        }""",
        "=r,r,r,r,r,r,l,l",
        [depth, w, span, shift, counts, fine_weight, fine_count],
        tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _add_to_fine_bins(
    q, w, fine_weight, fine_count, start, span, shift, counts, DIRECT: tl.constexpr
):
    """Add up the candidates within a range by fine bins; `counts` also counts them."""
    depth = (start - q).to(tl.uint32, bitcast=True)
    if DIRECT:
        bins = fine_weight.to(tl.int64), fine_count.to(tl.int64)
        _add_inside(depth, w, *bins, span, shift, counts)
    else:
        inside = depth < span.to(tl.uint32, bitcast=True)
        at = (depth >> shift.to(tl.uint32)).to(tl.int32)
        tl.atomic_add(fine_weight + at, w.to(tl.int64), mask=inside, sem="relaxed")
        if counts:
            tl.atomic_add(fine_count + at, 1, mask=inside, sem="relaxed")


@triton.jit
def _partial(x, SPREAD: tl.constexpr, TILE: tl.constexpr):
    """What a loop adds up of [TILE] values: sums of neighbours unless threads share them."""
    if SPREAD:
        y = x
    else:
        y = lane_sum(x, TILE)
    return y


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
    FROM_TOP: tl.constexpr,
    NATIVE: tl.constexpr,
    DIRECT: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sums over a slice: (weights, those that min-p keeps, their count, above the range, count).

    FROM_TOP: the range begins at the first candidate; all of it is counted too. DIRECT: no two
    threads hold the same column, so that each adds its own to the bins.
    """
    SPREAD: tl.constexpr = CUTS and not DIRECT
    total = _partial(tl.zeros([TILE], tl.int64), SPREAD, TILE)
    count = _partial(tl.zeros([TILE], tl.int32), SPREAD, TILE)
    kept, above, above_count = total, total, count
    least = min_p_threshold(floor)
    for i in range(BLOCK // TILE):
        column = begin + i * TILE + tl.arange(0, TILE)
        if SPREAD:
            # As the atomics have it: one column per thread and step, lest threads swap weights.
            column = tl.max_contiguous(column, 1)
        q, w = octaves_and_weight(load_tile(source, column, V), top, slope, NATIVE)
        total += _partial(w.to(tl.int64), SPREAD, TILE)
        if floor > 0:
            enough = w >= least
            kept += _partial(tl.where(enough, w, 0).to(tl.int64), SPREAD, TILE)
            count += _partial(enough.to(tl.int32), SPREAD, TILE)
        if CUTS and FROM_TOP:
            _add_to_fine_bins(q, w, fine_weight, fine_count, 0, span, shift, 1, DIRECT)
        elif CUTS:
            before = q > start
            above += _partial(tl.where(before, w, 0).to(tl.int64), SPREAD, TILE)
            if counts:
                above_count += _partial(before.to(tl.int32), SPREAD, TILE)
            _add_to_fine_bins(q, w, fine_weight, fine_count, start, span, shift, counts, DIRECT)
    weight = tl.sum(total)
    enough, columns = weight, tl.minimum(V - begin, BLOCK)
    if floor > 0:
        enough, columns = tl.sum(kept), tl.sum(count)
    ahead, ahead_count = tl.full([], 0, tl.int64), tl.full([], 0, tl.int32)
    if CUTS and not FROM_TOP:
        ahead = tl.sum(above)
        if counts:
            ahead_count = tl.sum(above_count)
    return weight, enough, columns, ahead, ahead_count


@triton.jit
def _place_of_cut(
    fine_weight, fine_count, start, span, shift, above_weight, above_count, cuts, limit, threshold
):
    """(where, highest, lowest, weight before, count before, whether all kept are collected).

    The candidates to collect have `octaves_q24` in lowest..highest: those of one fine bin, or of
    all bins down to it where they are few.
    """
    # One bin per thread and step, for the compiler takes one layout for all tiles of a size.
    b = tl.max_contiguous(tl.arange(0, FINE), 1)
    weight, count = tl.load(fine_weight + b), tl.load(fine_count + b)
    weight_to = tl.cumsum(weight) + above_weight
    count_to = tl.cumsum(count) + above_count
    reached = (count_to >= limit) | (weight_to > threshold)
    wanted = tl.sum((reached == 0).to(tl.int32))
    past = (above_count >= limit) | (above_weight > threshold)
    exhausted = (wanted == FINE) & (start - span <= DEAD)
    where = tl.where(past | ((wanted == FINE) & (exhausted == 0)), MISSED, IN_BIN)
    where = tl.where((cuts == 0) | ((past == 0) & exhausted), NOWHERE, where)
    at_bin = b == wanted
    weight_before = tl.sum(tl.where(at_bin, weight_to - weight, 0))
    count_before = tl.sum(tl.where(at_bin, count_to - count, 0))
    few = (where == IN_BIN) & (start == 0)
    few = few & (tl.sum(tl.where(at_bin, count_to, 0)) <= MEMBERS)
    highest = tl.where(few, start, start - (wanted << shift))
    lowest = tl.maximum(start - ((wanted + 1) << shift), DEAD) + 1
    highest = tl.where(where == NOWHERE, DEAD, highest)
    lowest = tl.where(where == NOWHERE, DEAD + 1, lowest)
    weight_before = tl.where(few, 0, weight_before)
    return where, highest, lowest, weight_before, tl.where(few, 0, count_before), few


@triton.jit
def _store_place(
    part32,
    part64,
    fine_weight,
    fine_count,
    ranges,
    place32,
    place64,
    row,
    kept,
    top_k,
    top_p,
    V,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Store where a row's cut is; `kept` is the weight that min-p keeps."""
    limit = top_k_limit(top_k, V)
    threshold = top_p_threshold(tl.sum(load_slices(part64, row, TOTAL, SLICES, PADDED)), top_p)
    count = tl.sum(load_slices(part32, row, COUNT, SLICES, PADDED))
    where, highest, lowest, weight_before, count_before, few = _place_of_cut(
        fine_weight,
        fine_count,
        tl.load(ranges + row * 3 + START),
        tl.load(ranges + row * 3 + SPAN),
        tl.load(ranges + row * 3 + SHIFT),
        tl.sum(load_slices(part64, row, ABOVE, SLICES, PADDED)),
        tl.sum(load_slices(part32, row, ABOVE_COUNT, SLICES, PADDED)),
        (count >= limit) | (kept > threshold),
        limit,
        threshold,
    )
    place32 += row * 5
    tl.store(place32 + WHERE, where)
    tl.store(place32 + HIGHEST, highest)
    tl.store(place32 + LOWEST, lowest)
    tl.store(place32 + COUNT_BEFORE, count_before)
    tl.store(place32 + FEW, few.to(tl.int32))
    tl.store(place64 + row * 2 + WEIGHT_BEFORE, weight_before)
    tl.store(place64 + row * 2 + THRESHOLD, threshold)


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
    counters,  # int32 [B, 2]
    place32,  # int32 [B, 5]
    place64,  # int64 [B, 2]
    record32,  # int32 [B, 6]
    record_x,  # fp32 [B, 2]
    kept_total,  # int64 [B]
    stride,
    V,
    MAY_CUT: tl.constexpr,
    NATIVE: tl.constexpr,
    DIRECT: tl.constexpr,
    CHAINED: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    await_previous(CHAINED)
    row = (tl.program_id(0) // SLICES).to(tl.int64)
    s = tl.program_id(0) % SLICES
    if tl.load(record32 + row * 6 + MODE) == SAMPLED:
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        slope, top = slope_of(tl.load(temperature + row)), tl.load(record_x + row * 2)
        floor, source, begin = tl.load(min_p + row), logits + row * stride, s * BLOCK
        bins = fine_weight + row * FINE, fine_count + row * FINE
        cuts = wants_cut(k, p, V)
        if MAY_CUT & cuts:
            start, span = tl.load(ranges + row * 3 + START), tl.load(ranges + row * 3 + SPAN)
            shift = tl.load(ranges + row * 3 + SHIFT)
            # Counts are for top-k, and for seeing that few candidates are kept.
            counts = (top_k_limit(k, V) < NO_LIMIT).to(tl.int32)
            if start == 0:
                total, kept, count, above, above_count = _add_weights(
                    source, begin, V, top, slope, floor, *bins, 0, span, shift, 1, True, True,
                    NATIVE, DIRECT, BLOCK, TILE,
                )  # fmt: skip
            else:
                total, kept, count, above, above_count = _add_weights(
                    source, begin, V, top, slope, floor, *bins, start, span, shift, counts, True,
                    False, NATIVE, DIRECT, BLOCK, TILE,
                )  # fmt: skip
            tl.store(part64 + (row * 3 + ABOVE) * SLICES + s, above)
            tl.store(part32 + (row * 3 + ABOVE_COUNT) * SLICES + s, above_count)
        else:
            WIDE: tl.constexpr = min(2 * TILE, BLOCK)
            total, kept, count, above, above_count = _add_weights(
                source, begin, V, top, slope, floor, *bins, 0, 0, 0, 0, False, False, NATIVE,
                DIRECT, BLOCK, WIDE,
            )  # fmt: skip
        tl.store(part64 + (row * 3 + TOTAL) * SLICES + s, total)
        tl.store(part64 + (row * 3 + KEPT) * SLICES + s, kept)
        tl.store(part32 + (row * 3 + COUNT) * SLICES + s, count)
        if is_last(counters + row * 2 + SLICES_DONE, SLICES):
            kept = tl.sum(load_slices(part64, row, KEPT, SLICES, PADDED))
            tl.store(kept_total + row, kept)
            tl.store(record_x + row * 2 + 1, -INFINITY)
            tl.store(record32 + row * 6 + CUT_ID, NO_ID)
            if MAY_CUT & cuts:
                _store_place(
                    part32, part64, *bins, ranges, place32, place64, row, kept, k, p, V, SLICES,
                    PADDED,
                )  # fmt: skip
