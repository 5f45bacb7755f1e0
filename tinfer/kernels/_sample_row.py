"""One program per row between the passes: its status, a first draw, or where its cut should be.

A row without cuts is drawn from by fp32 estimates of its weights where that is certain. The sum
of floored masses up to candidate i differs from F(i) = 2^31 * (weights up to i) / (all weights)
by less than one unit per candidate: it is at most F(i), plus, from the first candidate on, at
most what the floors of all later ones lost. The estimates of F are off by less than SLACK units
(y up to 32, rounded four times, an exp2 of 2 ulp and a sum of 14 levels give 1.4e-5 at most),
plus a unit of the weights per candidate, which the exact weights round down by: V / total of
those of F, the first weight being 1. So unless the word lies within these (and V on one side) of
the edges of the token that it falls into, that token is the answer; the other rows take the
exact passes.
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
    slope_of,
    top_k_limit,
    wants_cut,
)
from tinfer.kernels._sample_slices import (
    BINS,
    DRAWN,
    ENDED,
    GREEDY,
    MODE,
    ROW_FIRST,
    SAMPLED,
    STATUS,
    TOP_BIN,
    load_tile,
    scaled,
)

SLACK = tl.constexpr(65536.0)  # of 2^31: 3.1e-5
HEAD = tl.constexpr(1024)  # the range reaches down to this many candidates at least
AHEAD = tl.constexpr(4096)  # ... and up to the first one unless more than these come before


@triton.jit
def _draw_by_estimate(source, V, part, first, top, slope, word, BLOCK: tl.constexpr):
    """(token, whether it is certain) of a row whose slices hold estimated weights `part`."""
    target = (word & 0x7FFFFFFF).to(tl.float32)
    unit = tl.sum(part) * (1.0 / 2147483648.0)
    upto = tl.cumsum(part)
    mine = tl.sum((upto <= target * unit).to(tl.int32))
    before = tl.sum(tl.where(tl.arange(0, part.shape[0]) == mine, upto - part, 0.0))
    column = mine * BLOCK + tl.arange(0, BLOCK)
    x = load_tile(source, column, V)
    w = tl.exp2((x - top) * slope)
    upto = tl.cumsum(w) + before
    token = mine * BLOCK + tl.sum((upto <= target * unit).to(tl.int32))
    at = tl.sum(tl.where(column == token, upto, 0.0)) / unit
    previous = tl.sum(tl.where(column == token, upto - w, 0.0)) / unit
    slack = SLACK + V / tl.sum(part)
    late = tl.where(token < first, V, 0).to(tl.float32) + slack
    early = tl.where(token > first, V, 0).to(tl.float32) + slack
    return token, (at - target > late) & (target - previous > early) & (token < V)


@triton.jit
def _locate(
    bins,
    part32,
    row,
    part,
    top,
    slope,
    limit,
    top_p,
    RATIO: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
):
    """(top_bin, upper, lower): the coarse bins of a row that should hold the cut.

    Estimated from sampled counts, weighted at the bins' middles and summed up from the least
    likely ones, where they are many.
    """
    top_scaled = scaled(top, slope)
    top_bin = tl.floor(top_scaled).to(tl.int32)
    j = tl.arange(0, BINS)
    count = tl.zeros([BINS], tl.int32)
    CHUNK: tl.constexpr = min(PADDED, 16)
    for start in range(0, SLICES, CHUNK):
        s = start + tl.arange(0, CHUNK)
        tops = part32 + (row * 4 + TOP_BIN) * SLICES + s
        shift = tl.minimum(top_bin - tl.load(tops, mask=s < SLICES, other=-536870912), BINS)
        at = j[None, :] - shift[:, None]
        ok = (s < SLICES)[:, None] & (at >= 0) & (at < BINS - 1)
        counts = tl.load(bins + (row * SLICES + s[:, None]) * BINS + at, mask=ok, other=0)
        count += tl.sum(counts, axis=0)
    count = count * RATIO
    middle = (top_bin - j).to(tl.float32) + 0.5 - top_scaled
    weight = count.to(tl.float32) * tl.exp2(middle * 0.125)
    before = tl.cumsum(count)
    below = tl.sum(weight) - tl.cumsum(weight)
    reached = below < tl.sum(part) * (1.0 - tl.minimum(top_p, 1.0))
    reached = reached | (before >= limit)
    crossing = tl.sum((reached == 0).to(tl.int32))
    lower = tl.maximum(crossing + 2, tl.sum((before <= HEAD).to(tl.int32)) - 1)
    ahead = tl.sum(tl.where(j == crossing - 3, before, 0))
    upper = tl.where(ahead <= AHEAD, 0, crossing - 2)
    return top_bin, upper, tl.minimum(lower, BINS - 1)


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
    estimates,  # fp32 [B, SLICES]
    part32,  # int32 [B, 4, SLICES]
    bins,  # int32 [B, SLICES, BINS]
    ranges,  # int32 [B, 4]
    record32,  # int32 [B, 4]
    record_x,  # fp32 [B, 2]
    stride,
    V,
    PURPOSE: tl.constexpr,
    DRAWS: tl.constexpr,
    MAY_CUT: tl.constexpr,
    RATIO: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    t, p = tl.load(temperature + row), tl.load(top_p + row)
    k, floor = tl.load(top_k + row), tl.load(min_p + row)
    s = tl.arange(0, PADDED)
    tops = tl.load(maxima + row * SLICES + s, mask=s < SLICES, other=-INFINITY)
    part = tl.load(estimates + row * SLICES + s, mask=s < SLICES, other=0.0)
    top = tl.max(tops)
    source = logits + row * stride
    home = tl.min(tl.where((tops == top) & (s < SLICES), s, SLICES - 1))
    column = home * BLOCK + tl.arange(0, BLOCK)
    first = tl.min(tl.where(load_tile(source, column, V) == top, column, V))
    bad = is_bad(t, p, floor)
    if not MAY_CUT:
        bad = bad | wants_cut(k, p, V)
    status = tl.where(bad, BAD_PARAMETER, OK)
    status = tl.where(top == -INFINITY, NO_TOKEN, status)
    status = tl.where(top == INFINITY, NOT_FINITE, status)
    mode = tl.where(status != OK, ENDED, tl.where(t < GREEDY_BELOW, GREEDY, SAMPLED))
    token = tl.where(mode == GREEDY, first, 0)
    if mode == SAMPLED:
        slope = slope_of(t)
        part = part * tl.exp2((tops - top) * slope)
        if wants_cut(k, p, V):
            limit = top_k_limit(k, V)
            top_bin, upper, lower = _locate(
                bins, part32, row, part, top, slope, limit, p, RATIO, SLICES, PADDED
            )
            tl.store(ranges + row * 4, top_bin)
            tl.store(ranges + row * 4 + 1, upper)
            tl.store(ranges + row * 4 + 2, lower)
        elif DRAWS:
            word = first_word(tl.load(seeds + row), tl.load(positions + row), PURPOSE)
            found, sure = _draw_by_estimate(source, V, part, first, top, slope, word, BLOCK)
            sure = sure & (floor <= 0)
            token = tl.where(sure, found, token)
            mode = tl.where(sure, DRAWN, mode)
    if DRAWS:
        tl.store(tokens + row, token.to(tl.int64))
        tl.store(statuses + row, status)
    tl.store(record32 + row * 4 + STATUS, status)
    tl.store(record32 + row * 4 + ROW_FIRST, first)
    tl.store(record32 + row * 4 + MODE, mode)
    tl.store(record_x + row * 2, top)
