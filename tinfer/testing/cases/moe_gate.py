"""Cases of the expert choice, and its comparison with fp64 scores."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from tinfer.compat.moe_gate import WEIGHT_EPS, moe_gate
from tinfer.testing.cases import Anchor, Arguments, Case, Compare
from tinfer.testing.compare import FP32_EPS

PEER = "tile_kernels 2.1.0 moe_topk_gate_forward"


def routed(
    g: Generator,
    tokens: int,
    experts: int = 384,
    topk: int = 6,
    score_func: str = "sqrtsoftplus",
    normalize: bool = True,
    image: bool = True,
    spread: float = 3.0,
    bias: float = 1.0,
) -> Arguments:
    """Normal logits; with `spread` 0, logits of a few whole values, so that scores tie."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=g.device)

    logits = normal(tokens, experts)
    return {
        "logits": logits * spread if spread else logits.round(),
        "bias": normal(experts) * bias,
        "bias_vl": normal(experts) * bias if image else None,
        "image": torch.rand(tokens, generator=g, device=g.device) < 0.5 if image else None,
        "topk": topk,
        "route_scale": 1.5,
        "score_func": score_func,
        "normalize": normalize,
    }


def _special(g: Generator) -> Arguments:
    """Rows with NaN, infinities, very low and very high logits."""
    a = routed(g, 8, 24, 6, image=False)
    x = a["logits"]
    x[0, 3], x[1, 5], x[2, 7] = float("nan"), float("inf"), float("-inf")
    x[3], x[4, :20], x[5] = float("nan"), float("nan"), float("-inf")
    x[6], x[7] = x[6] * 5 - 80, x[7] * 30 + 60
    return a


def _strided(g: Generator) -> Arguments:
    a = routed(g, 9, 48, 4)
    return a | {"logits": torch.cat([a["logits"], a["logits"]], 1)[:, 48:]}


def _case(name: str, make: object, real: bool = False, us: float | None = None) -> Case:
    return Case(
        "moe_gate",
        name,
        make,  # type: ignore[arg-type]
        real=real,
        bench=real,
        bytes=lambda a: a["logits"].numel() * 4 + len(a["logits"]) * a["topk"] * 8,
        anchor=None if us is None else Anchor(PEER, us),
    )


CASES = [
    _case("empty", lambda g: routed(g, 0)),
    _case("one", lambda g: routed(g, 1)),
    _case("model", lambda g: routed(g, 33, 6, 3)),
    _case("draft", lambda g: routed(g, 15, 128, 3, image=False)),
    _case("release", lambda g: routed(g, 13)),
    _case("top1", lambda g: routed(g, 9, 4, 1)),
    _case("all", lambda g: routed(g, 5, 8, 8)),
    _case("large_bias", lambda g: routed(g, 17, 384, 6, bias=10.0)),
    _case("ties", lambda g: routed(g, 17, 384, 6, spread=0.0, bias=0.0)),
    _case("softmax", lambda g: routed(g, 17, 24, 6, "softmax")),
    _case("softmax_raw", lambda g: routed(g, 17, 8, 2, "softmax", False, image=False)),
    _case("sigmoid", lambda g: routed(g, 17, 100, 5, "sigmoid")),
    _case("special", _special),
    _case("strided", _strided),
    _case("4096", lambda g: routed(g, 4096, image=False), True, 15.5),
    _case("4096_image", lambda g: routed(g, 4096), True),
    _case("16", lambda g: routed(g, 16, image=False), True, 9.4),
    _case("draft_80", lambda g: routed(g, 80, 128, 3, image=False), True),
]


# ---------------------------------------------------------------- comparison
def oracle(a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """fp64 scores and ranked scores, and how far an fp32 score may be from the former.

    An exponential of x errs by half a unit of x (its argument's rounding) and a few of its own.
    """
    x = a["logits"].double()
    if a["score_func"] == "softmax":
        scores = torch.softmax(x, -1)
        reach = (x.nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True) - x).abs()
    elif a["score_func"] == "sigmoid":
        scores, reach = torch.sigmoid(x), x.abs()
    else:
        soft = x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))
        scores, reach = soft.sqrt(), x.abs() / 2
    bias = a["bias"].double().expand_as(scores)
    if a["image"] is not None:
        bias = torch.where(a["image"][:, None], a["bias_vl"].double(), bias)
    error = scores * (reach.nan_to_num(0.0, 0.0, 0.0) + 8) * FP32_EPS + 2.0**-149
    return scores, scores + bias, error


