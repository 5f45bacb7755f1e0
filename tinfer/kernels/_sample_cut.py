"""The kernel that closes the records of sampled rows: the cut and the kept weights' sum.

A row without a cut only needs its slices' sums added up. Else the candidates that `_sample_scan`
collected are ranked (`_sample_search`). Then the row is drawn from: exactly where all kept
candidates are collected, which they are where they are few, else by its estimates.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._masses import INFINITY, first_word, slope_of, wants_cut
from tinfer.kernels._sample_row import CLOSE_SLACK, NO_ID, draw_by_estimate
from tinfer.kernels._sample_scan import IN_BIN, MISSED, kept_sums, load_place
from tinfer.kernels._sample_search import MEMBERS, bin_keys, bisect, draw_member, key_of, rank
from tinfer.kernels._sample_slices import CUT_ID, DRAWN, MASS, MODE, ROW_FIRST, SAMPLED


@triton.jit
def _draw_around_cut(
    source,
    V,
    members,
    estimates,
    counts,
    kept,
    first,
    top,
    slope,
    cut,
    cut_id,
    word,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`draw_by_estimate` of a row: slices' sums before the cut's bin, and the bin's candidates."""
    x_in, id_in, n = members
    s, i = tl.arange(0, PADDED), tl.arange(0, MEMBERS)
    part = tl.load(estimates + s, mask=s < SLICES, other=0.0)
    count = tl.load(counts + s, mask=s < SLICES, other=0)
    x = tl.load(x_in + i, mask=i < n, other=-INFINITY)
    ids = tl.load(id_in + i, mask=i < n, other=NO_ID)
    keep = (i < n) & ((x > cut) | ((x == cut) & (ids <= cut_id)))
    here = keep[:, None] & ((ids // BLOCK)[:, None] == s[None, :])
    part += tl.sum(tl.where(here, tl.exp2((x - top) * slope)[:, None], 0.0), axis=0)
    count += tl.sum(here.to(tl.int32), axis=0)
    total = kept.to(tl.float32) * (1.0 / 2147483648.0)
    return draw_by_estimate(
        source, V, part, count, total, first, top, slope, cut, cut_id, word, CLOSE_SLACK, BLOCK
    )


@triton.jit
def _find_cut(
    source,
    V,
    where,
    highest,
    lowest,
    members,
    top,
    slope,
    weight_before,
    count_before,
    kept,
    limit,
    threshold,
    TILE: tl.constexpr,
):
    """(cut logit, cut id, kept weight), which are given where there is no cut."""
    x_in, id_in, n = members
    cut, cut_id = tl.full([], -INFINITY, tl.float32), tl.full([], NO_ID, tl.int32)
    first, last = tl.full([], 0, tl.int64), tl.full([], -1, tl.int64)
    if where == MISSED:
        first = key_of(tl.full([], -INFINITY, tl.float32)).to(tl.int64)
        last = key_of(top).to(tl.int64)
    elif where == IN_BIN:
        if n <= MEMBERS:
            cut, cut_id, kept = rank(
                x_in, id_in, n, top, slope, weight_before, count_before, limit, threshold
            )
        else:
            first, last = bin_keys(source, V, top, slope, highest, lowest, TILE)
    if first <= last:
        cut, cut_id, kept = bisect(source, V, first, last, top, slope, limit, threshold, TILE)
    return cut, cut_id, kept


@triton.jit
def _sample_cut_kernel(
    logits,  # fp32 | bf16 [B, V]
    temperature,  # fp32 [B]
    top_k,  # int32 [B]
    top_p,  # fp32 [B]
    min_p,  # fp32 [B]
    seeds,  # int64 [B]
    positions,  # int64 [B]
    tokens,  # int64 [B]
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
    kept_total,  # int64 [B]
    stride,
    V,
    PURPOSE: tl.constexpr,
    DRAWS: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(record32 + row * 4 + MODE) == SAMPLED:
        kept, count, limit, threshold = kept_sums(
            part32, part64, row, top_k, top_p, V, SLICES, PADDED
        )
        cut, cut_id = tl.full([], -INFINITY, tl.float32), tl.full([], NO_ID, tl.int32)
        if wants_cut(tl.load(top_k + row), tl.load(top_p + row), V):
            source, top = logits + row * stride, tl.load(record_x + row * 2)
            slope = slope_of(tl.load(temperature + row))
            where, highest, lowest, weight_before, count_before, few = load_place(
                part32, part64, fine_weight, fine_count, ranges, row, kept, count, limit,
                threshold, SLICES, PADDED,
            )  # fmt: skip
            n = tl.load(counters + row)
            members = member_x + row * MEMBERS, member_id + row * MEMBERS, n
            cut, cut_id, kept = _find_cut(
                source, V, where, highest, lowest, members, top, slope, weight_before,
                count_before, kept, limit, threshold, BLOCK,
            )  # fmt: skip
            if DRAWS & (where != MISSED) & (n <= MEMBERS):
                word = first_word(tl.load(seeds + row), tl.load(positions + row), PURPOSE)
                first = tl.load(record32 + row * 4 + ROW_FIRST)
                token, sure = tl.full([], 0, tl.int32), few
                if few:
                    token = draw_member(
                        *members, cut, cut_id, top, slope, kept, first, word & 0x7FFFFFFF
                    )
                else:
                    token, sure = _draw_around_cut(
                        source, V, members, estimates + row * SLICES,
                        part32 + (row * 3 + MASS) * SLICES, kept, first, top, slope, cut, cut_id,
                        word, SLICES, PADDED, BLOCK,
                    )  # fmt: skip
                    # Without a cut, min-p may drop what the estimates hold.
                    sure = sure & ((where == IN_BIN) | (tl.load(min_p + row) <= 0))
                if sure:
                    tl.store(tokens + row, token.to(tl.int64))
                    tl.store(record32 + row * 4 + MODE, DRAWN)
        tl.store(record32 + row * 4 + CUT_ID, cut_id)
        tl.store(record_x + row * 2 + 1, cut)
        tl.store(kept_total + row, kept)
