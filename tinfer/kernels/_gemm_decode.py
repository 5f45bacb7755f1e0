"""Projections of few tokens, bound by reading the weight once.

out[t, g, n] = sum_k x[t, g, k] * weight[g * N + n, k], fp32 accumulation, one rounding. The weight
(e4m3 with 32x32 ue8m0 tiles, or bf16) goes from memory straight into tensor-core fragments; fp8
activations are decoded the same way by every program, so there is nothing to do beforehand.
The warps of a program split K and add up at the end in a fixed order: no atomics, no workspace.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._gemm_tile import (
    LIFT,
    accumulate,
    coded_token_tile,
    lane_index,
    token_factor,
    token_index,
    token_tile,
    weight_factor,
    weight_tile,
)
from tinfer.kernels._jit import to_bf16

SCALE_BACK = tl.constexpr(2.0**LIFT.value)


@triton.jit
def _fetch(pointers, live, column, k, K, EVEN: tl.constexpr):
    """Words [n, 4] or codes [n] of the step that starts at column k; 0 where there are none."""
    ok = column * 0 + k < K if EVEN else live & (column + k < K)
    if len(pointers.shape) == 2:
        ok = ok[:, None]
    return tl.load(pointers, mask=ok, other=0)


@triton.jit
def _lane_column(BLOCK: tl.constexpr, PIECE: tl.constexpr, W: tl.constexpr):
    """First column, within a step, of each lane's piece."""
    lane = tl.arange(0, W * 32)
    return (lane >> 5) * BLOCK + (lane & 3) * PIECE


@triton.jit(do_not_specialize=["T", "one"])
def _few_tokens_kernel(
    x,  # e4m3 [T, K] or bf16 [T, G, K], 16-byte aligned rows
    x_s,  # uint8 [T, ceil(K/32)], ue8m0; unused for bf16 activations
    w,  # e4m3 or bf16 [G*N, K], 16-byte aligned rows
    w_s,  # uint8 [ceil(G*N/32), ceil(K/32)], ue8m0; unused for bf16 weights
    out,  # bf16 or fp32 [T, G, N]
    T,
    N,
    K,
    G,
    x_stride,  # words of a token
    x_group,  # words of a group within a token
    xs_stride,
    w_stride,  # words of a row
    ws_stride,
    one,  # 1; hides from the compiler that neighbouring lanes read neighbouring scales
    FMT: tl.constexpr,  # of the weight
    CODED: tl.constexpr,  # activations are e4m3
    ROWS: tl.constexpr,
    W: tl.constexpr,  # warps, which split K
    TOKENS: tl.constexpr,
    EVEN: tl.constexpr,  # N, K divide into whole tiles for every warp
    SHARED_SCALE: tl.constexpr,  # the ROWS of a program lie in one row of scale tiles
    KWIDTH: tl.constexpr,
    PACKED: tl.constexpr,
):
    w_stride, x_stride = tl.multiple_of(w_stride, 4), tl.multiple_of(x_stride, 4)
    x_group = tl.multiple_of(x_group, 4)
    x = x.to(tl.pointer_type(tl.uint32))
    w = w.to(tl.pointer_type(tl.uint32))
    BLOCK: tl.constexpr = 64 if FMT == "e4m3" else 32
    PIECE: tl.constexpr = BLOCK // 4
    tiles = tl.cdiv(N, ROWS)
    pid = tl.program_id(0)
    group, first = (pid // tiles) % G, (pid % tiles) * ROWS
    token0 = pid // (tiles * G) * TOKENS
    base = (group * N + first).to(tl.int64)

    STEP: tl.constexpr = BLOCK * W  # columns a step
    word4 = tl.arange(0, 4)[None, :]

    row, warp, t = lane_index(ROWS, W)
    column, live = warp * BLOCK + t * PIECE, first + row < N
    w += base * w_stride + (row * w_stride + warp * 16 + t * 4)[:, None] + word4
    if SHARED_SCALE:  # one scale a warp and t
        s_row, s_column = base // 32, _lane_column(BLOCK, PIECE, W)
        s_live = s_column >= 0
        w_s += s_row * ws_stride + s_column * one // 32
    else:
        s_column, s_live = column, live
        w_s += (base + row) // 32 * ws_stride + column * one // 32

    GROUPS: tl.constexpr = 2 if FMT == "e4m3" and not CODED else 1
    token, x_warp, x_t, x_part = token_index(TOKENS, W, GROUPS)
    token += token0
    x_column, x_live = x_warp * BLOCK + x_t * PIECE, token < T
    x += group * x_group
    x += (token * x_stride + ((x_warp * 4 + x_t) * GROUPS + x_part) * 4)[:, None] + word4
    x_s += token * xs_stride + x_column * one // 32

    words = _fetch(w, live, column, 0, K, EVEN)
    codes = _fetch(w_s, s_live, s_column, 0, K, EVEN) if FMT == "e4m3" else words
    x_words = _fetch(x, x_live, x_column, 0, K, False)
    xs = _fetch(x_s, x_live, x_column, 0, K, False) if CODED else x_words
    acc = tl.zeros((W, ROWS, TOKENS), tl.float32)
    for k in tl.range(STEP, K + STEP, STEP, num_stages=1):  # k: the columns fetched ahead
        w += 16 * W
        x += 16 * GROUPS * W
        next_words = _fetch(w, live, column, k, K, EVEN)
        next_x = _fetch(x, x_live, x_column, k, K, False)
        a_factor = words
        if FMT == "e4m3":
            w_s += STEP // 32
            a_factor = weight_factor(codes, 120)
            codes = _fetch(w_s, s_live, s_column, k, K, EVEN)
        a = weight_tile(words, a_factor, ROWS, W, FMT, KWIDTH, PACKED)
        if CODED:
            x_s += STEP // 32
            b = coded_token_tile(x_words, token_factor(xs), TOKENS, W, KWIDTH, PACKED)
            xs = _fetch(x_s, x_live, x_column, k, K, False)
        else:
            b = token_tile(x_words, TOKENS, W, FMT, KWIDTH)
        acc = accumulate(acc, a, b)
        words, x_words = next_words, next_x

    total = tl.sum(acc, axis=0)
    if FMT == "e4m3":
        total = total * SCALE_BACK
    n = first + tl.arange(0, ROWS)[:, None]
    tok = token0 + tl.arange(0, TOKENS)[None, :]
    at = (tok.to(tl.int64) * G + group) * N + n
    if out.dtype.element_ty == tl.bfloat16:
        total = to_bf16(total)
    tl.store(out + at, total, mask=(n < N) & (tok < T))