def clear_rows(a: Arguments, topk: int) -> tuple[Tensor, Tensor]:
    """(ids int64 [T, k] by fp64 rank, bool [T] where no fp32 evaluation can rank otherwise).

    Neighbours whose logits and biases are equal have equal scores however they are evaluated.
    """
    _, ranked, error = oracle(a)
    known = ranked.nan_to_num(float("-inf"), float("inf"), float("-inf"))
    order = known.sort(dim=-1, descending=True, stable=True).indices
    ranked, error = ranked.gather(1, order), error.gather(1, order)
    logits = a["logits"].gather(1, order)
    bias = a["bias"][order]
    if a["image"] is not None:
        bias = torch.where(a["image"][:, None], a["bias_vl"][order], bias)
    doubt = error + ranked.abs() * FP32_EPS
    apart = ranked[:, :-1] - ranked[:, 1:] > doubt[:, :-1] + doubt[:, 1:]
    same = (logits[:, :-1] == logits[:, 1:]) & (bias[:, :-1] == bias[:, 1:])
    return order[:, :topk], (apart | same)[:, :topk].all(-1)


def compare(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], a: Arguments) -> None:
    """Ids equal fp64's where that is clear, legal elsewhere; weights near fp64's of the ids."""
    topk, experts = a["topk"], a["logits"].shape[1]
    finite = torch.isfinite(a["logits"]).all(-1)
    want, clear = clear_rows(a, topk)
    scores, ranked, error = oracle(a)
    for name, (ids, weights) in (("kernel", actual), ("reference", expected)):
        assert ids.dtype == torch.int32
        assert weights.dtype == torch.float32
        assert ids.shape == weights.shape == want.shape
        if not len(ids):
            continue
        chosen = ids.long()
        assert int(chosen.min()) >= 0, f"moe_gate: {name}: negative id"
        assert int(chosen.max()) < experts, f"moe_gate: {name}: id out of range"
        ordered = chosen.sort(-1).values
        assert not (ordered[:, 1:] == ordered[:, :-1]).any(), f"moe_gate: {name}: id chosen twice"
        right = (chosen == want).all(-1) | ~(clear & finite)
        assert right.all(), f"moe_gate: {name}: {int((~right).sum())} clear rows differ"
        rank, doubt = ranked.gather(1, chosen), error.gather(1, chosen)
        rest = ranked.scatter(1, chosen, float("-inf")).amax(-1)
        slack = doubt + error.amax(-1, keepdim=True) + 4 * FP32_EPS * ranked.abs().amax(-1, True)
        legal = (rank >= rest[:, None] - slack).all(-1) | ~finite
        assert legal.all(), f"moe_gate: {name}: a better expert was left out"
        _check_weights(name, weights, scores.gather(1, chosen), doubt, a, finite)
    assert torch.equal(actual[1].isnan(), expected[1].isnan())
    assert torch.equal(actual[0][~finite], expected[0][~finite])


def _check_weights(
    name: str, weights: Tensor, scores: Tensor, error: Tensor, a: Arguments, finite: Tensor
) -> None:
    want, relative = scores, error / scores.clamp(min=1e-300)
    if a["normalize"] and a["topk"] > 1:
        want = scores / (scores.sum(-1, keepdim=True) + WEIGHT_EPS)
        relative = relative + relative.amax(-1, keepdim=True) + a["topk"] * FP32_EPS
    want = want * a["route_scale"]
    bound = want * (relative + 4 * FP32_EPS) + 2.0**-149
    over = ((weights.double() - want).abs() > bound) & finite[:, None]
    assert not over.any(), f"moe_gate: {name}: {int(over.sum())} weights out of bounds"


COMPARE: dict[str, Compare] = {moe_gate.__name__: compare}
