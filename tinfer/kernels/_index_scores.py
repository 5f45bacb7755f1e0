"""Device functions of the index logits: queries as an operand, pages, one tile of scores.

Used by `tinfer.kernels.indexer`, whose docstring gives the layouts and the tiling.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._index_keys import RESCALE, operand, unusable
from tinfer.kernels._jit import _dot, e2m1_decode, nibbles_unpack, to_bf16, ue8m0_decode
from tinfer.kernels._kv_rows import load_tile


@triton.jit
def query_operands(
    q_ptr, q_scale_ptr, weights_ptr, first, tokens,
    HEADS: tl.constexpr, HEADS_P: tl.constexpr, COLUMNS: tl.constexpr,
    DIM: tl.constexpr, DP: tl.constexpr, FAST: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """(bf16 [channels, COLUMNS], half the weights fp32 [COLUMNS]) of the tokens from `first` on."""
    column = tl.arange(0, COLUMNS)
    token, head = (first + column // HEADS_P).to(tl.int64), column % HEADS_P
    live = (token < tokens) & (head < HEADS)
    row = token * HEADS + head
    weight = tl.load(weights_ptr + row, mask=live, other=0.0)
    if FAST:
        at = q_ptr + row[:, None] * 16 + tl.arange(0, 16)[None, :]
        word = tl.load(at, mask=live[:, None], other=0).to(tl.uint32, bitcast=True)
        at = q_scale_ptr + row[:, None] * 4 + tl.arange(0, 4)[None, :]
        scale = tl.load(at, mask=live[:, None], other=0)
        weight = tl.where(unusable(scale), float("nan"), weight * RESCALE)
        queries = operand(word, scale, COLUMNS, PACKED)
    else:
        byte, group = tl.arange(0, DP // 2), tl.arange(0, DP // 32)
        at = q_ptr + row[:, None] * (DIM // 2) + byte[None, :]
        packed = tl.load(at, mask=live[:, None] & (byte < DIM // 2)[None, :], other=0)
        at = q_scale_ptr + row[:, None] * (DIM // 32) + group[None, :]
        scale = tl.load(at, mask=live[:, None] & (group < DIM // 32)[None, :], other=0)
        value = tl.reshape(e2m1_decode(nibbles_unpack(packed)), [COLUMNS, DP // 32, 32])
        value = tl.reshape(value * ue8m0_decode(scale)[:, :, None], [COLUMNS, DP])
        queries = to_bf16(value)
    return tl.trans(queries), 0.5 * weight  # 2 relu(x) = x + |x|


@triton.jit
def page_of(table_ptr, key, seen):
    """int64 pages of the `seen` keys, 0 elsewhere, from the block table as 16-bit halves.

    Triton's pipeliner gives a load that other loads depend on a stage of its own, which leaves
    the keys one buffer and no time to arrive. It does not pipeline loads below 32 bits.
    """
    low = tl.load(table_ptr + 2 * key, mask=seen, other=0).to(tl.uint16, bitcast=True)
    high = tl.load(table_ptr + 2 * key + 1, mask=seen, other=0)
    return (high.to(tl.int64) << 16) | low.to(tl.int64)


@triton.jit
def pages_of(table_ptr, first, bound, KEYS: tl.constexpr, PAGE: tl.constexpr):
    """int64 [KEYS]: pages of the keys from `first`, a multiple of KEYS, on; 0 from `bound` on."""
    lane = tl.arange(0, KEYS)
    if PAGE % KEYS == 0:
        page = tl.zeros([KEYS], tl.int64) + page_of(table_ptr, first // PAGE, first < bound)
    elif 2 * PAGE == KEYS:
        page0 = page_of(table_ptr, first // PAGE, first < bound)
        page1 = page_of(table_ptr, first // PAGE + 1, first + PAGE < bound)
        page = tl.where(lane < PAGE, page0, page1)
    else:
        page = page_of(table_ptr, (first + lane) // PAGE, first + lane < bound)
    return page


@triton.jit
def score_tile(
    cache_ptr, words_ptr, page_stride, page, key, seen, queries, weight,
    KEYS: tl.constexpr, TOKENS: tl.constexpr, HEADS_P: tl.constexpr,
    DIM: tl.constexpr, DP: tl.constexpr,
    VALUE: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, PAGE: tl.constexpr,
    DATA_STRIDE: tl.constexpr, SCALE_BASE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    FAST: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """fp32 [KEYS, TOKENS]: scores of the keys numbered `key`, in the pages int64 [KEYS]."""
    if FAST:
        base = page * page_stride
        at = cache_ptr + base + SCALE_BASE + key % PAGE * SCALE_STRIDE
        at = at[:, None] + tl.arange(0, 4)[None, :]
        scale = tl.load(at, mask=seen[:, None], other=0)
        at = words_ptr + base // 4 + key % PAGE * (DATA_STRIDE // 4)
        at = at[:, None] + tl.arange(0, 16)[None, :]
        word = tl.load(at, mask=seen[:, None], other=0).to(tl.uint32, bitcast=True)
        keys = operand(word, scale, KEYS, PACKED)
    else:
        slot = tl.where(seen, page * PAGE + key % PAGE, -1)
        keys = load_tile(
            slot, cache_ptr, page_stride, KEYS, DIM, DP,
            VALUE, GROUP, SCALE, PAGE, DATA_STRIDE, SCALE_BASE, SCALE_STRIDE,
        )  # fmt: skip
    acc = _dot(keys, queries, tl.zeros([KEYS, TOKENS * HEADS_P], tl.float32))
    weighted = tl.reshape((acc + tl.abs(acc)) * weight[None, :], [KEYS, TOKENS, HEADS_P])
    scores = tl.sum(weighted, axis=2)
    if FAST:
        scores = tl.where(unusable(scale)[:, None], float("nan"), scores)
    return scores
