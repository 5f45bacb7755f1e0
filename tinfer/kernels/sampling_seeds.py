"""The earlier sampler's draw over sorted candidates: one program per row, all in registers.

Source: the references' contracts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.compat.masses import SAMPLE
from tinfer.compat.sampling_seeds import (
    MAX_WORDS,
    check_sample_seeds_compat,
    check_seeds_compat_draw,
)
from tinfer.kernels._call import MAX_PROGRAMS, contiguous_reason, device_reason
from tinfer.kernels._masses import (
    BAD_PARAMETER,
    GREEDY_BELOW,
    INFINITY,
    NO_TOKEN,
    NOT_FINITE,
    OK,
    divide,
    is_bad,
    min_p_threshold,
    reciprocal,
    slope_of,
    top_k_limit,
    top_p_threshold,
    weight_q31,
)

WORDS = tl.constexpr(MAX_WORDS)
PURPOSE = tl.constexpr(SAMPLE)


@triton.jit
def _pick(mass, seed, position):
    """Index of the drawn candidate from int64 masses, -1 where their sum is 0."""
    total = tl.sum(mass)
    divisor = tl.maximum(total, 1)
    bound = 4294967295 // divisor * divisor
    i = tl.arange(0, WORDS)
    low = (position + tl.zeros_like(i).to(tl.int64)).to(tl.uint32)
    high = ((position >> 32) + (i // 4).to(tl.int64)).to(tl.uint32)
    stream = tl.full([WORDS], PURPOSE, tl.uint32)
    x, y, z, w = tl.philox(seed, low, high, stream, tl.full([WORDS], 0, tl.uint32))
    place = i % 4
    word = tl.where(place == 0, x, tl.where(place == 1, y, tl.where(place == 2, z, w)))
    word = word.to(tl.int64) & 0xFFFFFFFF
    chosen = tl.min(tl.where(word < bound, i, WORDS - 1))
    rest = tl.sum(tl.where(i == chosen, word, 0)) % divisor
    index = tl.sum((tl.cumsum(mass) <= rest).to(tl.int32))
    return tl.where(total > 0, index, -1)


@triton.jit
def _seeds_compat_draw_kernel(
    masses,  # int64 [B, K]
    seeds,  # int64 [B]
    positions,  # int64 [B]
    out,  # int64 [B]
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mass = tl.load(masses + row * K + i, mask=i < K, other=0)
    index = _pick(mass, tl.load(seeds + row), tl.load(positions + row))
    # Beyond K the cumulative mass stays at the total, which exceeds every remainder.
    tl.store(out + row, index.to(tl.int64))


@triton.jit
def _sample_seeds_compat_kernel(
    values,  # fp32 [B, K]
    ids,  # int64 [B, K]
    temperature,  # fp32 [B]
    top_k,  # int32 [B]
    top_p,  # fp32 [B]
    min_p,  # fp32 [B]
    seeds,  # int64 [B]
    positions,  # int64 [B]
    tokens,  # int64 [B]
    statuses,  # int32 [B]
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    t, p, floor = tl.load(temperature + row), tl.load(top_p + row), tl.load(min_p + row)
    x = tl.load(values + row * K + i, mask=i < K, other=-INFINITY)
    top = tl.max(tl.where(x == x, x, INFINITY))
    status = tl.where(is_bad(t, p, floor), BAD_PARAMETER, OK)
    status = tl.where(top == -INFINITY, NO_TOKEN, status)
    status = tl.where(top == INFINITY, NOT_FINITE, status)
    rank = tl.full([], 0, tl.int32)
    if (status == OK) & (t >= GREEDY_BELOW):
        weight = weight_q31(x, top, slope_of(t))
        w = weight.to(tl.int64)
        before = tl.cumsum(w) - w
        keep = (i < top_k_limit(tl.load(top_k + row), K)) & (weight >= min_p_threshold(floor))
        keep = keep & (before <= top_p_threshold(tl.sum(w), p))
        weight = tl.where(keep, weight, 0)
        total = tl.sum(weight.to(tl.int64))
        mass = divide(weight, total, reciprocal(total)).to(tl.int64)
        rank = _pick(mass, tl.load(seeds + row), tl.load(positions + row))
    token = tl.load(ids + row * K + tl.maximum(rank, 0))
    tl.store(tokens + row, tl.where(status == OK, token, 0))
    tl.store(statuses + row, status)


def _warps(block: int) -> int:
    return max(min(block // 256, 8), 1)


def _supports(**tensors: Tensor) -> str | None:
    rows = next(iter(tensors.values())).shape[0]
    if rows > MAX_PROGRAMS:
        return f"more than {MAX_PROGRAMS} rows"
    return device_reason(**tensors) or contiguous_reason(**tensors)


def supports_seeds_compat_draw(masses: Tensor, seeds: Tensor, positions: Tensor) -> str | None:
    """At most 65535 rows; contiguous tensors on one device."""
    return _supports(masses=masses, seeds=seeds, positions=positions)


def seeds_compat_draw(masses: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    check_seeds_compat_draw(masses, seeds, positions)
    rows, width = masses.shape
    out = torch.empty(rows, dtype=torch.int64, device=masses.device)
    if rows:
        block = triton.next_power_of_2(width)
        _seeds_compat_draw_kernel[(rows,)](
            masses, seeds, positions, out, K=width, BLOCK=block, num_warps=_warps(block)
        )
    return out


def supports_sample_seeds_compat(
    values: Tensor,
    ids: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> str | None:
    """At most 65535 rows; contiguous tensors on one device."""
    return _supports(
        values=values,
        ids=ids,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
        positions=positions,
    )


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
    check_sample_seeds_compat(values, ids, temperature, top_k, top_p, min_p, seeds, positions)
    rows, width = values.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=values.device)
    statuses = torch.empty(rows, dtype=torch.int32, device=values.device)
    if rows:
        block = triton.next_power_of_2(width)
        _sample_seeds_compat_kernel[(rows,)](
            values, ids, temperature, top_k, top_p, min_p, seeds, positions, tokens, statuses,
            K=width, BLOCK=block, num_warps=_warps(block), enable_fp_fusion=False,
        )  # fmt: skip
    return tokens, statuses
