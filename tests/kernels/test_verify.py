"""Verification: worked examples, the output's distribution, greedy identity, equality."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.capture import check_capture
from tests.kernels.parity import check_parity
from tinfer import ops
from tinfer.compat import masses
from tinfer.registry import use_kernels
from tinfer.testing.aot import TARGETS, check_family
from tinfer.testing.cases import Case, cases
from tinfer.testing.cases.sampling import parameters

CASES = cases(family="verify")
IMPLEMENTATIONS = ("ref", pytest.param("triton", marks=pytest.mark.interpret))
DATA = json.loads((Path(__file__).parents[1] / "data" / "sampling" / "examples.json").read_text())
TARGET = [1227133514, 613566756, 306783378]


@pytest.mark.interpret
@pytest.mark.parametrize("case", [c for c in CASES if not c.real], ids=lambda c: c.id)
def test_parity(case: Case, seed: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_parity(case, seed, device, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in CASES if c.real], ids=lambda c: c.id)
def test_parity_real(case: Case, seed: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_parity(case, seed, device, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in CASES if c.real], ids=lambda c: c.id)
def test_capture(case: Case, seed: int) -> None:
    check_capture(case, seed)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_compiles(target: str) -> None:
    check_family("verify", target)


# ---------------------------------------------------------------- by rejection
@pytest.mark.parametrize("example", DATA["verify"])
def test_worked_examples(example: dict[str, Any]) -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    words = ops.philox_words.ref(zero + 42, zero, zero, 4)[0].tolist()
    draft = example["draft"] or [2**31 if i == example["token"] else 0 for i in range(3)]
    p, q = TARGET[example["token"]], draft[example["token"]]
    assert [(w >> 1) * q < p << 31 for w in words[:3]] == example["accepted"]
    left = (torch.tensor([TARGET]) - torch.tensor([draft])).clamp(min=0)
    residual = masses.normalize(left)
    assert residual[0].tolist() == example["residual"]
    tokens = [int(masses.draw(residual, torch.tensor([w]))) for w in words]
    assert tokens == example["tokens"]


def two_row_requests(
    target: list[float], draft: list[float] | None, steps: int, seed: int, device: str
) -> tuple[dict[str, Any], Tensor]:
    """Requests of one draft each: (arguments of verify_drafts, the drafted tokens)."""
    position = torch.arange(steps, device=device)
    seeds = torch.full_like(position, seed)
    p = torch.tensor(target, device=device).log()
    q = p if draft is None else torch.tensor(draft, device=device).log()
    one = parameters(steps, torch.device(device), 1.0, 0, 1.0, 0.0)
    if draft is None:
        drafted = p.argmax().expand(steps)
    else:
        rows = q.expand(steps, -1).contiguous()
        drafted = ops.sample.ref(rows, **one, seeds=seeds, positions=position, purpose=2)[0]
    rows = 2 * steps
    arguments = {
        "logits": p.expand(rows, -1).contiguous(),
        "draft_logits": None if draft is None else q.expand(rows, -1).contiguous(),
        "draft_tokens": drafted.repeat_interleave(2),
        "cu_rows": torch.arange(0, rows + 1, 2, dtype=torch.int32, device=device),
        **parameters(rows, torch.device(device), 1.0, 0, 1.0, 0.0),
        "seeds": seeds.repeat_interleave(2),
        "positions": torch.stack([position, position + steps], dim=1).flatten(),
    }
    return arguments, drafted


def first_tokens(arguments: dict[str, Any], drafted: Tensor) -> tuple[float, Tensor]:
    """(acceptance, frequencies of every request's first output token)."""
    accept_len, following, status = ops.verify_drafts.ref(**arguments)
    assert not status.any()
    tokens = torch.where(accept_len > 0, drafted, following)
    width = arguments["logits"].shape[1]
    counts = tokens.bincount(minlength=width).double()
    return float(accept_len.double().mean()), counts / len(tokens)


def test_output_is_distributed_as_the_target(seed: int) -> None:
    """SP-07: acceptance is the overlap .60 of the two, the output follows the target.

    Acceptance by equality would give .26 and [.4615, .3462, .1923].
    """
    steps, target = 200_000, [0.6, 0.3, 0.1]
    arguments, drafted = two_row_requests(target, [0.2, 0.3, 0.5], steps, seed, "cpu")
    acceptance, frequencies = first_tokens(arguments, drafted)
    assert abs(acceptance - 0.6) < 4 * (0.6 * 0.4 / steps) ** 0.5
    error = (frequencies - torch.tensor(target).double()).abs()
    assert float(error.max()) < 4 * (0.25 / steps) ** 0.5


def test_greedy_drafts_are_accepted_as_likely_as_they_are(seed: int) -> None:
    steps, target = 40_000, [0.6, 0.3, 0.1]
    arguments, drafted = two_row_requests(target, None, steps, seed, "cpu")
    acceptance, frequencies = first_tokens(arguments, drafted)
    assert abs(acceptance - 0.6) < 4 * (0.6 * 0.4 / steps) ** 0.5
    error = (frequencies - torch.tensor(target).double()).abs()
    assert float(error.max()) < 4 * (0.25 / steps) ** 0.5


def test_drafts_are_drawn_at_their_own_temperature(seed: int) -> None:
    """SP-07: logits [2, 1.5, 1, .5] give token 0 with probability .455, not always."""
    steps = 4000
    logits = torch.tensor([[2.0, 1.5, 1.0, 0.5]]).expand(steps, 4).contiguous()
    position = torch.arange(steps)
    one = parameters(steps, torch.device("cpu"), 1.0, 0, 1.0, 0.0)
    keys = {"seeds": torch.full_like(position, seed), "positions": position}
    drafted = ops.sample.ref(logits, **one, **keys, purpose=2)[0]
    assert abs(int((drafted == 0).sum()) - 1820) < 4 * (steps * 0.455 * 0.545) ** 0.5


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_the_kernel_decides_as_the_reference_over_many_steps(
    impl: str, seed: int, device: str
) -> None:
    arguments, _ = two_row_requests([0.6, 0.3, 0.1], [0.2, 0.3, 0.5], 6, seed, device)
    with use_kernels(impl):
        got = ops.verify_drafts(**arguments)
    for mine, want in zip(got, ops.verify_drafts.ref(**arguments), strict=True):
        assert torch.equal(mine, want)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(4))
