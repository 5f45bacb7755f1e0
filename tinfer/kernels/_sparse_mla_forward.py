"""The portable sparse attention kernel: one program = one token, up to 64 heads, one split.

    s = q k^T;  m = max s;  p = exp2((s - m) * scale * log2 e);  o = (sum bf16(p) v) / sum p

over groups of GROUP entries of the two lists taken as one, with a running maximum that is known
for the whole group before any of its p is rounded; the gathered tile is both key and value. Key
channels beyond the value's (TAIL) join the logits only. Splits divide the row's groups evenly;
each writes its normalized output in fp32, its maximum and its log2 lse, which
`sparse_mla_combine` merges.

Where a tile holds a whole group and none straddles the lists (ALIGNED), each tile is gathered
once, by `_attend`. Elsewhere `_attend_groups` goes through a group twice, for the maximum first.

Source: online softmax and split-KV as in FlashAttention 2 and FlashDecoding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.compat.sparse_mla import BLOCK
from tinfer.kernels._jit import _dot, to_bf16
from tinfer.kernels._sparse_mla_tile import load_slots, load_tile, used_entries

LOG2E = tl.constexpr(1.4426950408889634)
GROUP = tl.constexpr(BLOCK)


@triton.jit
def _attend(
    cache, slots, count, rows, page_stride, first, last,
    q, q_tail, acc, top, total, scale_log2,
    VALUE: tl.constexpr, BLOCK_V: tl.constexpr, TAIL: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, LAYOUT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Attend to the blocks first..last-1 of one source.

    The conditions hold in every iteration; they steer Triton's scheduling. A dot result that
    reaches the next dot only through a branch is not a chained dot, for which both warp groups
    of a Hopper processor would compute all logits; and with the slots' load in a branch the
    gather of the next tile starts at the top of the loop. Packed rows, decoded before the first
    dot, gain from a branch round the second one as well. (H200, 640 keys of bf16 rows: 221
    TFLOP/s without the branches, 303 with both.)
    """
    slot = load_slots(slots, first * BLOCK_N, count, rows, BLOCK_N)
    for block in tl.range(first, last, num_stages=STAGES):
        ahead = slot
        if block >= 0:
            ahead = load_slots(slots, (block + 1) * BLOCK_N, count, rows, BLOCK_N)
        kv = load_tile(cache, slot, page_stride, 0, VALUE, BLOCK_V, LAYOUT, PTX)
        logits = _dot(q, tl.trans(kv), tl.zeros((q.shape[0], BLOCK_N), tl.float32))
        if TAIL:
            k_tail = load_tile(cache, slot, page_stride, VALUE, TAIL, BLOCK_T, LAYOUT, PTX)
            logits = _dot(q_tail, tl.trans(k_tail), logits)
        logits = tl.where((slot >= 0)[None, :], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        weight = tl.zeros((q.shape[0], BLOCK_N), tl.bfloat16)
        rescale = tl.zeros((q.shape[0],), tl.float32)
        if block < last:
            shift = tl.where(higher == float("-inf"), 0.0, higher) * scale_log2
            p = tl.exp2(logits * scale_log2 - shift[:, None])
            rescale = tl.exp2(top * scale_log2 - shift)
            total = total * rescale + tl.sum(p, 1)
            weight = to_bf16(p)
        if LAYOUT[0] == "bf16":  # noqa: SIM114  decided at compile time, unlike the other
            acc = _dot(weight, kv, acc * rescale[:, None])
        elif block >= first:
            acc = _dot(weight, kv, acc * rescale[:, None])
        top, slot = higher, ahead
    return acc, top, total


@triton.jit
def _scores(
    cache, slots, at, end, rows, page_stride, q, q_tail,
    VALUE: tl.constexpr, BLOCK_V: tl.constexpr, TAIL: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, LAYOUT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """(rows, logits) of the entries from `at`, as many as a tile holds and lie below `end`."""
    slot = load_slots(slots, at, end, rows, BLOCK_N)
    kv = load_tile(cache, slot, page_stride, 0, VALUE, BLOCK_V, LAYOUT, PTX)
    logits = _dot(q, tl.trans(kv), tl.zeros((q.shape[0], BLOCK_N), tl.float32))
    if TAIL:
        k_tail = load_tile(cache, slot, page_stride, VALUE, TAIL, BLOCK_T, LAYOUT, PTX)
        logits = _dot(q_tail, tl.trans(k_tail), logits)
    return kv, tl.where((slot >= 0)[None, :], logits, float("-inf"))


@triton.jit
def _top_of(
    cache, slots, first, end, rows, page_stride, q, q_tail, top,
    VALUE: tl.constexpr, BLOCK_V: tl.constexpr, TAIL: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, LAYOUT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The maximum of `top` and the logits of the entries first..end-1."""
    for at in tl.range(first, end, BLOCK_N, num_stages=STAGES):
        _, logits = _scores(
            cache, slots, at, end, rows, page_stride, q, q_tail,
            VALUE, BLOCK_V, TAIL, BLOCK_T, BLOCK_N, LAYOUT, PTX,
        )  # fmt: skip
        top = tl.maximum(top, tl.max(logits, 1))
    return top


@triton.jit
def _add(
    cache, slots, first, end, rows, page_stride, q, q_tail, acc, total, shift, scale_log2,
    VALUE: tl.constexpr, BLOCK_V: tl.constexpr, TAIL: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, LAYOUT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Add the entries first..end-1, their probabilities relative to `shift`."""
    for at in tl.range(first, end, BLOCK_N, num_stages=STAGES):
        kv, logits = _scores(
            cache, slots, at, end, rows, page_stride, q, q_tail,
            VALUE, BLOCK_V, TAIL, BLOCK_T, BLOCK_N, LAYOUT, PTX,
        )  # fmt: skip
        p = tl.exp2(logits * scale_log2 - shift[:, None])
        total += tl.sum(p, 1)
        acc = _dot(to_bf16(p), kv, acc)
    return acc, total


@triton.jit
def _attend_groups(
    window_cache, window_slots, window_width, window_count, window_rows, window_page_stride,
    compressed_cache, compressed_slots, compressed_count, compressed_rows, compressed_page_stride,
    first, last, q, q_tail, acc, top, total, scale_log2,
    VALUE: tl.constexpr, BLOCK_V: tl.constexpr, TAIL: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, COMPRESSED: tl.constexpr,
    TWO: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Attend to the groups first..last-1 of the two lists taken as one."""
    for group in range(first, last):
        start = group * GROUP
        end = tl.minimum(start + GROUP, window_count)
        second = tl.maximum(start - window_width, 0)
        second_end = tl.minimum(start + GROUP - window_width, compressed_count)
        higher = _top_of(
            window_cache, window_slots, start, end, window_rows, window_page_stride,
            q, q_tail, top, VALUE, BLOCK_V, TAIL, BLOCK_T, BLOCK_N, STAGES, WINDOW, PTX,
        )  # fmt: skip
        if TWO:
            higher = _top_of(
                compressed_cache, compressed_slots, second, second_end, compressed_rows,
                compressed_page_stride, q, q_tail, higher,
                VALUE, BLOCK_V, TAIL, BLOCK_T, BLOCK_N, STAGES, COMPRESSED, PTX,
            )  # fmt: skip
        shift = tl.where(higher == float("-inf"), 0.0, higher) * scale_log2
        rescale = tl.exp2(top * scale_log2 - shift)
        acc, total = _add(
            window_cache, window_slots, start, end, window_rows, window_page_stride,
            q, q_tail, acc * rescale[:, None], total * rescale, shift, scale_log2,
            VALUE, BLOCK_V, TAIL, BLOCK_T, BLOCK_N, STAGES, WINDOW, PTX,
        )  # fmt: skip
        if TWO:
            acc, total = _add(
                compressed_cache, compressed_slots, second, second_end, compressed_rows,
                compressed_page_stride, q, q_tail, acc, total, shift, scale_log2,
                VALUE, BLOCK_V, TAIL, BLOCK_T, BLOCK_N, STAGES, COMPRESSED, PTX,
            )  # fmt: skip
        top = higher
    return acc, top, total


@triton.jit
def _load_q(q, live, FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    return tl.load(q + (FIRST + column), mask=live & (column < DIM), other=0.0)


@triton.jit
def _used(slots, count, rows, WIDTH: tl.constexpr, SCAN: tl.constexpr):
    """Entries to attend to: up to the last valid slot, or (sooner known) up to `count`."""
    entries = tl.maximum(count, 0)
    if SCAN:
        entries = used_entries(slots, count, rows, WIDTH)
    return entries


_VARYING = ["splits"] + [
    f"{source}_{size}"
    for source in ("window", "compressed")
    for size in ("width", "rows", "slots_stride")
]


@triton.jit(do_not_specialize=_VARYING)
def _sparse_mla_kernel(
    q, window_cache, window_slots, window_lengths,
    compressed_cache, compressed_slots, compressed_lengths, sink,
    out, max_logit, lse,
    scale, heads, splits, q_stride_t, q_stride_h, out_stride_t, out_stride_h, out_stride_s,
    window_width, window_rows, window_page_stride, window_slots_stride,
    compressed_width, compressed_rows, compressed_page_stride, compressed_slots_stride,
    WINDOW: tl.constexpr, COMPRESSED: tl.constexpr,
    WINDOW_WIDTH: tl.constexpr, COMPRESSED_WIDTH: tl.constexpr,
    VALUE: tl.constexpr, BLOCK_V: tl.constexpr, TAIL: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SCAN: tl.constexpr,
    ALIGNED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    head_blocks = tl.cdiv(heads, BLOCK_H)
    split = tl.program_id(0) % splits
    token = (tl.program_id(0) // splits // head_blocks).to(tl.int64)
    head = tl.program_id(0) // splits % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    live = head < heads
    q += token * q_stride_t + head[:, None] * q_stride_h
    q_value = _load_q(q, live[:, None], 0, VALUE, BLOCK_V)
    q_tail = _load_q(q, live[:, None], VALUE, TAIL, BLOCK_T) if TAIL else q_value

    window_count, compressed_count = window_width, compressed_width
    if window_lengths is not None:
        window_count = tl.minimum(window_count, tl.load(window_lengths + token))
    window_slots += token * window_slots_stride
    window_used = _used(window_slots, window_count, window_rows, WINDOW_WIDTH, SCAN)
    compressed_used = 0
    if COMPRESSED_WIDTH:
        if compressed_lengths is not None:
            compressed_count = tl.minimum(compressed_count, tl.load(compressed_lengths + token))
        compressed_slots += token * compressed_slots_stride
        compressed_used = _used(
            compressed_slots, compressed_count, compressed_rows, COMPRESSED_WIDTH, SCAN
        )
    scale_log2 = scale * LOG2E
    acc = tl.zeros((BLOCK_H, BLOCK_V), tl.float32)
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    if ALIGNED:
        window_blocks = tl.cdiv(window_used, BLOCK_N)
        blocks = window_blocks + tl.cdiv(compressed_used, BLOCK_N)
        first, last = split * blocks // splits, (split + 1) * blocks // splits
        acc, top, total = _attend(
            window_cache, window_slots, window_count, window_rows, window_page_stride,
            tl.minimum(first, window_blocks), tl.minimum(last, window_blocks),
            q_value, q_tail, acc, top, total, scale_log2,
            VALUE, BLOCK_V, TAIL, BLOCK_T, BLOCK_N, STAGES, WINDOW, PTX,
        )  # fmt: skip
        if COMPRESSED_WIDTH:
            acc, top, total = _attend(
                compressed_cache, compressed_slots, compressed_count, compressed_rows,
                compressed_page_stride,
                tl.maximum(first - window_blocks, 0), tl.maximum(last - window_blocks, 0),
                q_value, q_tail, acc, top, total, scale_log2,
                VALUE, BLOCK_V, TAIL, BLOCK_T, BLOCK_N, STAGES, COMPRESSED, PTX,
            )  # fmt: skip
    else:
        used = tl.where(compressed_used > 0, window_width + compressed_used, window_used)
        groups = tl.cdiv(used, GROUP)
        acc, top, total = _attend_groups(
            window_cache, window_slots, window_width, window_count, window_rows,
            window_page_stride, compressed_cache, compressed_slots, compressed_count,
            compressed_rows, compressed_page_stride,
            split * groups // splits, (split + 1) * groups // splits,
            q_value, q_tail, acc, top, total, scale_log2,
            VALUE, BLOCK_V, TAIL, BLOCK_T, BLOCK_N, STAGES, WINDOW, COMPRESSED,
            COMPRESSED_WIDTH > 0, PTX,
        )  # fmt: skip

    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    log_sum = tl.where(empty, float("-inf"), top * scale_log2 + tl.log2(divisor))
    factor = tl.where(empty, 0.0, 1.0 / divisor)
    if sink is not None:
        sink_log2 = tl.load(sink + head, mask=live, other=0.0) * LOG2E
        factor = tl.where(empty, 0.0, factor / (1.0 + tl.exp2(sink_log2 - log_sum)))
    column = tl.arange(0, BLOCK_V)
    value = acc * factor[:, None]
    if out.dtype.element_ty == tl.bfloat16:
        value = to_bf16(value)
    at = token * out_stride_t + head[:, None] * out_stride_h + split * out_stride_s
    tl.store(out + at + column[None, :], value, mask=live[:, None] & (column[None, :] < VALUE))
    row = (token * heads + head) * splits + split
    # A NaN logit is lost in a maximum, not in the sum.
    tl.store(max_logit + row, tl.where(total == total, top * scale, total), mask=live)
    tl.store(lse + row, log_sum, mask=live)
