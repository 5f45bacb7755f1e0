"""Device functions that turn rows of mixes into pre, post and the doubly normalized comb."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sinkhorn(logits, eps, iters):
    """fp32 [B, C, C] -> softmax of rows, then columns and rows normalized in turn `iters` times."""
    value = tl.exp(logits - tl.max(logits, axis=2)[:, :, None])
    value = value / tl.sum(value, axis=2)[:, :, None] + eps
    value = value / (tl.sum(value, axis=1) + eps)[:, None, :]
    for _ in range(1, iters):
        value = value / (tl.sum(value, axis=2) + eps)[:, :, None]
        value = value / (tl.sum(value, axis=1) + eps)[:, None, :]
    return value


@triton.jit
def store_mixes(
    ends, comb, token, live, scale, base, pre_out, post_out, comb_out, eps, iters, C: tl.constexpr
):  # fmt: skip
    """ends fp32 [B, 2C] (pre and post parts) and comb fp32 [B, C*C] of tokens [B] -> outputs."""
    at = tl.arange(0, 2 * C)[None, :]
    factor = tl.where(at < C, tl.load(scale), tl.load(scale + 1))
    gate = 1.0 / (1.0 + tl.exp(-(ends * factor + tl.load(base + at))))
    tl.store(pre_out + token[:, None] * C + at, gate + eps, mask=live[:, None] & (at < C))
    tl.store(post_out + token[:, None] * C + at - C, 2 * gate, mask=live[:, None] & (at >= C))
    cell = tl.arange(0, C * C)[None, :]
    logits = comb * tl.load(scale + 2) + tl.load(base + 2 * C + cell)
    value = sinkhorn(tl.reshape(logits, [logits.shape[0], C, C]), eps, iters)
    value = tl.reshape(value, [logits.shape[0], C * C])
    tl.store(comb_out + token[:, None] * (C * C) + cell, value, mask=live[:, None])
