"""The engine: scheduling, endings, errors that stay with their request, images across chunks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.model.golden import ROOT, GoldenRun, golden_runs, load_model
from tinfer import registry
from tinfer.cache import CacheSize
from tinfer.engine import Engine
from tinfer.request import Request, SamplingParams, Step

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=5)


@pytest.fixture(autouse=True)
def _reference():
    with registry.use_kernels("ref"):
        yield


@pytest.fixture
def model():
    return load_model(ROOT / "models" / "six_types")


def engine(model, sequences: int = 4, chunk: int = 32) -> Engine:
    return Engine(model, CacheSize(sequences, 128, chunk, 16))


def tokens(steps: list[Step], request: int) -> list[int | None]:
    return [s.token for s in steps if s.request == request]


def test_more_requests_than_slots(model) -> None:
    """Finished sequences hand their slot on; nothing of them is left behind."""
    prompts = [[5 + i, 9, 20 + i] * (1 + i % 3) for i in range(5)]
    requests = [Request(p, GREEDY) for p in prompts]
    together = list(engine(model, sequences=2).generate(requests))
    for i, request in enumerate(requests):
        alone = list(engine(model, sequences=1).generate([request]))
        assert tokens(together, i) == tokens(alone, 0)
        assert [s.finish_reason for s in alone] == [None] * 4 + ["length"]


def test_kv13_no_slot_leaks_in_a_long_run(model) -> None:
    """20 requests of up to three windows each through 8 slots: each ends as if it ran alone."""
    many = dataclasses.replace(GREEDY, max_new_tokens=3 * model.config.window_size)
    few = dataclasses.replace(GREEDY, max_new_tokens=3)
    requests = [Request([5 + i, 9], few if i % 5 else many) for i in range(20)]
    runner = engine(model, sequences=8)
    together = list(runner.generate(requests))
    assert [s.finish_reason for s in together if s.finish_reason] == ["length"] * 20
    for i in (0, 1, 18, 19):
        alone = list(engine(model, sequences=1).generate([requests[i]]))
        assert tokens(together, i) == tokens(alone, 0)
    assert len(list(runner.generate(requests[:8]))) == 2 * many.max_new_tokens + 6 * 3


def test_kv11_windows_and_state_do_not_grow_with_the_context(model) -> None:
    """A request too long for the context is refused with numbers: `test_bad_request`."""
    short, long = (Engine(model, CacheSize(2, n, 32, 16)).cache for n in (128, 4096))
    assert [w.shape for w in short.windows] == [w.shape for w in long.windows]
    for layer, state in short.pool_state.items():
        assert state.shape == long.pool_state[layer].shape
    assert short.engram_history.shape == long.engram_history.shape


def test_an_engine_can_be_used_again(model) -> None:
    runner = engine(model, sequences=1)
    first = list(runner.generate([Request([5, 6, 7], GREEDY)]))
    list(runner.generate([Request([90] * 40, GREEDY)]))
    again = list(runner.generate([Request([5, 6, 7], GREEDY)]))
    assert tokens(first, 0) == tokens(again, 0)


def test_stop_id(model) -> None:
    free = tokens(list(engine(model).generate([Request([5, 6, 7], GREEDY)])), 0)
    params = dataclasses.replace(GREEDY, stop_ids=(free[2],))
    steps = list(engine(model).generate([Request([5, 6, 7], params)]))
    assert tokens(steps, 0) == free[:3]
    assert steps[-1].finish_reason == "stop"


def test_forced_ids_do_not_stop(model) -> None:
    free = tokens(list(engine(model).generate([Request([5, 6, 7], GREEDY)])), 0)
    params = dataclasses.replace(GREEDY, stop_ids=(11,))
    steps = list(engine(model).generate([Request([5, 6, 7], params, force_ids=[11, free[0]])]))
    assert tokens(steps, 0)[:2] == [11, free[0]]
    assert len(steps) == 5


def test_cancel(model) -> None:
    runner, seen = engine(model), []
    requests = [Request([5, 6, 7], GREEDY), Request([9], GREEDY)]
    for step in runner.generate(requests):
        seen.append(step)
        if step.request == 0:
            runner.cancel(0)
    assert len(tokens(seen, 0)) == 1
    assert len(tokens(seen, 1)) == 5


def test_context_ends_the_request(model) -> None:
    params = dataclasses.replace(GREEDY, max_new_tokens=500)
    runner = Engine(model, CacheSize(1, 20, 16, 16))
    steps = list(runner.generate([Request([5] * 16, params)]))
    assert steps[-1].finish_reason == "length"
    assert 16 + len(steps) == 21  # the last token needs no place in the cache


def test_bad_logits_end_one_request(model, monkeypatch) -> None:
    """NaN in one row: that request ends with an error, its neighbour goes on."""
    backbone = type(model.backbone)
    clean = backbone.logits

    def poisoned(self, x):
        out = clean(self, x)
        if out.shape[0] == 2:
            out[0, 3] = float("nan")
        return out

    expected = tokens(list(engine(model).generate([Request([9], GREEDY)])), 0)
    monkeypatch.setattr(backbone, "logits", poisoned)
    steps = list(engine(model).generate([Request([5, 6, 7], GREEDY), Request([9], GREEDY)]))
    first = [s for s in steps if s.request == 0]
    assert len(first) == 1
    assert first[0].finish_reason.startswith("error: ")
    assert first[0].token is None
    assert tokens(steps, 1) == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "at least one token"), ([5, 999], "got 999"), ([5] * 129, "context of 128")],
)
def test_bad_request(model, prompt, message) -> None:
    with pytest.raises(ValueError, match=message):
        next(engine(model).generate([Request([5], GREEDY), Request(prompt, GREEDY)]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 1.1},
        {"max_new_tokens": -1},
        {"logprobs": -1},
    ],
)
def test_bad_params(wrong) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)


@pytest.mark.parametrize("chunk", [64, 7, 3])
def test_images_across_chunks(chunk: int) -> None:
    """An image span may straddle prefill chunks: its embeddings follow its rows."""
    run = next(r for r in golden_runs("full") if r.info["images"])
    golden = GoldenRun(run)
    batch = golden.prefill(0, golden.length)
    params = SamplingParams(temperature=0.0, max_new_tokens=4)
    request = Request(
        golden.input_ids[0].tolist(),
        params,
        image=batch.image.tolist(),
        image_rows=batch.image_rows.rows,
    )
    steps = list(Engine(golden.model, CacheSize(1, 64, chunk, 16)).generate([request]))
    assert tokens(steps, 0) == golden.tokens[:4, 0].tolist()


# ---------------------------------------------------------------- logit control
def chosen(model, **changes) -> list[int | None]:
    params = dataclasses.replace(GREEDY, max_new_tokens=8, **changes)
    return tokens(list(engine(model).generate([Request([5, 6, 7], params)])), 0)


def test_logit_bias_and_bad_words(model) -> None:
    free = chosen(model)
    assert free[0] not in chosen(model, logit_bias=((free[0], float("-inf")),))
    assert chosen(model, logit_bias=((42, 1e4),)) == [42] * 8
    pair = (free[2], free[3])
    banned = chosen(model, bad_words=(pair, (free[0], 1, 2)))
    assert banned[:3] == free[:3]
    assert banned[3] != free[3]
    assert free[0] not in chosen(model, bad_words=((free[0],),))


def test_penalties_see_their_own_sequence(model) -> None:
    """A neighbour without penalties is untouched; a slot's next request starts afresh."""
    free = chosen(model)
    strong = dataclasses.replace(GREEDY, max_new_tokens=8, presence_penalty=1e4)
    plain = dataclasses.replace(GREEDY, max_new_tokens=8)
    requests = [Request([5, 6, 7], strong), Request([5, 6, 7], plain), Request([5, 6, 7], strong)]
    steps = list(engine(model, sequences=2).generate(requests))
    assert len(set(tokens(steps, 0))) == 8
    assert tokens(steps, 1) == free
    assert tokens(steps, 2) == tokens(steps, 0)


