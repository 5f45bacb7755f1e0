"""How far the golden runs move when every result is off by one unit in the last place.

The tolerances of the golden files come from one other order of summation. A run that ends in few
FP4 codes may have no flip in that one order and have one in the next: a code's step is up to a
third of the largest value. So the references are run again under noise, several times:

* every fp32 result moves by a normal relative error of 2^-23, one unit in the last place;
* every bf16 result moves to its neighbour with a chance of 2^-14: so often do two fp32 sums
  2^-23 apart round to different sides.

`python -m tests.model.sensitivity` writes what passed the files' own tolerances, by run and tensor,
to `tests/data/sensitivity.json`. A GPU, whose products are summed in another order by torch as by
us, is compared with the wider of the two; the CPU's references keep to the files' own.
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
from tests.model.teacher import Selection, run_all
from tinfer import ops, registry
from tinfer.model.batch import no_trace

FILE = Path(__file__).parents[1] / "data" / "sensitivity.json"
SEEDS = 16
SPARE = 1.25  # what more seeds might still add
NOISY = (
    "hc_boundary", "hc_collapse_norm", "hc_mix", "hc_pre", "index_logits", "linear_bf16",
    "linear_fp32", "linear_fp8", "linear_grouped", "moe_experts", "moe_gate", "rms_norm",
    "sparse_mla", "compress_pool", "engram_gate",
)  # fmt: skip
Widths = dict[str, dict[str, list[float]]]


def _moved(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.dtype == torch.float32:
        return value * (1 + 2.0**-23 * torch.randn(value.shape, generator=generator))
    if value.dtype == torch.bfloat16:
        step = (torch.rand(value.shape, generator=generator) < 2.0**-14).short()
        away = torch.randint(0, 2, value.shape, generator=generator).short() * 2 - 1
        other = (value.view(torch.int16) + step * away).view(torch.bfloat16)
        return torch.where((value == 0) | ~torch.isfinite(other), value, other)
    return value


def _noisy(ref: Callable[..., Any], generator: torch.Generator) -> Callable[..., Any]:
    def moved(*args: Any, **kwargs: Any) -> Any:
        out = ref(*args, **kwargs)
        if isinstance(out, tuple):
            return tuple(_moved(part, generator) for part in out)
        return _moved(out, generator)

    return moved


@contextmanager
def noisy_references(seed: int) -> Iterator[None]:
    """Scope: the references, each result moved by about one unit in the last place."""
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
    """By run, then by "own" or "golden" selection: {tensor: [rel_l2, max_rel]}."""
    data: dict[str, dict[str, Widths]] = json.loads(FILE.read_text())
    return data["runs"]


def failures(golden: GoldenRun, actual: dict[str, Tensor], selection: str) -> dict[str, str]:
    """What is outside the files' tolerances and, on a GPU, outside what the noise did as well."""
    bad = {k: m for k, (ok, m) in golden.report(actual).items() if not ok}
    if golden.device == "cpu":
        return bad
    widths = recorded().get(str(golden.name), {}).get(selection, {})
    return {k: m for k, m in bad.items() if not _within(golden, actual, k, widths.get(k))}


def _within(golden: GoldenRun, actual: dict[str, Tensor], name: str, width: Any) -> bool:
    if width is None:
        return False
    expected = golden.expected(name)
    return all(x <= SPARE * w for x, w in zip(errors(actual[name], expected), width, strict=True))


def _widths(golden: GoldenRun, selection: str) -> dict[str, list[float]]:
    """Of the tensors that passed a tolerance under noise: the largest of each measure."""
    passed: set[str] = set()
    largest: dict[str, list[float]] = {}
    for seed in range(SEEDS):
        with registry.use_kernels("ref"), torch.inference_mode(), noisy_references(seed):
            tap = Selection(golden) if selection == "golden" else no_trace
            actual = run_all(golden, tap)
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
        kinds = ["own"] if run.info["dense_index"] else ["own", "golden"]
        found = {kind: _widths(GoldenRun(run), kind) for kind in kinds}
        runs[str(run.name)] = {kind: widths for kind, widths in found.items() if widths}
        print(run.name, runs[str(run.name)], flush=True)
    text = {"seeds": SEEDS, "runs": {name: kinds for name, kinds in runs.items() if kinds}}
    FILE.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
