"""Top-k positions of long rows, candidate blocks, and the compact columns they give.

Memory: scores fp32 [T, N], any row stride; outputs int32. A program walks over its columns twice:
for a score that at least k of them reach (`_topk_rows`), and to list those that do, whose best k
it keeps. Few long rows are cut into segments: a kernel takes the maxima that bound the k-th score
of the row, a pass keeps the columns of each segment that reach the bound, at most k, as (score,
index) pairs in index order, and a last pass selects from the pairs. The total order (score
descending, index ascending) makes the outcome independent of the cutting. NaN scores pad.

Numerics: exact. Source: `tinfer.compat.topk`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tinfer.compat import topk as ref
from tinfer.kernels._call import scattered
from tinfer.kernels._candidates import (
    block_max_kernel,
    candidate_lengths_kernel,
    restore_candidates_kernel,
)
from tinfer.kernels._target import Target, target
from tinfer.kernels._topk_rows import part_maxima_kernel, topk_kernel

MAX_PROGRAMS = 65535
MAX_K = 2048
BLOCKS_TILE = 2048  # columns of a program that takes maxima of candidate blocks


# ---------------------------------------------------------------- launching
def _tile(many: bool, kept: int) -> int:
    """Columns that a selecting program holds at a time, at least two for each one kept.

    H200: [64, 131072] takes 54 us with 1024, 56 with 2048, 63 with 4096; [4096, 16384] 206 us
    with 2048, 210 with 1024, 270 with 4096 (k 512); [16, 1M] 103 us with 4096 and 115 with 2048
    (k 2048).
    """
    return max(2048 if many else 1024, triton.next_power_of_2(2 * kept))


def _segments(rows: int, columns: int, kept: int, processors: int) -> tuple[int, int]:
    """(segments of a row, columns of each): one if rows alone fill the device.

    Eight programs a processor; four if they keep many. H200, [1, 131072]: segments of 4096
    columns take 20 us, 23 with 8192, 20 with 2048; [8, 131072], k 2048: 28 with 8192, 32 with
    16384.
    """
    many = rows >= 2 * processors
    tile = _tile(many, kept)
    if many or columns <= max(8192, 4 * tile):
        return 1, columns
    most = max(1, triton.cdiv((8 if kept <= 512 else 4) * processors, rows))
    least = 4 if kept <= 512 else 2
    span = max(triton.cdiv(triton.cdiv(columns, most), tile), least) * tile
    return triton.cdiv(columns, span), span


def _readable(scores: Tensor) -> bool:
    """Whether every row may be read up to the next multiple of 16 columns."""
    rows, columns = scores.shape
    end = scores.storage_offset() + (rows - 1) * scores.stride(0) + -(-columns // 16) * 16
    return (
        scores.stride(0) % 16 == 0
        and scores.storage_offset() % 4 == 0
        and end * 4 <= scores.untyped_storage().nbytes()
    )


def _maxima_tile(columns: int) -> int:
    """Columns of a program that takes maxima."""
    return 4096 if columns <= 131072 else 8192


def _first_maxima(scores: Tensor, lengths: Tensor, kept: int) -> Tensor:
    """fp32 [T, M]: maxima of disjoint parts of every row, two to eight times `kept` of them."""
    rows, columns = scores.shape
    tile = _maxima_tile(columns)
    tiles = triton.cdiv(columns, tile)
    wanted = (4 if kept <= 512 else 2) * kept // tiles
    parts = max(16, min(tile // 4, 1 << (max(1, wanted).bit_length() - 1)))
    maxima = scores.new_empty(rows, tiles * parts)
    part_maxima_kernel[(min(rows * tiles, MAX_PROGRAMS),)](
        scores,
        lengths,
        maxima,
        rows * tiles,
        columns,
        tiles,
        scores.stride(0),
        ROWS=tile // 4,
        PARTS=parts,
        ALIGNED=_readable(scores),
        num_warps=4,
    )
    return maxima


def _select(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    offset: Tensor | None,
    out: Tensor,
    pin: int = 0,
) -> None:
    """Passes of `topk_kernel` over [T, N]; `pin` is the block size of candidate blocks, or 0."""
    kept = max(16, -(-k // 16) * 16)
    rows, columns = scores.shape
    segments, span = _segments(rows, columns, kept, target(scores.device).processors)
    given = lengths, columns, k, kept, pin
    if segments == 1:
        _pass(scores, None, None, None, offset, None, out, *given)
        return
    best = scores.new_empty(rows, segments * kept)
    indices = out.new_empty(best.shape)
    counts = lengths.new_empty(rows, segments)
    maxima = _first_maxima(scores, lengths, kept)
    _pass(scores, None, counts, maxima, None, best, indices, *given, segments, span)
    _pass(best, indices, counts, None, offset, None, out, *given)


def _topk_tiles(
    rows: int, width: int, kept: int, for_good: bool, segments: int, on: Target
) -> tuple[int, int, dict[str, int]]:
    """(columns held at a time, places of the short list or 0, num_warps and on CUDA maxnreg).

    A row that fits is held as a whole and searched without a list; one warp each, where rows fill
    the device ([4096, 2048]: 36 us, 44 with four). 96 registers: 191 us at [4096, 16384], 206 with
    128. Of segments, a few are done soonest by eight warps ([1, 131072]: 18 us, 19 with four);
    64 registers let eight programs of four run at a time ([64, 131072]: 52 us, 56 with more).
    """
    many = rows >= 2 * on.processors
    tile, block = _tile(many, kept), max(256, triton.next_power_of_2(width))
    listed = triton.next_power_of_2(2 * kept if for_good else kept)
    if segments == 1 and block <= max(tile, 2 * listed):
        warps = 1 if many and block <= 2048 else 4 if block > 1024 else 2
        return block, 0, {"num_warps": warps}
    if not for_good and rows * segments <= 2 * on.processors:
        return 2048, listed, {"num_warps": 8}
    options = {"num_warps": 4}
    if on.backend == "cuda" and many and tile == 2048:
        options["maxnreg"] = 96
    elif on.backend == "cuda" and not for_good and kept <= 512:
        options["maxnreg"] = 64
    return tile, listed, options


def _pass(
    scores: Tensor,
    indices: Tensor | None,
    counts: Tensor | None,
    maxima: Tensor | None,
    offset: Tensor | None,
    scores_out: Tensor | None,
    out: Tensor,
    lengths: Tensor,
    columns: int,
    k: int,
    kept: int,
    pin: int,
    segments: int = 1,
    span: int = 0,
) -> None:
    """One launch: the k best of every segment, with scores for another pass or for good."""
    rows, width = scores.shape
    block, listed, options = _topk_tiles(
        rows, width, kept, scores_out is None, segments, target(scores.device)
    )
    topk_kernel[(min(rows * segments, MAX_PROGRAMS),)](
        scores,
        indices,
        lengths,
        offset,
        maxima,
        out.new_empty(rows * segments, listed) if listed else None,
        counts,
        scores_out,
        out,
        rows * segments,
        columns,
        width,
        span or width,
        k,
        0 if maxima is None else maxima.shape[1],
        scores.stride(0),
        out.stride(0),
        out.stride(1),
        SEGMENTS=segments,
        BEFORE=0 if indices is None or counts is None else counts.shape[1],
        ROWS=block // 4,
        KEPT=kept,
        KEPT_BLOCK=triton.next_power_of_2(kept + 1 if pin else kept),
        LIST=listed,
        PARTS=0 if maxima is None else triton.next_power_of_2(maxima.shape[1]),
        THREADS=32 * options["num_warps"],
        PIN=pin,
        ALIGNED=_readable(scores),
        **options,
    )


def supports_topk_indices(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    offset: Tensor | None = None,
    out: Tensor | None = None,
) -> str | None:
    """Columns contiguous, k at most 2048."""
    if scattered(scores):
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
    per_tile = max(1, BLOCKS_TILE // size_block)
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
    if scattered(blocks):
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
