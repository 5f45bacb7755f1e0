"""Expert choice: scores, biased top-k and normalized route weights of a row in one program.

A program is one warp, so that a row's maximum is one warp reduction. The k rounds each take the
maximum of the biased scores (as integers that order like floats, NaN below all numbers), the
lowest id that has it, and strike it out. A row is held in tiles of 128, so that 384 experts are
not padded to 512; the weights' scores are computed again from the chosen logits.

sqrt(softplus(x)) costs one exp2, one square root and no logarithm: with t = exp(-|x|/2), m = t*t
and R(m) = log1p(m)/m, a polynomial on [0, 1], it is sqrt(x + m*R) for x > 0 and t*sqrt(R) below,
which neither cancels nor underflows before t does.

Source: kernels E1 of the contracts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.compat.moe_gate import WEIGHT_EPS, check_moe_gate
from tinfer.kernels._call import MAX_PROGRAMS, contiguous_reason, device_reason, stride_reason

_LOG2E = tl.constexpr(1.4426950408889634)
_WEIGHT_EPS = tl.constexpr(WEIGHT_EPS)
_STRUCK = tl.constexpr(-(2**31))  # below every key
_SCORE_CODES = {"sqrtsoftplus": 0, "softmax": 1, "sigmoid": 2}
MAX_EXPERTS = 2048  # a row is one warp's registers


@triton.jit
def _sqrt_softplus(x):
    t = tl.exp2(tl.abs(x) * (-0.5 * _LOG2E))
    m = t * t
    # log1p(m)/m on [0, 1]: Chebyshev interpolation of degree 9, 9.2e-8 relative in fp32.
    r = m * -0.0031760570127516985 + 0.019542526453733444
    r = r * m - 0.056373611092567444
    r = r * m + 0.10543623566627502
    r = r * m - 0.1526966691017151
    r = r * m + 0.1966327428817749
    r = r * m - 0.24951615929603577
    r = r * m + 0.33329710364341736
    r = r * m - 0.49999892711639404
    r = r * m + 1.0
    positive = x > 0
    root = tl.sqrt(tl.where(positive, x + m * r, r))
    return tl.where(positive, root, t * root)


@triton.jit
def _score(x, top, total, SCORE: tl.constexpr):
    """fp32 logits -> scores; `top` and `total` are the row's softmax statistics."""
    if SCORE == 0:
        return _sqrt_softplus(x)
    if SCORE == 1:
        e = tl.exp2((x - top) * _LOG2E)
        return tl.div_rn(e, tl.broadcast_to(total, e.shape))
    return 1.0 / (1.0 + tl.exp2(x * -_LOG2E))


@triton.jit
def _ordered(x):
    """fp32 -> int32 in the same order; NaN comes below all numbers and above _STRUCK."""
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, _STRUCK + 1, key)


