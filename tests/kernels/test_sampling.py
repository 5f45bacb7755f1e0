"""The sampler: worked examples, order independence, cuts at ties, dead rows, the distribution."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.kernels.capture import check_capture
from tests.kernels.parity import check_parity
from tests.kernels.sampling_pairs import compare_pairs
from tinfer import ops
from tinfer.compat import masses
from tinfer.kernels import _sample_cut, _sample_row, sampling
from tinfer.kernels._masses import octaves_and_weight, octaves_q24, weight_q31
from tinfer.kernels._sample_slices import BEGIN, END
from tinfer.kernels._target import target
from tinfer.registry import use_kernels
from tinfer.testing.aot import TARGETS, check_family
from tinfer.testing.cases import Case, cases
from tinfer.testing.cases.sampling import dead_rows, logits_of, mixed_parameters, parameters

CASES = cases(family="sampling")
IMPLEMENTATIONS = ("ref", pytest.param("triton", marks=pytest.mark.interpret))
DATA = json.loads((Path(__file__).parents[1] / "data" / "sampling" / "examples.json").read_text())
INF, NAN = math.inf, math.nan
ROW = [12.5, 11.25, 11.0, 9.75, 3.0]


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


@pytest.mark.gpu
@pytest.mark.slow
def test_ten_thousand_pairs_equal_the_reference_on_the_cpu(seed: int) -> None:
    outcome = compare_pairs("cuda", 10000, seed)
    assert outcome.pairs >= 10000
    assert outcome.vocabulary_rows >= 400
    assert outcome.different == 0, outcome.first


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_compiles(target: str) -> None:
    check_family("sampling", target)


# ---------------------------------------------------------------- helpers
def row_parameters(
    device: str,
    rows: int = 1,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> dict[str, Tensor]:
    return parameters(rows, torch.device(device), temperature, top_k, top_p, min_p)


def mass_of(logits: list[float], device: str, **values: float) -> list[int]:
    given = torch.tensor([logits], device=device)
    mass, status = ops.token_masses(given, **row_parameters(device, **values))  # type: ignore[arg-type]
    assert status.tolist() == [0]
    return [int(m) for m in mass[0]]


def tokens_of(
    logits: Tensor, p: dict[str, Tensor], seed: int, positions: list[int]
) -> tuple[list[int], list[int]]:
    rows, device = len(logits), logits.device
    seeds = torch.full((rows,), seed, dtype=torch.int64, device=device)
    at = torch.tensor(positions, dtype=torch.int64, device=device)
    tokens, status = ops.sample(logits, **p, seeds=seeds, positions=at)
    return tokens.tolist(), status.tolist()


def stream_word(number: int) -> Tensor:
    """int64 [1]: word `number` of the stream (42, 0)."""
    zero = torch.zeros(1, dtype=torch.int64)
    return ops.philox_words.ref(zero + 42, zero, zero + number, 1)[0]


# ---------------------------------------------------------------- worked examples
@pytest.mark.parametrize("example", DATA["units"])
def test_weights_masses_and_tokens(example: dict[str, Any]) -> None:
    weight = masses.exp2_q31(torch.tensor([example["y"]], dtype=torch.float32))
    assert weight[0].tolist() == example["weights"]
    mass = masses.normalize(weight)
    assert mass[0].tolist() == example["masses"]
    assert [int(masses.draw(mass, stream_word(i))) for i in range(4)] == example["tokens"]


@pytest.mark.parametrize("example", DATA["rows"])
def test_slope_and_weights_of_a_row(example: dict[str, Any]) -> None:
    temperature = torch.tensor([example["temperature"]])
    slope = torch.tensor(masses.LOG2E, dtype=torch.float32) / temperature
    assert f"{int(slope.view(torch.int32)):08x}" == example["slope"]
    assert masses.weights(torch.tensor([ROW]), temperature)[0].tolist() == example["weights"]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("example", DATA["rows"])
def test_masses_of_a_row(example: dict[str, Any], impl: str, device: str) -> None:
    with use_kernels(impl):
        got = mass_of(ROW, device, temperature=example["temperature"])
    assert got == example["masses"]
    mass = torch.tensor([got])
    assert [int(masses.draw(mass, stream_word(i))) for i in range(8)] == example["tokens"]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("example", DATA["top_p"])
def test_top_p_of_a_row(example: dict[str, Any], impl: str, device: str) -> None:
    with use_kernels(impl):
        got = mass_of(ROW, device, temperature=example["temperature"], top_p=0.9)
    assert got == example["masses"]
    if example["total"] is not None:
        total = torch.tensor([example["total"]])
        weight = masses.weights(torch.tensor([ROW]), torch.tensor([example["temperature"]]))
        assert int(weight.sum()) == example["total"]
        assert int(masses.top_p_threshold(total, torch.tensor([0.9]))) == example["threshold"]


def test_top_p_threshold_is_exact(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    totals = torch.randint(1, 2**48, (2000,), generator=g)
    shares = torch.rand(2000, generator=g)
    got = masses.top_p_threshold(totals, shares)
    want = [
        int(w) * math.floor(float(p) * 2**24) >> 24 for w, p in zip(totals, shares, strict=True)
    ]
    assert got.tolist() == want


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_the_word_is_that_of_the_absolute_position(impl: str, device: str) -> None:
    """Position p draws with word 4p of the stream (seed, 0)."""
    logits = torch.tensor([ROW] * 3, device=device)
    mass = torch.tensor([DATA["rows"][0]["masses"]])
    with use_kernels(impl):
        got = tokens_of(logits, row_parameters(device, 3), 42, [0, 1, 2**33 + 5])[0]
    assert got == [int(masses.draw(mass, stream_word(4 * p))) for p in (0, 1, 2**33 + 5)]


# ---------------------------------------------------------------- independence
@pytest.mark.interpret
def test_masses_do_not_depend_on_the_split(
    seed: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = torch.Generator(device).manual_seed(seed)
    logits = logits_of("ties", g, 1, 150)
    p = row_parameters(device, 1, top_k=90, top_p=0.95)
    want = ops.token_masses.ref(logits, **p)[0]
    for block, warps, tile, tile_warps in ((256, 16, 256, 1), (64, 1, 16, 2), (16, 2, 8, 1)):
        tiles = (block, warps, tile, tile_warps)
        monkeypatch.setattr(sampling, "_sample_tiles", lambda *_, tiles=tiles: tiles)
        with use_kernels("triton"):
            assert torch.equal(ops.token_masses(logits, **p)[0], want), tiles


@triton.jit
def _weights_kernel(first, same, NATIVE: tl.constexpr, SIZE: tl.constexpr):
    """Whether fp32 logits of consecutive bit patterns have weights that `weight_q31` gives too."""
    bits = first + tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = (bits.to(tl.uint32) | 0x80000000).to(tl.float32, bitcast=True)
    q, w = octaves_and_weight(x, 0.0, 1.0, NATIVE)
    equal = (w == weight_q31(x, 0.0, 1.0)) & (q == octaves_q24(x, 0.0, 1.0))
    tl.store(same + tl.program_id(0), tl.sum(equal.to(tl.int32)) == SIZE)


@pytest.mark.gpu
def test_weights_by_ptx_equal_those_by_integers() -> None:
    """Every fp32 from 0 down to -33, and NaN."""
    size, programs = 1024, 1 << 16
    if not target(torch.device("cuda")).ptx:
        pytest.skip("no PTX")
    for first in (*range(0, 0x42080000, size * programs), 0x7F800000 - 1024):
        same = torch.zeros(programs, dtype=torch.bool, device="cuda")
        _weights_kernel[(programs,)](first, same, True, size, enable_fp_fusion=False)
        assert bool(same.all()), hex(first)


@triton.jit
def _wrong_slices(record, token, first, is_estimate, SLICES: tl.constexpr, BLOCK: tl.constexpr):
    """`store_slices` of an estimate that missed the token's slice by the whole row."""
    at_end = token // BLOCK < SLICES // 2
    tl.store(record + BEGIN, tl.where(at_end, SLICES - 1, 0))
    tl.store(record + END, tl.where(at_end, SLICES, 1))


