"""Hyper-connections: golden vectors, parity, edges, cases from the field, compilation, capture."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
CASES = cases(family="hyper_connection")
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
    check_family("hyper_connection", target)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.real and c.name.startswith(("16x", "200x"))], ids=lambda c: c.id
)
def test_replays_in_a_graph(case: Case, seed: int) -> None:
    """Few tokens and many take different kernels."""
    check_capture(case, seed)


@pytest.mark.parametrize("case", [c for c in CASES if c.real], ids=lambda c: c.id)
def test_tp_01_sa_18_portable_grids(case: Case) -> None:
    assert all(launch.programs <= MAX_PROGRAMS for launch in launches_of(case))


@pytest.mark.interpret
@pytest.mark.parametrize(
    "op", ["hc_expand", "hc_collapse", "hc_collapse_norm", "hc_post", "hc_split"]
)
def test_programs_loop_over_what_the_grid_lacks(
    op: str, seed: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinfer.kernels import _hc_enter, _hyper_connection_mix, hyper_connection

    for module in (_hc_enter, hyper_connection, _hyper_connection_mix):
        monkeypatch.setattr(module, "MAX_PROGRAMS", 2)
    name = "129x4x96" if op == "hc_split" else "5x2x160"
    case = next(c for c in cases(op) if c.name == name)
    assert [launch.programs for launch in launches_of(case)] == [2]
    check_parity(case, seed, device, monkeypatch)


@pytest.mark.interpret
@pytest.mark.parametrize("name", ["5x2x160", "5x4x96_special"])
@pytest.mark.parametrize("op", ["hc_mix", "hc_pre", "hc_boundary"])
def test_the_way_of_many_tokens(
    op: str, name: str, seed: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinfer.kernels import _hc_run

    case = next(c for c in cases(op) if c.name == name)
    few = [launch.name for launch in launches_of(case)]
    monkeypatch.setattr(_hc_run, "FEW_TOKENS", 2)
    assert {"_hc_partial_kernel", "_hc_few_kernel"} & set(few)
    assert "_hc_dots_kernel" in [launch.name for launch in launches_of(case)]
    check_parity(case, seed, device, monkeypatch)


@pytest.mark.interpret
@pytest.mark.parametrize("op", ["hc_mix", "hc_boundary"])
def test_the_same_call_gives_the_same_bits(op: str, seed: int, device: str) -> None:
    a = next(c for c in cases(op) if c.name == "3x4x96").arguments(seed, device)
    with use_kernels("triton"):
        first, second = getattr(ops, op)(**a), getattr(ops, op)(**a)
    for one, other in zip(first, second, strict=True):
        assert_exact(one, other)


# ---------------------------------------------------------------- golden vectors
def _flat(case: OpCase, name: str, device: str) -> Tensor:
    """A golden input with batch and position merged."""
    return case.inputs[name].flatten(0, 1).to(device)


def _check(case: OpCase, **outputs: Tensor) -> None:
    case.check({k: v.reshape(case.outputs[k].shape).cpu() for k, v in outputs.items()})


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", GOLDEN.ops("hc_split_sinkhorn"), ids=lambda c: c.case)
def test_golden_split(case: OpCase, impl: str, device: str) -> None:
    scale, base = (case.inputs[k].to(device) for k in ("hc_scale", "hc_base"))
    eps, iters = case.params["eps"], case.params["sinkhorn_iters"]
    with use_kernels(impl):
        pre, post, comb = ops.hc_split(_flat(case, "mixes", device), scale, base, eps, iters)
    _check(case, pre=pre, post=post, comb=comb)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", GOLDEN.ops("hc_mixes"), ids=lambda c: c.case)
def test_golden_mixes(case: OpCase, impl: str, device: str) -> None:
    fn, scale, base = (case.inputs[k].to(device) for k in ("hc_fn", "hc_scale", "hc_base"))
    p = case.params
    how = (p["norm_eps"], p["hc_eps"], p["sinkhorn_iters"])
    with use_kernels(impl):
        pre, post, comb = ops.hc_mix(_flat(case, "x", device), fn, scale, base, *how)
    _check(case, pre=pre, post=post, comb=comb)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", GOLDEN.ops("hc_pre"), ids=lambda c: c.case)
def test_golden_collapse(case: OpCase, impl: str, device: str) -> None:
    with use_kernels(impl):
        y = ops.hc_collapse(_flat(case, "x", device), _flat(case, "pre_mix", device))
    _check(case, y=y)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", GOLDEN.ops("hc_post"), ids=lambda c: c.case)
def test_golden_post(case: OpCase, impl: str, device: str) -> None:
    names = ("x", "residual", "post", "comb")
    with use_kernels(impl):
        y = ops.hc_post(*(_flat(case, name, device) for name in names))
    _check(case, y=y)


# ---------------------------------------------------------------- meaning
def _arguments(op: str, seed: int, device: str) -> dict[str, Any]:
    return next(c for c in cases(op) if c.name == "5x2x160").arguments(seed, device)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_comb_weighs_sources_by_its_first_index(impl: str, device: str) -> None:
    stream = torch.tensor([[[1.0], [10.0]]], device=device).to(BF16)
    y, post = torch.zeros(1, 1, dtype=BF16, device=device), torch.zeros(1, 2, device=device)
    comb = torch.tensor([[[1.0, 2.0], [0.0, 3.0]]], device=device)
    with use_kernels(impl):
        new = ops.hc_post(y, stream, post, comb)
    assert new.flatten().tolist() == [1.0, 2.0 + 30.0]


@pytest.mark.interpret
def test_boundary_is_its_parts(seed: int, device: str) -> None:
    """Mixes and collapse read the bf16-rounded new stream."""
    a = _arguments("hc_boundary", seed, device)
    mixing = [a[k] for k in ("fn", "scale", "base")]
    eps = [a[k] for k in ("norm_eps", "hc_eps", "iters")]
    with use_kernels("triton"):
        new, x, *mixes = ops.hc_boundary(**a)
        again = ops.hc_post(a["y"], a["stream"], a["post"], a["comb"])
        assert_exact(new, again)
        x_again, *mixes_again = ops.hc_pre(again, a["pre"], *mixing, a["weight"], *eps)
    assert_exact(x, x_again)
    for one, other in zip(mixes, mixes_again, strict=True):
        assert_exact(one, other)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_one_hot_pre_takes_one_copy(impl: str, device: str, seed: int) -> None:
    stream = _arguments("hc_collapse", seed, device)["stream"]
    pre = torch.zeros(5, 2, device=device)
    pre[:, 1] = 1.0
    with use_kernels(impl):
        assert_exact(ops.hc_collapse(stream, pre), stream[:, 1].contiguous())
        assert_exact(ops.hc_mean(ops.hc_expand(stream[:, 0], 4)), stream[:, 0].contiguous())


# ---------------------------------------------------------------- cases from the field
def _sinkhorn(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """20 rounds in the given precision."""
    comb = logits.to(dtype).softmax(-1) + 1e-6
    comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    for _ in range(19):
        comb = comb / (comb.sum(-1, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    return comb


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_rn_08_sinkhorn_in_fp32(impl: str, device: str, seed: int) -> None:
    """Within 1e-5 of float64; a bf16 computation is off by more than 1e-3 on the same input."""
    mixes = torch.randn(5, 24, generator=torch.Generator().manual_seed(seed)).to(device)
    one, zero = torch.ones(3, device=device), torch.zeros(24, device=device)
    with use_kernels(impl):
        comb = ops.hc_split(mixes, one, zero, 1e-6, 20)[2].double().cpu()
    logits = mixes[:, 8:].unflatten(-1, (4, 4)).cpu()
    truth = _sinkhorn(logits, torch.float64)
    assert (comb - truth).abs().max() < 1e-5
    assert (comb.sum(-2) - 1).abs().max() < 1e-5
    assert (_sinkhorn(logits, BF16).double() - truth).abs().max() > 1e-3


_PROBE = """
import sys, torch, tinfer.ops as ops
from tinfer import registry
ops.hc_split(torch.ones(2, 24), torch.ones(3), torch.zeros(24), 1e-5, 20)
print(registry.report())
assert not [m for m in sys.modules if m.startswith("tilelang")]
"""


def test_rn_09_rn_10_the_implementation_that_ran_is_named() -> None:
    """eps 1e-5, host tensors, compiled kernels: the reference runs and the report says why."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TINFER_KERNELS"] = "auto"
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "host memory" in done.stdout
    assert "hc_split -> ref" in done.stderr or "mixes is in host memory" in done.stderr