@triton.jit(do_not_specialize=["T"])
def _moe_gate_kernel(
    logits,  # fp32 [T, E]
    bias,  # fp32 [E]
    bias_vl,  # fp32 [E]
    image,  # uint8 [T]
    ids_out,  # int32 [T, K]
    weights_out,  # fp32 [T, K]
    T,
    stride,
    route_scale,
    E: tl.constexpr,
    K: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_IMAGE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    TILES: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    lane = tl.arange(0, BLOCK_E)[None, :]
    slot = tl.arange(0, BLOCK_K)[None, :]
    for block in range(tl.program_id(0), tl.cdiv(T, BLOCK_T), tl.num_programs(0)):
        row = block * BLOCK_T + tl.arange(0, BLOCK_T)
        live = (row < T)[:, None]
        base = logits + row.to(tl.int64)[:, None] * stride
        values = ()
        top = tl.full([BLOCK_T, 1], float("-inf"), tl.float32)
        for c in tl.static_range(TILES):
            mask = live & (c * BLOCK_E + lane < E)
            x = tl.load(base + c * BLOCK_E + lane, mask=mask, other=float("-inf"))
            values = values + (x,)  # noqa: RUF005  (triton reads no starred tuple)
            if SCORE == 1:
                top = tl.maximum(top, tl.max(x, axis=1)[:, None])
        total = tl.zeros([BLOCK_T, 1], tl.float32)
        if SCORE == 1:
            for c in tl.static_range(TILES):
                total += tl.sum(tl.exp2((values[c] - top) * _LOG2E), axis=1)[:, None]
        keys = ()
        for c in tl.static_range(TILES):
            expert = c * BLOCK_E + lane
            add = tl.load(bias + expert, mask=expert < E, other=0.0)
            if HAS_IMAGE:
                add_vl = tl.load(bias_vl + expert, mask=expert < E, other=0.0)
                is_image = tl.load(image + row, mask=row < T, other=0)[:, None] != 0
                add = tl.where(is_image, add_vl, add)
            key = _ordered(_score(values[c], top, total, SCORE) + add)
            keys = keys + (tl.where(expert < E, key, _STRUCK),)  # noqa: RUF005
        ids = _best_ids(keys, lane, slot, K, TILES, BLOCK_T, BLOCK_E, BLOCK_K)
        keep = live & (slot < K)
        chosen = tl.load(base + ids, mask=keep, other=0.0)
        weights = tl.where(keep, _score(chosen, top, total, SCORE), 0.0)
        if NORMALIZE:
            divisor = tl.sum(weights, axis=1)[:, None] + _WEIGHT_EPS
            weights = tl.div_rn(weights, tl.broadcast_to(divisor, weights.shape))
        at = row.to(tl.int64)[:, None] * K + slot
        tl.store(ids_out + at, ids, mask=keep)
        tl.store(weights_out + at, weights * route_scale, mask=keep)


@triton.jit
def _best_ids(
    keys,
    lane,
    slot,
    K: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """int32 [BLOCK_T, BLOCK_K]: places of the K highest keys, equal ones by ascending place."""
    ids = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    for i in tl.static_range(K):
        high = keys[0]
        for c in tl.static_range(1, TILES):
            high = tl.maximum(high, keys[c])
        best = tl.max(high, axis=1)[:, None]
        place = tl.where(keys[0] == best, lane, TILES * BLOCK_E)
        for c in tl.static_range(1, TILES):
            found = tl.where(keys[c] == best, c * BLOCK_E + lane, TILES * BLOCK_E)
            place = tl.minimum(place, found)
        chosen = tl.min(place, axis=1)[:, None]
        ids = tl.where(slot == i, chosen, ids)
        left = ()
        for c in tl.static_range(TILES):
            key = tl.where(c * BLOCK_E + lane == chosen, _STRUCK, keys[c])
            left = left + (key,)  # noqa: RUF005
        keys = left
    return ids


def supports_moe_gate(
    logits: Tensor,
    bias: Tensor,
    bias_vl: Tensor | None,
    image: Tensor | None,
    topk: int,
    route_scale: float,
    score_func: str,
    normalize: bool,
) -> str | None:
    """Up to 2048 experts and 32 choices; rows of logits may be strided."""
    if logits.shape[-1] > MAX_EXPERTS:
        return f"{logits.shape[-1]} experts do not fit one warp"
    if topk > 32:
        return f"topk is {topk}, the rounds are unrolled up to 32"
    return (
        device_reason(logits=logits, bias=bias, bias_vl=bias_vl, image=image)
        or stride_reason(logits=logits)
        or contiguous_reason(bias=bias, bias_vl=bias_vl, image=image)
    )


def moe_gate(
    logits: Tensor,
    bias: Tensor,
    bias_vl: Tensor | None,
    image: Tensor | None,
    topk: int,
    route_scale: float,
    score_func: str,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    check_moe_gate(logits, bias, bias_vl, image, topk, route_scale, score_func, normalize)
    tokens, experts = logits.shape
    ids = torch.empty(tokens, topk, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, topk, dtype=torch.float32, device=logits.device)
    if not tokens:
        return ids, weights
    block = _moe_gate_tiles(tokens)
    _moe_gate_kernel[(min(triton.cdiv(tokens, block), MAX_PROGRAMS),)](
        logits,
        bias,
        bias if bias_vl is None else bias_vl,
        bias if image is None else image.view(torch.uint8),
        ids,
        weights,
        tokens,
        logits.stride(0),
        route_scale,
        E=experts,
        K=topk,
        SCORE=_SCORE_CODES[score_func],
        NORMALIZE=normalize and topk > 1,
        HAS_IMAGE=image is not None,
        BLOCK_T=block,
        BLOCK_E=min(triton.next_power_of_2(experts), 128),
        BLOCK_K=triton.next_power_of_2(topk),
        num_warps=1,
    )
    return ids, weights


def _moe_gate_tiles(tokens: int) -> int:
    """Rows of one warp: 4096 rows of 384 on an H200 9.1 us, two rows 9.6, four 10.5 (graph)."""
    return 1
