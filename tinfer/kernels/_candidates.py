"""Kernels round the selection of candidate blocks: block maxima, lengths, compact columns.

Launched by `tinfer.kernels.topk`, whose docstring gives the layouts.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tasks", "columns", "blocks", "tiles"])
def block_max_kernel(
    scores_ptr,  # fp32 [T, N]
    lengths_ptr,  # int32 [T]
    best_ptr,  # fp32 [T, blocks]
    tasks,
    columns,
    blocks,
    row_stride,
    best_stride,
    tiles,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        row = tl.zeros((), tl.int64) + task // tiles
        block = (task % tiles) * BLOCKS + tl.arange(0, BLOCKS)
        inside = tl.arange(0, SIZE_BLOCK)
        column = block[:, None] * SIZE + inside[None, :]
        limit = tl.minimum(tl.load(lengths_ptr + row), columns)
        readable = (limit + 15) // 16 * 16 if ALIGNED else limit
        mask = (column < readable) & (inside < SIZE)[None, :]
        score = tl.load(scores_ptr + row * row_stride + column, mask=mask, other=0.0)
        valid = (column < limit) & (inside < SIZE)[None, :] & (score == score)
        best = tl.max(tl.where(valid, score, float("-inf")), axis=1)
        tl.store(best_ptr + row * best_stride + block, best, mask=block < blocks)


@triton.jit(do_not_specialize=["total"])
def candidate_lengths_kernel(
    lengths_ptr, out_ptr, total, K: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lengths_ptr + at, mask=at < total, other=0)
    positive = tl.maximum(length, 1)
    kept = tl.minimum((positive - 1) // SIZE + 1, K)
    compact = SIZE * (kept - 1) + (positive - 1) % SIZE + 1
    tl.store(out_ptr + at, tl.where(length > 0, compact, 0), mask=at < total)


@triton.jit(do_not_specialize=["total", "blocks"])
def restore_candidates_kernel(
    ids_ptr,  # int32 [T, k]
    blocks_ptr,  # int32 [T, nb]
    out_ptr,  # int32 [T, k], may be ids
    total,
    k,
    blocks,
    ids_stride,
    ids_step,
    blocks_stride,
    out_stride,
    out_step,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for tile in range(tl.program_id(0), tl.cdiv(total, BLOCK), tl.num_programs(0)):
        flat = tile * BLOCK + tl.arange(0, BLOCK)
        inside = flat < total
        row, column = (flat // k).to(tl.int64), flat % k
        ids = tl.load(ids_ptr + row * ids_stride + column * ids_step, mask=inside, other=-1)
        valid = (ids >= 0) & (ids < blocks * SIZE)
        ids = tl.where(valid, ids, 0)
        block = tl.load(blocks_ptr + row * blocks_stride + ids // SIZE, mask=valid, other=-1)
        restored = tl.where(block >= 0, block * SIZE + ids % SIZE, -1)
        tl.store(out_ptr + row * out_stride + column * out_step, restored, mask=inside)
