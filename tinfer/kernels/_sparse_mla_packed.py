"""Sparse attention over packed rows of 512 channels for Hopper: one token, heads, one split.

    s = q k^T;  m = max s;  p = exp2((s - m) * scale * log2 e);  o = (sum bf16(p) v) / sum p

Two warp groups share a block of 64 keys: each computes the logits of half the keys and the
output of half the channels. The tile is decoded once, into shared memory, by all eight warps:
while the tensor cores compute a block's logits the next block is decoded into the other buffer
and the one after it is being loaded into registers. The running maximum advances in blocks of 64
entries; lists whose blocks would straddle both go to `_sparse_mla_kernel`.

Few tokens leave processors idle: then a program takes `heads_each` of the 64 heads that a product
has room for, which shortens what it loads and writes, and the same rows are decoded by several.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from tinfer.kernels._gluon_names import copy
from tinfer.kernels._sparse_mla_packed_rows import (
    DIM,
    FOLD,
    KEYS,
    WARPS,
    folded,
    load_rows,
    rows_layout,
    store_rows,
)

HEADS = gl.constexpr(64)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _load_slots(slots, block, count, rows, layout: gl.constexpr):
    """int32 [KEYS] slots of a block; -1 where beyond `count` or not in 0..rows-1."""
    at = block * KEYS + gl.arange(0, KEYS, layout)
    slot = gl.load(slots + at, mask=at < count, other=-1)
    return gl.where((slot >= 0) & (slot < rows), slot, -1)


@gluon.jit
def _blocks(slots, count, rows, WIDTH: gl.constexpr, SCAN: gl.constexpr):
    """Blocks of KEYS entries: up to the last valid slot, or (sooner known) up to `count`."""
    last = count
    if SCAN:
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        at = gl.arange(0, WIDTH, layout)
        slot = gl.load(slots + at, mask=at < count, other=-1)
        last = gl.max(gl.where((slot >= 0) & (slot < rows), at + 1, 0), axis=0)
    return gl.cdiv(gl.maximum(last, 0), KEYS)


@gluon.jit
def _attend(
    cache, slots, count, rows, page_stride, first, last,
    q_s, k_s, p_s, acc, top, total, scale_log2, zero, LAYOUT: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """Attend to the blocks first..last-1 of one source; `acc` is UNIT of the values' sum.

    `zero` is 0, which the compiler cannot know: it recomputes the operands' descriptors where
    they are used instead of keeping them in registers.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    COLS: gl.constexpr = gl.SliceLayout(0, S)
    ROWS: gl.constexpr = rows_layout()
    TILE: gl.constexpr = FOLD if folded(LAYOUT) else 1.0
    WEIGHT: gl.constexpr = UNIT / TILE
    count = gl.minimum(count, last * KEYS)
    if first < last:
        slot = _load_slots(slots, first, count, rows, ROWS)
        code, scale = load_rows(cache, slot, page_stride, LAYOUT)
        slot = _load_slots(slots, first + 1, count, rows, ROWS)
        store_rows(code, scale, k_s.index(0), LAYOUT)
        code, scale = load_rows(cache, slot, page_stride, LAYOUT)
        slot = _load_slots(slots, first + 2, count, rows, ROWS)
        async_copy.wait_group(0)
        fence_async_shared()
        for block in range(first, last):
            buffer = (block - first) & 1
            move = block * zero
            keys = k_s.index(buffer)
            s = gl.zeros((HEADS, KEYS), gl.float32, S)
            s = warpgroup_mma(
                q_s.index(move), keys.permute((1, 0)), s, use_acc=False, is_async=True
            )
            listed = _load_slots(slots, block, count, rows, COLS)
            if block + 1 < last:
                store_rows(code, scale, k_s.index(1 - buffer), LAYOUT)
                fence_async_shared()
            code, scale = load_rows(cache, slot, page_stride, LAYOUT)
            slot = _load_slots(slots, block + 3, count, rows, ROWS)
            s = warpgroup_mma_wait(0, deps=[s])
            s = gl.where((listed >= 0)[None, :], s, float("-inf"))
            higher = gl.maximum(top, gl.max(s, axis=1) * (1.0 / TILE))
            shift = gl.where(higher == float("-inf"), 0.0, higher) * scale_log2
            p = gl.exp2(s * (scale_log2 * (1.0 / TILE)) - shift[:, None])
            rescale = gl.exp2(top * scale_log2 - shift)
            total = total * rescale + gl.sum(p, axis=1)
            top = higher
            p_s.index(0).store((p * WEIGHT).to(gl.bfloat16))
            fence_async_shared()
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
            acc = warpgroup_mma(p_s.index(move), keys, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, top, total


@gluon.jit
def _write(
    acc, top, total, q_s, sink, out, max_logit, lse, scale, row, heads, first_head, end_head,
    splits, split, out_stride_h, UNIT: gl.constexpr,
):  # fmt: skip
    """Normalize and store; `row` is the token's first row of max_logit and lse."""
    ACC: gl.constexpr = acc.type.layout
    head = first_head + gl.arange(0, HEADS, top.type.layout)
    empty = total == 0.0
    divisor = gl.where(empty, 1.0, total)
    log_sum = gl.where(empty, float("-inf"), top * (scale * LOG2E) + gl.log2(divisor))
    factor = gl.where(empty, 0.0, (1.0 / UNIT) / divisor)
    if sink is not None:
        sink_log2 = gl.load(sink + head, mask=head < end_head, other=0.0) * LOG2E
        factor = gl.where(empty, 0.0, factor / (1.0 + gl.exp2(sink_log2 - log_sum)))
    at = (row + head) * splits + split
    # A NaN logit is lost in a maximum, not in the sum.
    gl.store(max_logit + at, gl.where(total == total, top * scale, total), mask=head < end_head)
    gl.store(lse + at, log_sum, mask=head < end_head)
    value = acc * gl.convert_layout(factor, gl.SliceLayout(1, ACC))[:, None]
    if out.dtype.element_ty == gl.bfloat16:
        # The queries' memory takes the output to full rows.
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
        q_s.index(0).store(value.to(gl.bfloat16))
        line = first_head + gl.arange(0, HEADS, gl.SliceLayout(1, WIDE))[:, None]
        column = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))[None, :]
        gl.store(out + line * out_stride_h + column, q_s.index(0).load(WIDE), mask=line < end_head)
    else:
        line = first_head + gl.arange(0, HEADS, gl.SliceLayout(1, ACC))[:, None]
        column = gl.arange(0, DIM, gl.SliceLayout(0, ACC))[None, :]
        gl.store(out + line * out_stride_h + column, value, mask=line < end_head)


