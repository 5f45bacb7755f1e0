"""IX-11 in the model: index scores in chunks of a few rows choose what one buffer chooses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.model.golden import GoldenRun, ModelRun, golden_runs
from tinfer import registry
from tinfer.chunks import row_chunks
from tinfer.model import indexer

NEAR_TIE = 2.0**-20  # relative gap of two scores that fp32 sums in two orders may swap

FIRST_RUNS = [run for run in golden_runs() if run.info["run"] == 0]


def _few_rows(rows: int, columns: int) -> Iterator[slice]:
    return row_chunks(rows, columns, budget=4 * columns * 5)


@pytest.mark.parametrize("run", FIRST_RUNS, ids=lambda r: r.name)
def test_chunks_choose_alike(run: ModelRun, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = GoldenRun(run)
    chosen: list[dict[str, Tensor]] = []
    with registry.use_kernels("ref"), torch.inference_mode():
        for chunks in (row_chunks, _few_rows):
            monkeypatch.setattr(indexer, "row_chunks", chunks)
            chosen.append(_selection(golden))
    whole, few = chosen
    assert whole.keys() == few.keys()
    assert whole
    for name, ids in whole.items():
        # A product of another shape may be summed in another order: near ties may then flip.
        gap = golden.expected(f"prefill.{name.replace('index_ids', 'index_gap')}")
        clear = torch.ones(len(ids)) > 0 if gap is None else gap.flatten() > NEAR_TIE
        assert torch.equal(ids[clear], few[name][clear]), name


def _selection(golden: GoldenRun) -> dict[str, Tensor]:
    """The index's choices of a prefill, by layer."""
    kept: dict[str, Tensor] = {}

    def tap(name: str, value: Tensor) -> Tensor:
        if name.endswith("index_ids"):
            kept[name] = value.clone()
        return value

    golden.model.backbone(golden.prefill(0, golden.length, tap), golden.cache())
    return kept