def test_the_kernel_decides_as_the_reference_over_200_000_steps(
    part: int, seed: int, device: str
) -> None:
    """A quarter of them at a time, for their memory."""
    arguments, _ = two_row_requests([0.6, 0.3, 0.1], [0.2, 0.3, 0.5], 50_000, seed + part, device)
    with use_kernels("triton"):
        got = ops.verify_drafts(**arguments)
    for mine, want in zip(got, ops.verify_drafts.ref(**arguments), strict=True):
        assert torch.equal(mine, want)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_temperature_zero_accepts_the_argmax_alone(impl: str, device: str) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]] * 5, device=device)
    zero = torch.zeros(5, dtype=torch.int64, device=device)
    with use_kernels(impl):
        accept_len, following, _ = ops.verify_drafts(
            logits,
            None,
            torch.tensor([1, 1, 0, 2, 0], device=device),
            torch.tensor([0, 3, 5], dtype=torch.int32, device=device),
            **parameters(5, torch.device(device), 0.0, 0, 1.0, 0.0),
            seeds=zero,
            positions=zero,
        )
    assert accept_len.tolist() == [2, 0]
    assert following.tolist() == [1, 1]


# ---------------------------------------------------------------- by equality
@pytest.mark.parametrize("block", [1, 2, 3, 4, 5])
def test_speculation_with_the_same_words_changes_no_token(block: int, seed: int) -> None:
    """Target tokens are drawn with the word of their position, whatever was drafted before."""
    g = torch.Generator().manual_seed(seed)
    length, columns = 1000, 12
    logits = torch.randn(length + block + 1, columns, generator=g)
    positions = torch.arange(len(logits))
    p = parameters(len(logits), torch.device("cpu"), 1.0, 0, 0.95, 0.0)
    keys = {"seeds": torch.full_like(positions, 7), "positions": positions}
    plain = ops.sample.ref(logits, **p, **keys)[0]
    out: list[int] = []
    accepted = 0
    while len(out) < length:
        at = len(out)
        draft = logits[at : at + block].argmax(-1)
        accept_len, _, following = ops.get_accept_result.ref(
            plain[at : at + block + 1],
            torch.cat([draft, draft[:1]]),
            torch.tensor([0, block + 1], dtype=torch.int32),
            None,
            None,
        )
        out += [int(t) for t in draft[: int(accept_len)]] + [int(following)]
        accepted += int(accept_len)
    assert out[:length] == plain[:length].tolist()
    assert accepted > 0


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_acceptance_by_example(impl: str, device: str) -> None:
    def of(values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    target, draft = of([5, 6, 7, 8, 9, 1]), of([5, 6, 0, 8, 8, 1])
    cu = of([0, 4, 4, 5, 6], torch.int32)
    golden, mask = of([5, 9, 9, 9, 4, 4]), torch.tensor([True, False, True, False], device=device)
    with use_kernels(impl):
        plain = ops.get_accept_result(target, draft, cu, None, None)
        forced = ops.get_accept_result(target, draft, cu, golden, mask)
    assert plain[0].tolist() == [2, 0, 0, 0]
    assert plain[1].tolist() == [True, True, False, False, False, False]
    assert plain[2].tolist() == [7, -1, 9, 1]
    assert forced[0].tolist() == [1, 0, 0, 0]
    assert forced[2].tolist() == [9, -1, 4, 1]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_golden_arguments_come_together(impl: str, device: str) -> None:
    tokens = torch.zeros(2, dtype=torch.int64, device=device)
    cu = torch.tensor([0, 2], dtype=torch.int32, device=device)
    with use_kernels(impl), pytest.raises(ValueError, match="must be given together"):
        ops.get_accept_result(tokens, tokens, cu, tokens, None)
