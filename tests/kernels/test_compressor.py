"""The compressor: golden latents, every split of a sequence, roll-back, padding, parity."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.data.golden.check_golden import Golden, OpCase
from tests.kernels.parity import check_parity
from tinfer import ops
from tinfer.registry import use_kernels
from tinfer.testing.aot import TARGETS, check_family
from tinfer.testing.cases import Case, cases

CASES = cases(family="compressor")
GOLDEN = Golden(Path(__file__).parents[1] / "data" / "golden").ops("compressor")
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
    check_family("compressor", target)


def pool(kv: Tensor, score: Tensor, state: Tensor, ratio: int, start: int, seq: int = 0) -> Tensor:
    """One sequence's rows from position `start`."""
    positions = torch.arange(start, start + len(kv), device=kv.device)
    return ops.compress_pool(kv, score, positions, torch.full_like(positions, seq), state, ratio)


def run(kv: Tensor, score: Tensor, ratio: int, splits: list[int], ring: int = 12) -> Tensor:
    """A whole sequence in pieces that end at `splits`; state starts as NaN."""
    state = torch.full((1, ring, 2, kv.shape[1]), float("nan"), device=kv.device)
    bounds = [0, *splits, len(kv)]
    parts = [pool(kv[a:b], score[a:b], state, ratio, a) for a, b in itertools.pairwise(bounds)]
    return torch.cat(parts)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c.case)
def test_golden(case: OpCase, impl: str, device: str) -> None:
    """Prefill and decode steps of the release, with our norm behind the pooling."""
    p, t = case.params, {k: v.to(device) for k, v in case.inputs.items()}
    ratio, latents = p["ratio"], []
    for x in t["x"]:
        if ratio == 1:
            pooled = ops.linear_bf16(x, t["wkv"])
        else:
            kv, score = ops.linear_fp32(x, t["wkv"]), ops.linear_fp32(x, t["wgate"])
            splits = list(range(p["prefill_len"], len(x)))
            with use_kernels(impl):
                pooled = run(kv, score, ratio, splits)
        done = torch.arange(1, len(x) + 1, device=device) % ratio == 0
        latents.append(ops.rms_norm(pooled, t["norm"], p["eps"])[done])
    case.check({"latents": torch.stack(latents)})


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_every_split_gives_the_same_bits(impl: str, ratio: int, device: str, seed: int) -> None:
    """KV-12: a pair of which one token came with the call before, as after 7 tokens reused."""
    g = torch.Generator(device).manual_seed(seed)
    kv, score = (torch.randn(11, 16, generator=g, device=device) for _ in range(2))
    with use_kernels(impl):
        whole = run(kv, score, ratio, [])
        assert not whole.isnan().any()
        for split in range(1, 11):
            assert torch.equal(run(kv, score, ratio, [split]), whole)
        assert torch.equal(run(kv, score, ratio, list(range(1, 11))), whole)
        assert torch.equal(run(kv, score, ratio, [6], ring=ratio), whole)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("accepted", range(1, 6))
def test_rejected_drafts_leave_no_trace(impl: str, accepted: int, device: str, seed: int) -> None:
    """Verify 6 rows, keep some, go on with other rows: as if the rejected had never been."""
    g = torch.Generator(device).manual_seed(seed)
    kv, score = (torch.randn(20, 8, generator=g, device=device) for _ in range(2))
    for start in (7, 8):
        drafted = kv.clone()
        drafted[start + accepted : start + 6] = 99.0
        with use_kernels(impl):
            whole = run(kv, score, 2, [])
            state = torch.full((1, 2 + 6, 2, 8), float("nan"), device=device)
            pool(kv[:start], score[:start], state, 2, 0)
            pool(drafted[start : start + 6], score[start : start + 6], state, 2, start)
            at = start + accepted
            assert torch.equal(pool(kv[at:], score[at:], state, 2, at), whole[at:])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_order_of_sequences_and_padding(impl: str, device: str, seed: int) -> None:
    """KV-15: results follow the sequence's row of state, padding touches nothing."""
    g = torch.Generator(device).manual_seed(seed)
    kv, score = (torch.randn(4, 8, generator=g, device=device) for _ in range(2))
    state = torch.randn(3, 4, 2, 8, generator=g, device=device)
    before = state.clone()
    positions = torch.tensor([5, -1, 9, -1], device=device)
    seq = torch.tensor([2, -1, 1, -1], device=device)
    swap = torch.tensor([2, 1, 0, 3], device=device)
    other = state.clone()
    with use_kernels(impl):
        a = ops.compress_pool(kv, score, positions, seq, state, 2)
        b = ops.compress_pool(kv[swap], score[swap], positions[swap], seq[swap], other, 2)
    assert torch.equal(a[swap], b)
    assert torch.equal(state, other)
    assert torch.equal(state[0], before[0])
    assert not a[[1, 3]].any()


