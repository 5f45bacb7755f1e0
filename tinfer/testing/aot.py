"""Compile the kernels of an op family ahead of time for devices that are not present.

    python -m tinfer.testing.aot --family casts [--target cuda:90 ...] [--op NAME]

For every target the launchers run on the family's cases (the `real` ones of each op, or all where
there are none) with recorded launches, `_target.use_target` telling them what they compile for.
So the tile tables are exercised too: what is compiled is what would run. A test calls
`check_family`, which works in a subprocess because a process whose kernels are interpreted
cannot compile. Results are kept by Triton's own cache.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tinfer import registry
from tinfer.testing.cases import Case, cases
from tinfer.testing.launches import MAX_PROGRAMS, Launch, launches_of

# Target name -> shared memory one program may use, in KiB.
SHARED_KIB = {
    "cuda:80": 163,
    "cuda:89": 99,
    "cuda:90": 227,
    "cuda:100": 227,
    "hip:gfx942": 64,
    "hip:gfx950": 160,
}
TARGETS = tuple(SHARED_KIB)


@dataclass
class Compiled:
    """One compiled variant, or the error that stopped it."""

    op: str
    case: str
    kernel: str
    target: str
    programs: int
    shared: int = 0
    error: str = ""

    def problem(self) -> str:
        """What is wrong with it on its target, or an empty string."""
        limit = SHARED_KIB[self.target] * 1024
        where = f"{self.kernel} on {self.target} (case {self.case})"
        if self.error:
            return f"{where}: {self.error}"
        if self.shared > limit:
            return f"{where}: {self.shared} bytes of shared memory, limit {limit}"
        if self.programs > MAX_PROGRAMS:
            return f"{where}: a grid of {self.programs} programs, limit {MAX_PROGRAMS}"
        return ""


# ---------------------------------------------------------------- one launch -> one compilation
def _is_fixed(parameter: Any, value: Any) -> bool:
    """Whether the value becomes part of the compiled kernel."""
    if parameter.is_constexpr or value is None:
        return True
    return type(value) is int and value == 1 and not parameter.do_not_specialize


def _type_of(value: Any) -> str:
    from triton._utils import canonicalize_dtype

    if isinstance(value, torch.Tensor):
        return "*" + str(canonicalize_dtype(value.dtype))
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"a kernel argument of type {type(value).__name__} is not portable")


def _is_aligned(parameter: Any, value: Any) -> bool:
    if parameter.do_not_specialize or parameter.do_not_specialize_on_alignment:
        return False
    if isinstance(value, torch.Tensor):
        return value.storage_offset() * value.element_size() % 16 == 0
    return type(value) is int and value % 16 == 0


def specialize(launch: Launch) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
    """(signature, constants, attributes) as Triton derives them at a launch."""
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if _is_fixed(parameter, value):
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
            continue
        signature[parameter.name] = parameter.annotation_type or _type_of(value)
        if _is_aligned(parameter, value):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def compile_launch(launch: Launch, target: str) -> Any:
    """The compiled kernel of a recorded launch (its `asm` and `metadata` can be inspected)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend, _, arch = target.partition(":")
    gpu = GPUTarget(backend, int(arch) if arch.isdigit() else arch, 64 if backend == "hip" else 32)
    source: Any = ASTSource
    if getattr(launch.kernel, "is_gluon", bool)():
        source = importlib.import_module("triton.experimental.gluon._runtime").GluonASTSource
    return triton.compile(
        source(launch.kernel, *specialize(launch)), target=gpu, options=launch.options
    )


def _chain(error: BaseException | None) -> str:
    """The error and its causes; Triton's compiler nests one per jit function."""
    parts = []
    while error is not None:
        parts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__
    return "\n caused by ".join(parts)


# ---------------------------------------------------------------- a family
def _chosen(family: str, op: str | None) -> list[Case]:
    importlib.import_module("tinfer.ops")
    ops = [o.name for o in registry.OPS.values() if o.family == family and o.has_kernel]
    if op is not None:
        ops = [name for name in ops if name == op]
    chosen = []
    for name in ops:
        mine = cases(op=name)
        chosen += [c for c in mine if c.real] or mine
    return chosen


def compile_family(family: str, targets: Iterable[str], op: str | None = None) -> list[Compiled]:
    """Compile every distinct variant that the family's cases launch; this process must compile."""
    from tinfer.kernels._target import Target, use_target

    results = []
    for target in targets:
        backend, _, arch = target.partition(":")
        device = Target(backend, int(arch) if arch.isdigit() else arch, SHARED_KIB[target])
        seen = set()
        for case in _chosen(family, op):
            with use_target(device):
                launches = launches_of(case)
            for launch in launches:
                key = (launch.name, str(specialize(launch)), str(launch.options))
                result = Compiled(case.op, case.name, launch.name, target, launch.programs)
                if key not in seen:
                    seen.add(key)
                    try:
                        result.shared = int(compile_launch(launch, target).metadata.shared)
                    except Exception as e:  # noqa: BLE001  reported with its kernel, then the next
                        result.error = _chain(e)
                results.append(result)
    return results


def check_family(family: str, target: str) -> list[Compiled]:
    """Compile a family in a subprocess; AssertionError lists what failed, by kernel."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", __name__, "--family", family, "--target", target, "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results = [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]
    problems = [p for p in (r.problem() for r in results) if p]
    assert not problems, "\n".join(problems)
    importlib.import_module("tinfer.ops")
    wanted = {o.name for o in registry.OPS.values() if o.family == family and o.has_kernel}
    assert wanted, f"{family} has no kernels"
    assert wanted == {r.op for r in results}, f"no launch recorded for {wanted}"
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--family", required=True)
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--op")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    results = compile_family(args.family, args.target or TARGETS, args.op)
    for r in results:
        row = f"{r.target:<11}{r.kernel:<34}{r.shared:>8} B {r.programs:>6} programs  {r.case}"
        line = json.dumps(asdict(r)) if args.json else f"{row}  {r.problem() or 'ok'}"
        sys.stdout.write(line + "\n")
    if not args.json and any(r.problem() for r in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
