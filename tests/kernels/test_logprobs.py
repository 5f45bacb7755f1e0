"""Log-probabilities against fp64, top-n order, tails, look-ups, JSON-safe values."""

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
from tinfer.testing.cases.logprobs import MAX_ERROR

CASES = cases(family="logprobs")
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
    check_family("logprobs", target)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_known_values(impl: str, device: str) -> None:
    """SM-07: never 0.0 for want of a value; -inf only where the logit is."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -INF]] * 4, device=device)
    tokens = torch.arange(4, device=device)
    with use_kernels(impl):
        own, top, ids = ops.token_logprobs(logits, tokens, 4, None)
    want = [-0.407606, -1.407606, -2.407606, -INF]
    assert [round(float(v), 6) for v in own] == want
    assert [round(float(v), 6) for v in top[0]] == want
    assert ids[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_within_1e5_of_fp64(temperature: float | None, impl: str, seed: int, device: str) -> None:
    g = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(3, 3000, generator=g, device=device) * 8
    tokens = torch.tensor([5, 2999, 17], device=device)
    t = None if temperature is None else torch.full((3,), temperature, device=device)
    with use_kernels(impl):
        own, top, ids = ops.token_logprobs(logits, tokens, 8, t)
    exact = (logits.double() / (temperature or 1.0)).log_softmax(-1)
    for got, want in ((own, exact.gather(1, tokens[:, None])[:, 0]), (top, exact.gather(1, ids))):
        error = (got.double() - want).abs() / want.abs().clamp(min=1.0)
        assert float(error.max()) <= MAX_ERROR
    assert torch.equal(ids, exact.topk(8)[1])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_equal_logits_come_by_ascending_id(impl: str, device: str) -> None:
    logits = torch.tensor([[0.0, 3.0, -0.0, 3.0, 0.0]], device=device)
    with use_kernels(impl):
        ids = ops.token_logprobs(logits, torch.tensor([0], device=device), 5, None)[2]
    assert ids[0].tolist() == [1, 3, 0, 2, 4]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_greedy_row_is_not_scaled(impl: str, device: str) -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0]] * 2, device=device)
    tokens, t = torch.tensor([2, 2], device=device), torch.tensor([0.0, 1.0], device=device)
    with use_kernels(impl):
        own = ops.token_logprobs(logits, tokens, 0, t)[0]
    assert float(own[0]) == float(own[1]) < 0.0


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_smaller_probabilities_exclude_equal_ones(impl: str, device: str) -> None:
    logits = torch.tensor([[0.5, 0.3, 0.1, 0.1]], device=device).log().expand(5, 4).contiguous()
    tokens = torch.tensor([0, 1, 2, 3, 9], device=device)
    with use_kernels(impl):
        got = ops.sum_smaller_probs(logits, tokens, None)
    want = torch.tensor([0.5, 0.2, 0.0, 0.0, 0.0], device=device)
    assert torch.allclose(got, want, atol=MAX_ERROR, rtol=0.0)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_what_a_map_lacks_is_minus_infinity(impl: str, device: str) -> None:
    keys = torch.tensor([[7, -1, 3, 7]], dtype=torch.int32, device=device)
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0]], device=device)
    queries = torch.tensor([[3, 7, 4, -1]], device=device)
    with use_kernels(impl):
        by_key = ops.map_lookup(keys, values, queries, True, -INF)
        by_position = ops.map_lookup(keys, values, queries, False, -INF)
    assert by_key[0].tolist() == [3.0, 1.0, -INF, -INF]
    assert by_position[0].tolist() == [4.0, -INF, -INF, -INF]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_errors(impl: str, device: str) -> None:
    logits, tokens = torch.zeros(2, 5, device=device), torch.zeros(2, device=device).long()
    with use_kernels(impl):
        with pytest.raises(ValueError, match=r"top_n must be in \[0, 5\], got 6"):
            ops.token_logprobs(logits, tokens, 6, None)
        with pytest.raises(TypeError, match="tokens must be int64, got int32"):
            ops.token_logprobs(logits, tokens.int(), 1, None)
