"""Paged cache rows: quantize and store (with norm and rotation fused), load by slot.

Memory: `KVLayout` gives every row's codes and scales by the triple (data_stride, scale_base,
scale_stride) within a page; a row of slot s starts at (s // page_size) * page stride, in int64.
A tile of rows is kept whole in registers; a row's groups are a reshape of it.

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
from tinfer.kernels._jit import to_fp32
from tinfer.kernels._kv_rows import (
    first_cast,
    load_tile,
    load_turns,
    norm_tile,
    rotate_tile,
    store_tile,
)
from tinfer.kernels._target import target
from tinfer.kv_layout import FIRST_CASTS, KVLayout

MAX_PROGRAMS = 65535


@triton.jit(do_not_specialize=["tokens"])
def _store_kv_kernel(
    x_ptr,  # bf16 [T, DIM]
    weight_ptr,  # [DIM] or None
    cos_sin_ptr,  # fp32 [L, ROPE] or None
    positions_ptr,  # int64 [T] or None
    slots_ptr,  # int64 [T]
    cache_ptr,  # uint8 pages, or bf16 pages for bf16 rows
    tokens,
    x_stride,
    cos_sin_stride,
    page_stride,
    eps,
    DIM: tl.constexpr,
    DP: tl.constexpr,
    ROPE: tl.constexpr,
    FIRST_GROUP: tl.constexpr,
    FIRST_SCALE: tl.constexpr,
    VALUE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    PAGE: tl.constexpr,
    DATA_STRIDE: tl.constexpr,
    SCALE_BASE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    channel = tl.arange(0, DP)
    for tile in range(tl.program_id(0), tl.cdiv(tokens, ROWS), tl.num_programs(0)):
        # All loads come before the first reduction, whose barrier none could cross.
        token = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        exists = token < tokens
        slot = tl.load(slots_ptr + token, mask=exists, other=-1)
        if cos_sin_ptr is not None:
            position = tl.load(positions_ptr + token, mask=exists, other=0)
        at = x_ptr + token[:, None] * x_stride + channel[None, :]
        x = tl.load(at, mask=exists[:, None] & (channel < DIM)[None, :], other=0.0)
        if weight_ptr is not None:
            weight = to_fp32(tl.load(weight_ptr + channel, mask=channel < DIM, other=0.0))
        if cos_sin_ptr is not None:
            cos, sin = load_turns(cos_sin_ptr, position, slot >= 0, cos_sin_stride, DIM, DP, ROPE)
        if VALUE != "bf16" or weight_ptr is not None or cos_sin_ptr is not None:
            x = to_fp32(x)
        if weight_ptr is not None:
            x = norm_tile(x, weight, eps, DIM)
        if cos_sin_ptr is not None:
            x = rotate_tile(x, cos, sin, ROWS, DIM, DP, ROPE)
        x = first_cast(x, ROWS, DP, FIRST_GROUP, FIRST_SCALE, NATIVE)
        store_tile(
            x,
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
            NATIVE,
        )


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


def _rows_per_program(padded_dim: int, rows: int, value: str) -> int:
    """Rows of a program, which is one warp: no barriers, and a row's reductions are shuffles.

    H200, 4096 rows: e4m3 of 512 channels take 8.1 us with norm and rotation in pairs, 8.6 one by
    one (9.4 with 4 rows and 4 warps); e2m1 8.2 us one by one, 9.0 in pairs; 128 channels 5.6 us
    with 4 rows, 5.9 with 2, 6.9 with 1. 64 rows are done soonest one by one.
    """
    if rows <= 1024:
        return 1
    return max(1, (512 if value == "e2m1" else 1024) // padded_dim)


def _rows_of_a_load(padded_dim: int, rows: int, value: str) -> tuple[int, int]:
    """(rows, warps) of a program that loads. H200, 40,960 rows of 512 channels: e2m1 take 18.1 us
    with 4 rows and 4 warps, 29.2 with one; e4m3 22.4 and 20.1."""
    if value == "e2m1":
        return max(1, 2048 // padded_dim), 4
    return _rows_per_program(padded_dim, rows, value), 1


def _grid(rows: int, per_program: int) -> tuple[int]:
    return (min(triton.cdiv(rows, per_program), MAX_PROGRAMS),)


def _why_not_layout(cache: Tensor, layout: KVLayout) -> str | None:
    group, first = layout.group, FIRST_CASTS[layout.first][0]
    if first and layout.value == "bf16":
        return "a first cast before bf16 rows"
    if first and (layout.dim % first or group % first):
        return f"a first cast in groups of {first} does not fit {layout.dim} channels"
    if layout.value == "bf16" and (cache.stride(0) % 2 or cache.storage_offset() % 2):
        return "bf16 rows at odd byte offsets"
    return None


def supports_store_kv(x: Tensor, slots: Tensor, cache: Tensor, layout: KVLayout) -> str | None:
    """Rows need contiguous channels; groups a power of two."""
    if x.dim() == 2 and x.stride(1) != 1:
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
    if cos_sin.dim() == 2 and cos_sin.stride(1) != 1:
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
    rows = _rows_per_program(triton.next_power_of_2(layout.dim), len(x), layout.value)
    _store_kv_kernel[_grid(len(x), rows)](
        x,
        None if weight is None else weight.contiguous(),
        cos_sin,
        None if positions is None else positions.contiguous(),
        slots.contiguous(),
        pages,
        len(x),
        x.stride(0),
        0 if cos_sin is None else cos_sin.stride(0),
        pages.stride(0),
        eps,
        ROPE=0 if cos_sin is None else cos_sin.shape[1],
        FIRST_GROUP=group,
        FIRST_SCALE=scale,
        ROWS=rows,
        NATIVE=target(x.device).native_e4m3,
        num_warps=1,
        enable_fp_fusion=False,
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
    rows, warps = _rows_of_a_load(triton.next_power_of_2(layout.dim), slots.numel(), layout.value)
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
