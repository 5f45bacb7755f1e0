"""Launches of the hyper-connections' mixes, for few tokens and for many.

The kernels, and how they share the work, are described in `tinfer.kernels._hc_mix`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from tinfer.compat.hyper_connection import mix_rows
from tinfer.kernels._call import MAX_PROGRAMS
from tinfer.kernels._hc_enter import enter
from tinfer.kernels._hc_mix import (
    _hc_dots_kernel,
    _hc_finish_kernel,
    _hc_partial_kernel,
    _hc_parts_kernel,
)
from tinfer.kernels._target import TRITON, Target, target
from tinfer.kernels.norm_rope import split_width

Mixes = tuple[Tensor, Tensor, Tensor]


FEW_TOKENS = 128  # up to here one kernel does all but the last step
# Up to here the kernel that stays in registers, whose programs take 32 columns. The boundary in a
# graph on an H200: 8.2 us at 16 tokens; at 64 tokens 15.7, the other kernel 13.0.
REGISTER_TOKENS = 32


@dataclass(frozen=True)
class Tiles:
    """Tile of the dots: tokens, columns, column ranges, warps, pipeline stages."""

    tokens: int
    columns: int
    splits: int
    warps: int
    stages: int


def _few_tiles(rows: int, width: int, device: Target) -> Tiles:
    """Ranges of one block of columns each, as long as two waves of programs hold them."""
    block = min(64, max(16, triton.next_power_of_2(width)))
    splits = min(triton.cdiv(width, block), 128, 2 * device.processors // triton.cdiv(rows, 16))
    return Tiles(16, block, max(1, splits), 4, 2)


def _many_tiles(rows: int, depth: int, device: Target) -> Tiles:
    """Two programs a processor, at least four blocks of columns each."""
    block = min(64, max(16, triton.next_power_of_2(depth)))
    tokens = 128 if rows > 1024 else 64
    splits = min(
        triton.cdiv(depth, block) // 4, 128, 2 * device.processors // triton.cdiv(rows, tokens)
    )
    stages = 4 if device.shared_kib > 200 else 3 if device.shared_kib > 100 else 2
    return Tiles(tokens, block, max(1, splits), tokens // 16, stages)


@dataclass(frozen=True)
class Mixing:
    """The parameters of one sublayer's mixes."""

    fn: Tensor
    scale: Tensor
    base: Tensor
    norm_eps: float
    hc_eps: float
    iters: int


def new_mixes(stream: Tensor) -> Mixes:
    rows, copies, _ = stream.shape
    like = {"dtype": torch.float32, "device": stream.device}
    pre, post = torch.empty(rows, copies, **like), torch.empty(rows, copies, **like)
    return pre, post, torch.empty(rows, copies, copies, **like)


Written = tuple[Tensor, Tensor, Tensor, Tensor]  # y, post, comb, new
Collapsed = tuple[Tensor, Tensor, Tensor | None]  # pre, x, weight


def _partial(stream: Tensor, splits: int) -> tuple[Tensor, int, int]:
    """The buffer of partial results, the number of mixes and the width of its rows."""
    count = mix_rows(stream.shape[1])
    width = max(16, triton.next_power_of_2(count + 2))
    rows = triton.cdiv(stream.shape[0], 16) * 16  # whole tiles of few tokens
    shape = (rows, splits, width)
    return torch.empty(shape, dtype=torch.float32, device=stream.device), count, width


def _in_registers(rows: int, copies: int, width: int, device: Target) -> bool:
    """Whether `_hc_few` takes the call."""
    if device.backend != "cuda" or TRITON < (3, 6):
        return False
    return rows <= REGISTER_TOKENS and copies == 4 and width % 32 == 0


