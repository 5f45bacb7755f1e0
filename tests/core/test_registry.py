"""Dispatch: the policy's grammar, fallbacks that are announced, signatures that agree."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from tinfer import ops, registry
from tinfer.registry import Op, Policy, UnsupportedError


def test_grammar() -> None:
    policy = Policy.parse("triton, moe_gate=ref,sample=triton")
    assert policy.default == "triton"
    assert policy.overrides == {"moe_gate": "ref", "sample": "triton"}
    assert Policy.parse("").default == "auto"
    assert Policy.parse(policy.spec) == policy


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fast", "auto|triton|ref"),
        ("moe_gate=auto", "triton|ref"),
        ("moe_gate=", "triton|ref"),
        ("nope=ref", "unknown op 'nope'"),
    ],
)
def test_wrong_grammar(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match="kernels: ") as error:
        Policy.parse(spec)
    assert message in str(error.value)


@pytest.fixture
def double(monkeypatch):
    """An op whose kernel refuses odd numbers."""
    monkeypatch.setattr(registry, "OPS", dict(registry.OPS))

    def double(x: int) -> int:
        return 2 * x

    double.__module__ = "tinfer.compat.double"
    module = types.ModuleType("tinfer.kernels.double")

    def kernel(x: int) -> int:
        return x + x

    module.double = kernel  # type: ignore[attr-defined]
    module.supports_double = lambda x: None if x % 2 == 0 else "odd"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tinfer.kernels.double", module)
    return Op(double), module


def test_auto_falls_back_and_says_so_once(double, caplog) -> None:
    op, _ = double
    with registry.use_kernels("auto"), caplog.at_level(logging.WARNING, "tinfer.kernels"):
        assert [op(2), op(3), op(5)] == [4, 6, 10]
    assert op.calls == {"triton": 1, "ref": 2}
    assert [r.getMessage() for r in caplog.records] == ["double -> ref: odd"]
    assert "odd" in registry.report()


@pytest.mark.parametrize(("spec", "strict"), [("triton", False), ("auto", True)])
def test_no_silent_fallback(double, spec: str, strict: bool) -> None:
    op, _ = double
    with registry.use_kernels(spec, strict), pytest.raises(UnsupportedError, match=r"double.*odd"):
        op(3)


def test_ref_never_touches_the_kernel(double) -> None:
    op, module = double
    del module.double
    with registry.use_kernels("ref", strict=True):
        assert op(3) == 6


def test_scopes_nest(double) -> None:
    op, _ = double
    with registry.use_kernels("ref"):
        with registry.use_kernels("triton"):
            op(2)
        op(2)
    assert op.calls == {"triton": 1, "ref": 1}


def test_signatures_must_agree(double) -> None:
    op, module = double
    module.double = lambda x, y=1: x
    with registry.use_kernels("triton"), pytest.raises(TypeError, match="kernel signature must be"):
        op(2)


def test_a_broken_kernel_is_an_error(double, monkeypatch) -> None:
    """Only a missing triton package is tolerated."""
    op, _ = double
    monkeypatch.delitem(sys.modules, "tinfer.kernels.double")
    with registry.use_kernels("auto"), pytest.raises(ModuleNotFoundError, match="double"):
        op(2)


@pytest.mark.parametrize("name", sorted(registry.OPS))
def test_every_op_has_one_contract(name: str) -> None:
    """Kernel and reference have one signature; supports_ takes the same parameters."""
    op = registry.get(name)
    assert inspect.getdoc(op.ref), f"{name} has no contract"
    assert getattr(ops, name) is op
    if not op.has_kernel:
        pytest.skip("no Triton kernel is written for this op")
    pytest.importorskip("triton")
    kernel, supports = op._loaded
    want = list(inspect.signature(op.ref).parameters)
    assert list(inspect.signature(kernel).parameters) == want
    assert list(inspect.signature(supports).parameters) == want


NO_TRITON = """
import sys
sys.modules["triton"] = None
from tinfer import generate
code = generate.main(["--model", sys.argv[1], "--ids", "5,6,7", "--max-new-tokens", "2",
                      "--quiet", *sys.argv[2:]])
assert not any(m.startswith("tinfer.kernels.") for m in sys.modules), "a kernel was imported"
sys.exit(code)
"""


@pytest.mark.parametrize("kernels", ["ref", "auto"])
def test_runs_without_triton(kernels: str) -> None:
    root = Path(__file__).parents[1] / "data" / "golden" / "models" / "text_plain"
    command = [sys.executable, "-c", NO_TRITON, str(root), "--kernels", kernels]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if kernels == "auto":
        assert done.stderr.count("triton is not installed") == 1


def test_import_needs_neither_gpu_nor_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import tinfer.ops; print('ok')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "ok\n", done.stderr
    assert torch.get_default_dtype() == torch.float32
