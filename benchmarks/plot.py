"""Draw a results file: how many times faster than the best published peer, op by op.

python -m benchmarks.plot benchmarks/results/nvidia-h200.jsonl docs/benchmark.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def rows_with_peers(path: Path) -> list[dict[str, Any]]:
    """The timed rows that have a peer's figure, slowest ratio first."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted((r for r in rows if "x_peer" in r), key=lambda r: float(r["x_peer"]))


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """One bar a row on a log axis; 1 is the peer."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 0.26 * len(rows) + 1.2))
    names = [f"{r['op']}  {r['case']}" for r in rows]
    values = [r["x_peer"] for r in rows]
    colours = ["#2a7f62" if v >= 1 else "#b5523b" for v in values]
    axes.barh(names, [v - 1 for v in values], left=1, color=colours)
    for at, row in enumerate(rows):
        label = f" {row['us'][1]:.1f} µs; {row['peer']} {row['peer_us']:.1f}"
        axes.text(max(row["x_peer"], 1), at, label, va="center", fontsize=6)
    axes.set_xscale("log")
    axes.set_xlim(right=max(values) * 4)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel(f"times faster than the peer ({rows[0]['gpu']}, cold L2, median)")
    figure.tight_layout()
    figure.savefig(out, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    rows = rows_with_peers(args.results)
    if not rows:
        raise SystemExit(f"plot: {args.results} has no row with a peer")
    draw(rows, args.out)


if __name__ == "__main__":
    main()
