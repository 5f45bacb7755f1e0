"""References of log-probabilities: of given tokens, of the most likely ones, tails, look-ups."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tinfer.compat.checks import require, require_dtype, require_shape
from tinfer.compat.masses import GREEDY_BELOW
from tinfer.compat.sampling import check_rows

MAX_TOP = 128


def _scaled(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """fp64 logits over temperature; a greedy row's temperature counts as 1."""
    x = logits.double()
    if temperature is None:
        return x
    t = torch.where(temperature < GREEDY_BELOW, 1.0, temperature).double()
    return x / t[:, None]


def _at(values: Tensor, tokens: Tensor) -> Tensor:
    """values[b, tokens[b]]; -inf where the token is outside the row."""
    inside = (tokens >= 0) & (tokens < values.shape[1])
    picked = values.gather(1, torch.where(inside, tokens, 0)[:, None])[:, 0]
    return torch.where(inside, picked, -math.inf)


def check_token_logprobs(
    logits: Tensor, tokens: Tensor, top_n: int, temperature: Tensor | None
) -> None:
    op = "token_logprobs"
    check_rows(op, logits, tokens=(tokens, torch.int64))
    if temperature is not None:
        check_rows(op, logits, temperature=(temperature, torch.float32))
    limit = min(MAX_TOP, logits.shape[1])
    require(0 <= top_n <= limit, op, "top_n", f"in [0, {limit}]", top_n)


def token_logprobs(
    logits: Tensor, tokens: Tensor, top_n: int, temperature: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of one given token per row and of the row's `top_n` most likely ones.

    logits       fp32 or bf16 [B, V]; finite or -inf
    tokens       int64 [B]; outside [0, V): log-probability -inf
    top_n        0..min(V, 128)
    temperature  fp32 [B] to divide the logits by first (below 1e-5: not divided), or None

    Returns: logprobs fp32 [B]; top_logprobs fp32 [B, top_n], descending, ties by ascending id;
    top_ids int64 [B, top_n]. A row whose logits are all -inf gives NaN, ids 0, 1, ...
    Raises: TypeError, ValueError for dtypes, shapes, top_n.
    Numerics: log_softmax in fp64, rounded once. The kernel works in fp32 and stays within 1e-5,
    relative above magnitude 1. Ids are exact.
    """
    check_token_logprobs(logits, tokens, top_n, temperature)
    scores = _scaled(logits, temperature).log_softmax(-1)
    own = _at(scores, tokens)
    own = torch.where(scores.isnan().all(-1), math.nan, own)
    ids = logits.float().sort(dim=-1, descending=True, stable=True)[1][:, :top_n]
    return own.float(), scores.gather(1, ids).float(), ids


def check_sum_smaller_probs(logits: Tensor, tokens: Tensor, temperature: Tensor | None) -> None:
    op = "sum_smaller_probs"
    check_rows(op, logits, tokens=(tokens, torch.int64))
    if temperature is not None:
        check_rows(op, logits, temperature=(temperature, torch.float32))


def sum_smaller_probs(logits: Tensor, tokens: Tensor, temperature: Tensor | None) -> Tensor:
    """The probability of drawing a token strictly less likely than the given one.

    logits       fp32 or bf16 [B, V]; finite or -inf, not all -inf
    tokens       int64 [B]; outside [0, V): nothing is smaller
    temperature  as for `token_logprobs`

    Returns: fp32 [B], the sum of softmax(logits) over logits below the token's; equal ones are
    not counted.
    Raises: TypeError, ValueError for dtypes, shapes.
    Numerics: fp64, rounded once; the kernel works in fp32 within 1e-5 relative to 1.
    """
    check_sum_smaller_probs(logits, tokens, temperature)
    own = _at(logits.float(), tokens)
    p = _scaled(logits, temperature).softmax(-1)
    return torch.where(logits.float() < own[:, None], p, 0.0).sum(-1).float()


def check_map_lookup(
    keys: Tensor, values: Tensor, queries: Tensor, by_key: bool, default: float
) -> None:
    op = "map_lookup"
    require_dtype(op, "keys", keys, torch.int32, torch.int64)
    require_dtype(op, "values", values, torch.float32)
    require_dtype(op, "queries", queries, torch.int64)
    require_shape(op, "keys", keys, ["R", "K"])
    require_shape(op, "values", values, keys.shape)
    require_shape(op, "queries", queries, [keys.shape[0], "M"])


def map_lookup(
    keys: Tensor, values: Tensor, queries: Tensor, by_key: bool, default: float
) -> Tensor:
    """Look values up in a small map per row.

    keys     int32 or int64 [R, K]; -1 is fill and never found; of equal keys the first counts
    values   fp32 [R, K]
    queries  int64 [R, M]; -1 is never found
    by_key   whether a query is a key, or a position 0..K-1
    default  for what is not found

    Returns: fp32 [R, M].
    Raises: TypeError, ValueError for dtypes, shapes.
    Numerics: exact.
    """
    check_map_lookup(keys, values, queries, by_key, default)
    if not keys.shape[1]:
        return torch.full(queries.shape, default, dtype=torch.float32, device=keys.device)
    if by_key:
        hit = (queries[:, :, None] == keys[:, None, :]) & (queries[:, :, None] >= 0)
        position, found = hit.int().argmax(-1), hit.any(-1)
    else:
        found = (queries >= 0) & (queries < keys.shape[1])
        position = torch.where(found, queries, 0)
    return torch.where(found, values.gather(1, position), default)
