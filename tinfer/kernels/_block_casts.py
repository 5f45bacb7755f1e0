"""Quantizing casts with one scale per 2-D block: of matrices, and of weights in finer formats.

A program owns one row of tiles' worth of blocks: `[BM, C]` with C a multiple of the block's width,
seen as `[BM, blocks, BK]` for the maximum over a block's columns, then over its rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.compat.casts import check_per_block_cast, scale_columns, scale_dtype
from tinfer.kernels._call import MAX_PROGRAMS, device_reason
from tinfer.kernels._jit import absmax, to_fp32
from tinfer.kernels._quant import divide, encode, group_scale
from tinfer.kernels._target import Target, target


@triton.jit
def quantize_blocks(x, BK: tl.constexpr, SCALE: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 [BM, C] -> (e4m3 codes [BM, C], scales as stored [C / BK]), one scale per [BM, BK]."""
    BM: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    amax = absmax(tl.reshape(absmax(x, 0), [C // BK, BK]), 1)
    stored, scale, inverse = group_scale(amax, "e4m3", SCALE)
    blocks = tl.reshape(x, [BM, C // BK, BK])
    scaled = divide(blocks, scale[None, :, None], inverse[None, :, None], "e4m3", SCALE)
    return tl.reshape(encode(scaled, "e4m3", NATIVE), [BM, C]), stored


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
        row = (down * BM + tl.arange(0, BM)).to(tl.int64)
        mask = (row < M)[:, None] & (column < K)[None, :]
        x_at = row[:, None] * stride_x + column[None, :]
        x = to_fp32(tl.load(x_ptr + x_at, mask=mask, other=0.0))  # [BM, C]
        codes, stored = quantize_blocks(x, BK, SCALE, NATIVE)
        tl.store(q_ptr + row[:, None] * K + column[None, :], codes, mask=mask)

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
    """(columns a tile, warps)."""
    return (256, 8) if bm == 32 else (128, 8)


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
