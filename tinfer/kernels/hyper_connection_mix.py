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
from tinfer.kernels._hc_mix import (
    _hc_finish_kernel,
    _hc_partial_kernel,
    _hc_parts_kernel,
    _hc_split_kernel,
)
from tinfer.kernels._target import target
from tinfer.kernels.norm_rope import MAX_WIDTH, split_width

Mixes = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Tiles:
    """Tile of the first kernel: tokens, columns, column ranges, warps, pipeline stages."""

    tokens: int
    columns: int
    splits: int
    warps: int
    stages: int
    parts: bool = False


def _mix_tiles(rows: int, width: int, shared_kib: int, processors: int) -> Tiles:
    block = min(64, max(16, triton.next_power_of_2(width)))
    blocks = triton.cdiv(width, block)
    if rows <= 64:
        splits = min(blocks, max(1, 2 * processors // triton.cdiv(rows, 16)), 128)
        return Tiles(16, block, splits, 4, 2)
    splits = max(1, min(blocks // 4, processors // triton.cdiv(rows, 64)))
    return Tiles(64, block, splits, 8, 3 if shared_kib > 200 else 1)


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


def _run(
    stream: Tensor,
    mixing: _Mixing,
    written: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    collapsed: tuple[Tensor, Tensor, Tensor | None] | None,
    tiles: Tiles | None = None,
) -> Mixes:
    """Both kernels. `written` is (y, post, comb, new); `collapsed` is (pre, x, weight)."""
    rows, copies, width = stream.shape
    mixes = _new_mixes(stream)
    if not rows:
        return mixes
    device = target(stream.device)
    tiles = tiles or _mix_tiles(rows, width, device.shared_kib, device.processors)
    count = mix_rows(copies)
    row_width = max(16, triton.next_power_of_2(count + 2))
    partial = torch.empty(tiles.splits, rows, row_width, dtype=torch.float32, device=stream.device)
    fn = mixing.fn
    if tiles.parts:
        fn = torch.empty(3, *fn.shape, dtype=torch.bfloat16, device=fn.device)
        _hc_parts_kernel[(triton.cdiv(mixing.fn.numel(), 1024),)](
            mixing.fn, fn, mixing.fn.numel(), BLOCK=1024, num_warps=4
        )
    y, post, comb, new = written or (stream,) * 4
    pre, x, weight = collapsed or (stream, stream, None)
    _hc_partial_kernel[(triton.cdiv(rows, tiles.tokens) * tiles.splits,)](
        y, stream, post, comb, pre, fn, new, x, partial, rows, width,
        tiles.splits, C=copies, MIXES=count, WIDTH=row_width,
        POST=written is not None, COLLAPSE=collapsed is not None,
        BLOCK_T=tiles.tokens, BLOCK_D=tiles.columns, PARTS=tiles.parts, STAGES=tiles.stages,
        num_warps=tiles.warps, enable_fp_fusion=False,
    )  # fmt: skip
    main, rest = split_width(width)
    norm = collapsed is not None
    _hc_finish_kernel[(min(rows * (2 if norm else 1), MAX_PROGRAMS),)](
        partial, mixing.scale, mixing.base, stream if weight is None else weight, x, *mixes,
        rows, width, tiles.splits, mixing.norm_eps, mixing.hc_eps, mixing.iters,
        C=copies, MIXES=count, WIDTH=row_width,
        BLOCK_S=triton.next_power_of_2(tiles.splits), NORM=norm, HAS_WEIGHT=weight is not None,
        MAIN=main, REST=rest, num_warps=4 if norm else 1,
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
        block = 32
        _hc_split_kernel[(min(triton.cdiv(rows, block), MAX_PROGRAMS),)](
            mixes, scale, base, *outputs, rows, hc_eps, iters,
            C=copies, MIXES=mixes.shape[1], BLOCK=block, num_warps=1,
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
