"""Triton kernels of the training step: rounding, and hyper-connections with their gradients.

Plain torch versions are in `quant` and `mixes`; these are what a GPU runs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

HALF = 12582912.0  # 1.5 * 2^23: adding and subtracting it rounds to integers, ties to even


@triton.jit
def _nearest(x):
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _round_to(a, LOW: tl.constexpr, BITS: tl.constexpr):
    """|a| to a float of BITS mantissa bits whose smallest exponent is LOW."""
    exponent = (a.to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.maximum(exponent, LOW)
    up = ((127 + BITS - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((127 - BITS + exponent) << 23).to(tl.float32, bitcast=True)
    return _nearest(a * up) * down


@triton.jit
def _fake_quant_kernel(x, out, groups, FMT: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[:, None]
    at = row * GROUP + tl.arange(0, GROUP)[None, :]
    mask = at < groups.to(tl.int64) * GROUP
    v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    a = tl.abs(v)
    amax = tl.max(a, 1)[:, None]
    if FMT == 2:  # e2m1 with e4m3 scales
        amax = tl.maximum(amax, 6.0 * 0.001953125)
        scale = _round_to(tl.minimum(tl.div_rn(amax, 6.0), 448.0), -6, 3)
    else:
        if FMT == 0:
            wanted = tl.maximum(amax, 1e-4) * (1.0 / 448.0)
        else:
            wanted = tl.maximum(amax, 6.0 * 1.1754943508222875e-38) * (1.0 / 6.0)
        bits = wanted.to(tl.int32, bitcast=True)
        code = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        scale = (code << 23).to(tl.float32, bitcast=True)
    a = tl.div_rn(a, scale + tl.zeros_like(a))
    if FMT == 0:
        a = tl.minimum(_round_to(tl.minimum(a, 448.0), -6, 3), 448.0)
    else:
        a = tl.minimum(_round_to(tl.minimum(a, 6.0), 0, 1), 6.0)
    q = tl.where(v < 0, -a, a) * scale
    tl.store(out + at, q.to(tl.bfloat16), mask=mask)


def fake_quant(x: Tensor, kind: int) -> Tensor:
    """`[n, group]` contiguous -> bf16; kind 0 e4m3, 1 e2m1, 2 e2m1 with e4m3 scales."""
    groups, width = x.shape
    out = torch.empty_like(x, dtype=torch.bfloat16)
    block = max(2048 // width, 1)
    _fake_quant_kernel[(triton.cdiv(groups, block),)](x, out, groups, kind, width, block)
    return out


# ---------------------------------------------------------------- entering a sublayer
@triton.jit
def _enter_kernel(stream, pre, col, square, D: tl.constexpr, C: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    total = tl.zeros([D], dtype=tl.float32)
    squares = tl.zeros([D], dtype=tl.float32)
    for c in tl.static_range(C):
        s = tl.load(stream + (t * C + c) * D + d).to(tl.float32)
        total += tl.load(pre + t * C + c) * s
        squares += s * s
    tl.store(col + t * D + d, total.to(tl.bfloat16))
    tl.store(square + t, tl.sum(squares, 0) / (C * D))


@triton.jit
def _enter_backward_kernel(
    stream, pre, dcol, dsquare, dstream, dpre, D: tl.constexpr, C: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    g = tl.load(dcol + t * D + d).to(tl.float32)
    ms = tl.load(dsquare + t) * (2.0 / (C * D))
    for c in tl.static_range(C):
        s = tl.load(stream + (t * C + c) * D + d).to(tl.float32)
        tl.store(dpre + t * C + c, tl.sum(g * s, 0))
        ds = tl.load(pre + t * C + c) * g + ms * s
        tl.store(dstream + (t * C + c) * D + d, ds.to(tl.bfloat16))


class Enter(torch.autograd.Function):
    """stream bf16 `[T, C, D]`, pre fp32 `[T, C]` -> collapsed bf16 `[T, D]`, mean square `[T]`."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
        stream, pre = stream.contiguous(), pre.contiguous()
        tokens, copies, dim = stream.shape
        col = torch.empty(tokens, dim, dtype=torch.bfloat16, device=stream.device)
        square = torch.empty(tokens, device=stream.device)
        _enter_kernel[(tokens,)](stream, pre, col, square, dim, copies, num_warps=2)
        ctx.save_for_backward(stream, pre)
        return col, square

    @staticmethod
    def backward(ctx: Any, dcol: Tensor, dsquare: Tensor) -> tuple[Tensor, Tensor]:
        stream, pre = ctx.saved_tensors
        tokens, copies, dim = stream.shape
        dstream, dpre = torch.empty_like(stream), torch.empty_like(pre)
        dcol, dsquare = dcol.contiguous(), dsquare.contiguous()
        _enter_backward_kernel[(tokens,)](
            stream, pre, dcol, dsquare, dstream, dpre, dim, copies, num_warps=2
        )
        return dstream, dpre


# ---------------------------------------------------------------- leaving it
@triton.jit
def _post_kernel(y, stream, post, comb, out, D: tl.constexpr, C: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    value = tl.load(y + t * D + d).to(tl.float32)
    for c in tl.static_range(C):
        total = tl.load(post + t * C + c) * value
        for j in tl.static_range(C):
            s = tl.load(stream + (t * C + j) * D + d).to(tl.float32)
            total += tl.load(comb + (t * C + j) * C + c) * s
        tl.store(out + (t * C + c) * D + d, total.to(tl.bfloat16))


@triton.jit
def _post_backward_kernel(
    y, stream, post, comb, grad, dy, dstream, dpost, dcomb, D: tl.constexpr, C: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    value = tl.load(y + t * D + d).to(tl.float32)
    down = tl.zeros([D], dtype=tl.float32)
    for c in tl.static_range(C):
        g = tl.load(grad + (t * C + c) * D + d).to(tl.float32)
        down += tl.load(post + t * C + c) * g
        tl.store(dpost + t * C + c, tl.sum(g * value, 0))
    tl.store(dy + t * D + d, down.to(tl.bfloat16))
    for j in tl.static_range(C):
        s = tl.load(stream + (t * C + j) * D + d).to(tl.float32)
        total = tl.zeros([D], dtype=tl.float32)
        for c in tl.static_range(C):
            g = tl.load(grad + (t * C + c) * D + d).to(tl.float32)
            total += tl.load(comb + (t * C + j) * C + c) * g
            tl.store(dcomb + (t * C + j) * C + c, tl.sum(g * s, 0))
        tl.store(dstream + (t * C + j) * D + d, total.to(tl.bfloat16))


class Post(torch.autograd.Function):
    """y bf16 `[T, D]` written back to the stream, see `mixes.post`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, stream: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        y, stream = y.contiguous(), stream.contiguous()
        post, comb = post.contiguous(), comb.contiguous()
        out = torch.empty_like(stream)
        tokens, copies, dim = stream.shape
        _post_kernel[(tokens,)](y, stream, post, comb, out, dim, copies, num_warps=2)
        ctx.save_for_backward(y, stream, post, comb)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        y, stream, post, comb = ctx.saved_tensors
        tokens, copies, dim = stream.shape
        outs = tuple(torch.empty_like(x) for x in (y, stream, post, comb))
        _post_backward_kernel[(tokens,)](
            y, stream, post, comb, grad.contiguous(), *outs, dim, copies, num_warps=2
        )
        return outs
