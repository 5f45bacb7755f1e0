"""References of the index builders: integers, exact, -1 where there is nothing."""

from __future__ import annotations

import torch
from torch import Tensor


def _check_table(op: str, seq: Tensor, rows: int, block_table: Tensor, page_size: int) -> None:
    if seq.dtype != torch.int64:
        raise TypeError(f"{op}: seq must be int64, got {seq.dtype}")
    if seq.shape != (rows,):
        raise ValueError(f"{op}: seq must be [{rows}], got {list(seq.shape)}")
    if block_table.dtype != torch.int32:
        raise TypeError(f"{op}: block_table must be int32, got {block_table.dtype}")
    if block_table.dim() != 2:
        raise ValueError(f"{op}: block_table must be [S, nblk], got {list(block_table.shape)}")
    if page_size < 1:
        raise ValueError(f"{op}: page_size must be positive, got {page_size}")


def check_range_slots(
    first: Tensor,
    last: Tensor,
    seq: Tensor,
    block_table: Tensor,
    page_size: int,
    ring: int,
    width: int,
) -> None:
    op = "range_slots"
    for name, x in (("first", first), ("last", last)):
        if x.dtype != torch.int64:
            raise TypeError(f"{op}: {name} must be int64, got {x.dtype}")
        if x.shape != first.shape or x.dim() != 1:
            raise ValueError(f"{op}: {name} must be [T], got {list(x.shape)}")
    _check_table(op, seq, len(first), block_table, page_size)
    if ring < 1 or width < 0:
        raise ValueError(f"{op}: ring must be positive and width >= 0, got {ring}, {width}")
    if block_table.shape[1] * page_size < ring:
        raise ValueError(
            f"{op}: block_table must cover the ring of {ring}, "
            f"got {block_table.shape[1]} pages of {page_size}"
        )


def _slots(ids: Tensor, valid: Tensor, seq: Tensor, block_table: Tensor, page_size: int) -> Tensor:
    """int32 slots of per-sequence row numbers `ids` [T, n]; -1 where not valid or not mapped."""
    valid = valid & (seq >= 0)[:, None]
    ids = torch.where(valid, ids, 0)
    if not block_table.shape[1]:
        return torch.full_like(ids, -1, dtype=torch.int32)
    page = block_table[seq.clamp(min=0)[:, None], ids // page_size].long()
    slot = torch.where(valid & (page >= 0), page * page_size + ids % page_size, -1)
    return slot.to(torch.int32)


def range_slots(
    first: Tensor,
    last: Tensor,
    seq: Tensor,
    block_table: Tensor,
    page_size: int,
    ring: int,
    width: int,
) -> Tensor:
    """The slots of positions first..last of each row's sequence, oldest first.

    first, last  int64 [T]; last < first means none. Positions below 0 and beyond the `width`th
                 give -1
    seq          int64 [T], row of block_table; -1 marks a padded row
    block_table  int32 [S, nblk], pages of each sequence; a page of -1 gives -1
    ring         positions repeat after `ring` rows; pass nblk * page_size where they do not

    Returns: int32 [T, width]; column i is the slot of p = first + i,
    block_table[seq, (p % ring) // page_size] * page_size + (p % ring) % page_size, else -1.
    Raises: TypeError, ValueError for dtypes and shapes.
    Source: the release's window indices, oldest first (the order fixes the summation).
    """
    check_range_slots(first, last, seq, block_table, page_size, ring, width)
    p = first[:, None] + torch.arange(width, device=first.device)
    return _slots(p % ring, (p >= 0) & (p <= last[:, None]), seq, block_table, page_size)


def check_ids_to_slots(ids: Tensor, seq: Tensor, block_table: Tensor, page_size: int) -> None:
    op = "ids_to_slots"
    if ids.dtype != torch.int32:
        raise TypeError(f"{op}: ids must be int32, got {ids.dtype}")
    if ids.dim() != 2:
        raise ValueError(f"{op}: ids must be [T, k], got {list(ids.shape)}")
    _check_table(op, seq, len(ids), block_table, page_size)


def ids_to_slots(ids: Tensor, seq: Tensor, block_table: Tensor, page_size: int) -> Tensor:
    """Row numbers within a sequence -> slots of the paged cache.

    ids          int32 [T, k]; negative ids are kept as -1
    seq          int64 [T], row of block_table; -1 marks a padded row (all -1)
    block_table  int32 [S, nblk]; an id beyond nblk * page_size or a page of -1 gives -1

    Returns: int32 [T, k], block_table[seq, id // page_size] * page_size + id % page_size.
    Raises: TypeError, ValueError for dtypes and shapes.
    """
    check_ids_to_slots(ids, seq, block_table, page_size)
    valid = (ids >= 0) & (ids < block_table.shape[1] * page_size)
    return _slots(ids.long(), valid, seq, block_table, page_size)
