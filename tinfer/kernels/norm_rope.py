"""RMSNorm, RMSNorm with the fp8 cast, and rotary embedding.

    y = weight * (x * rsqrt(sum(x^2) / H + eps))

A program holds a row and the weight in registers, in chunks of a power of two of columns that
divides the model's widths (5120 = 5 * 1024, 1280 = 5 * 256), and loads its next row before it
works on the present one. All is fp32 until the one rounding to bf16; the cast sees the rounded
values, 32 columns to a scale.

The rotary kernel reads pairs of adjacent channels and is compiled without fused multiply-add, so
it equals the reference bit for bit.

Source: written for this project; the contract is `tinfer.compat.norm_rope`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.compat.norm_rope import check_apply_rotary_, check_rms_norm, check_rms_norm_cast
from tinfer.formats import GROUP
from tinfer.kernels._call import MAX_PROGRAMS, device_reason
from tinfer.kernels._jit import to_bf16, to_fp32
from tinfer.kernels._quant import cast_groups
from tinfer.kernels._round import round_bf16_packed
from tinfer.kernels._target import target

MAX_WIDTH = 16384  # columns of a row that one program still holds in registers
_GROUP = tl.constexpr(GROUP)


@triton.jit
def _at(c, C: tl.constexpr):
    """Columns of chunk c as [C / 32, 32]."""
    return c * C + tl.arange(0, C // _GROUP)[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]


@triton.jit
def _load_row(start, width, C: tl.constexpr, CHUNKS: tl.constexpr, WHOLE: tl.constexpr):
    """The CHUNKS chunks of a row, as stored; WHOLE: they cover the width exactly."""
    parts = ()
    for c in tl.static_range(CHUNKS):
        at = _at(c, C)
        if WHOLE:
            part = tl.load(start + at)
        else:
            part = tl.load(start + at, mask=at < width, other=0.0)
        parts = parts + (part,)  # noqa: RUF005  (triton reads no starred tuple)
    return parts


@triton.jit
def _store_chunk(
    value, y, q, scales, c, width, C: tl.constexpr, WHOLE: tl.constexpr,
    WRITE_Y: tl.constexpr, WRITE_Q: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Store fp32 [C / 32, 32] as bf16 and as codes; put its scales into int32 [C / 32, 8]."""
    at = _at(c, C)
    inside = None if WHOLE else at < width
    if WRITE_Y:
        tl.store(y + at, to_bf16(value), mask=inside)
    if WRITE_Q:
        codes, scale = cast_groups(round_bf16_packed(value, NATIVE), "e4m3", "ue8m0", NATIVE)
        tl.store(q + at, codes, mask=inside)
        here = tl.arange(0, 8)[None, :] == c
        scales = tl.where(here, scale[:, None].to(tl.int32), scales)
    return scales


