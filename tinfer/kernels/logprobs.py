"""Log-probabilities: one pass over slices of the rows, then one program per row.

A slice gives its maximum m, the sum of exp((x - m) / T) in fp32, the part of that sum below the
given token's logit if asked for, and its top-n as packed integers: the logit's ordered bits high,
the complement of the column low, so that one integer maximum finds the largest logit with the
lowest column. The second kernel merges the slices.

Source: the reference's contract; streaming log-sum-exp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.compat.logprobs import (
    check_map_lookup,
    check_sum_smaller_probs,
    check_token_logprobs,
)
from tinfer.kernels._call import MAX_PROGRAMS, device_reason, stride_reason
from tinfer.kernels._masses import GREEDY_BELOW, INFINITY, LOG2E
from tinfer.kernels._sample_slices import load_tile

LOWEST = tl.constexpr(-(2**63))


@triton.jit
def _pack(x, column):
    """int64 that orders like (logit, -column); both zeros alike."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)


@triton.jit
def _unpack(packed):
    """(logit, column) of a packed integer."""
    key = (packed >> 32).to(tl.int32)
    x = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return x, 0x7FFFFFFF - (packed & 0xFFFFFFFF)


@triton.jit
def _temperature(temperature, row, SCALED: tl.constexpr):
    t = tl.full([], 1.0, tl.float32)
    if SCALED:
        given = tl.load(temperature + row)
        t = tl.where(given < GREEDY_BELOW, 1.0, given)
    return t


@triton.jit
def _own_logit(source, token, V):
    """The token's logit, NaN where it is outside the row: nothing compares with it."""
    inside = (token >= 0) & (token < V)
    x = load_tile(source, tl.where(inside, token, 0), V)
    return tl.where(inside, x, float("nan"))


