"""The kernel of RMSNorm with its fp8 cast.

A program holds a row and the weight in registers, in chunks of a power of two of columns that
divides the model's widths (5120 = 5 * 1024, 1280 = 5 * 256), and loads its next row before it
works on the present one. All is fp32 until the one rounding to bf16; the cast sees the rounded
values, 32 columns to a scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.formats import GROUP
from tinfer.kernels._jit import to_bf16, to_fp32
from tinfer.kernels._quant import cast_groups
from tinfer.kernels._round import round_bf16_packed

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
def rms_norm_kernel(
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
