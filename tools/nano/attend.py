"""Attention over window and compressed keys with a sink, and rotary embedding, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """bf16 `[T, H, D]`, tables fp32 `[T, 1, R/2]`; the last R channels turn."""
    rope = 2 * cos.shape[-1]
    tail = x[..., x.shape[-1] - rope :].float().unflatten(-1, (rope // 2, 2))
    a, b = tail[..., 0], tail[..., 1]
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    return torch.cat([x[..., : x.shape[-1] - rope], turned.to(torch.bfloat16)], dim=-1)


class _Attend(torch.autograd.Function):
    """Fused attention; the sink is folded into the log-sum-exp, which makes its gradient exact."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, bias: Tensor, sink: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        heads = q.shape[1]
        keys = kv[:, None].expand(-1, heads, -1, -1)
        mask = bias.expand(q.shape[0], heads, -1, -1)
        forward = torch.ops.aten._scaled_dot_product_efficient_attention
        out, lse, seed, offset = forward(q, keys, keys, mask, True, scale=scale)
        total = torch.logaddexp(lse, sink[None, :, None])
        share = torch.exp(lse - total)[:, :, : q.shape[2], None]
        out = (out.float() * share).to(torch.bfloat16)
        ctx.save_for_backward(q, kv, bias, sink, out, total, seed, offset)
        ctx.scale = scale
        ctx.mark_non_differentiable(total)
        return out, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, bias, sink, out, total, seed, offset = ctx.saved_tensors
        heads, length = q.shape[1], q.shape[2]
        keys = kv[:, None].expand(-1, heads, -1, -1)
        mask = bias.expand(q.shape[0], heads, -1, -1)
        grad = grad.contiguous()
        backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        dq, dk, dv, _ = backward(
            grad,
            q,
            keys,
            keys,
            mask,
            out,
            total,
            seed,
            offset,
            0.0,
            [True, True, True, False],
            scale=ctx.scale,
        )
        delta = (grad.float() * out.float()).sum(-1)
        share = torch.exp(sink[None, :, None] - total[:, :, :length])
        dkv = (dk.float() + dv.float()).sum(1).to(kv.dtype)
        return dq, dkv, None, -(share * delta).sum((0, 2)), None


def _plain(
    q: Tensor, kv: Tensor, bias: Tensor, sink: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    logits = q.float() @ kv.float()[:, None].transpose(-1, -2) * scale + bias.float()
    top = logits.amax(-1, keepdim=True)
    p = torch.exp(logits - top)
    total = top + torch.log(p.sum(-1, keepdim=True))
    out = (p.to(torch.bfloat16).float() @ kv.float()[:, None]) / p.sum(-1, keepdim=True)
    total = torch.logaddexp(total, sink[None, :, None, None])
    share = torch.exp(top + torch.log(p.sum(-1, keepdim=True)) - total)
    return (out * share).to(torch.bfloat16), total[..., 0]


def attend(
    q: Tensor, kv: Tensor, bias: Tensor, sink: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """bf16 `[B, H, L, d]` over one shared `kv` bf16 `[B, K, d]` -> output, log-sum-exp with sink.

    `bias` bf16 `[B or 1, 1, L, K]` is 0 where a key is seen and -inf elsewhere.
    """
    if q.is_cuda:
        return _Attend.apply(q, kv, bias, sink, scale)  # type: ignore[no-any-return]
    return _plain(q, kv, bias, sink, scale)


def allowed(mask: Tensor) -> Tensor:
    """bool -> the additive mask."""
    zero = torch.zeros((), dtype=torch.bfloat16, device=mask.device)
    return torch.where(mask, zero, float("-inf"))
