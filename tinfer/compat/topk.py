"""References of the selections: top-k positions, candidate blocks, compact columns."""

from __future__ import annotations

import torch
from torch import Tensor


def _check_scores(op: str, scores: Tensor, lengths: Tensor, k: int) -> None:
    if scores.dtype != torch.float32:
        raise TypeError(f"{op}: scores must be float32, got {scores.dtype}")
    if lengths.dtype != torch.int32:
        raise TypeError(f"{op}: lengths must be int32, got {lengths.dtype}")
    if scores.dim() != 2:
        raise ValueError(f"{op}: scores must be [T, N], got {list(scores.shape)}")
    if lengths.shape != scores.shape[:1]:
        raise ValueError(f"{op}: lengths must be [{len(scores)}], got {list(lengths.shape)}")
    if k < 1:
        raise ValueError(f"{op}: k must be positive, got {k}")


def check_topk_indices(
    scores: Tensor, lengths: Tensor, k: int, offset: Tensor | None, out: Tensor | None
) -> None:
    op = "topk_indices"
    _check_scores(op, scores, lengths, k)
    if offset is not None and offset.dtype != torch.int32:
        raise TypeError(f"{op}: offset must be int32, got {offset.dtype}")
    if offset is not None and offset.shape != lengths.shape:
        raise ValueError(f"{op}: offset must be [{len(scores)}], got {list(offset.shape)}")
    if out is not None and out.dtype != torch.int32:
        raise TypeError(f"{op}: out must be int32, got {out.dtype}")
    if out is not None and tuple(out.shape) != (len(scores), k):
        raise ValueError(f"{op}: out must be [{len(scores)}, {k}], got {list(out.shape)}")


def _largest(scores: Tensor, lengths: Tensor, k: int) -> Tensor:
    """int64 [T, k] ascending indices of the k largest, -1 at the end."""
    tokens, n = scores.shape
    column = torch.arange(n, device=scores.device)
    valid = (column < lengths[:, None]) & ~scores.isnan()
    masked = scores.masked_fill(~valid, float("-inf"))
    by_score = masked.sort(dim=-1, descending=True, stable=True)[1]
    # Second key, more significant: a valid -inf comes before anything that is not valid.
    first = valid.gather(1, by_score).int().sort(dim=-1, descending=True, stable=True)[1]
    chosen = by_score.gather(1, first)[:, :k]
    chosen = torch.where(valid.gather(1, chosen), chosen, n).sort(dim=-1)[0]
    out = chosen.new_full((tokens, k), -1)
    out[:, : chosen.shape[1]] = torch.where(chosen < n, chosen, -1)
    return out


