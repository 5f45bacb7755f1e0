"""Routed experts: golden vectors, parity, routing edges, determinism, portability."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.data.golden.check_golden import Golden, OpCase
from tests.kernels.parity import check_parity
from tinfer import ops, registry
from tinfer.compat.casts import per_token_cast
from tinfer.formats import as_bytes, encode_e4m3
from tinfer.registry import use_kernels
from tinfer.testing.aot import TARGETS, check_family
from tinfer.testing.cases import Arguments, Case, cases
from tinfer.testing.cases.moe_experts import experts_call

CASES = cases(family="moe_experts")
GOLDEN = Golden("tests/data/golden")
IMPLEMENTATIONS = ("ref", pytest.param("triton", marks=pytest.mark.interpret))


@pytest.mark.interpret
@pytest.mark.parametrize("case", [c for c in CASES if not c.real], ids=lambda c: c.id)
def test_parity(case: Case, seed: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_parity(case, seed, device, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in CASES if c.real], ids=lambda c: c.id)
def test_parity_real(case: Case, seed: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_parity(case, seed, device, monkeypatch)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_compiles(target: str) -> None:
    check_family("moe_experts", target)


# ---------------------------------------------------------------- golden vectors
def _stack(case: OpCase, names: list[str], device: str) -> dict[str, Tensor]:
    """The op's four weight arguments from the golden experts of these name prefixes."""

    def get(part: str) -> Tensor:
        return torch.stack([as_bytes(case.inputs[n + part]) for n in names]).to(device)

    pairs = {"w13": ".weight", "w13_s": ".scale"}
    stacked = {k: torch.cat([get("w1" + s), get("w3" + s)], dim=1) for k, s in pairs.items()}
    return stacked | {"w2": get("w2.weight"), "w2_s": get("w2.scale")}


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", GOLDEN.ops("expert"), ids=lambda c: c.case)
def test_golden_expert(case: OpCase, impl: str, device: str) -> None:
    q, s = per_token_cast(case.inputs["x"].to(device), "e4m3", 32, "ue8m0")
    one = torch.ones(len(q), 1, device=device)
    route = {"y": one, "y_weighted": case.inputs["weights"].to(device)}
    fixed = {"q": q, "s": s, "ids": torch.zeros_like(one, dtype=torch.int32)}
    fixed |= {"limit": case.params["swiglu_limit"], "shared": None, **_stack(case, [""], device)}
    with use_kernels(impl):
        case.check({n: ops.moe_experts(weights=w, **fixed) for n, w in route.items()})


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", GOLDEN.ops("moe"), ids=lambda c: c.case)
def test_golden_moe(case: OpCase, impl: str, device: str) -> None:
    x = case.inputs["x"].to(device)
    rows, limit = x.flatten(0, -2), case.params["swiglu_limit"]
    q, s = per_token_cast(rows, "e4m3", 32, "ue8m0")
    routed = _stack(case, [f"experts.{e}." for e in range(case.params["n_experts"])], device)
    own = _stack(case, ["shared_experts."], device)
    with use_kernels(impl):
        gate_up = ops.linear_fp8(q, s, own["w13"][0], own["w13_s"][0])
        shared = ops.linear_fp8(
            *ops.swiglu_cast(gate_up, limit, None), own["w2"][0], own["w2_s"][0]
        )
        for kind in ("text", "vl"):
            ids, weights = (case.outputs[f"{kind}.{n}"].to(device) for n in ("indices", "weights"))
            y = ops.moe_experts(
                q=q, s=s, ids=ids.int(), weights=weights, **routed, limit=limit, shared=shared
            )
            case.check({f"{kind}.y": y.view_as(x)})


