"""Cases of the paged caches: every layout, page size and edge, and the model's own sizes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tinfer.compat.kv_cache import write_rows
from tinfer.kv_layout import KVLayout
from tinfer.testing.cases import Arguments, Case
from tinfer.testing.compare import assert_exact

Make = Callable[[torch.Generator], Arguments]
Build = Callable[[int, int], KVLayout]

BUILD: dict[str, Build] = {
    "window": KVLayout.window_fp8,
    "fp4": KVLayout.compressed_fp4,
    "fp8_compressed": KVLayout.compressed_fp8,
    "index_fp4": KVLayout.index_fp4,
    "index_fp8": KVLayout.index_fp8,
    "index_fp8_free": lambda dim, page: KVLayout.index_fp8(dim, page, scale="fp32"),
    "index_mxfp8": KVLayout.index_mxfp8,
    "bf16": KVLayout.rows_bf16,
    "split_fp8": lambda dim, page: KVLayout(
        dim, "e4m3", 32, "ue8m0", page, interleaved=False, page_align=512
    ),
    "interleaved_index": lambda dim, page: KVLayout(
        dim, "e2m1", 32, "ue8m0", page, interleaved=True, page_align=256
    ),
}


def rows(g: torch.Generator, tokens: int, dim: int) -> Tensor:
    """bf16 rows whose magnitudes differ by up to 2^12 from row to row."""
    x = torch.randn(tokens, dim, generator=g, device=g.device)
    power = torch.randint(-6, 7, (tokens, 1), generator=g, device=g.device)
    return torch.ldexp(x, power).to(torch.bfloat16)


def table(length: int, rope: int, device: torch.device) -> Tensor:
    """fp32 [length, rope], cosines then sines."""
    pair = torch.arange(rope // 2, device=device, dtype=torch.float64)
    angle = torch.arange(length, device=device)[:, None] * 10000.0 ** (-2 * pair / rope)
    return torch.cat([angle.cos(), angle.sin()], -1).float()


def slots(g: torch.Generator, tokens: int, capacity: int, skip: bool) -> Tensor:
    """int64 distinct slots, every fifth one -1 when `skip`."""
    chosen = torch.randperm(capacity, generator=g, device=g.device)[:tokens]
    if skip:
        chosen[::5] = -1
    return chosen


def _store(layout: KVLayout, tokens: int, skip: bool = True, edges: bool = False) -> Make:
    def make(g: torch.Generator) -> Arguments:
        x = rows(g, tokens, layout.dim)
        if edges:
            _plant_edges(x, layout.group or 16)
        pages = layout.pages(tokens + 3)
        cache = layout.allocate(pages, g.device).random_(generator=g)
        at = slots(g, tokens, pages * layout.page_size, skip)
        return {"x": x, "slots": at, "cache": cache, "layout": layout}

    return make


def _plant_edges(x: Tensor, group: int) -> None:
    """Zeros, subnormals, huge values, infinity and NaN, one row each."""
    x[0] = 0.0
    x[1] *= 1e-38
    x[2] = 3e38
    x[3, 0] = float("inf")
    x[4, group - 1] = float("nan")
    x[5, ::2] = -0.0


def _strided(layout: KVLayout, tokens: int) -> Make:
    """Rows are columns of a wider projection; the cache is a slice of a pool of three layers."""

    def make(g: torch.Generator) -> Arguments:
        arguments = _store(layout, tokens)(g)
        wide = torch.zeros(tokens, layout.dim + 24, dtype=torch.bfloat16, device=g.device)
        wide[:, 16 : 16 + layout.dim] = arguments["x"]
        pages = len(arguments["cache"])
        pool = torch.zeros(pages, 3, layout.page_bytes, dtype=torch.uint8, device=g.device)
        pool[:, 1] = arguments["cache"]
        return arguments | {"x": wide[:, 16 : 16 + layout.dim], "cache": pool[:, 1]}

    return make


def _rope(layout: KVLayout, tokens: int, rope: int, weight: torch.dtype | None) -> Make:
    def make(g: torch.Generator) -> Arguments:
        arguments = _store(layout, tokens)(g)
        gain = None
        if weight is not None:
            gain = torch.randn(layout.dim, generator=g, device=g.device).to(weight)
        positions = torch.randint(0, 512, (tokens,), generator=g, device=g.device)
        return {
            "x": arguments["x"],
            "weight": gain,
            "eps": 1e-20,
            "cos_sin": table(512, rope, g.device),
            "positions": torch.where(arguments["slots"] < 0, -(2**40), positions),
            "slots": arguments["slots"],
            "cache": arguments["cache"],
            "layout": layout,
        }

    return make


def _load(layout: KVLayout, tokens: int, shape: tuple[int, ...], dtype: torch.dtype) -> Make:
    def make(g: torch.Generator) -> Arguments:
        filled = _store(layout, tokens, skip=False)(g)
        write_rows(filled["x"], filled["slots"], filled["cache"], layout)
        count = torch.Size(shape).numel()
        pick = torch.randint(0, max(tokens, 1), (count,), generator=g, device=g.device)
        chosen = filled["slots"][pick].clone()
        chosen[::7] = -1
        return {
            "cache": filled["cache"],
            "layout": layout,
            "slots": chosen.view(shape).to(dtype),
        }

    return make


def _moved(arguments: Arguments) -> int:
    layout: KVLayout = arguments["layout"]
    count: int = arguments["slots"].numel()
    return count * (2 * layout.dim + layout.row_bytes + 8)


def _store_cases() -> list[Case]:
    small = [
        Case(
            "store_kv", f"{name}-{dim}-page{page}", _store(build(dim, page), 13), mutates=("cache",)
        )
        for name, build in BUILD.items()
        for dim, page in ((64, 16), (128, 3))
    ]
    small += [
        Case("store_kv", f"{name}-96", _store(BUILD[name](96, 32), 7), mutates=("cache",))
        for name in ("window", "fp4", "index_mxfp8", "bf16")
    ]
    small += [
        Case(
            "store_kv",
            f"{name}-edges",
            _store(BUILD[name](64, 16), 9, False, True),
            mutates=("cache",),
        )
        for name in BUILD
    ]
    window = KVLayout.window_fp8(64, 16)
    small += [
        Case("store_kv", "none", _store(window, 0), mutates=("cache",)),
        Case("store_kv", "one", _store(window, 1, skip=False), mutates=("cache",)),
        Case(
            "store_kv", "page256", _store(KVLayout.compressed_fp4(64, 256), 65), mutates=("cache",)
        ),
        Case("store_kv", "strided", _strided(KVLayout.index_fp4(128, 16), 63), mutates=("cache",)),
        Case(
            "store_kv", "strided_bf16", _strided(KVLayout.rows_bf16(64, 4), 9), mutates=("cache",)
        ),
    ]
    real = {
        "window": KVLayout.window_fp8(512, 128),
        "compressed": KVLayout.compressed_fp4(512, 64),
        "index": KVLayout.index_fp4(128, 64),
    }
    return small + [
        Case(
            "store_kv",
            f"{name}-{tokens}",
            _store(layout, tokens, skip=False),
            real=True,
            bench=True,
            mutates=("cache",),
            bytes=_moved,
        )
        for name, layout in real.items()
        for tokens in (64, 4096, 40960)
    ]


def _rope_cases() -> list[Case]:
    window, fp4 = KVLayout.window_fp8, KVLayout.compressed_fp4
    small = [
        Case("store_kv_rope", "window-norm", _rope(window(64, 16), 13, 16, torch.bfloat16)),
        Case("store_kv_rope", "window-96", _rope(window(96, 16), 9, 32, torch.float32)),
        Case("store_kv_rope", "compressed", _rope(fp4(128, 4), 11, 32, None)),
        Case(
            "store_kv_rope", "index-norm", _rope(KVLayout.index_fp4(64, 16), 7, 32, torch.bfloat16)
        ),
        Case("store_kv_rope", "index_fp8", _rope(KVLayout.index_fp8(64, 16), 7, 64, None)),
        Case("store_kv_rope", "none", _rope(window(64, 16), 0, 16, None)),
    ]
    real = [
        Case(
            "store_kv_rope",
            f"{name}-{tokens}",
            _rope(layout, tokens, 64, weight),
            real=True,
            bench=True,
            bytes=_moved,
        )
        for name, layout, weight in (
            ("window", window(512, 128), torch.bfloat16),
            ("compressed", fp4(512, 64), None),
            ("index", KVLayout.index_fp4(128, 64), torch.bfloat16),
        )
        for tokens in (64, 4096, 40960)
    ]
    return [
        Case(**(vars(c) | {"mutates": ("cache",)}))  # every one writes the cache
        for c in small + real
    ]


def _load_cases() -> list[Case]:
    small = [
        Case(
            "load_kv", f"{name}-{dim}-page{page}", _load(build(dim, page), 20, (3, 7), torch.int32)
        )
        for name, build in BUILD.items()
        for dim, page in ((64, 16), (128, 3))
    ]
    small += [
        Case("load_kv", "96", _load(KVLayout.window_fp8(96, 16), 5, (4,), torch.int64)),
        Case("load_kv", "none", _load(KVLayout.window_fp8(64, 16), 5, (0, 3), torch.int64)),
    ]
    real = [
        Case(
            "load_kv",
            f"{name}-{shape[0] * shape[1]}",
            _load(layout, 16384, shape, torch.int32),
            real=True,
            bench=True,
            bytes=_moved,
        )
        for name, layout in (
            ("window", KVLayout.window_fp8(512, 128)),
            ("compressed", KVLayout.compressed_fp4(512, 64)),
        )
        for shape in ((1, 4096), (64, 640))
    ]
    return small + real


def compare_rope(actual: object, expected: object, arguments: Arguments) -> None:
    """Caches: bit for bit without a norm, else all but the rows whose norm rounds differently.

    The sum of squares has no fixed order, so rsqrt may differ in its last bits and one bf16
    rounding in 2^14 falls on the other side: it moves a code by one step, or a scale to its
    neighbour. Bytes that differ are counted; one in 500 is allowed.
    """
    if not isinstance(expected, Tensor):
        assert actual is None
        assert expected is None
        return
    assert isinstance(actual, Tensor)
    if arguments["weight"] is None:
        assert_exact(actual, expected, "cache")
        return
    different = int((actual != expected).sum())
    assert different <= max(1, expected.numel() // 500), f"{different} bytes differ"


CASES: list[Case] = _store_cases() + _rope_cases() + _load_cases()
COMPARE = {"store_kv_rope": compare_rope}
