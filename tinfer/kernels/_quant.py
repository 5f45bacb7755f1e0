"""Device functions of the quantizing casts: from a group's largest magnitude to scale and codes.

FMT is "e4m3" or "e2m1"; SCALE is "ue8m0", "fp32_pow2", "fp32" or "e4m3", as in
`tinfer.compat.casts`, whose results these reproduce bit for bit.
"""

from __future__ import annotations

import struct

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
    e2m1_magnitude,
    e2m1_round,
    e4m3_decode,
    e4m3_encode,
    e4m3_round,
    ue8m0_decode,
)


def _bits(value: float) -> tl.constexpr:
    return tl.constexpr(int.from_bytes(struct.pack("<f", value), "little"))


_E4M3_MAX = tl.constexpr(E4M3_MAX)
_E2M1_MAX = tl.constexpr(E2M1_MAX)
_E4M3_MAX_INV = tl.constexpr(1.0 / E4M3_MAX)
_E2M1_MAX_INV = tl.constexpr(1.0 / E2M1_MAX)
_FINITE = tl.constexpr(2.0**100)
_E4M3_FLOOR = _bits(E4M3_AMAX_FLOOR)
_E4M3_FLOOR_E4M3 = _bits(E4M3_MAX * 2.0**-9)
_E2M1_FLOOR = _bits(E2M1_AMAX_FLOOR)
_E2M1_FLOOR_E4M3 = _bits(E2M1_AMAX_FLOOR_E4M3)


@triton.jit
def _pow2_scale(scale):
    """fp32 normal, inf or NaN -> (ue8m0 of the power of two >= it, its reciprocal in fp32).

    Adding one mantissa short of an exponent carries unless the mantissa is zero. 255 is NaN.
    """
    bits = scale.to(tl.uint32, bitcast=True)
    code = tl.minimum((bits + 0x7FFFFF) >> 23, 255)
    reciprocal = tl.where(code == 255, 0x7FC00000, (254 - code) << 23).to(tl.uint32)
    return code.to(tl.uint8), reciprocal.to(tl.float32, bitcast=True)


@triton.jit
def group_scale(amax, FMT: tl.constexpr, SCALE: tl.constexpr):
    """fp32 amax >= 0 -> (scale as stored, its fp32 value, the reciprocal of that value)."""
    E4M3: tl.constexpr = FMT == "e4m3"
    if SCALE == "e4m3":
        FLOOR: tl.constexpr = _E4M3_FLOOR_E4M3 if E4M3 else _E2M1_FLOOR_E4M3
    else:
        FLOOR: tl.constexpr = _E4M3_FLOOR if E4M3 else _E2M1_FLOOR
    bits = tl.maximum(amax.to(tl.int32, bitcast=True), FLOOR)
    if SCALE == "fp32":
        bits = tl.where(bits >= 0x7F800000, 0x7FC00000, bits).to(tl.int32)
    amax = bits.to(tl.float32, bitcast=True)
    if SCALE == "e4m3":
        TOP: tl.constexpr = _E4M3_MAX if E4M3 else _E2M1_MAX
        stored = e4m3_encode(tl.div_rn(amax, tl.full(amax.shape, TOP, tl.float32)))
        scale = e4m3_decode(stored)
    else:
        scale = amax * (_E4M3_MAX_INV if E4M3 else _E2M1_MAX_INV)
        stored = scale
    if SCALE == "ue8m0" or SCALE == "fp32_pow2":
        code, inverse = _pow2_scale(scale)
        scale = ue8m0_decode(code)
        stored = code if SCALE == "ue8m0" else scale
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
        if SCALE == "e4m3":  # infinities of a group that saturates stay in the range of the fma
            product = tl.minimum(tl.maximum(product, -_FINITE), _FINITE)
        # A zero remainder comes out as +0: these signs keep -0. Unlike `-`, which means `0 -`,
        # a factor of -1 is free.
        quotient = tl.fma(tl.fma(product, scale, x * -1.0), inverse * -1.0, product)
    return quotient


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
    """fp32 [R, G], one group a row -> (codes [R, G], scales as stored [R]).

    Codes are uint8 of e4m3 or uint32 of e2m1.
    """
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    stored, scale, inverse = group_scale(absmax(magnitude, 1), FMT, SCALE)
    if FMT == "e4m3":
        scaled = divide(x, scale[:, None], inverse[:, None], FMT, SCALE)
        codes = e4m3_encode(scaled, NATIVE)
    else:  # a group is NaN as a whole, and then without signs
        scaled = divide(magnitude, scale[:, None], inverse[:, None], FMT, SCALE)
        sign = tl.where(scale == scale, 8, 0).to(tl.uint32)[:, None]
        codes = e2m1_magnitude(scaled) + ((bits >> 28) & sign)
    return codes, stored


@triton.jit
def round_groups(x, FMT: tl.constexpr, SCALE: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 [R, G], one group a row -> the fp32 values after quantization."""
    _, scale, inverse = group_scale(absmax(x, 1), FMT, SCALE)
    scale = scale[:, None]
    return round_to(divide(x, scale, inverse[:, None], FMT, SCALE), FMT, NATIVE) * scale
