"""FP4 weights to bf16: codes pick their values from a table of their group.

The products of the eight magnitudes with the group's power of two are exact in bf16. Their low
and high bytes make two tables; the packed codes pick four bytes from each, which are then
interleaved.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._fp4_words import SIGNS, merge_bytes, pick_bytes, signed_bytes, words_at
from tinfer.kernels._jit import e2m1_decode, ue8m0_decode
from tinfer.kernels._weight_tiles import tile_of


@triton.jit
def _product(power, CODE: tl.constexpr):
    """fp32 bits of magnitude CODE times power; the lower half is zero."""
    value = e2m1_decode(tl.full(power.shape, CODE, tl.int32)) * power
    return value.to(tl.int32, bitcast=True)


@triton.jit
def _tables(power, FIRST: tl.constexpr):
    """(low bytes, high bytes) of the bf16 products of magnitudes FIRST to FIRST + 3."""
    low = tl.zeros(power.shape, tl.int32)
    high = low
    for j in tl.static_range(4):
        bits = _product(power, FIRST + j)
        low |= ((bits >> 16) & 0xFF) << (8 * j)
        high |= ((bits >> 24) & 0xFF) << (8 * j)
    return low[:, :, None], high[:, :, None]


@triton.jit
def _four_values(codes, low0, low1, high0, high1, signs, PTX: tl.constexpr):
    """Two words of two bf16 each, for the four codes of the low half-word."""
    low = pick_bytes(low0, low1, codes, PTX)
    high = signed_bytes(high0, high1, codes, signs, PTX)
    return merge_bytes(low, high, PTX)


@triton.jit(do_not_specialize=["tiles"])
def _dequantize_fp4_kernel(
    w_ptr,  # int32 [matrices, N, K / 8], eight codes a word
    s_ptr,  # uint8 [matrices, N, K / 32]
    y_ptr,  # int32 [matrices, N, K / 2], two bf16 a word
    N,
    K,
    tiles,
    R: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    PTX: tl.constexpr,
):
    U: tl.constexpr = C // (8 * W)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        matrix, row, column = tile_of(tile, N, K, R, C)
        rows = (row + tl.arange(0, R))[None, :]
        unit = column // 8 // W + tl.arange(0, U)[:, None]
        inside = (rows < N) & (unit * (8 * W) < K)
        groups = (tl.cast(matrix, tl.int64) * N + rows) * (K // 32)
        units = groups * (4 // W) + unit
        words = tl.load(words_at(w_ptr, units, W), mask=inside[:, :, None], other=0)
        power = ue8m0_decode(tl.load(s_ptr + groups + unit // (4 // W), mask=inside, other=0))
        low0, high0 = _tables(power, 0)
        low1, high1 = _tables(power, 4)
        signs = tl.where(power == power, SIGNS, 0).to(tl.int32)[:, :, None]
        a, b = _four_values(words, low0, low1, high0, high1, signs, PTX)
        c, d = _four_values(words >> 16, low0, low1, high0, high1, signs, PTX)
        values = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [U, R, 4 * W])
        tl.store(words_at(y_ptr, units, 4 * W), values, mask=inside[:, :, None])
