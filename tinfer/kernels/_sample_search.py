"""The search for a row's cut: the last candidate that top-k and top-p keep.

It is the first candidate, in the order (logit descending, id ascending), at which the inclusive
count reaches top-k or the inclusive weight passes top-p's threshold. The fine bins of the range
around it give the bin it falls into; the few candidates of that bin are collected and ranked
pairwise. Where the range missed the cut or the bin holds too many, a bisection over the logits'
bit patterns, one pass over the row a step, finds it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._masses import INFINITY, divide, octaves_q24, reciprocal, weight_q31
from tinfer.kernels._sample_slices import MEMBERS, NO_ID, load_tile

STEP = tl.constexpr(32)  # candidates compared with all collected ones at a time


@triton.jit
def key_of(x):
    """int32 that orders like the logits; both zeros alike."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _comes_before(x, i, y, j):
    """Whether candidate (x, i) stands before (y, j)."""
    return (x > y) | ((x == y) & (i < j))


@triton.jit
def rank(x_in, id_in, n, top, slope, weight_before, count_before, limit, threshold):
    """(cut logit, cut id, kept weight) among the collected candidates of some fine bins."""
    i = tl.arange(0, MEMBERS)
    x = tl.load(x_in + i, mask=i < n, other=-INFINITY)
    ids = tl.load(id_in + i, mask=i < n, other=NO_ID)
    w = tl.where(i < n, weight_q31(x, top, slope), 0).to(tl.int64)
    weight = tl.full([MEMBERS], 0, tl.int64) + weight_before
    count = tl.full([MEMBERS], 0, tl.int32) + count_before
    for start in range(0, n, STEP):
        j = start + tl.arange(0, STEP)
        xj = tl.load(x_in + j, mask=j < n, other=-INFINITY)
        idj = tl.load(id_in + j, mask=j < n, other=NO_ID)
        wj = tl.where(j < n, weight_q31(xj, top, slope), 0).to(tl.int64)
        before = _comes_before(xj[None, :], idj[None, :], x[:, None], ids[:, None])
        before = before & (j < n)[None, :]
        weight += tl.sum(tl.where(before, wj[None, :], 0), axis=1)
        count += tl.sum(before.to(tl.int32), axis=1)
    keep = (i < n) & (count < limit) & (weight <= threshold)
    cut = tl.min(tl.where(keep, x, INFINITY))
    cut_id = tl.max(tl.where(keep & (x == cut), ids, -1))
    return cut, cut_id, weight_before + tl.sum(tl.where(keep, w, 0))


@triton.jit
def _member_masses(x, ids, live, cut, cut_id, top, slope, total, first, rest):
    """int64 masses of collected candidates, `rest` more for the first one."""
    keep = live & ((x > cut) | ((x == cut) & (ids <= cut_id)))
    w = tl.where(keep, weight_q31(x, top, slope), 0)
    mass = divide(w, total, reciprocal(total)).to(tl.int64)
    return mass + tl.where(keep & (ids == first), rest, 0)


@triton.jit
def draw_member(x_in, id_in, n, cut, cut_id, top, slope, total, first, target):
    """The token drawn from a row all of whose kept candidates are collected."""
    i = tl.arange(0, MEMBERS)
    x = tl.load(x_in + i, mask=i < n, other=-INFINITY)
    ids = tl.load(id_in + i, mask=i < n, other=NO_ID)
    mass = _member_masses(x, ids, i < n, cut, cut_id, top, slope, total, first, 0)
    rest = 2147483648 - tl.sum(mass)
    upto = tl.zeros([MEMBERS], tl.int64)
    for start in range(0, n, STEP):
        j = start + tl.arange(0, STEP)
        xj = tl.load(x_in + j, mask=j < n, other=-INFINITY)
        idj = tl.load(id_in + j, mask=j < n, other=NO_ID)
        mj = _member_masses(xj, idj, j < n, cut, cut_id, top, slope, total, first, rest)
        upto += tl.sum(tl.where(idj[None, :] <= ids[:, None], mj[None, :], 0), axis=1)
    return tl.min(tl.where((i < n) & (upto > target), ids, NO_ID))


@triton.jit
def bin_keys(source, V, top, slope, highest, lowest, TILE: tl.constexpr):
    """(least, greatest) key of the candidates of a fine bin, which holds some."""
    least, greatest = tl.full([TILE], NO_ID, tl.int32), tl.full([TILE], -NO_ID, tl.int32)
    for start in range(0, V, TILE):
        x = load_tile(source, start + tl.arange(0, TILE), V)
        q = octaves_q24(x, top, slope)
        hit = (q <= highest) & (q >= lowest)
        least = tl.minimum(least, tl.where(hit, key_of(x), NO_ID))
        greatest = tl.maximum(greatest, tl.where(hit, key_of(x), -NO_ID))
    return tl.min(least).to(tl.int64), tl.max(greatest).to(tl.int64)


@triton.jit
def _sums_from(source, V, key, top, slope, TILE: tl.constexpr):
    """(count, weight) of the candidates whose key is at least `key`, int64."""
    count, weight = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int64)
    for start in range(0, V, TILE):
        column = start + tl.arange(0, TILE)
        x = load_tile(source, column, V)
        hit = (column < V) & (key_of(x) >= key)
        count += hit.to(tl.int32)
        weight += tl.where(hit, weight_q31(x, top, slope), 0).to(tl.int64)
    return tl.sum(count).to(tl.int64), tl.sum(weight)


@triton.jit
def _nth_id(source, V, value, n, TILE: tl.constexpr):
    """The column of the n-th logit (from 1) that equals `value`."""
    seen, found = tl.full([], 0, tl.int32), tl.full([], -1, tl.int32)
    for start in range(0, V, TILE):
        column = start + tl.arange(0, TILE)
        x = load_tile(source, column, V)
        same = ((x == value) & (column < V)).to(tl.int32)
        hit = (same > 0) & (tl.cumsum(same) + seen == n)
        found = tl.maximum(found, tl.max(tl.where(hit, column, -1)))
        seen += tl.sum(same)
    return found


@triton.jit
def bisect(source, V, low, high, top, slope, limit, threshold, TILE: tl.constexpr):
    """(cut logit, cut id, kept weight), the cut's key known to lie in low..high."""
    while low < high:
        middle = low + (high - low + 1) // 2
        count, weight = _sums_from(source, V, middle, top, slope, TILE)
        reached = (count >= limit) | (weight > threshold)
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    key = low.to(tl.int32)
    cut = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    count, weight = _sums_from(source, V, low + 1, top, slope, TILE)
    w = weight_q31(cut, top, slope).to(tl.int64)
    by_weight = tl.where(w > 0, (threshold - weight) // tl.maximum(w, 1) + 1, V)
    ties = tl.minimum(limit - count, by_weight)
    return cut, _nth_id(source, V, cut, ties, TILE), weight + ties * w
