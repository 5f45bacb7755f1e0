"""Record what launchers launch instead of running it: kernels, arguments, grids and options.

Works on compiled and interpreted kernels alike, with real or with fake (storage-free) tensors,
so grids and tile choices of the model's own sizes can be checked without a device.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tinfer import formats, registry
from tinfer.testing.cases import Case

MAX_PROGRAMS = 65535  # portable limit on the product of a grid's axes


@dataclass(frozen=True)
class Launch:
    """One kernel launch: `arguments` by parameter name, `options` such as num_warps."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    @property
    def programs(self) -> int:
        product = 1
        for axis in self.grid:
            product *= axis
        return product


def _launch(kernel: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> Launch:
    arguments = dict(zip(kernel.arg_names, args, strict=False))
    arguments |= {k: v for k, v in kwargs.items() if k in kernel.arg_names}
    options = {k: v for k, v in kwargs.items() if k not in kernel.arg_names}
    for name, parameter in inspect.signature(kernel.fn).parameters.items():
        if name not in arguments and parameter.default is not inspect.Parameter.empty:
            arguments[name] = parameter.default
    grid = grid(arguments) if callable(grid) else grid
    grid = (grid,) if isinstance(grid, int) else tuple(int(axis) for axis in grid)
    return Launch(kernel, arguments, options, grid)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Inside the block launches are appended to the list and nothing runs."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def at(self: Any, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: launches.append(_launch(self, args, grid, kwargs))

    kinds = (JITFunction, InterpretedFunction)
    own = [vars(kind).get("__getitem__") for kind in kinds]
    for kind in kinds:
        kind.__getitem__ = at
    try:
        yield launches
    finally:
        for kind, method in zip(kinds, own, strict=True):
            if method is None:
                del kind.__getitem__
            else:
                kind.__getitem__ = method


@functools.cache
def _fake_mode() -> FakeTensorMode:
    """One mode for the process, entered with the formats' cached tables already real."""
    code = torch.zeros(1, dtype=torch.uint8)
    for decode in (formats.decode_e4m3, formats.decode_e2m1, formats.decode_ue8m0):
        decode(code)
    return FakeTensorMode(allow_non_fake_inputs=True)


def launches_of(case: Case, seed: int = 0) -> list[Launch]:
    """What the kernel of the case's op launches; real cases are recorded on fake tensors.

    A launcher may read a device value after its last launch (a check at load time); with fake
    tensors that ends the recording.
    """
    op = registry.get(case.op)
    with recorded() as launches:
        if case.real:
            with _fake_mode():
                arguments = case.arguments(seed)
                try:
                    op.kernel(**arguments)
                except DataDependentOutputException:
                    if not launches:
                        raise
        else:
            op.kernel(**case.arguments(seed))
    return launches