@triton.jit
def _norm_row(
    values, weights, y, q, s, i, width, eps,
    HAS_WEIGHT: tl.constexpr, WRITE_Y: tl.constexpr, WRITE_Q: tl.constexpr,
    C: tl.constexpr, CHUNKS: tl.constexpr, WHOLE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Norm row i, held in chunks as stored, and store it."""
    squares = tl.zeros([C // _GROUP, _GROUP], tl.float32)
    for c in tl.static_range(CHUNKS):
        part = to_fp32(values[c])
        squares += part * part
    rstd = tl.rsqrt(tl.sum(squares) / width + eps)
    row = tl.cast(i, tl.int64)
    y_row, q_row, s_row = y + row * width, q + row * width, s + row * (width // _GROUP)
    scales = tl.zeros([C // _GROUP, 8], tl.int32)  # stored at once: one exchange between threads
    for c in tl.static_range(CHUNKS):
        out = to_fp32(values[c]) * rstd
        if HAS_WEIGHT:
            out = to_fp32(weights[c]) * out
        scales = _store_chunk(
            out, y_row, q_row, scales, c, width, C, WHOLE, WRITE_Y, WRITE_Q, NATIVE
        )
    if WRITE_Q:
        group = tl.arange(0, 8)[None, :] * (C // _GROUP) + tl.arange(0, C // _GROUP)[:, None]
        tl.store(s_row + group, scales.to(tl.uint8), mask=group < width // _GROUP)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x, weight, y, q, s, rows, width, stride, eps,
    HAS_WEIGHT: tl.constexpr, WRITE_Y: tl.constexpr, WRITE_Q: tl.constexpr,
    C: tl.constexpr, CHUNKS: tl.constexpr, WHOLE: tl.constexpr, AHEAD: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    first, step = tl.program_id(0), tl.num_programs(0)
    values = _load_row(x + tl.cast(first, tl.int64) * stride, width, C, CHUNKS, WHOLE)
    weights = values
    if HAS_WEIGHT:
        weights = _load_row(weight, width, C, CHUNKS, WHOLE)
    if AHEAD:
        for i in range(first, rows, step):
            after = tl.cast(tl.minimum(i + step, rows - 1), tl.int64)
            coming = _load_row(x + after * stride, width, C, CHUNKS, WHOLE)
            _norm_row(
                values, weights, y, q, s, i, width, eps,
                HAS_WEIGHT, WRITE_Y, WRITE_Q, C, CHUNKS, WHOLE, NATIVE,
            )  # fmt: skip
            values = coming
    else:
        _norm_row(
            values, weights, y, q, s, first, width, eps,
            HAS_WEIGHT, WRITE_Y, WRITE_Q, C, CHUNKS, WHOLE, NATIVE,
        )  # fmt: skip


def split_width(width: int, least: int = 1) -> tuple[int, int]:
    """Two powers of two (main, rest) that cover `width` columns; rest is 0 or at least `least`."""
    main = max(1 << (width.bit_length() - 1), least)
    if main >= width:
        return main, 0
    return main, max(triton.next_power_of_2(width - main), least)


def _norm_tiles(width: int) -> tuple[int, int, int]:
    """(columns of a chunk, up to 8 chunks, warps): 8 columns a thread where the width allows.

    H200, codes of 4096 rows of 5120: rows loaded ahead by 4 programs a multiprocessor 22.7 us,
    one row a program 25.1, with the weight loaded before the sum 26.0.
    """
    chunk = max(min(width & -width, 1024), GROUP)
    chunk = max(chunk, triton.next_power_of_2(triton.cdiv(width, 8)))
    return chunk, triton.cdiv(width, chunk), max(1, min(chunk // 256, 8))


def _norm_reason(x: Tensor, weight: Tensor | None) -> str | None:
    if x.shape[-1] > MAX_WIDTH:
        return f"rows of more than {MAX_WIDTH} columns"
    return device_reason(x=x, weight=weight)


def _launch_norm(
    x: Tensor, weight: Tensor | None, eps: float, y: Tensor | None, q: Tensor | None
) -> Tensor | None:
    """Norm the rows of x into y and, if q is given, into codes q and the scales returned."""
    width = x.shape[-1]
    x = x.reshape(-1, width)
    x = x if x.stride(1) == 1 else x.contiguous()
    s = None
    if q is not None:
        s = torch.empty(*q.shape[:-1], width // GROUP, dtype=torch.uint8, device=x.device)
    if not x.shape[0]:
        return s
    chunk, chunks, warps = _norm_tiles(width)
    device = target(x.device)
    programs = min(x.shape[0], device.processors * (16 // warps), MAX_PROGRAMS)
    _rms_norm_kernel[(programs,)](
        x,
        x if weight is None else weight.contiguous(),
        x if y is None else y,
        x if q is None else q,
        x if s is None else s,
        x.shape[0],
        width,
        x.stride(0),
        eps,
        HAS_WEIGHT=weight is not None,
        WRITE_Y=y is not None,
        WRITE_Q=q is not None,
        C=chunk,
        CHUNKS=chunks,
        WHOLE=width % chunk == 0,
        AHEAD=x.shape[0] > programs,
        NATIVE=device.native_e4m3,
        num_warps=warps,
    )
    return s


def supports_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> str | None:
    """Rows of up to 16384 columns, on one device."""
    return _norm_reason(x, weight)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    check_rms_norm(x, weight, eps)
    y = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    _launch_norm(x, weight, eps, y, None)
    return y


def supports_rms_norm_cast(x: Tensor, weight: Tensor | None, eps: float) -> str | None:
    """Rows of up to 16384 columns, on one device."""
    return _norm_reason(x, weight)


def rms_norm_cast(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    check_rms_norm_cast(x, weight, eps)
    y = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    q = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    s = _launch_norm(x, weight, eps, y, q)
    assert s is not None
    return y, q, s


def supports_rms_norm_codes(x: Tensor, weight: Tensor | None, eps: float) -> str | None:
    """Rows of up to 16384 columns, on one device."""
    return _norm_reason(x, weight)


def rms_norm_codes(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    check_rms_norm_cast(x, weight, eps, "rms_norm_codes")
    q = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    s = _launch_norm(x, weight, eps, None, q)
    assert s is not None
    return q, s


@triton.jit(do_not_specialize=["tokens"])
def _apply_rotary_kernel(
    x, cos_sin, positions, tokens, heads, stride_t, stride_h,
    INVERSE: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """x points at the first rotated channel; P is HALF padded to a power of two."""
    across = (heads + BLOCK_H - 1) // BLOCK_H
    tiles = (tokens + BLOCK_T - 1) // BLOCK_T * across
    pair = tl.arange(0, P)[None, None, :]  # [1, 1, P]
    channel = tl.arange(0, 2 * P)[None, None, :]
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        block = tile // across
        token = (block * BLOCK_T + tl.arange(0, BLOCK_T))[:, None, None]  # [BT, 1, 1]
        head = ((tile - block * across) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :, None]
        live = token < tokens
        position = tl.load(positions + token, mask=live, other=0)
        at = x + token.to(tl.int64) * stride_t + head.to(tl.int64) * stride_h + channel
        inside = live & (head < heads) & (channel < 2 * HALF)
        value = to_fp32(tl.load(at, mask=inside, other=0.0))
        angle = cos_sin + position * (2 * HALF) + pair
        known = live & (pair < HALF)
        cos = tl.load(angle, mask=known, other=0.0)
        sin = tl.load(angle + HALF, mask=known, other=0.0)
        if INVERSE:
            sin = -sin
        a, b = tl.split(tl.reshape(value, [BLOCK_T, BLOCK_H, P, 2]))
        turned = tl.interleave(a * cos - b * sin, a * sin + b * cos)
        tl.store(at, to_bf16(turned), mask=inside)


def _rotary_tiles(heads: int, half: int) -> tuple[int, int]:
    """(tokens, heads) of a tile: 512 pairs, one warp, one token's heads where there are enough.

    H200, 4096 tokens of 64 heads of 64 channels: 23.5 us; 2 warps for 32 heads 23.6.
    """
    rows = max(512 // half, 1)
    block_h = min(rows, triton.next_power_of_2(heads))
    return rows // block_h, block_h


def supports_apply_rotary_(
    x: Tensor, cos_sin: Tensor, positions: Tensor, inverse: bool = False
) -> str | None:
    """Contiguous channels and table, on one device."""
    if x.stride(2) != 1 or not cos_sin.is_contiguous():
        return "channels of x or cos_sin are not contiguous"
    return device_reason(x=x, cos_sin=cos_sin, positions=positions)


def apply_rotary_(x: Tensor, cos_sin: Tensor, positions: Tensor, inverse: bool = False) -> None:
    check_apply_rotary_(x, cos_sin, positions, inverse)
    tokens, heads, width = x.shape
    rope = cos_sin.shape[1]
    if not tokens * heads * rope:
        return
    half = triton.next_power_of_2(rope // 2)
    block_t, block_h = _rotary_tiles(heads, half)
    tiles = triton.cdiv(tokens, block_t) * triton.cdiv(heads, block_h)
    _apply_rotary_kernel[(min(tiles, MAX_PROGRAMS),)](
        x[..., width - rope :],
        cos_sin,
        positions.contiguous(),
        tokens,
        heads,
        x.stride(0),
        x.stride(1),
        INVERSE=inverse,
        HALF=rope // 2,
        P=half,
        BLOCK_T=block_t,
        BLOCK_H=block_h,
        num_warps=1,
        enable_fp_fusion=False,
    )
