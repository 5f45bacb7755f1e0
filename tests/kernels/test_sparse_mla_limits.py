"""Sparse latent attention at its limits: splits, far addresses, many rows, graphs, lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.test_sparse_mla import IMPLEMENTATIONS, Result, attend, random
from tinfer import ops
from tinfer.compat.kv_cache import write_rows
from tinfer.kernels._target import target, use_target
from tinfer.kv_layout import KVLayout
from tinfer.registry import use_kernels
from tinfer.testing.cases.sparse_mla import call, compare
from tinfer.testing.launches import MAX_PROGRAMS, recorded

both = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


def packed(tokens: int, device: str, heads: int = 4, dim: int = 64, **more: Any) -> dict[str, Any]:
    g = torch.Generator(device=device).manual_seed(tokens)
    window, compressed = KVLayout.window_fp8(dim, 16), KVLayout.compressed_fp4(dim, 16)
    # 512 channels and whole groups of keys: on Hopper its own kernels take the call.
    width, selected = (64, 130) if dim == 512 else (20, 30)
    return call(tokens, heads, window, width, compressed, selected, **more)(g)


def triton(arguments: dict[str, Any]) -> Result:
    with use_kernels("triton"):
        out: Result = ops.sparse_mla(**arguments)
    return out


def rows_of(arguments: dict[str, Any], count: int) -> dict[str, Any]:
    per_row = ("q", "window_slots", "compressed_slots", "window_lengths", "compressed_lengths")
    return {k: v[:count] if k in per_row and v is not None else v for k, v in arguments.items()}


# ---------------------------------------------------------------- rows and splits
@pytest.mark.interpret
def test_sa01_a_row_does_not_depend_on_how_many_follow(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 rows alone, and followed by 1 and by 65 more: same bits, nothing from scratch memory."""
    from tests.kernels.parity import poison_allocator

    counts = (64, 65, 129) if device == "cuda" else (4, 5, 6)
    arguments = packed(counts[-1], device)
    for name in ("window", "compressed"):
        arguments[f"{name}_cache"][0] = 255
        listed = arguments[f"{name}_slots"]
        listed[listed < 16] = -1
    want = ops.sparse_mla.ref(**arguments)
    poison_allocator(monkeypatch)
    # The number of splits follows the number of rows, and the last bit follows the splits.
    with use_target(replace(target(arguments["q"].device), processors=1)):
        alone = triton(rows_of(arguments, counts[0]))
        for count in counts[1:]:
            more = triton(rows_of(arguments, count))
            for a, b in zip(alone, more, strict=True):
                assert torch.equal(a, b[: counts[0]])
    compare(more, want, arguments)


@pytest.mark.interpret
@pytest.mark.parametrize("splits", [1, 2, 3])
def test_sa07_the_sink_counts_once_however_the_keys_are_split(splits: int, device: str) -> None:
    """Scores 0, values 1 and 3, sink 0; the third split holds no key."""
    listed = torch.full((1, 192), -1)
    listed[0, [0, 64]] = torch.tensor([0, 1])
    rows = torch.tensor([[1.0] * 64, [3.0] * 64], device=device)
    q = torch.zeros(1, 4, 64, dtype=torch.bfloat16, device=device)
    on = replace(target(q.device), processors=splits)
    with use_target(on), use_kernels("triton"), recorded() as launches:
        attend(q, rows, listed, torch.zeros(4, device=device))
    assert launches[0].arguments["splits"] == splits
    with use_target(on), use_kernels("triton"):
        out, top, lse = attend(q, rows, listed, torch.zeros(4, device=device))
    assert torch.equal(out, torch.full_like(out, 4 / 3))
    assert not top.any()
    assert torch.equal(lse, torch.ones_like(lse))


@pytest.mark.interpret
def test_sa18_more_rows_than_a_grid_has_programs(device: str) -> None:
    count = 70000
    q = torch.empty(count, 1, 16, dtype=torch.bfloat16, device=device)
    slots = torch.empty(count, 1, dtype=torch.int32, device=device)
    rows = torch.zeros(4, 32, dtype=torch.uint8, device=device)
    with use_kernels("triton"), recorded() as launches:
        ops.sparse_mla(q, rows, KVLayout.rows_bf16(16), slots, None, None, None, None, 1.0)
    assert max(launch.programs for launch in launches) <= MAX_PROGRAMS
    assert sum(launch.programs for launch in launches) == count


@pytest.mark.gpu
@pytest.mark.parametrize("count", [65535, 65536, 70000])
def test_sa18_every_row_is_computed(count: int, device: str) -> None:
    arguments = packed(count, device)
    compare(triton(arguments), ops.sparse_mla.ref(**arguments), arguments)


