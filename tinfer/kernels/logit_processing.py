"""Kernels that change logits in place before sampling.

Penalties read the counts of every token but touch the logits of the seen ones alone. Lists
(bias, bans) take one program per row. fp32 operations are not contracted.

Source: the references' contracts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.compat.logit_processing import (
    IN_PROMPT,
    check_add_logit_bias_,
    check_apply_penalties_,
    check_ban_sequences_,
    check_ban_tokens_,
    check_count_tokens_,
)
from tinfer.kernels._call import MAX_PROGRAMS, contiguous_reason, device_reason, stride_reason
from tinfer.kernels._jit import to_bf16, to_fp32
from tinfer.kernels._masses import INFINITY

PROMPT = tl.constexpr(IN_PROMPT)
PENALTY_BLOCK = 4096


@triton.jit
def _store_logit(at, x, mask):
    """fp32 logits to memory, rounded to nearest where that is bf16."""
    if at.dtype.element_ty == tl.bfloat16:
        tl.store(at, to_bf16(x), mask=mask)
    else:
        tl.store(at, x, mask=mask)


# ---------------------------------------------------------------- token counts
@triton.jit(do_not_specialize=["T"])
def _count_tokens_kernel(
    counts,  # int32 [S, V]
    slots,  # int64 [T]
    tokens,  # int64 [T]
    T,
    S,
    V,
    stride,
    FLAG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row, mask=row < T, other=-1)
    token = tl.load(tokens + row, mask=row < T, other=-1)
    live = (slot >= 0) & (slot < S) & (token >= 0) & (token < V)
    at = counts + slot * stride + token
    if FLAG:
        tl.atomic_or(at, PROMPT, mask=live, sem="relaxed")
    else:
        tl.atomic_add(at, 1, mask=live, sem="relaxed")


def supports_count_tokens_(
    counts: Tensor, slots: Tensor, tokens: Tensor, in_prompt: bool
) -> str | None:
    """Contiguous tensors on one device; the counts' rows may be strided."""
    flat = {"slots": slots, "tokens": tokens}
    return (
        device_reason(counts=counts, **flat)
        or stride_reason(counts=counts)
        or contiguous_reason(**flat)
    )


def count_tokens_(counts: Tensor, slots: Tensor, tokens: Tensor, in_prompt: bool) -> None:
    check_count_tokens_(counts, slots, tokens, in_prompt)
    total = tokens.shape[0]
    if total and counts.numel():
        block = 128
        _count_tokens_kernel[(triton.cdiv(total, block),)](
            counts, slots, tokens, total, *counts.shape, counts.stride(0), FLAG=in_prompt,
            BLOCK=block, num_warps=4,
        )  # fmt: skip


