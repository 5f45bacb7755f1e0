"""References of RMSNorm, RMSNorm with the fp8 cast, and rotary embedding.

Source: DeepSeek-V4.1-Flash `inference/model.py` (RMSNorm, apply_rotary_emb), as described by
the golden vectors `rms_norm` and `apply_rotary_emb`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinfer.compat.casts import per_token_cast
from tinfer.compat.checks import require, require_dtype, require_shape
from tinfer.formats import GROUP


def check_rms_norm(x: Tensor, weight: Tensor | None, eps: float, op: str = "rms_norm") -> None:
    """Raise unless the arguments fit `rms_norm`."""
    require_dtype(op, "x", x, torch.bfloat16, torch.float32)
    require(x.dim() >= 1 and x.shape[-1] > 0, op, "x", "[..., H] with H > 0", list(x.shape))
    require(eps >= 0, op, "eps", ">= 0", eps)
    if weight is not None:
        require_dtype(op, "weight", weight, torch.bfloat16, torch.float32)
        require_shape(op, "weight", weight, (x.shape[-1],))


def check_rms_norm_cast(
    x: Tensor, weight: Tensor | None, eps: float, op: str = "rms_norm_cast"
) -> None:
    """Raise unless the arguments fit `rms_norm_cast` and `rms_norm_codes`."""
    check_rms_norm(x, weight, eps, op)
    rule = f"[..., H] with H a multiple of {GROUP}"
    require(x.shape[-1] % GROUP == 0, op, "x", rule, list(x.shape))


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`weight * (x * rsqrt(mean(x^2) + eps))` over the last dimension.

    Args:
        x: bf16 or fp32 [..., H], any strides.
        weight: bf16 or fp32 [H]; None means all ones.
        eps: added to the mean square in fp32 (1e-20 in the text model, 1e-6 in the vision tower).

    Returns:
        bf16 [..., H], contiguous.

    Raises:
        TypeError: wrong dtype. ValueError: wrong shape or a negative eps.

    Numerics: fp32 inside, the mean is sum / H, one rounding to bf16 at the end. A zero row gives
        zeros. NaN and infinities make their whole row NaN (an infinity's row: NaN and zeros).
    """
    check_rms_norm(x, weight, eps)
    value = x.float()
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        value = weight.float() * value
    return value.to(torch.bfloat16).contiguous()


def rms_norm_cast(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`rms_norm`, and its bf16 result cast to e4m3 in groups of 32 with ue8m0 scales.

    Args:
        x, weight, eps: as for `rms_norm`, with H a multiple of 32.

    Returns:
        y bf16 [..., H]; q uint8 e4m3 codes [..., H]; s uint8 ue8m0 codes [..., H/32].

    Raises:
        TypeError, ValueError: as `rms_norm`; H not a multiple of 32.

    Numerics: the cast sees the bf16-rounded norm, so this equals `rms_norm` then
        `per_token_cast(y, "e4m3", 32, "ue8m0")` bit for bit.
    """
    check_rms_norm_cast(x, weight, eps)
    y = rms_norm(x, weight, eps)
    q, s = per_token_cast(y, "e4m3", GROUP, "ue8m0")
    return y, q, s


def rms_norm_codes(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """`rms_norm_cast` without its bf16 result, where nothing else reads it.

    Args:
        x, weight, eps: as for `rms_norm_cast`.

    Returns:
        q uint8 e4m3 codes [..., H]; s uint8 ue8m0 codes [..., H/32].

    Raises:
        TypeError, ValueError: as `rms_norm_cast`.

    Numerics: as `rms_norm_cast`; the norm is rounded to bf16 before the cast.
    """
    check_rms_norm_cast(x, weight, eps, "rms_norm_codes")
    return per_token_cast(rms_norm(x, weight, eps), "e4m3", GROUP, "ue8m0")


def check_apply_rotary_(x: Tensor, cos_sin: Tensor, positions: Tensor, inverse: bool) -> None:
    """Raise unless the arguments fit `apply_rotary_`."""
    op = "apply_rotary_"
    require_dtype(op, "x", x, torch.bfloat16)
    require_shape(op, "x", x, ("T", "H", "D"))
    require_dtype(op, "cos_sin", cos_sin, torch.float32)
    require_shape(op, "cos_sin", cos_sin, ("L", "R"))
    rope = cos_sin.shape[1]
    require(rope % 2 == 0, op, "cos_sin", "[L, R] with R even", list(cos_sin.shape))
    require(rope <= x.shape[2], op, "cos_sin", f"[L, R] with R <= D = {x.shape[2]}", rope)
    require_dtype(op, "positions", positions, torch.int64)
    require_shape(op, "positions", positions, (x.shape[0],))


def apply_rotary_(x: Tensor, cos_sin: Tensor, positions: Tensor, inverse: bool = False) -> None:
    """Rotate the last R of D channels in place, adjacent channels (2i, 2i+1) as one pair.

    `a' = a*cos - b*sin`, `b' = a*sin + b*cos` with the angle of pair i at the row's position;
    `inverse` negates the sine.

    Args:
        x: bf16 [T, H, D], rotated in place; any strides.
        cos_sin: fp32 [L, R], `[cos(R/2) | sin(R/2)]` per position.
        positions: int64 [T], each in [0, L).
        inverse: rotate by the negative angle.

    Raises:
        TypeError: wrong dtype. ValueError: wrong shape, odd R, R > D.

    Numerics: fp32 products and sums, each rounded (no fused multiply-add), one rounding to bf16.
    """
    check_apply_rotary_(x, cos_sin, positions, inverse)
    rope = cos_sin.shape[1]
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    sin = -sin if inverse else sin
    tail = x[..., x.shape[-1] - rope :]
    a, b = tail[..., 0::2].float(), tail[..., 1::2].float()
    rotated = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1)
    tail.copy_(rotated.flatten(-2))
