"""Quantizing casts of activations, one pass over the data.

A group of G columns is a row of a tile `[R, G]`: its maximum is a reduction inside the row, its
codes leave as bytes (two codes a byte for e2m1). Groups are numbered row by row; contiguous data
is one long row, and a tile one contiguous piece of it. Column-major scales take tiles of ROWS
rows instead ("bands"), so that a column of scales is written in pieces. Scales are handled in
units of U groups: 4 where words are packed, else 1. Programs stride over the
tiles, so the grid stays below 65,536.

Exact: scales and codes equal the reference bit for bit (`_quant`). Source: `tinfer.compat.casts`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.compat.casts import (
    TMA_ALIGNMENT,
    check_cast_back,
    check_fake_quant_,
    check_per_token_cast,
    scale_columns,
    scale_dtype,
)
from tinfer.kernels._block_casts import per_block_cast, supports_per_block_cast
from tinfer.kernels._call import device_reason
from tinfer.kernels._group_walk import (
    Walk,
    as_rows,
    groups_of_units,
    offsets,
    units_of_tile,
    with_columns,
)
from tinfer.kernels._jit import (
    e2m1_decode,
    e4m3_decode,
    nibbles_pack_words,
    nibbles_unpack,
    to_bf16,
    to_fp32,
    ue8m0_decode,
)
from tinfer.kernels._quant import cast_groups, round_groups
from tinfer.kernels._target import target

__all__ = [
    "cast_back",
    "fake_quant_",
    "per_block_cast",
    "per_token_cast",
    "supports_cast_back",
    "supports_fake_quant_",
    "supports_per_block_cast",
    "supports_per_token_cast",
]
BAND = 32  # rows of a tile when scales are column-major: one 32-byte sector of byte scales


# ---------------------------------------------------------------- kernels
@triton.jit(do_not_specialize=["rows", "groups", "stored_rows", "tiles"])
def _per_token_cast_kernel(
    x_ptr,  # [rows, groups * G] bf16 or fp32
    q_ptr,  # [rows, groups * G] bytes of e4m3, or [rows, groups * G / 8] words of e2m1
    s_ptr,  # [stored_rows, units or groups]
    rows,
    groups,  # in a row
    stored_rows,  # rows of the scales, padding included
    tiles,
    stride_x,
    stride_s_row,
    stride_s_col,
    G: tl.constexpr,
    R: tl.constexpr,  # groups a tile
    U: tl.constexpr,
    ROWS: tl.constexpr,
    ONE_ROW: tl.constexpr,
    PACKED: tl.constexpr,
    FMT: tl.constexpr,
    SCALE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    Q: tl.constexpr = G // 8 if FMT == "e2m1" else G
    units_per_row = (groups + U - 1) // U
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        unit_row, unit = units_of_tile(tile, units_per_row, ONE_ROW, R // U, ROWS)
        row, group = groups_of_units(unit_row, unit, U)
        valid = (row < rows) & (group < groups)
        x_at = with_columns(offsets(row, group, stride_x, G), G)
        x = to_fp32(tl.load(x_ptr + x_at, mask=valid[:, None], other=0.0))  # [R, G]
        codes, scales = cast_groups(x, FMT, SCALE, NATIVE)
        if FMT == "e2m1":
            codes = nibbles_pack_words(codes)
        q_at = with_columns(offsets(row, group, groups * Q, Q), Q)
        tl.store(q_ptr + q_at, codes, mask=valid[:, None])

        if ROWS or PACKED:  # padding is zero
            scales = tl.where(valid, scales, tl.zeros_like(scales))
        if PACKED:
            shift = (tl.arange(0, U) * 8)[None, :]
            words = tl.sum(tl.reshape(scales, [R // U, U]).to(tl.int32) << shift, axis=1)
            inside = (unit_row < stored_rows) & (unit < units_per_row)
            tl.store(
                s_ptr + offsets(unit_row, unit, stride_s_row, stride_s_col), words, mask=inside
            )
        else:
            inside = (row < stored_rows) & (group < groups)
            tl.store(s_ptr + offsets(row, group, stride_s_row, stride_s_col), scales, mask=inside)


@triton.jit(do_not_specialize=["rows", "groups", "tiles"])
def _fake_quant_kernel(
    x_ptr,  # [rows, groups * G] bf16 or fp32, in place
    rows,
    groups,
    tiles,
    stride_x,
    G: tl.constexpr,
    R: tl.constexpr,
    ONE_ROW: tl.constexpr,
    FMT: tl.constexpr,
    SCALE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, group = units_of_tile(tile, groups, ONE_ROW, R, 0)
        valid = ((row < rows) & (group < groups))[:, None]
        at = with_columns(offsets(row, group, stride_x, G), G)
        y = round_groups(to_fp32(tl.load(x_ptr + at, mask=valid, other=0.0)), FMT, SCALE, NATIVE)
        if x_ptr.dtype.element_ty == tl.bfloat16:
            y = to_bf16(y)
        tl.store(x_ptr + at, y, mask=valid)


@triton.jit(do_not_specialize=["rows", "groups", "tiles"])
def _cast_back_kernel(
    q_ptr,  # [rows, groups * G] bytes, or half as many packed
    s_ptr,
    y_ptr,  # [rows, groups * G] bf16 or fp32
    rows,
    groups,
    tiles,
    stride_s_row,
    stride_s_col,
    G: tl.constexpr,
    R: tl.constexpr,
    ONE_ROW: tl.constexpr,
    PACKED: tl.constexpr,
    FMT: tl.constexpr,
    SCALE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    Q: tl.constexpr = G // 2 if FMT == "e2m1" else G
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, group = units_of_tile(tile, groups, ONE_ROW, R, 0)
        valid = (row < rows) & (group < groups)
        q_at = with_columns(offsets(row, group, groups * Q, Q), Q)
        codes = tl.load(q_ptr + q_at, mask=valid[:, None], other=0)
        s_at = offsets(row, group // 4 if PACKED else group, stride_s_row, stride_s_col)
        stored = tl.load(s_ptr + s_at, mask=valid, other=0)
        if PACKED:
            scale = ue8m0_decode((stored >> ((group % 4) * 8)) & 0xFF)
        elif SCALE == "ue8m0":
            scale = ue8m0_decode(stored)
        elif SCALE == "e4m3":
            scale = e4m3_decode(stored)
        else:
            scale = stored
        if FMT == "e2m1":
            value = e2m1_decode(nibbles_unpack(codes))
        else:
            value = e4m3_decode(codes, NATIVE)
        y = value * scale[:, None]
        if y_ptr.dtype.element_ty == tl.bfloat16:
            y = to_bf16(y)
        tl.store(
            y_ptr + with_columns(offsets(row, group, groups * G, G), G), y, mask=valid[:, None]
        )


# ---------------------------------------------------------------- launchers
def _cast_tiles(group: int, band: int, long_e2m1: bool = False) -> tuple[int, int]:
    """(groups a tile, warps).

    H200: 1,024 to 16,384 values a tile with 16 to 32 a thread differ by less than 5 % at 4096
    rows; the smallest start soonest at 16. Bands of 32 rows x 128 values and 4 warps take 22.2 us
    at 4096 rows, four times as many values 22.7 to 23.9.
    Long e2m1 of groups of 32 takes 22.3 us at 2,048 values, 23.5 at 1,024.
    """
    if band:
        return 4096 // group, 4
    return (2048 if long_e2m1 and group == 32 else 1024) // group, 2


def _new_scales(x: Tensor, columns: int, dtype: torch.dtype, col_major: bool) -> Tensor:
    if not col_major:
        return x.new_empty((*x.shape[:-1], columns), dtype=dtype)
    unit = TMA_ALIGNMENT // dtype.itemsize
    aligned = -(-x.shape[0] // unit) * unit
    storage = x.new_empty((columns, aligned), dtype=dtype)
    return storage.as_strided((x.shape[0], columns), (1, aligned))


def supports_per_token_cast(
    x: Tensor, fmt: str, group: int, scale_fmt: str, col_major: bool = False
) -> str | None:
    return device_reason(x=x)


def per_token_cast(
    x: Tensor, fmt: str, group: int, scale_fmt: str, col_major: bool = False
) -> tuple[Tensor, Tensor]:
    check_per_token_cast(x, fmt, group, scale_fmt, col_major)
    k, packed, device = x.shape[-1], scale_fmt == "ue8m0_packed", target(x.device)
    q = x.new_empty((*x.shape[:-1], k // 2 if fmt == "e2m1" else k), dtype=torch.uint8)
    s = _new_scales(x, scale_columns(k // group, scale_fmt), scale_dtype(scale_fmt), col_major)
    if x.numel() == 0:
        return q, s
    flat = as_rows(x)
    flat = x.contiguous().view(-1, k) if flat is None else flat
    rows, stored_rows = flat.shape[0], s.stride(1) if col_major else flat.shape[0]
    unit, band = 4 if packed else 1, BAND if col_major else 0
    tile, warps = _cast_tiles(group, band, fmt == "e2m1" and x.numel() >= 1 << 20)
    walk = Walk(stored_rows, k // group, max(tile, band * unit), unit, band)
    if not band and flat.is_contiguous() and walk.groups % unit == 0:
        walk, rows, stored_rows = walk.joined(), 1, 1
    _per_token_cast_kernel[walk.grid](
        flat, q.view(torch.int32) if fmt == "e2m1" else q, s,
        rows, walk.groups, stored_rows, walk.tiles, flat.stride(0),
        *((1, stored_rows) if col_major else (s.shape[-1], 1)),
        G=group, R=walk.tile, U=unit, ROWS=walk.band, ONE_ROW=walk.one_row, PACKED=packed,
        FMT=fmt, SCALE="ue8m0" if packed else scale_fmt, NATIVE=device.native_e4m3,
        num_warps=warps,
    )  # fmt: skip
    return q, s


def supports_fake_quant_(x: Tensor, fmt: str, group: int, scale_fmt: str) -> str | None:
    if x.numel() and as_rows(x) is None:
        return "x's rows have no common stride"
    return device_reason(x=x)


def fake_quant_(x: Tensor, fmt: str, group: int, scale_fmt: str) -> None:
    check_fake_quant_(x, fmt, group, scale_fmt)
    if x.numel() == 0:
        return
    flat, device = as_rows(x), target(x.device)
    assert flat is not None
    tile, warps = _cast_tiles(group, 0)
    walk = Walk(flat.shape[0], flat.shape[1] // group, tile)
    walk = walk.joined() if flat.is_contiguous() else walk
    _fake_quant_kernel[walk.grid](
        flat, walk.rows, walk.groups, walk.tiles, flat.stride(0),
        G=group, R=tile, ONE_ROW=walk.one_row, FMT=fmt,
        SCALE="ue8m0" if scale_fmt == "ue8m0_packed" else scale_fmt, NATIVE=device.native_e4m3,
        num_warps=warps,
    )  # fmt: skip


def supports_cast_back(
    q: Tensor, s: Tensor, fmt: str, group: int, scale_fmt: str, dtype: torch.dtype
) -> str | None:
    return device_reason(q=q, s=s)


def cast_back(
    q: Tensor, s: Tensor, fmt: str, group: int, scale_fmt: str, dtype: torch.dtype
) -> Tensor:
    check_cast_back(q, s, fmt, group, scale_fmt, dtype)
    k = q.shape[-1] * (2 if fmt == "e2m1" else 1)
    y = q.new_empty((*q.shape[:-1], k), dtype=dtype)
    if y.numel() == 0:
        return y
    q, s, device = q.contiguous(), s.reshape(-1, s.shape[-1]), target(q.device)
    packed = scale_fmt == "ue8m0_packed"
    tile, warps = _cast_tiles(group, 0)
    walk = Walk(y.numel() // k, k // group, tile)
    if s.is_contiguous() and not (packed and walk.groups % 4):
        walk = walk.joined()
    _cast_back_kernel[walk.grid](
        q, s, y, walk.rows, walk.groups, walk.tiles, *s.stride(),
        G=group, R=tile, ONE_ROW=walk.one_row, PACKED=packed, FMT=fmt,
        SCALE="ue8m0" if packed else scale_fmt, NATIVE=device.native_e4m3,
        num_warps=warps,
    )  # fmt: skip
    return y
