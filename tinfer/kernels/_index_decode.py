"""Launching `_index_hopper` and `_index_blocks_hopper`, and when to."""

from __future__ import annotations

import triton
from torch import Tensor

from tinfer.kernels._call import MAX_PROGRAMS, words_of
from tinfer.kernels._target import TRITON, Target
from tinfer.kv_layout import KVLayout

TILE_PAIR = 128  # keys of two tiles
# Registers of a thread, and the programs of a processor that they let run at a time.
ALONE, SHARED = (128, 4), (168, 3)
MOST_TOGETHER = 8  # 4 KiB of queries each


def takes_hopper(
    q: Tensor,
    cache: Tensor,
    layout: KVLayout,
    block_table: Tensor,
    blocks: Tensor | None,
    on: Target,
) -> bool:
    """e2m1 keys of 128 channels in pages of whole tiles, 16-byte rows, 9 to 32 heads; without
    candidate blocks up to 8 tokens a sequence.

    More tokens share decoded keys in the portable kernel.
    """
    tokens, heads = q.shape[:2]
    data_stride, scale_base, scale_stride = layout.triple
    units = (data_stride, cache.stride(0), cache.storage_offset())
    return (
        (on.backend, on.arch) == ("cuda", 90)
        and TRITON >= (3, 6)
        and (layout.dim, layout.value, layout.group, layout.scale) == (128, "e2m1", 32, "ue8m0")
        and layout.page_size % (TILE_PAIR // 2) == 0
        and all(n % 16 == 0 for n in units)
        and scale_base % 4 == scale_stride % 4 == 0
        and 8 < heads <= 32
        and tokens <= MAX_PROGRAMS
        and (blocks is not None or tokens <= 8 * len(block_table))
    )


def _together(tokens: int, sequences: int) -> int:
    """Tokens of a program: a sequence's, if all have as many."""
    each, left = divmod(tokens, sequences)
    return each if left == 0 and 1 < each <= MOST_TOGETHER else 1


def _splits(groups: int, columns: int, programs: int) -> tuple[int, int]:
    """(programs of a group of tokens, tile pairs of each)."""
    pairs = triton.cdiv(columns, TILE_PAIR)
    wanted = max(1, min(programs // groups, pairs))
    each = triton.cdiv(pairs, wanted)
    return triton.cdiv(pairs, each), each


def launch_hopper(
    q: Tensor,
    q_s: Tensor,
    weights: Tensor,
    cache: Tensor,
    layout: KVLayout,
    block_table: Tensor,
    seq: Tensor,
    visible: Tensor,
    out: Tensor,
    on: Target,
    blocks: Tensor | None = None,
    block_size: int = 1,
) -> None:
    """Write the logits of `takes_hopper` arguments to out, fp32 [T, columns]."""
    tokens, columns = out.shape
    together = _together(tokens, len(block_table)) if blocks is None else 1
    registers, programs = ALONE if together == 1 else SHARED
    splits, span = _splits(tokens // together, columns, programs * on.processors)
    grid = (tokens // together * splits,)
    data_stride, scale_base, scale_stride = layout.triple
    given = (
        q.contiguous(),
        words_of(q_s),
        weights.contiguous(),
        cache,
        block_table,
        seq.contiguous(),
        visible.contiguous(),
    )
    sizes = (columns, splits, span, q.shape[1], block_table.stride(0), cache.stride(0))
    fixed = {
        "PAGE": layout.page_size,
        "DATA_STRIDE": data_stride,
        "SCALE_BASE": scale_base,
        "SCALE_STRIDE": scale_stride,
        "num_warps": 4,
        "maxnreg": registers,
    }
    if blocks is None:
        from tinfer.kernels._index_hopper import _index_logits_hopper_kernel

        _index_logits_hopper_kernel[grid](
            *given, out, *sizes, out.stride(0), TOKENS=together, **fixed
        )
    else:
        from tinfer.kernels._index_blocks_hopper import _index_blocks_hopper_kernel

        capacity = block_table.shape[1] * layout.page_size
        _index_blocks_hopper_kernel[grid](
            *given, blocks, out, capacity, *sizes, blocks.stride(0), out.stride(0),
            BLOCK_SIZE=block_size, **fixed,
        )  # fmt: skip
