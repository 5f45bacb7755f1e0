"""Softmax pooling over groups of `ratio` tokens, and the state that carries half groups.

Memory: kv and score fp32 [T, D]; state fp32 [S, ring, 2, D], kv and score of position p at
p % ring. Two phases: pooling reads members from the call's rows, or from the state where the
group began before this call; then every sequence's last `ring` rows overwrite the state. A write
may hit a slot that pooling still needs, so the phases are two launches, or, for few tokens, one
launch whose programs each own a slice of the channels and separate the phases by a barrier.

Numerics: fp32, members oldest first, one rounding to bf16; the same operations wherever a member
comes from, so any split of a sequence into calls gives the same bits.
Source: `tinfer.compat.compressor`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.compat import compressor as ref
from tinfer.kernels._call import scattered
from tinfer.kernels._jit import to_bf16

MAX_PROGRAMS = 65535
ONE_LAUNCH_TOKENS = 64


@triton.jit
def _member(
    kv_ptr, score_ptr, positions_ptr, seq_ptr, state_ptr,
    row, position, seq, want, channel, inside, row_stride, score_stride, ring,
    BACK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """(kv, score) fp32 [R, C] of position - BACK, from this call's rows or from the state.

    The call's row is read before it is known to be the right one, so that no load waits.
    """
    source = row - BACK
    exists = want & (source >= 0)
    mask = exists[:, None] & inside[None, :]
    kv = tl.load(kv_ptr + source[:, None] * row_stride + channel[None, :], mask=mask, other=0.0)
    at = score_ptr + source[:, None] * score_stride + channel[None, :]
    score = tl.load(at, mask=mask, other=0.0)
    if BACK > 0:
        other_seq = tl.load(seq_ptr + source, mask=source >= 0, other=-1)
        other_position = tl.load(positions_ptr + source, mask=source >= 0, other=-1)
        here = exists & (other_seq == seq) & (other_position == position - BACK)
        carried = want & (here == 0)
        if tl.max(carried.to(tl.int32), axis=0) > 0:
            slot = seq * ring + tl.where(carried, position - BACK, 0) % ring
            at = state_ptr + slot[:, None] * (2 * D) + channel[None, :]
            mask = carried[:, None] & inside[None, :]
            kv = tl.where(mask, tl.load(at, mask=mask, other=0.0), kv)
            score = tl.where(mask, tl.load(at + D, mask=mask, other=0.0), score)
    return kv, score


@triton.jit
def _pool_tile(
    kv_ptr, score_ptr, positions_ptr, seq_ptr, state_ptr, out_ptr,
    tile, channel, tokens, kv_stride, score_stride, ring,
    D: tl.constexpr, RATIO: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Pooled rows tile * ROWS .., by a running softmax over the members of each group."""
    inside = channel < D
    row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = row < tokens
    seq = tl.load(seq_ptr + row, mask=live, other=-1)
    position = tl.load(positions_ptr + row, mask=live, other=0)
    want = (seq >= 0) & ((position + 1) % RATIO == 0)
    pooled = tl.zeros([ROWS, CHANNELS], tl.float32)
    if tl.max(want.to(tl.int32), axis=0) > 0:
        kv, top = _member(
            kv_ptr, score_ptr, positions_ptr, seq_ptr, state_ptr,
            row, position, seq, want, channel, inside,
            kv_stride, score_stride, ring, RATIO - 1, D,
        )  # fmt: skip
        total = tl.where(top == top, 1.0, top)
        pooled += kv
        for i in tl.static_range(1, RATIO):
            kv, score = _member(
                kv_ptr, score_ptr, positions_ptr, seq_ptr, state_ptr,
                row, position, seq, want, channel, inside,
                kv_stride, score_stride, ring, RATIO - 1 - i, D,
            )  # fmt: skip
            new_top = tl.maximum(top, score)
            keep = tl.where(top == new_top, 1.0, tl.exp(top - new_top))
            weight = tl.where(score == new_top, 1.0, tl.exp(score - new_top))
            total = total * keep + weight
            pooled = pooled * keep + weight * kv
            top = new_top
        pooled = tl.where(want[:, None], pooled / total, 0.0)
    at = out_ptr + row[:, None] * D + channel[None, :]
    tl.store(at, to_bf16(pooled), mask=live[:, None] & inside[None, :])


