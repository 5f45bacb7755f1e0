"""Checks around sampling: rows that end, tokens that end."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.parity import check_parity
from tinfer import ops
from tinfer.compat.masses import NO_TOKEN, NOT_FINITE
from tinfer.registry import use_kernels
from tinfer.testing.aot import TARGETS, check_family
from tinfer.testing.cases import Case, cases

CASES = cases(family="row_checks")
IMPLEMENTATIONS = ("ref", pytest.param("triton", marks=pytest.mark.interpret))


@pytest.mark.interpret
@pytest.mark.parametrize("case", [c for c in CASES if not c.real], ids=lambda c: c.id)
def test_parity(case: Case, seed: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_parity(case, seed, device, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in CASES if c.real], ids=lambda c: c.id)
def test_parity_real(case: Case, seed: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_parity(case, seed, device, monkeypatch)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_compiles(target: str) -> None:
    check_family("row_checks", target)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_outliers_end_their_row_alone(impl: str, device: str) -> None:
    """SM-08, as a check of its own."""
    nan, inf = math.nan, math.inf
    x = [[1.0, -9.0, 2.0], [nan, 9.0, -inf], [-inf, -inf, -inf], [inf, 0.0, 0.0]]
    with use_kernels(impl):
        counts, status = ops.detect_outlier_and_abort(torch.tensor(x, device=device), 5.0)
    assert counts.tolist() == [[0, 0, 1], [1, 1, 1], [0, 3, 0], [0, 1, 0]]
    assert status.tolist() == [0, NOT_FINITE, NO_TOKEN, NOT_FINITE]
    assert "no valid token" in ops.status_text(NO_TOKEN)
    with pytest.raises(ValueError, match="status must be one of"):
        ops.status_text(17)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_fill_is_no_stop_id(impl: str, device: str) -> None:
    tokens = torch.tensor([4, -1, 7], device=device)
    stops = torch.tensor([[4, -1], [-1, -1], [4, -1]], device=device)
    with use_kernels(impl):
        got = ops.match_stop(tokens, stops)
    assert got.tolist() == [True, False, False]
