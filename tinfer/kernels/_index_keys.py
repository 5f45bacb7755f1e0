"""Device functions that turn packed e2m1 rows of 128 channels into bf16 dot operands.

A 32-bit word holds the nibbles of channels 8i .. 8i+7. Nibbles j and j+4 of a word become one
pair of bf16 by two shifts and two masks: sign to bit 15, magnitude to bits 8..6, which is the
value times 2^-126. Operand j (of four) holds the pairs of all words, channels in the order
(8i+j, 8i+j+4); a dot product does not mind the order as long as both sides use the same.

The group scale multiplies the pair as 2^(code-127+126-16): both sides of the dot product come out
times 2^-16, which keeps scales up to 2^17 (code 144) within bf16's exponents. The caller
multiplies the result by 2^32 (through the head weights), so products below 2^-94 round as
subnormals do. A row with a scale code above 144, NaN among them, is reported by `unusable`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._jit import bf16_mul

RESCALE = tl.constexpr(2.0**32)
_SCALE_ONE = tl.constexpr((126 - 16) * 0x00800080)  # exponent fields of both halves


@triton.jit
def unusable(scale_word):
    """Whether any of the four scale codes of uint32 [R] lies above 144."""
    return (((scale_word & 0x7F7F7F7F) + 0x6F6F6F6F) & scale_word & 0x80808080) != 0


@triton.jit
def scale_pairs(scale_word):
    """uint32 [R], four ue8m0 codes -> uint32 [R, 16], each word's factor as a pair of bf16."""
    shift = (tl.arange(0, 16) // 4 * 8).to(tl.uint32)
    code = (scale_word[:, None] >> shift[None, :]) & 0xFF
    return (code * 0x00800080 + _SCALE_ONE).to(tl.uint32)


@triton.jit
def _value_pairs(word, J: tl.constexpr):
    """Nibbles J and J+4 of uint32 words as pairs of bf16, times 2^-126."""
    sign = word << (12 - 4 * J) if J < 3 else word
    magnitude = word << (6 - 4 * J) if J < 2 else word >> (4 * J - 6)
    return (sign & 0x80008000) | (magnitude & 0x01C001C0)


@triton.jit
def operand(word, factor, J: tl.constexpr, PACKED: tl.constexpr):
    """uint32 words [R, W] and their factors -> bf16 [R, 2W], operand J of four.

    PACKED multiplies pairs in one instruction (CUDA, compute capability 9.0 and up).
    """
    pair = _value_pairs(word, J)
    if PACKED:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 p; mul.rn.bf16x2 p, $2, $3; mov.b32 {$0, $1}, p; }",
            "=h,=h,r,r",
            [pair, factor],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=1,
        )
    else:
        scale = (factor & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        low = bf16_mul((pair & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True), scale)
        high = bf16_mul((pair >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), scale)
    return tl.interleave(low, high)
