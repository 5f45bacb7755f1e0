"""The Hopper kernels of the sparse latent attention: which call takes which, and their edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tinfer import ops
from tinfer.compat.kv_cache import load_kv, write_rows
from tinfer.kernels._sparse_mla_plan import Source, form_of, packed_split
from tinfer.kernels._target import Target
from tinfer.kv_layout import KVLayout
from tinfer.registry import use_kernels
from tinfer.testing.cases.sparse_mla import Make, call, changed, compare
from tinfer.testing.launches import recorded

H200 = Target("cuda", 90, 227)
BF16, FP8 = KVLayout.rows_bf16(512), KVLayout.window_fp8(512, 128)
FP4 = KVLayout.compressed_fp4(512, 64)
SPLIT8 = KVLayout(512, "e4m3", 32, "ue8m0", 16, interleaved=False, page_align=512)
SPLIT4 = KVLayout(512, "e2m1", 16, "e4m3", 16, interleaved=False)
POWERS4 = KVLayout(512, "e2m1", 32, "ue8m0", 16, interleaved=False)
PACKED, HOPPER = "_sparse_mla_packed_kernel", "_sparse_mla_hopper_kernel"


# ---------------------------------------------------------------- the choice
def form(tokens: int, layout: KVLayout, width: int = 128, rows: int = 40, **more: Any) -> str:
    q = torch.empty(tokens, more.get("heads", 64), layout.dim, dtype=torch.bfloat16, device="meta")
    slots = torch.empty(tokens, width, dtype=torch.int32, device="meta")
    cache = torch.empty(layout.pages(rows), layout.page_bytes, dtype=torch.uint8, device="meta")
    sources = [Source.of(cache, layout, slots, None)] * more.get("sources", 2)
    return form_of(q, sources, layout.dim, more.get("on", H200))


def test_packed_rows_go_to_the_packed_kernel_unless_unpacking_pays() -> None:
    assert form(1, FP8) == form(131, FP8) == "packed"
    assert form(132, FP8) == "unpack"
    assert form(132, FP8, rows=64 * 132) == "packed"  # twice that, in both caches
    assert form(132, FP8, rows=64 * 132, sources=1) == "unpack"


def test_bf16_rows_take_the_walking_kernel_when_they_fill_the_device() -> None:
    assert form(131, BF16) == "portable"
    assert form(132, BF16) == "hopper"
    assert form(66, BF16, heads=128) == "hopper"


@pytest.mark.parametrize("layout", [BF16, FP8], ids=["bf16", "packed"])
def test_what_the_hopper_kernels_cannot_do_is_left_to_the_portable_one(layout: KVLayout) -> None:
    assert form(200, layout, width=100) == "portable"  # a group would straddle both lists
    assert form(200, layout, width=100, sources=1) != "portable"
    assert form(200, layout, heads=8) == "portable"
    assert form(200, layout, on=Target("cuda", 80, 163)) == "portable"
    assert form(200, layout, on=Target("cuda", 100, 227)) == "portable"
    assert form(200, KVLayout.rows_bf16(576)) == "portable"


def test_few_tokens_fill_the_device_by_splits_then_by_heads() -> None:
    assert packed_split(1, 64, 10, 132) == (8, 10)
    assert packed_split(4, 64, 10, 132) == (32, 10)
    assert packed_split(16, 64, 10, 132) == (64, 8)
    assert packed_split(128, 64, 10, 132) == (64, 1)
    assert packed_split(1, 64, 2, 132) == (8, 1)


# ---------------------------------------------------------------- edges, on a device
def _poison(a: dict[str, Any], g: torch.Generator) -> dict[str, Any]:
    """Rows that no list names, and row 0, hold NaN."""
    out: dict[str, Any] = {}
    for name in ("window", "compressed"):
        cache, layout, listed = (a[f"{name}_{k}"] for k in ("cache", "layout", "slots"))
        listed = torch.where(listed == 0, 1, listed)
        data = cache.clone().fill_(255)
        used = torch.unique(listed[listed > 0].long())
        write_rows(load_kv(cache, layout, used), used, data, layout)
        out |= {f"{name}_cache": data, f"{name}_slots": listed}
    return out


def _lengths(a: dict[str, Any], g: torch.Generator) -> dict[str, Any]:
    """From none to more than there are entries; some rows have no key at all."""
    tokens, width = a["window_slots"].shape
    selected = a["compressed_slots"].shape[1]
    count = torch.arange(tokens, device=g.device, dtype=torch.int32)
    return {
        "window_lengths": (count * 37) % (width + 2) - 1,
        "compressed_lengths": (count * 91) % (selected + 2) - 1,
    }


def _strided(a: dict[str, Any], g: torch.Generator) -> dict[str, Any]:
    """Queries out of a wider projection, caches of one layer of two."""
    q = a["q"]
    wide = torch.full((len(q), q.shape[1] + 1, 1024), 9.0, dtype=q.dtype, device=q.device)
    wide[:, 1:, 512:] = q
    out: dict[str, Any] = {"q": wide[:, 1:, 512:]}
    for name in ("window", "compressed"):
        cache = a[f"{name}_cache"]
        pool = torch.full((len(cache), 2, cache.shape[1]), 255, dtype=torch.uint8, device=q.device)
        pool[:, 1] = cache
        out[f"{name}_cache"] = pool[:, 1]
    return out


def _last_only(a: dict[str, Any], g: torch.Generator) -> dict[str, Any]:
    """Every list names one slot, in its last entry: 639 of 640 are invalid."""
    window = torch.full_like(a["window_slots"], -1)
    compressed = torch.full_like(a["compressed_slots"], -1)
    compressed[:, -1] = 3
    return {"window_slots": window, "compressed_slots": compressed}


def _beyond(a: dict[str, Any], g: torch.Generator) -> dict[str, Any]:
    """Slots beyond the cache are skipped."""
    listed = a["compressed_slots"].clone()
    listed[:, ::3] = a["compressed_cache"].shape[0] * a["compressed_layout"].page_size
    listed[:, 1::3] = 2**31 - 1
    return {"compressed_slots": listed}


def _huge(a: dict[str, Any], g: torch.Generator) -> dict[str, Any]:
    return {"scale": 3.0}


CHANGES: dict[str, Callable[..., dict[str, Any]]] = {
    "plain": lambda a, g: {},
    "poisoned": _poison,
    "lengths": _lengths,
    "strided": _strided,
    "last-only": _last_only,
    "beyond": _beyond,
    "huge-logits": _huge,
}
LAYOUTS = {
    "release": (FP8, FP4),
    "block-split": (SPLIT8, SPLIT4),
    "fp8 twice": (SPLIT8, FP8),
    "fp4 of two scales": (FP4, POWERS4),
}


def run(make: Make, kernel: str, device: str) -> None:
    arguments = make(torch.Generator(device=device).manual_seed(5))
    with use_kernels("triton"):
        with recorded() as launches:
            ops.sparse_mla(**arguments)
        assert kernel in {launch.name for launch in launches}
        got: tuple[Tensor, Tensor, Tensor] = ops.sparse_mla(**arguments)
    compare(got, ops.sparse_mla.ref(**arguments), arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("tokens", [1, 70, 135])
def test_packed_edges(tokens: int, change: Callable[..., dict[str, Any]], device: str) -> None:
    pool = 20000 if tokens > 131 else 900
    run(changed(call(tokens, 64, FP8, 128, FP4, 512, rows=700, pool=pool), change), PACKED, device)


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("heads", [16, 24, 64, 72, 128])
def test_packed_layouts(heads: int, layouts: tuple[KVLayout, KVLayout], device: str) -> None:
    window, compressed = layouts
    run(call(3, heads, window, 64, compressed, 150, rows=300, sink=False), PACKED, device)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [FP8, FP4, POWERS4], ids=["fp8", "fp4", "fp4 powers"])
@pytest.mark.parametrize("width", [1, 63, 64, 65, 2100])
def test_packed_rows_of_one_list(layout: KVLayout, width: int, device: str) -> None:
    run(call(5, 64, layout, width, rows=300), PACKED, device)


@pytest.mark.gpu
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("layouts", [(BF16, BF16), (FP8, FP4)], ids=["bf16", "unpacked"])
def test_walking_edges(
    layouts: tuple[KVLayout, KVLayout], change: Callable[..., dict[str, Any]], device: str
) -> None:
    window, compressed = layouts
    run(changed(call(300, 64, window, 128, compressed, 300, rows=700), change), HOPPER, device)
