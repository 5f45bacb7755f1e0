"""The kernels that close the records of sampled rows: the cut and the kept weights' sum.

A row without a cut only needs its slices' sums added up. Else one program per slice finds the
fine bin in which the cut lies and collects its slice's candidates of that bin; then one program
per row ranks them (`_sample_search`). Where few candidates are kept all of them are collected, and
the row is drawn from at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._masses import (
    INFINITY,
    first_word,
    slope_of,
    top_k_limit,
    top_p_threshold,
    wants_cut,
)
from tinfer.kernels._sample_search import (
    MEMBERS,
    NO_ID,
    bin_keys,
    bisect,
    draw_member,
    key_of,
    rank,
)
from tinfer.kernels._sample_slices import (
    ABOVE,
    ABOVE_COUNT,
    BINS,
    COUNT,
    CUT_ID,
    DRAWN,
    FINE,
    KEPT,
    MODE,
    ROW_FIRST,
    SAMPLED,
    TOTAL,
    load_slices,
    load_tile,
    range_edges,
    scaled,
)


@triton.jit
def _bin_of_cut(fine_weight, fine_count, above_weight, above_count, limit, threshold):
    """(bin, weight before it, count before it, its count, whether the range missed the cut)."""
    b = tl.arange(0, FINE)
    weight, count = tl.load(fine_weight + b), tl.load(fine_count + b)
    weight_to = tl.cumsum(weight) + above_weight
    count_to = tl.cumsum(count) + above_count
    reached = (count_to >= limit) | (weight_to > threshold)
    wanted = tl.sum((reached == 0).to(tl.int32))
    missed = (wanted == FINE) | (above_count >= limit) | (above_weight > threshold)
    at_bin = b == wanted
    before = tl.sum(tl.where(at_bin, weight_to - weight, 0))
    members = tl.sum(tl.where(at_bin, count, 0))
    return wanted, before, tl.sum(tl.where(at_bin, count_to - count, 0)), members, missed


@triton.jit
def _bin_edges(place):
    """(low, high) scaled logits of fine bins, widened by what rounding can do to `fine_bin`."""
    range_low, range_high, scale, wanted, first_bin = place
    slack = (tl.abs(range_high) + BINS) * 1e-6
    high = range_high - first_bin.to(tl.float32) / scale + slack
    low = range_high - (wanted + 1).to(tl.float32) / scale - slack
    high = tl.where(first_bin == 0, range_high, high)
    return tl.where(wanted == FINE - 1, range_low, low), high


@triton.jit
def _collect(x, column, V, slope, low, high, x_out, id_out, counter):
    """Append the candidates whose scaled logit lies in low..high, in any order."""
    t = scaled(x, slope)
    hit = (t >= low) & (t <= high) & (column < V)
    at = tl.atomic_add(counter + tl.zeros_like(column), 1, mask=hit, sem="relaxed")
    hit = hit & (at < MEMBERS)
    tl.store(x_out + at, x, mask=hit)
    tl.store(id_out + at, column, mask=hit)


@triton.jit
def _kept_sums(part32, part64, row, top_k, top_p, V, SLICES: tl.constexpr, PADDED: tl.constexpr):
    """(kept weight, top-k's limit, top-p's threshold, whether one of them cuts) of a row."""
    kept = tl.sum(load_slices(part64, row, KEPT, 3, SLICES, PADDED))
    total = tl.sum(load_slices(part64, row, TOTAL, 3, SLICES, PADDED))
    count = tl.sum(load_slices(part32, row, COUNT, 4, SLICES, PADDED))
    limit = top_k_limit(tl.load(top_k + row), V)
    threshold = top_p_threshold(total, tl.load(top_p + row))
    return kept, limit, threshold, (count >= limit) | (kept > threshold)


@triton.jit
def _place_of_cut(
    part32,
    part64,
    fine_weight,
    fine_count,
    ranges,
    row,
    limit,
    threshold,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
):
    """(place, weight before, count before, whether all kept are collected, whether missed).

    The place is that of the fine bin, or of all bins down to it where they hold few candidates.
    """
    wanted, weight_before, count_before, members, missed = _bin_of_cut(
        fine_weight + row * FINE,
        fine_count + row * FINE,
        tl.sum(load_slices(part64, row, ABOVE, 3, SLICES, PADDED)),
        tl.sum(load_slices(part32, row, ABOVE_COUNT, 4, SLICES, PADDED)),
        limit,
        threshold,
    )
    low, high, scale = range_edges(ranges, row)
    few = (tl.load(ranges + row * 4 + 1) == 0) & (count_before + members <= MEMBERS)
    few = few & (missed == 0)
    first_bin = tl.where(few, 0, wanted)
    weight_before = tl.where(few, 0, weight_before)
    count_before = tl.where(few, 0, count_before)
    return (low, high, scale, wanted, first_bin), weight_before, count_before, few, missed


@triton.jit
def _sample_collect_kernel(
    logits,  # fp32 | bf16 [B, V]
    temperature,  # fp32 [B]
    top_k,  # int32 [B]
    top_p,  # fp32 [B]
    part32,  # int32 [B, 4, SLICES]
    part64,  # int64 [B, 3, SLICES]
    fine_weight,  # int64 [B, FINE]
    fine_count,  # int32 [B, FINE]
    ranges,  # int32 [B, 4]
    counters,  # int32 [B]
    member_x,  # fp32 [B, MEMBERS]
    member_id,  # int32 [B, MEMBERS]
    record32,  # int32 [B, 4]
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
        _kept, limit, threshold, cuts = _kept_sums(
            part32, part64, row, top_k, top_p, V, SLICES, PADDED
        )
        if cuts:
            place, _weight, _count, _few, missed = _place_of_cut(
                part32, part64, fine_weight, fine_count, ranges, row, limit, threshold,
                SLICES, PADDED,
            )  # fmt: skip
            if missed == 0:
                low, high = _bin_edges(place)
                slope = slope_of(tl.load(temperature + row))
                x_row, id_row = member_x + row * MEMBERS, member_id + row * MEMBERS
                for s in range(tl.program_id(0) % GROUPS, SLICES, GROUPS):
                    column = s * BLOCK + tl.arange(0, BLOCK)
                    x = load_tile(logits + row * stride, column, V)
                    _collect(x, column, V, slope, low, high, x_row, id_row, counters + row)


@triton.jit
def _sample_cut_kernel(
    logits,  # fp32 | bf16 [B, V]
    temperature,  # fp32 [B]
    top_k,  # int32 [B]
    top_p,  # fp32 [B]
    seeds,  # int64 [B]
    positions,  # int64 [B]
    tokens,  # int64 [B]
    part32,  # int32 [B, 4, SLICES]
    part64,  # int64 [B, 3, SLICES]
    fine_weight,  # int64 [B, FINE]
    fine_count,  # int32 [B, FINE]
    ranges,  # int32 [B, 4]
    counters,  # int32 [B]
    member_x,  # fp32 [B, MEMBERS]
    member_id,  # int32 [B, MEMBERS]
    record32,  # int32 [B, 4]
    record_x,  # fp32 [B, 2]
    kept_total,  # int64 [B]
    stride,
    V,
    PURPOSE: tl.constexpr,
    DRAWS: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(record32 + row * 4 + MODE) == SAMPLED:
        kept, limit, threshold, cuts = _kept_sums(
            part32, part64, row, top_k, top_p, V, SLICES, PADDED
        )
        cut, cut_id = tl.full([], -INFINITY, tl.float32), tl.full([], NO_ID, tl.int32)
        if cuts:
            source, top = logits + row * stride, tl.load(record_x + row * 2)
            slope = slope_of(tl.load(temperature + row))
            place, weight_before, count_before, few, missed = _place_of_cut(
                part32, part64, fine_weight, fine_count, ranges, row, limit, threshold,
                SLICES, PADDED,
            )  # fmt: skip
            n = tl.load(counters + row)
            first, last = tl.full([], 0, tl.int64), tl.full([], -1, tl.int64)
            if missed:
                first = key_of(tl.full([], -INFINITY, tl.float32)).to(tl.int64)
                last = key_of(top).to(tl.int64)
            elif n <= MEMBERS:
                cut, cut_id, kept = rank(
                    member_x + row * MEMBERS,
                    member_id + row * MEMBERS,
                    n,
                    place,
                    top,
                    slope,
                    weight_before,
                    count_before,
                    limit,
                    threshold,
                )
                if DRAWS:  # noqa: SIM102  one is known when compiling
                    if few:
                        word = first_word(tl.load(seeds + row), tl.load(positions + row), PURPOSE)
                        token = draw_member(
                            member_x + row * MEMBERS,
                            member_id + row * MEMBERS,
                            n,
                            cut,
                            cut_id,
                            top,
                            slope,
                            kept,
                            tl.load(record32 + row * 4 + ROW_FIRST),
                            word & 0x7FFFFFFF,
                        )
                        tl.store(tokens + row, token.to(tl.int64))
                        tl.store(record32 + row * 4 + MODE, DRAWN)
            else:
                first, last = bin_keys(source, V, slope, place, TILE)
            if first <= last:
                cut, cut_id, kept = bisect(
                    source, V, first, last, top, slope, limit, threshold, TILE
                )
        tl.store(record32 + row * 4 + CUT_ID, cut_id)
        tl.store(record_x + row * 2 + 1, cut)
        tl.store(kept_total + row, kept)
