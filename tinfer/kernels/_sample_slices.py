"""Kernels over slices of rows that turn logits into integer weights, and what is kept of a row.

Every row is cut into slices of BLOCK columns, one program each:

1. stats    a slice's maximum, and an estimate of its weights' sum.
2. row      (`_sample_row`) status and first maximum of a row. Rows without a cut are mostly drawn
            from at once; of the others a sample tells about where the cut is.
3. weights  sums of the exact weights; those of the range around the cut also in fine bins.
4. cut      (`_sample_scan`, `_sample_cut`) the exact last candidate kept and the kept weights'
            sum; then most rows are drawn from.
5. floors   (`_sample_floors`) for those that are not: sums of the masses after division, whose
            shortfall goes to the first candidate; then the draw.

Estimates and bins only direct the search. Every sum that decides anything is of integers, so
neither the split nor the order of the atomics shows in a result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._jit import to_fp32
from tinfer.kernels._masses import INFINITY, slope_of

FINE = tl.constexpr(512)  # bins of the range around the cut
FAR_BELOW = tl.constexpr(-(2.0**127))  # instead of a maximum that is -inf
# Planes of the per-slice sums.
COUNT, ABOVE_COUNT, MASS = (tl.constexpr(i) for i in range(3))
TOTAL, KEPT, ABOVE = (tl.constexpr(i) for i in range(3))
# Columns of the per-row record.
STATUS, ROW_FIRST, CUT_ID, MODE, BEGIN, END = (tl.constexpr(i) for i in range(6))
ENDED, GREEDY, SAMPLED, DRAWN = (tl.constexpr(i) for i in range(4))
# Columns of a row's range: its upper edge, its width and log2 of that of a fine bin, all in 2^24 of
# an octave.
START, SPAN, SHIFT = (tl.constexpr(i) for i in range(3))
# Columns of a row's place: where the cut is, what to collect there, and what comes before that.
WHERE, HIGHEST, LOWEST, COUNT_BEFORE, FEW = (tl.constexpr(i) for i in range(5))
WEIGHT_BEFORE, THRESHOLD = (tl.constexpr(i) for i in range(2))
# Where a cut is: among the candidates to collect, nowhere, or outside of the range.
IN_BIN, NOWHERE, MISSED = (tl.constexpr(i) for i in range(3))
MEMBERS = tl.constexpr(128)  # candidates that are collected at most
NO_ID = tl.constexpr(2**31 - 1)
MEMBER_COUNT, SLICES_DONE = (tl.constexpr(i) for i in range(2))  # columns of a row's counters


@triton.jit
def load_tile(row_start, column, V):
    """fp32 logits of some columns, -inf beyond the row."""
    return to_fp32(tl.load(row_start + column, mask=column < V, other=-INFINITY))


@triton.jit
def load_slices(part, row, plane, SLICES: tl.constexpr, PADDED: tl.constexpr):
    """[PADDED] values of one of the three planes of per-slice sums, 0 beyond the slices."""
    s = tl.arange(0, PADDED)
    return tl.load(part + (row * 3 + plane) * SLICES + s, mask=s < SLICES, other=0)


@triton.jit
def is_last(counter, programs):
    """Whether all other of so many programs have come here; what they stored can be read then."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1


@triton.jit
def await_previous(CHAINED: tl.constexpr):
    """CHAINED: this kernel may start before the one it follows is done, so may the next one; wait.

    Nothing may be read or written before this call.
    """
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _sample_stats_kernel(
    logits,  # fp32 | bf16 [B, V]
    temperature,  # fp32 [B]
    maxima,  # fp32 [B, SLICES]; +inf where the slice holds a NaN
    estimates,  # fp32 [B, SLICES]
    fine_weight,  # int64 [B, FINE]
    fine_count,  # int32 [B, FINE]
    counters,  # int32 [B, 2]
    stride,
    V,
    MAY_CUT: tl.constexpr,
    CHAINED: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
    row = (tl.program_id(0) // SLICES).to(tl.int64)
    s = tl.program_id(0) % SLICES
    x = load_tile(logits + row * stride, s * BLOCK + tl.arange(0, BLOCK), V)
    slope = slope_of(tl.load(temperature + row))
    top = tl.max(tl.where(x != x, INFINITY, x))
    estimate = tl.sum(tl.exp2((x - tl.maximum(top, FAR_BELOW)) * slope))
    tl.store(maxima + row * SLICES + s, top)
    tl.store(estimates + row * SLICES + s, estimate)
    if s == 0:
        tl.store(counters + row * 2 + tl.arange(0, 2), tl.zeros([2], tl.int32))
    if MAY_CUT:
        SHARE: tl.constexpr = FINE // triton.next_power_of_2(SLICES)
        for start in range(s * SHARE, FINE, SLICES * SHARE):
            fine = row * FINE + start + tl.arange(0, SHARE)
            tl.store(fine_weight + fine, tl.zeros([SHARE], tl.int64))
            tl.store(fine_count + fine, tl.zeros([SHARE], tl.int32))
