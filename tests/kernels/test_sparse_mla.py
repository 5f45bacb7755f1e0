"""Sparse latent attention: the release's vectors, the fp64 oracle, and what the lists may hold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.data.golden.check_golden import Golden, OpCase
from tests.kernels.parity import check_parity
from tinfer import ops, registry
from tinfer.compat.sparse_mla import apply_sink
from tinfer.kv_layout import KVLayout
from tinfer.registry import use_kernels
from tinfer.testing.aot import TARGETS, check_family
from tinfer.testing.cases import Case, cases
from tinfer.testing.cases.sparse_mla import call, compare

CASES = cases(family="sparse_mla")
GOLDEN = Golden(Path(__file__).parents[1] / "data" / "golden").ops("sparse_attn")
IMPLEMENTATIONS = ("ref", pytest.param("triton", marks=pytest.mark.interpret))
both = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
INF = float("inf")
Result = tuple[Tensor, Tensor, Tensor]


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
    check_family("sparse_mla", target)


# ---------------------------------------------------------------- a plain call
def attend(
    q: Tensor,
    rows: Tensor,
    listed: Any,
    sink: Tensor | None = None,
    scale: float = 1.0,
    **more: Any,
) -> Result:
    """`sparse_mla` over one matrix of bf16 rows."""
    slots = torch.as_tensor(listed, dtype=torch.int32, device=q.device)
    cache = rows.to(torch.bfloat16).contiguous().view(torch.uint8)
    layout = KVLayout.rows_bf16(rows.shape[1])
    out: Result = ops.sparse_mla(q, cache, layout, slots, None, None, None, sink, scale, **more)
    return out


def random(shape: tuple[int, ...], device: str, seed: int = 0) -> Tensor:
    g = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, generator=g, device=device).to(torch.bfloat16)


def check_oracle(arguments: dict[str, Any], impl: str) -> Result:
    """The call agrees with the fp64 oracle within the derived bound."""
    with use_kernels(impl):
        out: Result = ops.sparse_mla(**arguments)
    compare(out, ops.sparse_mla.ref(**arguments), arguments)
    return out


def arguments_of(device: str, tokens: int, width: int, rows: int, heads: int = 4) -> dict[str, Any]:
    g = torch.Generator(device=device).manual_seed(width)
    return call(tokens, heads, KVLayout.rows_bf16(64), width, rows=rows)(g)


# ---------------------------------------------------------------- golden
@both
@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c.case)
def test_golden(case: OpCase, impl: str, device: str) -> None:
    q, kv, sink, ids = (case.inputs[k].to(device) for k in ("q", "kv", "attn_sink", "topk_idxs"))
    batch, tokens = q.shape[:2]
    start = torch.arange(batch, device=device, dtype=torch.int32)[:, None, None] * kv.shape[1]
    slots = torch.where(ids < 0, ids, ids + start).flatten(0, 1)
    with use_kernels(impl):
        out, _, _ = attend(
            q.flatten(0, 1), kv.flatten(0, 1), slots, sink, case.params["softmax_scale"]
        )
    case.check({"o": out.view(batch, tokens, *q.shape[2:])})


# ---------------------------------------------------------------- what the lists may hold
@both
def test_one_key_is_returned_bit_for_bit(impl: str, device: str) -> None:
    """SA-11: the attention reads what the cache's own writer stored, in every layout."""
    x = random((3, 64), device)
    split = KVLayout(64, "e4m3", 32, "ue8m0", 2, interleaved=False, page_align=512)
    layouts = (KVLayout.window_fp8(64, 2), KVLayout.compressed_fp4(64, 2), split)
    for layout in (*layouts, KVLayout.rows_bf16(64, 2)):
        cache = layout.allocate(2, device)
        order = torch.tensor([2, 0, 3], device=device)
        ops.store_kv(x, order, cache, layout)
        with use_kernels(impl):
            slots = order[:, None].int()
            q = random((3, 4, 64), device)
            out, _, _ = ops.sparse_mla(q, cache, layout, slots, None, None, None, None, 0.1)
        want = ops.load_kv(cache, layout, order)
        assert torch.equal(out, want[:, None].expand_as(out)), layout


