"""The benchmark runner: its gate, its FAIL rows and exit codes, its table and its results file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import run
from tinfer import ops
from tinfer.testing import timing
from tinfer.testing.cases import cases

CASE = next(c for c in cases("hc_expand") if c.name == "5x2x160")
ARGUMENTS = ["--op", "hc_expand", "--case", "5x2x160", "--parity-only"]


def _main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["run", *arguments])
    return run.main()


@pytest.mark.interpret
def test_gate_passes_a_right_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = torch.empty
    assert _main(monkeypatch, *ARGUMENTS) == 0
    assert "parity: 1 of 1 cases pass" in capsys.readouterr().out
    assert torch.empty is empty, "the poisoned allocator is put back"


@pytest.mark.interpret
def test_a_wrong_kernel_is_a_fail_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kernel, supports = ops.hc_expand._loaded
    monkeypatch.setitem(
        ops.hc_expand.__dict__, "_loaded", (lambda x, copies: kernel(x, copies) + 1, supports)
    )
    results = tmp_path / "gpu.jsonl"
    assert _main(monkeypatch, *ARGUMENTS, "--jsonl", str(results)) == 1
    assert "FAIL AssertionError: output:" in capsys.readouterr().out
    assert "FAIL" not in results.read_text()
    assert "elements differ" in json.loads(results.read_text())["fail"]


def test_nothing_to_run_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main(monkeypatch, "--op", "hc_expand", "--case", "no such case", "--parity-only") == 2
    assert "no case matches" in capsys.readouterr().err


def test_results_keep_the_latest_row_of_a_case(tmp_path: Path) -> None:
    results = tmp_path / "gpu.jsonl"
    run.save(results, [{"op": "a", "case": "1", "us": 1}, {"op": "b", "case": "1", "us": 2}])
    run.save(results, [{"op": "a", "case": "1", "us": 3}])
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(r["op"], r["us"]) for r in rows] == [("a", 3), ("b", 2)]


def test_table_row() -> None:
    row = {"op": "f", "case": "c", "us": (1.0, 2.0, 3.0), "graph_us": 1.5, "gbs": 4000.0}
    line = run.show(row | {"pct_copy": 95.0, "pct_same": 99.0, "x_ref": 12.0})
    assert len(line) == len(run.HEAD)
    want = "f c 1.00 2.00 3.00 1.50 4000 95 99 - - 12.0 -"
    assert " ".join(line.split()) == want
    assert run.show({"op": "f", "case": "c", "fail": "why"}).endswith("FAIL why")


def test_percentiles() -> None:
    assert timing.Timing.of([float(i) for i in range(101)]) == timing.Timing(20.0, 50.0, 80.0)
    assert timing.Timing.of([7.0]) == timing.Timing(7.0, 7.0, 7.0)


@pytest.mark.gpu
def test_times_are_device_times() -> None:
    """Twice the work takes longer, and neither host work nor a warm cache flatters it."""
    small = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
    large = torch.ones(256 << 20, dtype=torch.uint8, device="cuda")
    one, four = timing.cold(small.zero_).p50, timing.cold(large.zero_).p50
    assert 2 < four / one < 6
    assert timing.graph(small.zero_).p50 < 1.2 * one
