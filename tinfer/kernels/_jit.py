"""Device functions shared by every kernel: number formats, bf16 arithmetic, dot, reductions.

fp8, fp4 and ue8m0 travel as uint8 and are encoded and decoded by integer arithmetic, so the same
lines are exact on every target and in Triton's interpreter. The encodings equal
`tinfer.formats` bit for bit; where a device has a conversion that is proven equal, a constexpr
`NATIVE` (host data, see `tinfer.kernels._target`) selects it.

The interpreter computes on the bit patterns of bf16 operands and truncates fp32 -> bf16.
Kernels therefore never write `a * b`, `tl.dot(a, b)` or `.to(tl.bfloat16)` with bf16 values but
use `bf16_mul`, `_dot`, `to_bf16` and `to_fp32` from here; on a device these are the plain
operations.

A `return` under a constexpr `if` does not end the function for the compiler: assign in both
branches and return once. Unary minus is `0 - x`, which makes +0 of +0: flip the sign bit or a
factor that is not zero where -0 counts.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Decided once, like `triton.jit` itself: kernels of this process are interpreted or compiled.
INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))


# ---------------------------------------------------------------- bf16
@triton.jit
def to_fp32(x):
    """bf16 or fp32 -> fp32, exact (subnormals too)."""
    if INTERPRET and x.dtype == tl.bfloat16:
        y = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def to_bf16(x):
    """fp32 -> bf16, round to nearest even; bf16 passes through."""
    if INTERPRET and x.dtype != tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        half = tl.where(nan, 0x7FFF, rounded).to(tl.uint16)
        y = half.to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(tl.bfloat16)
    return y


@triton.jit
def round_bf16(x):
    """fp32 -> the nearest bf16 value, kept in fp32."""
    return to_fp32(to_bf16(x))


@triton.jit
def bf16_mul(a, b):
    """bf16 * bf16 -> bf16, one rounding (a packed multiply on a device)."""
    if INTERPRET:
        y = to_bf16(to_fp32(a) * to_fp32(b))
    else:
        y = a * b
    return y


# ---------------------------------------------------------------- dot and reductions
@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr = tl.constexpr("ieee")):  # noqa: B008
    """acc + a @ b in fp32. 16-bit operands use tensor cores with fp32 accumulation.

    fp32 operands are multiplied as PRECISION says: "ieee" (default), "tf32x3" or "tf32".
    """
    if INTERPRET:
        acc = tl.dot(to_fp32(a), to_fp32(b), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def absmax(x, AXIS: tl.constexpr):
    """max |x| of fp32 along AXIS; a NaN anywhere gives NaN (the maximum is taken on the bits)."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis=AXIS).to(tl.float32, bitcast=True)


# ---------------------------------------------------------------- e4m3
@triton.jit
def _snap(magnitude, TOP: tl.constexpr, LEAST: tl.constexpr, DIGITS: tl.constexpr):
    """|x|, as fp32 bits, on the grid of a small float format: (exponent, anchor, anchor + |x|).

    The format has the largest value TOP (fp32 bits; NaN counts as TOP), the least exponent LEAST
    (biased by 127) and DIGITS stored mantissa bits. The anchor is the power of two whose last
    fp32 bit is the format's step at |x|, so one fp32 addition rounds to nearest, ties to even.
    """
    top = tl.minimum(magnitude, TOP)
    exponent = tl.maximum(top >> 23, LEAST)
    anchor = ((exponent + (23 - DIGITS)) << 23).to(tl.float32, bitcast=True)
    return exponent, anchor, top.to(tl.float32, bitcast=True) + anchor


@triton.jit
def _snapped_code(magnitude, TOP: tl.constexpr, LEAST: tl.constexpr, DIGITS: tl.constexpr):
    """The code of |x| as uint32: steps in the anchor's last bits + steps below the exponent.

    Written as one multiply-add and one constant, which packing can gather from several codes.
    """
    exponent, _, snapped = _snap(magnitude, TOP, LEAST, DIGITS)
    STEPS: tl.constexpr = 1 << DIGITS  # of one exponent
    BASE: tl.constexpr = ((23 - DIGITS) << 23) + LEAST * STEPS
    return snapped.to(tl.uint32, bitcast=True) - exponent * ((1 << 23) - STEPS) - BASE


@triton.jit
def _is_nan(x):
    return (x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) > 0x7F800000


@triton.jit
def e4m3_encode(x, NATIVE: tl.constexpr = False):
    """fp32 -> uint8 e4m3fn: nearest, ties to even, saturating at 448, -0 kept, NaN -> 0x7F."""
    if NATIVE:
        y = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        code = _snapped_code(bits & 0x7FFFFFFF, 0x43E00000, 121, 3)  # 448, 2^-6
        code |= (bits >> 24) & 0x80
        y = tl.where(_is_nan(x), 0x7F, code).to(tl.uint8)
    return y


@triton.jit
def e4m3_round(x, NATIVE: tl.constexpr = False):
    """fp32 -> the fp32 value of its e4m3 code; NaN stays NaN."""
    if NATIVE:
        y = x.to(tl.float8e4nv).to(tl.float32)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        _, anchor, snapped = _snap(bits & 0x7FFFFFFF, 0x43E00000, 121, 3)
        value = (snapped - anchor).to(tl.uint32, bitcast=True) | (bits & 0x80000000)
        y = tl.where(_is_nan(x), x, value.to(tl.float32, bitcast=True))
    return y


