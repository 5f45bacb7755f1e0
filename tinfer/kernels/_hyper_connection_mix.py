"""Launchers of the hyper-connections' mixes: split, mix, pre and the boundary between sublayers.

What they launch is decided in `tinfer.kernels._hc_run`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tinfer.compat.hyper_connection import (
    check_hc_boundary,
    check_hc_mix,
    check_hc_pre,
    check_hc_split,
)
from tinfer.kernels._call import MAX_PROGRAMS, contiguous_reason, device_reason
from tinfer.kernels._hc_mix import _hc_split_kernel
from tinfer.kernels._hc_run import Mixes, Mixing, new_mixes, run
from tinfer.kernels._target import target
from tinfer.kernels.norm_rope import MAX_WIDTH


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
    outputs = new_mixes(mixes.new_empty(rows, copies, 0))
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
    return run(stream, Mixing(fn, scale, base, norm_eps, hc_eps, iters), None, None)


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
    mixing = Mixing(fn, scale, base, norm_eps, hc_eps, iters)
    return x, *run(stream, mixing, None, (pre, x, weight))


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
    mixing = Mixing(fn, scale, base, norm_eps, hc_eps, iters)
    return new, x, *run(stream, mixing, (y, post, comb, new), (pre, x, weight))