@triton.jit
def _apply_penalties_kernel(
    logits,  # fp32 | bf16 [R, V]
    counts,  # int32 [S, V]
    slots,  # int64 [R]
    repetition,  # fp32 [R]
    frequency,  # fp32 [R]
    presence,  # fp32 [R]
    pending,  # int64 [R, M]
    V,
    S,
    stride,
    counts_stride,
    M: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    slot = tl.load(slots + row)
    factor, per_use = tl.load(repetition + row), tl.load(frequency + row)
    once = tl.load(presence + row)
    idle = (factor == 1.0) & (per_use == 0.0) & (once == 0.0)
    if (slot >= 0) & (slot < S) & (idle == 0):
        column = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        entry = tl.load(counts + slot * counts_stride + column, mask=column < V, other=0)
        produced = entry & (PROMPT - 1)
        if pending is not None:
            for m in range(M):
                produced += (tl.load(pending + row * M + m) == column).to(tl.int32)
        seen = ((produced > 0) | (entry >= PROMPT)) & (column < V)
        at = logits + row * stride + column
        old = to_fp32(tl.load(at, mask=seen, other=0.0))
        x = old - per_use * produced.to(tl.float32)
        x = x - tl.where(produced > 0, once, 0.0)
        x = tl.where(x < 0, x * factor, tl.div_rn(x, factor + tl.zeros_like(x)))
        _store_logit(at, x, seen & (old != -INFINITY))


def supports_apply_penalties_(
    logits: Tensor,
    counts: Tensor,
    slots: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    pending: Tensor | None,
) -> str | None:
    """Contiguous tensors on one device; the rows of logits and counts may be strided."""
    flat = {
        "slots": slots,
        "repetition": repetition,
        "frequency": frequency,
        "presence": presence,
        "pending": pending,
    }
    return (
        device_reason(logits=logits, counts=counts, **flat)
        or stride_reason(logits=logits, counts=counts)
        or contiguous_reason(**flat)
        or _too_many(logits, triton.cdiv(logits.shape[1], PENALTY_BLOCK))
    )


def _too_many(logits: Tensor, programs: int) -> str | None:
    if logits.shape[0] * programs > MAX_PROGRAMS:
        return f"{logits.shape[0]} rows need more than {MAX_PROGRAMS} programs"
    return None


def apply_penalties_(
    logits: Tensor,
    counts: Tensor,
    slots: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    pending: Tensor | None,
) -> None:
    check_apply_penalties_(logits, counts, slots, repetition, frequency, presence, pending)
    rows, columns = logits.shape
    if not logits.numel() or not counts.numel():
        return
    block = min(PENALTY_BLOCK, triton.next_power_of_2(columns))
    blocks = triton.cdiv(columns, block)
    _apply_penalties_kernel[(rows * blocks,)](
        logits, counts, slots, repetition, frequency, presence, pending, columns,
        counts.shape[0], logits.stride(0), counts.stride(0),
        M=0 if pending is None else pending.shape[1], BLOCKS=blocks, BLOCK=block,
        num_warps=max(block // 512, 1), enable_fp_fusion=False,
    )  # fmt: skip


# ---------------------------------------------------------------- bias and bans
@triton.jit
def _edit_tokens_kernel(
    logits,  # fp32 | bf16 [R, V]
    ids,  # int64 [R, M]
    bias,  # fp32 [R, M], or None to ban
    active,  # uint8 [R], or None
    V,
    stride,
    M: tl.constexpr,
    BANS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    token = tl.load(ids + row * M + j, mask=j < M, other=-1)
    if active is not None:
        token = tl.where(tl.load(active + row).to(tl.int32) > 0, token, -1)
    live = (token >= 0) & (token < V)
    at = logits + row * stride + token
    if BANS:
        _store_logit(at, tl.full([BLOCK], -INFINITY, tl.float32), live)
    else:
        old = to_fp32(tl.load(at, mask=live, other=0.0))
        new = old + tl.load(bias + row * M + j, mask=j < M, other=0.0)
        _store_logit(at, new, live & (old != -INFINITY))


def _edit(logits: Tensor, ids: Tensor, bias: Tensor | None, active: Tensor | None) -> None:
    if not ids.numel():
        return
    block = triton.next_power_of_2(ids.shape[1])
    _edit_tokens_kernel[(logits.shape[0],)](
        logits, ids, bias, None if active is None else active.view(torch.uint8),
        logits.shape[1], logits.stride(0), M=ids.shape[1], BANS=bias is None, BLOCK=block,
        num_warps=max(min(block // 128, 8), 1),
    )  # fmt: skip


def _supports_lists(logits: Tensor, **lists: Tensor | None) -> str | None:
    return (
        device_reason(logits=logits, **lists)
        or stride_reason(logits=logits)
        or contiguous_reason(**lists)
        or _too_many(logits, 1)
    )


def supports_add_logit_bias_(logits: Tensor, ids: Tensor, bias: Tensor) -> str | None:
    """Contiguous tensors on one device; the logits' rows may be strided."""
    return _supports_lists(logits, ids=ids, bias=bias)


def add_logit_bias_(logits: Tensor, ids: Tensor, bias: Tensor) -> None:
    check_add_logit_bias_(logits, ids, bias)
    _edit(logits, ids, bias, None)


def supports_ban_tokens_(logits: Tensor, ids: Tensor, active: Tensor | None) -> str | None:
    """Contiguous tensors on one device; the logits' rows may be strided."""
    return _supports_lists(logits, ids=ids, active=active)


def ban_tokens_(logits: Tensor, ids: Tensor, active: Tensor | None) -> None:
    check_ban_tokens_(logits, ids, active)
    _edit(logits, ids, None, active)


@triton.jit
def _ban_sequences_kernel(
    logits,  # fp32 | bf16 [R, V]
    words,  # int64 [R, W, N]
    history,  # int64 [R, N-1]
    V,
    stride,
    W: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    word = words + (row * W + j) * N
    match = j < W
    for n in range(N - 1):
        want = tl.load(word + n, mask=j < W, other=-1)
        match = match & ((want < 0) | (want == tl.load(history + row * (N - 1) + n)))
    last = tl.load(word + N - 1, mask=j < W, other=-1)
    match = match & (last >= 0) & (last < V)
    at = logits + row * stride + last
    _store_logit(at, tl.full([BLOCK], -INFINITY, tl.float32), match)


def supports_ban_sequences_(logits: Tensor, words: Tensor, history: Tensor) -> str | None:
    """Contiguous tensors on one device; the logits' rows may be strided."""
    return _supports_lists(logits, words=words, history=history)


def ban_sequences_(logits: Tensor, words: Tensor, history: Tensor) -> None:
    check_ban_sequences_(logits, words, history)
    if words.numel():
        block = triton.next_power_of_2(words.shape[1])
        _ban_sequences_kernel[(logits.shape[0],)](
            logits, words, history, logits.shape[1], logits.stride(0), W=words.shape[1],
            N=words.shape[2], BLOCK=block, num_warps=max(min(block // 128, 8), 1),
        )  # fmt: skip
