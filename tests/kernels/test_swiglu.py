"""SwiGLU and its cast: parity, row bounds, edges, the release's experts, compilation, capture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.data.golden.check_golden import Golden, OpCase
from tests.kernels.capture import check_capture
from tests.kernels.parity import check_parity, poison_allocator
from tinfer import ops
from tinfer.compat.casts import cast_back, per_token_cast
from tinfer.compat.swiglu import live_rows
from tinfer.formats import Fp4Group32, Fp8Block32, as_bytes
from tinfer.registry import use_kernels
from tinfer.testing.aot import TARGETS, check_family
from tinfer.testing.cases import Case, cases
from tinfer.testing.compare import assert_exact
from tinfer.testing.launches import MAX_PROGRAMS, launches_of

GOLDEN = Golden(Path(__file__).parents[1] / "data" / "golden")
CASES = cases(family="swiglu")
IMPLEMENTATIONS = ("ref", pytest.param("triton", marks=pytest.mark.interpret))
BF16 = torch.bfloat16


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
    check_family("swiglu", target)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.name in ("96x2304", "16x2304_shared", "384_experts")],
    ids=lambda c: c.id,
)
def test_replays_in_a_graph(case: Case, seed: int) -> None:
    """`384_experts` replays with other counts: rows are bounded on the device."""
    check_capture(case, seed)


@pytest.mark.parametrize("case", [c for c in CASES if c.real], ids=lambda c: c.id)
def test_tp_01_sa_18_portable_grids(case: Case) -> None:
    assert all(launch.programs <= MAX_PROGRAMS for launch in launches_of(case))


@pytest.mark.interpret
def test_programs_loop_over_what_the_grid_lacks(
    seed: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinfer.kernels import swiglu

    monkeypatch.setattr(swiglu, "MAX_PROGRAMS", 2)
    case = next(c for c in cases("swiglu_cast") if c.name == "5x160_tight")
    assert [launch.programs for launch in launches_of(case)] == [2]
    check_parity(case, seed, device, monkeypatch)


# ---------------------------------------------------------------- golden vectors
def _weight(case: OpCase, name: str, device: str) -> Tensor:
    weight, scale = (as_bytes(case.inputs[f"{name}.{k}"]).to(device) for k in ("weight", "scale"))
    kind = Fp4Group32 if case.params["weight"] == "fp4" else Fp8Block32
    return kind(weight, scale).dequantize(torch.float32)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """The release's linear: activations cast to fp8, product in fp32, bf16 result."""
    q, s = per_token_cast(x, "e4m3", 32, "ue8m0")
    return (cast_back(q, s, "e4m3", 32, "ue8m0", torch.float32) @ weight.T).to(BF16)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", GOLDEN.ops("expert"), ids=lambda c: c.case)
def test_golden_expert(case: OpCase, impl: str, device: str) -> None:
    x = case.inputs["x"].to(device)
    w1, w2, w3 = (_weight(case, name, device) for name in ("w1", "w2", "w3"))
    gate_up = torch.cat([_linear(x, w1), _linear(x, w3)], dim=1)
    for name, weights in (("y", None), ("y_weighted", case.inputs["weights"][:, 0].to(device))):
        with use_kernels(impl):
            q, s = ops.swiglu_cast(gate_up, case.params["swiglu_limit"], weights)
        hidden = cast_back(q, s, "e4m3", 32, "ue8m0", torch.float32)
        case.check({name: (hidden @ w2.T).to(BF16).cpu()})


# ---------------------------------------------------------------- edges
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_clamp_is_one_sided_for_the_gate(impl: str, device: str) -> None:
    gate_up = torch.tensor([[20.0, -20.0, 20.0, -20.0]], device=device).to(BF16)
    with use_kernels(impl):
        low, high = ops.swiglu(gate_up, 10.0, None).float()[0].tolist()
    sigmoid = torch.sigmoid(torch.tensor([10.0, -20.0], dtype=torch.float64)).tolist()
    assert low == pytest.approx(10 * sigmoid[0] * 10, rel=2**-8)
    assert high == pytest.approx(-20 * sigmoid[1] * -10, rel=2**-8)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_cast_sees_the_rounded_product(impl: str, device: str, seed: int) -> None:
    gate_up = torch.randn(4, 128, generator=torch.Generator().manual_seed(seed)).to(BF16)
    gate_up = gate_up.to(device)
    with use_kernels(impl):
        got = ops.swiglu_cast(gate_up, 10.0, None)
        want = per_token_cast(ops.swiglu(gate_up, 10.0, None), "e4m3", 32, "ue8m0")
    for a, b in zip(got, want, strict=True):
        assert_exact(a, b)


@pytest.mark.interpret
@pytest.mark.parametrize("op", ["swiglu", "swiglu_cast"])
def test_rows_outside_the_segments_are_not_written(
    op: str, seed: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(c for c in cases(op) if c.name == "40x64_segments")
    a = case.arguments(seed, device)
    poison_allocator(monkeypatch)
    with use_kernels("triton"):
        out = getattr(ops, op)(**a)
    dead = ~live_rows(40, a["row_ends"], a["alignment"])
    assert dead.sum() == 40 - (3 + 0 + 0 + 13 + 16)
    for value in out if isinstance(out, tuple) else (out,):
        untouched = value[dead]
        assert bool(untouched.isnan().all() if value.dtype == BF16 else (untouched == 255).all())


def test_live_rows_follow_the_alignment() -> None:
    ends = torch.tensor([3, 8, 8, 10], dtype=torch.int32)
    assert live_rows(12, ends, 8).nonzero().flatten().tolist() == [0, 1, 2, 8, 9]
    assert live_rows(12, ends, 1).nonzero().flatten().tolist() == list(range(10))


# ---------------------------------------------------------------- errors
X, W = torch.zeros(2, 64, dtype=BF16), torch.ones(2)


@pytest.mark.parametrize("impl", ["ref", "kernel"])
@pytest.mark.parametrize(
    ("op", "arguments", "error", "message"),
    [
        ("swiglu", (X.float(), 1.0, W), TypeError, "swiglu: gate_up must be bfloat16, got float32"),
        ("swiglu", (X[:, :63], 1.0, W), ValueError, r"swiglu: gate_up must be \[T, 2I\]"),
        ("swiglu", (X, -1.0, W), ValueError, "swiglu: limit must be >= 0"),
        ("swiglu", (X, 1.0, W[:1]), ValueError, r"swiglu: weights must be of shape \[2\]"),
        ("swiglu", (X, 1.0, W, W), TypeError, "swiglu: row_ends must be int32"),
        ("swiglu", (X, 1.0, W, None, 0), ValueError, "swiglu: alignment must be >= 1, got 0"),
        ("swiglu_cast", (X[:, :32], 1.0, W), ValueError, "swiglu_cast: gate_up must be .* of 32"),
    ],
)
def test_errors(op: str, arguments: Any, error: type[Exception], message: str, impl: str) -> None:
    with pytest.raises(error, match=message):
        getattr(getattr(ops, op), impl)(*arguments)
