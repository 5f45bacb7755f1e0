"""References of the index logits: dense over a sequence's keys, or over candidate blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tinfer.compat.kv_cache import load_kv
from tinfer.formats import decode_e2m1, decode_ue8m0, unpack_e2m1
from tinfer.kv_layout import KVLayout, check_cache

ROWS_AT_ONCE = 16  # bounds the products of one step, fp32 [rows, heads, keys]


def check_index_logits(
    op: str,
    q: Tensor,
    q_s: Tensor,
    weights: Tensor,
    cache: Tensor,
    layout: KVLayout,
    block_table: Tensor,
    seq: Tensor,
    visible: Tensor,
    max_visible: int = 0,
) -> None:
    """Shared by index_logits and index_logits_blocks."""
    dtypes = (
        ("q", q, torch.uint8),
        ("q_s", q_s, torch.uint8),
        ("weights", weights, torch.float32),
        ("block_table", block_table, torch.int32),
        ("seq", seq, torch.int64),
        ("visible", visible, torch.int32),
    )
    for name, x, dtype in dtypes:
        if x.dtype != dtype:
            raise TypeError(f"{op}: {name} must be {dtype}, got {x.dtype}")
    if q.dim() != 3 or 2 * q.shape[2] != layout.dim or layout.dim % 32:
        raise ValueError(
            f"{op}: q must be [T, Hi, {layout.dim // 2}] for keys of a multiple of 32 channels, "
            f"got {list(q.shape)} with keys of {layout.dim}"
        )
    shapes = (
        ("q_s", q_s, (*q.shape[:2], layout.dim // 32)),
        ("weights", weights, tuple(q.shape[:2])),
        ("seq", seq, tuple(q.shape[:1])),
        ("visible", visible, tuple(q.shape[:1])),
    )
    for name, x, shape in shapes:
        if tuple(x.shape) != shape:
            raise ValueError(f"{op}: {name} must be {list(shape)}, got {list(x.shape)}")
    if block_table.dim() != 2:
        raise ValueError(f"{op}: block_table must be [S, nblk], got {list(block_table.shape)}")
    if max_visible < 0:
        raise ValueError(f"{op}: max_visible must be >= 0, got {max_visible}")
    check_cache(op, cache, layout)


def _dequantize_queries(q: Tensor, q_s: Tensor) -> Tensor:
    return decode_e2m1(unpack_e2m1(q)) * decode_ue8m0(q_s).repeat_interleave(32, -1)


def _score(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """q fp32 [r, Hi, D], keys fp32 [n, D], weights fp32 [r, Hi] -> fp32 [r, n]."""
    products = (q.flatten(0, 1) @ keys.T).view(*q.shape[:2], len(keys))
    return (torch.relu(products) * weights[..., None]).sum(1)


def _runs(seq: list[int], most: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of at most `most` neighbouring rows of one sequence; padded rows left out."""
    start = 0
    for stop in range(1, len(seq) + 1):
        if stop == len(seq) or seq[stop] != seq[start] or stop - start == most:
            if seq[start] >= 0:
                yield start, stop
            start = stop


