"""References of the earlier sampler's draw: floor masses of sorted candidates, redraw on a bound.

It is kept for comparison with outputs of that sampler. Its result depends on whether the sum of
the masses reaches 2^31; `tinfer.compat.sampling.sample` has no such edge.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinfer.compat.checks import require, require_dtype, require_shape
from tinfer.compat.masses import (
    ONE,
    SAMPLE,
    Filters,
    kept,
    row_status,
    weights,
)
from tinfer.compat.philox import philox_block
from tinfer.compat.sampling import check_rows

MAX_CANDIDATES = 4096
MAX_WORDS = 64  # a word is taken with probability 1/2 at least


def check_seeds_compat_draw(masses: Tensor, seeds: Tensor, positions: Tensor) -> None:
    op = "seeds_compat_draw"
    require_dtype(op, "masses", masses, torch.int64)
    require_shape(op, "masses", masses, ["B", "K"])
    width = masses.shape[1]
    require(0 < width <= MAX_CANDIDATES, op, "masses", f"1 to {MAX_CANDIDATES} wide", width)
    for name, x in {"seeds": seeds, "positions": positions}.items():
        require_dtype(op, name, x, torch.int64)
        require_shape(op, name, x, masses.shape[:1])


def seeds_compat_draw(masses: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw a candidate from masses of any total, rejecting words from a bound on.

    masses     int64 [B, K], 1 <= K <= 4096, non-negative, each row's sum below 2^32
    seeds      int64 [B], the 64 bits of an unsigned seed
    positions  int64 [B]

    Returns: int64 [B], the first i with masses[0] + ... + masses[i] > word % total, where word
    is the first below floor((2^32 - 1) / total) * total of at most 64; -1 where the total is 0.
    Words come in order from the blocks with counter (position + (n << 32), 0), n = 0, 1, ...
    Raises: TypeError, ValueError for dtypes, shapes.
    Numerics: exact.
    """
    check_seeds_compat_draw(masses, seeds, positions)
    total = masses.sum(-1)
    divisor = total.clamp(min=1)
    bound = (2**32 - 1) // divisor * divisor
    redraw = torch.arange(MAX_WORDS // 4, device=masses.device) << 32
    zero = torch.full_like(seeds, SAMPLE)[:, None]
    words = philox_block(seeds[:, None], zero, positions[:, None] + redraw).flatten(1)
    fits = words < bound[:, None]
    last = torch.full_like(total, MAX_WORDS - 1)
    chosen = torch.where(fits.any(-1), fits.int().argmax(-1), last)
    word = words.gather(1, chosen[:, None])[:, 0] % divisor
    token = (masses.cumsum(-1) <= word[:, None]).sum(-1)
    return torch.where(total > 0, token, -1)


def check_sample_seeds_compat(
    values: Tensor,
    ids: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> None:
    op = "sample_seeds_compat"
    check_rows(
        op,
        values,
        temperature=(temperature, torch.float32),
        top_k=(top_k, torch.int32),
        top_p=(top_p, torch.float32),
        min_p=(min_p, torch.float32),
        seeds=(seeds, torch.int64),
        positions=(positions, torch.int64),
    )
    require_dtype(op, "values", values, torch.float32)
    require_dtype(op, "ids", ids, torch.int64)
    require_shape(op, "ids", ids, values.shape)
    width = values.shape[1]
    require(width <= MAX_CANDIDATES, op, "values", f"at most {MAX_CANDIDATES} wide", width)


def sample_seeds_compat(
    values: Tensor,
    ids: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row from sorted candidates as the earlier sampler did.

    values  fp32 [B, K], 1 <= K <= 4096: logits, descending, equal ones by ascending id; -inf fill
    ids     int64 [B, K]
    the rest as for `sample`; top-p takes its share of the candidates' weights, not the row's

    Returns: tokens int64 [B] (a greedy row: ids[b, 0]), status int32 [B] as `sample` gives; the
    token of a row with a status is 0.
    Raises: TypeError, ValueError for dtypes, shapes.
    Numerics: exact. Weights and cuts as in `sample`; masses are floor(w * 2^31 / W') without any
    remainder, drawn from in the candidates' order by `seeds_compat_draw`.
    """
    check_sample_seeds_compat(values, ids, temperature, top_k, top_p, min_p, seeds, positions)
    filters = Filters(temperature, top_k, top_p, min_p)
    status = row_status(values, filters)
    weight = weights(values, torch.where(filters.greedy, 1.0, temperature))
    weight = torch.where(kept(values, weight, filters), weight, 0)
    mass = weight * ONE // weight.sum(-1, keepdim=True).clamp(min=1)
    rank = torch.where(filters.greedy, 0, seeds_compat_draw(mass, seeds, positions))
    token = ids.gather(1, rank.clamp(min=0)[:, None])[:, 0]
    return torch.where(status == 0, token, 0), status
