"""Penalties, bias and bans: the formulas by example, fills, what is left alone."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.capture import check_capture
from tests.kernels.parity import check_parity
from tinfer import ops
from tinfer.registry import use_kernels
from tinfer.testing.aot import TARGETS, check_family
from tinfer.testing.cases import Case, cases

CASES = cases(family="logit_processing")
IMPLEMENTATIONS = ("ref", pytest.param("triton", marks=pytest.mark.interpret))
INF = math.inf


@pytest.mark.interpret
@pytest.mark.parametrize("case", [c for c in CASES if not c.real], ids=lambda c: c.id)
def test_parity(case: Case, seed: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_parity(case, seed, device, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in CASES if c.real], ids=lambda c: c.id)
def test_parity_real(case: Case, seed: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_parity(case, seed, device, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in CASES if c.bench], ids=lambda c: c.id)
def test_capture(case: Case, seed: int) -> None:
    check_capture(case, seed)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_compiles(target: str) -> None:
    check_family("logit_processing", target)


def counted(device: str, prompt: list[int], output: list[int], columns: int) -> torch.Tensor:
    """int32 [1, V] counts of one sequence."""
    counts = torch.zeros(1, columns, dtype=torch.int32, device=device)
    for tokens, in_prompt in ((prompt, True), (output, False)):
        given = torch.tensor(tokens, dtype=torch.int64, device=device)
        ops.count_tokens_(counts, torch.zeros_like(given), given, in_prompt)
    return counts


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_penalties_by_example(impl: str, device: str) -> None:
    """Token 0: unseen; 1: in the prompt; 2: produced twice; 3: once, and again pending; 4: dead."""
    logits = torch.tensor([[8.0, 6.0, 6.0, -4.0, -INF]], device=device)
    with use_kernels(impl):
        counts = counted(device, [1, 1], [2, 3, 2, 4], 5)
        ops.apply_penalties_(
            logits,
            counts,
            torch.tensor([0], device=device),
            torch.tensor([2.0], device=device),
            torch.tensor([0.5], device=device),
            torch.tensor([1.0], device=device),
            torch.tensor([[3, -1]], device=device),
        )
    assert logits[0].tolist() == [8.0, 3.0, 2.0, -12.0, -INF]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_neutral_penalties_and_closed_slots_change_nothing(impl: str, device: str) -> None:
    logits = torch.tensor([[1.5, -2.5, 0.25]] * 2, device=device)
    before = logits.clone()
    one, zero = torch.ones(2, device=device), torch.zeros(2, device=device)
    with use_kernels(impl):
        counts = counted(device, [0], [1, 1], 3)
        slots = torch.tensor([0, -1], device=device)
        strong = torch.tensor([1.0, 5.0], device=device)
        ops.apply_penalties_(logits, counts, slots, strong, zero, strong - one, None)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_bias_cannot_revive_a_banned_token(impl: str, device: str) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]], device=device)
    ids = torch.tensor([[0, 2, -1]], device=device)
    with use_kernels(impl):
        ops.ban_tokens_(logits, ids[:, :1].contiguous(), None)
        ops.add_logit_bias_(logits, ids, torch.tensor([[100.0, -1.0, 7.0]], device=device))
    assert logits[0].tolist() == [-INF, 2.0, 2.0]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_stop_ids_are_banned_until_enough_tokens_are_produced(impl: str, device: str) -> None:
    logits = torch.zeros(2, 4, device=device)
    stops = torch.tensor([[1, 3], [1, 3]], device=device)
    produced = torch.tensor([2, 5], device=device)
    with use_kernels(impl):
        ops.ban_tokens_(logits, stops, produced < 5)
    assert logits.tolist() == [[0.0, -INF, 0.0, -INF], [0.0] * 4]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_bad_words_end_where_their_beginning_was_produced(impl: str, device: str) -> None:
    logits = torch.zeros(2, 6, device=device)
    words = [[[-1, -1, 5], [-1, 2, 3], [1, 2, 4], [-1, -1, -1]]] * 2
    history = torch.tensor([[1, 2], [0, 2]], device=device)
    with use_kernels(impl):
        ops.ban_sequences_(logits, torch.tensor(words, device=device), history)
    banned = [[int(i) for i in (row == -INF).nonzero()[:, 0]] for row in logits]
    assert banned == [[3, 4, 5], [3, 5]]
