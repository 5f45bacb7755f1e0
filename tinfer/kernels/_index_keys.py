"""Device functions that turn packed e2m1 rows of 128 channels into bf16 dot operands.

A 32-bit word holds the nibbles of channels 8i .. 8i+7. Nibbles j and j+4 of a word become one
pair of bf16 by a mask, a product with 2^12 + 2^6 and another mask: sign to bit 15, magnitude to
bits 8..6, which is the value times 2^-126. The operand holds for j = 0 .. 3 the pairs of all
words, channels (8i+j, 8i+j+4); a dot product does not mind the order if both sides share it.

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
def unusable(scale):
    """Whether any of the four scale codes of a row of uint8 [R, 4] lies above 144."""
    return tl.max(scale.to(tl.int32), axis=1) > 144


@triton.jit
def scale_pairs(scale, R: tl.constexpr):
    """uint8 [R, 4], ue8m0 codes -> uint32 [R, 16], each word's factor as a pair of bf16."""
    pair = scale.to(tl.uint32) * 0x00800080 + _SCALE_ONE
    return tl.reshape(tl.broadcast_to(pair[:, :, None], [R, 4, 4]), [R, 16]).to(tl.uint32)


@triton.jit
def _value_pairs(word, J: tl.constexpr):
    """Nibbles J and J+4 of uint32 words as pairs of bf16, times 2^-126."""
    half = word if J < 2 else word >> 8
    if J % 2 == 0:
        spread = (half & 0x000F000F) * 0x1040
    else:
        spread = (half & 0x00F000F0) * 0x0104
    return spread & 0x81C081C0


@triton.jit
def _scaled(word, factor, J: tl.constexpr, PACKED: tl.constexpr):
    """uint32 words [R, 16] and their factors -> bf16 [R, 32], quarter J of the operand.

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


@triton.jit
def operand(word, scale, R: tl.constexpr, PACKED: tl.constexpr):
    """uint32 words [R, 16] and scale codes uint8 [R, 4] -> bf16 [R, 128], times 2^-16.

    The quarters are laid side by side by moves between registers, so that one dot takes all.
    """
    factor = scale_pairs(scale, R)
    even = tl.join(_scaled(word, factor, 0, PACKED), _scaled(word, factor, 2, PACKED))
    odd = tl.join(_scaled(word, factor, 1, PACKED), _scaled(word, factor, 3, PACKED))
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 1)), [R, 128])
