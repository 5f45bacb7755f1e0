"""Permutation by expert and combination: order, padding, empty experts, and the dense loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.parity import check_parity
from tinfer import ops
from tinfer.compat.moe_permute import expert_combine, expert_permute, permuted_rows
from tinfer.registry import use_kernels
from tinfer.testing.aot import TARGETS, check_family
from tinfer.testing.cases import Case, cases
from tinfer.testing.cases.moe_permute import choices, combined
from tinfer.testing.compare import assert_equal_tree, assert_exact

CASES = cases(family="moe_permute")
IMPLEMENTATIONS = ("ref", pytest.param("triton", marks=pytest.mark.interpret))
each_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


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
    check_family("moe_permute", target)


def generator(seed: int, device: str) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


# ---------------------------------------------------------------- permutation
def loop(
    ids: Tensor, experts: int, alignment: int
) -> tuple[list[int], list[int], list[int], list[int]]:
    """(token, slot) of every row, start and end of every expert, by the definition."""
    tokens, slots, starts, ends = [], [], [], []
    for expert in range(experts):
        starts.append(len(tokens))
        for token, row in enumerate(ids.tolist()):
            for slot, e in enumerate(row):
                if e == expert:
                    tokens.append(token)
                    slots.append(slot)
        ends.append(len(tokens))
        while len(tokens) % alignment:
            tokens.append(-1)
            slots.append(-1)
    return tokens, slots, starts, ends


@each_implementation
@pytest.mark.parametrize(
    ("tokens", "topk", "experts", "alignment"), [(23, 3, 7, 4), (3, 2, 384, 16)]
)
def test_order(
    tokens: int, topk: int, experts: int, alignment: int, impl: str, device: str, seed: int
) -> None:
    """By expert, then token, then slot; every filled and every padding row accounted for."""
    ids = choices(generator(seed, device), tokens, topk, experts, 0.2)
    with use_kernels(impl):
        out = ops.expert_permute(ids, experts, alignment)
    token, slot, pos, start, end = (x.tolist() for x in out)
    want = loop(ids, experts, alignment)
    used = len(want[0])
    assert (token[:used], slot[:used], start, end) == want
    assert set(token[used:] + slot[used:]) <= {-1}
    assert len(token) == permuted_rows(tokens, topk, experts, alignment) >= used
    for t, row in enumerate(ids.tolist()):
        for k, e in enumerate(row):
            assert (pos[t][k] == -1) if e < 0 else ((token[pos[t][k]], slot[pos[t][k]]) == (t, k))


@pytest.mark.interpret
@pytest.mark.parametrize("tokens", [3, 40, 300])
def test_every_row_is_written(
    tokens: int, monkeypatch: pytest.MonkeyPatch, device: str, seed: int
) -> None:
    """Memory that held something else: -1 comes from the kernel, not from a lucky allocation."""
    ids = choices(generator(seed, device), tokens, 2, 30, 0.2)
    want = expert_permute(ids, 30, 64)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(7))
    with use_kernels("triton"):
        assert_equal_tree(ops.expert_permute(ids, 30, 64), want)


@each_implementation
def test_ids_outside_the_experts_are_dropped(impl: str, device: str) -> None:
    ids = torch.tensor([[0, 4], [-7, 3], [2**30, 0]], dtype=torch.int32, device=device)
    with use_kernels(impl):
        token, _, pos, start, end = ops.expert_permute(ids, 4, 2)
    assert pos.tolist() == [[0, -1], [-1, 2], [-1, 1]]
    assert token[:4].tolist() == [0, 2, 1, -1]
    assert (start.tolist(), end.tolist()) == ([0, 2, 2, 2], [2, 2, 2, 3])


def test_rows_hold_the_worst_case() -> None:
    """All experts hit with one row over a multiple, and fewer rows than experts."""
    assert permuted_rows(0, 6, 384, 128) == 0
    assert permuted_rows(1, 6, 384, 128) == 6 * 128
    assert permuted_rows(8192, 6, 384, 128) == 97920
    ids = torch.tensor([[0, 1, 2]] * 5, dtype=torch.int32)
    assert expert_permute(ids, 3, 4)[4].max() <= permuted_rows(5, 3, 3, 4)


# ---------------------------------------------------------------- known failures
@each_implementation
@pytest.mark.parametrize("how", ["one_token", "crowd", "none"])
def test_mo06_equals_the_dense_loop(how: str, impl: str, device: str, seed: int) -> None:
    g = generator(seed, device)
    experts, topk, dim = (384, 6, 64) if how == "one_token" else (12, 6, 32)
    tokens = {"one_token": 1, "crowd": 41, "none": 0}[how]
    ids = choices(g, tokens, topk, experts, crowd=how == "crowd")
    x = torch.randn(tokens, dim, generator=g, device=device)
    factor = torch.arange(1, experts + 1, device=device).float()
    with use_kernels(impl):
        token, _, pos, start, end = ops.expert_permute(ids, experts, 16)
        rows = torch.full((len(token), dim), float("nan"), device=device)
        for e, (low, high) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
            rows[low:high] = x[token[low:high].long()] * factor[e]
        got = ops.expert_combine(rows, pos, None)
    want = torch.zeros_like(x)
    for k in range(topk):
        want = want + x * factor[ids[:, k].long()][:, None]
    assert_exact(got, want.bfloat16())


@each_implementation
def test_mo05_experts_of_other_ranks_add_zero(impl: str, device: str) -> None:
    """A token none of whose experts are here: +0 exactly, though the buffer holds NaN."""
    ids = torch.tensor([[5, 6]], dtype=torch.int32, device=device)
    with use_kernels(impl):
        _, _, pos, _, _ = ops.expert_permute(ids - 8, 4, 16)
        rows = torch.full((32, 40), float("nan"), dtype=torch.bfloat16, device=device)
        out = ops.expert_combine(rows, pos, None)
    assert pos.tolist() == [[-1, -1]]
    assert not out.view(torch.int16).any()


@each_implementation
def test_mo10_every_token_sums_its_own_experts(impl: str, device: str) -> None:
    ids = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device=device)
    with use_kernels(impl):
        token, slot, pos, _, _ = ops.expert_permute(ids, 5, 1)
        rows = (token * 100 + slot * 10 + 1).float()[:, None].expand(-1, 8).contiguous()
        out = ops.expert_combine(rows, pos, None)
    assert out[:, 0].tolist() == [1 + 11, 101 + 111]


@each_implementation
def test_sum_order_is_slots_then_shared(impl: str, device: str) -> None:
    """2^24 + 1 + 1 - 2^24 is 0 in slot order in fp32; the shared output comes last."""
    x = torch.tensor([[1.0], [-(2.0**24)], [2.0**24], [1.0]], device=device).repeat(1, 8)
    pos = torch.tensor([[2, 0, 3, 1], [1, 2, 0, 3]], dtype=torch.int32, device=device)
    shared = torch.tensor([[3.0], [2.0**24]], dtype=torch.bfloat16, device=device).repeat(1, 8)
    with use_kernels(impl):
        out = ops.expert_combine(x, pos, shared)
    assert out[:, 0].tolist() == [3.0, 2.0**24]


# ---------------------------------------------------------------- edges
@pytest.mark.interpret
def test_more_blocks_than_programs(monkeypatch: pytest.MonkeyPatch, device: str, seed: int) -> None:
    """SA-18, TP-01: beyond the portable grid programs loop."""
    monkeypatch.setattr("tinfer.kernels.moe_permute.MAX_PROGRAMS", 2)
    g = generator(seed, device)
    ids, a = choices(g, 100, 2, 9), combined(g, 9, 3, 160)
    with use_kernels("triton"):
        assert_equal_tree(ops.expert_permute(ids, 9, 16), expert_permute(ids, 9, 16))
        assert_exact(ops.expert_combine(**a), expert_combine(**a))


@pytest.mark.interpret
@pytest.mark.parametrize("programs", [1, 65535])
def test_blocks_of_several_steps(
    programs: int, monkeypatch: pytest.MonkeyPatch, device: str, seed: int
) -> None:
    """What 20,000 tokens take: a program ranks its rows a few at a time."""
    monkeypatch.setattr("tinfer.kernels.moe_permute._permute_tiles", lambda routed: (32, 3, 4))
    monkeypatch.setattr("tinfer.kernels.moe_permute.MAX_PROGRAMS", programs)
    ids = choices(generator(seed, device), 119, 2, 5, 0.1)
    with use_kernels("triton"):
        assert_equal_tree(ops.expert_permute(ids, 5, 4), expert_permute(ids, 5, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [65535, 65536, 70000])
def test_many_rows(tokens: int, device: str, seed: int) -> None:
    """SA-18."""
    g = generator(seed, device)
    ids, a = choices(g, tokens, 6, 24), combined(g, tokens, 6, 64)
    with use_kernels("triton"):
        assert_equal_tree(ops.expert_permute(ids, 24, 64), expert_permute(ids, 24, 64))
        assert_exact(ops.expert_combine(**a), expert_combine(**a))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [16, 1024])
def test_graph_replay(tokens: int, device: str, seed: int) -> None:
    g = generator(seed, device)
    calls = [(choices(g, tokens, 6, 384, 0.1), combined(g, tokens, 6, 512)) for _ in range(3)]
    ids, a = calls[0][0].clone(), {k: v.clone() for k, v in calls[0][1].items()}

    def run() -> tuple[tuple[Tensor, ...], Tensor]:
        return ops.expert_permute(ids, 384, 64), ops.expert_combine(**a)

    with use_kernels("triton"):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            routing, out = run()
    for now, other in calls[1:]:
        ids.copy_(now)
        for name, value in other.items():
            a[name].copy_(value)
        graph.replay()
        assert_equal_tree(routing, expert_permute(now, 384, 64))
        assert_exact(out, expert_combine(**other))


@each_implementation
@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((torch.zeros(3).int(), 4, 8), ValueError, r"ids must be \[T, k\], got \(3,\)"),
        ((torch.zeros(3, 2).long(), 4, 8), TypeError, "ids must be torch.int32, got torch.int64"),
        ((torch.zeros(3, 2).int(), 0, 8), ValueError, "num_experts must be >= 1, got 0"),
        ((torch.zeros(3, 2).int(), 4, 0), ValueError, "alignment must be >= 1, got 0"),
    ],
)
def test_permute_errors(
    impl: str, args: tuple[Tensor, int, int], error: type, message: str
) -> None:
    with use_kernels("ref" if impl == "ref" else "auto"), pytest.raises(error, match=message):
        ops.expert_permute(*args)


@each_implementation
@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((torch.zeros(3, 8).half(), torch.zeros(2, 1).int(), None), TypeError, "x must be"),
        ((torch.zeros(3, 8), torch.zeros(2).int(), None), ValueError, r"token_to_pos must be \[T"),
        (
            (torch.zeros(3, 8), torch.zeros(2, 1).int(), torch.zeros(3, 8).bfloat16()),
            ValueError,
            r"shared must be \[2, 8\], got \(3, 8\)",
        ),
    ],
)
def test_combine_errors(
    impl: str, args: tuple[Tensor, Tensor, Tensor | None], error: type, message: str
) -> None:
    with use_kernels("ref" if impl == "ref" else "auto"), pytest.raises(error, match=message):
        ops.expert_combine(*args)
