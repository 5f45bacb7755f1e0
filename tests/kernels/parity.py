"""The parity test of one case: kernel against reference on the same fresh arguments."""

from __future__ import annotations

from typing import Any

import torch

from tinfer import registry
from tinfer.testing.cases import Case, comparisons
from tinfer.testing.compare import assert_equal_tree


def poison_allocator(monkeypatch: Any) -> None:
    """Fill what `torch.empty*` returns with NaN (all ones for integers): unwritten output shows."""
    for name in ("empty", "empty_like", "empty_strided"):
        make = getattr(torch, name)

        def poisoned(*args: Any, _make: Any = make, **kwargs: Any) -> torch.Tensor:
            out = _make(*args, **kwargs)
            if out.is_floating_point():
                return out.fill_(float("nan"))
            if out.dtype == torch.bool:
                return out.fill_(True)
            return out.fill_(-1 if out.dtype.is_signed else 255)

        monkeypatch.setattr(torch, name, poisoned)


def clone(value: Any) -> Any:
    """Independent copies of every tensor, strides kept."""
    if isinstance(value, torch.Tensor):
        like = {"dtype": value.dtype, "device": value.device}
        base = torch.empty_strided(value.size(), value.stride(), **like)
        return base.copy_(value)
    if isinstance(value, (tuple, list)):
        return type(value)(clone(v) for v in value)
    return value


def check_parity(case: Case, seed: int, device: str, monkeypatch: Any) -> None:
    """Run reference and kernel, compare outputs and mutated arguments, and see the kernel ran."""
    op = registry.get(case.op)
    arguments = case.arguments(seed, device)
    theirs = {k: clone(v) for k, v in arguments.items()}
    expected = op.ref(**theirs)
    poison_allocator(monkeypatch)
    mine = {k: clone(v) for k, v in arguments.items()}
    before = op.calls["triton"]
    with registry.use_kernels("triton"):
        actual = op(**mine)
    assert op.calls["triton"] == before + 1
    compare = comparisons().get(case.op)
    if compare is None:
        assert_equal_tree(actual, expected, case.op)
    else:
        compare(actual, expected, arguments)
    for name in case.mutates:
        if compare is None:
            assert_equal_tree(mine[name], theirs[name], f"{case.op}: {name}")
        else:
            compare(mine[name], theirs[name], arguments)
