"""Quantizing casts with one scale per 2-D block: of matrices, and of weights in finer formats.

A program owns a row of blocks, `[BM, C]` with C a multiple of the block's width BK, and walks it
in slabs of 32 rows: once for the maximum, once (from cache, unless there is one slab only) for the
codes. Whole 128-row tiles in registers would leave too few programs to hide the memory's latency.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.compat.casts import check_per_block_cast, scale_columns, scale_dtype
from tinfer.kernels._call import MAX_PROGRAMS, device_reason
from tinfer.kernels._jit import e4m3_encode, to_fp32
from tinfer.kernels._quant import divide, group_scale
from tinfer.kernels._target import Target, target

SLAB = tl.constexpr(32)


@triton.jit
def magnitude_bits(x):
    """|x| as ordered int32: the fp32 bits."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def block_scales(top, BK: tl.constexpr, SCALE: tl.constexpr):
    """int32 [SLAB, C], maxima of `magnitude_bits` -> `group_scale` of the C / BK blocks."""
    C: tl.constexpr = top.shape[1]
    amax = tl.max(tl.max(tl.reshape(top, [SLAB, C // BK, BK]), axis=2), axis=0)
    return group_scale(amax.to(tl.float32, bitcast=True), "e4m3", SCALE)


@triton.jit
def encode_slab(x, scale, inverse, BK: tl.constexpr, SCALE: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 [SLAB, C] -> e4m3 codes, columns of block b divided by scale[b]."""
    C: tl.constexpr = x.shape[1]
    blocks = tl.reshape(x, [SLAB, C // BK, BK])
    scaled = divide(blocks, scale[None, :, None], inverse[None, :, None], "e4m3", SCALE)
    return tl.reshape(e4m3_encode(scaled, NATIVE), [SLAB, C])


@triton.jit
def _load_slab(x_ptr, row, column, M, K, stride_x):
    mask = (row < M)[:, None] & (column < K)[None, :]
    at = row.to(tl.int64)[:, None] * stride_x + column[None, :]
    return to_fp32(tl.load(x_ptr + at, mask=mask, other=0.0)), mask


@triton.jit(do_not_specialize=["tiles"])
def _per_block_cast_kernel(
    x_ptr,  # [M, K] bf16 or fp32
    q_ptr,  # [M, K] bytes
    s_ptr,  # [ceil(M / BM), words or blocks]
    M,
    K,
    tiles,
    stride_x,
    stride_s,
    BM: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,  # columns a tile
    PACKED: tl.constexpr,
    SCALE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    BLOCKS: tl.constexpr = C // BK
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        across = (K + C - 1) // C
        down = tile // across
        column = (tile - down * across) * C + tl.arange(0, C)
        row = down * BM + tl.arange(0, SLAB)
        x, mask = _load_slab(x_ptr, row, column, M, K, stride_x)  # [SLAB, C]
        top = magnitude_bits(x)
        for i in tl.static_range(1, BM // SLAB):
            other, _ = _load_slab(x_ptr, row + i * SLAB, column, M, K, stride_x)
            top = tl.maximum(top, magnitude_bits(other))
        stored, scale, inverse = block_scales(top, BK, SCALE)
        for i in tl.static_range(BM // SLAB):
            if i:
                x, mask = _load_slab(x_ptr, row + i * SLAB, column, M, K, stride_x)
            codes = encode_slab(x, scale, inverse, BK, SCALE, NATIVE)
            q_at = (row + i * SLAB).to(tl.int64)[:, None] * K + column[None, :]
            tl.store(q_ptr + q_at, codes, mask=mask)

        block = (tile - down * across) * BLOCKS + tl.arange(0, BLOCKS)
        inside = block * BK < K
        if PACKED:
            stored = tl.where(inside, stored, 0).to(tl.int32)
            shift = (tl.arange(0, 4) * 8)[None, :]
            words = tl.sum(tl.reshape(stored, [BLOCKS // 4, 4]) << shift, axis=1)
            word = (tile - down * across) * (BLOCKS // 4) + tl.arange(0, BLOCKS // 4)
            tl.store(s_ptr + down * stride_s + word, words, mask=word < stride_s)
        else:
            tl.store(s_ptr + down * stride_s + block, stored, mask=inside)


def _block_tiles(device: Target, bm: int, bk: int) -> tuple[int, int]:
    """(columns a tile, warps). H200, 2304x5120: 14.2 us by 32x32 and 16.6 by 128x128 blocks."""
    return 128, 4


def supports_per_block_cast(x: Tensor, block: tuple[int, int], scale_fmt: str) -> str | None:
    return device_reason(x=x)


def per_block_cast(x: Tensor, block: tuple[int, int], scale_fmt: str) -> tuple[Tensor, Tensor]:
    check_per_block_cast(x, block, scale_fmt)
    (m, k), (bm, bk), device = x.shape, block, target(x.device)
    packed = scale_fmt == "ue8m0_packed"
    q = x.new_empty((m, k), dtype=torch.uint8)
    columns = scale_columns(-(-k // bk), scale_fmt)
    s = x.new_empty((-(-m // bm), columns), dtype=scale_dtype(scale_fmt))
    if x.numel() == 0:
        return q, s
    if x.stride(1) != 1:
        x = x.contiguous()
    width, warps = _block_tiles(device, bm, bk)
    width = max(width, 4 * bk) if packed else width
    tiles = -(-m // bm) * -(-k // width)
    _per_block_cast_kernel[(min(tiles, MAX_PROGRAMS),)](
        x, q, s, m, k, tiles, x.stride(0), columns,
        BM=bm, BK=bk, C=width, PACKED=packed,
        SCALE="ue8m0" if packed else scale_fmt, NATIVE=device.native_e4m3,
        num_warps=warps,
    )  # fmt: skip
    return q, s
