"""References of speculative verification: acceptance by equality and by exact rejection."""

from __future__ import annotations

import torch
from torch import Tensor

from tinfer.compat.checks import require_dtype, require_shape
from tinfer.compat.masses import (
    ACCEPT,
    OK,
    ONE,
    SAMPLE,
    Filters,
    draw,
    first_word,
    normalize,
)
from tinfer.compat.sampling import check_rows, token_masses


# ---------------------------------------------------------------- by equality
def _owner(cu_rows: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(request of every row, whether it has one), over ascending row bounds."""
    row = torch.arange(rows, device=cu_rows.device)
    owner = torch.searchsorted(cu_rows[1:].long().contiguous(), row, right=True)
    last = max(cu_rows.shape[0] - 2, 0)
    return owner.clamp(max=last), owner <= cu_rows.shape[0] - 2


def _leading(good: Tensor, cu_rows: Tensor) -> tuple[Tensor, Tensor]:
    """(how many leading drafts of every request are good, which rows those are).

    The last row of a request has no draft.
    """
    requests = cu_rows.shape[0] - 1
    count = torch.zeros(requests, dtype=torch.int32, device=cu_rows.device)
    if not len(good) or not requests:
        return count, torch.zeros_like(good)
    start, end = cu_rows[:-1].long(), cu_rows[1:].long()
    row = torch.arange(len(good), device=cu_rows.device)
    owner, owned = _owner(cu_rows, len(good))
    drafted = owned & (row >= start[owner]) & (row < end[owner] - 1)
    failed = (drafted & ~good).long()
    before = failed.cumsum(0) - failed  # of all requests; differences count within one
    so_far = failed + before - before[start[owner].clamp(max=len(good) - 1)]
    leading = drafted & (so_far == 0)
    return count.index_add_(0, owner, leading.int()), leading


def _stops(cu_rows: Tensor, accept_len: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(whether a request has rows, the row after its accepted ones)."""
    at = (cu_rows[:-1].long() + accept_len).clamp(max=max(rows - 1, 0))
    return cu_rows[1:] > cu_rows[:-1], at


def check_get_accept_result(
    target_tokens: Tensor,
    draft_tokens: Tensor,
    cu_rows: Tensor,
    golden_tokens: Tensor | None,
    golden_mask: Tensor | None,
) -> None:
    op = "get_accept_result"
    require_dtype(op, "target_tokens", target_tokens, torch.int64)
    require_shape(op, "target_tokens", target_tokens, ["R"])
    require_dtype(op, "draft_tokens", draft_tokens, torch.int64)
    require_shape(op, "draft_tokens", draft_tokens, target_tokens.shape)
    require_dtype(op, "cu_rows", cu_rows, torch.int32)
    require_shape(op, "cu_rows", cu_rows, ["B+1"])
    if (golden_tokens is None) != (golden_mask is None):
        raise ValueError(f"{op}: golden_tokens and golden_mask must be given together, got one")
    if golden_tokens is not None and golden_mask is not None:
        require_dtype(op, "golden_tokens", golden_tokens, torch.int64)
        require_shape(op, "golden_tokens", golden_tokens, target_tokens.shape)
        require_dtype(op, "golden_mask", golden_mask, torch.bool)
        require_shape(op, "golden_mask", golden_mask, [cu_rows.shape[0] - 1])


def get_accept_result(
    target_tokens: Tensor,
    draft_tokens: Tensor,
    cu_rows: Tensor,
    golden_tokens: Tensor | None,
    golden_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept drafts as long as they equal what the target chose.

    target_tokens  int64 [R], the target's choice after every row (sampled or argmax)
    draft_tokens   int64 [R], the token that the draft proposes after every row; the last row of
                   a request has none and its entry is not read
    cu_rows        int32 [B+1] ascending: request b owns rows cu_rows[b] .. cu_rows[b+1]-1
    golden_tokens  int64 [R] that replace target_tokens for the requests in
    golden_mask    bool [B], or both None

    Returns: accept_len int32 [B], how many leading drafts equal the target; accepted bool [R];
    next_token int64 [B], the target's choice after the last accepted draft. A request without
    rows (padding) gives 0 and -1.
    Raises: TypeError, ValueError for dtypes, shapes, one golden argument without the other.
    Numerics: exact.
    """
    check_get_accept_result(target_tokens, draft_tokens, cu_rows, golden_tokens, golden_mask)
    truth = target_tokens
    if golden_tokens is not None and golden_mask is not None:
        owner, _ = _owner(cu_rows, len(target_tokens))
        truth = torch.where(golden_mask[owner], golden_tokens, target_tokens)
    accept_len, accepted = _leading(truth == draft_tokens, cu_rows)
    has_rows, at = _stops(cu_rows, accept_len, len(truth))
    following = torch.full_like(at, -1)
    if len(truth):
        following = torch.where(has_rows, truth[at], -1)
    return accept_len, accepted, following


# ---------------------------------------------------------------- by rejection
def check_verify_drafts(
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
) -> None:
    op = "verify_drafts"
    check_rows(
        op,
        logits,
        draft_tokens=(draft_tokens, torch.int64),
        temperature=(temperature, torch.float32),
        top_k=(top_k, torch.int32),
        top_p=(top_p, torch.float32),
        min_p=(min_p, torch.float32),
        seeds=(seeds, torch.int64),
        positions=(positions, torch.int64),
    )
    if draft_logits is not None:
        require_dtype(op, "draft_logits", draft_logits, torch.float32, torch.bfloat16)
        require_shape(op, "draft_logits", draft_logits, logits.shape)
    require_dtype(op, "cu_rows", cu_rows, torch.int32)
    require_shape(op, "cu_rows", cu_rows, ["B+1"])


def _draft_masses(
    draft_logits: Tensor | None, draft_tokens: Tensor, target: Tensor, filters: Filters
) -> Tensor:
    """int64 [R, V]: the draft's masses, 0 in rows that the draft could not have drawn from."""
    if draft_logits is not None:
        f = filters
        return token_masses(draft_logits, f.temperature, f.top_k, f.top_p, f.min_p)[0]
    columns = torch.arange(target.shape[1], device=target.device)
    return torch.where(columns == draft_tokens[:, None], ONE, 0)


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
    """Accept or reject drafts so that the output is distributed as the target, exactly.

    logits        fp32 or bf16 [R, V], the target's at every row
    draft_logits  fp32 or bf16 [R, V], what each row's draft was drawn from (by `sample` with the
                  row's parameters and purpose 2), or None where drafts are the draft's argmax
    draft_tokens  int64 [R], the token proposed after every row; the last row of a request has
                  none and its entry is not read. Outside [0, V): rejected
    cu_rows       int32 [B+1] ascending: request b owns rows cu_rows[b] .. cu_rows[b+1]-1
    temperature, top_k, top_p, min_p, seeds, positions
                  as for `sample`, [R]; positions are those of the token after each row

    Returns: accept_len int32 [B]; next_token int64 [B], drawn after the last accepted draft:
    from the residual max(P - Q, 0) where a draft was rejected, from P after the last row;
    status int32 [B], as `sample` gives for the row where the request stopped (then next_token is
    0). A request without rows (padding) gives 0, -1 and 0.
    Raises: TypeError, ValueError for dtypes, shapes.
    Numerics: exact. P and Q are the masses of `token_masses` for target and draft (Q is 2^31 at
    the draft where draft_logits is None, 0 in a row whose draft logits have a status). Draft x is
    accepted if Q[x] > 0 and (word >> 1) * Q[x] < P[x] << 31, with the first word of
    curand_init(seed, 1, 4 * position). The residual is normalized to 2^31 in the same way, what
    the floors lose going to its lowest index among the largest, and drawn from with the word of
    purpose 0, which `sample` would use at that position.
    """
    args = (temperature, top_k, top_p, min_p, seeds, positions)
    check_verify_drafts(logits, draft_logits, draft_tokens, cu_rows, *args)
    target, status = token_masses(logits, temperature, top_k, top_p, min_p)
    filters = Filters(temperature, top_k, top_p, min_p)
    draft = _draft_masses(draft_logits, draft_tokens, target, filters)
    inside = (draft_tokens >= 0) & (draft_tokens < logits.shape[1])
    at = torch.where(inside, draft_tokens, 0)[:, None]
    p, q = target.gather(1, at)[:, 0], draft.gather(1, at)[:, 0]
    word = first_word(seeds, positions, ACCEPT) >> 1
    accepted = inside & (status == OK) & (q > 0) & (word * q < p << 31)

    accept_len, _ = _leading(accepted, cu_rows)
    has_rows, at_row = _stops(cu_rows, accept_len, len(logits))
    if not len(logits):
        return accept_len, torch.full_like(at_row, -1), torch.zeros_like(accept_len)
    last = at_row == cu_rows[1:] - 1
    left = target[at_row] - torch.where(last[:, None], 0, draft[at_row])
    mass = normalize(left.clamp(min=0))
    token = draw(mass, first_word(seeds[at_row], positions[at_row], SAMPLE))
    token = torch.where(status[at_row] == OK, token, 0)
    row_status = torch.where(has_rows, status[at_row], OK).int()
    return accept_len, torch.where(has_rows, token, -1), row_status
