"""Sparse attention over bf16 rows for Hopper: two warp groups multiply, one gathers.

    s = q k^T;  m = max s;  p = exp2((s - m) * scale * log2 e);  o = (sum bf16(p) v) / sum p

A program walks over items: a token, up to 64 heads, one split of the keys; rows have 512
channels. Blocks of 64 keys alternate between two shared-memory buffers; block i of an item is
owned by consumer i % 2, which computes its logits and probabilities and passes them on through
shared memory. Each consumer accumulates one half of the value channels over all blocks, so while
one consumer exponentiates, the tensor cores work on products. The producer
(`sparse_mla_gather`) fills the buffers and runs ahead into the next item. An odd number of
blocks is padded by one without valid slots.

Signals, by place in `bars` (b = 0, 1):
    FULL + b   keys of buffer b, and which of them are valid, are in shared memory
    EMPTY + b  both consumers are done with buffer b
    READY + b  probabilities of buffer b, the maximum and the rescale factor are there
    DONE       both consumers' partial sums are there
    Q_FULL     an item's queries and number of block pairs are there; Q_EMPTY: no longer needed,
               so the next item's arrive while this one's output is written

Source: the division of labour follows FlashMLA's description of its Hopper kernels (two
consumers that split the output and alternate over key blocks).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tinfer.kernels._sparse_mla_gather import (
    BIAS,
    DONE,
    EMPTY,
    FULL,
    HALF,
    HEADS,
    KEYS,
    Q_EMPTY,
    Q_FULL,
    READY,
    RESCALE,
    TOP,
    TOTAL,
    _produce,
)

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _multiply(q_s, k_s, B, move, S: gl.constexpr):
    """Start q k^T of buffer B. `move` is 0, which the compiler cannot know: it recomputes operand
    descriptors where they are used instead of keeping dozens of them in registers."""
    s = gl.zeros((HEADS, KEYS), gl.float32, S)
    low, high = k_s.index(2 * B + move), k_s.index(2 * B + 1 + move)
    s = warpgroup_mma(q_s.index(move), low.permute((1, 0)), s, use_acc=False, is_async=True)
    return warpgroup_mma(q_s.index(1 + move), high.permute((1, 0)), s, is_async=True)


@gluon.jit
def _exponentiate(s, bias, top, scale_log2):
    """(probabilities, new maximum, factor of what the old maximum measured)."""
    s = gl.where((bias == 0.0)[None, :], s, float("-inf"))
    higher = gl.maximum(top, gl.max(s, axis=1))
    shift = gl.where(higher == float("-inf"), 0.0, higher) * scale_log2
    p = gl.exp2(s * scale_log2 - shift[:, None])
    return p, higher, gl.exp2(top * scale_log2 - shift)


@gluon.jit
def _publish(weight, top, rescale, p_s, lines, bars, B: gl.constexpr):
    p_s.index(B).store(weight)
    lines.index(TOP + B).store(top)
    lines.index(RESCALE + B).store(rescale)
    fence_async_shared()
    mbarrier.arrive(bars.index(READY + B), count=1)


@gluon.jit
def _halves(value):
    """[64, n] -> its left and right [64, n / 2]."""
    half: gl.constexpr = value.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(value, [HEADS, 2, half]), (0, 2, 1)))


@gluon.jit
def _write(
    p_s, acc, top, total, item, splits, heads, sink, out, max_logit, lse, scale,
    out_stride_t, out_stride_h, out_stride_s, W: gl.constexpr,
):  # fmt: skip
    """Normalize and store one half of an item's output; consumer 0 also maximum and lse."""
    head_blocks = gl.cdiv(heads, HEADS)
    split = item % splits
    token = (item // splits // head_blocks).to(gl.int64)
    first = item // splits % head_blocks * HEADS
    head = first + gl.arange(0, HEADS, top.type.layout)
    empty = total == 0.0
    divisor = gl.where(empty, 1.0, total)
    log_sum = gl.where(empty, float("-inf"), top * (scale * LOG2E) + gl.log2(divisor))
    factor = gl.where(empty, 0.0, 1.0 / divisor)
    if sink is not None:
        sink_log2 = gl.load(sink + head, mask=head < heads, other=0.0) * LOG2E
        factor = gl.where(empty, 0.0, factor / (1.0 + gl.exp2(sink_log2 - log_sum)))
    if W == 0:
        row = (token * heads + head) * splits + split
        # A NaN logit is lost in a maximum, not in the sum.
        gl.store(max_logit + row, gl.where(total == total, top * scale, total), mask=head < heads)
        gl.store(lse + row, log_sum, mask=head < heads)
    ACC: gl.constexpr = acc.type.layout
    value = acc * gl.convert_layout(factor, gl.SliceLayout(1, ACC))[:, None]
    out += token * out_stride_t + split * out_stride_s + W * HALF
    if out.dtype.element_ty == gl.bfloat16:
        # The probabilities' memory, free after DONE, takes the output to full rows by quarters.
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        line = first + gl.arange(0, HEADS, gl.SliceLayout(1, WIDE))[:, None]
        column = gl.arange(0, KEYS, gl.SliceLayout(0, WIDE))[None, :]
        at = out + line * out_stride_h + column
        low, high = _halves(value.to(gl.bfloat16))
        for half in gl.static_range(2):
            left, right = _halves(high if half else low)
            for quarter in gl.static_range(2):
                p_s.index(W).store(right if quarter else left)
                part = p_s.index(W).load(WIDE)
                gl.store(at + (half * 2 + quarter) * KEYS, part, mask=line < heads)
    else:
        line = first + gl.arange(0, HEADS, gl.SliceLayout(1, ACC))[:, None]
        column = gl.arange(0, HALF, gl.SliceLayout(0, ACC))[None, :]
        gl.store(out + line * out_stride_h + column, value, mask=line < heads)


@gluon.jit
def _consume(
    q_s, k_s, p_s, lines, pairs_s, bars, items, splits, heads, sink, out, max_logit, lse, scale,
    out_stride_t, out_stride_h, out_stride_s, zero, W: gl.constexpr,
):  # fmt: skip
    """Consumer W: owns blocks W, W+2, .. and value channels W*256 .. W*256+255."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S)
    COLS: gl.constexpr = gl.SliceLayout(0, S)
    ACC_ROWS: gl.constexpr = gl.SliceLayout(1, ACC)
    F: gl.constexpr = 1 - W
    scale_log2 = scale * LOG2E
    turn = 0
    used = 0  # pairs of blocks of earlier items
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        acc = gl.zeros((HEADS, HALF), gl.float32, ACC)
        top = gl.full((HEADS,), float("-inf"), gl.float32, ROWS)
        total = gl.zeros((HEADS,), gl.float32, ROWS)
        mbarrier.wait(bars.index(Q_FULL), turn & 1)
        pairs = gl.max(pairs_s.load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)
        if W == 0:
            move = turn * zero
            mbarrier.wait(bars.index(FULL), used & 1)
            s = _multiply(q_s, k_s, 0, move, S)
            bias = lines.index(BIAS).load(COLS)
            s = warpgroup_mma_wait(0, deps=[s])
            p, top, rescale = _exponentiate(s, bias, top, scale_log2)
            weight = p.to(gl.bfloat16)
            _publish(weight, top, rescale, p_s, lines, bars, 0)
            total = gl.sum(p, axis=1)
            left = gl.convert_layout(weight, LEFT)
            acc = warpgroup_mma(left, k_s.index(move), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(bars.index(EMPTY), count=1)
        for pair in range(1 - W, pairs):
            # The other consumer's block first: its buffer is then free to be filled again.
            move = pair * zero
            mbarrier.wait(bars.index(READY + F), (used + pair - 1 + W) & 1)
            foreign = lines.index(RESCALE + F).load(ROWS)
            top = lines.index(TOP + F).load(ROWS)
            acc = acc * gl.convert_layout(foreign, ACC_ROWS)[:, None]
            values = k_s.index(2 * F + W + move)
            acc = warpgroup_mma(p_s.index(F + move), values, acc, is_async=True)
            mbarrier.wait(bars.index(FULL + W), (used + pair) & 1)
            s = _multiply(q_s, k_s, W, move, S)
            bias = lines.index(BIAS + W).load(COLS)
            acc = warpgroup_mma_wait(2, deps=[acc])
            mbarrier.arrive(bars.index(EMPTY + F), count=1)
            s = warpgroup_mma_wait(0, deps=[s])
            p, top, rescale = _exponentiate(s, bias, top, scale_log2)
            weight = p.to(gl.bfloat16)
            total = total * foreign * rescale + gl.sum(p, axis=1)
            _publish(weight, top, rescale, p_s, lines, bars, W)
            acc = acc * gl.convert_layout(rescale, ACC_ROWS)[:, None]
            left = gl.convert_layout(weight, LEFT)
            acc = warpgroup_mma(left, k_s.index(2 * W + W + move), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(bars.index(EMPTY + W), count=1)
        mbarrier.arrive(bars.index(Q_EMPTY), count=1)  # its last logits are computed
        if W == 0:
            mbarrier.wait(bars.index(READY + 1), (used + pairs - 1) & 1)
            foreign = lines.index(RESCALE + 1).load(ROWS)
            top = lines.index(TOP + 1).load(ROWS)
            acc = acc * gl.convert_layout(foreign, ACC_ROWS)[:, None]
            acc = warpgroup_mma(p_s.index(1), k_s.index(2 + turn * zero), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(bars.index(EMPTY + 1), count=1)
            total = total * foreign
        lines.index(TOTAL + W).store(total)
        mbarrier.arrive(bars.index(DONE), count=1)
        mbarrier.wait(bars.index(DONE), turn & 1)
        total = lines.index(TOTAL).load(ROWS) + lines.index(TOTAL + 1).load(ROWS)
        used += pairs
        turn += 1  # noqa: SIM113  device code
        _write(
            p_s, acc, top, total, item, splits, heads, sink, out, max_logit, lse, scale,
            out_stride_t, out_stride_h, out_stride_s, W,
        )  # fmt: skip


@gluon.jit
def _consume_even(
    q_s, k_s, p_s, lines, pairs_s, bars, items, splits, heads, sink, out, max_logit, lse, scale,
    out_stride_t, out_stride_h, out_stride_s, zero,
):  # fmt: skip
    _consume(
        q_s, k_s, p_s, lines, pairs_s, bars, items, splits, heads, sink, out, max_logit, lse,
        scale, out_stride_t, out_stride_h, out_stride_s, zero, 0,
    )  # fmt: skip


@gluon.jit
def _consume_odd(
    q_s, k_s, p_s, lines, pairs_s, bars, items, splits, heads, sink, out, max_logit, lse, scale,
    out_stride_t, out_stride_h, out_stride_s, zero,
):  # fmt: skip
    _consume(
        q_s, k_s, p_s, lines, pairs_s, bars, items, splits, heads, sink, out, max_logit, lse,
        scale, out_stride_t, out_stride_h, out_stride_s, zero, 1,
    )  # fmt: skip


_VARYING = ["items", "splits", "zero"] + [
    f"{source}_{size}"
    for source in ("window", "compressed")
    for size in ("width", "rows", "slots_stride")
]


@gluon.jit(do_not_specialize=_VARYING)
def _sparse_mla_hopper_kernel(
    q, window_cache, window_slots, window_lengths,
    compressed_cache, compressed_slots, compressed_lengths, sink,
    out, max_logit, lse,
    scale, heads, splits, q_stride_t, q_stride_h, out_stride_t, out_stride_h, out_stride_s,
    window_width, window_rows, window_page_stride, window_slots_stride,
    compressed_width, compressed_rows, compressed_page_stride, compressed_slots_stride,
    items, zero,
    WINDOW: gl.constexpr, COMPRESSED: gl.constexpr,
    WINDOW_WIDTH: gl.constexpr, COMPRESSED_WIDTH: gl.constexpr, SCAN: gl.constexpr,
):  # fmt: skip
    """Arguments as `_sparse_mla_kernel`'s; `items` tokens x head blocks x splits, `zero` 0."""
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_s = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, HALF], tile)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [4, KEYS, HALF], tile)
    p_s = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, KEYS], tile)
    lines = gl.allocate_shared_memory(gl.float32, [8, HEADS], line)
    pairs_s = gl.allocate_shared_memory(gl.int32, [1], line)
    bars = gl.allocate_shared_memory(gl.int64, [9, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(2):
        mbarrier.init(bars.index(FULL + b), count=129)
        mbarrier.init(bars.index(EMPTY + b), count=2)
        mbarrier.init(bars.index(READY + b), count=1)
    mbarrier.init(bars.index(DONE), count=2)
    mbarrier.init(bars.index(Q_FULL), count=129)
    mbarrier.init(bars.index(Q_EMPTY), count=2)
    fence_async_shared()
    consumer = (
        q_s, k_s, p_s, lines, pairs_s, bars, items, splits, heads, sink, out, max_logit, lse,
        scale, out_stride_t, out_stride_h, out_stride_s, zero,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume_even, consumer),
            (_consume_odd, consumer),
            # Written out here: an assignment would turn the constants into values.
            (_produce, (
                q_s, k_s, lines, pairs_s, bars, items, splits, heads, q, q_stride_t, q_stride_h,
                window_cache, window_slots, window_lengths, window_width, window_rows,
                window_page_stride, window_slots_stride,
                compressed_cache, compressed_slots, compressed_lengths, compressed_width,
                compressed_rows, compressed_page_stride, compressed_slots_stride,
                WINDOW, COMPRESSED, WINDOW_WIDTH, COMPRESSED_WIDTH, SCAN,
            )),
        ],
        [4, 4],
        [232, 40],
    )  # fmt: skip