@triton.jit
def e4m3_decode(code, NATIVE: tl.constexpr = False):
    """uint8 e4m3fn -> fp32, exact; 0x7F and 0xFF give NaN."""
    if NATIVE:
        y = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        c = code.to(tl.uint32)
        # The code's fields, moved to fp32's, give value * 2^-120; subnormal codes too.
        bits = ((c & 0x80) << 24) | ((c & 0x7F) << 20)
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
        nan = tl.full(value.shape, float("nan"), tl.float32)
        y = tl.where((c & 0x7F) == 0x7F, nan, value)
    return y


@triton.jit
def e4m3_to_bf16_raw(code):
    """uint8 e4m3fn -> bf16 of value * 2^-120, three integer operations.

    NaN codes come out as 480 * 2^-120: for data that holds none, such as weights.
    Multiply by `ue8m0_to_bf16_raw(scale, 120)` to get value * scale.
    """
    c = code.to(tl.uint16)
    return (((c & 0x80) << 8) | ((c & 0x7F) << 4)).to(tl.bfloat16, bitcast=True)


# ---------------------------------------------------------------- e2m1
@triton.jit
def e2m1_magnitude(magnitude):
    """fp32 >= 0 -> uint32 code 0..7: nearest, ties to the even code, saturating at 6, NaN as 6."""
    return _snapped_code(magnitude.to(tl.uint32, bitcast=True), 0x40C00000, 127, 1)


@triton.jit
def e2m1_code(x):
    """fp32 -> uint32 code 0..15 as above, NaN -> 7.

    A negative value that rounds to zero keeps its sign (code 8).
    """
    bits = x.to(tl.uint32, bitcast=True)
    code = e2m1_magnitude((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True))
    return code + tl.where(_is_nan(x), 0, (bits >> 28) & 8).to(tl.uint32)


@triton.jit
def e2m1_encode(x):
    """fp32 -> uint8 code 0..15, see `e2m1_code`."""
    return e2m1_code(x).to(tl.uint8)


@triton.jit
def e2m1_round(x):
    """fp32 -> the fp32 value of its e2m1 code; NaN gives 6."""
    bits = x.to(tl.uint32, bitcast=True)
    _, anchor, snapped = _snap(bits & 0x7FFFFFFF, 0x40C00000, 127, 1)
    value = (snapped - anchor).to(tl.uint32, bitcast=True) | (bits & 0x80000000)
    return tl.where(_is_nan(x), 6.0, value.to(tl.float32, bitcast=True))


@triton.jit
def e2m1_decode(code):
    """uint8 code 0..15 -> fp32, exact; 8 is -0."""
    c = code.to(tl.uint32)
    bits = ((c & 0x8) << 28) | ((c & 0x7) << 22)  # value * 2^-126
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def e2m1_to_bf16_raw(code):
    """uint8 code 0..15 -> bf16 of value * 2^-126, three integer operations.

    Multiply by `ue8m0_to_bf16_raw(scale, 126)` to get value * scale.
    """
    c = code.to(tl.uint16)
    return (((c & 0x8) << 12) | ((c & 0x7) << 6)).to(tl.bfloat16, bitcast=True)


@triton.jit
def nibbles_pack(code):
    """codes [..., 2n] -> bytes [..., n]; the even column sits in the low nibble."""
    low, high = tl.split(tl.reshape(code, code.shape[:-1] + [code.shape[-1] // 2, 2]))  # noqa: RUF005
    return low | (high << 4)


@triton.jit
def nibbles_pack_words(code):
    """uint32 codes [R, 8n] -> uint32 [R, n], eight codes a word: the bytes of `nibbles_pack`."""
    eights = tl.reshape(code, [code.shape[0], code.shape[1] // 8, 8])
    return tl.sum(eights << (tl.arange(0, 8) * 4)[None, None, :].to(tl.uint32), axis=2)


@triton.jit
def nibbles_unpack(packed):
    """bytes [..., n] -> codes [..., 2n], low nibble first."""
    return tl.interleave(packed & 0xF, packed >> 4)


# ---------------------------------------------------------------- ue8m0 and power-of-two scales
@triton.jit
def ue8m0_encode(x):
    """fp32 > 0 -> uint8 exponent of the smallest power of two >= x; NaN and inf -> 255."""
    bits = x.to(tl.uint32, bitcast=True)
    code = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.uint32)
    code = tl.where(bits <= 0x400000, 0, code)
    return tl.minimum(code, 255).to(tl.uint8)


@triton.jit
def ue8m0_decode(code):
    """uint8 -> fp32 2^(code-127); 0 is 2^-127 (subnormal), 255 is NaN."""
    c = code.to(tl.uint32)
    bits = tl.where(c == 0, 0x400000, tl.where(c == 255, 0x7FC00000, c << 23))
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def ue8m0_reciprocal(code):
    """uint8 -> fp32 2^(127-code), exact; 254 gives the subnormal 2^-127, 255 NaN."""
    c = code.to(tl.uint32)
    bits = tl.where(c == 254, 0x400000, tl.where(c == 255, 0x7FC00000, (254 - c) << 23))
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def ue8m0_to_bf16_raw(code, SHIFT: tl.constexpr):
    """uint8 -> bf16 2^(code-127+SHIFT), two integer operations; code + SHIFT in 1..254.

    Saturates at 2^127 above. SHIFT 0 excludes the codes 0 and 255, which no cast of ours writes.
    """
    field = tl.minimum(code.to(tl.uint16) + SHIFT, 254)
    return (field << 7).to(tl.uint16).to(tl.bfloat16, bitcast=True)