@pytest.mark.interpret
@pytest.mark.parametrize("wrong", [False, True])
def test_uncertain_rows_are_drawn_exactly(
    wrong: bool, seed: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No estimate is trusted, and then not even with about where the token is."""
    if device != "cpu":
        pytest.skip("patches what compiled kernels hold as constants")
    monkeypatch.setattr(_sample_row, "SLACK", tl.constexpr(1e12))
    monkeypatch.setattr(_sample_cut, "CLOSE_SLACK", tl.constexpr(1e12))
    if wrong:
        monkeypatch.setattr(_sample_row, "store_slices", _wrong_slices)
        monkeypatch.setattr(_sample_cut, "store_slices", _wrong_slices)
    monkeypatch.setattr(sampling, "_sample_tiles", lambda *_: (16, 1, 8, 1))
    g = torch.Generator(device).manual_seed(seed)
    logits = logits_of("normal", g, 12, 150)
    logits[:4, 40] = 9.0
    p = row_parameters(device, 12)
    p["top_p"][6:] = 0.97
    p["min_p"][[5, 11]] = 1e-4
    at = torch.arange(12, device=device)
    want = ops.sample.ref(logits, **p, seeds=at, positions=at)[0]
    with use_kernels("triton"):
        assert torch.equal(ops.sample(logits, **p, seeds=at, positions=at)[0], want)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_seed_fixes_the_token_whatever_the_batch(impl: str, seed: int, device: str) -> None:
    """SM-01: alone, first and last in a batch of other requests."""
    g = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(4, 70, generator=g, device=device)
    p = mixed_parameters(g, 4)
    mine = {"temperature": 1.0, "top_k": 50, "top_p": 0.97, "min_p": 0.0}
    for name, value in mine.items():
        p[name][[0, 3]] = value
    logits[3] = logits[0]
    with use_kernels(impl):
        both = tokens_of(logits, p, 7, [11] * 4)[0]
        alone = tokens_of(logits[:1], {k: v[:1] for k, v in p.items()}, 7, [11])[0]
    assert both[0] == both[3] == alone[0]


# ---------------------------------------------------------------- rules
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_parameters_at_their_limits(impl: str, device: str) -> None:
    """SM-04"""
    logits = torch.tensor([[0.0, 100.0, 9.0]] * 8, device=device)
    p = row_parameters(device, 8)
    p["temperature"][:4] = torch.tensor([0.0, 1e-4, NAN, INF])
    p["top_k"][4:] = torch.tensor([0, -1, 1, 10**6])
    with use_kernels(impl):
        tokens, status = tokens_of(logits, p, 3, list(range(8)))
    assert tokens == [1, 1, 0, 0, 1, 1, 1, 1]
    bad = masses.BAD_PARAMETER
    assert status == [0, 0, bad, bad, 0, 0, 0, 0]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_dead_rows_end_alone(impl: str, seed: int, device: str) -> None:
    """SM-08: the rows beside them draw what they draw without them."""
    logits = dead_rows(torch.Generator(device).manual_seed(seed), 40)
    with use_kernels(impl):
        tokens, status = tokens_of(logits, row_parameters(device, 5), 5, [9] * 5)
        alone = tokens_of(logits[:1], row_parameters(device), 5, [9])[0]
    assert status == [0, masses.NOT_FINITE, masses.NOT_FINITE, masses.NO_TOKEN, 0]
    assert tokens == [alone[0], 0, 0, 0, 13]
    assert "no valid token" in ops.status_text(status[3])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_ties_at_the_cut_keep_the_lower_id(impl: str, device: str) -> None:
    logits = [1.0, 3.0, 1.0, 1.0, 3.0, 1.0]
    with use_kernels(impl):
        by_k = mass_of(logits, device, top_k=4)
        half = mass_of([0.0] * 8, device, top_p=0.5)
    assert [m > 0 for m in by_k] == [True, True, True, False, True, False]
    # The exclusive prefix of the fifth candidate is exactly half: it is kept.
    assert [m > 0 for m in half] == [True] * 5 + [False] * 3


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "cut", [{"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 0.0}]
)
def test_the_hardest_cuts_leave_the_first_candidate(
    cut: dict[str, float], impl: str, device: str
) -> None:
    with use_kernels(impl):
        got = mass_of([1.0, 5.0, 4.9, 5.0 - 1e-6], device, **cut)
    assert got == [0, 2**31, 0, 0]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_min_p_keeps_what_is_as_likely_as_its_share(impl: str, device: str) -> None:
    step = math.log(2.0)
    with use_kernels(impl):
        got = mass_of([0.0, -0.999 * step, -1.001 * step, -INF], device, min_p=0.5)
    assert [m > 0 for m in got] == [True, True, False, False]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_rows_masses_sum_to_one_and_the_dead_have_none(impl: str, seed: int, device: str) -> None:
    g = torch.Generator(device).manual_seed(seed)
    logits = logits_of("masked", g, 3, 200)
    with use_kernels(impl):
        mass, _ = ops.token_masses(logits, **row_parameters(device, 3, temperature=0.7))
    assert mass.sum(-1).tolist() == [2**31] * 3
    assert not mass[logits == -INF].any()
    assert bool((mass >= 0).all())


# ---------------------------------------------------------------- the distribution
def drawn(probabilities: list[float], draws: int) -> Tensor:
    """Counts of the reference's tokens over `draws` positions of one seed."""
    logits = torch.tensor(probabilities).log()[None]
    mass = ops.token_masses.ref(logits, **row_parameters("cpu"))[0]
    counts = torch.zeros(len(probabilities), dtype=torch.int64)
    for start in range(0, draws, 50000):
        positions = torch.arange(start, min(start + 50000, draws))
        word = masses.first_word(torch.full_like(positions, 77), positions, masses.SAMPLE)
        counts += masses.draw(mass, word).bincount(minlength=len(probabilities))
    return counts


def test_frequencies_are_the_probabilities() -> None:
    """SM-02: noise added to probabilities instead of their logarithms would give .464."""
    counts = drawn([0.97, 0.01, 0.01, 0.01], 200_000)
    assert abs(int(counts[0]) / 200_000 - 0.97) < 0.002


def test_chi_square_of_a_million_draws() -> None:
    p = torch.tensor(
        [0.3, 0.2, 0.15, 0.1, 0.1, 0.08, 0.04, 0.02, 0.009, 0.001], dtype=torch.float64
    )
    draws = 1 << 20
    expected = p * draws
    counts = drawn(p.tolist(), draws)
    chi = float(((counts - expected) ** 2 / expected).sum())
    assert chi < 27.88  # 9 degrees of freedom, 0.999
    assert int(counts.sum()) == draws


@pytest.mark.gpu
@pytest.mark.parametrize("values", [(1.0, 0, 1.0, 0.0), (1.0, 0, 0.95, 0.0), (0.8, 300, 0.9, 0.01)])
def test_chi_square_of_a_million_draws_by_the_kernel(
    values: tuple[float, ...], seed: int, device: str
) -> None:
    g = torch.Generator(device).manual_seed(seed)
    row = torch.randn(1, 1000, generator=g, device=device) * 2
    mass = ops.token_masses.ref(row, **parameters(1, row.device, *values))[0][0].cpu()
    rows, batches = 1 << 15, 1 << 5
    counts = torch.zeros(1000, dtype=torch.int64)
    for batch in range(batches):
        logits, p = row.expand(rows, -1).contiguous(), parameters(rows, row.device, *values)
        with use_kernels("triton"):
            tokens, _ = tokens_of(logits, p, seed, [*range(batch * rows, (batch + 1) * rows)])
        counts += torch.tensor(tokens).bincount(minlength=1000)
    assert not counts[mass == 0].any()
    # Tokens by expected count, grouped into cells of at least 100.
    order = mass.argsort(descending=True)
    expected = mass[order].double() * (rows * batches / 2**31)
    cell = (expected.cumsum(0) / 100).floor().long()
    e = torch.zeros(int(cell[-1]) + 1).double().index_add_(0, cell, expected)
    o = torch.zeros_like(e).index_add_(0, cell, counts[order].double())
    filled = e > 50
    freedom = int(filled.sum()) - 1
    chi = float(((o - e)[filled] ** 2 / e[filled]).sum())
    # Wilson and Hilferty: the cube root of chi / freedom is normal; 4 standard deviations.
    spread = (2 / (9 * freedom)) ** 0.5
    assert abs((chi / freedom) ** (1 / 3) - (1 - spread**2)) < 4 * spread


@pytest.mark.interpret
def test_pairs_equal_the_reference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few of the pairs that `sampling_pairs` compares by the thousand on a device."""
    monkeypatch.setattr("tests.kernels.sampling_pairs.SHAPES", ((40, 12, 1.0),))
    outcome = compare_pairs("cuda" if torch.cuda.is_available() else "cpu", 12, seed)
    assert outcome.pairs == 12
    assert outcome.different == 0, outcome.first
