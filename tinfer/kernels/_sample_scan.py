"""The kernel that finds where the cut of a row is, and sums up what lies before it.

Several programs of a row find the fine bin in which its cut lies, collect the candidates of that
bin and estimate the weights of the slices that lie before it, for `_sample_cut`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._masses import (
    DEAD,
    octaves_q24,
    slope_of,
    top_k_limit,
    top_p_threshold,
    wants_cut,
)
from tinfer.kernels._sample_search import MEMBERS
from tinfer.kernels._sample_slices import (
    ABOVE,
    ABOVE_COUNT,
    COUNT,
    FINE,
    KEPT,
    MASS,
    MODE,
    SAMPLED,
    SHIFT,
    SPAN,
    START,
    TOTAL,
    load_slices,
    load_tile,
)

HIT = tl.constexpr(1 << 15)  # counts of hits are packed above those of other candidates
# Where a row's cut is: in collected candidates, nowhere, or outside of the range.
IN_BIN, NOWHERE, MISSED = (tl.constexpr(i) for i in range(3))


@triton.jit
def kept_sums(part32, part64, row, top_k, top_p, V, SLICES: tl.constexpr, PADDED: tl.constexpr):
    """(weight and count that min-p keeps, top-k's limit, top-p's threshold) of a row."""
    kept = tl.sum(load_slices(part64, row, KEPT, SLICES, PADDED))
    count = tl.sum(load_slices(part32, row, COUNT, SLICES, PADDED))
    total = tl.sum(load_slices(part64, row, TOTAL, SLICES, PADDED))
    threshold = top_p_threshold(total, tl.load(top_p + row))
    return kept, count, top_k_limit(tl.load(top_k + row), V), threshold


@triton.jit
def _place_of_cut(
    fine_weight, fine_count, start, span, shift, above_weight, above_count, cuts, limit, threshold
):
    """(where, highest, lowest, weight before, count before, whether all kept are collected).

    The candidates to collect have `octaves_q24` in lowest..highest: those of one fine bin, or of
    all bins down to it where they are few.
    """
    b = tl.arange(0, FINE)
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
def _collect(x, column, hit, x_out, id_out, counter):
    """Append candidates, in any order."""
    at = tl.atomic_add(counter + tl.zeros_like(column), 1, mask=hit, sem="relaxed")
    hit = hit & (at < MEMBERS)
    tl.store(x_out + at, x, mask=hit)
    tl.store(id_out + at, column, mask=hit)


@triton.jit
def _scan_slice(
    source, column, V, top, slope, highest, lowest, x_out, id_out, counter, estimate_out, count_out
):
    """Collect a slice's candidates of lowest..highest; estimate the weights of those before."""
    x = load_tile(source, column, V)
    q = octaves_q24(x, top, slope)
    before = q > highest
    hit = (q <= highest) & (q >= lowest)
    estimate = tl.sum(tl.where(before, tl.exp2((x - top) * slope), 0.0))
    counts = tl.sum(before.to(tl.int32) + tl.where(hit, HIT, 0))
    tl.store(estimate_out, estimate)
    tl.store(count_out, counts & (HIT - 1))
    if counts >= HIT:
        _collect(x, column, hit, x_out, id_out, counter)


@triton.jit
def load_place(
    part32,
    part64,
    fine_weight,
    fine_count,
    ranges,
    row,
    kept,
    count,
    limit,
    threshold,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
):
    return _place_of_cut(
        fine_weight + row * FINE,
        fine_count + row * FINE,
        tl.load(ranges + row * 3 + START),
        tl.load(ranges + row * 3 + SPAN),
        tl.load(ranges + row * 3 + SHIFT),
        tl.sum(load_slices(part64, row, ABOVE, SLICES, PADDED)),
        tl.sum(load_slices(part32, row, ABOVE_COUNT, SLICES, PADDED)),
        (count >= limit) | (kept > threshold),
        limit,
        threshold,
    )


@triton.jit
def _sample_scan_kernel(
    logits,  # fp32 | bf16 [B, V]
    temperature,  # fp32 [B]
    top_k,  # int32 [B]
    top_p,  # fp32 [B]
    part32,  # int32 [B, 3, SLICES]
    part64,  # int64 [B, 3, SLICES]
    fine_weight,  # int64 [B, FINE]
    fine_count,  # int32 [B, FINE]
    ranges,  # int32 [B, 3]
    counters,  # int32 [B]
    member_x,  # fp32 [B, MEMBERS]
    member_id,  # int32 [B, MEMBERS]
    estimates,  # fp32 [B, SLICES]
    record32,  # int32 [B, 4]
    record_x,  # fp32 [B, 2]
    stride,
    V,
    GROUPS: tl.constexpr,  # programs of a row
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // GROUPS).to(tl.int64)
    is_cut = wants_cut(tl.load(top_k + row), tl.load(top_p + row), V)
    if is_cut & (tl.load(record32 + row * 4 + MODE) == SAMPLED):
        sums = kept_sums(part32, part64, row, top_k, top_p, V, SLICES, PADDED)
        where, highest, lowest, _weight, _count, _few = load_place(
            part32, part64, fine_weight, fine_count, ranges, row, *sums, SLICES, PADDED
        )
        if where != MISSED:
            source, top = logits + row * stride, tl.load(record_x + row * 2)
            slope = slope_of(tl.load(temperature + row))
            for s in range(tl.program_id(0) % GROUPS, SLICES, GROUPS):
                _scan_slice(
                    source, s * BLOCK + tl.arange(0, BLOCK), V, top, slope, highest, lowest,
                    member_x + row * MEMBERS, member_id + row * MEMBERS, counters + row,
                    estimates + row * SLICES + s, part32 + (row * 3 + MASS) * SLICES + s,
                )  # fmt: skip
