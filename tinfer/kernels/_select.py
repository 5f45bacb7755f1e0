"""Device functions that find the k largest of the scores a program holds in registers.

Scores are fp32 [ROWS, 4], four neighbours in one thread; NaN marks what is not valid: no
comparison ever holds for it, and -0 equals 0, so plain comparisons give the order wanted. The
k-th largest score is found by bisection over values: each step counts the scores at or above a
guess. Bounds are kept as integer keys of the same order, which tell when no float is left
between them, and every eighth step bisects the keys, so that no distribution takes more than
about 250 steps (12 are usual).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_of(score):
    """fp32 -> int32 of the same order."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def score_of(key):
    """The inverse of `key_of`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def count_all(mask):
    """How many lanes hold; counts below 2^24 are exact in fp32, whose sum is the cheaper one."""
    return tl.sum(tl.sum(mask.to(tl.float32), axis=1), axis=0).to(tl.int32)


@triton.jit
def middle_key(low, high, step):
    """A key strictly between two keys: of the mean value, or the mean key."""
    least, most = score_of(low), score_of(high)
    mean = key_of(0.5 * least + 0.5 * most)
    finite = (least > float("-inf")) & (most < float("inf"))
    by_key = (low & high) + ((low ^ high) >> 1)
    guess = tl.where(finite & ((step & 7) != 7), mean, by_key)
    return tl.minimum(tl.maximum(guess, low + 1), high - 1)


@triton.jit
def reached(maxima, k):
    """A score that at least k, and with luck not many more, of fp32 [R, C] reach; -inf if none.

    With the maxima of disjoint parts of a row, at least k scores of the row reach it.
    """
    count = count_all(maxima == maxima)
    low = key_of(tl.min(tl.min(maxima, axis=1), axis=0))
    high = key_of(tl.max(tl.max(maxima, axis=1), axis=0)) + 1
    least = tl.where(count >= k, low, key_of(low * 0.0 + float("-inf")))
    step = count * 0
    while (count > k + k // 8) & (high > low + 1):
        middle = middle_key(low, high, step)
        here = count_all(maxima >= score_of(middle))
        if here >= k:
            low, least, count = middle, middle, here
        else:
            high = middle
        step += 1
    return score_of(least)


@triton.jit
def threshold(score, k):
    """(least, tie, need): the k largest are those >= least and the first `need` equal to tie.

    With k or fewer valid scores, all of them are.
    """
    count = count_all(score == score)  # scores >= low
    above = count * 0  # scores >= high
    low = key_of(tl.min(tl.min(score, axis=1), axis=0))
    high = key_of(tl.max(tl.max(score, axis=1), axis=0)) + 1
    step = count * 0
    while (count > k) & (high > low + 1):
        middle = middle_key(low, high, step)
        here = count_all(score >= score_of(middle))
        if here >= k:
            low, count = middle, here
        else:
            high, above = middle, here
        step += 1
    exact = count <= k
    least = tl.where(exact, score_of(low), score_of(high))
    tie = tl.where(exact, float("nan"), score_of(low))
    return least, tie, tl.where(exact, 0, k - above)


@triton.jit
def last_tie(equal, lane, need, LANES: tl.constexpr):
    """The lane of the need-th one of `equal`."""
    first, last = need * 0 - 1, need * 0 + LANES - 1
    while last > first + 1:
        middle = (first + last) >> 1
        if count_all(equal & (lane <= middle)) >= need:
            last = middle
        else:
            first = middle
    return last


@triton.jit
def choose(score, k, ROWS: tl.constexpr):
    """0/1 flags int32 [ROWS, 4] of the k largest; ties at the last place go to the lowest lanes."""
    least, tie, need = threshold(score, k)
    if need > 0:
        lane = tl.arange(0, ROWS)[:, None] * 4 + tl.arange(0, 4)[None, :]
        last = last_tie(score == tie, lane, need, ROWS * 4)
        score = tl.where((score == tie) & (lane > last), float("nan"), score)
        least = tie
    return (score >= least).to(tl.int32)


@triton.jit
def split_columns(x, ROWS: tl.constexpr):
    """The four columns [ROWS] of [ROWS, 4]."""
    even, odd = tl.split(tl.reshape(x, [ROWS, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth
