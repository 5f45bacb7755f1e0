"""Kernels of the top-k selection: maxima of a row's parts, and one pass over its segments.

Launched by `tinfer.kernels.topk`, whose docstring gives the passes and the layouts.

A pass does not search all its scores. The k-th largest of the maxima of disjoint parts is a score
that at least k scores reach (`reached`); the few that do are listed in index order, read back as
a short tile, and searched there. If too many reach it (equal scores, or the best ones lie in few
parts), the exact cut is found by bisection in memory and listed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._select import (
    choose,
    count_all,
    key_of,
    last_tie,
    middle_key,
    reached,
    score_of,
    split_columns,
)


@triton.jit
def blocks_of(length, most, SIZE: tl.constexpr):
    """Blocks of SIZE that hold `length` positions, 0 to `most`."""
    return tl.minimum((tl.maximum(length, 0) + SIZE - 1) // SIZE, most)


@triton.jit
def _before(count, ROWS: tl.constexpr, THREADS: tl.constexpr):
    """int32 [ROWS]: sums of the counts (at most 4) of all rows before.

    Threads are side by side, so a scan takes THREADS rows. Two scans share an integer's halves.
    """
    if ROWS >= 2 * THREADS:
        PAIRS: tl.constexpr = ROWS // (2 * THREADS)
        low, high = tl.split(tl.permute(tl.reshape(count, [PAIRS, 2, THREADS]), (0, 2, 1)))
        both = low + (high << 16)
        total = tl.sum(both, axis=1)
        both = tl.cumsum(both, axis=1) - both
        total_low, total_high = total & 0xFFFF, total >> 16
        first = (tl.cumsum(total_low + total_high, axis=0) - total_low - total_high)[:, None]
        low, high = (both & 0xFFFF) + first, (both >> 16) + first + total_low[:, None]
        before = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [ROWS])
    else:
        before = tl.cumsum(count, axis=0) - count
    return before


@triton.jit
def put(out_ptr, step, flags, value, ROWS: tl.constexpr, THREADS: tl.constexpr):
    """Store the flagged values [ROWS, 4] one after another, row by row."""
    flag0, flag1, flag2, flag3 = split_columns(flags, ROWS)
    value0, value1, value2, value3 = split_columns(value, ROWS)
    at = out_ptr + _before(flag0 + flag1 + flag2 + flag3, ROWS, THREADS) * step
    tl.store(at, value0, mask=flag0 != 0)
    at += flag0 * step
    tl.store(at, value1, mask=flag1 != 0)
    at += flag1 * step
    tl.store(at, value2, mask=flag2 != 0)
    at += flag2 * step
    tl.store(at, value3, mask=flag3 != 0)


@triton.jit
def part_maxima(score, PARTS: tl.constexpr, ROWS: tl.constexpr, THREADS: tl.constexpr):
    """fp32 [THREADS, PARTS // THREADS]: maxima of disjoint parts of [ROWS, 4], NaN ignored.

    A part is what one thread holds or a share of it: with four columns a thread, THREADS rows
    lie side by side.
    """
    SHARES: tl.constexpr = PARTS // THREADS
    parts = tl.reshape(score, [SHARES, ROWS // PARTS, THREADS, 4])
    return tl.trans(tl.max(tl.max(parts, axis=3), axis=1))


@triton.jit
def load_maxima(maxima_ptr, maxima, PARTS: tl.constexpr):
    """The `maxima` maxima of a row as fp32 [PARTS // 4, 4], -inf behind them."""
    part = 4 * tl.arange(0, PARTS // 4)[:, None] + tl.arange(0, 4)[None, :]
    return tl.load(maxima_ptr + part, mask=part < maxima, other=float("-inf"))


@triton.jit
def _tile(at, first, stop, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    """fp32 [ROWS, 4]: the scores at columns `first` on, NaN from `stop` on."""
    lane = first + 4 * tl.arange(0, ROWS)[:, None] + tl.arange(0, 4)[None, :]
    readable = (stop + 15) // 16 * 16 if ALIGNED else stop
    score = tl.load(at + lane, mask=lane < readable, other=float("nan"))
    if first + ROWS * 4 > stop:
        score = tl.where(lane < stop, score, float("nan"))
    return score


@triton.jit
def _tile_maxima(at, begin, stop, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    """fp32 [ROWS, 4]: maxima over the columns that are a tile apart, -inf for none."""
    best = tl.full([ROWS, 4], float("-inf"), tl.float32)
    for first in range(begin, stop, ROWS * 4):
        best = tl.maximum(best, _tile(at, first, stop, ROWS, ALIGNED))
    return best


@triton.jit
def _reach(at, begin, stop, least, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    """How many scores of the columns begin .. stop - 1 are at least `least`."""
    count = tl.zeros([ROWS, 4], tl.float32)
    for first in range(begin, stop, ROWS * 4):
        count += (_tile(at, first, stop, ROWS, ALIGNED) >= least).to(tl.float32)
    return tl.sum(tl.sum(count, axis=1), axis=0).to(tl.int32)


@triton.jit
def _cut(at, begin, stop, least, k, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    """`threshold` of columns in memory of which more than k reach `least`."""
    low, high = key_of(least), key_of(tl.full((), float("inf"), tl.float32)) + 1
    above = tl.zeros((), tl.int32)
    step = above
    while high > low + 1:
        middle = middle_key(low, high, step)
        here = _reach(at, begin, stop, score_of(middle), ROWS, ALIGNED)
        if here >= k:
            low = middle
        else:
            high, above = middle, here
        step += 1
    return score_of(high), score_of(low), k - above


@triton.jit
def _list_tile(
    list_at, score, first, place, least, tie, left,
    ROWS: tl.constexpr, LIST: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """List the lanes of a tile that are chosen, from `place` on: (place, left) after it."""
    lane = 4 * tl.arange(0, ROWS)[:, None] + tl.arange(0, 4)[None, :]
    chosen = score >= least
    if left > 0:
        equal = score == tie
        ties = count_all(equal)
        last = first * 0 + ROWS * 4
        if ties > left:
            last = last_tie(equal, lane, left, ROWS * 4)
        chosen = chosen | (equal & (lane <= last))
        left -= tl.minimum(ties, left)
    count = count_all(chosen)
    if (count > 0) & (place + count <= LIST):
        put(list_at + place, 1, chosen.to(tl.int32), first + lane, ROWS, THREADS)
    return place + count, left


@triton.jit
def _list(
    at, list_at, begin, stop, least, k,
    MOST: tl.constexpr, ROWS: tl.constexpr, LIST: tl.constexpr, THREADS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """List the columns whose scores reach `least`, in order; the best k if more than MOST do."""
    tie, need = tl.full((), float("nan"), tl.float32), tl.zeros((), tl.int32)
    count, tries = need + (MOST + 1), need
    while count > MOST:
        if tries > 0:
            least, tie, need = _cut(at, begin, stop, least, k, ROWS, ALIGNED)
        count, left = tl.zeros((), tl.int32), need
        score = _tile(at, begin, stop, ROWS, ALIGNED)
        for first in range(begin, stop, ROWS * 4):
            ahead = _tile(at, first + ROWS * 4, stop, ROWS, ALIGNED)
            count, left = _list_tile(
                list_at, score, first, count, least, tie, left, ROWS, LIST, THREADS
            )
            score = ahead
        tries += 1
    return count


@triton.jit
def _kept_places(counts_at, SEGMENTS: tl.constexpr, KEPT: tl.constexpr, LIST: tl.constexpr):
    """(how many pairs the segments of a row kept, int32 [LIST // 4, 4]: where the first lie)."""
    place = 4 * tl.arange(0, LIST // 4)[:, None] + tl.arange(0, 4)[None, :]
    column = place
    count = tl.zeros((), tl.int32)
    for segment in tl.range(0, SEGMENTS, loop_unroll_factor=16):
        kept = tl.load(counts_at + segment)
        count += kept
        column += tl.where(place >= count, KEPT - kept, 0)
    return count, column


@triton.jit(do_not_specialize=["tasks", "columns", "tiles"])
def part_maxima_kernel(
    scores_ptr,  # fp32 [T, N]
    lengths_ptr,  # int32 [T]
    maxima_ptr,  # fp32 [T, tiles * PARTS]
    tasks,
    columns,
    tiles,
    row_stride,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        row = tl.zeros((), tl.int64) + task // tiles
        start = task % tiles * ROWS * 4
        lane = 4 * tl.arange(0, ROWS)[:, None] + tl.arange(0, 4)[None, :]
        limit = tl.minimum(tl.load(lengths_ptr + row), columns) - start
        readable = (limit + 15) // 16 * 16 if ALIGNED else limit
        at = scores_ptr + row * row_stride + start + lane
        score = tl.load(at, mask=lane < readable, other=float("-inf"))
        if limit < ROWS * 4:
            score = tl.where(lane < limit, score, float("-inf"))
        best = part_maxima(score, PARTS, ROWS, PARTS)
        at = tl.arange(0, PARTS)[:, None] + tl.arange(0, 1)[None, :]
        tl.store(maxima_ptr + (tl.zeros((), tl.int64) + task) * PARTS + at, best)


@triton.jit(do_not_specialize=["tasks", "columns", "width", "span", "k"])
def topk_kernel(
    scores_ptr,  # fp32 [T, N], or [T, segments * kept] of the pass before
    indices_ptr,  # int32 indices of the pass before, or None
    lengths_ptr,  # int32 [T]
    offset_ptr,  # int32 [T] or None
    maxima_ptr,  # fp32 [T, maxima] maxima of disjoint parts of the row, or None
    list_ptr,  # int32 [tasks, LIST], scratch, or None
    counts_ptr,  # int32 [T, segments]: how many pairs each segment kept, or None
    scores_out_ptr,  # fp32 [T, SEGMENTS * KEPT] for the next pass, or None
    out_ptr,  # int32 [T, k], or indices for the next pass
    tasks,
    columns,  # of the scores, in every pass
    width,  # columns of this pass
    span,  # columns of a segment
    k,
    maxima,
    row_stride,
    out_stride,
    out_step,
    SEGMENTS: tl.constexpr,
    BEFORE: tl.constexpr,  # segments of the pass before, or 0
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    KEPT_BLOCK: tl.constexpr,
    LIST: tl.constexpr,
    PARTS: tl.constexpr,
    THREADS: tl.constexpr,
    PIN: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        row = tl.zeros((), tl.int64) + task // SEGMENTS
        begin = (task % SEGMENTS) * span
        scores_at = scores_ptr + row * row_stride
        stop = width
        if indices_ptr is None:
            stop = tl.minimum(tl.load(lengths_ptr + row), columns)
            if PIN > 0:
                stop = tl.maximum(blocks_of(tl.load(lengths_ptr + row), columns, PIN) - 1, 0)
        stop = tl.minimum(stop, begin + span)
        if LIST > 0:
            if maxima_ptr is not None:
                least = reached(load_maxima(maxima_ptr + row * maxima, maxima, PARTS), k)
            elif BEFORE == 0:
                least = reached(_tile_maxima(scores_at, begin, stop, ROWS, ALIGNED), k)
            else:
                least = tl.full((), float("-inf"), tl.float32)
            MOST: tl.constexpr = LIST if scores_out_ptr is None else KEPT
            list_at = list_ptr + (tl.zeros((), tl.int64) + task) * LIST
            place = 4 * tl.arange(0, LIST // 4)[:, None] + tl.arange(0, 4)[None, :]
            column = place
            count = tl.zeros((), tl.int32) + (LIST + 1)
            if BEFORE > 0:
                count, column = _kept_places(counts_ptr + row * BEFORE, BEFORE, KEPT, LIST)
            if count > LIST:
                count = _list(
                    scores_at, list_at, begin, stop, least, k, MOST, ROWS, LIST, THREADS, ALIGNED
                )
                tl.debug_barrier()
                column = tl.load(list_at + place, mask=place < count, other=0)
            if scores_out_ptr is not None:
                tl.store(counts_ptr + task, count)
            score = tl.load(scores_at + column, mask=place < count, other=float("nan"))
        else:
            column = begin + 4 * tl.arange(0, ROWS)[:, None] + tl.arange(0, 4)[None, :]
            score = _tile(scores_at, begin, stop, ROWS, ALIGNED)
        TILE: tl.constexpr = LIST // 4 if LIST > 0 else ROWS
        index = column
        if indices_ptr is not None:
            index_at = indices_ptr + row * row_stride + column
            index = tl.load(index_at, mask=score == score, other=-1)
        at = row * out_stride + (task % SEGMENTS) * KEPT * out_step
        if scores_out_ptr is not None:
            place = 4 * tl.arange(0, TILE)[:, None] + tl.arange(0, 4)[None, :]
            tl.store(scores_out_ptr + at + place, score, mask=place < KEPT)
            tl.store(out_ptr + at + place, index, mask=place < KEPT)
        else:
            if offset_ptr is not None:
                index += tl.load(offset_ptr + row)
            flags = choose(score, k, TILE)
            put(out_ptr + at, out_step, flags, index, TILE, THREADS)
            filler = tl.arange(0, KEPT_BLOCK)
            count = count_all(flags != 0)
            rest = tl.full([KEPT_BLOCK], -1, tl.int32)
            if PIN > 0:  # the newest block follows the chosen ones, and k + 1 are wanted
                newest = blocks_of(tl.load(lengths_ptr + row), columns, PIN) - 1
                rest = tl.where(filler == count, newest, -1)
            last = k if PIN > 0 else k - 1
            mask = (filler >= count) & (filler <= last)
            tl.store(out_ptr + at + filler * out_step, rest, mask=mask)