def test_repetition_penalty_counts_the_prompt(model) -> None:
    prompt = list(range(3, 60))
    params = dataclasses.replace(GREEDY, max_new_tokens=6, repetition_penalty=1e6)
    steps = list(engine(model, chunk=64).generate([Request(prompt, params)]))
    assert not set(tokens(steps, 0)) & set(prompt)


def test_min_new_tokens(model) -> None:
    free = chosen(model)
    held = chosen(model, stop_ids=(free[1],), min_new_tokens=4)
    assert len(held) >= 4
    assert free[1] not in held[:4]


def test_prompt_logprobs(model) -> None:
    prompt = [5, 6, 7, 90, 91, 92, 13]
    params = dataclasses.replace(GREEDY, prompt_logprobs=2)
    for chunk in (64, 3):
        request = Request(prompt, params, prompt_logits=True)
        first = next(engine(model, chunk=chunk).generate([request]))
        expected = torch.log_softmax(first.prompt_logits.double(), -1)
        assert len(first.prompt_logprobs) == len(prompt) - 1
        for at, (own, top) in enumerate(first.prompt_logprobs):
            assert own == pytest.approx(float(expected[at, prompt[at + 1]]), abs=1e-5)
            assert [i for i, _ in top] == expected[at].topk(2).indices.tolist()


def test_logprobs_after_temperature(model) -> None:
    params = dataclasses.replace(
        GREEDY, temperature=0.5, logprobs=1, logprobs_after_temperature=True
    )
    for step in engine(model).generate([Request([5, 6, 7], params)]):
        expected = torch.log_softmax(step.logits.double() / 0.5, -1)
        assert step.logprob == pytest.approx(float(expected[step.token]), abs=1e-5)
