"""Hyper-connections: expand, collapse (with norm), mean, write-back; the mixes are re-exported.

    collapse  out    = sum_c pre[c] * stream[c]
    post      new[k] = post[k] * y + sum_j comb[j, k] * stream[j]

A program takes one token's block of columns and reads every copy of it once. Compiled without
fused multiply-add, so that collapse and write-back equal their references bit for bit.

Source: written for this project; the contract is `tinfer.compat.hyper_connection`.
"""

# ruff: noqa: RUF005  (Triton's language has no unpacking into a tuple)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.compat.hyper_connection import (
    check_hc_collapse,
    check_hc_collapse_norm,
    check_hc_expand,
    check_hc_mean,
    check_hc_post,
)
from tinfer.kernels._call import MAX_PROGRAMS, contiguous_reason, device_reason
from tinfer.kernels._hc_enter import MAX_WIDTH, enter
from tinfer.kernels._hyper_connection_mix import (
    hc_boundary,
    hc_mix,
    hc_pre,
    hc_split,
    supports_hc_boundary,
    supports_hc_mix,
    supports_hc_pre,
    supports_hc_split,
)
from tinfer.kernels._jit import to_bf16, to_fp32

__all__ = [
    "hc_boundary",
    "hc_collapse",
    "hc_collapse_norm",
    "hc_expand",
    "hc_mean",
    "hc_mix",
    "hc_post",
    "hc_pre",
    "hc_split",
    "supports_hc_boundary",
    "supports_hc_collapse",
    "supports_hc_collapse_norm",
    "supports_hc_expand",
    "supports_hc_mean",
    "supports_hc_mix",
    "supports_hc_post",
    "supports_hc_pre",
    "supports_hc_split",
]

# Columns a program and warps of the column-wise kernels.
_COLLAPSE_TILES = (1024, 4)
_POST_TILES = (1024, 4)
_EXPAND_TILES = (1024, 4)


@triton.jit
def _weighted(stream, pre, column, width, C: tl.constexpr, MEAN: tl.constexpr):
    """fp32 [B]: the copies' weighted sum in ascending order, or their mean."""
    inside = column < width
    total = to_fp32(tl.load(stream + column, mask=inside, other=0.0))
    if not MEAN:
        total *= tl.load(pre)
    for c in tl.static_range(1, C):
        value = to_fp32(tl.load(stream + c * width + column, mask=inside, other=0.0))
        total += value if MEAN else tl.load(pre + c) * value
    if MEAN:
        total = tl.div_rn(total, tl.full(total.shape, C, tl.float32))
    return total


