"""Routed experts by `_moe_hopper`: when it is chosen, the same bits, the step between products."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tinfer.compat.casts import per_token_cast
from tinfer.compat.gemm import dequantize_rows
from tinfer.compat.swiglu import swiglu
from tinfer.kernels import moe_experts as kernels
from tinfer.kernels._target import Target, target
from tinfer.registry import use_kernels
from tinfer.testing.cases.moe_experts import experts_call

HOPPER = Target("cuda", 90, 227)
SIZES = (5120, 2304)


@pytest.mark.parametrize(
    ("routed", "experts", "fp4", "device", "version", "chosen"),
    [
        (24576, 384, True, HOPPER, (3, 6), True),
        (24576, 384, True, HOPPER, (3, 5), False),
        (24576, 384, False, HOPPER, (3, 6), False),
        (24576, 384, True, Target("cuda", 80, 163), (3, 6), False),
        (24576, 384, True, Target("cuda", 100, 227), (3, 6), False),
        (24576, 384, True, Target("hip", "gfx942", 64), (3, 6), False),
        (1536, 384, True, HOPPER, (3, 6), False),  # 4 rows an expert
        (98304, 384, True, HOPPER, (3, 6), False),  # 256
    ],
)
def test_when_it_is_chosen(
    routed: int,
    experts: int,
    fp4: bool,
    device: Target,
    version: tuple[int, int],
    chosen: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "TRITON", version)
    assert kernels._plan(routed, experts, *SIZES, fp4, device).hopper == chosen


@pytest.mark.interpret
@pytest.mark.parametrize(("inner", "limit"), [(256, 10.0), (384, 0.0), (128, 0.5)])
def test_activations_between_the_products(inner: int, limit: float, seed: int, device: str) -> None:
    """As SwiGLU and the fp8 cast have them, in order "e2m1"; rows of no token stay as they were."""
    g = torch.Generator(device=device).manual_seed(seed)
    new = {"generator": g, "device": device}
    rows, tokens, topk = 21, 7, 3
    gate_up = (torch.randn(rows, 2 * inner, **new) * 6).bfloat16()
    token = torch.randint(0, tokens, (rows,), dtype=torch.int32, **new)
    slot = torch.randint(0, topk, (rows,), dtype=torch.int32, **new)
    token[-2:] = slot[-2:] = -1
    weights = torch.rand(tokens, topk, **new) + 0.1
    h = torch.full((rows, inner), float("nan"), dtype=torch.bfloat16, device=device)
    kernels._activate(gate_up, (token, slot, weights), limit, h)
    live = slice(0, rows - 2)
    weight = weights[token[live].long(), slot[live].long()]
    y = swiglu(gate_up[live].contiguous(), limit, weight)
    want = dequantize_rows(*per_token_cast(y, "e4m3", 32, "ue8m0")).bfloat16()
    want = want.view(-1, inner // 128, 4, 4, 2, 4).permute(0, 1, 3, 5, 2, 4).flatten(1)
    # exp and exp2 may differ in the last bit and then, seldom, in the code: one step of e4m3.
    close = torch.isclose(h[live].float(), want.float(), rtol=2**-3, atol=2**-6)
    assert close.all()
    assert (h[live] == want).float().mean() > 0.99
    assert h[-2:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "inner"), [(256, 256), (768, 512), (1280, 768)])
def test_same_bits_as_the_portable_kernels(
    dim: int, inner: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts of no row, few, exactly one or two products, several tiles; rows routed elsewhere."""
    counts = (0, 1, 63, 64, 65, 80, 81, 161)
    expert = [-1] * 40 + [e for e, n in enumerate(counts) for _ in range(n)]
    g = torch.Generator("cuda").manual_seed(seed)
    order = torch.randperm(len(expert), generator=g, device="cuda")
    ids = torch.tensor(expert, dtype=torch.int32, device="cuda")[order][:, None].contiguous()
    a = experts_call(g, tokens=len(ids), topk=1, experts=len(counts), dim=dim, inner=inner)
    a |= {"ids": ids}
    plan = kernels._plan
    used = plan(ids.numel(), len(counts), dim, inner, True, target(ids.device))
    if not used.hopper:
        pytest.skip("not a Hopper GPU, or a Triton without what the kernel needs")
    with use_kernels("triton"):
        got = kernels.moe_experts(**a)
        again = kernels.moe_experts(**a)
        monkeypatch.setattr(kernels, "_plan", lambda *b: replace(plan(*b), hopper=False))
        want = kernels.moe_experts(**a)
    assert torch.equal(got, again)
    assert torch.equal(got, want)