def _few(
    stream: Tensor, fn: Tensor, written: Written | None, collapsed: Collapsed | None
) -> Tensor:
    """Partial results; writes new and, not yet normalized, x."""
    rows, copies, width = stream.shape
    device = target(stream.device)
    if _in_registers(rows, copies, width, device):
        from tinfer.kernels._hc_few import few

        partial, _, _ = _partial(stream, width // 32)
        few(stream, fn, partial, written, collapsed and collapsed[:2], device.chains_launches)
        return partial
    tiles = _few_tiles(rows, width, device)
    partial, count, row_width = _partial(stream, tiles.splits)
    y, post, comb, new = written or (stream,) * 4
    pre, x, _ = collapsed or (stream, stream, None)
    _hc_partial_kernel[(triton.cdiv(rows, tiles.tokens) * tiles.splits,)](
        y, stream, post, comb, pre, fn, new, x, partial, rows, width, tiles.splits,
        C=copies, MIXES=count, WIDTH=row_width,
        POST=written is not None, COLLAPSE=collapsed is not None,
        BLOCK_T=tiles.tokens, BLOCK_D=tiles.columns, STAGES=tiles.stages,
        num_warps=tiles.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return partial


def _many(
    stream: Tensor,
    mixing: Mixing,
    written: Written | None,
    collapsed: Collapsed | None,
) -> Tensor:
    """Partial results; writes new and x."""
    rows, copies, width = stream.shape
    if collapsed is not None:
        pre, x, weight = collapsed
        enter(stream, pre, weight, mixing.norm_eps, x, written)
        stream = stream if written is None else written[3]
    parts = torch.empty(3, *mixing.fn.shape, dtype=torch.bfloat16, device=stream.device)
    _hc_parts_kernel[(triton.cdiv(mixing.fn.numel(), 1024),)](
        mixing.fn, parts, mixing.fn.numel(), BLOCK=1024, num_warps=4
    )
    tiles = _many_tiles(rows, copies * width, target(stream.device))
    partial, count, row_width = _partial(stream, tiles.splits)
    _hc_dots_kernel[(triton.cdiv(rows, tiles.tokens) * tiles.splits,)](
        stream, parts, partial, rows, copies * width, tiles.splits,
        MIXES=count, WIDTH=row_width, BLOCK_T=tiles.tokens, BLOCK_K=tiles.columns,
        STAGES=tiles.stages, num_warps=tiles.warps,
    )  # fmt: skip
    return partial


def _finish(
    partial: Tensor, stream: Tensor, mixing: Mixing, mixes: Mixes, unnormed: Collapsed | None
) -> None:
    rows, copies, width = stream.shape
    splits, row_width = partial.shape[1:]
    device = target(stream.device)
    _, x, weight = unnormed or (None, stream, None)
    block, warps = (1, 4) if rows <= FEW_TOKENS else (16, 2)
    tasks = triton.cdiv(rows, block) + (rows if unnormed else 0)
    main, rest = split_width(width)
    sums = torch.empty(rows, row_width, dtype=torch.float32, device=stream.device)
    options = {"launch_pdl": True} if device.chains_launches else {}
    _hc_finish_kernel[(min(tasks, MAX_PROGRAMS),)](
        partial, sums, mixing.scale, mixing.base, stream if weight is None else weight, x, *mixes,
        rows, width, splits, mixing.norm_eps, mixing.hc_eps, mixing.iters,
        C=copies, MIXES=mix_rows(copies), WIDTH=row_width, BLOCK=block,
        BLOCK_S=triton.next_power_of_2(splits), NORM=unnormed is not None,
        HAS_WEIGHT=weight is not None, MAIN=main, REST=rest, NATIVE=device.backend == "cuda",
        CHAINED=device.chains_launches, num_warps=warps, **options,
    )  # fmt: skip


def run(
    stream: Tensor, mixing: Mixing, written: Written | None, collapsed: Collapsed | None
) -> Mixes:
    """The mixes of the stream (of the new one, with `written`); x and new are written."""
    mixes = new_mixes(stream)
    rows = len(stream)
    if not rows:
        return mixes
    few_tokens = rows <= FEW_TOKENS
    if few_tokens:
        partial = _few(stream, mixing.fn, written, collapsed)
    else:
        partial = _many(stream, mixing, written, collapsed)
    _finish(partial, stream, mixing, mixes, collapsed if few_tokens else None)
    return mixes
