"""The Sinkhorn projection of `tools.nano.mixes` and its tangent, each one pass in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _project_kernel(
    logits, out, tokens, stride, eps, ITERS: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, C)
    inner = i[None, :, None] * C + i[None, None, :]
    mask = (row < tokens)[:, None, None] & (inner < C * C)
    z = tl.load(logits + row[:, None, None] * stride + inner, mask=mask, other=0.0)
    p = tl.exp(z - tl.max(z, 2)[:, :, None])
    p = p / tl.sum(p, 2)[:, :, None] + eps
    p = p / (tl.sum(p, 1)[:, None, :] + eps)
    for _ in range(ITERS - 1):
        p = p / (tl.sum(p, 2)[:, :, None] + eps)
        p = p / (tl.sum(p, 1)[:, None, :] + eps)
    tl.store(out + row[:, None, None] * (C * C) + inner, p, mask=mask)


def project(logits: Tensor, eps: float, iters: int) -> Tensor:
    """fp32 `[T, C*C]`, rows contiguous, -> `[T, C, C]` with unit row and column sums."""
    tokens, columns = logits.shape
    copies, block = int(columns**0.5), 32
    out = torch.empty(tokens, copies, copies, device=logits.device)
    grid = (triton.cdiv(tokens, block),)
    _project_kernel[grid](logits, out, tokens, logits.stride(0), eps, iters, copies, block)
    return out


@triton.jit
def _tangent_kernel(
    comb, grad, out, tokens, ROUNDS: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, C)
    at = row[:, None, None] * (C * C) + i[None, :, None] * C + i[None, None, :]
    mask = (row < tokens)[:, None, None] & (i[None, :, None] < C)
    p = tl.load(comb + at, mask=mask, other=0.0)
    h = p * tl.load(grad + at, mask=mask, other=0.0)
    rows, columns = tl.sum(h, 2), tl.sum(h, 1)
    u = tl.zeros_like(rows)
    v = tl.zeros_like(columns)
    for _ in range(ROUNDS):
        u = rows - tl.sum(p * v[:, None, :], 2)
        v = columns - tl.sum(p * u[:, :, None], 1)
    tl.store(out + at, h - p * (u[:, :, None] + v[:, None, :]), mask=mask)


def tangent(comb: Tensor, grad: Tensor, rounds: int) -> Tensor:
    """fp32 `[T, C, C]` contiguous each, C a power of two."""
    out, block = torch.empty_like(comb), 32
    tokens, copies = comb.shape[:2]
    grid = (triton.cdiv(tokens, block),)
    _tangent_kernel[grid](comb, grad, out, tokens, rounds, copies, block)
    return out
