"""Grouping of routed rows by expert without atomics, and the outputs' sum in slot order.

Permutation, two launches: the first counts every expert's rows in each block of routed rows and
fills the outputs with -1; in the second each block adds up the counts, which gives every expert's
start and the rows before the block, ranks its own rows by comparison with each other, and
scatters. Few rows fit one block, which does both. Integers, so the order is always the same.

Combination: fp32 sum over the slots in ascending order, the shared expert last, one rounding.

Source: kernels E6 and E8 of the contracts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.compat.moe_permute import check_expert_combine, check_expert_permute, permuted_rows
from tinfer.kernels._call import MAX_PROGRAMS, contiguous_reason, device_reason, stride_reason
from tinfer.kernels._jit import to_bf16, to_fp32

FILL_BLOCK = 4096
TILE = 16  # blocks whose counts are added at a time
MAX_EXPERTS = 4095
MAX_FILL = 8192  # rows that one program fills beside its other work


# ---------------------------------------------------------------- permutation
@triton.jit
def _fill(pos_to_token, pos_to_slot, first, P, BLOCK: tl.constexpr):
    at = first + tl.arange(0, BLOCK)
    nothing = tl.full([BLOCK], -1, tl.int32)
    tl.store(pos_to_token + at, nothing, mask=at < P)
    tl.store(pos_to_slot + at, nothing, mask=at < P)


@triton.jit
def _expert_of(ids, item, N, E):
    """Expert of each routed row, E where there is none."""
    expert = tl.load(ids + item, mask=item < N, other=-1)
    return tl.where((expert >= 0) & (expert < E), expert, E)


@triton.jit(do_not_specialize=["N", "blocks", "steps"])
def _permute_count_kernel(
    ids,  # int32 [N]
    counts,  # int32 [blocks, BINS]
    pos_to_token,  # int32 [P]
    pos_to_slot,  # int32 [P]
    N,
    P,
    blocks,
    steps,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    BINS: tl.constexpr,
    FILL: tl.constexpr,
):
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        total = tl.zeros([BINS], tl.int32)
        for step in range(block * steps, block * steps + steps):
            total += tl.histogram(_expert_of(ids, step * ROWS + tl.arange(0, ROWS), N, E), BINS)
        tl.store(counts + block * BINS + tl.arange(0, BINS), total)
    for block in range(tl.program_id(0), tl.cdiv(P, FILL), tl.num_programs(0)):
        _fill(pos_to_token, pos_to_slot, block * FILL, P, FILL)


@triton.jit
def _counted(counts, block, blocks, BINS: tl.constexpr, TILE: tl.constexpr):
    """(rows of every expert, those in the blocks before this one), int32 [BINS] each."""
    bins = tl.arange(0, BINS)[None, :]
    total = tl.zeros([TILE, BINS], tl.int32)
    before = tl.zeros([TILE, BINS], tl.int32)
    for first in range(0, blocks, TILE):
        other = first + tl.arange(0, TILE)[:, None]
        part = tl.load(counts + other * BINS + bins, mask=other < blocks, other=0)
        total += part
        before += tl.where(other < block, part, 0)
    return tl.sum(total, axis=0), tl.sum(before, axis=0)


@triton.jit(do_not_specialize=["N", "blocks", "steps"])
def _permute_place_kernel(
    ids,  # int32 [N]
    counts,  # int32 [blocks, BINS]
    bases,  # int32 [blocks, BINS], scratch
    pos_to_token,  # int32 [P]
    pos_to_slot,  # int32 [P]
    token_to_pos,  # int32 [N]
    expert_start,  # int32 [E]
    expert_end,  # int32 [E]
    N,
    P,
    blocks,
    steps,
    ALIGNMENT: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
    FILL: tl.constexpr,
    ALONE: tl.constexpr,  # one program does everything
):
    bins, lane = tl.arange(0, BINS), tl.arange(0, ROWS)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        expert = _expert_of(ids, block * steps * ROWS + lane, N, E)
        if ALONE:
            total = tl.histogram(expert, BINS)
            before = tl.zeros([BINS], tl.int32)
            for first in range(0, P, FILL):
                _fill(pos_to_token, pos_to_slot, first, P, FILL)
        else:
            total, before = _counted(counts, block, blocks, BINS, TILE)
        total = tl.where(bins < E, total, 0)
        padded = (total + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        start = tl.cumsum(padded, axis=0) - padded
        if block == 0:
            tl.store(expert_start + bins, start, mask=bins < E)
            tl.store(expert_end + bins, start + total, mask=bins < E)
        base = start + before
        for step in range(steps):
            tl.store(bases + block * BINS + bins, base)
            # How far a row's key is past an expert's first one: less than the other row's lane
            # for the rows of that expert that come before it, as unsigned numbers.
            past = (expert * ROWS + lane)[:, None] - (expert * ROWS)[None, :]
            earlier = past.to(tl.uint32, bitcast=True) < lane.to(tl.uint32, bitcast=True)[None, :]
            rank = tl.sum(earlier.to(tl.int32), axis=0)
            tl.debug_barrier()  # all threads' bases (and filling) come before all reads
            routed = expert < E
            at = tl.load(bases + block * BINS + expert, mask=routed, other=0)
            pos = tl.where(routed, at + rank, -1)
            item = (block * steps + step) * ROWS + lane
            tl.store(token_to_pos + item, pos, mask=item < N)
            tl.store(pos_to_token + pos, item // K, mask=routed)
            tl.store(pos_to_slot + pos, item % K, mask=routed)
            if not ALONE:  # noqa: SIM102  (decided at compile time)
                if step + 1 < steps:
                    tl.debug_barrier()  # and all reads before the next step's bases
                    base += tl.histogram(expert, BINS)
                    expert = _expert_of(ids, item + ROWS, N, E)


def supports_expert_permute(ids: Tensor, num_experts: int, alignment: int) -> str | None:
    """Contiguous ids, at most 4095 experts."""
    if num_experts > MAX_EXPERTS:
        return f"{num_experts} experts do not fit one program"
    return device_reason(ids=ids) or contiguous_reason(ids=ids)


def expert_permute(
    ids: Tensor, num_experts: int, alignment: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    check_expert_permute(ids, num_experts, alignment)
    (tokens, topk), routed = ids.shape, ids.numel()
    rows = permuted_rows(tokens, topk, num_experts, alignment)
    new = {"dtype": torch.int32, "device": ids.device}
    pos = torch.empty(2, rows, **new)
    token_to_pos = torch.empty(tokens, topk, **new)
    if not routed:
        edges = torch.zeros(2, num_experts, **new)
        return pos[0], pos[1], token_to_pos, edges[0], edges[1]
    edges = torch.empty(2, num_experts, **new)
    size, steps, warps = _permute_tiles(routed)
    blocks, bins = triton.cdiv(routed, size * steps), triton.next_power_of_2(num_experts + 1)
    scratch = torch.empty(2, blocks, bins, **new)
    alone = blocks == 1 and steps == 1 and rows <= MAX_FILL
    if not alone:
        programs = min(max(blocks, triton.cdiv(rows, FILL_BLOCK)), MAX_PROGRAMS)
        _permute_count_kernel[(programs,)](
            ids,
            scratch[0],
            pos[0],
            pos[1],
            routed,
            rows,
            blocks,
            steps,
            E=num_experts,
            ROWS=size,
            BINS=bins,
            FILL=FILL_BLOCK,
            num_warps=warps,
        )
    _permute_place_kernel[(min(blocks, MAX_PROGRAMS),)](
        ids,
        scratch[0],
        scratch[1],
        pos[0],
        pos[1],
        token_to_pos,
        edges[0],
        edges[1],
        routed,
        rows,
        blocks,
        steps,
        ALIGNMENT=alignment,
        K=topk,
        E=num_experts,
        ROWS=size,
        BINS=bins,
        TILE=TILE,
        FILL=FILL_BLOCK,
        ALONE=alone,
        num_warps=warps,
    )
    return pos[0], pos[1], token_to_pos, edges[0], edges[1]


def _permute_tiles(routed: int) -> tuple[int, int, int]:
    """Routed rows ranked at a time, how often per program, and warps.

    Ranking compares all pairs, so 256 rows at most; the counts of all programs are added by
    each, so 128 programs at most. H200, 4096 tokens of 6 experts: twice 128 rows 15.2 us, 256
    rows 17.1, of which adding the counts is 4 us and ranking 2.
    """
    if routed <= 8192:
        size = max(triton.next_power_of_2(routed), 32) if routed <= 128 else 64
    else:
        size = 128 if routed <= 32768 else 256
    return size, triton.cdiv(routed, size * 128), 4 if size <= 128 else 8


# ---------------------------------------------------------------- combination
@triton.jit(do_not_specialize=["items"])
def _expert_combine_kernel(
    x,  # bf16 or fp32 [P, D]
    token_to_pos,  # int32 [T, K]
    shared,  # bf16 [T, D]
    out,  # bf16 [T, D]
    items,  # T * chunks
    x_stride,
    shared_stride,
    K: tl.constexpr,
    D: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    CHUNKS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        token = tl.cast(item // CHUNKS, tl.int64)
        column = (item % CHUNKS) * BLOCK + tl.arange(0, BLOCK)
        mask = column < D
        total = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(K):
            pos = tl.load(token_to_pos + token * K + i).to(tl.int64)
            valid = mask & (column >= tl.where(pos >= 0, 0, D))
            row = tl.load(x + pos * x_stride + column, mask=valid, other=0.0)
            total += to_fp32(row)
        if HAS_SHARED:
            row = tl.load(shared + token * shared_stride + column, mask=mask, other=0.0)
            total += to_fp32(row)
        tl.store(out + token * D + column, to_bf16(total), mask=mask)


def supports_expert_combine(x: Tensor, token_to_pos: Tensor, shared: Tensor | None) -> str | None:
    """Rows contiguous along D."""
    return (
        device_reason(x=x, token_to_pos=token_to_pos, shared=shared)
        or stride_reason(x=x, shared=shared)
        or contiguous_reason(token_to_pos=token_to_pos)
    )


def expert_combine(x: Tensor, token_to_pos: Tensor, shared: Tensor | None) -> Tensor:
    check_expert_combine(x, token_to_pos, shared)
    (tokens, topk), dim = token_to_pos.shape, x.shape[1]
    out = torch.empty(tokens, dim, dtype=torch.bfloat16, device=x.device)
    if not out.numel():
        return out
    block, warps = _combine_tiles(dim)
    items = tokens * triton.cdiv(dim, block)
    _expert_combine_kernel[(min(items, MAX_PROGRAMS),)](
        x,
        token_to_pos,
        out if shared is None else shared,
        out,
        items,
        x.stride(0),
        out.stride(0) if shared is None else shared.stride(0),
        K=topk,
        D=dim,
        HAS_SHARED=shared is not None,
        BLOCK=block,
        num_warps=warps,
    )
    return out


def _combine_tiles(dim: int) -> tuple[int, int]:
    """Channels a program and its warps: 8 channels a thread."""
    block = min(1024, triton.next_power_of_2(dim))
    return block, max(1, block // 256)