@both
def test_duplicates_count_twice(impl: str, device: str) -> None:
    rows = torch.tensor([[1.0] * 16, [4.0] * 16], device=device)
    q = torch.zeros(1, 2, 16, dtype=torch.bfloat16, device=device)
    with use_kernels(impl):
        out, top, lse = attend(q, rows, [[0, 1, 1]])
    assert torch.equal(out, torch.full_like(out, 3.0))
    assert torch.equal(top, torch.zeros_like(top))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log2(3)))


@both
def test_sa02_slot_0_full_of_nan_does_not_leak(impl: str, device: str) -> None:
    rows = random((12, 64), device)
    rows[0] = float("nan")
    listed = torch.full((2, 40), -1)
    listed[0, [1, 17, 39]] = torch.tensor([3, 11, 7])
    with use_kernels(impl):
        out, top, lse = attend(random((2, 4, 64), device), rows, listed, scale=0.1)
    assert out.isfinite().all()
    assert lse[0].isfinite().all()
    assert not out[1].any()
    assert top[1].eq(-INF).all()


@both
@pytest.mark.parametrize("sink", [None, 0.0, INF, -INF])
def test_sa03_a_row_without_keys(impl: str, device: str, sink: float | None) -> None:
    """Zeros, maximum and lse -inf, whatever the sink; a merge gives such a part weight 0."""
    given = None if sink is None else torch.full((4,), sink, device=device)
    rows, q = random((8, 64), device), random((1, 4, 64), device)
    for listed, lengths in (([[-1] * 5], None), ([[1, 2, 3]], [0]), ([[]], None)):
        count = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=device)
        with use_kernels(impl):
            out, top, lse = attend(q, rows, listed, given, window_lengths=count)
        assert torch.equal(out, torch.zeros_like(out))
        assert lse.eq(-INF).all()
        assert top.eq(-INF).all()


GARBAGE = (-(2**31), -123456, -1, 95, 114514, 1919810, 2147480000, 2**31 - 1)


@both
def test_sa04_out_of_range_slots_are_skipped(impl: str, device: str) -> None:
    arguments = arguments_of(device, 3, 24, 95)
    listed = arguments["window_slots"]
    for i, value in enumerate(GARBAGE):
        listed[:, 3 * i] = value
    clean = listed.clone()
    clean[:, 0 : 3 * len(GARBAGE) : 3] = -1
    mine = check_oracle(arguments, impl)
    with use_kernels(impl):
        again = ops.sparse_mla(**(arguments | {"window_slots": clean}))
    for a, b in zip(mine, again, strict=True):
        assert torch.equal(a, b)


@both
def test_sa09_entries_beyond_the_length_do_not_count(impl: str, device: str) -> None:
    arguments = arguments_of(device, 4, 130, 40)
    lengths = torch.tensor([1, 64, 0, 130], dtype=torch.int32, device=device)
    cut = arguments["window_slots"].clone()
    cut[torch.arange(130, device=device) >= lengths[:, None]] = -1
    mine = check_oracle(arguments | {"window_lengths": lengths}, impl)
    with use_kernels(impl):
        again = ops.sparse_mla(**(arguments | {"window_slots": cut}))
    for a, b in zip(mine, again, strict=True):
        assert torch.equal(a, b)


@both
def test_slots_are_absolute(impl: str, device: str) -> None:
    """Slot 3078 in a call of 4 rows; a cache of 12 rows with lists of 51."""
    far = arguments_of(device, 4, 8, 4096)
    far["window_slots"][:, 3] = 3078
    check_oracle(far, impl)
    check_oracle(arguments_of(device, 2, 51, 12), impl)


