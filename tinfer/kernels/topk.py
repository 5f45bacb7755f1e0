"""Top-k positions of long rows, candidate blocks, and the compact columns they give.

Memory: scores fp32 [T, N], any row stride; outputs int32. Rows longer than a program's block are
cut into segments: each keeps its own top k as (score, index) pairs in index order, and the pairs
are selected from again, until one block is left. The total order (score descending, index
ascending) makes the outcome independent of the cutting. NaN scores pad the pairs.

Numerics: exact. Source: `tinfer.compat.topk`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.compat import topk as ref
from tinfer.kernels._candidates import (
    block_max_kernel,
    candidate_lengths_kernel,
    restore_candidates_kernel,
)
from tinfer.kernels._select import choose, split_columns
from tinfer.kernels._target import target

MAX_PROGRAMS = 65535
MAX_K = 2048


@triton.jit
def _blocks(length, most, SIZE: tl.constexpr):
    """Blocks of SIZE that hold `length` positions, 0 to `most`."""
    return tl.minimum((tl.maximum(length, 0) + SIZE - 1) // SIZE, most)


@triton.jit
def _put(out_ptr, step, place, flags, value, ROWS: tl.constexpr):
    """Store the flagged values [ROWS, 4] from `place` on, row by row."""
    flag0, flag1, flag2, flag3 = split_columns(flags, ROWS)
    value0, value1, value2, value3 = split_columns(value, ROWS)
    tl.store(out_ptr + place * step, value0, mask=flag0 != 0)
    place += flag0
    tl.store(out_ptr + place * step, value1, mask=flag1 != 0)
    place += flag1
    tl.store(out_ptr + place * step, value2, mask=flag2 != 0)
    place += flag2
    tl.store(out_ptr + place * step, value3, mask=flag3 != 0)


@triton.jit(do_not_specialize=["tasks", "columns", "width", "k"])
def _topk_kernel(
    scores_ptr,  # fp32 [T, N], or [T, segments * kept] of the pass before
    indices_ptr,  # int32 indices of the pass before, or None
    lengths_ptr,  # int32 [T] beside scores
    offset_ptr,  # int32 [T] or None
    scores_out_ptr,  # fp32 [T, SEGMENTS * KEPT] for the next pass, or None
    out_ptr,  # int32 [T, k], or indices for the next pass
    tasks,
    columns,  # of the scores, in every pass
    width,  # columns of this pass
    k,
    row_stride,
    out_stride,
    out_step,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    KEPT_BLOCK: tl.constexpr,
    PIN: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        row = tl.zeros((), tl.int64) + task // SEGMENTS
        start = (task % SEGMENTS) * ROWS * 4
        row_at = 4 * tl.arange(0, ROWS)
        lane = row_at[:, None] + tl.arange(0, 4)[None, :]
        at = row * row_stride + start
        if indices_ptr is None:
            visible = tl.minimum(tl.load(lengths_ptr + row), columns)
            if PIN > 0:
                visible = tl.maximum(_blocks(tl.load(lengths_ptr + row), columns, PIN) - 1, 0)
            limit = visible - start
            readable = (limit + 15) // 16 * 16 if ALIGNED else limit
            score = tl.load(scores_ptr + at + lane, mask=lane < readable, other=0.0)
            if limit < ROWS * 4:
                score = tl.where(lane < limit, score, float("nan"))
            index = start + lane
        else:
            mask = lane < width - start
            score = tl.load(scores_ptr + at + lane, mask=mask, other=float("nan"))
            index = tl.load(indices_ptr + at + lane, mask=mask, other=-1)
        if offset_ptr is not None:
            index += tl.load(offset_ptr + row)
        flags = choose(score, k, ROWS)
        sums = tl.sum(flags, axis=1)
        count = tl.sum(sums, axis=0)
        place = tl.cumsum(sums, axis=0) - sums
        base = row * out_stride + (task % SEGMENTS) * KEPT * out_step
        _put(out_ptr + base, out_step, place, flags, index, ROWS)
        filler = tl.arange(0, KEPT_BLOCK)
        rest = filler >= count
        if scores_out_ptr is not None:
            _put(scores_out_ptr + base, 1, place, flags, score, ROWS)
            none = tl.full([KEPT_BLOCK], float("nan"), tl.float32)
            tl.store(scores_out_ptr + base + filler, none, mask=rest & (filler < KEPT))
        elif PIN > 0:
            newest = _blocks(tl.load(lengths_ptr + row), columns, PIN) - 1
            pin = tl.where(filler == count, newest, -1)
            tl.store(out_ptr + base + filler * out_step, pin, mask=rest & (filler <= k))
        else:
            none = tl.full([KEPT_BLOCK], -1, tl.int32)
            tl.store(out_ptr + base + filler * out_step, none, mask=rest & (filler < k))


# ---------------------------------------------------------------- launching
def _topk_tiles(rows: int, columns: int, processors: int) -> tuple[int, int]:
    """(block, warps) of one pass: a program's scores in registers, 128 or 64 a thread.

    H200, k 512: [4096, 16384] takes 243 us with (16384, 4), 311 with (16384, 8), 325 with
    (8192, 4). Passes that also hand scores on spill with (16384, 4): [64, 131072] takes 95 us
    with it, 65 with (16384, 8), 58 with (8192, 4). Few rows prefer more programs.
    """
    whole = columns <= 16384 and rows >= 2 * processors
    block = min(16384 if whole else 8192, max(256, triton.next_power_of_2(columns)))
    return block, 4 if block > 1024 else 2


def _readable(scores: Tensor) -> bool:
    """Whether every row may be read up to the next multiple of 16 columns."""
    rows, columns = scores.shape
    end = scores.storage_offset() + (rows - 1) * scores.stride(0) + -(-columns // 16) * 16
    return (
        scores.stride(0) % 16 == 0
        and scores.storage_offset() % 4 == 0
        and end * 4 <= scores.untyped_storage().nbytes()
    )


def _select(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    offset: Tensor | None,
    out: Tensor,
    pin: int = 0,
) -> None:
    """Passes of `_topk_kernel` over [T, N]; `pin` is the block size of candidate blocks, or 0."""
    rows, columns = scores.shape
    given, indices = scores, None
    kept = max(16, -(-k // 16) * 16)
    processors = target(scores.device).processors
    while True:
        block, warps = _topk_tiles(rows, columns, processors)
        segments = max(1, triton.cdiv(columns, block))
        last = segments == 1
        scores_out = None if last else scores.new_empty(rows, segments * kept)
        to = out if last else torch.empty_like(scores_out, dtype=torch.int32)
        _topk_kernel[(min(rows * segments, MAX_PROGRAMS),)](
            given,
            indices,
            lengths,
            offset if last else None,
            scores_out,
            to,
            rows * segments,
            scores.shape[1],
            columns,
            k,
            given.stride(0),
            to.stride(0),
            to.stride(1),
            SEGMENTS=segments,
            ROWS=block // 4,
            KEPT=kept,
            KEPT_BLOCK=triton.next_power_of_2(kept + 1 if pin else kept),
            PIN=pin,
            ALIGNED=_readable(given),
            num_warps=warps,
        )
        if last:
            return
        given, indices, columns = scores_out, to, segments * kept


def supports_topk_indices(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    offset: Tensor | None = None,
    out: Tensor | None = None,
) -> str | None:
    """Columns contiguous, k at most 4096."""
    if scores.dim() == 2 and scores.stride(1) != 1:
        return "columns of scores are not contiguous"
    if k > MAX_K:
        return f"k above {MAX_K}"
    return None


def topk_indices(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    offset: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    ref.check_topk_indices(scores, lengths, k, offset, out)
    if out is None:
        out = torch.empty(len(scores), k, dtype=torch.int32, device=scores.device)
    if len(scores):
        offset = None if offset is None else offset.contiguous()
        _select(scores, lengths.contiguous(), k, offset, out)
    return out


def supports_candidate_blocks(
    scores: Tensor, lengths: Tensor, block_size: int, k: int
) -> str | None:
    """As topk_indices."""
    return supports_topk_indices(scores, lengths, k)


def candidate_blocks(scores: Tensor, lengths: Tensor, block_size: int, k: int) -> Tensor:
    ref.check_candidate_blocks(scores, lengths, block_size, k)
    rows, columns = scores.shape
    out = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    if not rows:
        return out
    lengths = lengths.contiguous()
    blocks = triton.cdiv(columns, block_size)
    best = scores.new_empty(rows, max(16, -(-blocks // 16) * 16))[:, :blocks]
    size_block = triton.next_power_of_2(block_size)
    per_tile = max(1, 2048 // size_block)
    tiles = triton.cdiv(blocks, per_tile)
    if blocks:
        block_max_kernel[(min(rows * tiles, MAX_PROGRAMS),)](
            scores,
            lengths,
            best,
            rows * tiles,
            columns,
            blocks,
            scores.stride(0),
            best.stride(0),
            tiles,
            SIZE=block_size,
            SIZE_BLOCK=size_block,
            BLOCKS=per_tile,
            ALIGNED=_readable(scores),
            num_warps=4,
        )
    _select(best, lengths, k - 1, None, out, pin=block_size)
    return out


def supports_candidate_lengths(lengths: Tensor, block_size: int, k: int) -> str | None:
    """Everything."""
    return None


def candidate_lengths(lengths: Tensor, block_size: int, k: int) -> Tensor:
    ref.check_candidate_lengths(lengths, block_size, k)
    out = torch.empty(lengths.shape, dtype=torch.int32, device=lengths.device)
    if out.numel():
        grid = (triton.cdiv(out.numel(), 256),)
        candidate_lengths_kernel[grid](
            lengths.contiguous(), out, out.numel(), K=k, SIZE=block_size, BLOCK=256
        )
    return out


def supports_restore_candidates(
    ids: Tensor, blocks: Tensor, block_size: int, out: Tensor | None = None
) -> str | None:
    """Rows of blocks contiguous; element numbers in int32."""
    if blocks.dim() == 2 and blocks.stride(1) != 1:
        return "rows of blocks are not contiguous"
    if ids.numel() >= 2**31:
        return "2^31 ids or more"
    return None


def restore_candidates(
    ids: Tensor, blocks: Tensor, block_size: int, out: Tensor | None = None
) -> Tensor:
    ref.check_restore_candidates(ids, blocks, block_size, out)
    if out is None:
        out = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    if ids.numel():
        grid = (min(triton.cdiv(ids.numel(), 1024), MAX_PROGRAMS),)
        restore_candidates_kernel[grid](
            ids,
            blocks,
            out,
            ids.numel(),
            ids.shape[1],
            blocks.shape[1],
            ids.stride(0),
            ids.stride(1),
            blocks.stride(0),
            out.stride(0),
            out.stride(1),
            SIZE=block_size,
            BLOCK=1024,
        )
    return out