@pytest.mark.interpret
def test_caches_unpacked_once_give_the_same_bits(device: str) -> None:
    """What the Hopper launcher does for a long prefill over small pools, seen by the portable."""
    from tinfer.kernels._sparse_mla_plan import Source
    from tinfer.kernels.sparse_mla import _attend_portable

    arguments = packed(3, device)
    want = triton(arguments)
    names = ("cache", "layout", "slots", "lengths")
    given = [[arguments[f"{k}_{n}"] for n in names] for k in ("window", "compressed")]
    sources = [Source.of(*g) for g in given]
    unpacked = [s.unpacked(g[1]) for s, g in zip(sources, given, strict=True)]
    results = tuple(torch.empty_like(x) for x in want)
    _attend_portable(arguments["q"], unpacked, arguments["sink"], arguments["scale"], results)
    for a, b in zip(results, want, strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------- far addresses
@both
@pytest.mark.parametrize(("value", "slot"), [("fp8", 4_067_204), ("fp4", 7_456_541)])
def test_sa08_rows_past_two_gib(value: str, slot: int, impl: str, device: str) -> None:
    """The first slots whose byte offset exceeds 2^31, in caches that are mostly untouched."""
    build = {"fp8": KVLayout.window_fp8, "fp4": KVLayout.compressed_fp4}[value]
    layout = build(512, 128)
    assert slot * layout.row_bytes >= 2**31 > (slot - 1) * layout.row_bytes
    pages = layout.pages(slot + 1)
    cache = torch.empty(pages, layout.page_bytes, dtype=torch.uint8, device=device)
    x = random((2, 512), device)
    where = torch.tensor([slot, slot - 7], device=device)
    write_rows(x, where, cache, layout)
    q = random((1, 16, 512), device)
    with use_kernels(impl):
        out, _, _ = ops.sparse_mla(
            q, cache, layout, where[None, :1].int(), None, None, None, None, 0.1
        )
    want = ops.load_kv.ref(cache, layout, where[:1])
    assert torch.equal(out, want.expand_as(out[0])[None])


@pytest.mark.gpu
def test_sa08_queries_past_two_gib_elements(device: str) -> None:
    """Row 65,536 of [T, 64, 512] starts at element 2^31."""
    g = torch.Generator(device=device).manual_seed(1)
    arguments = call(4, 64, KVLayout.rows_bf16(512), 3, rows=40)(g)
    many = 65537
    q = torch.zeros(many, 64, 512, dtype=torch.bfloat16, device=device)
    slots = torch.full((many, 3), -1, dtype=torch.int32, device=device)
    q[-4:], slots[-4:] = arguments["q"], arguments["window_slots"]
    out = triton(arguments | {"q": q, "window_slots": slots})
    for a, b in zip(out, triton(arguments), strict=True):
        assert torch.equal(a[-4:], b)
    assert not out[0][:-4].any()


@both
def test_sa10_each_layer_of_a_pool_reads_its_own_rows(impl: str, device: str) -> None:
    layout = KVLayout.window_fp8(64, 16)
    pool = torch.zeros(2, 3, layout.page_bytes, dtype=torch.uint8, device=device)
    slots = torch.arange(32, device=device)
    for layer in range(3):
        rows = torch.full((32, 64), layer + 1.0, dtype=torch.bfloat16, device=device)
        ops.store_kv(rows, slots, pool[:, layer], layout)
    q, listed = random((1, 4, 64), device), slots[None, 5:20].int()
    for layer in range(3):
        with use_kernels(impl):
            out, _, _ = ops.sparse_mla(
                q, pool[:, layer], layout, listed, None, None, None, None, 1.0
            )
        assert torch.equal(out, torch.full_like(out, layer + 1.0))


# ---------------------------------------------------------------- on a device
@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "dim", "heads"), [(2, 512, 64), (200, 512, 64), (40, 64, 4)])
def test_captured_in_a_graph(tokens: int, dim: int, heads: int, device: str) -> None:
    """A replay sees new queries, slots and lengths."""
    arguments = packed(tokens, device, heads, dim)
    for name in ("window", "compressed"):
        width = arguments[f"{name}_slots"].shape[1]
        arguments[f"{name}_lengths"] = torch.full(
            (tokens,), width, dtype=torch.int32, device=device
        )
    triton(arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = triton(arguments)
    arguments["q"].copy_(random((tokens, heads, dim), device, seed=9))
    arguments["window_slots"].copy_(arguments["window_slots"].flip(1))
    arguments["compressed_lengths"].fill_(11)
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(captured, triton(arguments), strict=True):
        assert torch.equal(a, b)
    compare(captured, ops.sparse_mla.ref(**arguments), arguments)


def variants() -> int:
    """Compiled variants of the portable kernel."""
    from tinfer.kernels._sparse_mla_forward import _sparse_mla_kernel

    return sum(len(cache[0]) for cache in _sparse_mla_kernel.device_caches.values())


@pytest.mark.gpu
def test_lengths_do_not_recompile(device: str) -> None:
    def run(tokens: int, width: int, rows: int) -> None:
        g = torch.Generator(device=device).manual_seed(width)
        triton(call(tokens, 4, KVLayout.rows_bf16(64), width, rows=rows)(g))

    run(140, 48, 40)
    before = variants()
    for tokens, width, rows in ((141, 49, 41), (160, 50, 1000), (300, 64, 64), (1000, 33, 33)):
        run(tokens, width, rows)
    assert variants() == before


def assert_same(a: Tensor, b: Tensor) -> None:
    assert torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.gpu
def test_repeats_bit_for_bit(device: str) -> None:
    """Fixed order of every sum, split or not."""
    for tokens in (1, 16, 300):
        arguments = packed(tokens, device, 64, 512, rows=500)
        first = triton(arguments)
        for _ in range(5):
            for a, b in zip(first, triton(arguments), strict=True):
                assert_same(a, b)
