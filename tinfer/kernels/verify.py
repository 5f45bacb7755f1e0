"""Verification of drafts: by equality, and by rejection over integer masses.

Rejection prepares the masses of all target and draft rows as the sampler does (records and
slices' sums, no array of masses). One program per request then walks its rows until a draft is
rejected. The row where it stops is drawn from: from its masses, or from the residual, in three
passes over that row's slices (sums and the largest entry, floors, the draw).

Source: the references' contracts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.compat.masses import ACCEPT, SAMPLE
from tinfer.compat.verify import check_get_accept_result, check_verify_drafts
from tinfer.kernels._call import MAX_PROGRAMS, contiguous_reason, device_reason, stride_reason
from tinfer.kernels._masses import OK, first_word
from tinfer.kernels._sample_slices import STATUS
from tinfer.kernels.sampling import MAX_COLUMNS, row_masses, tile_masses

ONE = tl.constexpr(1 << 31)
ROW, USES_DRAFT, DECIDED = (tl.constexpr(i) for i in range(3))  # columns of `decisions`


# ---------------------------------------------------------------- by equality
@triton.jit
def _truth(target_tokens, golden_tokens, golden, row, mask):
    """The tokens that drafts are held against, -1 where masked."""
    token = tl.load(target_tokens + row, mask=mask, other=-1)
    if golden_tokens is not None:
        other = tl.load(golden_tokens + row, mask=mask, other=-1)
        token = tl.where(golden > 0, other, token)
    return token


@triton.jit
def _accept_kernel(
    target_tokens,  # int64 [R]
    draft_tokens,  # int64 [R]
    cu_rows,  # int32 [B+1]
    golden_tokens,  # int64 [R], or None
    golden_mask,  # uint8 [B], or None
    accept_len,  # int32 [B]
    accepted,  # uint8 [R]
    next_token,  # int64 [B]
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0)
    begin, end = tl.load(cu_rows + b), tl.load(cu_rows + b + 1)
    golden = 0
    if golden_mask is not None:
        golden = tl.load(golden_mask + b).to(tl.int32)
    failed_at = end - 1 + tl.zeros([BLOCK], tl.int32)
    for start in range(begin, end - 1, BLOCK):
        row = start + tl.arange(0, BLOCK)
        live = row < end - 1
        draft = tl.load(draft_tokens + row, mask=live, other=0)
        same = _truth(target_tokens, golden_tokens, golden, row, live) == draft
        failed_at = tl.minimum(failed_at, tl.where(live & (same == 0), row, end - 1))
    stop = tl.min(failed_at)
    for start in range(begin, end, BLOCK):
        row = start + tl.arange(0, BLOCK)
        tl.store(accepted + row, (row < stop).to(tl.uint8), mask=row < end)
    has_rows = end > begin
    tl.store(accept_len + b, tl.where(has_rows, stop - begin, 0))
    tl.store(next_token + b, _truth(target_tokens, golden_tokens, golden, stop, has_rows))


def supports_get_accept_result(
    target_tokens: Tensor,
    draft_tokens: Tensor,
    cu_rows: Tensor,
    golden_tokens: Tensor | None,
    golden_mask: Tensor | None,
) -> str | None:
    """At most 65535 requests; contiguous tensors on one device."""
    tensors = {
        "target_tokens": target_tokens,
        "draft_tokens": draft_tokens,
        "cu_rows": cu_rows,
        "golden_tokens": golden_tokens,
        "golden_mask": golden_mask,
    }
    if cu_rows.shape[0] - 1 > MAX_PROGRAMS:
        return f"more than {MAX_PROGRAMS} requests"
    return device_reason(**tensors) or contiguous_reason(**tensors)


def get_accept_result(
    target_tokens: Tensor,
    draft_tokens: Tensor,
    cu_rows: Tensor,
    golden_tokens: Tensor | None,
    golden_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    check_get_accept_result(target_tokens, draft_tokens, cu_rows, golden_tokens, golden_mask)
    rows, requests = target_tokens.shape[0], cu_rows.shape[0] - 1
    device = cu_rows.device
    accept_len = torch.empty(requests, dtype=torch.int32, device=device)
    accepted = torch.zeros(rows, dtype=torch.bool, device=device)
    next_token = torch.empty(requests, dtype=torch.int64, device=device)
    if requests:
        _accept_kernel[(requests,)](
            target_tokens, draft_tokens, cu_rows, golden_tokens,
            None if golden_mask is None else golden_mask.view(torch.uint8),
            accept_len, accepted.view(torch.uint8), next_token, BLOCK=32, num_warps=1,
        )  # fmt: skip
    return accept_len, accepted, next_token


# ---------------------------------------------------------------- by rejection
@triton.jit
def _decide_kernel(
    logits,  # fp32 | bf16 [R, V]
    draft_logits,  # fp32 | bf16 [R, V], or None
    draft_tokens,  # int64 [R]
    cu_rows,  # int32 [B+1]
    seeds,  # int64 [R]
    positions,  # int64 [R]
    temperature,  # fp32 [R]
    min_p,  # fp32 [R]
    record32,  # the target rows' RowMasses: int32 [R, 4]
    record_x,  # fp32 [R, 2]
    kept_total,  # int64 [R]
    part32,  # int32 [R, 5, SLICES]
    draft_record32,  # the draft rows'
    draft_record_x,
    draft_kept_total,
    draft_part32,
    accept_len,  # int32 [B]
    next_token,  # int64 [B]
    statuses,  # int32 [B]
    decisions,  # int32 [B, 3]: row (-1: none to draw from), whether a draft was rejected, status
    stride,
    draft_stride,
    V,
    PURPOSE: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
):
    b = tl.program_id(0)
    begin, end = tl.load(cu_rows + b), tl.load(cu_rows + b + 1)
    rows = (temperature, min_p, record32, record_x, kept_total, part32)
    row = begin.to(tl.int64)
    going = row < end - 1
    while going:
        token = tl.load(draft_tokens + row)
        inside = (token >= 0) & (token < V)
        column = tl.where(inside, token, 0).to(tl.int32) + tl.arange(0, 1)
        source = logits + row * stride
        p = tl.sum(tile_masses(source, column, V, row, rows, SLICES, PADDED))
        q = tl.full([], ONE, tl.int64)
        if draft_logits is not None:
            drafts = (
                temperature,
                min_p,
                draft_record32,
                draft_record_x,
                draft_kept_total,
                draft_part32,
            )
            source = draft_logits + row * draft_stride
            q = tl.sum(tile_masses(source, column, V, row, drafts, SLICES, PADDED))
        word = first_word(tl.load(seeds + row), tl.load(positions + row), PURPOSE) >> 1
        accepted = inside & (q > 0) & (word * q < p << 31)
        row = tl.where(accepted, row + 1, row)
        going = accepted & (row < end - 1)
    has_rows = end > begin
    status = tl.load(record32 + row * 4 + STATUS, mask=has_rows, other=OK)
    tl.store(accept_len + b, tl.where(has_rows, row - begin, 0).to(tl.int32))
    tl.store(next_token + b, tl.where(has_rows, 0, -1).to(tl.int64))
    tl.store(statuses + b, status)
    chosen = tl.where(has_rows & (status == OK), row, -1).to(tl.int32)
    tl.store(decisions + b * 3 + ROW, chosen)
    tl.store(decisions + b * 3 + USES_DRAFT, (row < end - 1).to(tl.int32))


@triton.jit
def _residual(
    logits,
    draft_logits,
    draft_tokens,
    column,
    V,
    row,
    uses_draft,
    rows,
    drafts,
    stride,
    draft_stride,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
):
    """int64 max(P - Q, 0) of some columns of a row, or P where no draft was rejected there."""
    left = tile_masses(logits + row * stride, column, V, row, rows, SLICES, PADDED)
    if uses_draft > 0:
        if draft_logits is not None:
            source = draft_logits + row * draft_stride
            left -= tile_masses(source, column, V, row, drafts, SLICES, PADDED)
        else:
            left -= tl.where(column == tl.load(draft_tokens + row), ONE, 0)
    return tl.maximum(left, 0)


@triton.jit
def _residual_kernel(
    logits,  # fp32 | bf16 [R, V]
    draft_logits,  # fp32 | bf16 [R, V], or None
    draft_tokens,  # int64 [R]
    seeds,  # int64 [R]
    positions,  # int64 [R]
    temperature,  # fp32 [R]
    min_p,  # fp32 [R]
    record32,  # the target rows' RowMasses: int32 [R, 4]
    record_x,  # fp32 [R, 2]
    kept_total,  # int64 [R]
    part32,  # int32 [R, 5, SLICES]
    draft_record32,  # the draft rows'
    draft_record_x,
    draft_kept_total,
    draft_part32,
    decisions,  # int32 [B, 3]
    sums,  # int64 [B, 3, SLICES]: residuals, the largest one packed with its column, floors
    next_token,  # int64 [B]
    stride,
    draft_stride,
    V,
    PASS: tl.constexpr,  # 0: residuals' sums, 1: floors' sums, 2: the draw
    PURPOSE: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b, s = tl.program_id(0), tl.full([], 0, tl.int32)
    if PASS < 2:
        b, s = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES
    row = tl.load(decisions + b * 3 + ROW).to(tl.int64)
    if row >= 0:
        uses_draft = tl.load(decisions + b * 3 + USES_DRAFT)
        rows = (temperature, min_p, record32, record_x, kept_total, part32)
        drafts = rows
        if draft_logits is not None:
            drafts = (
                temperature,
                min_p,
                draft_record32,
                draft_record_x,
                draft_kept_total,
                draft_part32,
            )
        out = sums + b.to(tl.int64) * 3 * SLICES
        slices = tl.arange(0, PADDED)
        live = slices < SLICES
        total, before, first = tl.full([], 1, tl.int64), tl.full([], 0, tl.int64), 0
        target, rest = before, before
        if PASS > 0:
            total = tl.sum(tl.load(out + slices, mask=live, other=0))
        if PASS == 2:
            part = tl.load(out + 2 * SLICES + slices, mask=live, other=0)
            largest = tl.max(tl.load(out + SLICES + slices, mask=live, other=0))
            first = (0xFFFFFF - (largest & 0xFFFFFF)).to(tl.int32)
            rest = ONE - tl.sum(part)
            part += tl.where(slices == first // BLOCK, rest, 0)
            word = first_word(tl.load(seeds + row), tl.load(positions + row), PURPOSE)
            target = word & 0x7FFFFFFF
            upto = tl.cumsum(part)
            s = tl.sum((upto <= target).to(tl.int32))
            before = tl.sum(tl.where(slices == s, upto - part, 0))
        column = s * BLOCK + tl.arange(0, BLOCK)
        left = _residual(
            logits,
            draft_logits,
            draft_tokens,
            column,
            V,
            row,
            uses_draft,
            rows,
            drafts,
            stride,
            draft_stride,
            SLICES,
            PADDED,
        )
        if PASS == 0:
            tl.store(out + s, tl.sum(left))
            tl.store(out + SLICES + s, tl.max((left << 24) | (0xFFFFFF - column).to(tl.int64)))
        else:
            mass = (left << 31) // total
            if PASS == 1:
                tl.store(out + 2 * SLICES + s, tl.sum(mass))
            else:
                mass += tl.where(column == first, rest, 0)
                token = s * BLOCK + tl.sum((tl.cumsum(mass) + before <= target).to(tl.int32))
                tl.store(next_token + b, token.to(tl.int64))


def supports_verify_drafts(
    logits: Tensor,
    draft_logits: Tensor | None,
    draft_tokens: Tensor,
    cu_rows: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> str | None:
    """Up to 2^20 columns, contiguous; tensors on one device."""
    flat = {
        "draft_tokens": draft_tokens,
        "cu_rows": cu_rows,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seeds": seeds,
        "positions": positions,
    }
    if logits.shape[1] > MAX_COLUMNS:
        return f"more than {MAX_COLUMNS} columns"
    rows = {"logits": logits, "draft_logits": draft_logits}
    return device_reason(**rows, **flat) or stride_reason(**rows) or contiguous_reason(**flat)


def verify_drafts(
    logits: Tensor,
    draft_logits: Tensor | None,
    draft_tokens: Tensor,
    cu_rows: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    filters = (temperature, top_k, top_p, min_p)
    check_verify_drafts(logits, draft_logits, draft_tokens, cu_rows, *filters, seeds, positions)
    requests, device = cu_rows.shape[0] - 1, logits.device
    accept_len = torch.empty(requests, dtype=torch.int32, device=device)
    next_token = torch.empty(requests, dtype=torch.int64, device=device)
    statuses = torch.empty(requests, dtype=torch.int32, device=device)
    if not requests:
        return accept_len, next_token, statuses
    if not logits.shape[0]:
        return accept_len.zero_(), next_token.fill_(-1), statuses.zero_()
    target = row_masses(logits, filters, None, None, True)
    draft = None if draft_logits is None else row_masses(draft_logits, filters, None, None, True)
    decisions = torch.empty(requests, 3, dtype=torch.int32, device=device)
    sums = torch.empty(requests, 3, target.slices, dtype=torch.int64, device=device)
    strides = (logits.stride(0), 0 if draft_logits is None else draft_logits.stride(0))
    sizes = {k: target.sizes[k] for k in ("SLICES", "PADDED")}
    masses = (*target.filters, *target.arrays, *((None,) * 4 if draft is None else draft.arrays))
    rows = (logits, draft_logits, draft_tokens)
    meta = {"num_warps": 1, "enable_fp_fusion": False}
    _decide_kernel[(requests,)](
        *rows, cu_rows, seeds, positions, *masses, accept_len, next_token, statuses, decisions,
        *strides, logits.shape[1], PURPOSE=ACCEPT, **sizes, **meta,
    )  # fmt: skip
    meta["num_warps"] = max(min(target.sizes["BLOCK"] // 512, 16), 1)
    for number, programs in enumerate(
        (requests * target.slices, requests * target.slices, requests)
    ):
        _residual_kernel[(programs,)](
            *rows, seeds, positions, *masses, decisions, sums, next_token, *strides,
            logits.shape[1], PASS=number, PURPOSE=SAMPLE, **target.sizes, **meta,
        )  # fmt: skip
    return accept_len, next_token, statuses
