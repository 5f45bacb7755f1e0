"""One code path: any prefill split, any mix of sequences, and verification give the same model."""

from __future__ import annotations

import pytest
import torch

from tests.model.golden import GoldenRun, ModelRun, golden_runs
from tinfer import registry
from tinfer.cache import Cache, CacheSize
from tinfer.model.batch import Batch
from tinfer.testing.compare import errors

RUNS = golden_runs()


@pytest.fixture(autouse=True)
def _reference():
    with registry.use_kernels("ref"), torch.inference_mode():
        yield


def _logits_after(golden: GoldenRun, chunks: list[tuple[int, int]]) -> torch.Tensor:
    """Logits of the last prompt row, and of one decode step, after prefill in these chunks."""
    cache = golden.cache()
    for first, last in chunks:
        hidden = golden.model.backbone(golden.prefill(first, last), cache)
    rows = hidden.x.view(golden.batch, last - first, -1)[:, -1]
    step = golden.model.backbone(golden.decode(0), cache).x
    return golden.model.backbone.logits(torch.cat([rows, step]))


def _bound(golden: GoldenRun) -> tuple[float, float]:
    """The end-to-end tolerance of the run: what one bf16 flip may grow to."""
    tol = golden.run.tol("decode.logits")
    return tol["rel_l2"], tol["max_rel"]


@pytest.mark.parametrize("run", RUNS, ids=lambda r: r.name)
def test_every_split(run: ModelRun) -> None:
    """Prefill in two chunks, split at every position, against prefill at once."""
    golden = GoldenRun(run)
    whole = _logits_after(golden, [(0, golden.length)])
    l2_bound, max_bound = _bound(golden)
    # The first run of each model takes every position, the others one in five.
    for split in range(1, golden.length, 1 if run.info["run"] == 0 else 5):
        got = _logits_after(golden, [(0, split), (split, golden.length)])
        l2, top = errors(got, whole)
        assert l2 <= l2_bound, f"split {split}: {l2}"
        assert top <= max_bound, f"split {split}: {top}"


@pytest.mark.parametrize("run", RUNS, ids=lambda r: r.name)
def test_token_by_token(run: ModelRun) -> None:
    """Decoding the prompt one token at a time is the same as prefilling it."""
    golden = GoldenRun(run)
    whole = _logits_after(golden, [(0, golden.length)])
    single = _logits_after(golden, [(p, p + 1) for p in range(golden.length)])
    l2, top = errors(single, whole)
    l2_bound, max_bound = _bound(golden)
    assert l2 <= l2_bound
    assert top <= max_bound


TEXT = [r for r in RUNS if not r.info["images"] and r.info["run"] == 0]


@pytest.mark.parametrize("run", TEXT, ids=lambda r: r.name)
def test_unequal_lengths(run: ModelRun) -> None:
    """A batch of prompts of unequal length, some in prefill while others decode."""
    golden = GoldenRun(run)
    model = golden.model
    generator = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(3, model.config.vocab_size, (n,), generator=generator).tolist()
        for n in (1, 2, 17, 40)
    ]
    alone = []
    for prompt in prompts:
        cache = Cache(model.config, CacheSize(1, 128, 64, 16), "cpu")
        rows = model.backbone(Batch.of([(0, 0, prompt)], "cpu"), cache).x
        alone.append(model.backbone.logits(rows))
    cache = Cache(model.config, CacheSize(4, 128, 64, 16), "cpu")
    done = [0, 0, 0, 0]
    together: list[list[torch.Tensor]] = [[], [], [], []]
    for sizes in ([1, 1, 5, 40], [0, 1, 12, 0]):
        parts = [
            (slot, done[slot], prompts[slot][done[slot] : done[slot] + n])
            for slot, n in enumerate(sizes)
            if n
        ]
        rows = model.backbone.logits(model.backbone(Batch.of(parts, "cpu"), cache).x)
        for slot, _, tokens in parts:
            together[slot].append(rows[: len(tokens)])
            rows = rows[len(tokens) :]
            done[slot] += len(tokens)
    l2_bound, max_bound = _bound(golden)
    for mine, expected in zip(together, alone, strict=True):
        l2, top = errors(torch.cat(mine), expected)
        assert l2 <= l2_bound
        assert top <= max_bound


@pytest.mark.parametrize("run", TEXT, ids=lambda r: r.name)
def test_rejected_drafts_leave_no_trace(run: ModelRun) -> None:
    """Verify six rows, keep one, go on: the same logits as if the others had never been."""
    golden = GoldenRun(run)
    model, prompt = golden.model, golden.input_ids[0].tolist()
    tokens = golden.tokens[:, 0].tolist()
    width = 1 + model.config.dspark_block_size
    clean, dirty = golden.cache(), golden.cache()
    for cache in (clean, dirty):
        model.backbone(Batch.of([(0, 0, prompt)], "cpu"), cache)
    at = len(prompt)
    for step, token in enumerate(tokens[:12]):
        expected = model.backbone(Batch.of([(0, at + step, [token])], "cpu"), clean).x
        drafts = [token] + [(token + 7 * i) % 200 + 3 for i in range(1, width)]
        got = model.backbone(Batch.of([(0, at + step, drafts)], "cpu"), dirty).x
        l2, _ = errors(model.backbone.logits(got[:1]), model.backbone.logits(expected))
        assert l2 <= _bound(golden)[0]