@pytest.mark.interpret
@pytest.mark.parametrize(("samples", "step"), [(2, 2), (4, 16), (16, 4)])
def test_search_for_the_last_row(
    samples: int, step: int, device: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that end at, before and behind a sample, and beyond all samples of one round."""
    from tinfer.kernels import compressor

    monkeypatch.setattr(compressor, "SAMPLES", samples)
    monkeypatch.setattr(compressor, "STEP", step)
    g = torch.Generator(device).manual_seed(seed)
    lengths = [1, 2, 3, 4, 5, 8, 9, 16, 17, 33]
    seq = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]).to(device)
    positions = torch.cat([torch.arange(n) + i for i, n in enumerate(lengths)]).to(device)
    kv, score = (torch.randn(len(seq), 8, generator=g, device=device) for _ in range(2))
    states = [torch.zeros(len(lengths), 3, 2, 8, device=device) for _ in range(2)]
    for impl, state in zip(("triton", "ref"), states, strict=True):
        with use_kernels(impl):
            ops.compress_pool(kv, score, positions, seq, state, 2)
    assert torch.equal(*states)


@pytest.mark.gpu
def test_capture(device: str, seed: int) -> None:
    g = torch.Generator(device).manual_seed(seed)
    kv, score = (torch.randn(4, 64, generator=g, device=device) for _ in range(2))
    positions, seq = torch.tensor([3, 8, 9, 0], device=device), torch.arange(4, device=device)
    state = torch.randn(4, 8, 2, 64, generator=g, device=device)
    start = state.clone()
    arguments = (kv, score, positions, seq, state, 2)
    ops.compress_pool(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.compress_pool(*arguments)
    positions.add_(1)
    state.copy_(start)
    graph.replay()
    again = start.clone()
    with use_kernels("ref"):
        expected = ops.compress_pool(kv, score, positions, seq, again, 2)
    assert torch.equal(state, again)
    assert (out.float() - expected.float()).abs().max() <= 2.0**-7 * expected.abs().max()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_wrong_arguments(impl: str, device: str) -> None:
    kv, at = torch.zeros(1, 8, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    state = torch.zeros(1, 4, 2, 8, device=device)
    with use_kernels(impl):
        with pytest.raises(TypeError, match="compress_pool: kv must be float32"):
            ops.compress_pool(kv.bfloat16(), kv, at, at, state, 2)
        with pytest.raises(ValueError, match=r"compress_pool: state must be \[S, ring >= 8"):
            ops.compress_pool(kv, kv, at, at, state, 8)
        with pytest.raises(ValueError, match="compress_pool: ratio must be positive, got 0"):
            ops.compress_pool(kv, kv, at, at, state, 0)
        with pytest.raises(ValueError, match="compress_pool: seq must be"):
            ops.compress_pool(kv, kv, at, at.repeat(2), state, 2)
        with pytest.raises(ValueError, match=r"compress_pool: kv and score must be \[T, D\]"):
            ops.compress_pool(kv[0, 0], kv, at, at, state, 2)
