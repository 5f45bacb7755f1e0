"""What the device that a launcher is about to use can do, as host data.

Tile tables (`_X_tiles`) key on the shared-memory limit; kernels take native conversions as
constexprs. `use_target` overrides the answer, so that a launcher can be recorded for a device
that is not present (see `tinfer.testing.aot`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import triton

from tinfer.kernels._jit import INTERPRET

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])  # (major, minor)
_CUDA_SHARED_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}


@dataclass(frozen=True)
class Target:
    """`arch` is the compute capability (90) or the gfx name; `shared_kib` the limit per program."""

    backend: str  # "cuda", "hip", "interpret"
    arch: int | str
    shared_kib: int
    processors: int = 132

    @property
    def native_e4m3(self) -> bool:
        """fp32 -> e4m3 by hardware (cvt.rn.satfinite), bit-equal to `_jit.e4m3_encode`."""
        return self.backend == "cuda" and int(self.arch) >= 89

    @property
    def ptx(self) -> bool:
        """Whether kernels may hold inline PTX of sm_80."""
        return self.backend == "cuda"

    @property
    def chains_launches(self) -> bool:
        """A kernel may start before the one it depends on ends, and wait for it on the device."""
        return self.backend == "cuda" and int(self.arch) >= 90

    @property
    def warp_size(self) -> int:
        return 64 if self.backend == "hip" else 32


INTERPRETER = Target("interpret", 0, 227, processors=4)
_override: ContextVar[Target | None] = ContextVar("tinfer_target", default=None)


@functools.cache
def _probe(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
        shared = 160 if arch.startswith("gfx95") else 64
        return Target("hip", arch, shared, properties.multi_processor_count)
    capability = properties.major * 10 + properties.minor
    shared = _CUDA_SHARED_KIB.get(capability, 99)
    return Target("cuda", capability, shared, properties.multi_processor_count)


def target(device: torch.device) -> Target:
    """The override in force, else the device that holds the tensors (the interpreter for a CPU)."""
    override = _override.get()
    if override is not None:
        return override
    if INTERPRET.value or device.type != "cuda":
        return INTERPRETER
    return _probe(device.index or 0)


@contextmanager
def use_target(wanted: Target) -> Iterator[None]:
    """Make launchers choose for `wanted` inside the block."""
    token = _override.set(wanted)
    try:
        yield
    finally:
        _override.reset(token)
