"""References of what changes logits before sampling.

The order is penalties (additive ones, then repetition), grammar masks, bias, bans; temperature
and the cuts come after all of them, in `sample`. -inf stays -inf throughout.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tinfer.compat.checks import require, require_dtype, require_shape

IN_PROMPT = 1 << 30  # flag of a token count: the token occurs in the prompt


def _check_logits(op: str, logits: Tensor) -> None:
    require_dtype(op, "logits", logits, torch.float32, torch.bfloat16)
    require_shape(op, "logits", logits, ["R", "V"])


def _check_table(op: str, arg: str, x: Tensor, logits: Tensor, dtype: torch.dtype) -> None:
    require_dtype(op, arg, x, dtype)
    require_shape(op, arg, x, [logits.shape[0], "M"])


# ---------------------------------------------------------------- token counts
def check_count_tokens_(counts: Tensor, slots: Tensor, tokens: Tensor, in_prompt: bool) -> None:
    op = "count_tokens_"
    require_dtype(op, "counts", counts, torch.int32)
    require_shape(op, "counts", counts, ["S", "V"])
    for name, x in {"slots": slots, "tokens": tokens}.items():
        require_dtype(op, name, x, torch.int64)
        require_shape(op, name, x, [slots.numel()])


def count_tokens_(counts: Tensor, slots: Tensor, tokens: Tensor, in_prompt: bool) -> None:
    """Record tokens in the per-sequence counts that the penalties read.

    counts     int32 [S, V], changed in place: how often the sequence produced the token, plus
               2^30 if its prompt holds it
    slots      int64 [T], -1: the token is not recorded
    tokens     int64 [T]; outside [0, V): not recorded. A pair may occur any number of times
    in_prompt  the tokens are a prompt's (flag them) or produced ones (count them)

    Returns: None.
    Raises: TypeError, ValueError for dtypes, shapes.
    Numerics: exact.
    """
    check_count_tokens_(counts, slots, tokens, in_prompt)
    live = (slots >= 0) & (slots < counts.shape[0]) & (tokens >= 0) & (tokens < counts.shape[1])
    at = slots[live] * counts.shape[1] + tokens[live]
    flat = counts.view(-1)
    if in_prompt:
        flat[at] |= IN_PROMPT
    else:
        flat.index_add_(0, at, torch.ones_like(at, dtype=torch.int32))


def check_apply_penalties_(
    logits: Tensor,
    counts: Tensor,
    slots: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    pending: Tensor | None,
) -> None:
    op = "apply_penalties_"
    _check_logits(op, logits)
    require_dtype(op, "counts", counts, torch.int32)
    require_shape(op, "counts", counts, ["S", logits.shape[1]])
    require_dtype(op, "slots", slots, torch.int64)
    require_shape(op, "slots", slots, logits.shape[:1])
    rows = {"repetition": repetition, "frequency": frequency, "presence": presence}
    for name, x in rows.items():
        require_dtype(op, name, x, torch.float32)
        require_shape(op, name, x, logits.shape[:1])
    if pending is not None:
        _check_table(op, "pending", pending, logits, torch.int64)


def apply_penalties_(
    logits: Tensor,
    counts: Tensor,
    slots: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    pending: Tensor | None,
) -> None:
    """Frequency, presence and repetition penalties, in place.

    logits      fp32 or bf16 [R, V]
    counts      int32 [S, V], as `count_tokens_` writes them
    slots       int64 [R], the row's sequence; -1: the row is left alone
    repetition  fp32 [R], 1: off
    frequency   fp32 [R], 0: off
    presence    fp32 [R], 0: off
    pending     int64 [R, M] tokens to count as produced on top, -1: none (the draft tokens
                before a row that is verified), or None

    Returns: None. With n the produced count: x -= frequency * n; x -= presence where n > 0; then
    where the token occurs in prompt or output, x * repetition if x < 0, else x / repetition.
    Raises: TypeError, ValueError for dtypes, shapes.
    Numerics: fp32, every operation rounded, in this order; bf16 logits are rounded at the end.
    Exact.
    """
    check_apply_penalties_(logits, counts, slots, repetition, frequency, presence, pending)
    live = (slots >= 0) & (slots < counts.shape[0])
    entry = counts[torch.where(live, slots, 0)]
    produced = (entry & (IN_PROMPT - 1)).float()
    if pending is not None:
        inside = (pending >= 0) & (pending < logits.shape[1])
        at = torch.where(inside, pending, 0)
        produced = produced.scatter_add(1, at, inside.float())
    x = logits.float()
    x = x - frequency[:, None] * produced
    x = x - torch.where(produced > 0, presence[:, None], 0.0)
    seen = (produced > 0) | (entry >= IN_PROMPT)
    scaled = torch.where(x < 0, x * repetition[:, None], x / repetition[:, None])
    x = torch.where(seen, scaled, x)
    x = torch.where(logits == -math.inf, -math.inf, x)
    logits.copy_(torch.where(live[:, None], x, logits.float()))


# ---------------------------------------------------------------- bias and bans
def check_add_logit_bias_(logits: Tensor, ids: Tensor, bias: Tensor) -> None:
    op = "add_logit_bias_"
    _check_logits(op, logits)
    _check_table(op, "ids", ids, logits, torch.int64)
    require_dtype(op, "bias", bias, torch.float32)
    require_shape(op, "bias", bias, ids.shape)


def add_logit_bias_(logits: Tensor, ids: Tensor, bias: Tensor) -> None:
    """logits[r, ids[r, j]] += bias[r, j], in place.

    logits  fp32 or bf16 [R, V]; -inf stays -inf
    ids     int64 [R, M], unique in a row; outside [0, V) (say the fill -1): nothing
    bias    fp32 [R, M]; -inf bans the token

    Returns: None.
    Raises: TypeError, ValueError for dtypes, shapes.
    Numerics: fp32, rounded once more for bf16 logits. Exact.
    """
    check_add_logit_bias_(logits, ids, bias)
    row, column = ((ids >= 0) & (ids < logits.shape[1])).nonzero(as_tuple=True)
    token = ids[row, column]
    old = logits[row, token].float()
    new = torch.where(old == -math.inf, old, old + bias[row, column])
    logits[row, token] = new.to(logits.dtype)


def check_ban_tokens_(logits: Tensor, ids: Tensor, active: Tensor | None) -> None:
    op = "ban_tokens_"
    _check_logits(op, logits)
    _check_table(op, "ids", ids, logits, torch.int64)
    if active is not None:
        require_dtype(op, "active", active, torch.bool)
        require_shape(op, "active", active, logits.shape[:1])


def ban_tokens_(logits: Tensor, ids: Tensor, active: Tensor | None) -> None:
    """Set listed tokens to -inf, in place: bad words of one token, stop ids before min_tokens.

    logits  fp32 or bf16 [R, V]
    ids     int64 [R, M]; outside [0, V) (say the fill -1): nothing
    active  bool [R], rows to touch (say produced < min_tokens), or None for all

    Returns: None.
    Raises: TypeError, ValueError for dtypes, shapes.
    Numerics: exact.
    """
    check_ban_tokens_(logits, ids, active)
    hit = (ids >= 0) & (ids < logits.shape[1])
    if active is not None:
        hit &= active[:, None]
    row, column = hit.nonzero(as_tuple=True)
    logits[row, ids[row, column]] = -math.inf


def check_ban_sequences_(logits: Tensor, words: Tensor, history: Tensor) -> None:
    op = "ban_sequences_"
    _check_logits(op, logits)
    rows = logits.shape[0]
    require_dtype(op, "words", words, torch.int64)
    require_shape(op, "words", words, [rows, "W", "N"])
    require(words.shape[2] > 0, op, "words", "of length 1 at least", words.shape[2])
    require_dtype(op, "history", history, torch.int64)
    require_shape(op, "history", history, [rows, words.shape[2] - 1])


def ban_sequences_(logits: Tensor, words: Tensor, history: Tensor) -> None:
    """Ban the last token of every word whose earlier tokens have just been produced, in place.

    logits   fp32 or bf16 [R, V]
    words    int64 [R, W, N], aligned right: -1 before a shorter word, all -1 for no word
    history  int64 [R, N-1], the sequence's last tokens aligned right, -1 before its begin

    Returns: None.
    Raises: TypeError, ValueError for dtypes, shapes.
    Numerics: exact.
    """
    check_ban_sequences_(logits, words, history)
    prefix, last = words[:, :, :-1], words[:, :, -1]
    match = ((prefix < 0) | (prefix == history[:, None, :])).all(-1)
    ban_tokens_(logits, torch.where(match, last, -1), None)
