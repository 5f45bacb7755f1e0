"""How far the golden runs move when every fp32 result is off by one unit in the last place.

The tolerances of the golden files come from one other order of summation. A run that ends in few
FP4 codes may have no flip in that one order and have one in the next: a code's step is up to a
third of the largest value. So the references are run again, several times, each fp32 result that
the model goes on with moved by a normal relative error of 2^-23.

`python -m tests.model.sensitivity` writes what then passed the files' own tolerances, by run and
tensor, to `tests/data/sensitivity.json`. A GPU, whose products are summed in another order by torch
as by us, is compared with the wider of the two; all that is not in that file, and the CPU's
references everywhere, keep to the files' own.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.model.golden import GoldenRun, errors, golden_runs
from tests.model.teacher import run_all
from tinfer import ops, registry

FILE = Path(__file__).parents[1] / "data" / "sensitivity.json"
SEEDS = 16
SPARE = 1.25  # what more seeds might still add
NOISY = ("hc_boundary", "hc_mix", "hc_pre", "index_logits", "linear_fp32", "moe_gate")
Widths = dict[str, list[float]]


def _moved(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return value
    return value * (1 + 2.0**-23 * torch.randn(value.shape, generator=generator))


def _noisy(ref: Callable[..., Any], generator: torch.Generator) -> Callable[..., Any]:
    def moved(*args: Any, **kwargs: Any) -> Any:
        out = ref(*args, **kwargs)
        if isinstance(out, tuple):
            return tuple(_moved(part, generator) for part in out)
        return _moved(out, generator)

    return moved


@contextmanager
def noisy_references(seed: int) -> Iterator[None]:
    """Scope: the references, each fp32 result moved by about one unit in the last place."""
    generator = torch.Generator().manual_seed(seed)
    kept = {name: getattr(ops, name).ref for name in NOISY}
    try:
        for name, ref in kept.items():
            registry.OPS[name].ref = _noisy(ref, generator)
        yield
    finally:
        for name, ref in kept.items():
            registry.OPS[name].ref = ref


@functools.cache
def recorded() -> dict[str, Widths]:
    """By run: [rel_l2, max_rel] of the tensors that passed a tolerance."""
    data: dict[str, dict[str, Widths]] = json.loads(FILE.read_text())
    return data["runs"]


def failures(golden: GoldenRun, actual: dict[str, Tensor]) -> dict[str, str]:
    """What is outside the files' tolerances and, on a GPU, outside what the noise did as well."""
    widths = {} if golden.device == "cpu" else recorded().get(str(golden.name), {})
    return outside(golden, actual, widths)


def outside(golden: GoldenRun, actual: dict[str, Tensor], widths: Widths) -> dict[str, str]:
    """What is outside the files' tolerances and `widths`, with the figures."""
    bad = {k: m for k, (ok, m) in golden.report(actual).items() if not ok}
    return {k: m for k, m in bad.items() if not _within(golden, actual, k, widths.get(k))}


def _within(
    golden: GoldenRun, actual: dict[str, Tensor], name: str, width: list[float] | None
) -> bool:
    if width is None:
        return False
    found = errors(actual[name], golden.expected(name))
    return all(x <= SPARE * w for x, w in zip(found, width, strict=True))


def _widths(golden: GoldenRun) -> Widths:
    """Of the tensors that passed a tolerance under noise: the largest of each measure."""
    passed: set[str] = set()
    largest: Widths = {}
    for seed in range(SEEDS):
        with registry.use_kernels("ref"), torch.inference_mode(), noisy_references(seed):
            actual = run_all(golden)
        report = golden.report(actual)
        passed |= {k for k, (ok, m) in report.items() if not ok and "max_rel" in m}
        for name in report:
            found = errors(actual[name], golden.expected(name))
            largest[name] = [max(p) for p in zip(largest.get(name, (0, 0)), found, strict=True)]
    return {k: [float(f"{x:.3g}") for x in largest[k]] for k in sorted(passed)}


def main() -> None:
    """Measure every run under every seed, and write the file."""
    runs: dict[str, Widths] = {}
    for run in golden_runs():
        runs[str(run.name)] = _widths(GoldenRun(run))
        print(run.name, runs[str(run.name)], flush=True)
    text = {"seeds": SEEDS, "runs": {name: widths for name, widths in runs.items() if widths}}
    FILE.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
