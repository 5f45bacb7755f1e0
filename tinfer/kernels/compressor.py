"""Softmax pooling over groups of `ratio` tokens, and the state that carries half groups.

Memory: kv and score fp32 [T, D]; state fp32 [S, ring, 2, D], kv and score of position p at
p % ring. A program has one row of the call and a slice of its channels. Where the row ends a
group, its members are rows of the call or, if the group began before this call, come from the
state: that can be one row of a sequence only. Its program, or that of the sequence's first row
where there is none, then writes the sequence's last `ring` rows to the state. So one launch does
all: nobody else reads or writes the state of this sequence.

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
from tinfer.kernels._call import MAX_PROGRAMS, scattered
from tinfer.kernels._jit import to_bf16

FEW_TOKENS = 1024
SAMPLES, STEP = 128, 64  # a sequence's last row is searched in samples STEP rows apart


@triton.jit
def _rows_before(seq_ptr, row, seq, RATIO: tl.constexpr):
    """How many rows of its sequence come right before the row, RATIO - 1 at most."""
    before = tl.full([], 0, tl.int32)
    for back in tl.static_range(1, RATIO):
        other = tl.load(seq_ptr + row - back, mask=row >= back, other=-1)
        before += ((other == seq) & (before == back - 1)).to(tl.int32)
    return tl.where(seq >= 0, before, 0)


@triton.jit
def _member(
    kv_ptr, score_ptr, state_ptr, row, position, seq, want, before, channel, kv_stride,
    score_stride, ring, BACK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """(kv, score) fp32 of position - BACK, from this call's rows or from the state."""
    source = row - BACK
    mask = channel < tl.where(want & (before >= BACK), D, 0)
    kv = tl.load(kv_ptr + source * kv_stride + channel, mask=mask, other=0.0)
    score = tl.load(score_ptr + source * score_stride + channel, mask=mask, other=0.0)
    if want & (before < BACK):
        slot = seq * ring + (position - BACK) % ring
        at = state_ptr + slot * (2 * D) + channel
        kv = tl.load(at, mask=channel < D, other=0.0)
        score = tl.load(at + D, mask=channel < D, other=0.0)
    return kv, score


@triton.jit
def _pool(kvs, scores, RATIO: tl.constexpr):
    """The members' mean by a running softmax."""
    top = scores[0]
    total = tl.where(top == top, 1.0, top)
    pooled = kvs[0]
    for i in tl.static_range(1, RATIO):
        score = scores[i]
        new_top = tl.maximum(top, score)
        less = tl.exp(0.0 - tl.abs(top - score))  # the lesser one's; NaN where either is
        keep = tl.where(top == new_top, 1.0, less)
        weight = tl.where(score == new_top, 1.0, less)
        total = total * keep + weight
        pooled = pooled * keep + weight * kvs[i]
        top = new_top
    return pooled / total


@triton.jit
def _last_row(seq_ptr, row, seq, tokens, SAMPLES: tl.constexpr, STEP: tl.constexpr):
    """The last row of the sequence: by samples, then row by row behind the last that matches."""
    at = row
    found = tl.full([], SAMPLES, tl.int32)
    while found == SAMPLES:
        sample = at + (1 + tl.arange(0, SAMPLES)) * STEP
        other = tl.load(seq_ptr + sample, mask=sample < tokens, other=-1)
        found = tl.sum((other == seq).to(tl.int32), axis=0)
        at += found * STEP
    near = at + tl.arange(0, STEP)
    other = tl.load(seq_ptr + near, mask=near < tokens, other=-1)
    return at + tl.sum((other == seq).to(tl.int32), axis=0) - 1


@triton.jit
def _save(
    kv_ptr, score_ptr, seq_ptr, state_ptr, row, position, seq, before, channel, tokens,
    kv_stride, score_stride, ring, D: tl.constexpr, ROWS: tl.constexpr, SAMPLES: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """The last `ring` rows of the row's sequence, to the state."""
    last = _last_row(seq_ptr, row, seq, tokens, SAMPLES, STEP)
    tl.debug_barrier()  # the state has been read
    for i in range(tl.maximum(row - before, last + 1 - ring), last + 1, ROWS):
        source = tl.cast(i, tl.int64) + tl.arange(0, ROWS)[:, None]
        mask = (source <= last) & (channel < D)[None, :]
        kv = tl.load(kv_ptr + source * kv_stride + channel[None, :], mask=mask, other=0.0)
        at = score_ptr + source * score_stride + channel[None, :]
        score = tl.load(at, mask=mask, other=0.0)
        slot = seq * ring + (position + source - row) % ring
        at = state_ptr + slot * (2 * D) + channel[None, :]
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
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,  # saved at a time
    SAMPLES: tl.constexpr,
    STEP: tl.constexpr,
):
    SLICES: tl.constexpr = (D + CHANNELS - 1) // CHANNELS
    channel = (tl.program_id(0) % SLICES) * CHANNELS + tl.arange(0, CHANNELS)
    for i in range(tl.program_id(0) // SLICES, tokens, tl.num_programs(0) // SLICES):
        row = tl.cast(i, tl.int64)
        seq = tl.load(seq_ptr + row)
        position = tl.load(positions_ptr + row)
        before = _rows_before(seq_ptr, row, seq, RATIO)
        lack = RATIO - 1 - position % RATIO  # rows until its group ends
        want = (seq >= 0) & (lack == 0)
        kvs, scores = (), ()
        for back in tl.static_range(RATIO - 1, -1, -1):
            kv, score = _member(
                kv_ptr, score_ptr, state_ptr, row, position, seq, want, before, channel,
                kv_stride, score_stride, ring, back, D,
            )  # fmt: skip
            kvs, scores = kvs + (kv,), scores + (score,)  # noqa: RUF005
        pooled = tl.zeros([CHANNELS], tl.float32)
        if want:
            pooled = _pool(kvs, scores, RATIO)
        tl.store(out_ptr + row * D + channel, to_bf16(pooled), mask=channel < D)
        saves = want & (before < RATIO - 1)
        if (seq >= 0) & (before == 0) & (saves == 0):
            # the sequence's first row saves if its group was not begun before or ends later
            end = tl.load(seq_ptr + row + lack, mask=row + lack < tokens, other=-1)
            saves = (lack == RATIO - 1) | (end != seq)
        if saves:
            _save(
                kv_ptr, score_ptr, seq_ptr, state_ptr, row, position, seq, before, channel,
                tokens, kv_stride, score_stride, ring, D, ROWS, SAMPLES, STEP,
            )  # fmt: skip


def _compress_pool_tiles(tokens: int, dim: int) -> tuple[int, int, int]:
    """(channels, warps, rows saved at a time): few rows in narrow slices, many in whole ones.

    H200, L2 cold: 8192 rows of 512 take 18.4 us with 512 channels and 2 warps, 24.8 with 128 and
    one (a copy of the same bytes 15.1; two launches, pooling and then saving, 23.4). 1024 rows
    10.0 and 8.8, decoding 64 sequences 6.3 and 6.2.
    """
    channels, warps, rows = (128, 1, 2) if tokens <= FEW_TOKENS else (512, 2, 1)
    return min(channels, triton.next_power_of_2(dim)), warps, rows


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
    channels, warps, rows = _compress_pool_tiles(tokens, dim)
    slices = triton.cdiv(dim, channels)
    _compress_pool_kernel[(min(tokens, MAX_PROGRAMS // slices) * slices,)](
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
        CHANNELS=channels,
        ROWS=rows,
        SAMPLES=SAMPLES,
        STEP=STEP,
        num_warps=warps,
    )
    return out
