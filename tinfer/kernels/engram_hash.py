"""Engram's addresses: the n-gram look-back and its hash.

Look-back: one thread per token reads the compressed ids of the rows before it, or the history
ring where the batch does not hold them. The ring's new entries must not be written before every
look-back has read the old ones: a batch of one block waits at a barrier, a larger one takes a
second launch.

Hash: `(P_0 ^ ... ^ P_i) % prime + offset`, one thread per output element, all layers in one
launch. Integers throughout.

Source: kernels R1 and R2 of the contracts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.compat.engram_hash import check_engram_lookback, check_ngram_hash
from tinfer.kernels._call import MAX_PROGRAMS, contiguous_reason, device_reason, stride_reason

LOOKBACK_BLOCK = 128  # of a batch that takes two launches
MAX_ALONE = 1024  # tokens that one program looks back for
HASH_BLOCK = 128


# ---------------------------------------------------------------- look-back
@triton.jit
def _compressed_id(ids, dead, token_map, row, mask, V, HAS_DEAD: tl.constexpr):
    """Compressed id of the batch's rows; -1 where masked, dead or outside the map."""
    token = tl.load(ids + row, mask=mask, other=-1)
    known = mask & (token >= 0) & (token < V)
    if HAS_DEAD:
        known = known & (tl.load(dead + row, mask=mask, other=1) == 0)
    return tl.load(token_map + token, mask=known, other=-1)


@triton.jit(do_not_specialize=["T", "V", "pad_id", "stride"])
def _engram_lookback_kernel(
    ids,  # int64 [T]
    positions,  # int64 [T]
    slots,  # int64 [T]
    dead,  # uint8 [T]
    token_map,  # int32 [V]
    history,  # int32 [S, RING]
    out,  # int32 [T, ORDER]
    T,
    V,
    pad_id,
    stride,
    RING: tl.constexpr,
    ORDER: tl.constexpr,
    HAS_DEAD: tl.constexpr,
    READ: tl.constexpr,
    WRITE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < T
    position = tl.load(positions + row, mask=live, other=0)
    slot = tl.load(slots + row, mask=live, other=-1)
    ring = history + tl.maximum(slot, 0) * stride
    if READ:
        in_batch = live
        is_open = slot >= 0
        for j in tl.static_range(ORDER):
            before = row - j
            here = live & (before >= 0)
            same = tl.load(slots + before, mask=here, other=-1) == slot
            follows = tl.load(positions + before, mask=here, other=-1) == position - j
            in_batch = in_batch & here & same & follows
            value = _compressed_id(ids, dead, token_map, before, in_batch, V, HAS_DEAD)
            stored_mask = is_open & (in_batch == 0) & (position >= j)
            at = tl.maximum(position - j, 0) % RING
            stored = tl.load(ring + at, mask=stored_mask, other=-1)
            value = tl.where(in_batch, value, stored)
            is_open = is_open & (position >= j) & (value >= 0)
            tl.store(out + row * ORDER + j, tl.where(is_open, value, pad_id), mask=live)
    if READ and WRITE:
        tl.debug_barrier()
    if WRITE:
        later = row + RING
        other = tl.load(slots + later, mask=later < T, other=-1)
        last = live & (slot >= 0) & (position >= 0) & ((later >= T) | (other != slot))
        value = _compressed_id(ids, dead, token_map, row, last, V, HAS_DEAD)
        tl.store(ring + tl.maximum(position, 0) % RING, value, mask=last)


def supports_engram_lookback(
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    dead: Tensor | None,
    token_map: Tensor,
    pad_id: int,
    history: Tensor,
    order: int,
) -> str | None:
    """Contiguous tensors on one device; the history's rows may be strided."""
    flat = {
        "ids": ids,
        "positions": positions,
        "slots": slots,
        "dead": dead,
        "token_map": token_map,
    }
    return (
        device_reason(**flat, history=history)
        or contiguous_reason(**flat)
        or stride_reason(history=history)
    )


def engram_lookback(
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    dead: Tensor | None,
    token_map: Tensor,
    pad_id: int,
    history: Tensor,
    order: int,
) -> Tensor:
    check_engram_lookback(ids, positions, slots, dead, token_map, pad_id, history, order)
    tokens = ids.shape[0]
    out = torch.empty(tokens, order, dtype=torch.int32, device=ids.device)
    if not tokens:
        return out
    alone = tokens <= MAX_ALONE
    block = max(triton.next_power_of_2(tokens), 32) if alone else LOOKBACK_BLOCK
    blocks = triton.cdiv(tokens, block)
    phases = ((True, True),) if alone else ((True, False), (False, True))
    for read, write in phases:
        _engram_lookback_kernel[(blocks,)](
            ids,
            positions,
            slots,
            ids if dead is None else dead.view(torch.uint8),
            token_map,
            history,
            out,
            tokens,
            token_map.shape[0],
            pad_id,
            history.stride(0),
            RING=history.shape[1],
            ORDER=order,
            HAS_DEAD=dead is not None,
            READ=read,
            WRITE=write,
            BLOCK=block,
            num_warps=min(block // 32, 16),
        )
    return out


# ---------------------------------------------------------------- hash
@triton.jit(do_not_specialize=["T"])
def _ngram_hash_kernel(
    lookback,  # int32 [T, ORDER]
    multipliers,  # int64 [L, ORDER]
    primes,  # int64 [L, ORDER-1, HEADS]
    offsets,  # int64 [L, COLUMNS]
    out,  # int64 [L, T, COLUMNS]
    T,
    ORDER: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    COLUMNS: tl.constexpr = (ORDER - 1) * HEADS
    layer = tl.program_id(1)
    count = T.to(tl.int64) * COLUMNS
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        item = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        live = item < count
        token, column = item // COLUMNS, (item % COLUMNS).to(tl.int32)
        oldest = column // HEADS + 1
        rolling = tl.zeros([BLOCK], tl.int64)
        for j in tl.static_range(ORDER):
            mask = live & (oldest >= j)
            value = tl.load(lookback + token * ORDER + j, mask=mask, other=0).to(tl.int64)
            rolling = rolling ^ (value * tl.load(multipliers + layer * ORDER + j))
        prime = tl.load(primes + layer * COLUMNS + column)
        row = rolling % prime + tl.load(offsets + layer * COLUMNS + column)
        tl.store(out + layer * count + item, row, mask=live)


def supports_ngram_hash(
    lookback: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor
) -> str | None:
    """Contiguous tensors on one device."""
    tensors = {
        "lookback": lookback,
        "multipliers": multipliers,
        "primes": primes,
        "offsets": offsets,
    }
    return device_reason(**tensors) or contiguous_reason(**tensors)


def ngram_hash(lookback: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    check_ngram_hash(lookback, multipliers, primes, offsets)
    tokens, (layers, columns) = lookback.shape[0], offsets.shape
    out = torch.empty(layers, tokens, columns, dtype=torch.int64, device=lookback.device)
    if not out.numel():
        return out
    blocks = min(triton.cdiv(tokens * columns, HASH_BLOCK), MAX_PROGRAMS // layers)
    _ngram_hash_kernel[(blocks, layers)](
        lookback,
        multipliers,
        primes,
        offsets,
        out,
        tokens,
        ORDER=lookback.shape[1],
        HEADS=primes.shape[2],
        BLOCK=HASH_BLOCK,
        num_warps=4,
    )
    return out
