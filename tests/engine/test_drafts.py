"""Speculative steps: the tokens are those of the run without drafts, however good drafts are."""

from __future__ import annotations

import dataclasses

import pytest

from tests.model.golden import ROOT, load_model
from tinfer import registry
from tinfer.cache import CacheSize
from tinfer.engine import Engine
from tinfer.model.dspark import Draft
from tinfer.request import Request, SamplingParams, Step

PROMPT = [5, 6, 7, 90, 91, 92, 13]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24)


@pytest.fixture(autouse=True)
def _reference():
    with registry.use_kernels("ref"):
        yield


@pytest.fixture
def model():
    return load_model(ROOT / "models" / "six_types")


class Scripted:
    """Draft stages whose first `right` proposals are `known`, the others wrong."""

    def __init__(self, inner, known: list[int], right: int) -> None:
        self.inner, self.known, self.right = inner, known, right

    def seed(self, *args):
        return self.inner.seed(*args)

    def propose(self, tokens, main, seq, max_position, cache, pick) -> Draft:
        real = self.inner.propose(tokens, main, seq, max_position, cache, pick)
        start = int(main[0]) + 2 - len(PROMPT)  # of the answer: behind the newest token
        for i in range(real.tokens.shape[1]):
            want = self.known[start + i] if start + i < len(self.known) else 0
            real.tokens[0, i] = want if i < self.right else (want + 1) % 256
        return real


def run(model, requests, drafts=True, size=None) -> tuple[list[list[Step]], Engine]:
    engine = Engine(model, size or CacheSize(3, 128, 8, 16), drafts=drafts)
    steps: list[list[Step]] = [[] for _ in requests]
    for step in engine.generate(requests):
        steps[step.request].append(step)
    return steps, engine


def ids(steps: list[Step]) -> list[int | None]:
    return [s.token for s in steps]


@pytest.mark.parametrize("right", range(6))
def test_rejected_drafts_leave_nothing_behind(model, right: int) -> None:
    """Rows of wrong drafts are in every cache until the right ones are written over them."""
    request = Request(PROMPT, GREEDY)
    [free], _ = run(model, [request], drafts=False)
    scripted = dataclasses.replace(model, dspark=Scripted(model.dspark, ids(free), right))
    [steps], engine = run(scripted, [request])
    assert ids(steps) == ids(free)
    assert [s.finish_reason for s in steps] == [None] * 23 + ["length"]
    assert engine.decode_steps == -(-23 // (right + 1))
    assert engine.decoded == 23
    for a, b in zip(steps, free, strict=True):
        assert (a.logits - b.logits).norm() <= 0.04 * b.logits.norm()  # one flipped fp8 code


def test_a_batch_in_prefill_and_decode(model) -> None:
    """Sampling at any temperature, prompts of several chunks, more requests than slots."""
    requests = [
        Request([3 + (7 * i + j) % 200 for j in range(1 + 9 * i)], params)
        for i, params in enumerate(
            dataclasses.replace(GREEDY, temperature=t, seed=i, max_new_tokens=4 + 3 * i)
            for i, t in enumerate((0.0, 1.0, 0.7, 0.0, 1.3))
        )
    ]
    free, _ = run(model, requests, drafts=False)
    steps, _ = run(model, requests)
    assert [ids(s) for s in steps] == [ids(s) for s in free]


def test_wishes_hold_within_a_step(model) -> None:
    """Penalties, stops and forced tokens see each accepted token before the next is drawn."""
    plain, _ = run(model, [Request(PROMPT, GREEDY)], drafts=False)
    known = ids(plain[0])
    for params, force in (
        (dataclasses.replace(GREEDY, presence_penalty=3.0, logprobs=2), ()),
        (dataclasses.replace(GREEDY, stop_ids=(known[7],)), ()),
        (GREEDY, (*known[:3], 17, 18)),
    ):
        request = Request(PROMPT, params, force)
        [free], _ = run(model, [request], drafts=False)
        scripted = dataclasses.replace(model, dspark=Scripted(model.dspark, ids(free), 5))
        [steps], engine = run(scripted, [request])
        assert ids(steps) == ids(free)
        assert engine.decode_steps < len(steps) / 3
        assert [s.finish_reason for s in steps] == [s.finish_reason for s in free]
        for a, b in zip(steps, free, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=0.1)


@pytest.mark.parametrize("room", [1, 2, 5, 9])
def test_drafts_stay_in_the_context(model, room: int) -> None:
    size = CacheSize(1, len(PROMPT) + room, 8, 16)
    [free], _ = run(model, [Request(PROMPT, GREEDY)], drafts=False, size=size)
    scripted = dataclasses.replace(model, dspark=Scripted(model.dspark, ids(free), 5))
    [steps], _ = run(scripted, [Request(PROMPT, GREEDY)], size=size)
    assert ids(steps) == ids(free)
    assert steps[-1].finish_reason == "length"


def test_cancelled_within_a_step(model) -> None:
    """What was accepted behind the token that ends a request is not given out."""
    [free], _ = run(model, [Request(PROMPT, GREEDY)], drafts=False)
    scripted = dataclasses.replace(model, dspark=Scripted(model.dspark, ids(free), 5))
    engine, found = Engine(scripted, CacheSize(1, 128, 8, 16), drafts=True), []
    for step in engine.generate([Request(PROMPT, GREEDY)]):
        found.append(step.token)
        if len(found) == 4:
            engine.cancel(0)
    assert found == ids(free)[:4]


def test_drafts_need_draft_stages() -> None:
    without = load_model(ROOT / "models" / "text_plain")
    assert without.dspark is None
    with pytest.raises(ValueError, match="engine: drafts must be False"):
        Engine(without, CacheSize(1, 64, 8, 16), drafts=True)