@triton.jit(do_not_specialize=["rows"])
def _hc_collapse_kernel(
    stream, pre, out, rows, width, C: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    blocks = tl.cdiv(width, BLOCK)
    for tile in range(tl.program_id(0), rows * blocks, tl.num_programs(0)):
        row = (tile // blocks).to(tl.int64)
        column = tile % blocks * BLOCK + tl.arange(0, BLOCK)
        total = _weighted(stream + row * C * width, pre + row * C, column, width, C, MEAN)
        tl.store(out + row * width + column, to_bf16(total), mask=column < width)


@triton.jit(do_not_specialize=["rows"])
def _hc_post_kernel(
    y, stream, post, comb, out, rows, width, C: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    blocks = tl.cdiv(width, BLOCK)
    for tile in range(tl.program_id(0), rows * blocks, tl.num_programs(0)):
        row = (tile // blocks).to(tl.int64)
        column = tile % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        output = to_fp32(tl.load(y + row * width + column, mask=inside, other=0.0))
        copies = ()
        for j in tl.static_range(C):
            at = stream + (row * C + j) * width + column
            copies = copies + (to_fp32(tl.load(at, mask=inside, other=0.0)),)
        for k in tl.static_range(C):
            total = tl.load(post + row * C + k) * output
            for j in tl.static_range(C):
                total += tl.load(comb + (row * C + j) * C + k) * copies[j]
            tl.store(out + (row * C + k) * width + column, to_bf16(total), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _hc_expand_kernel(x, out, rows, width, stride, C: tl.constexpr, BLOCK: tl.constexpr):
    blocks = tl.cdiv(width, BLOCK)
    for tile in range(tl.program_id(0), rows * blocks, tl.num_programs(0)):
        row = (tile // blocks).to(tl.int64)
        column = tile % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        value = tl.load(x + row * stride + column, mask=inside, other=0.0)
        for c in tl.static_range(C):
            tl.store(out + (row * C + c) * width + column, value, mask=inside)


def _grid(rows: int, width: int, block: int) -> tuple[int]:
    return (min(rows * triton.cdiv(width, block), MAX_PROGRAMS),)


def _reason(**tensors: Tensor | None) -> str | None:
    return contiguous_reason(**tensors) or device_reason(**tensors)


def supports_hc_collapse(stream: Tensor, pre: Tensor) -> str | None:
    """Contiguous tensors on one device."""
    return _reason(stream=stream, pre=pre)


def hc_collapse(stream: Tensor, pre: Tensor) -> Tensor:
    check_hc_collapse(stream, pre)
    rows, copies, width = stream.shape
    out = torch.empty(rows, width, dtype=torch.bfloat16, device=stream.device)
    if out.numel():
        block, warps = _COLLAPSE_TILES
        _hc_collapse_kernel[_grid(rows, width, block)](
            stream, pre, out, rows, width, C=copies, MEAN=False, BLOCK=block,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def supports_hc_mean(stream: Tensor) -> str | None:
    """Contiguous tensors on one device."""
    return _reason(stream=stream)


def hc_mean(stream: Tensor) -> Tensor:
    check_hc_mean(stream)
    rows, copies, width = stream.shape
    out = torch.empty(rows, width, dtype=torch.bfloat16, device=stream.device)
    if out.numel():
        block, warps = _COLLAPSE_TILES
        _hc_collapse_kernel[_grid(rows, width, block)](
            stream, stream, out, rows, width, C=copies, MEAN=True, BLOCK=block,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def supports_hc_collapse_norm(
    stream: Tensor, pre: Tensor, weight: Tensor | None, eps: float
) -> str | None:
    """Contiguous tensors on one device, rows that fit one program."""
    if stream.shape[2] > MAX_WIDTH:
        return f"rows of more than {MAX_WIDTH} columns"
    return _reason(stream=stream, pre=pre, weight=weight)


def hc_collapse_norm(stream: Tensor, pre: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    check_hc_collapse_norm(stream, pre, weight, eps)
    out = torch.empty_like(stream[:, 0], memory_format=torch.contiguous_format)
    if out.numel():
        enter(stream, pre, weight, eps, out)
    return out


def supports_hc_post(y: Tensor, stream: Tensor, post: Tensor, comb: Tensor) -> str | None:
    """Contiguous tensors on one device."""
    return _reason(y=y, stream=stream, post=post, comb=comb)


def hc_post(y: Tensor, stream: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    check_hc_post(y, stream, post, comb)
    rows, copies, width = stream.shape
    out = torch.empty_like(stream)
    if out.numel():
        block, warps = _POST_TILES
        _hc_post_kernel[_grid(rows, width, block)](
            y, stream, post, comb, out, rows, width, C=copies, BLOCK=block,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def supports_hc_expand(x: Tensor, copies: int) -> str | None:
    """Contiguous rows."""
    return "columns of x are not contiguous" if x.stride(1) != 1 else device_reason(x=x)


def hc_expand(x: Tensor, copies: int) -> Tensor:
    check_hc_expand(x, copies)
    rows, width = x.shape
    out = torch.empty(rows, copies, width, dtype=torch.bfloat16, device=x.device)
    if out.numel():
        block, warps = _EXPAND_TILES
        _hc_expand_kernel[_grid(rows, width, block)](
            x, out, rows, width, x.stride(0), C=copies, BLOCK=block, num_warps=warps
        )
    return out
