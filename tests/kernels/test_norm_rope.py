"""RMSNorm, its cast and rotary embedding: golden vectors, parity, edges, cases from the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.golden.check_golden import Golden, OpCase
from tests.kernels.capture import check_capture
from tests.kernels.parity import check_parity
from tinfer import ops
from tinfer.registry import use_kernels
from tinfer.testing.aot import TARGETS, check_family
from tinfer.testing.cases import Case, cases
from tinfer.testing.compare import assert_exact
from tinfer.testing.launches import MAX_PROGRAMS, launches_of

GOLDEN = Golden(Path(__file__).parents[1] / "data" / "golden")
CASES = cases(family="norm_rope")
IMPLEMENTATIONS = ("ref", pytest.param("triton", marks=pytest.mark.interpret))
BF16, FP32 = torch.bfloat16, torch.float32


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
    check_family("norm_rope", target)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.real and c.name.startswith("16x")], ids=lambda c: c.id
)
def test_replays_in_a_graph(case: Case, seed: int) -> None:
    check_capture(case, seed)


# ---------------------------------------------------------------- golden vectors
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", GOLDEN.ops("rms_norm"), ids=lambda c: c.case)
def test_golden_rms_norm(case: OpCase, impl: str, device: str) -> None:
    x, weight = (case.inputs[k].to(device) for k in ("x", "weight"))
    with use_kernels(impl):
        y = ops.rms_norm(x, weight, case.params["eps"])
    case.check({"y": y.cpu()})


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", GOLDEN.ops("apply_rotary_emb"), ids=lambda c: c.case)
def test_golden_rotary(case: OpCase, impl: str, device: str) -> None:
    x, angles = case.inputs["x"], case.inputs["freqs"]
    cos_sin = angles.movedim(-1, 1).flatten(1).to(device)
    batch, length = x.shape[:2]
    positions = torch.arange(length, device=device).repeat(batch)
    for inverse, name in ((False, "fwd"), (True, "inv")):
        flat = x.to(device, copy=True).reshape(batch * length, -1, x.shape[-1])
        with use_kernels(impl):
            ops.apply_rotary_(flat, cos_sin, positions, inverse)
        case.check({name: flat.view(x.shape).cpu()})


# ---------------------------------------------------------------- edges and cases from the field
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("eps", "want"), [(1e-20, 0.0099995), (1e-6, 1e-9)])
def test_rn_06_tiny_eps_survives(eps: float, want: float, impl: str, device: str) -> None:
    x = torch.full((1, 64), 1e-12, dtype=FP32, device=device)
    with use_kernels(impl):
        y = ops.rms_norm(x, torch.ones(64, dtype=BF16, device=device), eps)
    assert torch.allclose(y.float().cpu(), torch.full((1, 64), want), rtol=2.0**-8)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_rn_12_norm_takes_out_the_scale(impl: str, device: str, seed: int) -> None:
    """A power of two leaves every bit of the final norm, so of the logits, as it was."""
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(seed)).to(BF16).to(device)
    with use_kernels(impl):
        assert_exact(ops.rms_norm(8 * x, None, 1e-20), ops.rms_norm(x, None, 1e-20))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_zero_row_stays_zero(impl: str, device: str) -> None:
    x = torch.zeros(2, 32, dtype=BF16, device=device)
    with use_kernels(impl):
        y, q, s = ops.rms_norm_cast(x, None, 1e-20)
    assert not y.any()
    assert not q.any()
    assert s.unique().numel() == 1


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_rotary_turns_the_tail_alone(impl: str, device: str) -> None:
    x = torch.ones(2, 1, 8, dtype=BF16, device=device)
    quarter = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]], device=device)
    with use_kernels(impl):
        ops.apply_rotary_(x, quarter, torch.tensor([1, 0], device=device))
    assert x[0, 0].tolist() == [1, 1, 1, 1, -1, 1, -1, 1]
    assert x[1, 0].tolist() == [1] * 8


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_rotary_nan_stays_in_its_pair(impl: str, device: str) -> None:
    x = torch.ones(1, 1, 8, dtype=BF16, device=device)
    x[0, 0, 2] = float("nan")
    with use_kernels(impl):
        ops.apply_rotary_(
            x, torch.ones(1, 8, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        )
    assert x.isnan()[0, 0].tolist() == [False, False, True, True] + [False] * 4


@pytest.mark.parametrize("case", [c for c in CASES if c.real], ids=lambda c: c.id)
def test_tp_01_sa_18_portable_grids(case: Case) -> None:
    assert all(launch.programs <= MAX_PROGRAMS for launch in launches_of(case))


@pytest.mark.interpret
@pytest.mark.parametrize("op", ["rms_norm_cast", "apply_rotary_"])
def test_programs_loop_over_what_the_grid_lacks(
    op: str, seed: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinfer.kernels import norm_rope

    monkeypatch.setattr(norm_rope, "MAX_PROGRAMS", 2)
    name = {"rms_norm_cast": "5x1280_strided", "apply_rotary_": "129x1x96_whole"}[op]
    case = next(c for c in cases(op) if c.name == name)
    assert all(launch.programs == 2 for launch in launches_of(case))
    check_parity(case, seed, device, monkeypatch)


# ---------------------------------------------------------------- errors
X, W = torch.zeros(2, 64, dtype=BF16), torch.ones(64, dtype=BF16)
Q, TABLE, AT = (
    torch.zeros(2, 3, 64, dtype=BF16),
    torch.zeros(9, 16),
    torch.zeros(2, dtype=torch.int64),
)


@pytest.mark.parametrize("impl", ["ref", "kernel"])
@pytest.mark.parametrize(
    ("op", "arguments", "error", "message"),
    [
        ("rms_norm", (X.half(), W, 1e-6), TypeError, "rms_norm: x must be bfloat16 or float32"),
        ("rms_norm", (X, W[:32], 1e-6), ValueError, r"rms_norm: weight must be of shape \[64\]"),
        ("rms_norm", (X, W, -1.0), ValueError, "rms_norm: eps must be >= 0, got -1.0"),
        ("rms_norm_cast", (X[:, :40], None, 0.0), ValueError, "rms_norm_cast: x must be .* of 32"),
        ("rms_norm_codes", (X[:, :40], None, 0.0), ValueError, "rms_norm_codes: x must be"),
        ("apply_rotary_", (Q.float(), TABLE, AT), TypeError, "apply_rotary_: x must be bfloat16"),
        ("apply_rotary_", (Q, TABLE[:, :15], AT), ValueError, "cos_sin must be .* with R even"),
        ("apply_rotary_", (Q[..., :8], TABLE, AT), ValueError, "with R <= D = 8, got 16"),
        ("apply_rotary_", (Q, TABLE, AT.int()), TypeError, "positions must be int64, got int32"),
        ("apply_rotary_", (Q, TABLE, AT[:1]), ValueError, r"positions must be of shape \[2\]"),
    ],
)
def test_errors(op: str, arguments: Any, error: type[Exception], message: str, impl: str) -> None:
    with pytest.raises(error, match=message):
        getattr(getattr(ops, op), impl)(*arguments)
