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
def _key(score):
    """fp32 -> int32 of the same order."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score(key):
    """The inverse of `_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _count(mask):
    """How many lanes hold; counts below 2^24 are exact in fp32, whose sum is the cheaper one."""
    return tl.sum(tl.sum(mask.to(tl.float32), axis=1), axis=0).to(tl.int32)


@triton.jit
def _middle(low, high, step):
    """A key strictly between two keys: of the mean value, or the mean key."""
    least, most = _score(low), _score(high)
    mean = _key(0.5 * least + 0.5 * most)
    finite = (least > float("-inf")) & (most < float("inf"))
    by_key = (low & high) + ((low ^ high) >> 1)
    guess = tl.where(finite & ((step & 7) != 7), mean, by_key)
    return tl.minimum(tl.maximum(guess, low + 1), high - 1)


@triton.jit
def threshold(score, k):
    """(least, tie, need): the k largest are those >= least and the first `need` equal to tie.

    With k or fewer valid scores, all of them are.
    """
    count = _count(score == score)  # scores >= low
    above = count * 0  # scores >= high
    low = _key(tl.min(tl.min(score, axis=1), axis=0))
    high = _key(tl.max(tl.max(score, axis=1), axis=0)) + 1
    step = count * 0
    while (count > k) & (high > low + 1):
        middle = _middle(low, high, step)
        here = _count(score >= _score(middle))
        if here >= k:
            low, count = middle, here
        else:
            high, above = middle, here
        step += 1
    exact = count <= k
    least = tl.where(exact, _score(low), _score(high))
    tie = tl.where(exact, float("nan"), _score(low))
    return least, tie, tl.where(exact, 0, k - above)


@triton.jit
def _last_tie(equal, lane, need, LANES: tl.constexpr):
    """The lane of the need-th one of `equal`."""
    first, last = need * 0 - 1, need * 0 + LANES - 1
    while last > first + 1:
        middle = (first + last) >> 1
        if _count(equal & (lane <= middle)) >= need:
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
        last = _last_tie(score == tie, lane, need, ROWS * 4)
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
