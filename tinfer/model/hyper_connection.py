"""Hyper-connections: the residual stream of C copies around every sublayer.

The coefficients `pre` that collapse the stream for a sublayer come from the sublayer before it
(delayed by one); `post` and `comb` write back the same sublayer's output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tinfer import ops


@dataclass(frozen=True)
class Mix:
    """Coefficients computed from the stream before one sublayer, all fp32."""

    pre: Tensor  # [T, C]: collapses the stream for the next sublayer
    post: Tensor  # [T, C]: writes this sublayer's output to each copy
    comb: Tensor  # [T, C, C]: source copy, destination copy


def first_pre(tokens: int, copies: int, device: torch.device) -> Tensor:
    """(1, 0, 0, 0): the first sublayer reads copy 0."""
    pre = torch.zeros(tokens, copies, dtype=torch.float32, device=device)
    pre[:, 0] = 1.0
    return pre


@dataclass(frozen=True)
class HyperConnection:
    """The hyper-connection and the input norm of one sublayer."""

    fn: Tensor  # fp32 [(2+C)*C, C*D]
    scale: Tensor  # fp32 [3]
    base: Tensor  # fp32 [(2+C)*C]
    norm: Tensor  # [D]
    norm_eps: float
    hc_eps: float
    iters: int

    def enter(self, stream: Tensor, pre: Tensor) -> tuple[Tensor, Mix]:
        """The sublayer's input from the stream and the carried `pre`, and its coefficients."""
        x, *mix = ops.hc_pre(
            stream,
            pre,
            self.fn,
            self.scale,
            self.base,
            self.norm,
            self.norm_eps,
            self.hc_eps,
            self.iters,
        )
        return x, Mix(*mix)

    def leave_and_enter(self, y: Tensor, stream: Tensor, mix: Mix) -> tuple[Tensor, Tensor, Mix]:
        """Write back the previous sublayer's `y`, then enter this one, in one pass."""
        stream, x, pre, post, comb = ops.hc_boundary(
            y,
            stream,
            mix.post,
            mix.comb,
            mix.pre,
            self.fn,
            self.scale,
            self.base,
            self.norm,
            self.norm_eps,
            self.hc_eps,
            self.iters,
        )
        return stream, x, Mix(pre, post, comb)


def leave(y: Tensor, stream: Tensor, mix: Mix) -> Tensor:
    """Write a sublayer's output back to the stream."""
    return ops.hc_post(y, stream, mix.post, mix.comb)
