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

from tinfer.kernels._masses import INFINITY, weight_q31
from tinfer.kernels._sample_slices import BINS, FINE, fine_bin, load_tile, scaled_bin

MEMBERS = tl.constexpr(256)  # candidates of one fine bin that are ranked pairwise
NO_ID = tl.constexpr(2**31 - 1)
STEP = tl.constexpr(32)  # candidates compared with all collected ones at a time


@triton.jit
def _key(x):
    """int32 that orders like the logits; both zeros alike."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _collect(source, V, slope, low, high, x_out, id_out, counter, TILE: tl.constexpr):
    """Append the candidates whose scaled logit lies in low..high, in any order; how many."""
    for start in range(0, V, TILE):
        column = start + tl.arange(0, TILE)
        x = load_tile(source, column, V)
        t = scaled_bin(x, slope)[1]
        hit = (t >= low) & (t <= high) & (column < V)
        at = tl.atomic_add(counter + tl.zeros([TILE], tl.int32), 1, mask=hit, sem="relaxed")
        hit = hit & (at < MEMBERS)
        tl.store(x_out + at, x, mask=hit)
        tl.store(id_out + at, column, mask=hit)
    tl.debug_barrier()
    return tl.load(counter, volatile=True)


@triton.jit
def _comes_before(x, i, y, j):
    """Whether candidate (x, i) stands before (y, j)."""
    return (x > y) | ((x == y) & (i < j))


@triton.jit
def _rank(x_in, id_in, n, place, top, slope, weight_before, count_before, limit, threshold):
    """(cut logit, cut id, kept weight) among the collected candidates of fine bin `place`."""
    top_bin, upper, lower, wanted = place
    i = tl.arange(0, MEMBERS)
    x = tl.load(x_in + i, mask=i < n, other=-INFINITY)
    ids = tl.load(id_in + i, mask=i < n, other=NO_ID)
    mine = (i < n) & _is_in_bin(x, slope, top_bin, upper, lower, wanted)
    w = tl.where(mine, weight_q31(x, top, slope), 0).to(tl.int64)
    weight = tl.full([MEMBERS], 0, tl.int64) + weight_before
    count = tl.full([MEMBERS], 0, tl.int32) + count_before
    for start in range(0, n, STEP):
        j = start + tl.arange(0, STEP)
        xj = tl.load(x_in + j, mask=j < n, other=-INFINITY)
        idj = tl.load(id_in + j, mask=j < n, other=NO_ID)
        other = (j < n) & _is_in_bin(xj, slope, top_bin, upper, lower, wanted)
        wj = tl.where(other, weight_q31(xj, top, slope), 0).to(tl.int64)
        before = _comes_before(xj[None, :], idj[None, :], x[:, None], ids[:, None])
        before = before & other[None, :]
        weight += tl.sum(tl.where(before, wj[None, :], 0), axis=1)
        count += tl.sum(before.to(tl.int32), axis=1)
    keep = mine & (count < limit) & (weight <= threshold)
    cut = tl.min(tl.where(keep, x, INFINITY))
    cut_id = tl.max(tl.where(keep & (x == cut), ids, -1))
    return cut, cut_id, weight_before + tl.sum(tl.where(keep, w, 0))


@triton.jit
def _is_in_bin(x, slope, top_bin, upper, lower, wanted):
    coarse, scaled = scaled_bin(x, slope)
    depth = tl.minimum(top_bin - coarse, BINS - 1)
    inside = (depth >= upper) & (depth <= lower)
    return inside & (fine_bin(scaled, top_bin, upper, lower) == wanted)


@triton.jit
def _bin_keys(source, V, slope, place, TILE: tl.constexpr):
    """(least, greatest) key of the candidates of one fine bin, which has some."""
    top_bin, upper, lower, wanted = place
    least, greatest = tl.full([TILE], NO_ID, tl.int32), tl.full([TILE], -NO_ID, tl.int32)
    for start in range(0, V, TILE):
        column = start + tl.arange(0, TILE)
        x = load_tile(source, column, V)
        hit = (column < V) & _is_in_bin(x, slope, top_bin, upper, lower, wanted)
        least = tl.minimum(least, tl.where(hit, _key(x), NO_ID))
        greatest = tl.maximum(greatest, tl.where(hit, _key(x), -NO_ID))
    return tl.min(least).to(tl.int64), tl.max(greatest).to(tl.int64)


@triton.jit
def _sums_from(source, V, key, top, slope, TILE: tl.constexpr):
    """(count, weight) of the candidates whose key is at least `key`, int64."""
    count, weight = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int64)
    for start in range(0, V, TILE):
        column = start + tl.arange(0, TILE)
        x = load_tile(source, column, V)
        hit = (column < V) & (_key(x) >= key)
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
def _bisect(source, V, low, high, top, slope, limit, threshold, TILE: tl.constexpr):
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


@triton.jit
def find_cut(
    source,
    V,
    place,  # (top_bin, upper, lower)
    fine_weight,  # the row's fine bins
    fine_count,
    above_weight,
    above_count,
    x_scratch,  # the row's space for collected candidates
    id_scratch,
    counter,
    top,
    slope,
    limit,
    threshold,
    TILE: tl.constexpr,
):
    top_bin, upper, lower = place
    b = tl.arange(0, FINE)
    weight, count = tl.load(fine_weight + b), tl.load(fine_count + b)
    weight_to = tl.cumsum(weight) + above_weight
    count_to = tl.cumsum(count) + above_count
    reached = (count_to >= limit) | (weight_to > threshold)
    wanted = tl.sum((reached == 0).to(tl.int32))
    missed = (wanted == FINE) | (above_count >= limit) | (above_weight > threshold)
    low, high = tl.full([], 0, tl.int64), tl.full([], -1, tl.int64)
    cut, cut_id = tl.full([], 0.0, tl.float32), tl.full([], 0, tl.int32)
    kept = tl.full([], 0, tl.int64)
    if missed:
        low, high = _key(tl.full([], -INFINITY, tl.float32)).to(tl.int64), _key(top).to(tl.int64)
    else:
        at_bin = b == wanted
        weight_before = tl.sum(tl.where(at_bin, weight_to - weight, 0))
        count_before = tl.sum(tl.where(at_bin, count_to - count, 0))
        # The bin's scaled logits, widened by what rounding can do to `fine_bin`.
        width = (lower - upper + 1).to(tl.float32) / FINE
        origin = (top_bin + 1 - upper).to(tl.float32)
        slack = (tl.abs(origin) + BINS) * 1e-6
        begin = origin - wanted.to(tl.float32) * width + slack
        end = origin - (wanted + 1).to(tl.float32) * width - slack
        begin = tl.where(wanted == 0, INFINITY, begin)
        end = tl.where(wanted == FINE - 1, -INFINITY, end)
        here = (top_bin, upper, lower, wanted)
        n = _collect(source, V, slope, end, begin, x_scratch, id_scratch, counter, TILE)
        if n <= MEMBERS:
            cut, cut_id, kept = _rank(
                x_scratch,
                id_scratch,
                n,
                here,
                top,
                slope,
                weight_before,
                count_before,
                limit,
                threshold,
            )
        else:
            low, high = _bin_keys(source, V, slope, here, TILE)
    if low <= high:
        cut, cut_id, kept = _bisect(source, V, low, high, top, slope, limit, threshold, TILE)
    return cut, cut_id, kept
