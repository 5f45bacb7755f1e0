"""References of the sampler: one token per row, and the integer masses it draws from."""

from __future__ import annotations

import torch
from torch import Tensor

from tinfer.compat.checks import require, require_dtype, require_shape
from tinfer.compat.masses import (
    BAD_PARAMETER,
    OK,
    Filters,
    draw,
    first_word,
    masses,
    row_status,
)


def check_rows(op: str, logits: Tensor, **rows: tuple[Tensor, torch.dtype]) -> None:
    """`logits` fp32 or bf16 [B, V], and per-row tensors [B] of the given dtypes."""
    require_dtype(op, "logits", logits, torch.float32, torch.bfloat16)
    require_shape(op, "logits", logits, ["B", "V"])
    size = logits.shape[1]
    require(0 < size < 2**24, op, "logits", "of 1 to 2^24-1 columns", size)
    for name, (x, dtype) in rows.items():
        require_dtype(op, name, x, dtype)
        require_shape(op, name, x, logits.shape[:1])


def check_token_masses(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> None:
    check_rows(
        "token_masses",
        logits,
        temperature=(temperature, torch.float32),
        top_k=(top_k, torch.int32),
        top_p=(top_p, torch.float32),
        min_p=(min_p, torch.float32),
    )


def token_masses(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """The probabilities that `sample` draws from, as integers.

    Parameters as for `sample`.

    Returns: masses int64 [B, V] in id order, 0 where a cut drops the token, each row summing to
    exactly 2^31; status int32 [B] as for `sample`. A row with a status has all zeros.
    Raises: TypeError, ValueError for dtypes, shapes.
    Numerics: exact.
    """
    check_token_masses(logits, temperature, top_k, top_p, min_p)
    filters = Filters(temperature, top_k, top_p, min_p)
    status = row_status(logits, filters)
    return torch.where(status[:, None] == OK, masses(logits, filters), 0), status


def check_sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    purpose: int,
) -> None:
    check_rows(
        "sample",
        logits,
        temperature=(temperature, torch.float32),
        top_k=(top_k, torch.int32),
        top_p=(top_p, torch.float32),
        min_p=(min_p, torch.float32),
        seeds=(seeds, torch.int64),
        positions=(positions, torch.int64),
    )
    require(0 <= purpose < 2**31, "sample", "purpose", "in [0, 2^31)", purpose)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    purpose: int = 0,
    may_cut: bool = True,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    logits       fp32 or bf16 [B, V]
    temperature  fp32 [B]; below 1e-5: the lowest index among the maxima, whatever the cuts
    top_k        int32 [B]; at or below 0, or from V on: off
    top_p        fp32 [B]; from 1 on: off; 0 leaves one candidate
    min_p        fp32 [B]; 0: off; 1 and above leaves the candidates as likely as the first
    seeds        int64 [B], the 64 bits of an unsigned seed
    positions    int64 [B], absolute output position of the token to draw
    purpose      subsequence of the draw: 0 a token, 1 an acceptance test, 2 a draft
    may_cut      whether any row has top_k or top_p on; False saves launches, and a row that has
                 one on all the same gets status 3

    Returns: tokens int64 [B], status int32 [B]: 0, or what is wrong with this row alone
    (`tinfer.compat.masses.status_text`): 1 a NaN or +inf logit, 2 no logit above -inf, 3 a
    temperature, top_p or min_p that is NaN or negative, or an infinite temperature. The token of
    such a row is 0.
    Raises: TypeError, ValueError for dtypes, shapes.
    Numerics: exact, on every device and for every split of the work. With m the row's maximum
    and c = fl(fl(log2 e) / temperature): y = fl(fl(x - m) * c) and q = floor(y * 2^24); the
    weight w is floor(2^31 * 2^(q / 2^24)) by a degree-7 Horner scheme in Q32, 0 for y < -32.
    Candidates stand in the order (logit descending, id ascending), E is the sum of the weights
    before a candidate and W that of the row. Kept are positions below top_k, with
    E <= floor(W * floor(top_p * 2^24) / 2^24), and with w >= ceil(min_p * 2^31).
    A kept token's mass is floor(w * 2^31 / W'), W' the kept weights' sum; the first candidate
    also gets what the floors lost, so a row's masses sum to 2^31. The token is the lowest id
    whose inclusive cumulative mass over ascending ids exceeds word % 2^31, word being the first
    one after curand_init(seed, purpose, 4 * position).
    """
    check_sample(logits, temperature, top_k, top_p, min_p, seeds, positions, purpose)
    filters = Filters(temperature, top_k, top_p, min_p)
    status = row_status(logits, filters)
    if not may_cut:
        broken = filters.cuts(logits.shape[1]) & (status == OK)
        status = torch.where(broken, BAD_PARAMETER, status)
    token = draw(masses(logits, filters), first_word(seeds, positions, purpose))
    return torch.where(status == OK, token, 0), status