def _keys(ids: Tensor, row: Tensor, cache: Tensor, layout: KVLayout, page_size: int) -> Tensor:
    """fp32 keys of the row numbers `ids` of the sequence whose pages are `row`."""
    slots = row[ids // page_size].long() * page_size + ids % page_size
    return load_kv(cache, layout, slots).float()


def index_logits(
    q: Tensor,
    q_s: Tensor,
    weights: Tensor,
    cache: Tensor,
    layout: KVLayout,
    block_table: Tensor,
    seq: Tensor,
    visible: Tensor,
    max_visible: int,
) -> Tensor:
    """Scores of every visible key of a token's sequence.

    q            uint8 [T, Hi, Di/2], packed e2m1;  q_s uint8 [T, Hi, Di/32], ue8m0
    weights      fp32 [T, Hi], may be negative
    cache        uint8 [num_pages, page_bytes]: index keys in any `layout` of dimension Di
    block_table  int32 [S, nblk], pages of each sequence
    seq          int64 [T], row of block_table; -1 marks a padded row
    visible      int32 [T]: keys 0..visible-1 count; clamped to max_visible and to the keys that
                 a row of block_table has pages for. Keys at and beyond it are never read, nor
                 are their pages
    max_visible  columns of the output

    Returns: fp32 [T, max_visible]; L[t, j] = sum_h relu(q[t, h] . k[j]) * weights[t, h] for
    j < visible[t], -inf beyond.
    Raises: TypeError, ValueError for dtypes and shapes.
    Numerics: operands dequantized exactly, products summed in fp32, relu per head before the
    weighted sum over heads, fp32 to the end (the release rounds to bf16 at each step). e2m1 keys
    with a scale above 2^17 (code 144), which no normed key reaches, may score NaN in kernels, and
    a scale of 2^-127 may count as zero.
    Source: the release's indexer; per-sequence keys always (each source reads its own).
    """
    given = (q, q_s, weights, cache, layout, block_table, seq, visible, max_visible)
    check_index_logits("index_logits", *given)
    out = torch.full((len(q), max_visible), float("-inf"), device=q.device)
    queries = _dequantize_queries(q, q_s)
    capacity = block_table.shape[1] * layout.page_size
    visible, table = visible.clamp(0, min(max_visible, capacity)), block_table.long()
    columns = torch.arange(max_visible, device=q.device)
    for start, stop in _runs(seq.tolist(), ROWS_AT_ONCE):
        seen = visible[start:stop, None]
        most = int(seen.max())
        if most == 0:
            continue
        keys = _keys(columns[:most], table[seq[start]], cache, layout, layout.page_size)
        scores = _score(queries[start:stop], keys, weights[start:stop])
        out[start:stop, :most] = scores.masked_fill(columns[:most] >= seen, float("-inf"))
    return out


def check_index_logits_blocks(blocks: Tensor, rows: int, block_size: int) -> None:
    op = "index_logits_blocks"
    if blocks.dtype != torch.int32:
        raise TypeError(f"{op}: blocks must be int32, got {blocks.dtype}")
    if blocks.dim() != 2 or len(blocks) != rows:
        raise ValueError(f"{op}: blocks must be [{rows}, nb], got {list(blocks.shape)}")
    if block_size < 1:
        raise ValueError(f"{op}: block_size must be positive, got {block_size}")


def index_logits_blocks(
    q: Tensor,
    q_s: Tensor,
    weights: Tensor,
    cache: Tensor,
    layout: KVLayout,
    block_table: Tensor,
    seq: Tensor,
    blocks: Tensor,
    block_size: int,
    visible: Tensor,
) -> Tensor:
    """`index_logits` restricted to candidate blocks, in compact columns.

    blocks       int32 [T, nb]: block b covers keys b*block_size .. (b+1)*block_size - 1;
                 negative entries are fill
    visible      int32 [T], in keys of the sequence, as in `index_logits`
    The other arguments are those of `index_logits`.

    Returns: fp32 [T, nb*block_size]; column c scores key
    blocks[t, c // block_size]*block_size + c % block_size; -inf for fill and invisible keys,
    which are never read.
    Raises, Numerics: as `index_logits`.
    """
    check_index_logits(
        "index_logits_blocks", q, q_s, weights, cache, layout, block_table, seq, visible
    )
    check_index_logits_blocks(blocks, len(q), block_size)
    inside = torch.arange(block_size, device=q.device)
    keys = (blocks.long()[..., None] * block_size + inside).flatten(1)
    seen = visible.clamp(max=block_table.shape[1] * layout.page_size)
    valid = (blocks >= 0).repeat_interleave(block_size, 1) & (keys < seen[:, None])
    valid &= (seq >= 0)[:, None]
    out = torch.full(keys.shape, float("-inf"), device=q.device)
    if not out.numel():
        return out
    queries, ids = _dequantize_queries(q, q_s), torch.where(valid, keys, 0)
    pages = block_table.long()[seq.clamp(min=0)[:, None], ids // layout.page_size]
    slots = torch.where(valid, pages * layout.page_size + ids % layout.page_size, -1)
    for start in range(0, len(q), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        products = queries[rows] @ load_kv(cache, layout, slots[rows]).float().transpose(1, 2)
        scores = (torch.relu(products) * weights[rows, :, None]).sum(1)
        out[rows] = scores.masked_fill(~valid[rows], float("-inf"))
    return out
