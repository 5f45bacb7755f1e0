"""Time the kernels of a family on this machine's GPU, after proving them right.

    python -m benchmarks.run --family norm_rope [--op rms_norm] [--case 4096] [--jsonl FILE]

Every case of the family first passes the parity gate (kernel against reference, outputs
poisoned); a failing one is a FAIL row, is not timed, and makes the exit code 1. The cases marked
`bench` are then timed beside ceilings measured in the same run.

Columns: us = cold device time, 20th/50th/80th percentile; graph = one call in a replayed graph;
GB/s counts each input and output byte once; %copy of a 2 GiB copy, %same of a copy of the case's
own size; %mm of the bf16 matmul rate; xref and xpeer = how many times faster than the torch
reference and than the peer's published figure for this GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import tinfer.ops  # noqa: F401  (registers the ops)
from tests.kernels.parity import check_parity, clone
from tinfer import registry
from tinfer.testing import timing
from tinfer.testing.cases import Case, cases

SEED = 20261129
Row = dict[str, Any]
HEAD = (
    f"{'op':<20}{'case':<26}{'us p20':>9}{'p50':>9}{'p80':>9}{'graph':>9}{'GB/s':>7}"
    f"{'%copy':>6}{'%same':>6}{'TFLOP/s':>8}{'%mm':>5}{'xref':>7}{'xpeer':>6}"
)


class Patch:
    """Attributes replaced for a while, in the manner of pytest's monkeypatch."""

    def __init__(self) -> None:
        self._saved: list[tuple[object, str, object]] = []

    def setattr(self, target: object, name: str, value: object) -> None:
        self._saved.append((target, name, getattr(target, name)))
        setattr(target, name, value)

    def undo(self) -> None:
        for target, name, value in reversed(self._saved):
            setattr(target, name, value)


@contextmanager
def patched() -> Iterator[Patch]:
    patch = Patch()
    try:
        yield patch
    finally:
        patch.undo()


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip().splitlines()[0]


def machine(commit: str | None) -> Row:
    """What the figures depend on."""
    import triton

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "gpu": gpu,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit or _output("git", "rev-parse", "--short", "HEAD"),
    }


def _reason(e: Exception) -> str:
    where = traceback.extract_tb(e.__traceback__)[-1]
    text = (str(e).splitlines() or ["no message"])[0]
    return f"{type(e).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"[:300]


def gate(case: Case, seed: int, device: str) -> str | None:
    """None if kernel and reference agree, otherwise what went wrong, in one line."""
    try:
        with patched() as patch:
            check_parity(case, seed, device, patch)
    except Exception as e:  # noqa: BLE001  (any failure is a FAIL row)
        return _reason(e)
    return None


def rates(row: Row, case: Case, arguments: dict[str, Any], roof: timing.Ceilings) -> None:
    """Add the rates, ratios and percentages to a timed row."""
    us = row["us"][1]
    if case.bytes is not None:
        nbytes = case.bytes(arguments)
        row["bytes"], row["gbs"] = nbytes, nbytes / us / 1e3
        row["pct_copy"] = 100 * row["gbs"] / roof.copy_gbs
        row["pct_same"] = 100 * row["gbs"] / timing.copy_gbs(nbytes)
    if case.flops is not None:
        row["tflops"] = case.flops(arguments) / us / 1e6
        row["pct_mm"] = 100 * row["tflops"] / roof.bf16_tflops
    if case.anchor is not None and case.anchor.gpu in torch.cuda.get_device_name():
        row["peer"], row["peer_us"] = case.anchor.peer, case.anchor.us
        row["x_peer"] = case.anchor.us / us


def measure(case: Case, seed: int, roof: timing.Ceilings, with_ref: bool) -> Row:
    """Time one case that passed the gate."""
    op = registry.get(case.op)
    arguments = case.arguments(seed, "cuda")
    kernel = timing.cold(lambda: op.kernel(**arguments))
    row: Row = {"us": dataclasses.astuple(kernel)}
    if case.captures:
        row["graph_us"] = timing.graph(lambda: op.kernel(**arguments)).p50
    if with_ref:
        theirs = {k: clone(v) for k, v in arguments.items()}
        row["ref_us"] = timing.cold(lambda: op.ref(**theirs), budget_ms=30).p50
        row["x_ref"] = row["ref_us"] / row["us"][1]
    rates(row, case, arguments, roof)
    return row


