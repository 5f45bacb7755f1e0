"""Launchers of the hyper-connections' mixes: split, mix, pre and the boundary between sublayers.

The kernels, and how they share the work, are described in `tinfer.kernels._hc_mix`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from tinfer.compat.hyper_connection import (
    check_hc_boundary,
    check_hc_mix,
    check_hc_pre,
    check_hc_split,
    mix_rows,
)
from tinfer.kernels._call import MAX_PROGRAMS, contiguous_reason, device_reason
from tinfer.kernels._hc_enter import enter
from tinfer.kernels._hc_mix import (
    _hc_dots_kernel,
    _hc_finish_kernel,
    _hc_partial_kernel,
    _hc_parts_kernel,
    _hc_split_kernel,
)
from tinfer.kernels._target import Target, target
from tinfer.kernels.norm_rope import MAX_WIDTH, split_width

Mixes = tuple[Tensor, Tensor, Tensor]


FEW_TOKENS = 128  # up to here one kernel does all but the last step


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
class _Mixing:
    """The parameters of one sublayer's mixes."""

    fn: Tensor
    scale: Tensor
    base: Tensor
    norm_eps: float
    hc_eps: float
    iters: int


def _new_mixes(stream: Tensor) -> Mixes:
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
    shape = (splits, stream.shape[0], width)
    return torch.empty(shape, dtype=torch.float32, device=stream.device), count, width


def _few(
    stream: Tensor, fn: Tensor, written: Written | None, collapsed: Collapsed | None
) -> Tensor:
    """Partial results; writes new and, not yet normalized, x."""
    rows, copies, width = stream.shape
    tiles = _few_tiles(rows, width, target(stream.device))
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
    mixing: _Mixing,
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


def _run(
    stream: Tensor, mixing: _Mixing, written: Written | None, collapsed: Collapsed | None
) -> Mixes:
    """The mixes of the stream (of the new one, with `written`); x and new are written."""
    rows, copies, width = stream.shape
    mixes = _new_mixes(stream)
    if not rows:
        return mixes
    few = rows <= FEW_TOKENS
    if few:
        partial = _few(stream, mixing.fn, written, collapsed)
    else:
        partial = _many(stream, mixing, written, collapsed)
    splits, _, row_width = partial.shape
    norm = few and collapsed is not None
    x, weight = (collapsed[1], collapsed[2]) if collapsed is not None else (stream, None)
    main, rest = split_width(width)
    _hc_finish_kernel[(min(rows * (2 if norm else 1), MAX_PROGRAMS),)](
        partial, mixing.scale, mixing.base, stream if weight is None else weight, x, *mixes,
        rows, width, splits, mixing.norm_eps, mixing.hc_eps, mixing.iters,
        C=copies, MIXES=mix_rows(copies), WIDTH=row_width,
        BLOCK_S=triton.next_power_of_2(splits), NORM=norm, HAS_WEIGHT=weight is not None,
        MAIN=main, REST=rest, NATIVE=target(stream.device).backend == "cuda",
        num_warps=4 if norm else 1,
    )  # fmt: skip
    return mixes


def _reason(copies: int, width: int, **tensors: Tensor | None) -> str | None:
    if copies not in (1, 2, 4):
        return f"{copies} copies; 1, 2 and 4 have a kernel"
    if width > MAX_WIDTH:
        return f"rows of more than {MAX_WIDTH} columns"
    return contiguous_reason(**tensors) or device_reason(**tensors)


def supports_hc_split(
    mixes: Tensor, scale: Tensor, base: Tensor, hc_eps: float, iters: int
) -> str | None:
    """1, 2 or 4 copies, contiguous tensors on one device."""
    copies = {3: 1, 8: 2, 24: 4}.get(mixes.shape[1], 0)
    return _reason(copies, 1, mixes=mixes, scale=scale, base=base)


def hc_split(mixes: Tensor, scale: Tensor, base: Tensor, hc_eps: float, iters: int) -> Mixes:
    check_hc_split(mixes, scale, base, hc_eps, iters)
    rows, copies = mixes.shape[0], {3: 1, 8: 2, 24: 4}[mixes.shape[1]]
    outputs = _new_mixes(mixes.new_empty(rows, copies, 0))
    if rows:
        block = 16
        _hc_split_kernel[(min(triton.cdiv(rows, block), MAX_PROGRAMS),)](
            mixes, scale, base, *outputs, rows, hc_eps, iters,
            C=copies, MIXES=mixes.shape[1], BLOCK=block,
            NATIVE=target(mixes.device).backend == "cuda", num_warps=1,
        )  # fmt: skip
    return outputs


def supports_hc_mix(
    stream: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> str | None:
    """1, 2 or 4 copies, contiguous tensors on one device."""
    _, copies, width = stream.shape
    return _reason(copies, width, stream=stream, fn=fn, scale=scale, base=base)


def hc_mix(
    stream: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> Mixes:
    check_hc_mix(stream, fn, scale, base, norm_eps, hc_eps, iters)
    return _run(stream, _Mixing(fn, scale, base, norm_eps, hc_eps, iters), None, None)


def supports_hc_pre(
    stream: Tensor,
    pre: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    weight: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> str | None:
    """1, 2 or 4 copies, contiguous tensors on one device."""
    _, copies, width = stream.shape
    return _reason(
        copies, width, stream=stream, pre=pre, fn=fn, scale=scale, base=base, weight=weight
    )


def hc_pre(
    stream: Tensor,
    pre: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    weight: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_hc_pre(stream, pre, fn, scale, base, weight, norm_eps, hc_eps, iters)
    rows, _, width = stream.shape
    x = torch.empty(rows, width, dtype=torch.bfloat16, device=stream.device)
    mixing = _Mixing(fn, scale, base, norm_eps, hc_eps, iters)
    return x, *_run(stream, mixing, None, (pre, x, weight))


def supports_hc_boundary(
    y: Tensor,
    stream: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    weight: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> str | None:
    """1, 2 or 4 copies, contiguous tensors on one device."""
    _, copies, width = stream.shape
    tensors = {"y": y, "stream": stream, "post": post, "comb": comb, "pre": pre, "fn": fn}
    return _reason(copies, width, **tensors, scale=scale, base=base, weight=weight)


def hc_boundary(
    y: Tensor,
    stream: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    weight: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    check_hc_boundary(y, stream, post, comb, pre, fn, scale, base, weight, norm_eps, hc_eps, iters)
    new, x = torch.empty_like(stream), torch.empty_like(y)
    mixing = _Mixing(fn, scale, base, norm_eps, hc_eps, iters)
    return new, x, *_run(stream, mixing, (y, post, comb, new), (pre, x, weight))
