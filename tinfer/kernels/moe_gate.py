"""Expert choice: scores, biased top-k and normalized route weights of a row in one program.

A program is one warp, so that a row's maximum is one warp reduction. Biased scores become
integers that order like floats. A row is held in tiles of 128 (384 experts are not padded to
512), sorted against each other column by column; each of the k rounds takes the maximum of the
first tile and the lowest id that has it, and moves that column up. The weights' scores are
computed again from the chosen logits.

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
    """fp32 -> int32 in the same order, above _STRUCK; NaN counts as -inf."""
    bits = tl.maximum(x, float("-inf")).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


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
def _exchanged(keys, places, AT: tl.constexpr, TILES: tl.constexpr):
    """The tiles with AT and AT + 1 in descending order of keys, column by column; stable."""
    swap = keys[AT + 1] > keys[AT]
    keys_out, places_out = (), ()
    for c in tl.static_range(TILES):
        if c == AT or c == AT + 1:
            key = tl.where(swap, keys[2 * AT + 1 - c], keys[c])
            place = tl.where(swap, places[2 * AT + 1 - c], places[c])
        else:
            key, place = keys[c], places[c]
        keys_out = keys_out + (key,)  # noqa: RUF005
        places_out = places_out + (place,)  # noqa: RUF005
    return keys_out, places_out


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
    """int32 [BLOCK_T, BLOCK_K]: places of the K highest keys, equal ones by ascending place.

    The tiles are sorted against each other, so that the maximum is always in the first; the
    column it is taken from moves up.
    """
    places = ()
    for c in tl.static_range(TILES):
        place = tl.broadcast_to(c * BLOCK_E + lane, (BLOCK_T, BLOCK_E))
        places = places + (place,)  # noqa: RUF005
    for last in tl.static_range(1, TILES):
        for c in tl.static_range(TILES - last):
            keys, places = _exchanged(keys, places, c, TILES)
    ids = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    for i in tl.static_range(K):
        best = tl.max(keys[0], axis=1)[:, None]
        found = tl.where(keys[0] == best, places[0], TILES * BLOCK_E)
        chosen = tl.min(found, axis=1)[:, None]
        ids = tl.where(slot == i, chosen, ids)
        hit = places[0] == chosen
        keys_left, places_left = (), ()
        for c in tl.static_range(TILES):
            if c + 1 < TILES:
                key = tl.where(hit, keys[c + 1], keys[c])
                place = tl.where(hit, places[c + 1], places[c])
            else:
                key, place = tl.where(hit, _STRUCK, keys[c]), places[c]
            keys_left = keys_left + (key,)  # noqa: RUF005
            places_left = places_left + (place,)  # noqa: RUF005
        keys, places = keys_left, places_left
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
        BLOCK_E=_expert_tile(experts),
        BLOCK_K=triton.next_power_of_2(topk),
        num_warps=1,
    )
    return ids, weights


def _moe_gate_tiles(tokens: int) -> int:
    """Rows of one warp: more at a time only lengthen its chain of reductions."""
    return 1


def _expert_tile(experts: int) -> int:
    """At most 4 tiles, whose columns are sorted, and no wider than that takes: 3 of 128 for 384."""
    return triton.next_power_of_2(max(triton.cdiv(experts, 4), min(experts, 128)))
