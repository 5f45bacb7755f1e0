"""FP4 expert weights to FP8 without rounding: a group's codes are picked from its table.

An e2m1 magnitude m times 2^(k - 6) has an e4m3 code for every k from 0 to 12: its fields, 8k
further up, but for zero (which stays) and for 1/2 at k = 0 (a subnormal). A tile whose scales
differ by at most 2^12 takes these tables. Whether all do is seen from the scales alone, by a
kernel of its own, whose verdict the host reads while the codes are made. If not, the launcher
runs the kernel again with EXACT, which encodes every table entry, and reports the tiles where a
code picks an entry that was rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._fp4_words import SIGNS, bytes_of, pick_bytes, words_at
from tinfer.kernels._jit import e2m1_decode, e4m3_decode, e4m3_encode

NO_TILE = tl.constexpr(2**31 - 1)


@triton.jit
def _shifted_tables(k):
    """Codes of the eight magnitudes times 2^(k - 6) as (low, high) words; 0 <= k <= 12."""
    low = tl.where(k == 0, 0x0C080400, 0x0C080000) + (k << 3) * 0x01010100
    return low, 0x1C181410 + (k << 3) * 0x01010101


@triton.jit
def _encoded(power, CODE: tl.constexpr):
    """(e4m3 code of magnitude CODE times power, 0xFF where it was rounded else 0)."""
    value = e2m1_decode(tl.full(power.shape, CODE, tl.int32)) * power
    code = e4m3_encode(value)
    rounded = tl.where(e4m3_decode(code) == value, 0, 0xFF)
    return code.to(tl.int32) << (8 * (CODE % 4)), rounded << (8 * (CODE % 4))


@triton.jit
def _encoded_tables(power):
    """(low, high, rounded low, rounded high) words of the eight magnitudes times power."""
    low = tl.zeros(power.shape, tl.int32)
    high, low_rounded, high_rounded = low, low, low
    for j in tl.static_range(4):
        code, rounded = _encoded(power, j)
        low, low_rounded = low | code, low_rounded | rounded
        code, rounded = _encoded(power, j + 4)
        high, high_rounded = high | code, high_rounded | rounded
    return low, high, low_rounded, high_rounded


@triton.jit
def _tile_maximum(x, B: tl.constexpr):
    """int32 [UNITS, B] -> [UNITS], the maximum over the tile that each unit lies in.

    With tiles of 32 columns the units of a tile have the same values; of 128, there is one tile.
    """
    top = tl.max(x, axis=1)
    if B > 32:
        top = tl.zeros_like(top) + tl.max(top, axis=0)
    return top


@triton.jit(do_not_specialize=["tiles"])
def _fp4_spread_kernel(
    e_ptr,  # uint8 [rows, K / 32]
    wide_ptr,  # int32 [1], set to 1 where a B x B tile's scales differ by more, or one is NaN
    K,
    tiles,
    B: tl.constexpr,
    G: tl.constexpr,  # groups of columns a program
):
    SPAN: tl.constexpr = B // 32
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        across = (K // 32 + G - 1) // G
        down = tile // across
        row = (down * B + tl.arange(0, B)).to(tl.int64)[:, None]
        group = (tile - down * across) * G + tl.arange(0, G)[None, :]
        inside = (group < K // 32) & (row >= 0)
        exponent = tl.load(e_ptr + row * (K // 32) + group, mask=inside, other=0).to(tl.int32)
        top = tl.max(exponent, axis=0)
        low = tl.min(tl.where(inside, exponent, 255), axis=0)
        if SPAN > 1:
            top = tl.max(tl.reshape(top, [G // SPAN, SPAN]), axis=1)
            low = tl.min(tl.reshape(low, [G // SPAN, SPAN]), axis=1)
        wide = (low + 12 < top) | (top == 255)
        if tl.max(wide.to(tl.int32), axis=0) > 0:
            tl.store(wide_ptr, 1)


@triton.jit(do_not_specialize=["tiles"])
def _fp4_to_fp8_kernel(
    w_ptr,  # int32 [rows, K / 8], eight codes a word
    e_ptr,  # uint8 [rows, K / 32]
    q_ptr,  # int32 [rows, K / 4], four codes a word
    s_ptr,  # uint8 [rows / B, K / B]
    first_ptr,  # int32 [1], with EXACT: least index of a B x B tile where a value was rounded
    K,
    tiles,
    B: tl.constexpr,
    C: tl.constexpr,  # columns a program; one tile's where B is 128
    W: tl.constexpr,
    EXACT: tl.constexpr,
    PTX: tl.constexpr,
):
    UNITS: tl.constexpr = C // (8 * W)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        across = (K + C - 1) // C
        down = tile // across
        start = tile - down * across
        row = (down * B + tl.arange(0, B)).to(tl.int64)[None, :]
        unit = start * UNITS + tl.arange(0, UNITS)[:, None]
        inside = (unit * (8 * W) < K) & (row >= 0)
        groups = row * (K // 32)
        units = groups * (4 // W) + unit
        exponent = tl.load(e_ptr + groups + unit // (4 // W), mask=inside, other=0).to(tl.int32)
        words = tl.load(words_at(w_ptr, units, W), mask=inside[:, :, None], other=0)

        base = tl.maximum(_tile_maximum(exponent, B) - 6, 0)  # [UNITS]
        k = exponent - base[:, None] + 6  # at most 12
        column = start * C + tl.arange(0, UNITS) * (8 * W)
        s_at = down * (K // B) + column // B
        tl.store(s_ptr + s_at, base.to(tl.uint8), mask=(column < K) & (column % B == 0))
        if EXACT:
            power = ((tl.maximum(k, -34) + 121) << 23).to(tl.float32, bitcast=True)
            low, high, low_rounded, high_rounded = _encoded_tables(power)
            low_rounded, high_rounded = low_rounded[:, :, None], high_rounded[:, :, None]
            rounded = pick_bytes(low_rounded, high_rounded, words, PTX)
            rounded |= pick_bytes(low_rounded, high_rounded, words >> 16, PTX)
            wrong = tl.max((rounded != 0).to(tl.int32), axis=2) | (exponent == 255).to(tl.int32)
            wrong = tl.max(tl.where(inside, wrong, 0), axis=1)
            index = tl.min(tl.where(wrong != 0, s_at, NO_TILE), axis=0)
            if index < NO_TILE:
                tl.atomic_min(first_ptr, index)
        else:
            low, high = _shifted_tables(k)
        codes = bytes_of(words, low, high, tl.full([1, 1], SIGNS, tl.int32), PTX)
        tl.store(words_at(q_ptr, units, 2 * W), codes, mask=inside[:, :, None])
