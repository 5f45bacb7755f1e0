"""Hyper-connections with gradients: the forward pass is the release's, fused where it can be."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinfer.compat.hyper_connection import hc_split
from tools.nano.quant import is_fused, linear_f32

Mixes = tuple[Tensor, Tensor, Tensor]  # pre, post, comb

ROUNDS = 12  # of the fixed point that the projection's gradient takes


def _tangent(comb: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the Sinkhorn projection for the logits of its input.

    The result of many rounds is `diag(r) exp(M) diag(c)` with unit row and column sums, so a
    change of M moves it along the tangent of those constraints: `H - P * (u + v)` with
    `H = P * grad`, and u, v such that all row and column sums vanish.
    """
    h = comb * grad
    rows, columns = h.sum(-1), h.sum(-2)
    u, v = torch.zeros_like(rows), torch.zeros_like(columns)
    for _ in range(ROUNDS):
        u = rows - (comb * v[..., None, :]).sum(-1)
        v = columns - (comb * u[..., :, None]).sum(-2)
    return h - comb * (u[..., :, None] + v[..., None, :])


def _tangent_on_gpu(comb: Tensor, grad: Tensor) -> Tensor:
    from tools.nano.sinkhorn import tangent

    return tangent(comb, grad, ROUNDS)


def _split_on_gpu(
    raw: Tensor, scale: Tensor, base: Tensor, eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    from tools.nano.sinkhorn import project

    copies = int((len(base) + 1) ** 0.5) - 1
    pre, post, comb = raw.split([copies, copies, copies * copies], dim=1)
    b_pre, b_post, b_comb = base.split([copies, copies, copies * copies])
    pre = torch.sigmoid(pre * scale[0] + b_pre) + eps
    post = 2 * torch.sigmoid(post * scale[1] + b_post)
    return pre, post, project(comb * scale[2] + b_comb, eps, iters)


class _Split(torch.autograd.Function):
    """`hc_split` with the gradient of its limit."""

    @staticmethod
    def forward(
        ctx: Any, raw: Tensor, scale: Tensor, base: Tensor, eps: float, iters: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        if raw.is_cuda:
            pre, post, comb = _split_on_gpu(raw, scale, base, eps, iters)
        else:
            pre, post, comb = hc_split(raw, scale, base, eps, iters)
        ctx.save_for_backward(raw, scale, pre, post, comb)
        return pre, post, comb

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raw, scale, pre, post, comb = ctx.saved_tensors
        copies = pre.shape[1]
        tangent = _tangent_on_gpu if raw.is_cuda else _tangent
        z = torch.cat(
            [
                grads[0] * pre * (1 - pre),
                grads[1] * post * (1 - post * 0.5),
                tangent(comb, grads[2].contiguous()).flatten(1),
            ],
            dim=1,
        )
        sizes = [copies, copies, copies * copies]
        factor = torch.cat([scale[i : i + 1].expand(n) for i, n in enumerate(sizes)])
        parts = (z * raw).sum(0).split(sizes)
        return z * factor, torch.stack([p.sum() for p in parts]), z.sum(0), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `ops.rms_norm`."""
    if is_fused(x):
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    value = x.float()
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return (weight.float() * value).to(torch.bfloat16)


def collapse(stream: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 `[T, D]` as `ops.hc_collapse`, and the stream's mean square fp32 `[T]`."""
    if is_fused(stream):
        from tools.nano.fused import Enter

        return Enter.apply(stream, pre)  # type: ignore[no-any-return]
    s = stream.float()
    total = pre[:, :1] * s[:, 0]
    for c in range(1, stream.shape[1]):
        total = total + pre[:, c : c + 1] * s[:, c]
    return total.to(torch.bfloat16), s.square().mean((1, 2))


def post(y: Tensor, stream: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """As `ops.hc_post`."""
    if is_fused(stream):
        from tools.nano.fused import Post

        return Post.apply(y, stream, post, comb)  # type: ignore[no-any-return]
    total = post[:, :, None] * y.float()[:, None]
    for j in range(stream.shape[1]):
        total = total + comb[:, j, :, None] * stream[:, j, None].float()
    return total.to(torch.bfloat16)


def mix(
    stream: Tensor,
    inverse: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    hc_eps: float,
    iters: int,
) -> Mixes:
    """As `ops.hc_mix`; `inverse` fp32 `[T, 1]` is one over the stream's rms, `fn` bf16."""
    raw = linear_f32(stream.flatten(1), fn) * inverse
    return _Split.apply(raw, scale, base, hc_eps, iters)  # type: ignore[no-any-return]
