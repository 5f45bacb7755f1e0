"""FP4 expert weights to FP8 without rounding, eight values a step in 32-bit words.

A word holds eight e2m1 codes. Spread to one a byte, a code's magnitude shifted left by two is an
e4m3 code of value * 2^-6; adding 8k to the byte multiplies by 2^k, but for zero (which stays) and
for 1/2, the subnormal (whose mantissa bit must go). So a tile whose scales differ by at most
2^12 takes about seven instructions a value. A wider tile is reported; the launcher then runs
the kernel again with EXACT, which encodes every value by itself and reports what it rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._jit import e2m1_decode, e4m3_decode, e4m3_encode

NO_TILE = tl.constexpr(2**31 - 1)


@triton.jit
def _spread(nibbles):
    """The low four nibbles of a word, one a byte."""
    x = (nibbles | (nibbles << 8)) & 0x00FF00FF
    return (x | (x << 4)) & 0x0F0F0F0F


@triton.jit
def _per_word(x):
    """[B, G] of groups of 32 columns -> [B, 4 G] of words of 8."""
    B: tl.constexpr = x.shape[0]
    G: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[:, :, None], [B, G, 4]), [B, G * 4])


@triton.jit
def _scaled_bytes(codes, k):
    """Four e2m1 codes, one a byte -> four e4m3 codes of value * 2^(k - 6), 0 <= k <= 12."""
    one, two, four = codes & 0x01010101, (codes >> 1) & 0x01010101, (codes >> 2) & 0x01010101
    large = two | four
    half = tl.where(k > 0, one & ~large, 0)  # subnormal only while k is 0
    magnitude = ((codes & 0x07070707) << 2) - (half << 2)
    return (magnitude + (one | large) * (k << 3)) | ((codes & 0x08080808) << 4)


@triton.jit
def _encode_words(words, power):
    """(low word, high word, whether a value was rounded) of words of eight codes."""
    low = tl.zeros_like(words)
    high = tl.zeros_like(words)
    wrong = tl.zeros_like(words)
    for j in tl.static_range(8):
        value = e2m1_decode((words >> (4 * j)) & 0xF) * power
        code = e4m3_encode(value)
        wrong |= (e4m3_decode(code) != value).to(tl.int32)
        shifted = code.to(tl.int32) << (8 * (j % 4))
        if j < 4:
            low |= shifted
        else:
            high |= shifted
    return low, high, wrong


@triton.jit(do_not_specialize=["tiles"])
def _fp4_to_fp8_kernel(
    w_ptr,  # int32 [rows, K / 8], eight codes a word
    e_ptr,  # uint8 [rows, K / 32]
    q_ptr,  # int32 [rows, K / 4], four codes a word
    s_ptr,  # uint8 [rows / B, K / B]
    first_ptr,  # int32 [1], least index of a B x B tile that is too wide, or was rounded
    K,
    tiles,
    B: tl.constexpr,
    C: tl.constexpr,  # columns a program
    EXACT: tl.constexpr,
):
    GROUPS: tl.constexpr = C // 32
    BLOCKS: tl.constexpr = C // B
    across = (K + C - 1) // C
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        down = tile // across
        start = tile - down * across
        row = (down * B + tl.arange(0, B)).to(tl.int64)
        group = start * GROUPS + tl.arange(0, GROUPS)
        inside = (group * 32 < K)[None, :]
        e_at = row[:, None] * (K // 32) + group[None, :]
        exponent = tl.load(e_ptr + e_at, mask=inside, other=0).to(tl.int32)  # [B, GROUPS]
        word = start * (C // 8) + tl.arange(0, C // 8)
        in_words = (word * 8 < K)[None, :]
        w_at = row[:, None] * (K // 8) + word[None, :]
        words = tl.load(w_ptr + w_at, mask=in_words, other=0)  # [B, C / 8]

        tops = tl.max(tl.max(tl.reshape(exponent, [B, BLOCKS, B // 32]), axis=2), axis=0)
        base = tl.maximum(tops - 6, 0)  # [BLOCKS]
        spread = tl.broadcast_to(base[None, :, None], [B, BLOCKS, B // 32])
        shift = exponent - tl.reshape(spread, [B, GROUPS])  # at most 6
        block = start * BLOCKS + tl.arange(0, BLOCKS)
        in_row = block * B < K
        tl.store(s_ptr + down * (K // B) + block, base.to(tl.uint8), mask=in_row)

        wrong = (exponent == 255).to(tl.int32)
        if EXACT:
            power = ((tl.maximum(shift, -40) + 127) << 23).to(tl.float32, bitcast=True)
            low, high, rounded = _encode_words(words, _per_word(power))
            wrong |= tl.max(tl.reshape(rounded, [B, GROUPS, 4]), axis=2)
        else:
            wrong |= (shift < -6).to(tl.int32)
            k = _per_word(tl.maximum(shift + 6, 0))
            low = _scaled_bytes(_spread(words & 0xFFFF), k)
            high = _scaled_bytes(_spread((words >> 16) & 0xFFFF), k)
        wrong = tl.where(inside, wrong, 0)
        wrong = tl.max(tl.max(tl.reshape(wrong, [B, BLOCKS, B // 32]), axis=2), axis=0)
        index = tl.min(tl.where(wrong != 0, down * (K // B) + block, NO_TILE), axis=0)
        if index < NO_TILE:
            tl.atomic_min(first_ptr, index)
        half = start * (C // 4) + tl.arange(0, C // 4)
        q_at = row[:, None] * (K // 4) + half[None, :]
        tl.store(q_ptr + q_at, tl.interleave(low, high), mask=(half * 4 < K)[None, :])