@pytest.mark.interpret
def test_rn_09_any_eps_has_a_kernel(device: str, seed: int) -> None:
    a = _arguments("hc_split", seed, device) | {"hc_eps": 1e-5}
    with use_kernels("triton"):
        mine = ops.hc_split(**a)
    for one, other in zip(mine, ops.hc_split.ref(**a), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)
    changed = ops.hc_split.ref(**a | {"hc_eps": 1e-2})
    assert (changed[2] - mine[2]).abs().max() > 1e-4


# ---------------------------------------------------------------- errors
S, Y = torch.zeros(2, 4, 32, dtype=BF16), torch.zeros(2, 32, dtype=BF16)
PRE, COMB = torch.zeros(2, 4), torch.zeros(2, 4, 4)
MIXING = (torch.zeros(24, 128), torch.zeros(3), torch.zeros(24))
EPS = (1e-20, 1e-6, 20)


@pytest.mark.parametrize("impl", ["ref", "kernel"])
@pytest.mark.parametrize(
    ("op", "arguments", "error", "message"),
    [
        ("hc_expand", (Y, 0), ValueError, "hc_expand: copies must be >= 1, got 0"),
        ("hc_mean", (S.float(),), TypeError, "hc_mean: stream must be bfloat16, got float32"),
        ("hc_collapse", (S, PRE[:1]), ValueError, r"hc_collapse: pre must be of shape \[2, 4\]"),
        ("hc_collapse_norm", (S, PRE, Y[0, :5], 0.0), ValueError, "hc_collapse_norm: weight must"),
        ("hc_post", (Y[:1], S, PRE, COMB), ValueError, r"hc_post: y must be of shape \[2, 32\]"),
        ("hc_post", (Y, S, PRE, COMB.half()), TypeError, "hc_post: comb must be float32"),
        ("hc_split", (torch.zeros(2, 23), *MIXING[1:], 1e-6, 20), ValueError, "hc_split: mixes"),
        ("hc_split", (torch.zeros(2, 24), *MIXING[1:], 1e-6, 0), ValueError, "iters must be >= 1"),
        ("hc_mix", (S, MIXING[0].T, *MIXING[1:], *EPS), ValueError, r"hc_mix: fn must be of shape"),
        ("hc_pre", (S, PRE.half(), *MIXING, None, *EPS), TypeError, "hc_pre: pre must be float32"),
        (
            "hc_boundary", (Y, S, PRE, COMB, PRE, MIXING[0].half(), *MIXING[1:], None, *EPS),
            TypeError, "hc_boundary: fn must be float32, got float16",
        ),
    ],
)  # fmt: skip
def test_errors(op: str, arguments: Any, error: type[Exception], message: str, impl: str) -> None:
    with pytest.raises(error, match=message):
        getattr(getattr(ops, op), impl)(*arguments)
