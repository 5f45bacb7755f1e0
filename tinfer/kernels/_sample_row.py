"""One program per row between the passes: its status, a first draw, or where its cut should be.

A row is drawn from by fp32 estimates of its weights where that is certain. Let F(i) be 2^31 *
(weights up to candidate i) / (all kept weights). The sum of floored masses up to i is F(i) less
what the floors up to i lost, less than a unit each; from the first candidate on, it is F(i) plus
what those after i lost. Estimates of F are off by some units, `slack`, and by one of the weights'
units per candidate, since weights are rounded down: V / total of F's, the first weight being 1.
Unless the word lies this close to the edges of the token that it falls into, that token is the
answer; the other rows take the exact passes.

The bounds, of weights' sums as shares of the total, for 2^20 candidates at most:
- y: before the row's maximum is known it is rounded four times instead of twice, which is off by
  |y| * 2^-22 octaves. Averaged over the weights |y| is below 16, since n candidates at y = -a
  weigh n * 2^-a beside the first one's 1. That makes 2.6e-6; nothing once y is that of the weights.
- exp2: 2 ulp, 2.4e-7, before the maximum is known twice and a product more, 6e-7.
- sums: 32 additions in a row within a thread, 9 between threads, 12 over slices: 3.2e-6.
- the word, the target and the edges as fp32: 450 units.
In all 6.4e-6 for a sum and as much for the total, 28100 units, less than SLACK; with the weights' y
and an exact total 7900 units, less than CLOSE_SLACK.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._masses import (
    BAD_PARAMETER,
    DEAD,
    GREEDY_BELOW,
    INFINITY,
    NO_TOKEN,
    NOT_FINITE,
    OK,
    first_word,
    is_bad,
    octaves_q24,
    slope_of,
    top_k_limit,
    wants_cut,
)
from tinfer.kernels._sample_slices import (
    BEGIN,
    DRAWN,
    END,
    ENDED,
    FINE,
    GREEDY,
    MODE,
    NO_ID,
    ROW_FIRST,
    SAMPLED,
    SHIFT,
    SPAN,
    START,
    STATUS,
    await_previous,
    load_tile,
)

SLACK = tl.constexpr(32768.0)  # of 2^31
CLOSE_SLACK = tl.constexpr(8192.0)
BINS = tl.constexpr(256)  # of an eighth of an octave: 31 octaves, all that have a weight
RUN = tl.constexpr(32)  # neighbours of a sample
NEAR = tl.constexpr(1.5)
HEAD = tl.constexpr(512)  # the range reaches down to this many candidates at least
AHEAD = tl.constexpr(4096)  # ... and up to the first one unless more than these come before


@triton.jit
def draw_by_estimate(
    source, V, part, counts, total, first, top, slope, cut, cut_id, word, slack, BLOCK: tl.constexpr
):
    """(token, whether it is certain) of a row.

    `part` and `counts`, fp32 and int32 [PADDED], are the slices' estimated weights and numbers of
    candidates, all of them kept; `total`, fp32, is the estimate or the exact sum of the weights.
    """
    s = tl.arange(0, part.shape[0])
    unit = total * (1.0 / 2147483648.0)
    target = (word & 0x7FFFFFFF).to(tl.float32)
    upto = tl.cumsum(part)
    mine = tl.sum((upto <= target * unit).to(tl.int32))
    before = tl.sum(tl.where(s == mine, upto - part, 0.0))
    column = mine * BLOCK + tl.arange(0, BLOCK)
    x = load_tile(source, column, V)
    keep = (x > cut) | ((x == cut) & (column <= cut_id))
    w = tl.where(keep, tl.exp2((x - top) * slope), 0.0)
    upto = tl.cumsum(w) + before
    passed = tl.sum((upto <= target * unit).to(tl.int32))
    token = mine * BLOCK + passed
    at = tl.sum(tl.where(column == token, upto, 0.0)) / unit
    previous = tl.sum(tl.where(column == token, upto - w, 0.0)) / unit
    to_here = tl.sum(tl.where(s < mine, counts, 0)) + passed + 1
    from_here = tl.sum(tl.where(s > mine, counts, 0)) + BLOCK - passed
    slack += V / total
    late = tl.where(token < first, to_here, 0).to(tl.float32) + slack
    early = tl.where(token > first, from_here, 0).to(tl.float32) + slack
    return token, (at - target > late) & (target - previous > early) & (token < V)


@triton.jit
def store_slices(record, token, first, is_estimate, SLICES: tl.constexpr, BLOCK: tl.constexpr):
    """Store which slices' floors decide the draw: BEGIN to END.

    Around the estimated token, and from there to the end of the row that the first candidate,
    which gets what the floors lose, is not at.
    """
    slice_, home = token // BLOCK, first // BLOCK
    before, after = is_estimate & (slice_ + 1 < home), is_estimate & (slice_ - 1 > home)
    tl.store(record + BEGIN, tl.where(after, slice_ - 1, 0))
    tl.store(record + END, tl.where(before, slice_ + 2, SLICES))


@triton.jit
def _depths(source, V, top, slope, SAMPLE: tl.constexpr):
    """int32 [SAMPLE] coarse bins of a sample of the row, BINS - 1 where there is no weight."""
    i = tl.arange(0, SAMPLE)
    step = tl.maximum(V // max(SAMPLE // RUN, 1), RUN)
    q = octaves_q24(load_tile(source, (i // RUN) * step + i % RUN, V), top, slope)
    return tl.where(q > DEAD, (-q) >> 21, BINS - 1)


@triton.jit
def _locate(depth, V, total, limit, top_p, SAMPLE: tl.constexpr):
    """(start, span, shift) of the range that should hold the cut.

    The sample's counts are weighted at the bins' middles and summed up from the least likely
    ones, where they are many. The range is NEAR coarse bins on both sides of the estimated place
    of the cut, or all down from the first candidate where not many lie before the cut.
    """
    ratio = tl.maximum(V / (SAMPLE * 1.0), 1.0)
    j = tl.arange(0, BINS)
    count = tl.where(j < BINS - 1, tl.histogram(depth, BINS), 0).to(tl.float32) * ratio
    weight = count * tl.exp2((j.to(tl.float32) + 0.5) * -0.125)
    before = tl.cumsum(count)
    tail = total * (1.0 - tl.minimum(top_p, 1.0))
    # How much of its bin lies before the cut, by weight and by count.
    by_weight = (tl.cumsum(weight, reverse=True) - tail) / tl.maximum(weight, 1e-30)
    by_count = (limit - before + count) / tl.maximum(count, 1.0)
    share = tl.minimum(tl.minimum(by_weight, by_count), 1.0)
    full = tl.sum((share >= 1.0).to(tl.int32))
    rest = tl.sum(tl.where(j == full, tl.maximum(share, 0.0), 0.0))
    place = tl.minimum(full.to(tl.float32) + rest, BINS - 8.0)
    ahead = tl.sum(tl.where(j.to(tl.float32) <= place - NEAR, count, 0.0))
    start = ((place - NEAR) * 2097152.0).to(tl.int32)
    from_top = (ahead <= AHEAD) | (start <= 0)
    start = tl.where(from_top, 0, start)
    head = tl.where(from_top, tl.sum((before <= HEAD).to(tl.int32)) << 21, 0)
    end = tl.minimum(tl.maximum(((place + NEAR) * 2097152.0).to(tl.int32), head), -DEAD - 1)
    # Just enough for FINE bins to cover the range.
    widths = tl.full([], FINE, tl.int32) << tl.arange(0, 32)
    shift = tl.sum(((widths > 0) & (widths < end - start + 1)).to(tl.int32))
    return -start, end - start + 1, shift


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
    ranges,  # int32 [B, 3]
    record32,  # int32 [B, 6]
    record_x,  # fp32 [B, 2]
    stride,
    V,
    PURPOSE: tl.constexpr,
    DRAWS: tl.constexpr,
    MAY_CUT: tl.constexpr,
    CHAINED: tl.constexpr,
    SAMPLE: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    await_previous(CHAINED)
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
    tl.store(record32 + row * 6 + BEGIN, 0)
    tl.store(record32 + row * 6 + END, SLICES)
    if mode == SAMPLED:
        slope = slope_of(t)
        part = part * tl.exp2((tops - top) * slope)
        if wants_cut(k, p, V):
            depth = _depths(source, V, top, slope, SAMPLE)
            start, span, shift = _locate(depth, V, tl.sum(part), top_k_limit(k, V), p, SAMPLE)
            tl.store(ranges + row * 3 + START, start)
            tl.store(ranges + row * 3 + SPAN, span)
            tl.store(ranges + row * 3 + SHIFT, shift)
        elif DRAWS:
            word = first_word(tl.load(seeds + row), tl.load(positions + row), PURPOSE)
            counts = tl.minimum(tl.maximum(V - s * BLOCK, 0), BLOCK)
            found, sure = draw_by_estimate(
                source, V, part, counts, tl.sum(part), first, top, slope, -INFINITY, NO_ID, word,
                SLACK, BLOCK,
            )  # fmt: skip
            sure = sure & (floor <= 0)
            store_slices(record32 + row * 6, found, first, floor <= 0, SLICES, BLOCK)
            token = tl.where(sure, found, token)
            mode = tl.where(sure, DRAWN, mode)
    if DRAWS:
        tl.store(tokens + row, token.to(tl.int64))
        tl.store(statuses + row, status)
    tl.store(record32 + row * 6 + STATUS, status)
    tl.store(record32 + row * 6 + ROW_FIRST, first)
    tl.store(record32 + row * 6 + MODE, mode)
    tl.store(record_x + row * 2, top)
