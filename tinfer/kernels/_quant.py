"""Device functions of the quantizing casts: from a group's largest magnitude to scale and codes.

FMT is "e4m3" or "e2m1"; SCALE is "ue8m0", "fp32_pow2", "fp32" or "e4m3", as in
`tinfer.compat.casts`, whose results these reproduce bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.formats import (
    E2M1_AMAX_FLOOR,
    E2M1_AMAX_FLOOR_E4M3,
    E2M1_MAX,
    E4M3_AMAX_FLOOR,
    E4M3_MAX,
)
from tinfer.kernels._jit import (
    INTERPRET,
    absmax,
    e2m1_encode,
    e2m1_round,
    e4m3_decode,
    e4m3_encode,
    e4m3_round,
    ue8m0_decode,
    ue8m0_encode,
    ue8m0_reciprocal,
)

_E4M3_MAX = tl.constexpr(E4M3_MAX)
_E2M1_MAX = tl.constexpr(E2M1_MAX)
_E4M3_MAX_INV = tl.constexpr(1.0 / E4M3_MAX)
_E2M1_MAX_INV = tl.constexpr(1.0 / E2M1_MAX)
_E4M3_FLOOR = tl.constexpr(E4M3_AMAX_FLOOR)
_E4M3_FLOOR_E4M3 = tl.constexpr(E4M3_MAX * 2.0**-9)
_E2M1_FLOOR = tl.constexpr(E2M1_AMAX_FLOOR)
_E2M1_FLOOR_E4M3 = tl.constexpr(E2M1_AMAX_FLOOR_E4M3)


@triton.jit
def _floored(amax, FLOOR: tl.constexpr):
    """max(amax, FLOOR), where infinity and NaN give NaN."""
    bits = amax.to(tl.int32, bitcast=True)
    value = tl.where(amax < FLOOR, FLOOR, amax)
    return tl.where(bits >= 0x7F800000, float("nan"), value)


@triton.jit
def group_scale(amax, FMT: tl.constexpr, SCALE: tl.constexpr):
    """fp32 amax >= 0 -> (scale as stored, its fp32 value, the reciprocal of that value)."""
    if SCALE == "e4m3":
        top: tl.constexpr = _E4M3_MAX if FMT == "e4m3" else _E2M1_MAX
        floor: tl.constexpr = _E4M3_FLOOR_E4M3 if FMT == "e4m3" else _E2M1_FLOOR_E4M3
        amax = _floored(amax, floor)
        stored = e4m3_encode(tl.div_rn(amax, tl.full(amax.shape, top, tl.float32)))
        scale = e4m3_decode(stored)
        return stored, scale, tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)
    inverse_top: tl.constexpr = _E4M3_MAX_INV if FMT == "e4m3" else _E2M1_MAX_INV
    scale = _floored(amax, _E4M3_FLOOR if FMT == "e4m3" else _E2M1_FLOOR) * inverse_top
    if SCALE == "fp32":
        return scale, scale, tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)
    code = ue8m0_encode(scale)
    value = ue8m0_decode(code)
    if SCALE == "fp32_pow2":
        return value, value, ue8m0_reciprocal(code)
    return code, value, ue8m0_reciprocal(code)


@triton.jit
def divide(x, scale, inverse, SCALE: tl.constexpr):
    """x / scale, correctly rounded; `inverse` is the correctly rounded 1 / scale.

    A power of two divides by one exact product. Otherwise one Newton step on the product with
    the remainder taken by fma: correctly rounded (Markstein) where the quotient matters, that is
    above the codes' smallest step.
    """
    if SCALE == "ue8m0" or SCALE == "fp32_pow2":
        return x * inverse
    if INTERPRET:  # its fma may round twice
        x, scale = tl.broadcast(x, scale)
        return tl.div_rn(x, scale)
    quotient = x * inverse
    return tl.fma(tl.fma(-quotient, scale, x), inverse, quotient)


@triton.jit
def encode(x, FMT: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 -> uint8 codes (unpacked)."""
    if FMT == "e4m3":
        return e4m3_encode(x, NATIVE)
    return e2m1_encode(x)


@triton.jit
def round_to(x, FMT: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 -> the nearest value of FMT, in fp32."""
    if FMT == "e4m3":
        return e4m3_round(x, NATIVE)
    return e2m1_round(x)


@triton.jit
def cast_groups(x, FMT: tl.constexpr, SCALE: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 [R, G], one group a row -> (codes uint8 [R, G] unpacked, scales as stored [R])."""
    stored, scale, inverse = group_scale(absmax(x, 1), FMT, SCALE)
    return encode(divide(x, scale[:, None], inverse[:, None], SCALE), FMT, NATIVE), stored


@triton.jit
def round_groups(x, FMT: tl.constexpr, SCALE: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 [R, G], one group a row -> the fp32 values after quantization."""
    _, scale, inverse = group_scale(absmax(x, 1), FMT, SCALE)
    scale = scale[:, None]
    return round_to(divide(x, scale, inverse[:, None], SCALE), FMT, NATIVE) * scale
