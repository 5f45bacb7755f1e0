"""Weights to e4m3 with one fp32 scale per 128x128 tile, which one program keeps in registers.

FP4: the tile's maximum comes from each group's largest code. A group's seven magnitudes are
divided and encoded once, and the packed codes pick from the results (`_fp4_words`).
FP8: the maximum comes from the codes, whose order is that of their values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._block_casts import SLAB, encode_slab, magnitude_bits
from tinfer.kernels._fp4_words import SIGNS, bytes_of, largest_magnitude, words_at
from tinfer.kernels._jit import (
    e2m1_decode,
    e4m3_decode,
    e4m3_encode,
    ue8m0_decode,
    ue8m0_reciprocal,
)
from tinfer.kernels._quant import divide, group_scale
from tinfer.kernels._weight_tiles import tile_of

_SIDE = tl.constexpr(128)


@triton.jit
def _tile_scale(top, SCALE: tl.constexpr):
    """Magnitude bits, 2-D -> `group_scale` of their maximum, [1] each."""
    amax = tl.max(tl.max(top, axis=1), axis=0)
    bits = tl.zeros([1], tl.int32) + amax
    return group_scale(bits.to(tl.float32, bitcast=True), "e4m3", SCALE)


@triton.jit
def _table_entry(code, power, scale, inverse, SCALE: tl.constexpr, NATIVE: tl.constexpr):
    value = e2m1_decode(tl.full(power.shape, code, tl.int32)) * power
    return e4m3_encode(divide(value, scale, inverse, "e4m3", SCALE), NATIVE).to(tl.int32)


@triton.jit(do_not_specialize=["tiles"])
def _requantize_fp4_kernel(
    w_ptr,  # int32 [matrices, N, K / 8], eight codes a word
    s_ptr,  # uint8 [matrices, N, K / 32]
    q_ptr,  # int32 [matrices, N, K / 4], four codes a word
    t_ptr,  # fp32 [matrices, ceil(N / 128), ceil(K / 128)]
    N,
    K,
    tiles,
    W: tl.constexpr,
    SCALE: tl.constexpr,
    NATIVE: tl.constexpr,
    PTX: tl.constexpr,
):
    U: tl.constexpr = _SIDE // 8 // W
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        matrix, row, column = tile_of(tile, N, K, _SIDE, _SIDE)
        rows = (row + tl.arange(0, _SIDE))[None, :]
        unit = column // 8 // W + tl.arange(0, U)[:, None]
        inside = (rows < N) & (unit * (8 * W) < K)
        groups = (tl.cast(matrix, tl.int64) * N + rows) * (K // 32)
        units = groups * (4 // W) + unit
        words = tl.load(words_at(w_ptr, units, W), mask=inside[:, :, None], other=0)
        power = ue8m0_decode(tl.load(s_ptr + groups + unit // (4 // W), mask=inside, other=0))
        top = magnitude_bits(e2m1_decode(largest_magnitude(words)) * power)
        stored, scale, inverse = _tile_scale(top, SCALE)
        low = tl.zeros([U, _SIDE], tl.int32)
        high = tl.zeros([U, _SIDE], tl.int32)
        for j in tl.static_range(4):
            near = _table_entry(j, power, scale[:, None], inverse[:, None], SCALE, NATIVE)
            far = _table_entry(j + 4, power, scale[:, None], inverse[:, None], SCALE, NATIVE)
            low |= near << (8 * j)
            high |= far << (8 * j)
        signs = tl.where(scale == scale, SIGNS, 0).to(tl.int32)[:, None]
        codes = bytes_of(words, low, high, signs, PTX)
        tl.store(words_at(q_ptr, units, 2 * W), codes, mask=inside[:, :, None])
        tl.store(t_ptr + tile + tl.arange(0, 1), stored)  # tiles are numbered like the scales


@triton.jit
def _slab(row, column, i, N, K):
    """(offsets of slab i of a tile, whether they exist)."""
    rows = (row + i * SLAB + tl.arange(0, SLAB))[:, None]
    columns = column + tl.arange(0, _SIDE)[None, :]
    return rows.to(tl.int64) * K + columns, (rows < N) & (columns < K)


@triton.jit
def _slab_scales(s_ptr, row, column, i, N, K):
    """uint8 [4]: scales of the four 32x32 blocks of slab i; past the last slab, the last one's."""
    down, across = (N + 31) // 32, (K + 31) // 32
    line, block = tl.minimum(row // 32 + i, down - 1), column // 32 + tl.arange(0, _SIDE // 32)
    return tl.load(s_ptr + line * across + block, mask=block < across, other=0)


@triton.jit
def _within(x, LEAST: tl.constexpr, MOST: tl.constexpr):
    """x clamped; NaN passes."""
    return tl.clamp(x, LEAST, MOST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _folded(scale, inverse, power):
    """The tile's scale and its reciprocal over a block's: a code divided by these is divided once.

    Where the block has a code other than zero, its scale is at most 2^18 times the tile's. Where
    it is less than 2^-60 of the tile's, every code becomes zero, as it does by 2^60.
    """
    over = _within(scale * ue8m0_reciprocal(power), 2.0**-30, 2.0**60)
    return over, _within(inverse * ue8m0_decode(power), 2.0**-60, 2.0**30)


@triton.jit(do_not_specialize=["tiles"])
def _requantize_fp8_kernel(
    w_ptr,  # uint8 [N, K]
    s_ptr,  # uint8 [ceil(N / 32), ceil(K / 32)]
    q_ptr,  # uint8 [N, K]
    t_ptr,  # fp32 [ceil(N / 128), ceil(K / 128)]
    N,
    K,
    tiles,
    SCALE: tl.constexpr,
    WHOLE: tl.constexpr,  # there are no partial tiles
    NATIVE: tl.constexpr,
):
    BLOCKS: tl.constexpr = _SIDE // 32
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        _, row, column = tile_of(tile, N, K, _SIDE, _SIDE)
        codes = ()
        for i in tl.static_range(_SIDE // SLAB):
            at, inside = _slab(row, column, i, N, K)
            if WHOLE:
                slab = tl.load(w_ptr + at)
            else:
                slab = tl.load(w_ptr + at, mask=inside, other=0)
            codes = codes + (slab,)  # noqa: RUF005  (triton reads no starred tuple)
        top = tl.zeros([SLAB, BLOCKS], tl.int32)
        for i in tl.static_range(_SIDE // SLAB):
            magnitudes = tl.reshape((codes[i] & 0x7F).to(tl.int32), [SLAB, BLOCKS, 32])
            largest = e4m3_decode(tl.max(magnitudes, axis=2))
            power = _slab_scales(s_ptr, row, column, i, N, K)
            top = tl.maximum(top, magnitude_bits(largest * ue8m0_decode(power)[None, :]))
        stored, scale, inverse = _tile_scale(top, SCALE)
        for i in tl.static_range(_SIDE // SLAB):
            at, inside = _slab(row, column, i, N, K)
            power = _slab_scales(s_ptr, row, column, i, N, K)
            over, under = _folded(scale, inverse, power)
            out = encode_slab(e4m3_decode(codes[i], NATIVE), over, under, 32, SCALE, NATIVE)
            tl.store(q_ptr + at, out, mask=None if WHOLE else inside)
        tl.store(t_ptr + tile + tl.arange(0, 1), stored)