# ---------------------------------------------------------------- routing
def _call(device: str, seed: int, **change: object) -> Arguments:
    sizes = {"tokens": 6, "topk": 2, "experts": 4, "dim": 64, "inner": 32} | change
    generator = torch.Generator(device=device).manual_seed(seed)
    return experts_call(generator, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_rows_routed_elsewhere_add_exact_zeros(
    impl: str, device: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MO-05: ids of -1 only; nothing uninitialised reaches the sum."""
    a = _call(device, seed)
    a |= {"ids": torch.full_like(a["ids"], -1)}
    with use_kernels(impl):
        assert torch.equal(ops.moe_experts(**a), a["shared"])
        assert not ops.moe_experts(**a | {"shared": None}).any()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_each_token_sums_its_experts(impl: str, device: str, seed: int) -> None:
    """MO-10: a call with two slots equals the rounded sum of two calls with one."""
    a = _call(device, seed, shared=False)
    with use_kernels(impl):
        both = ops.moe_experts(**a)
        parts = [
            ops.moe_experts(**a | {n: a[n][:, i : i + 1].contiguous() for n in ("ids", "weights")})
            for i in (0, 1)
        ]
    assert torch.equal(both, (parts[0].float() + parts[1].float()).bfloat16())


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_tokens_do_not_depend_on_their_batch(impl: str, device: str, seed: int) -> None:
    """SP-04, within one way of computing: a row is the same alone and among others."""
    a = _call(device, seed, tokens=8)
    with use_kernels(impl):
        together = ops.moe_experts(**a)
        rows = ("q", "s", "ids", "weights", "shared")
        alone = ops.moe_experts(**a | {n: a[n][3:4].contiguous() for n in rows})
    assert torch.equal(together[3:4], alone)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("gate", "up", "want"),
    [
        (-20.0, 20.0, -4.1223e-7),
        (-12.0, -20.0, 7.3730e-4),
        (2.0, 20.0, 17.615942),
        (20.0, -20.0, -99.995460),
    ],
)
def test_clamp_is_one_sided_for_the_gate(
    impl: str, gate: float, up: float, want: float, device: str
) -> None:
    """MO-03, QZ-17: clamp, then silu(gate) * up, then the cast; fp8 experts hold 20 exactly."""
    size = 32
    w13 = torch.zeros(1, 2 * size, size, device=device)
    w13[0, 0, 0], w13[0, size, 0] = gate, up
    w2 = torch.eye(size, device=device)[None]
    one = {
        n: torch.full((1, r, 1), 127, dtype=torch.uint8, device=device)
        for n, r in (("w13_s", 2), ("w2_s", 1))
    }
    row = torch.zeros(1, size, dtype=torch.bfloat16, device=device)
    row[0, 0] = 1.0
    q, s = per_token_cast(row, "e4m3", 32, "ue8m0")
    ids, weights = (
        torch.zeros(1, 1, dtype=torch.int32, device=device),
        torch.ones(1, 1, device=device),
    )
    with use_kernels(impl):
        y = ops.moe_experts(
            q=q,
            s=s,
            ids=ids,
            weights=weights,
            w13=encode_e4m3(w13),
            w2=encode_e4m3(w2),
            **one,
            limit=10.0,
            shared=None,
        )
    assert y[0, 0].item() == pytest.approx(want, rel=2**-4)  # one e4m3 rounding
    assert not y[0, 1:].any()


@pytest.mark.interpret
def test_same_bits_on_every_run(device: str, seed: int) -> None:
    """TP-07: no float atomics, no tuning at run time."""
    a = _call(device, seed, tokens=9)
    with use_kernels("triton"):
        assert torch.equal(ops.moe_experts(**a), ops.moe_experts(**a))


@pytest.mark.gpu
def test_graph_replay_equals_a_call(seed: int) -> None:
    """CG-01: nothing waits for the device; other routing through the same graph is right too."""
    first, second = (
        _call("cuda", seed + i, tokens=16, topk=6, experts=32, dim=256, inner=128) for i in (0, 1)
    )
    with use_kernels("triton"):
        ops.moe_experts(**first)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = ops.moe_experts(**first)
        for name in ("q", "s", "ids", "weights", "shared"):
            first[name].copy_(second[name])
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, ops.moe_experts(**first))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("fp4", [True, False])
@pytest.mark.parametrize("tokens", [4, 70])
def test_weight_scales_at_both_ends(
    impl: str, fp4: bool, tokens: int, device: str, seed: int
) -> None:
    """2^-60 and 2^60: the result is that of scale 1, as exactly scaled."""
    sizes = {"topk": 1, "experts": 2, "dim": 128, "inner": 128}
    a = _call(device, seed, tokens=tokens, **sizes, fp4=fp4, routing="same", shared=False)
    with use_kernels(impl):
        low, one, high = (
            ops.moe_experts(**a | {"w2_s": torch.full_like(a["w2_s"], code)}).float()
            for code in (67, 127, 187)
        )
    assert one.any()
    assert torch.equal(one * 2.0**-60, low)
    assert torch.equal(one * 2.0**60, high)


# ---------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ids": torch.zeros(6, 2)}, TypeError, "ids must be int32, got float32"),
        ({"weights": torch.zeros(6, 3)}, ValueError, r"weights must be of shape \[6, 2\]"),
        ({"limit": -1.0}, ValueError, r"limit must be >= 0 \(0: no clamp\), got -1.0"),
        ({"w2": torch.zeros(4, 64, 8, dtype=torch.uint8)}, ValueError, "w2 must be of shape"),
        ({"w13": torch.zeros(4, 64, 16, dtype=torch.uint8)}, ValueError, "w13 must be of 32 or 64"),
    ],
)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_errors(impl: str, change: dict, error: type[Exception], message: str, seed: int) -> None:
    op = registry.get("moe_experts")
    call = op.ref if impl == "ref" else op.kernel
    with pytest.raises(error, match=f"moe_experts: {message}"):
        call(**_call("cpu", seed) | change)