@both
def test_a_block_with_two_valid_slots_counts(impl: str, device: str) -> None:
    """510 of 512 entries invalid, the valid ones first, in the middle, and last."""
    for valid in ((0, 1), (200, 300), (510, 511), (0, 511)):
        arguments = arguments_of(device, 1, 512, 40)
        listed = torch.full_like(arguments["window_slots"], -1)
        listed[:, list(valid)] = torch.tensor([5, 9], dtype=torch.int32, device=device)
        check_oracle(arguments | {"window_slots": listed}, impl)


@both
def test_nan_in_a_listed_row_shows(impl: str, device: str) -> None:
    rows = random((8, 64), device)
    rows[2, 5] = float("nan")
    with use_kernels(impl):
        result = attend(random((2, 4, 64), device), rows, [[1, 2, 3], [1, 3, 4]], scale=0.1)
    for x in result:
        assert x[0].isnan().all()
        assert x[1].isfinite().all()


# ---------------------------------------------------------------- the sink
def test_sa05_apply_sink() -> None:
    def factor(lse: float, sink: float) -> float:
        one, given = torch.ones(1, 1), torch.tensor([sink])
        return float(apply_sink(one, torch.tensor([lse]) / math.log(2), given))

    assert factor(90.0 + math.log(2), 0.0) == 1.0
    assert factor(-1000.0, 0.0) == 0.0
    assert factor(90.0, INF) == 0.0
    assert factor(90.0, -INF) == 1.0


@both
def test_sa05_sink_against_large_logits(impl: str, device: str) -> None:
    rows = torch.full((2, 16), 4.0, device=device)
    q = torch.full((1, 4, 16), 1.0, dtype=torch.bfloat16, device=device)
    sink = torch.tensor([0.0, INF, -INF, 90.0 + math.log(2)], device=device)
    with use_kernels(impl):  # q.k = 64, scaled to 90
        out, top, lse = attend(q, rows, [[0, 1]], sink, scale=90.0 / 64)
    assert out[0, :, 0].tolist() == [4.0, 0.0, 4.0, 2.0]
    torch.testing.assert_close(top, torch.full_like(top, 90.0))
    torch.testing.assert_close(lse, torch.full_like(lse, 90.0 / math.log(2) + 1))


# ---------------------------------------------------------------- where it runs
def test_both_refuse_alike(device: str) -> None:
    arguments = arguments_of(device, 2, 4, 8)
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"q": arguments["q"].float()}, TypeError, "q must be bfloat16"),
        ({"window_slots": arguments["window_slots"].long()}, TypeError, "window_slots must be"),
        ({"window_slots": arguments["window_slots"][:1]}, ValueError, "window_slots must be"),
        ({"compressed_slots": arguments["window_slots"]}, ValueError, "compressed_\\* must be"),
        ({"sink": torch.zeros(3, device=device)}, ValueError, "sink must be"),
        ({"window_layout": KVLayout.rows_bf16(32)}, ValueError, "must be"),
        ({"value_dim": 65}, ValueError, "value_dim must be in 1..64"),
        ({"scale": INF}, ValueError, "scale must be finite"),
        ({"window_cache": arguments["q"]}, TypeError, "window_cache must be uint8"),
    ]
    for change, error, message in wrong:
        for implementation in (ops.sparse_mla.ref, ops.sparse_mla.kernel):
            with pytest.raises(error, match=message):
                implementation(**(arguments | change))


@pytest.mark.interpret
def test_reasons_against_a_call(device: str) -> None:
    arguments = arguments_of(device, 2, 4, 8)
    op = registry.get("sparse_mla")
    assert op.why_not_triton(**arguments) is None
    assert "scale" in str(op.why_not_triton(**(arguments | {"scale": 0.0})))
    turned = arguments["q"].mT.contiguous().mT
    assert "contiguous" in str(op.why_not_triton(**(arguments | {"q": turned})))
    check_oracle(arguments | {"scale": -0.3}, "ref")
