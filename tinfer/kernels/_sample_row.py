"""The kernel that closes a row's record, and that draws at once where it can.

One program per row. A row without a cut has its slices' weights G already. Its floored masses'
sum up to i differs from F(i) = G(i) * 2^31 / W by less than one unit per candidate: it is at most
F(i), and with the remainder that the first candidate gets, at most n(i) above it, n(i) candidates
coming later. So the token at which G passes word * W / 2^31 is the answer unless the word lies
within so many units of the token's edge; only then the floors are summed up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._masses import (
    BAD_PARAMETER,
    GREEDY_BELOW,
    INFINITY,
    NO_TOKEN,
    NOT_FINITE,
    OK,
    first_word,
    is_bad,
    min_p_threshold,
    share_of_total,
    slope_of,
    top_k_limit,
    top_p_threshold,
    weight_q31,
)
from tinfer.kernels._sample_search import MEMBERS, NO_ID, find_cut
from tinfer.kernels._sample_slices import (
    ABOVE,
    ABOVE_COUNT,
    COUNT,
    CUT_ID,
    DRAWN,
    ENDED,
    FINE,
    FIRST,
    GREEDY,
    KEPT,
    MODE,
    ROW_FIRST,
    SAMPLED,
    STATUS,
    TOTAL,
    load_slices,
    load_tile,
)


@triton.jit
def _draw_by_weight(source, V, part, first, top, slope, least, word, BLOCK: tl.constexpr):
    """(token, whether it is certain) of a row whose slices hold kept weights `part`."""
    total, upto = tl.sum(part), tl.cumsum(part)
    target = word & 0x7FFFFFFF
    passed = share_of_total(total, target)
    mine = tl.sum((upto <= passed).to(tl.int32))
    before = tl.sum(tl.where(tl.arange(0, part.shape[0]) == mine, upto - part, 0))
    column = mine * BLOCK + tl.arange(0, BLOCK)
    w = weight_q31(load_tile(source, column, V), top, slope)
    w = tl.where(w >= least, w, 0).to(tl.int64)
    upto = tl.cumsum(w) + before
    token = mine * BLOCK + tl.sum((upto <= passed).to(tl.int32))
    at = tl.sum(tl.where(column == token, upto, 0))
    previous = tl.sum(tl.where(column == token, upto - w, 0))
    # Before the first candidate its masses' sum may lag by token + 1, after it lead by V - token.
    early = (token < first) & (at > share_of_total(total, target + token + 1))
    late = target - (V - token)
    late_ok = (late >= 0) & (previous <= share_of_total(total, tl.maximum(late, 0)))
    return token, early | (token == first) | ((token > first) & late_ok)


@triton.jit
def _sample_row_kernel(
    logits,  # fp32 | bf16 [B, V]
    temperature,  # fp32 [B]
    top_k,  # int32 [B]
    top_p,  # fp32 [B]
    min_p,  # fp32 [B]
    seeds,  # int64 [B]
    positions,  # int64 [B]
    tokens,  # int64 [B]
    statuses,  # int32 [B]
    maxima,  # fp32 [B, SLICES]
    part32,  # int32 [B, 5, SLICES]
    part64,  # int64 [B, 3, SLICES]
    fine_weight,  # int64 [B, FINE]
    fine_count,  # int32 [B, FINE]
    ranges,  # int32 [B, 3]
    members,  # int32 [B]
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
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    t, p = tl.load(temperature + row), tl.load(top_p + row)
    k, floor = tl.load(top_k + row), tl.load(min_p + row)
    s = tl.arange(0, PADDED)
    tops = tl.load(maxima + row * SLICES + s, mask=s < SLICES, other=-INFINITY)
    top = tl.max(tops)
    firsts = load_slices(part32, row, FIRST, 5, SLICES, PADDED)
    first = tl.min(tl.where((tops == top) & (s < SLICES), firsts, V))
    status = tl.where(is_bad(t, p, floor), BAD_PARAMETER, OK)
    status = tl.where(top == -INFINITY, NO_TOKEN, status)
    status = tl.where(top == INFINITY, NOT_FINITE, status)
    mode = tl.where(status != OK, ENDED, tl.where(t < GREEDY_BELOW, GREEDY, SAMPLED))
    cut, cut_id = tl.full([], -INFINITY, tl.float32), tl.full([], NO_ID, tl.int32)
    kept, token = tl.full([], 2147483648, tl.int64), tl.where(mode == GREEDY, first, 0)
    if mode == SAMPLED:
        source, slope = logits + row * stride, slope_of(t)
        limit = top_k_limit(k, V)
        total = tl.sum(load_slices(part64, row, TOTAL, 3, SLICES, PADDED))
        threshold = top_p_threshold(total, p)
        part = load_slices(part64, row, KEPT, 3, SLICES, PADDED)
        kept = tl.sum(part)
        count = tl.sum(load_slices(part32, row, COUNT, 5, SLICES, PADDED))
        if (count >= limit) | (kept > threshold):
            ranged = ranges + row * 3
            cut, cut_id, kept = find_cut(
                source,
                V,
                (tl.load(ranged), tl.load(ranged + 1), tl.load(ranged + 2)),
                fine_weight + row * FINE,
                fine_count + row * FINE,
                tl.sum(load_slices(part64, row, ABOVE, 3, SLICES, PADDED)),
                tl.sum(load_slices(part32, row, ABOVE_COUNT, 5, SLICES, PADDED)),
                member_x + row * MEMBERS,
                member_id + row * MEMBERS,
                members + row,
                top,
                slope,
                limit,
                threshold,
                TILE,
            )
        elif DRAWS:
            word = first_word(tl.load(seeds + row), tl.load(positions + row), PURPOSE)
            least = min_p_threshold(floor)
            found, sure = _draw_by_weight(source, V, part, first, top, slope, least, word, BLOCK)
            token = tl.where(sure, found, token)
            mode = tl.where(sure, DRAWN, mode)
    if DRAWS:
        tl.store(tokens + row, token.to(tl.int64))
        tl.store(statuses + row, status)
    tl.store(record32 + row * 4 + STATUS, status)
    tl.store(record32 + row * 4 + ROW_FIRST, first)
    tl.store(record32 + row * 4 + CUT_ID, cut_id)
    tl.store(record32 + row * 4 + MODE, mode)
    tl.store(record_x + row * 2, top)
    tl.store(record_x + row * 2 + 1, cut)
    tl.store(kept_total + row, kept)
