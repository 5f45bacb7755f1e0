"""The earlier sampler's draw: its worked examples on both sides of the edge at 2^31."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.parity import check_parity
from tinfer import ops
from tinfer.compat.masses import NO_TOKEN
from tinfer.registry import use_kernels
from tinfer.testing.aot import TARGETS, check_family
from tinfer.testing.cases import Case, cases
from tinfer.testing.cases.sampling import parameters

CASES = cases(family="sampling_seeds")
IMPLEMENTATIONS = ("ref", pytest.param("triton", marks=pytest.mark.interpret))
DATA = json.loads((Path(__file__).parents[1] / "data" / "sampling" / "examples.json").read_text())


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
    check_family("sampling_seeds", target)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("example", DATA["seeds_compat"])
def test_worked_examples(example: dict[str, Any], impl: str, device: str) -> None:
    """One unit more of mass at 2^31 halves the bound: another word, another token."""
    masses = torch.tensor([example["masses"]], device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    with use_kernels(impl):
        token = ops.seeds_compat_draw(masses, zero + 42, zero)
        words = ops.philox_words(zero + 42, zero, zero, 4)[0].tolist()
    assert int(token) == example["token"]
    total = sum(example["masses"])
    assert (2**32 - 1) // total * total == example["bound"]
    used = next(i for i, w in enumerate(words) if w < example["bound"])
    assert used + 1 == example["words_used"]
    assert words[used] % total == example["rest"]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_no_mass_is_no_token(impl: str, device: str) -> None:
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    dead = torch.full((1, 4), float("-inf"), device=device)
    p = parameters(1, torch.device(device), 1.0, 0, 1.0, 0.0)
    with use_kernels(impl):
        assert int(ops.seeds_compat_draw(torch.zeros_like(dead).long(), zero, zero)) == -1
        ids = torch.arange(4, device=device)[None]
        token, status = ops.sample_seeds_compat(dead, ids, **p, seeds=zero, positions=zero)
    assert (int(token), int(status)) == (0, NO_TOKEN)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_candidates_give_their_ids(impl: str, device: str) -> None:
    """Masses of the floored rule: 1227133513 = floor(2^31 * 4 / 7), so the total is 2^31 - 2."""
    values = torch.tensor([[0.0, -1.0, -2.0]], device=device) * 0.6931471805599453
    ids = torch.tensor([[900, 7, 55]], device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    p = parameters(1, torch.device(device), 1.0, 0, 1.0, 0.0)
    with use_kernels(impl):
        token, _ = ops.sample_seeds_compat(values, ids, **p, seeds=zero + 42, positions=zero)
        p["temperature"].zero_()
        greedy, _ = ops.sample_seeds_compat(values, ids, **p, seeds=zero + 42, positions=zero)
    assert (int(token), int(greedy)) == (900, 900)