def show(row: Row) -> str:
    """One line of the table."""
    name = f"{row['op']:<20}{row['case']:<26}"
    if "fail" in row:
        return f"{name} FAIL {row['fail']}"
    columns = [("gbs", 7, 0), ("pct_copy", 6, 0), ("pct_same", 6, 0), ("tflops", 8, 1)]
    columns += [("pct_mm", 5, 0), ("x_ref", 7, 1), ("x_peer", 6, 2)]
    us = "".join(f"{v:>9.2f}" for v in row["us"])
    us += f"{row['graph_us']:>9.2f}" if "graph_us" in row else f"{'-':>9}"
    rest = (f"{row[k]:>{w}.{d}f}" if k in row else f"{'-':>{w}}" for k, w, d in columns)
    return name + us + "".join(rest)


def save(path: Path, rows: list[Row]) -> None:
    """Merge rows into a JSONL file that keeps the latest one of every op and case."""
    old = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    merged = {(r["op"], r["case"]): r for r in [*old, *rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(merged[key], sort_keys=True) for key in sorted(merged)]
    path.write_text("\n".join(lines) + "\n")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--family", help="cases of this family only")
    parser.add_argument("--op", help="cases of this op only")
    parser.add_argument("--case", default="", help="cases whose name contains this")
    parser.add_argument("--parity-only", action="store_true", help="prove, do not time")
    parser.add_argument("--bench-only", action="store_true", help="skip cases that are not timed")
    parser.add_argument("--no-ref", action="store_true", help="do not time the references")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--commit", help="what to record when this is not a git checkout")
    parser.add_argument("--jsonl", type=Path, help="merge the rows into this file")
    return parser.parse_args()


def select(args: argparse.Namespace, device: str) -> list[Case]:
    """The cases asked for that this device can run."""
    return [
        c
        for c in cases(args.op, args.family)
        if args.case in c.name
        and (c.bench or not args.bench_only)
        and (device == "cuda" or not c.real)
    ]


def time_all(chosen: list[Case], args: argparse.Namespace, common: Row) -> Iterator[Row]:
    """Time the cases one after another, beside the ceilings; a case that raises is a FAIL row."""
    roof = timing.ceilings()
    print(", ".join(f"{k} {v:.2f}" for k, v in dataclasses.asdict(roof).items()))
    print(HEAD)
    for case in chosen:
        row = {"op": case.op, "case": case.name, **common, **dataclasses.asdict(roof)}
        try:
            row |= measure(case, args.seed, roof, not args.no_ref)
        except Exception as e:  # noqa: BLE001
            row["fail"] = _reason(e)
        print(show(row), flush=True)
        yield row


def main() -> int:
    args = options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.parity_only:
        print("benchmarks.run: no GPU here; --parity-only runs anywhere", file=sys.stderr)
        return 2
    chosen = select(args, device)
    if not chosen:
        print("benchmarks.run: no case matches", file=sys.stderr)
        return 2
    common = machine(args.commit)
    print(", ".join(f"{k} {v}" for k, v in common.items()))
    rows: list[Row] = []
    for case in chosen:
        if reason := gate(case, args.seed, device):
            rows.append({"op": case.op, "case": case.name, "fail": reason, **common})
            print(show(rows[-1]), flush=True)
    print(f"parity: {len(chosen) - len(rows)} of {len(chosen)} cases pass", flush=True)
    if not args.parity_only:
        failed = {(row["op"], row["case"]) for row in rows}
        timed = [c for c in chosen if c.bench and (c.op, c.name) not in failed]
        rows.extend(time_all(timed, args, common))
    if args.jsonl:
        save(args.jsonl, rows)
    return 1 if any("fail" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
