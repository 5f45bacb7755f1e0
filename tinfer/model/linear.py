"""Linear layers on the checkpoint's stored formats."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tinfer import ops
from tinfer.formats import Fp8Block32


@dataclass(frozen=True)
class Cast:
    """An activation with its fp8 cast, made once and shared by the projections that read it."""

    x: Tensor  # bf16 [T, K]
    q: Tensor  # bytes [T, K]
    s: Tensor  # bytes [T, K/32]


def cast(x: Tensor) -> Cast:
    """Cast a bf16 activation to e4m3 with one ue8m0 scale per 32 columns."""
    q, s = ops.per_token_cast(x, "e4m3", 32, "ue8m0")
    return Cast(x, q, s)


def linear(x: Cast, w: Fp8Block32) -> Tensor:
    """fp8 activation times an fp8 weight -> bf16."""
    return ops.linear_fp8(x.q, x.s, w.weight, w.scale)
