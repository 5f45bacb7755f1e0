"""The kernels that verify drafts by rejection over integer masses.

The masses of all target and draft rows are prepared as the sampler does (records and slices' sums,
no array of masses). One program per request then walks its rows until a draft is rejected. The row
where it stops is drawn from: from its masses, or from the residual, in three passes over that
row's slices (sums and the largest entry, floors, the draw).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._masses import OK, first_word
from tinfer.kernels._sample_floors import tile_masses
from tinfer.kernels._sample_slices import STATUS

ONE = tl.constexpr(1 << 31)
ROW, USES_DRAFT = (tl.constexpr(i) for i in range(2))  # columns of `decisions`


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
    record32,  # the target rows' RowMasses: int32 [R, 6]
    record_x,  # fp32 [R, 2]
    kept_total,  # int64 [R]
    part32,  # int32 [R, 3, SLICES]
    draft_record32,  # the draft rows'
    draft_record_x,
    draft_kept_total,
    draft_part32,
    accept_len,  # int32 [B]
    next_token,  # int64 [B]
    statuses,  # int32 [B]
    decisions,  # int32 [B, 2]: row (-1: none to draw from), whether a draft was rejected
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
    status = tl.load(record32 + row * 6 + STATUS, mask=has_rows, other=OK)
    tl.store(accept_len + b, tl.where(has_rows, row - begin, 0).to(tl.int32))
    tl.store(next_token + b, tl.where(has_rows, 0, -1).to(tl.int64))
    tl.store(statuses + b, status)
    chosen = tl.where(has_rows & (status == OK), row, -1).to(tl.int32)
    tl.store(decisions + b * 2 + ROW, chosen)
    tl.store(decisions + b * 2 + USES_DRAFT, (row < end - 1).to(tl.int32))


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
    record32,  # the target rows' RowMasses: int32 [R, 6]
    record_x,  # fp32 [R, 2]
    kept_total,  # int64 [R]
    part32,  # int32 [R, 3, SLICES]
    draft_record32,  # the draft rows'
    draft_record_x,
    draft_kept_total,
    draft_part32,
    decisions,  # int32 [B, 2]
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
    row = tl.load(decisions + b * 2 + ROW).to(tl.int64)
    if row >= 0:
        uses_draft = tl.load(decisions + b * 2 + USES_DRAFT)
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
