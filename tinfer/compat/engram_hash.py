"""Engram's addresses: the n-gram look-back and the hash of it, as plain torch.

Source: the release's reference (engram.py); kernels R1 and R2 of the contracts.
"""

from __future__ import annotations

import torch
from torch import Tensor


# ---------------------------------------------------------------- look-back
def check_engram_lookback(
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    dead: Tensor | None,
    token_map: Tensor,
    pad_id: int,
    history: Tensor,
    order: int,
) -> None:
    """Raise where a call of `engram_lookback` is invalid."""
    op = "engram_lookback"
    for name, x, dtype in (
        ("ids", ids, torch.int64),
        ("positions", positions, torch.int64),
        ("slots", slots, torch.int64),
        ("dead", dead, torch.bool),
    ):
        if x is None:
            continue
        if x.shape != ids.shape or ids.dim() != 1:
            raise ValueError(f"{op}: {name} must be [T], got {tuple(x.shape)}")
        if x.dtype != dtype:
            raise TypeError(f"{op}: {name} must be {dtype}, got {x.dtype}")
    for name, x, rank in (("token_map", token_map, 1), ("history", history, 2)):
        if x.dim() != rank:
            raise ValueError(f"{op}: {name} must have rank {rank}, got {tuple(x.shape)}")
        if x.dtype != torch.int32:
            raise TypeError(f"{op}: {name} must be torch.int32, got {x.dtype}")
    if not 1 <= order <= history.shape[1] + 1:
        raise ValueError(f"{op}: order must be in 1..{history.shape[1] + 1}, got {order}")
    if pad_id < 0:
        raise ValueError(f"{op}: pad_id must be >= 0, got {pad_id}")


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
    """Compressed ids of every token and of the `order - 1` tokens before it.

    Args:
        ids: int64 `[T]` token ids. Rows of one sequence are adjacent, positions ascending by 1.
        positions: int64 `[T]` position of each token in its sequence.
        slots: int64 `[T]` row of `history` of each token's sequence; -1 marks a padded row.
        dead: bool `[T]`, True for tokens that take no part (image spans), or None for none.
        token_map: int32 `[V]` token id -> compressed id. An id outside `[0, V)` counts as dead.
        pad_id: compressed id that stands in for a blocked token.
        history: int32 `[S, R]` ring of compressed ids per sequence, -1 for dead tokens; position
            p lives at `p % R`. The last R tokens of the call are stored in place, after all
            look-backs have been read.
        order: number of columns of the result.

    Returns:
        int32 `[T, order]`; column j belongs to position p - j. A look-back before position 0 or
        onto a dead token is blocked, and so is every older one; blocked columns hold `pad_id`.
        Column 0 of a dead token is blocked too. Padded rows hold `pad_id`.

    The token before row t is row t - 1 if that row has the same slot and the position before,
    otherwise it is read from the history; so prefill, chunks cut anywhere, decode and
    verification of drafts are one rule. To roll back n tokens, R >= order - 1 + n is needed;
    nothing has to be restored, since the positions rolled back are written again before they
    are read.

    Raises:
        ValueError, TypeError: shapes or dtypes differ from the above, or order > R + 1.

    Numerics: integers, exact.
    Source: kernels R2; golden README traps 23.
    """
    check_engram_lookback(ids, positions, slots, dead, token_map, pad_id, history, order)
    known = (ids >= 0) & (ids < len(token_map))
    compressed = token_map[ids.clamp(0, len(token_map) - 1)]
    if dead is not None:
        known = known & ~dead
    compressed = torch.where(known, compressed, -1)
    real = slots >= 0
    rows, ring = torch.arange(len(ids), device=ids.device), history.shape[1]
    columns, in_batch, open_ = [], torch.ones_like(real), real
    for j in range(order):
        row = (rows - j).clamp(min=0)
        in_batch = in_batch & (rows >= j) & (slots[row] == slots)
        in_batch = in_batch & (positions[row] == positions - j)
        stored = history[slots.clamp(min=0), (positions - j).clamp(min=0) % ring]
        value = torch.where(in_batch, compressed[row], stored)
        open_ = open_ & (positions >= j) & (value >= 0)
        columns.append(torch.where(open_, value, pad_id))
    later = (rows + ring).clamp(max=max(len(ids) - 1, 0))
    last = (rows + ring >= len(ids)) | (slots[later] != slots)
    keep = real & last & (positions >= 0)
    history[slots[keep], positions[keep] % ring] = compressed[keep]
    return torch.stack(columns, dim=1).to(torch.int32)


# ---------------------------------------------------------------- hash
def check_ngram_hash(
    lookback: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor
) -> None:
    """Raise where a call of `ngram_hash` is invalid."""
    op = "ngram_hash"
    if lookback.dim() != 2 or lookback.shape[1] < 2:
        raise ValueError(f"{op}: lookback must be [T, n >= 2], got {tuple(lookback.shape)}")
    if lookback.dtype != torch.int32:
        raise TypeError(f"{op}: lookback must be torch.int32, got {lookback.dtype}")
    order = lookback.shape[1]
    if multipliers.dim() != 2 or multipliers.shape[1] != order:
        raise ValueError(f"{op}: multipliers must be [L, {order}], got {tuple(multipliers.shape)}")
    layers = multipliers.shape[0]
    if primes.dim() != 3 or primes.shape[:2] != (layers, order - 1):
        raise ValueError(
            f"{op}: primes must be [{layers}, {order - 1}, Hh], got {tuple(primes.shape)}"
        )
    columns = (order - 1) * primes.shape[2]
    if offsets.shape != (layers, columns):
        raise ValueError(f"{op}: offsets must be [{layers}, {columns}], got {tuple(offsets.shape)}")
    for name, x in (("multipliers", multipliers), ("primes", primes), ("offsets", offsets)):
        if x.dtype != torch.int64:
            raise TypeError(f"{op}: {name} must be torch.int64, got {x.dtype}")


def ngram_hash(lookback: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """Table rows of every token's n-grams, for all engram layers.

    Args:
        lookback: int32 `[T, n]` compressed ids, newest first (`engram_lookback`).
        multipliers: int64 `[L, n]`, positive and so small that `id * multiplier` fits int64.
        primes: int64 `[L, n-1, Hh]` modulus of each order (2-gram first) and head.
        offsets: int64 `[L, (n-1)*Hh]` first table row of each column.

    Returns:
        int64 `[L, T, (n-1)*Hh]`: column `(i-1)*Hh + head` is
        `(P_0 ^ ... ^ P_i) % primes[l, i-1, head] + offsets[l, column]`, `P_j = id_j * m[l, j]`.

    Raises:
        ValueError, TypeError: shapes or dtypes differ from the above.

    Numerics: int64, exact. Operands are never negative, so the kinds of modulo agree.
    Source: kernels R1; model.md section 4.
    """
    check_ngram_hash(lookback, multipliers, primes, offsets)
    product = lookback.long() * multipliers[:, None, :]
    rolling, columns = product[..., 0], []
    for i in range(1, lookback.shape[1]):
        rolling = rolling ^ product[..., i]
        columns.append(rolling[..., None] % primes[:, None, i - 1, :])
    return torch.cat(columns, dim=-1) + offsets[:, None, :]
