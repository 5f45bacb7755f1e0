"""Expert products of few tokens an expert: every needed weight byte is read once.

A program takes one tile (the tokens of one expert, at most TOKENS) and some weight rows; the
weights go straight into tensor-core fragments (`_gemm_stream`). The first product computes rows
of W1 and the same rows of W3 together, so that the program finishes SwiGLU, the routing weight
and the fp8 cast of whole groups of 32. What it stores is the cast value, exact in bf16, with the
columns of each eight in the order 0 4 1 5 2 6 3 7 when the weights are fp4 (see `_gemm_tile`).

A tile is (expert, first routed row, number of rows); expert -1 marks the unused end of the list.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._gemm_stream import streamed
from tinfer.kernels._gemm_tile import lane_index, token_index
from tinfer.kernels._jit import (
    absmax,
    e4m3_round,
    round_bf16,
    to_bf16,
    ue8m0_decode,
    ue8m0_encode,
    ue8m0_reciprocal,
)

AMAX_FLOOR = tl.constexpr(1e-4)
INVERSE_MAX = tl.constexpr(1.0 / 448.0)
LOG2_E = tl.constexpr(1.4426950408889634)


# ---------------------------------------------------------------- epilogue of the first product
@triton.jit
def gated(gate, up, weight, LIMIT: tl.constexpr):
    """Clamped silu(gate) * up * weight, in fp32."""
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)  # comparisons let NaN pass
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return gate / (1.0 + tl.exp2(-gate * LOG2_E)) * up * weight


@triton.jit
def activate(gate, up, weight, LIMIT: tl.constexpr):
    """fp32 gate and up -> silu(gate) * up * weight, rounded to bf16, in fp32."""
    return round_bf16(gated(round_bf16(gate), round_bf16(up), weight, LIMIT))


@triton.jit
def cast_groups(y, NATIVE: tl.constexpr = False):
    """fp32 [G, 32, N] -> the fp8 cast of each 32 (axis 1), decoded again; exact in bf16.

    Not NATIVE in the products' epilogues: Triton 3.6 mistreats the bytes of its conversion there.
    """
    amax = tl.maximum(absmax(y, 1), AMAX_FLOOR, propagate_nan=tl.PropagateNan.ALL)
    code = ue8m0_encode(amax * INVERSE_MAX)[:, None, :]
    return to_bf16(e4m3_round(y * ue8m0_reciprocal(code), NATIVE) * ue8m0_decode(code))


@triton.jit
def eights_first(v, ROWS: tl.constexpr, N: tl.constexpr, FMT: tl.constexpr):
    """[ROWS, N] -> [N, ROWS], columns of each eight reordered where fp4 weights want it."""
    if FMT == "e2m1":
        v = tl.permute(tl.reshape(v, (ROWS // 8, 2, 4, N)), (3, 0, 2, 1))
        v = tl.reshape(v, (N, ROWS))
    else:
        v = tl.trans(v)
    return v


# ---------------------------------------------------------------- first product
@triton.jit(do_not_specialize=["first", "count", "one"])
def _expert_up_kernel(
    x,  # bf16 [T, D], columns in the order of FMT
    w,  # uint8 [E, 2I, ..]: rows of W1, then rows of W3
    w_s,  # uint8 [E, 2I, D/32] for "e2m1", [E, 2I/32, D/32] for "e4m3"
    tiles,  # int32 [tiles, 3]
    pos_to_token,  # int32 [P]
    pos_to_slot,  # int32 [P]
    weights,  # fp32 [T, TOPK]
    h,  # bf16 [P, I], columns in the order of FMT
    first,  # this launch's first of tiles * INNER / 32 items
    count,  # tiles
    D,
    INNER,
    w_stride,  # words of a row
    one,
    TOPK: tl.constexpr,
    LIMIT: tl.constexpr,
    FMT: tl.constexpr,
    TOKENS: tl.constexpr,
    W: tl.constexpr,
    EVEN: tl.constexpr,
    KWIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    w_stride = tl.multiple_of(w_stride, 4)
    item = first + tl.program_id(0)
    tile, block = item % count, item // count
    expert = tl.load(tiles + tile * 3).to(tl.int64)
    if expert >= 0:
        start, rows = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
        n, warp, t = lane_index(64, W)
        row = block * 32 + n % 32 + n // 32 * INNER
        token, t_warp, t_t, part = token_index(TOKENS, W, 4 if FMT == "e2m1" else 2)
        x_live = token < rows
        source = tl.load(pos_to_token + start + token, mask=x_live, other=0)
        total = _expert_rows(
            x.to(tl.pointer_type(tl.uint32)) + source.to(tl.int64) * (D // 2),
            x_live,
            t_warp,
            t_t,
            part,
            w.to(tl.pointer_type(tl.uint32)) + expert * (2 * INNER) * w_stride,
            w_s,
            expert,
            2 * INNER,
            row,
            warp,
            t,
            D,
            w_stride,
            one,
            FMT,
            64,
            TOKENS,
            W,
            EVEN,
            KWIDTH,
            PACKED,
            STAGES,
        )
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, 32, TOKENS)), (1, 2, 0)))
        pos = start + tl.arange(0, TOKENS)
        mine = tl.arange(0, TOKENS) < rows
        token_of = tl.load(pos_to_token + pos, mask=mine, other=0)
        slot = tl.load(pos_to_slot + pos, mask=mine, other=0)
        weight = tl.load(weights + token_of * TOPK + slot, mask=mine, other=0.0)
        y = activate(gate, up, weight[None, :], LIMIT)
        y = tl.reshape(cast_groups(y[None, :, :]), (32, TOKENS))
        y = eights_first(y, 32, TOKENS, FMT)
        at = pos.to(tl.int64)[:, None] * INNER + block * 32 + tl.arange(0, 32)[None, :]
        tl.store(h + at, y, mask=mine[:, None])


@triton.jit
def _expert_rows(
    x,  # pointers to each token's row of words
    x_live,
    x_warp,
    x_t,
    x_part,
    w,  # words of this expert
    w_s,
    expert,
    height,  # rows of an expert
    row,
    warp,
    t,
    K,
    w_stride,
    one,
    FMT: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    W: tl.constexpr,
    EVEN: tl.constexpr,
    KWIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """fp32 [ROWS, TOKENS]: these rows of an expert's matrix times its tokens."""
    BLOCK: tl.constexpr = 128 if FMT == "e2m1" else 64
    PARTS: tl.constexpr = BLOCK // 32
    word4 = tl.arange(0, 4)[None, :]
    w += (row * w_stride + (warp * 4 + t) * 4)[:, None] + word4
    x = (x + ((x_warp * 4 + x_t) * PARTS + x_part) * 4)[:, None] + word4
    column, x_column = (warp * 4 + t) * (BLOCK // 4), (x_warp * 4 + x_t) * (BLOCK // 4)
    if FMT == "e2m1":
        w_s += (expert * height + row) * (K // 32) + (warp * 4 + t) * one
    else:
        w_s += (expert * (height // 32) + row // 32) * (K // 32) + column * one // 32
    live = row < height
    return streamed(
        w,
        live,
        column,
        w_s,
        live,
        column,
        x,
        x_live,
        x_column,
        x,
        K,
        FMT,
        False,
        ROWS,
        TOKENS,
        W,
        EVEN,
        KWIDTH,
        PACKED,
        STAGES,
    )


# ---------------------------------------------------------------- second product
@triton.jit(do_not_specialize=["first", "count", "one"])
def _expert_down_kernel(
    h,  # bf16 [P, I], columns in the order of FMT
    w,  # uint8 [E, D, ..]
    w_s,  # uint8 [E, D, INNER/32] for "e2m1", [E, D/32, INNER/32] for "e4m3"
    tiles,  # int32 [tiles, 3]
    y,  # bf16 [P, D]
    first,  # this launch's first of tiles * ceil(D / ROWS) items
    count,  # tiles
    D,
    INNER,
    w_stride,
    one,
    FMT: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    W: tl.constexpr,
    EVEN: tl.constexpr,
    KWIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    w_stride = tl.multiple_of(w_stride, 4)
    item = first + tl.program_id(0)
    tile, block = item % count, item // count
    expert = tl.load(tiles + tile * 3).to(tl.int64)
    if expert >= 0:
        start, rows = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
        n, warp, t = lane_index(ROWS, W)
        token, t_warp, t_t, part = token_index(TOKENS, W, 4 if FMT == "e2m1" else 2)
        total = _expert_rows(
            h.to(tl.pointer_type(tl.uint32)) + (start + token).to(tl.int64) * (INNER // 2),
            token < rows,
            t_warp,
            t_t,
            part,
            w.to(tl.pointer_type(tl.uint32)) + expert * D * w_stride,
            w_s,
            expert,
            D,
            block * ROWS + n,
            warp,
            t,
            INNER,
            w_stride,
            one,
            FMT,
            ROWS,
            TOKENS,
            W,
            EVEN,
            KWIDTH,
            PACKED,
            STAGES,
        )
        mine = tl.arange(0, TOKENS) < rows
        pos = (start + tl.arange(0, TOKENS)).to(tl.int64)
        d = block * ROWS + tl.arange(0, ROWS)
        at = pos[:, None] * D + d[None, :]
        tl.store(y + at, to_bf16(tl.trans(total)), mask=mine[:, None] & (d < D)[None, :])