_VARYING = ["splits", "heads_each", "zero"] + [
    f"{source}_{size}"
    for source in ("window", "compressed")
    for size in ("width", "rows", "slots_stride")
]


@gluon.jit(do_not_specialize=_VARYING)
def _sparse_mla_packed_kernel(
    q, window_cache, window_slots, window_lengths,
    compressed_cache, compressed_slots, compressed_lengths, sink,
    out, max_logit, lse,
    scale, heads, splits, q_stride_t, q_stride_h, out_stride_t, out_stride_h, out_stride_s,
    window_width, window_rows, window_page_stride, window_slots_stride,
    compressed_width, compressed_rows, compressed_page_stride, compressed_slots_stride,
    heads_each, zero,
    WINDOW: gl.constexpr, COMPRESSED: gl.constexpr,
    WINDOW_WIDTH: gl.constexpr, COMPRESSED_WIDTH: gl.constexpr, SCAN: gl.constexpr,
):  # fmt: skip
    """Arguments as `_sparse_mla_kernel`'s; one program = token x heads x split."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    UNIT: gl.constexpr = FOLD if COMPRESSED_WIDTH > 0 and folded(COMPRESSED) else 1.0
    q_s = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, DIM], TILE)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, DIM], TILE)
    p_s = gl.allocate_shared_memory(gl.bfloat16, [1, HEADS, KEYS], TILE)

    gdc_launch_dependents()  # the merge of splits may take its place; it waits for the results
    head_blocks = gl.cdiv(heads, heads_each)
    split = gl.program_id(0) % splits
    token = (gl.program_id(0) // splits // head_blocks).to(gl.int64)
    first_head = gl.program_id(0) // splits % head_blocks * heads_each
    end_head = gl.minimum(heads, first_head + heads_each)
    head = first_head + gl.arange(0, HEADS, gl.SliceLayout(1, WIDE))[:, None]
    column = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))[None, :]
    q_at = q + token * q_stride_t + head * q_stride_h + column
    copy(q_s.index(0), q_at, mask=head < end_head)
    async_copy.commit_group()

    window_count, compressed_count = window_width, compressed_width
    if window_lengths is not None:
        window_count = gl.minimum(window_count, gl.load(window_lengths + token))
    window_slots += token * window_slots_stride
    window_blocks = _blocks(window_slots, window_count, window_rows, WINDOW_WIDTH, SCAN)
    blocks = window_blocks
    if COMPRESSED_WIDTH:
        if compressed_lengths is not None:
            compressed_count = gl.minimum(compressed_count, gl.load(compressed_lengths + token))
        compressed_slots += token * compressed_slots_stride
        blocks += _blocks(
            compressed_slots, compressed_count, compressed_rows, COMPRESSED_WIDTH, SCAN
        )
    first, last = split * blocks // splits, (split + 1) * blocks // splits

    acc = gl.zeros((HEADS, DIM), gl.float32, ACC)
    top = gl.full((HEADS,), float("-inf"), gl.float32, gl.SliceLayout(1, S))
    total = gl.zeros((HEADS,), gl.float32, gl.SliceLayout(1, S))
    acc, top, total = _attend(
        window_cache, window_slots, window_count, window_rows, window_page_stride,
        gl.minimum(first, window_blocks), gl.minimum(last, window_blocks),
        q_s, k_s, p_s, acc, top, total, scale * LOG2E, zero, WINDOW, UNIT,
    )  # fmt: skip
    if COMPRESSED_WIDTH:
        acc, top, total = _attend(
            compressed_cache, compressed_slots, compressed_count, compressed_rows,
            compressed_page_stride,
            gl.maximum(first - window_blocks, 0), gl.maximum(last - window_blocks, 0),
            q_s, k_s, p_s, acc, top, total, scale * LOG2E, zero, COMPRESSED, UNIT,
        )  # fmt: skip
    async_copy.wait_group(0)
    _write(
        acc, top, total, q_s, sink, out + token * out_stride_t + split * out_stride_s,
        max_logit, lse, scale, token * heads, heads, first_head, end_head, splits, split,
        out_stride_h, UNIT,
    )  # fmt: skip
