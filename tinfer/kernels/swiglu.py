"""Clamped SwiGLU with routing weight, alone and with the fp8 cast.

    out = silu(min(gate, limit)) * clamp(up, -limit, limit) * weight

One program takes a tile of rows and columns: gate and up from the two halves of a row, the
product in fp32, one rounding to bf16, and from the rounded values the codes and one scale per 32
columns. With row ends, rows outside the segments are neither read nor written.

Source: written for this project; the contract is `tinfer.compat.swiglu`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.compat.swiglu import check_swiglu, check_swiglu_cast
from tinfer.formats import GROUP
from tinfer.kernels._call import MAX_PROGRAMS, device_reason, stride_reason
from tinfer.kernels._jit import to_bf16, to_fp32
from tinfer.kernels._quant import cast_groups
from tinfer.kernels._round import round_bf16_packed
from tinfer.kernels._target import target

_GROUP = tl.constexpr(GROUP)
SHARES = 32  # warps of a multiprocessor that walk over segments


@triton.jit
def _live_bands(row_ends, segments, alignment, BLOCK_R: tl.constexpr, SEGMENTS: tl.constexpr):
    """int32 [SEGMENTS]: bands of BLOCK_R rows in the segments up to each one."""
    segment = tl.arange(0, SEGMENTS)
    end = tl.load(row_ends + segment, mask=segment < segments, other=0)
    before = tl.load(row_ends + segment - 1, mask=(segment > 0) & (segment < segments), other=0)
    begin = (before + alignment - 1) // alignment * alignment
    return tl.cumsum((tl.maximum(end - begin, 0) + BLOCK_R - 1) // BLOCK_R, axis=0)


@triton.jit
def _find_band(row_ends, bands, segments, alignment, band, BLOCK_R: tl.constexpr):
    """(segment, its end, first row) of a live band."""
    passed = (bands <= band).to(tl.int32)
    segment = tl.minimum(tl.sum(passed, axis=0), segments - 1)
    skipped = tl.max(bands * passed, axis=0)
    before = tl.load(row_ends + segment - 1, mask=segment > 0, other=0)
    begin = (before + alignment - 1) // alignment * alignment
    return segment, tl.load(row_ends + segment), begin + (band - skipped) * BLOCK_R


@triton.jit
def _product(gate, up, weight, limit, CLAMP: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    if CLAMP:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    value = gate / (1.0 + tl.exp2(gate * -1.4426950408889634)) * up
    if HAS_WEIGHT:
        value = value * weight
    return value


@triton.jit
def _tile(
    gate_up, weights, out, q, s, row, live, start, width, stride, limit,
    CLAMP: tl.constexpr, HAS_WEIGHT: tl.constexpr, CAST: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Rows `row` [R], of which `live` ones exist, and BLOCK_I columns from `start` on."""
    row = row.to(tl.int64)
    column = (start + tl.arange(0, BLOCK_I))[None, :]
    inside = live[:, None] & (column < width)
    at = gate_up + row[:, None] * stride + column
    gate = to_fp32(tl.load(at, mask=inside, other=0.0))
    up = to_fp32(tl.load(at + width, mask=inside, other=0.0))
    weight = 1.0
    if HAS_WEIGHT:
        weight = tl.load(weights + row, mask=live, other=0.0)[:, None]
    value = _product(gate, up, weight, limit, CLAMP, HAS_WEIGHT)
    to = row[:, None] * width + column
    if CAST:
        groups: tl.constexpr = BLOCK_R * BLOCK_I // _GROUP
        rounded = tl.reshape(round_bf16_packed(value, NATIVE), [groups, _GROUP])
        codes, scales = cast_groups(rounded, "e4m3", "ue8m0", NATIVE)
        tl.store(q + to, tl.reshape(codes, [BLOCK_R, BLOCK_I]), mask=inside)
        group = start // _GROUP + tl.arange(0, BLOCK_I // _GROUP)[None, :]
        kept = live[:, None] & (group < width // _GROUP)
        to_s = row[:, None] * (width // _GROUP) + group
        tl.store(s + to_s, tl.reshape(scales, [BLOCK_R, BLOCK_I // _GROUP]), mask=kept)
    else:
        tl.store(out + to, to_bf16(value), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _swiglu_kernel(
    gate_up, weights, out, q, s, rows, width, stride, limit,
    CLAMP: tl.constexpr, HAS_WEIGHT: tl.constexpr, CAST: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, BLOCK_I)
    tiles = tl.cdiv(rows, BLOCK_R) * blocks
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile // blocks * BLOCK_R + tl.arange(0, BLOCK_R)
        _tile(
            gate_up, weights, out, q, s, row, row < rows, tile % blocks * BLOCK_I, width, stride,
            limit, CLAMP, HAS_WEIGHT, CAST, BLOCK_R, BLOCK_I, NATIVE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "segments"])
def _swiglu_segments_kernel(
    gate_up, weights, row_ends, out, q, s, rows, width, stride, limit, segments, alignment,
    CLAMP: tl.constexpr, HAS_WEIGHT: tl.constexpr, CAST: tl.constexpr, SEGMENTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Live tiles are dealt out in equal runs; a program finds its first and walks on from it."""
    bands = _live_bands(row_ends, segments, alignment, BLOCK_R, SEGMENTS)
    blocks = tl.cdiv(width, BLOCK_I)
    tiles = tl.max(bands, axis=0) * blocks
    share = tl.cdiv(tiles, tl.num_programs(0))
    begin = tl.program_id(0) * share
    segment, end, first = _find_band(row_ends, bands, segments, alignment, begin // blocks, BLOCK_R)
    for tile in range(begin, tl.minimum(begin + share, tiles)):
        row = first + tl.arange(0, BLOCK_R)
        live = (row < end) & (row < rows)
        _tile(
            gate_up, weights, out, q, s, row, live, tile % blocks * BLOCK_I, width, stride,
            limit, CLAMP, HAS_WEIGHT, CAST, BLOCK_R, BLOCK_I, NATIVE,
        )  # fmt: skip
        if tile % blocks == blocks - 1:
            first += BLOCK_R
            while (first >= end) & (segment + 1 < segments):
                segment += 1
                first = (end + alignment - 1) // alignment * alignment
                end = tl.load(row_ends + segment)


def _swiglu_tiles(rows: int, width: int, cast: bool) -> tuple[int, int, int]:
    """(rows, columns, warps) of a tile: 2048 products; a part of a row where rows are few.

    H200, 24576 rows of 2304, cold: with the cast 2 warps 84 us, 4 warps 93; without it 90 and 85.
    """
    block = min(256, triton.next_power_of_2(width))
    if rows <= 256:
        return 1, block, 1
    return min(2048 // block, 64), block, 2 if cast else 4


def _launch(
    gate_up: Tensor,
    limit: float,
    weights: Tensor | None,
    row_ends: Tensor | None,
    alignment: int,
    out: Tensor,
    scales: Tensor | None,
) -> None:
    """Write bf16 products to out, or codes to out and scales where scales are given."""
    rows, width = out.shape
    if not rows * width:
        return
    block_r, block_i, warps = _swiglu_tiles(rows, width, scales is not None)
    tiles = triton.cdiv(rows, block_r) * triton.cdiv(width, block_i)
    device = target(out.device)
    data = (out, out, out if scales is None else scales, rows, width, gate_up.stride(0), limit)
    weight = gate_up if weights is None else weights
    constants = {
        "CLAMP": limit > 0,
        "HAS_WEIGHT": weights is not None,
        "CAST": scales is not None,
        "BLOCK_R": block_r,
        "BLOCK_I": block_i,
        "NATIVE": device.native_e4m3,
        "num_warps": warps,
    }
    if row_ends is None:
        _swiglu_kernel[(min(tiles, MAX_PROGRAMS),)](gate_up, weight, *data, **constants)
        return
    segments = row_ends.shape[0]
    programs = min(tiles, device.processors * SHARES // warps, MAX_PROGRAMS)
    if segments:
        _swiglu_segments_kernel[(programs,)](
            gate_up, weight, row_ends, *data, segments, alignment,
            SEGMENTS=triton.next_power_of_2(segments), **constants,
        )  # fmt: skip


def _reason(gate_up: Tensor, weights: Tensor | None, row_ends: Tensor | None) -> str | None:
    return stride_reason(gate_up=gate_up, weights=weights, row_ends=row_ends) or device_reason(
        gate_up=gate_up, weights=weights, row_ends=row_ends
    )


def supports_swiglu(
    gate_up: Tensor,
    limit: float,
    weights: Tensor | None,
    row_ends: Tensor | None = None,
    alignment: int = 1,
) -> str | None:
    """Contiguous rows, on one device."""
    return _reason(gate_up, weights, row_ends)


def swiglu(
    gate_up: Tensor,
    limit: float,
    weights: Tensor | None,
    row_ends: Tensor | None = None,
    alignment: int = 1,
) -> Tensor:
    check_swiglu(gate_up, limit, weights, row_ends, alignment)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=torch.bfloat16, device=gate_up.device)
    _launch(gate_up, limit, weights, row_ends, alignment, out, None)
    return out


def supports_swiglu_cast(
    gate_up: Tensor,
    limit: float,
    weights: Tensor | None,
    row_ends: Tensor | None = None,
    alignment: int = 1,
) -> str | None:
    """Contiguous rows, on one device."""
    return _reason(gate_up, weights, row_ends)


def swiglu_cast(
    gate_up: Tensor,
    limit: float,
    weights: Tensor | None,
    row_ends: Tensor | None = None,
    alignment: int = 1,
) -> tuple[Tensor, Tensor]:
    check_swiglu_cast(gate_up, limit, weights, row_ends, alignment)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    q = torch.empty(rows, width, dtype=torch.uint8, device=gate_up.device)
    s = torch.empty(rows, width // GROUP, dtype=torch.uint8, device=gate_up.device)
    _launch(gate_up, limit, weights, row_ends, alignment, q, s)
    return q, s