def topk_indices(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    offset: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The positions of the k largest scores among the first lengths[t] of each row.

    scores   fp32 [T, N]
    lengths  int32 [T], clamped to 0..N; what lies beyond is never looked at
    offset   int32 [T], added to every index but the fill; or None
    out      int32 [T, k] to write to, any strides; or None to allocate

    Returns: int32 [T, k], ascending, the fill -1 at the end when fewer than k are valid.
    Raises: TypeError, ValueError for dtypes, shapes, k < 1.
    Numerics: exact. NaN is never chosen; -inf is a value like any other; -0 equals 0; ties go to
    the lowest index, so a row's result does not depend on the other rows or on the split.
    Source: DeepSelect's contract, with a tie rule of its own.
    """
    check_topk_indices(scores, lengths, k, offset, out)
    chosen = _largest(scores, lengths, k)
    if offset is not None:
        chosen = torch.where(chosen >= 0, chosen + offset[:, None], -1)
    if out is None:
        return chosen.to(torch.int32)
    return out.copy_(chosen)


def check_candidate_blocks(scores: Tensor, lengths: Tensor, block_size: int, k: int) -> None:
    _check_scores("candidate_blocks", scores, lengths, k)
    if block_size < 1:
        raise ValueError(f"candidate_blocks: block_size must be positive, got {block_size}")


def candidate_blocks(scores: Tensor, lengths: Tensor, block_size: int, k: int) -> Tensor:
    """The k blocks of `block_size` positions that hold the best scores.

    scores   fp32 [T, N]
    lengths  int32 [T], clamped to 0..N: positions that count. The block of the newest one,
             (length - 1) // block_size, is always kept and counts towards k

    Returns: int32 [T, k] block ids, ascending, -1 at the end.
    Raises: TypeError, ValueError for dtypes and shapes.
    Numerics: exact. A block is worth its largest score below the length (NaN ignored, -inf if
    there is none); ties go to the lowest block.
    Source: the release's select_candidate_blocks.
    """
    check_candidate_blocks(scores, lengths, block_size, k)
    tokens, n = scores.shape
    lengths = lengths.clamp(0, n)
    valid = (torch.arange(n, device=scores.device) < lengths[:, None]) & ~scores.isnan()
    masked = scores.masked_fill(~valid, float("-inf"))
    masked = torch.nn.functional.pad(masked, (0, -n % block_size), value=float("-inf"))
    best = masked.view(tokens, masked.shape[1] // block_size, block_size).amax(-1)
    newest = (lengths.long() + block_size - 1) // block_size - 1  # -1 for an empty row
    out = torch.full((tokens, k), -1, dtype=torch.int64, device=scores.device)
    if k > 1 and n:
        out[:, : k - 1] = _largest(best, newest.clamp(min=0), k - 1)
    # The newest block has the highest id, so it follows the others.
    others = (out >= 0).sum(1, keepdim=True)
    return out.scatter(1, others, newest[:, None]).to(torch.int32)


def check_candidate_lengths(lengths: Tensor, block_size: int, k: int) -> None:
    op = "candidate_lengths"
    if lengths.dtype != torch.int32:
        raise TypeError(f"{op}: lengths must be int32, got {lengths.dtype}")
    if block_size < 1 or k < 1:
        raise ValueError(f"{op}: block_size and k must be positive, got {block_size}, {k}")


def candidate_lengths(lengths: Tensor, block_size: int, k: int) -> Tensor:
    """How many compact columns count after `candidate_blocks` with the same arguments.

    The newest block, perhaps partly visible, is the last one kept; all others are whole.

    lengths  int32 [T]
    Returns: int32 [T]; 0 for 0, else block_size*(kept - 1) + (length - 1) % block_size + 1 with
    kept = min(ceil(length / block_size), k).
    Raises: TypeError, ValueError.
    """
    check_candidate_lengths(lengths, block_size, k)
    kept = ((lengths + block_size - 1) // block_size).clamp(max=k)
    compact = block_size * (kept - 1) + (lengths - 1) % block_size + 1
    return torch.where(lengths > 0, compact, 0).to(torch.int32)


def check_restore_candidates(
    ids: Tensor, blocks: Tensor, block_size: int, out: Tensor | None
) -> None:
    op = "restore_candidates"
    for name, x in (("ids", ids), ("blocks", blocks), ("out", out)):
        if x is None:
            continue
        if x.dtype != torch.int32:
            raise TypeError(f"{op}: {name} must be int32, got {x.dtype}")
        if x.dim() != 2 or len(x) != len(ids):
            rows = "T" if x is ids else len(ids)
            raise ValueError(f"{op}: {name} must be [{rows}, n], got {list(x.shape)}")
    if out is not None and out.shape != ids.shape:
        raise ValueError(f"{op}: out must be {list(ids.shape)}, got {list(out.shape)}")
    if block_size < 1:
        raise ValueError(f"{op}: block_size must be positive, got {block_size}")


def restore_candidates(
    ids: Tensor, blocks: Tensor, block_size: int, out: Tensor | None = None
) -> Tensor:
    """Compact columns of `index_logits_blocks` -> positions of the sequence.

    ids     int32 [T, k]; anything outside 0..nb*block_size - 1 is fill
    blocks  int32 [T, nb]; a negative block makes its columns fill
    out     int32 [T, k], may be `ids` itself (in place), any strides; or None to allocate

    Returns: int32 [T, k]: blocks[t, id // block_size]*block_size + id % block_size, or -1.
    Ascending blocks keep ascending ids ascending.
    Raises: TypeError, ValueError for dtypes and shapes.
    """
    check_restore_candidates(ids, blocks, block_size, out)
    columns = blocks.shape[1] * block_size
    valid = (ids >= 0) & (ids < columns)
    at = torch.where(valid, ids, 0).long()
    if columns:
        block = blocks.gather(1, at // block_size)
        valid &= block >= 0
        restored = torch.where(valid, block * block_size + at % block_size, -1)
    else:
        restored = torch.full_like(ids, -1)
    return restored.to(torch.int32) if out is None else out.copy_(restored)
