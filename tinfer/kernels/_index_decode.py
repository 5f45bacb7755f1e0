"""Launching `_index_hopper`, the index logits of few tokens a sequence, and when to."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tinfer.kernels._call import MAX_PROGRAMS
from tinfer.kernels._target import TRITON, Target
from tinfer.kv_layout import KVLayout

TILE_PAIR = 128  # keys of two tiles
PROGRAMS = 4  # a processor, which 128 registers let run at a time
MOST_TOGETHER = 1


def takes_hopper(
    q: Tensor, cache: Tensor, layout: KVLayout, block_table: Tensor, on: Target
) -> bool:
    """e2m1 keys of 128 channels in pages of whole tiles, up to 32 heads, up to 8 tokens a sequence.

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
        and tokens <= min(8 * len(block_table), MAX_PROGRAMS)
    )


def _together(tokens: int, sequences: int) -> int:
    """Tokens of a program: a sequence's, if all have as many."""
    each, left = divmod(tokens, sequences)
    return each if left == 0 and 1 < each <= MOST_TOGETHER else 1


def _splits(groups: int, columns: int, processors: int) -> tuple[int, int]:
    """(programs of a group of tokens, tile pairs of each)."""
    pairs = triton.cdiv(columns, TILE_PAIR)
    wanted = max(1, min(PROGRAMS * processors // groups, pairs))
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
) -> None:
    """Write the logits of `takes_hopper` arguments to out, fp32 [T, columns]."""
    from tinfer.kernels._index_hopper import _index_logits_hopper_kernel

    tokens, columns = out.shape
    together = _together(tokens, len(block_table))
    groups = tokens // together
    splits, span = _splits(groups, columns, on.processors)
    data_stride, scale_base, scale_stride = layout.triple
    _index_logits_hopper_kernel[(groups * splits,)](
        q.contiguous(),
        q_s.contiguous().view(torch.int32),
        weights.contiguous(),
        cache,
        block_table,
        seq.contiguous(),
        visible.contiguous(),
        out,
        columns,
        splits,
        span,
        q.shape[1],
        block_table.stride(0),
        cache.stride(0),
        out.stride(0),
        PAGE=layout.page_size,
        DATA_STRIDE=data_stride,
        SCALE_BASE=scale_base,
        SCALE_STRIDE=scale_stride,
        TOKENS=together,
        num_warps=4,
        maxnreg=128,
    )
