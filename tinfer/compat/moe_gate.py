"""Expert choice: scores, biased top-k, normalized route weights, as plain torch.

Source: the release's reference gate; kernels E1 of the contracts.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCORE_FUNCS = ("sqrtsoftplus", "softmax", "sigmoid")
WEIGHT_EPS = 1e-20  # added to the sum of the chosen scores


def check_moe_gate(
    logits: Tensor,
    bias: Tensor,
    bias_vl: Tensor | None,
    image: Tensor | None,
    topk: int,
    route_scale: float,
    score_func: str,
    normalize: bool,
) -> None:
    """Raise where a call of `moe_gate` is invalid."""
    op = "moe_gate"
    if logits.dim() != 2:
        raise ValueError(f"{op}: logits must be [T, E], got {tuple(logits.shape)}")
    tokens, experts = logits.shape
    for name, x, shape, dtype in (
        ("logits", logits, (tokens, experts), torch.float32),
        ("bias", bias, (experts,), torch.float32),
        ("bias_vl", bias_vl, (experts,), torch.float32),
        ("image", image, (tokens,), torch.bool),
    ):
        if x is None:
            continue
        if x.shape != shape:
            raise ValueError(f"{op}: {name} must be {list(shape)}, got {tuple(x.shape)}")
        if x.dtype != dtype:
            raise TypeError(f"{op}: {name} must be {dtype}, got {x.dtype}")
    if image is not None and bias_vl is None:
        raise ValueError(f"{op}: bias_vl must be given with image, got None")
    if not 1 <= topk <= experts:
        raise ValueError(f"{op}: topk must be in 1..{experts}, got {topk}")
    if score_func not in SCORE_FUNCS:
        raise ValueError(f"{op}: score_func must be one of {SCORE_FUNCS}, got {score_func!r}")


def gate_scores(logits: Tensor, score_func: str) -> Tensor:
    """fp32 logits -> non-negative scores.

    sqrt(softplus(x)) for x <= 0 is exp(x/2) * sqrt(log1p(u)/u) with u = exp(x), which neither
    loses log(1 + u) to rounding nor underflows before exp(x/2) does.
    """
    if score_func == "softmax":
        return torch.softmax(logits, dim=-1)
    if score_func == "sigmoid":
        return torch.sigmoid(logits)
    low = logits.clamp(max=0.0)
    u = torch.exp(low)
    ratio = torch.where(u < 2.0**-24, 1.0, torch.log1p(u) / u)
    high = logits + torch.log1p(torch.exp(-logits.abs()))
    return torch.where(logits > 0, high.sqrt(), torch.exp(low * 0.5) * ratio.sqrt())


def moe_gate(
    logits: Tensor,
    bias: Tensor,
    bias_vl: Tensor | None,
    image: Tensor | None,
    topk: int,
    route_scale: float,
    score_func: str,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts and their route weights.

    Args:
        logits: fp32 `[T, E]`.
        bias: fp32 `[E]`, added to the scores for the choice only.
        bias_vl: fp32 `[E]`, taken instead of `bias` on image rows, or None.
        image: bool `[T]`, True for image rows, or None for none.
        topk: experts a token.
        route_scale: factor of the weights.
        score_func: "sqrtsoftplus", "softmax" or "sigmoid".
        normalize: divide by the sum of the chosen scores + 1e-20; never done when topk is 1.

    Returns:
        ids int32 `[T, topk]` by descending biased score, ties to the lower id, and the weights
        fp32 `[T, topk]`: the unbiased scores, normalized, times `route_scale`. A NaN score
        ranks as -inf; ids are in range and distinct whatever the logits are.

    Raises:
        ValueError, TypeError: shapes, dtypes or `score_func` differ from the above.

    Numerics: fp32; ranks by the fp32 sum score + bias; the chosen scores are summed in order.
    Source: kernels E1; golden README trap 18.
    """
    check_moe_gate(logits, bias, bias_vl, image, topk, route_scale, score_func, normalize)
    scores = gate_scores(logits, score_func)
    chosen_by = bias.expand_as(scores)
    if image is not None and bias_vl is not None:
        chosen_by = torch.where(image[:, None], bias_vl, chosen_by)
    ranked = (scores + chosen_by).nan_to_num(-torch.inf, torch.inf, -torch.inf)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    weights = scores.gather(1, order)
    if normalize and topk > 1:
        total = weights[:, 0].clone()
        for i in range(1, topk):
            total = total + weights[:, i]
        weights = weights / (total + WEIGHT_EPS)[:, None]
    return order.to(torch.int32), weights * route_scale
