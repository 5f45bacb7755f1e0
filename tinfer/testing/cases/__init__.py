"""One case list per op: the shapes and values for parity tests, bring-up and benchmarks.

Each family module `tinfer.testing.cases.<family>` exports `CASES`, a list of `Case`, and may
export `COMPARE`, a dict from op name to a comparison `(actual, expected, arguments) -> None`
that raises AssertionError; without one, outputs are compared bit for bit.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Arguments = dict[str, Any]
Compare = Callable[[Any, Any, Arguments], None]


@dataclass(frozen=True)
class Anchor:
    """A peer's figure for the same work on the GPU named, in microseconds of cold device time."""

    peer: str
    us: float
    gpu: str = "NVIDIA H200"


@dataclass(frozen=True)
class Case:
    """One call of one op.

    `make` draws fresh random arguments from the generator on the device. `real` marks the
    model's own sizes, too large for the interpreter. `bench` marks the cases that are timed;
    `bytes` counts each input and output byte once and `flops` the useful operations, for the
    roofline. `mutates` names the arguments that the op changes in place. `captures` is False where
    the op waits for the device, so that no graph can hold it.
    """

    op: str
    name: str
    make: Callable[[torch.Generator], Arguments]
    real: bool = False
    bench: bool = False
    mutates: tuple[str, ...] = ()
    bytes: Callable[[Arguments], int] | None = None
    flops: Callable[[Arguments], float] | None = None
    anchor: Anchor | None = None
    captures: bool = True

    @property
    def id(self) -> str:
        return f"{self.op}-{self.name}"

    def arguments(self, seed: int, device: torch.device | str = "cpu") -> Arguments:
        """Arguments drawn from `seed` and the case's name; the same on every call."""
        digest = hashlib.sha256(f"{seed}/{self.id}".encode()).digest()
        generator = torch.Generator(device=device)
        generator.manual_seed(int.from_bytes(digest[:7], "little"))
        return self.make(generator)


def _modules() -> list[Any]:
    names = sorted(m.name for m in pkgutil.iter_modules(__path__))
    return [importlib.import_module(f"{__name__}.{name}") for name in names]


def cases(op: str | None = None, family: str | None = None) -> list[Case]:
    """All cases, those of one op, or those of one family module."""
    found = [
        c
        for m in _modules()
        if family in (None, m.__name__.rpartition(".")[2])
        for c in m.CASES
        if op in (None, c.op)
    ]
    ids = [c.id for c in found]
    if len(set(ids)) != len(ids):
        raise ValueError(f"case ids are not unique: {sorted({i for i in ids if ids.count(i) > 1})}")
    return found


@functools.cache
def comparisons() -> Mapping[str, Compare]:
    """The comparison of every op that does not compare bit for bit."""
    return {op: fn for m in _modules() for op, fn in getattr(m, "COMPARE", {}).items()}
