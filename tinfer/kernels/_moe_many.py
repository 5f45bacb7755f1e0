"""Expert products of many tokens an expert: warp-group tensor-core instructions.

As in `_moe_stream` a program takes one tile and some weight rows, and the weights are decoded
straight into the left operand's registers; but here the warps of a program own different rows and
share the activations, which pass through shared memory. A tile of at most N0 tokens uses one
product, a larger one two, of N1 and N2 columns, on the same decoded weights: a power of two alone
would waste a third of the work on experts just above it.

Activations lie in memory in the order in which a fragment wants K, block by block (`ORDER` of
`_gemm_tile`), so that tiles are plain copies.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._gemm_stream import SCALE_BACK
from tinfer.kernels._gemm_tile import decoded, weight_factor
from tinfer.kernels._jit import _dot, to_bf16
from tinfer.kernels._moe_stream import activate, cast_groups


# ---------------------------------------------------------------- the loop
@triton.jit
def _rows_of(REP: tl.constexpr, WARPS: tl.constexpr):
    """(row, t) of each n = ((rep * 2 + r) * WARPS + warp) * 32 + lane."""
    n = tl.arange(0, REP * 2 * WARPS * 32)
    rest = n // (32 * WARPS)
    row = rest // 2 * (16 * WARPS) + (n >> 5) % WARPS * 16 + rest % 2 * 8 + ((n >> 2) & 7)
    return row, n & 3


@triton.jit
def _weight_rows(
    words, factor, REP: tl.constexpr, WARPS: tl.constexpr, FMT: tl.constexpr, PACKED: tl.constexpr
):
    """uint32 [REP*2*WARPS*32, 4] -> bf16 [REP*WARPS*16, block], columns in a fragment's order."""
    v = decoded(words, factor[:, None], FMT, PACKED)
    if FMT == "e2m1":
        v = tl.reshape(v, (REP, 2, WARPS, 8, 4, 4, 2, 2, 2))  # rep r warp g t i j0 j1 h
        v = tl.permute(v, (0, 2, 1, 3, 5, 7, 6, 4, 8))
        v = tl.reshape(v, (REP * WARPS * 16, 128))
    else:
        v = tl.reshape(v, (REP, 2, WARPS, 8, 4, 4, 2, 2))  # rep r warp g t i j h
        v = tl.permute(v, (0, 2, 1, 3, 5, 6, 4, 7))
        v = tl.reshape(v, (REP * WARPS * 16, 64))
    return v


