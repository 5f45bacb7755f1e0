"""Capture one call of an op in a CUDA graph and replay it with other inputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tests.kernels.parity import clone
from tinfer import registry
from tinfer.testing.cases import Case, comparisons
from tinfer.testing.compare import assert_equal_tree


def _overwrite(old: Any, new: Any) -> None:
    if isinstance(old, torch.Tensor):
        old.copy_(new)
    elif dataclasses.is_dataclass(old):
        for field in dataclasses.fields(old):
            _overwrite(getattr(old, field.name), getattr(new, field.name))
    elif isinstance(old, (tuple, list)):
        for o, n in zip(old, new, strict=True):
            _overwrite(o, n)


def check_capture(case: Case, seed: int) -> None:
    """The replay computes from the inputs as they are then: equal to the reference on them."""
    op = registry.get(case.op)
    first, second = case.arguments(seed, "cuda"), case.arguments(seed + 1, "cuda")
    op.kernel(**{k: clone(v) for k, v in first.items()})  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = op.kernel(**first)
    for name, value in second.items():
        _overwrite(first[name], value)
    graph.replay()
    torch.cuda.synchronize()
    expected = op.ref(**second)
    compare = comparisons().get(case.op, lambda a, e, _: assert_equal_tree(a, e))
    compare(actual, expected, second)
    for name in case.mutates:
        compare(first[name], second[name], second)