@triton.jit
def _save_tile(
    kv_ptr, score_ptr, positions_ptr, seq_ptr, state_ptr,
    tile, channel, tokens, kv_stride, score_stride, ring,
    D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The rows of the tile that are among the last `ring` of their sequence, to the state."""
    row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = row < tokens
    seq = tl.load(seq_ptr + row, mask=live, other=-1)
    newer = tl.load(seq_ptr + row + ring, mask=row + ring < tokens, other=-1)
    position = tl.load(positions_ptr + row, mask=live, other=0)
    last = (seq >= 0) & (newer != seq)
    if tl.max(last.to(tl.int32), axis=0) > 0:
        slot = tl.where(last, seq * ring + position % ring, 0)
        mask = last[:, None] & (channel < D)[None, :]
        at = row[:, None] * kv_stride + channel[None, :]
        kv = tl.load(kv_ptr + at, mask=mask, other=0.0)
        at = row[:, None] * score_stride + channel[None, :]
        score = tl.load(score_ptr + at, mask=mask, other=0.0)
        at = state_ptr + slot[:, None] * (2 * D) + channel[None, :]
        tl.store(at, kv, mask=mask)
        tl.store(at + D, score, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _compress_pool_kernel(
    kv_ptr,  # fp32 [T, D]
    score_ptr,  # fp32 [T, D]
    positions_ptr,  # int64 [T]
    seq_ptr,  # int64 [T]
    state_ptr,  # fp32 [S, ring, 2, D]
    out_ptr,  # bf16 [T, D]
    tokens,
    kv_stride,
    score_stride,
    ring,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    POOL: tl.constexpr,
    SAVE: tl.constexpr,
):
    SLICES: tl.constexpr = (D + CHANNELS - 1) // CHANNELS
    channel = (tl.program_id(0) % SLICES) * CHANNELS + tl.arange(0, CHANNELS)
    first, step = tl.program_id(0) // SLICES, tl.num_programs(0) // SLICES
    if POOL:
        for tile in range(first, tl.cdiv(tokens, ROWS), step):
            _pool_tile(
                kv_ptr, score_ptr, positions_ptr, seq_ptr, state_ptr, out_ptr,
                tile, channel, tokens, kv_stride, score_stride, ring, D, RATIO, ROWS, CHANNELS,
            )  # fmt: skip
    if POOL and SAVE:
        tl.debug_barrier()
    if SAVE:
        for tile in range(first, tl.cdiv(tokens, ROWS), step):
            _save_tile(
                kv_ptr, score_ptr, positions_ptr, seq_ptr, state_ptr,
                tile, channel, tokens, kv_stride, score_stride, ring, D, ROWS,
            )  # fmt: skip


def _compress_pool_tiles(tokens: int, dim: int) -> list[tuple[bool, bool, int, int, int]]:
    """(pool, save, rows, channels, warps) of each launch.

    One launch: the slices of channels are all the parallelism there is, so they are narrow.
    Saving scans all rows for the few it keeps, so its tiles are tall. H200, 8192 x 512, graph
    time: pooling takes 9.0 us a row at a time with 2 warps, 9.7 with 4, 10.6 with two rows;
    saving 2.8 us with 128 x 32 tiles, 3.5 with 64 x 32. Decode of 64 rows: 2.8 us with 64 x 8
    tiles, 3.5 with 32 x 8. (32 x 32, 64 x 16 and 64 x 32 do not compile with Triton 3.6.)
    """
    channels = triton.next_power_of_2(dim)
    if tokens <= ONE_LAUNCH_TOKENS:
        return [(True, True, 64, min(8, channels), 4)]
    return [(True, False, 1, min(512, channels), 2), (False, True, 128, min(32, channels), 4)]


def supports_compress_pool(
    kv: Tensor, score: Tensor, positions: Tensor, seq: Tensor, state: Tensor, ratio: int
) -> str | None:
    """Channels contiguous."""
    if scattered(kv) or scattered(score):
        return "channels of kv or score are not contiguous"
    return None


def compress_pool(
    kv: Tensor, score: Tensor, positions: Tensor, seq: Tensor, state: Tensor, ratio: int
) -> Tensor:
    ref.check_compress_pool(kv, score, positions, seq, state, ratio)
    tokens, dim = kv.shape
    out = torch.empty(tokens, dim, dtype=torch.bfloat16, device=kv.device)
    if not out.numel():
        return out
    for pool, save, rows, channels, warps in _compress_pool_tiles(tokens, dim):
        slices = triton.cdiv(dim, channels)
        tiles = 1 if pool and save else min(triton.cdiv(tokens, rows), MAX_PROGRAMS // slices)
        _compress_pool_kernel[(tiles * slices,)](
            kv,
            score,
            positions.contiguous(),
            seq.contiguous(),
            state,
            out,
            tokens,
            kv.stride(0),
            score.stride(0),
            state.shape[1],
            D=dim,
            RATIO=ratio,
            ROWS=rows,
            CHANNELS=channels,
            POOL=pool,
            SAVE=save,
            num_warps=warps,
        )
    return out
