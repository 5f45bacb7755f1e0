"""Slots of position ranges and of row numbers, through the block table; exact integers.

Memory: block_table int32 [S, nblk]; outputs int32 [T, width], contiguous.
Source: `tinfer.compat.indices`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.compat import indices as ref
from tinfer.kernels._call import scattered

MAX_PROGRAMS = 65535
BLOCK = 1024


@triton.jit
def _slot(ids, valid, seq, table_ptr, table_stride, PAGE: tl.constexpr):
    """int32 slots of per-sequence row numbers; -1 where not valid or not mapped."""
    ids = tl.where(valid, ids, 0)
    at = table_ptr + seq * table_stride + ids // PAGE
    page = tl.load(at, mask=valid, other=-1)
    return tl.where(page >= 0, page * PAGE + (ids % PAGE).to(tl.int32), -1)


@triton.jit(do_not_specialize=["tokens", "width", "ring"])
def _range_slots_kernel(
    first_ptr,  # int64 [T]
    last_ptr,  # int64 [T]
    seq_ptr,  # int64 [T]
    table_ptr,  # int32 [S, nblk]
    out_ptr,  # int32 [T, width]
    tokens,
    width,
    ring,
    table_stride,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    for tile in range(tl.program_id(0), tl.cdiv(tokens, ROWS), tl.num_programs(0)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        seq = tl.load(seq_ptr + row, mask=row < tokens, other=-1)
        live = seq >= 0
        first = tl.load(first_ptr + row, mask=live, other=0)
        last = tl.load(last_ptr + row, mask=live, other=-1)
        begin = tl.maximum(-first, 0)  # columns before it are positions below 0
        start = (tl.maximum(first, 0) % ring).to(tl.int32)
        for column in range(0, width, COLUMNS):
            at = column + tl.arange(0, COLUMNS)
            valid = live[:, None] & (at[None, :] >= begin[:, None])
            valid &= first[:, None] + at[None, :] <= last[:, None]
            skipped = tl.maximum(at[None, :] - begin[:, None], 0).to(tl.int32)
            ids = (start[:, None] + tl.where(valid, skipped, 0)) % ring
            slot = _slot(ids, valid, seq[:, None], table_ptr, table_stride, PAGE)
            inside = (row < tokens)[:, None] & (at < width)[None, :]
            tl.store(out_ptr + row[:, None] * width + at[None, :], slot, mask=inside)


@triton.jit(do_not_specialize=["total", "width", "capacity"])
def _ids_to_slots_kernel(
    ids_ptr,  # int32 [T, width]
    seq_ptr,  # int64 [T]
    table_ptr,  # int32 [S, nblk]
    out_ptr,  # int32 [T, width]
    total,
    width,
    capacity,
    table_stride,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for tile in range(tl.program_id(0), tl.cdiv(total, BLOCK), tl.num_programs(0)):
        flat = tile * BLOCK + tl.arange(0, BLOCK)
        inside = flat < total
        seq = tl.load(seq_ptr + flat // width, mask=inside, other=-1)
        ids = tl.load(ids_ptr + flat, mask=inside, other=-1)
        valid = (seq >= 0) & (ids >= 0) & (ids < capacity)
        slot = _slot(ids, valid, seq, table_ptr, table_stride, PAGE)
        tl.store(out_ptr + flat, slot, mask=inside)


def _grid(total: int, per_program: int) -> tuple[int]:
    return (min(triton.cdiv(total, per_program), MAX_PROGRAMS),)


def supports_range_slots(
    first: Tensor,
    last: Tensor,
    seq: Tensor,
    block_table: Tensor,
    page_size: int,
    ring: int,
    width: int,
) -> str | None:
    """Rows of the block table contiguous."""
    if scattered(block_table):
        return "rows of block_table are not contiguous"
    return None


def range_slots(
    first: Tensor,
    last: Tensor,
    seq: Tensor,
    block_table: Tensor,
    page_size: int,
    ring: int,
    width: int,
) -> Tensor:
    ref.check_range_slots(first, last, seq, block_table, page_size, ring, width)
    out = torch.empty(len(first), width, dtype=torch.int32, device=first.device)
    if not out.numel():
        return out
    columns = min(triton.next_power_of_2(width), BLOCK)
    rows = BLOCK // columns
    _range_slots_kernel[_grid(len(first), rows)](
        first.contiguous(),
        last.contiguous(),
        seq.contiguous(),
        block_table,
        out,
        len(first),
        width,
        ring,
        block_table.stride(0),
        PAGE=page_size,
        ROWS=rows,
        COLUMNS=columns,
    )
    return out


def supports_ids_to_slots(
    ids: Tensor, seq: Tensor, block_table: Tensor, page_size: int
) -> str | None:
    """Rows of the block table contiguous; element numbers in int32."""
    if scattered(block_table):
        return "rows of block_table are not contiguous"
    if ids.numel() >= 2**31:
        return "2^31 ids or more"
    return None


def ids_to_slots(ids: Tensor, seq: Tensor, block_table: Tensor, page_size: int) -> Tensor:
    ref.check_ids_to_slots(ids, seq, block_table, page_size)
    out = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    if out.numel():
        _ids_to_slots_kernel[_grid(out.numel(), BLOCK)](
            ids.contiguous(),
            seq.contiguous(),
            block_table,
            out,
            out.numel(),
            ids.shape[1],
            block_table.shape[1] * page_size,
            block_table.stride(0),
            PAGE=page_size,
            BLOCK=BLOCK,
        )
    return out
