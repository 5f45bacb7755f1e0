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
    e2m1_code,
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
    else:
        inverse_top: tl.constexpr = _E4M3_MAX_INV if FMT == "e4m3" else _E2M1_MAX_INV
        scale = _floored(amax, _E4M3_FLOOR if FMT == "e4m3" else _E2M1_FLOOR) * inverse_top
        stored = scale
    if SCALE == "ue8m0" or SCALE == "fp32_pow2":
        code = ue8m0_encode(scale)
        scale = ue8m0_decode(code)
        stored = code if SCALE == "ue8m0" else scale
        inverse = ue8m0_reciprocal(code)
    else:
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return stored, scale, inverse


@triton.jit
def divide(x, scale, inverse, FMT: tl.constexpr, SCALE: tl.constexpr):
    """x / scale, correctly rounded; `inverse` is the correctly rounded 1 / scale.

    A power of two divides by one exact product. Otherwise one Newton step on the product with
    the remainder taken by fma: correctly rounded (Markstein) for quotients above the codes'
    smallest step. The remainder could underflow only with fp4's tiny floor and fp32 scales.
    """
    if SCALE == "ue8m0" or SCALE == "fp32_pow2":
        quotient = x * inverse
    elif INTERPRET or (FMT == "e2m1" and SCALE == "fp32"):  # the interpreter's fma rounds twice
        x, scale = tl.broadcast(x, scale)
        quotient = tl.div_rn(x, scale)
    else:
        product = x * inverse
        # These signs keep -0: the remainder of a zero is +0.
        quotient = tl.fma(-tl.fma(product, scale, -x), inverse, product)
    return quotient


@triton.jit
def encode(x, FMT: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 -> codes, not packed: uint8 of e4m3, uint32 of e2m1."""
    if FMT == "e4m3":
        code = e4m3_encode(x, NATIVE)
    else:
        code = e2m1_code(x)
    return code


@triton.jit
def round_to(x, FMT: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 -> the nearest value of FMT, in fp32."""
    if FMT == "e4m3":
        value = e4m3_round(x, NATIVE)
    else:
        value = e2m1_round(x)
    return value


@triton.jit
def cast_groups(x, FMT: tl.constexpr, SCALE: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 [R, G], one group a row -> (codes of `encode` [R, G], scales as stored [R])."""
    stored, scale, inverse = group_scale(absmax(x, 1), FMT, SCALE)
    return encode(divide(x, scale[:, None], inverse[:, None], FMT, SCALE), FMT, NATIVE), stored


@triton.jit
def round_groups(x, FMT: tl.constexpr, SCALE: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 [R, G], one group a row -> the fp32 values after quantization."""
    _, scale, inverse = group_scale(absmax(x, 1), FMT, SCALE)
    scale = scale[:, None]
    return round_to(divide(x, scale, inverse[:, None], FMT, SCALE), FMT, NATIVE) * scale
