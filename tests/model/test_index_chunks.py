"""IX-11 in the model: index scores in chunks of a few rows choose what one buffer chooses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.model.golden import GoldenRun, ModelRun, golden_runs
from tinfer import registry
from tinfer.chunks import row_chunks
from tinfer.model import indexer
from tinfer.testing.compare import errors

FIRST_RUNS = [run for run in golden_runs() if run.info["run"] == 0]


def _few_rows(rows: int, columns: int) -> Iterator[slice]:
    return row_chunks(rows, columns, budget=4 * columns * 5)


@pytest.mark.parametrize("run", FIRST_RUNS, ids=lambda r: r.name)
def test_chunks_choose_alike(run: ModelRun, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = GoldenRun(run)
    outputs = []
    with registry.use_kernels("ref"), torch.inference_mode():
        for chunks in (row_chunks, _few_rows):
            monkeypatch.setattr(indexer, "row_chunks", chunks)
            cache = golden.cache()
            hidden = golden.model.backbone(golden.prefill(0, golden.length), cache)
            outputs.append(golden.model.backbone.logits(hidden.x))
    # The reference's fp32 products may be summed in another order for other shapes.
    tol = golden.run.tol("decode.logits")
    l2, top = errors(outputs[1], outputs[0])
    assert l2 <= tol["rel_l2"], l2
    assert top <= tol["max_rel"], top
