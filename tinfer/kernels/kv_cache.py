"""Paged cache rows: quantize and store (with norm and rotation fused), load by slot.

Memory: `KVLayout` gives every row's codes and scales by the triple (data_stride, scale_base,
scale_stride) within a page; a row of slot s starts at (s // page_size) * page stride, in int64.
Stored rows are held in units of a thread (`_kv_units`), loaded ones as tiles (`_kv_rows`).

Numerics: fp32 inside; the norm, the rotation and a first e2m1 cast each round to bf16, exactly
as the ops they fuse. No fused multiply-add, so the rotation rounds like the reference.

Source: `tinfer.compat.kv_cache`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.compat import kv_cache as ref
from tinfer.kernels._call import scattered
from tinfer.kernels._kv_rows import load_tile
from tinfer.kernels._kv_store import store_kv_kernel
from tinfer.kernels._target import target
from tinfer.kv_layout import FIRST_CASTS, KVLayout

MAX_PROGRAMS = 65535
FEW_ROWS = 1024


@triton.jit(do_not_specialize=["rows"])
def _load_kv_kernel(
    cache_ptr,  # uint8 pages, or bf16 pages for bf16 rows
    slots_ptr,  # int32 or int64 [N]
    out_ptr,  # bf16 [N, DIM]
    rows,
    page_stride,
    DIM: tl.constexpr,
    DP: tl.constexpr,
    VALUE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    PAGE: tl.constexpr,
    DATA_STRIDE: tl.constexpr,
    SCALE_BASE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    channel = tl.arange(0, DP)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        out_row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        slot = tl.load(slots_ptr + out_row, mask=out_row < rows, other=-1).to(tl.int64)
        x = load_tile(
            slot,
            cache_ptr,
            page_stride,
            ROWS,
            DIM,
            DP,
            VALUE,
            GROUP,
            SCALE,
            PAGE,
            DATA_STRIDE,
            SCALE_BASE,
            SCALE_STRIDE,
        )
        at = out_ptr + out_row[:, None] * DIM + channel[None, :]
        tl.store(at, x, mask=(out_row < rows)[:, None] & (channel < DIM)[None, :])


def _layout_arguments(layout: KVLayout) -> dict[str, int | str]:
    """The constexprs that describe a layout; strides of bf16 rows count elements."""
    padded = triton.next_power_of_2(layout.dim)
    unit = 2 if layout.value == "bf16" else 1
    return {
        "DIM": layout.dim,
        "DP": padded,
        "VALUE": layout.value,
        "GROUP": layout.group,
        "SCALE": layout.scale,
        "PAGE": layout.page_size,
        "DATA_STRIDE": layout.data_stride // unit,
        "SCALE_BASE": layout.scale_base,
        "SCALE_STRIDE": layout.scale_stride,
    }


def _cache_view(cache: Tensor, layout: KVLayout) -> Tensor:
    return cache.view(torch.bfloat16) if layout.value == "bf16" else cache


def _store_tiles(layout: KVLayout) -> tuple[int, int, int, int]:
    """(rows, warps, parts of a unit, channels of a part): 16 channels a thread, 128 threads.

    H200, 4096 rows of e2m1, with rotation: 7.5 us, one row and one warp 8.4, 8 channels a thread
    8.2, 256 threads 7.6. Of e4m3, with norm: 7.6 us, one row and one warp 8.3, 32 channels 8.2.
    """
    padded = triton.next_power_of_2(layout.dim)
    narrowest = min(layout.group or padded, FIRST_CASTS[layout.first][0] or padded)
    chunk = min(8, narrowest)
    parts = min(2, narrowest // chunk)
    return max(1, 128 * parts * chunk // padded), 4, parts, chunk


def _splits(layout: KVLayout, rope: int, unit: int, rows: int) -> bool:
    """Whether the rotated channels get programs of their own, so that the others rotate none.

    Not with a norm, which needs the whole row. H200, 4096 rows of e2m1: 6.9 us, else 7.5.
    """
    group = max(layout.group, FIRST_CASTS[layout.first][0], unit)
    powers = all(n & (n - 1) == 0 for n in (layout.dim, rope))
    return powers and 0 < rope < layout.dim and rope % group == 0 and rows > FEW_ROWS


def _load_tiles(padded_dim: int, rows: int, value: str) -> tuple[int, int]:
    """(rows, warps) of a program that loads. H200, 40,960 rows of 512 channels: e2m1 take 18.1 us
    with 4 rows and 4 warps, 29.2 with one; e4m3 22.4 and 20.1."""
    if value == "e2m1":
        return max(1, 2048 // padded_dim), 4
    return max(1, 1024 // padded_dim) if rows > FEW_ROWS else 1, 1


def _grid(rows: int, per_program: int) -> tuple[int]:
    return (min(triton.cdiv(rows, per_program), MAX_PROGRAMS),)


def _why_not_layout(cache: Tensor, layout: KVLayout) -> str | None:
    group, first = layout.group, FIRST_CASTS[layout.first][0]
    if first and layout.value == "bf16":
        return "a first cast before bf16 rows"
    if first and (layout.dim % first or group % first):
        return f"a first cast in groups of {first} does not fit {layout.dim} channels"
    if group & (group - 1):
        return f"groups of {group} channels, not a power of two"
    if layout.value == "bf16" and (cache.stride(0) % 2 or cache.storage_offset() % 2):
        return "bf16 rows at odd byte offsets"
    return None


def supports_store_kv(x: Tensor, slots: Tensor, cache: Tensor, layout: KVLayout) -> str | None:
    """Rows need contiguous channels; groups a power of two."""
    if scattered(x):
        return "channels of x are not contiguous"
    return _why_not_layout(cache, layout)


def store_kv(x: Tensor, slots: Tensor, cache: Tensor, layout: KVLayout) -> None:
    ref.check_store_kv("store_kv", x, slots, cache, layout, None)
    _store(x, None, 0.0, None, None, slots, cache, layout)


def supports_store_kv_rope(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    layout: KVLayout,
) -> str | None:
    """As store_kv; the table's rows and the weight contiguous."""
    if scattered(cos_sin):
        return "rows of cos_sin are not contiguous"
    if (layout.dim - cos_sin.shape[-1]) % 2:
        return "the rotated channels start at an odd one"
    return supports_store_kv(x, slots, cache, layout)