@triton.jit
def _logprob_slices_kernel(
    logits,  # fp32 | bf16 [B, V]
    tokens,  # int64 [B]
    temperature,  # fp32 [B]
    sums,  # fp32 [B, 3, SLICES]: maximum, sum, sum of the smaller ones
    tops,  # int64 [B, SLICES, TOP]
    stride,
    V,
    SCALED: tl.constexpr,
    SMALLER: tl.constexpr,
    TOP: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // SLICES).to(tl.int64)
    s = tl.program_id(0) % SLICES
    column = s * BLOCK + tl.arange(0, BLOCK)
    source = logits + row * stride
    x = load_tile(source, column, V)
    top = tl.max(x)
    slope = LOG2E / _temperature(temperature, row, SCALED)
    p = tl.where(top == -INFINITY, 0.0, tl.exp2((x - top) * slope))
    out = sums + row * 3 * SLICES + s
    tl.store(out, top)
    tl.store(out + SLICES, tl.sum(p))
    if SMALLER:
        own = _own_logit(source, tl.load(tokens + row), V)
        tl.store(out + 2 * SLICES, tl.sum(tl.where(x < own, p, 0.0)))
    if TOP > 0:
        packed = tl.where(column < V, _pack(x, column), LOWEST)
        for n in range(TOP):
            best = tl.max(packed)
            tl.store(tops + (row * SLICES + s) * TOP + n, best)
            packed = tl.where(packed == best, LOWEST, packed)


@triton.jit
def _merged(sums, row, slope, SLICES: tl.constexpr, PADDED: tl.constexpr):
    """(maximum, [PADDED] factors that bring the slices' sums to it)."""
    s = tl.arange(0, PADDED)
    tops = tl.load(sums + row * 3 * SLICES + s, mask=s < SLICES, other=-INFINITY)
    top = tl.max(tops)
    return top, tl.exp2((tops - top) * slope)


@triton.jit
def _token_logprobs_kernel(
    logits,  # fp32 | bf16 [B, V]
    tokens,  # int64 [B]
    temperature,  # fp32 [B]
    sums,  # fp32 [B, 3, SLICES]
    tops,  # int64 [B, SLICES, TOP]
    logprobs,  # fp32 [B]
    top_logprobs,  # fp32 [B, TOP]
    top_ids,  # int64 [B, TOP]
    stride,
    V,
    SCALED: tl.constexpr,
    TOP: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    MERGE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    t = _temperature(temperature, row, SCALED)
    top, factors = _merged(sums, row, LOG2E / t, SLICES, PADDED)
    s = tl.arange(0, PADDED)
    part = tl.load(sums + (row * 3 + 1) * SLICES + s, mask=s < SLICES, other=0.0)
    log_sum = tl.log(tl.sum(part * factors))
    own = _own_logit(logits + row * stride, tl.load(tokens + row), V)
    own = tl.where(own != own, -INFINITY, own)
    logprob = tl.div_rn(own - top, t) - log_sum
    tl.store(logprobs + row, tl.where(log_sum != log_sum, log_sum, logprob))
    if TOP > 0:
        i = tl.arange(0, MERGE)
        packed = tl.load(tops + row * SLICES * TOP + i, mask=i < SLICES * TOP, other=LOWEST)
        for n in range(TOP):
            best = tl.max(packed)
            x, column = _unpack(best)
            tl.store(top_logprobs + row * TOP + n, tl.div_rn(x - top, t) - log_sum)
            tl.store(top_ids + row * TOP + n, column)
            packed = tl.where(packed == best, LOWEST, packed)


@triton.jit
def _sum_smaller_kernel(
    temperature,  # fp32 [B]
    sums,  # fp32 [B, 3, SLICES]
    out,  # fp32 [B]
    SCALED: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slope = LOG2E / _temperature(temperature, row, SCALED)
    factors = _merged(sums, row, slope, SLICES, PADDED)[1]
    s = tl.arange(0, PADDED)
    part = tl.load(sums + (row * 3 + 1) * SLICES + s, mask=s < SLICES, other=0.0)
    smaller = tl.load(sums + (row * 3 + 2) * SLICES + s, mask=s < SLICES, other=0.0)
    tl.store(out + row, tl.sum(smaller * factors) / tl.sum(part * factors))


@triton.jit(do_not_specialize=["K", "M", "total", "default"])
def _map_lookup_kernel(
    keys,  # int32 | int64 [R, K]
    values,  # fp32 [R, K]
    queries,  # int64 [R, M]
    out,  # fp32 [R, M]
    K,
    M,
    total,
    default,
    BY_KEY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        row = (item // M).to(tl.int64)
        query = tl.load(queries + item)
        found = tl.full([BLOCK], 2**31 - 1, tl.int32)
        if BY_KEY:
            for start in range(0, K, BLOCK):
                at = start + tl.arange(0, BLOCK)
                key = tl.load(keys + row * K + at, mask=at < K, other=-1).to(tl.int64)
                found = tl.minimum(found, tl.where((key == query) & (query >= 0), at, found))
            position = tl.min(found)
        else:
            position = tl.where((query >= 0) & (query < K), query, K).to(tl.int32)
        hit = position < K
        value = tl.load(values + row * K + position, mask=hit, other=0.0)
        tl.store(out + item, tl.where(hit, value, default))


# ---------------------------------------------------------------- launchers
def _logprob_tiles(rows: int, columns: int) -> tuple[int, int]:
    """(columns of a slice, warps)."""
    block = min(4096 if rows > 8 else 2048, triton.next_power_of_2(columns))
    return block, max(block // 512, 1)


def _supports(logits: Tensor, **others: Tensor | None) -> str | None:
    if logits.shape[1] > 1 << 20:
        return "more than 2^20 columns"
    return device_reason(logits=logits, **others) or stride_reason(logits=logits, **others)


def _launch_slices(
    logits: Tensor, tokens: Tensor, temperature: Tensor | None, top_n: int, smaller: bool
) -> tuple[Tensor, Tensor, dict[str, int]]:
    rows, columns = logits.shape
    block, warps = _logprob_tiles(rows, columns)
    slices = triton.cdiv(columns, block)
    sums = torch.empty(rows, 3, slices, dtype=torch.float32, device=logits.device)
    tops = torch.empty(rows, slices, top_n, dtype=torch.int64, device=logits.device)
    per_launch = max(MAX_PROGRAMS // slices, 1)
    for start in range(0, rows, per_launch):
        part = slice(start, start + per_launch)
        _logprob_slices_kernel[(min(per_launch, rows - start) * slices,)](
            logits[part], tokens[part], None if temperature is None else temperature[part],
            sums[part], tops[part], logits.stride(0), columns, SCALED=temperature is not None,
            SMALLER=smaller, TOP=top_n, SLICES=slices, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return sums, tops, {"SLICES": slices, "PADDED": triton.next_power_of_2(slices)}


def supports_token_logprobs(
    logits: Tensor, tokens: Tensor, top_n: int, temperature: Tensor | None
) -> str | None:
    """Up to 2^20 columns, contiguous; tensors on one device; fewer than 2^16 rows."""
    if logits.shape[0] > MAX_PROGRAMS:
        return f"more than {MAX_PROGRAMS} rows"
    return _supports(logits, tokens=tokens, temperature=temperature)


def token_logprobs(
    logits: Tensor, tokens: Tensor, top_n: int, temperature: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    check_token_logprobs(logits, tokens, top_n, temperature)
    rows, columns = logits.shape
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    top_logprobs = torch.empty(rows, top_n, dtype=torch.float32, device=logits.device)
    top_ids = torch.empty(rows, top_n, dtype=torch.int64, device=logits.device)
    if rows:
        sums, tops, sizes = _launch_slices(logits, tokens, temperature, top_n, False)
        merge = triton.next_power_of_2(max(sizes["SLICES"] * top_n, 1))
        _token_logprobs_kernel[(rows,)](
            logits, tokens, temperature, sums, tops, logprobs, top_logprobs, top_ids,
            logits.stride(0), columns, SCALED=temperature is not None, TOP=top_n, **sizes,
            MERGE=merge, num_warps=max(min(merge // 256, 8), 1),
        )  # fmt: skip
    return logprobs, top_logprobs, top_ids


def supports_sum_smaller_probs(
    logits: Tensor, tokens: Tensor, temperature: Tensor | None
) -> str | None:
    """Up to 2^20 columns, contiguous; tensors on one device; fewer than 2^16 rows."""
    if logits.shape[0] > MAX_PROGRAMS:
        return f"more than {MAX_PROGRAMS} rows"
    return _supports(logits, tokens=tokens, temperature=temperature)


def sum_smaller_probs(logits: Tensor, tokens: Tensor, temperature: Tensor | None) -> Tensor:
    check_sum_smaller_probs(logits, tokens, temperature)
    out = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    if logits.shape[0]:
        sums, _, sizes = _launch_slices(logits, tokens, temperature, 0, True)
        _sum_smaller_kernel[(logits.shape[0],)](
            temperature, sums, out, SCALED=temperature is not None, **sizes, num_warps=1
        )
    return out


def supports_map_lookup(
    keys: Tensor, values: Tensor, queries: Tensor, by_key: bool, default: float
) -> str | None:
    """Contiguous tensors on one device."""
    tensors = {"keys": keys, "values": values, "queries": queries}
    for name, x in tensors.items():
        if not x.is_contiguous():
            return f"{name} is not contiguous"
    return device_reason(**tensors)


def map_lookup(
    keys: Tensor, values: Tensor, queries: Tensor, by_key: bool, default: float
) -> Tensor:
    check_map_lookup(keys, values, queries, by_key, default)
    out = torch.empty(queries.shape, dtype=torch.float32, device=keys.device)
    width, total = keys.shape[1], out.numel()
    if total:
        block = min(triton.next_power_of_2(max(width, 1)), 1024)
        _map_lookup_kernel[(min(total, MAX_PROGRAMS),)](
            keys, values, queries, out, width, queries.shape[1], total, float(default),
            BY_KEY=by_key, BLOCK=block, num_warps=max(block // 256, 1),
        )  # fmt: skip
    return out
