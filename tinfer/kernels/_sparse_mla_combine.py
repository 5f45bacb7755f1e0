"""Exact merge of split attention outputs, with the sink applied once.

    M = max lse;  w = 2^(lse - M);  out = sum w o / sum w / (1 + 2^(sink log2 e - lse_total))

A split without keys has lse -inf and weight 0. The order of the sum is fixed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._jit import to_bf16
from tinfer.kernels._sparse_mla_forward import LOG2E


@triton.jit(do_not_specialize=["splits"])
def _sparse_mla_combine_kernel(
    part_out, part_max, part_lse, sink, out, max_logit, lse, heads, splits,
    BLOCK_S: tl.constexpr, VALUE: tl.constexpr, BLOCK_V: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program = one head of one token; part_* are [rows, splits, ...]. EARLY: this kernel
    may start before the one that writes the parts is done, and waits for it."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    column = tl.arange(0, BLOCK_V)
    present = split < splits
    at = row * splits + split
    logs = tl.load(part_lse + at, mask=present, other=float("-inf"))
    tops = tl.load(part_max + at, mask=present, other=float("-inf"))
    inside = present[:, None] & (column[None, :] < VALUE)
    parts = tl.load(part_out + at[:, None] * VALUE + column[None, :], mask=inside, other=0.0)
    highest = tl.max(logs, axis=0)
    empty = highest == float("-inf")
    weight = tl.exp2(logs - tl.where(empty, 0.0, highest))
    total = tl.sum(weight, axis=0)
    divisor = tl.where(empty, 1.0, total)
    log_sum = highest + tl.log2(divisor)
    factor = 1.0 / divisor
    if sink is not None:
        sink_log2 = tl.load(sink + row % heads) * LOG2E
        factor = factor / (1.0 + tl.exp2(sink_log2 - log_sum))
    value = tl.sum(parts * weight[:, None], axis=0) * factor
    value = tl.where(empty, 0.0, value)
    tl.store(out + row * VALUE + column, to_bf16(value), mask=column < VALUE)
    tl.store(max_logit + row, tl.where(total == total, tl.max(tops, axis=0), total))
    tl.store(lse + row, log_sum)