def store_kv_rope(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    layout: KVLayout,
) -> None:
    ref.check_store_kv_rope(x, weight, eps, cos_sin, positions, slots, cache, layout)
    if cos_sin.shape[1] == 0:
        cos_sin = None
    _store(x, weight, eps, cos_sin, positions, slots, cache, layout)


def _store(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    cos_sin: Tensor | None,
    positions: Tensor | None,
    slots: Tensor,
    cache: Tensor,
    layout: KVLayout,
) -> None:
    if not len(x):
        return
    pages = _cache_view(cache, layout)
    group, scale = FIRST_CASTS[layout.first]
    rows, warps, parts, chunk = _store_tiles(layout)
    rope = 0 if cos_sin is None else cos_sin.shape[1]
    split = weight is None and _splits(layout, rope, parts * chunk, len(x))
    device = target(x.device)
    weight = None if weight is None else weight.contiguous()
    slots = slots.contiguous()
    positions = slots if positions is None else positions.contiguous()
    most = max(MAX_PROGRAMS // 2, 1) * rows
    for start in range(0, len(x), most):  # a second launch is for millions of rows
        part = slice(start, start + most)
        tokens = len(slots[part])
        turning = triton.cdiv(tokens * rope, rows * layout.dim) if split else 0
        store_kv_kernel[(turning + triton.cdiv(tokens, rows),)](
            x[part],
            weight,
            cos_sin,
            positions[part],
            slots[part],
            pages,
            tokens,
            x.stride(0),
            0 if cos_sin is None else cos_sin.stride(0),
            pages.stride(0),
            eps,
            ROPE=rope,
            FIRST_GROUP=group,
            FIRST_SCALE=scale,
            ROWS=rows,
            PARTS=parts,
            CHUNK=chunk,
            NATIVE=device.native_e4m3,
            PTX=device.ptx and chunk == 8,
            SPLIT=split,
            num_warps=warps,
            enable_fp_fusion=False,
            **({"maxnreg": 64} if device.ptx else {}),
            **_layout_arguments(layout),
        )


def supports_load_kv(cache: Tensor, layout: KVLayout, slots: Tensor) -> str | None:
    """Groups a power of two; bf16 rows at even byte offsets."""
    return _why_not_layout(cache, layout)


def load_kv(cache: Tensor, layout: KVLayout, slots: Tensor) -> Tensor:
    ref.check_load_kv(cache, layout, slots)
    out = torch.empty(*slots.shape, layout.dim, dtype=torch.bfloat16, device=cache.device)
    if not slots.numel():
        return out
    pages = _cache_view(cache, layout)
    rows, warps = _load_tiles(triton.next_power_of_2(layout.dim), slots.numel(), layout.value)
    _load_kv_kernel[_grid(slots.numel(), rows)](
        pages,
        slots.contiguous(),
        out,
        slots.numel(),
        pages.stride(0),
        ROWS=rows,
        num_warps=warps,
        **_layout_arguments(layout),
    )
    return out
