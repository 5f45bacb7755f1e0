"""Cases of the routed experts."""

from __future__ import annotations

from functools import partial

import torch
from torch import Generator, Tensor

from tinfer.compat.casts import per_token_cast
from tinfer.testing.cases import Anchor, Arguments, Case
from tinfer.testing.cases.gemm import codes, randn, scales
from tinfer.testing.compare import assert_close

# Both sides round gate, up, hidden and output to bf16 after fp32 sums of different order: now and
# then a value lands on the other side of a rounding, and one in the hidden activations may then
# take the neighbouring fp8 code. Two bf16 roundings of independent sign, 2^-9 each in the mean
# square, bound the whole by 3e-3, ten times below the effect of requantized weights (2.7e-2).
REL_L2, MAX_REL = 3e-3, 2e-2


def bytes_of(g: Generator, *shape: int) -> Tensor:
    """Random bytes: any two e2m1 codes."""
    return torch.randint(0, 256, shape, generator=g, dtype=torch.uint8, device=g.device)


def _weights(g: Generator, experts: int, dim: int, inner: int, fp4: bool) -> Arguments:
    """Weights of about unit gain: standard deviation near 1 / sqrt(K)."""
    low13, low2 = 127 - (dim.bit_length() + 1) // 2, 127 - (inner.bit_length() + 1) // 2
    if fp4:
        return {
            "w13": bytes_of(g, experts, 2 * inner, dim // 2),
            "w13_s": scales(g, experts, 2 * inner, dim // 32, low=low13 - 2, high=low13 + 1),
            "w2": bytes_of(g, experts, dim, inner // 2),
            "w2_s": scales(g, experts, dim, inner // 32, low=low2 - 2, high=low2 + 1),
        }
    return {
        "w13": codes(g, experts, 2 * inner, dim),
        "w13_s": scales(g, experts, inner // 16, dim // 32, low=low13 - 8, high=low13 - 5),
        "w2": codes(g, experts, dim, inner),
        "w2_s": scales(g, experts, dim // 32, inner // 32, low=low2 - 8, high=low2 - 5),
    }


def experts_call(
    g: Generator,
    tokens: int,
    topk: int,
    experts: int,
    dim: int,
    inner: int,
    fp4: bool = True,
    routing: str = "random",
    limit: float = 10.0,
    shared: bool = True,
) -> Arguments:
    """One call; `routing` is "random", "same" (all tokens to the first experts), "some" (-1s)."""
    q, s = per_token_cast(randn(g, tokens, dim), "e4m3", 32, "ue8m0")
    ids = torch.rand(tokens, experts, generator=g, device=g.device).argsort(-1)[:, :topk].int()
    if routing == "same":
        ids = torch.arange(topk, device=g.device).int().expand(tokens, topk).contiguous()
    elif routing == "some":
        ids = torch.where(ids % 2 == 0, ids, -1)
    weights = torch.rand(tokens, topk, generator=g, device=g.device) + 0.1
    return {
        "q": q,
        "s": s,
        "ids": ids,
        "weights": weights,
        **_weights(g, experts, dim, inner, fp4),
        "limit": limit,
        "shared": randn(g, tokens, dim) if shared else None,
    }


def compare(actual: Tensor, expected: Tensor, _a: Arguments) -> None:
    """Within two bf16 roundings of the reference."""
    assert_close(actual, expected, REL_L2, MAX_REL)


COMPARE = {"moe_experts": compare}


# ---------------------------------------------------------------- rooflines
def _bytes(a: Arguments) -> int:
    """Weights of the experts hit, once; activations in and out; the routed rows' way through."""
    hit = int(a["ids"].unique().ge(0).sum())
    each = sum(a[n][0].numel() for n in ("w13", "w13_s", "w2", "w2_s"))
    tokens, dim = a["q"].shape
    return hit * each + tokens * dim * (1 + 2 + 2)


def _flops(a: Arguments) -> float:
    routed, dim = int(a["ids"].ge(0).sum()), a["q"].shape[1]
    return 2.0 * routed * 3 * dim * (a["w13"].shape[1] // 2)


# ---------------------------------------------------------------- the lists
# name: tokens, topk, experts, dim, inner, and what differs
_SMALL: list[tuple[str, tuple[int, int, int, int, int], Arguments]] = [
    ("1x1of1", (1, 1, 1, 32, 32), {}),
    ("0x2of4", (0, 2, 4, 64, 32), {}),
    ("3x2of4_ragged", (3, 2, 4, 96, 32), {}),
    ("9x3of8", (9, 3, 8, 64, 64), {"routing": "some"}),
    ("1x6of384_tiny", (1, 6, 384, 32, 32), {}),
    ("70x2of3_same", (70, 2, 3, 128, 64), {"routing": "same"}),
    ("70x2of3_two_products", (70, 2, 3, 128, 128), {"routing": "same"}),
    ("5x2of4_no_limit", (5, 2, 4, 64, 32), {"limit": 0.0, "shared": False}),
    ("7x2of4_tight_limit", (7, 2, 4, 64, 32), {"limit": 0.5}),
]
_ROUND = {"many": (40, 2, 3, 128, 128), "few": (5, 2, 4, 256, 128)}
_PEERS = {
    16: Anchor("sglang fused_moe_kernel, fp8 128-blocks", 665.2),
    256: Anchor("sglang fused_moe_kernel, fp8 128-blocks", 2999.8),
    4096: Anchor("sglang fused_moe_kernel, fp8 128-blocks", 4486.3),
}


def _cases() -> list[Case]:
    small = [
        Case(
            "moe_experts",
            f"{name}{'' if fp4 else '_fp8'}",
            partial(experts_call, tokens=t, topk=k, experts=e, dim=d, inner=i, fp4=fp4, **change),
        )
        for fp4 in (True, False)
        for name, (t, k, e, d, i), change in _SMALL
    ]
    small += [
        Case(
            "moe_experts",
            f"{name}{'' if fp4 else '_fp8'}",
            partial(experts_call, tokens=t, topk=k, experts=e, dim=d, inner=i, fp4=fp4),
        )
        for fp4 in (True, False)
        for name, (t, k, e, d, i) in _ROUND.items()
    ]
    size: Arguments = {"topk": 6, "experts": 384, "dim": 5120, "inner": 2304}
    real = [
        Case(
            "moe_experts",
            f"{t}x6of384{'' if fp4 else '_fp8'}",
            partial(experts_call, tokens=t, fp4=fp4, **size),
            real=True,
            bench=t in ((16, 256, 4096) if fp4 else (16, 256)),
            bytes=_bytes,
            flops=_flops,
            anchor=_PEERS.get(t),
        )
        for fp4 in (True, False)
        for t in (1, 16, 64, 256, 1024, 4096)
    ]
    draft: Arguments = {"topk": 3, "experts": 128, "dim": 5120, "inner": 2304}
    real += [
        Case("moe_experts", "5x3of128", partial(experts_call, tokens=5, **draft), real=True),
        Case(
            "moe_experts",
            "4096x6of384_same",
            partial(experts_call, tokens=4096, routing="same", **size),
            real=True,
        ),
        Case("moe_experts", "16384x6of384", partial(experts_call, tokens=16384, **size), real=True),
    ]
    return small + real


CASES = _cases()
