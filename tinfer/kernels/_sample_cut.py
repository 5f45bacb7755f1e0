"""The kernel that closes the records of rows with a cut: the cut and the kept weights' sum.

The candidates that `_sample_scan` collected are ranked (`_sample_search`). Then the row is drawn
from: exactly where all kept candidates are collected, which they are where they are few, else by
its estimates.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._masses import INFINITY, first_word, slope_of, top_k_limit, wants_cut
from tinfer.kernels._sample_row import CLOSE_SLACK, draw_by_estimate, store_slices
from tinfer.kernels._sample_search import bin_keys, bisect, draw_member, key_of, rank
from tinfer.kernels._sample_slices import (
    COUNT_BEFORE,
    CUT_ID,
    DRAWN,
    FEW,
    HIGHEST,
    IN_BIN,
    LOWEST,
    MASS,
    MEMBER_COUNT,
    MEMBERS,
    MISSED,
    MODE,
    NO_ID,
    ROW_FIRST,
    SAMPLED,
    THRESHOLD,
    WEIGHT_BEFORE,
    WHERE,
    await_previous,
)


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
    counters,  # int32 [B, 2]
    place32,  # int32 [B, 5]
    member_x,  # fp32 [B, MEMBERS]
    member_id,  # int32 [B, MEMBERS]
    estimates,  # fp32 [B, SLICES]
    place64,  # int64 [B, 2]
    record32,  # int32 [B, 6]
    record_x,  # fp32 [B, 2]
    kept_total,  # int64 [B]
    stride,
    V,
    PURPOSE: tl.constexpr,
    DRAWS: tl.constexpr,
    CHAINED: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    await_previous(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(top_k + row)
    is_cut = wants_cut(k, tl.load(top_p + row), V)
    if is_cut & (tl.load(record32 + row * 6 + MODE) == SAMPLED):
        source, top = logits + row * stride, tl.load(record_x + row * 2)
        slope = slope_of(tl.load(temperature + row))
        where, few = tl.load(place32 + row * 5 + WHERE), tl.load(place32 + row * 5 + FEW) > 0
        n = tl.load(counters + row * 2 + MEMBER_COUNT)
        members = member_x + row * MEMBERS, member_id + row * MEMBERS, n
        cut, cut_id, kept = _find_cut(
            source,
            V,
            where,
            tl.load(place32 + row * 5 + HIGHEST),
            tl.load(place32 + row * 5 + LOWEST),
            members,
            top,
            slope,
            tl.load(place64 + row * 2 + WEIGHT_BEFORE),
            tl.load(place32 + row * 5 + COUNT_BEFORE),
            tl.load(kept_total + row),
            top_k_limit(k, V),
            tl.load(place64 + row * 2 + THRESHOLD),
            BLOCK,
        )
        if DRAWS:  # noqa: SIM102  one is known when compiling
            if (where != MISSED) & (n <= MEMBERS):
                first = tl.load(record32 + row * 6 + ROW_FIRST)
                word = first_word(tl.load(seeds + row), tl.load(positions + row), PURPOSE)
                token, sure = tl.full([], 0, tl.int32), few
                if few:
                    token = draw_member(
                        *members, cut, cut_id, top, slope, kept, first, word & 0x7FFFFFFF
                    )
                else:
                    token, sure = _draw_around_cut(
                        source, V, members, estimates + row * SLICES,
                        part32 + (row * 3 + MASS) * SLICES, kept, first, top, slope, cut,
                        cut_id, word, SLICES, PADDED, BLOCK,
                    )  # fmt: skip
                    # Without a cut, min-p may drop what the estimates hold.
                    holds = (where == IN_BIN) | (tl.load(min_p + row) <= 0)
                    store_slices(record32 + row * 6, token, first, holds, SLICES, BLOCK)
                    sure = sure & holds
                if sure:
                    tl.store(tokens + row, token.to(tl.int64))
                    tl.store(record32 + row * 6 + MODE, DRAWN)
        tl.store(record32 + row * 6 + CUT_ID, cut_id)
        tl.store(record_x + row * 2 + 1, cut)
        tl.store(kept_total + row, kept)