@triton.jit
def _tile_product(
    w,  # pointers to words [n, 4]
    s,  # pointers to ue8m0 codes [n]
    x,  # pointers to each token's first column [N1]
    x_live,
    x2,  # [N2], unused when N2 is 0
    x2_live,
    K,
    N1: tl.constexpr,
    N2: tl.constexpr,
    REP: tl.constexpr,
    WARPS: tl.constexpr,
    FMT: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """fp32 [REP*WARPS*16, N1] and, if N2, [.., N2]."""
    BLOCK: tl.constexpr = 128 if FMT == "e2m1" else 64
    RAW: tl.constexpr = 126 if FMT == "e2m1" else 120
    column = tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros((REP * WARPS * 16, N1), tl.float32)
    acc2 = tl.zeros((REP * WARPS * 16, N2 if N2 else 16), tl.float32)
    codes = tl.load(s)
    zero = tl.zeros(s.shape, tl.int32)
    for k in tl.range(0, K, BLOCK, num_stages=STAGES):
        words = tl.load(w, mask=(zero + k < K)[:, None], other=0)
        w += 16
        s += BLOCK // 32
        factor = weight_factor(codes, RAW)
        codes = tl.load(s, mask=zero + k + BLOCK < K, other=0)
        a = _weight_rows(words, factor, REP, WARPS, FMT, PACKED)
        b = tl.load(x[:, None] + (k + column), mask=x_live[:, None], other=0.0)
        acc = _dot(a, tl.trans(b), acc)
        if N2:
            b2 = tl.load(x2[:, None] + (k + column), mask=x2_live[:, None], other=0.0)
            acc2 = _dot(a, tl.trans(b2), acc2)
    return acc * SCALE_BACK, acc2 * SCALE_BACK


# ---------------------------------------------------------------- first product
@triton.jit
def _store_activated(
    total,  # fp32 [2*INNERS, N]: gate rows, then up rows
    h,  # this program's first column of h
    pos,  # first routed row
    rows,
    pos_to_token,
    pos_to_slot,
    weights,
    INNER,
    TOPK: tl.constexpr,
    LIMIT: tl.constexpr,
    FMT: tl.constexpr,
):
    INNERS: tl.constexpr = total.shape[0] // 2
    N: tl.constexpr = total.shape[1]
    at = tl.arange(0, N)
    token = tl.load(pos_to_token + pos + at, mask=at < rows, other=0)
    slot = tl.load(pos_to_slot + pos + at, mask=at < rows, other=0)
    weight = tl.load(weights + token * TOPK + slot, mask=at < rows, other=0.0)
    gate, up = tl.split(tl.permute(tl.reshape(total, (2, INNERS, N)), (1, 2, 0)))
    y = activate(gate, up, weight[None, :], LIMIT)
    y = cast_groups(tl.reshape(y, (INNERS // 32, 32, N)))
    if FMT == "e2m1":  # column t i h j -> i j t h
        T: tl.constexpr = INNERS // 32
        y = tl.permute(tl.reshape(y, (T, 4, 2, 4, N)), (4, 1, 3, 0, 2))
        y = tl.reshape(y, (N * 16, 2 * T))
        n = tl.arange(0, N * 16)
        to = h + (pos + n // 16).to(tl.int64) * INNER + n % 16 * 8
        tl.store(to[:, None] + tl.arange(0, 2 * T)[None, :], y, mask=(n // 16 < rows)[:, None])
    else:
        y = tl.permute(tl.reshape(y, (INNERS // 64, 4, 4, 2, 2, N)), (5, 0, 2, 4, 1, 3))
        y = tl.reshape(y, (N, INNERS))
        to = h + (pos + at).to(tl.int64)[:, None] * INNER + tl.arange(0, INNERS)[None, :]
        tl.store(to, y, mask=(at < rows)[:, None])


@triton.jit(do_not_specialize=["first", "count", "one"])
def _expert_up_many_kernel(
    x,  # bf16 [T, D], columns in ORDER
    w,  # uint8 [E, 2I, ..]
    w_s,
    tiles,  # int32 [tiles, 3]
    pos_to_token,
    pos_to_slot,
    weights,  # fp32 [T, TOPK]
    h,  # bf16 [P, I], columns in ORDER
    first,
    count,  # tiles
    D,
    INNER,
    w_stride,  # words of a row
    one,
    TOPK: tl.constexpr,
    LIMIT: tl.constexpr,
    FMT: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    WARPS: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    w_stride = tl.multiple_of(w_stride, 4)
    INNERS: tl.constexpr = WARPS * 16
    item = first + tl.program_id(0)
    blocks = INNER // INNERS
    tile, block = item // blocks, item % blocks  # an expert's rows together: tokens stay in L2
    expert = tl.load(tiles + tile * 3).to(tl.int64)
    if expert >= 0:
        pos, rows = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
        row, t = _rows_of(2, WARPS)
        row = block * INNERS + row % INNERS + row // INNERS * INNER
        words = w.to(tl.pointer_type(tl.uint32)) + expert * (2 * INNER) * w_stride
        words = words + (row * w_stride + t * 4)[:, None] + tl.arange(0, 4)[None, :]
        if FMT == "e2m1":
            codes = w_s + (expert * (2 * INNER) + row) * (D // 32) + t * one
            h += block * INNERS // 128 * 128 + block * INNERS % 128 // 32 * 2
        else:
            codes = w_s + (expert * (2 * INNER) + row) // 32 * (D // 32) + t * one // 2
            h += block * INNERS
        if rows <= N0:
            _up_tile(
                x, words, codes, h, pos, rows, pos_to_token, pos_to_slot, weights, D, INNER,
                TOPK, LIMIT, FMT, N0, 0, WARPS, PACKED, STAGES,
            )  # fmt: skip
        else:
            _up_tile(
                x, words, codes, h, pos, rows, pos_to_token, pos_to_slot, weights, D, INNER,
                TOPK, LIMIT, FMT, N1, N2, WARPS, PACKED, STAGES,
            )  # fmt: skip


@triton.jit
def _up_tile(
    x, words, codes, h, pos, rows, pos_to_token, pos_to_slot, weights, D, INNER,
    TOPK: tl.constexpr, LIMIT: tl.constexpr, FMT: tl.constexpr, N1: tl.constexpr,
    N2: tl.constexpr, WARPS: tl.constexpr, PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    at, at2 = tl.arange(0, N1), N1 + tl.arange(0, N2 if N2 else 16)
    token = tl.load(pos_to_token + pos + at, mask=at < rows, other=0).to(tl.int64)
    token2 = tl.load(pos_to_token + pos + at2, mask=at2 < rows, other=0).to(tl.int64)
    low, high = _tile_product(
        words, codes, x + token * D, at < rows, x + token2 * D, at2 < rows, D,
        N1, N2, 2, WARPS, FMT, PACKED, STAGES,
    )  # fmt: skip
    _store_activated(low, h, pos, rows, pos_to_token, pos_to_slot, weights, INNER, TOPK, LIMIT, FMT)
    if N2:
        _store_activated(
            high, h, pos + N1, rows - N1, pos_to_token, pos_to_slot, weights, INNER,
            TOPK, LIMIT, FMT,
        )  # fmt: skip


# ---------------------------------------------------------------- second product
@triton.jit
def _store_rows(total, y, pos, rows, d, D):
    N: tl.constexpr = total.shape[1]
    at = tl.arange(0, N)
    to = y + (pos + at).to(tl.int64)[:, None] * D + d[None, :]
    tl.store(to, to_bf16(tl.trans(total)), mask=(at < rows)[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["first", "count", "one"])
def _expert_down_many_kernel(
    h,  # bf16 [P, I], columns in ORDER
    w,  # uint8 [E, D, ..]
    w_s,
    tiles,  # int32 [tiles, 3]
    y,  # bf16 [P, D]
    first,
    count,
    D,
    INNER,
    w_stride,
    one,
    FMT: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    REP: tl.constexpr,
    WARPS: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    w_stride = tl.multiple_of(w_stride, 4)
    ROWS: tl.constexpr = REP * WARPS * 16
    item = first + tl.program_id(0)
    blocks = tl.cdiv(D, ROWS)
    tile, block = item // blocks, item % blocks
    expert = tl.load(tiles + tile * 3).to(tl.int64)
    if expert >= 0:
        pos, rows = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
        row, t = _rows_of(REP, WARPS)
        row = tl.minimum(block * ROWS + row, D - 1)
        words = w.to(tl.pointer_type(tl.uint32)) + expert * D * w_stride
        words = words + (row * w_stride + t * 4)[:, None] + tl.arange(0, 4)[None, :]
        if FMT == "e2m1":
            codes = w_s + (expert * D + row) * (INNER // 32) + t * one
        else:
            codes = w_s + (expert * D + row) // 32 * (INNER // 32) + t * one // 2
        d = block * ROWS + tl.arange(0, ROWS)
        if rows <= N0:
            _down_tile(
                h, words, codes, y, pos, rows, d, D, INNER, N0, 0, REP, WARPS, FMT, PACKED, STAGES
            )
        else:
            _down_tile(
                h, words, codes, y, pos, rows, d, D, INNER, N1, N2, REP, WARPS, FMT, PACKED, STAGES
            )


@triton.jit
def _down_tile(
    h, words, codes, y, pos, rows, d, D, INNER,
    N1: tl.constexpr, N2: tl.constexpr, REP: tl.constexpr, WARPS: tl.constexpr,
    FMT: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    at, at2 = tl.arange(0, N1), N1 + tl.arange(0, N2 if N2 else 16)
    low, high = _tile_product(
        words, codes, h + (pos + at).to(tl.int64) * INNER, at < rows,
        h + (pos + at2).to(tl.int64) * INNER, at2 < rows, INNER,
        N1, N2, REP, WARPS, FMT, PACKED, STAGES,
    )  # fmt: skip
    _store_rows(low, y, pos, rows, d, D)
    if N2:
        _store_rows(high, y, pos + N1, rows - N1, d, D)
