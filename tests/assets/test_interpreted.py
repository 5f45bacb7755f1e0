"""The whole embedded model on interpreted kernels gives the ids of its references."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tinfer import registry
from tinfer.cache import CacheSize
from tinfer.engine import Engine
from tinfer.model.dspark import Draft
from tinfer.request import Request, SamplingParams
from tinfer.runtime import NANO, load_model, open_model
from tools.nano import questions
from tools.nano.questions import prompt_ids

QUESTIONS = list(questions.load(Path(__file__).parent / "questions.jsonl"))


class Expecting:
    """Draft stages that propose a known answer whole: one pass verifies all of it."""

    def __init__(self, inner, answers: list[list[int]], prompts: list[list[int]]) -> None:
        self.inner, self.answers = inner, answers
        self.lengths = [len(p) for p in prompts]

    def seed(self, *args):
        return self.inner.seed(*args)

    def propose(self, tokens, main, seq, max_position, cache, pick) -> Draft:
        longest = max(map(len, self.answers))
        rows = torch.zeros(len(tokens), longest, dtype=torch.int64)
        for i, (at, slot) in enumerate(zip(main.tolist(), seq.tolist(), strict=True)):
            rest = self.answers[slot][at + 2 - self.lengths[slot] :]
            rows[i, : len(rest)] = torch.tensor(rest)
        return Draft(rows, torch.empty(0), torch.empty(0))


@pytest.mark.slow
@pytest.mark.interpret
def test_interpreted_kernels_give_the_references_ids() -> None:
    """A capital, a sum and a date: prefill and the pass that verifies the answers, every op.

    Token by token a pass takes minutes; verified at once, the same engine draws every token.
    """
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here; tools/eval_nano.py compares all questions")
    loaded = open_model(NANO, torch.device("cpu"))
    assert loaded.tokenizer is not None
    picked = [
        min((q for q in QUESTIONS if q.task == t), key=lambda q: len(q.prompt + q.answer))
        for t in ("capitals", "addition", "dates")
    ]
    prompts = [prompt_ids(loaded.tokenizer, q.prompt) for q in picked]
    # The engine hands out slots from the first on.
    known = [[*loaded.tokenizer.encode_plain(q.answer), *loaded.eos_ids()] for q in picked]
    model, _ = load_model(loaded, 64, quiet=True)
    assert model.dspark is not None
    model = dataclasses.replace(model, dspark=Expecting(model.dspark, known, prompts))
    params = SamplingParams(temperature=0.0, max_new_tokens=16, stop_ids=loaded.eos_ids())
    longest = max(map(len, prompts))
    engine = Engine(model, CacheSize(len(picked), longest + 16, longest), drafts=True)
    ids: list[list[int]] = [[] for _ in picked]
    registry.reset_counts()
    with registry.use_kernels("triton"):
        for step in engine.generate([Request(p, params) for p in prompts]):
            assert step.token is not None
            ids[step.request].append(step.token)
    assert ids == known
    assert engine.decode_steps == len(picked)
    assert not any(op.calls["ref"] for op in registry.OPS.values() if op.has_kernel)
