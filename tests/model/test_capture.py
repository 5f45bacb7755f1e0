"""A whole decode step is captured in a CUDA graph and replayed as sequences grow (CG-01, CG-05)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.model.golden import GoldenRun, golden_runs
from tinfer import registry
from tinfer.cache import Cache

pytestmark = pytest.mark.gpu
RUNS = [r for r in golden_runs() if r.info["run"] == 0 and not r.info["images"]]


def _pools(cache: Cache) -> list[torch.Tensor]:
    return [*cache.windows, *cache.compressed.values(), *cache.index_keys.values()]


@pytest.mark.parametrize("run", RUNS, ids=lambda r: r.name)
def test_decode_replays(run) -> None:
    """Replay equals eager bit for bit across group and selection boundaries; no sync inside."""
    golden = GoldenRun(run, "cuda")
    bound = 200  # of all positions of the run: what a captured step must size its buffers by
    with registry.use_kernels("triton"), torch.inference_mode():
        eager, replayed = golden.cache(), golden.cache()
        for cache in (eager, replayed):
            golden.model.backbone(golden.prefill(0, golden.length), cache)
        static = dataclasses.replace(golden.decode(0), max_position=bound)
        before = [p.clone() for p in _pools(replayed)]
        state = [s.clone() for s in (*replayed.pool_state.values(), replayed.engram_history)]
        golden.model.backbone(static, replayed)  # compiles what it needs
        graph = torch.cuda.CUDAGraph()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.graph(graph):
                hidden = golden.model.backbone(static, replayed)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for pages, old in zip(_pools(replayed), before, strict=True):
            pages.copy_(old)
        for mine, old in zip(
            (*replayed.pool_state.values(), replayed.engram_history), state, strict=True
        ):
            mine.copy_(old)
        for step in range(golden.steps):
            live = dataclasses.replace(golden.decode(step), max_position=bound)
            for name in ("ids", "positions"):
                getattr(static, name).copy_(getattr(live, name))
            graph.replay()
            expected = golden.model.backbone(live, eager)
            assert torch.equal(hidden.x, expected.x), step
        for mine, theirs in zip(_pools(replayed), _pools(eager), strict=True):
            assert torch.equal(mine, theirs)
