"""Projections of few tokens, bound by reading the weight once.

out[t, g, n] = sum_k x[t, g, k] * weight[g * N + n, k], fp32 accumulation, one rounding. The weight
(e4m3 with 32x32 ue8m0 tiles, or bf16) goes from memory straight into tensor-core fragments; fp8
activations are decoded the same way by every program, so there is nothing to do beforehand.
The warps of a program split K and add up at the end in a fixed order: no atomics, no workspace.

`_add_parts_kernel` adds what programs of `_gemm_hopper_tile` leave, in the order of K.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._gemm_stream import streamed, warp_lanes
from tinfer.kernels._gemm_tile import lane_index, token_index
from tinfer.kernels._jit import to_bf16


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
    STAGES: tl.constexpr,
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

    word4 = tl.arange(0, 4)[None, :]

    row, warp, t = lane_index(ROWS, W)
    column, live = warp * BLOCK + t * PIECE, first + row < N
    w += base * w_stride + (row * w_stride + warp * 16 + t * 4)[:, None] + word4
    if SHARED_SCALE:  # one scale a warp and t
        s_column = warp_lanes(BLOCK, W)
        s_live = s_column >= 0
        w_s += base // 32 * ws_stride + s_column * one // 32
    else:
        s_column, s_live = column, live
        w_s += (base + row) // 32 * ws_stride + column * one // 32

    GROUPS: tl.constexpr = 1 if CODED else BLOCK // 32
    token, x_warp, x_t, x_part = token_index(TOKENS, W, GROUPS)
    token += token0
    x_column, x_live = x_warp * BLOCK + x_t * PIECE, token < T
    x += group * x_group
    x += (token * x_stride + ((x_warp * 4 + x_t) * GROUPS + x_part) * 4)[:, None] + word4
    x_s += token * xs_stride + x_column * one // 32

    total = streamed(
        w,
        live,
        column,
        w_s,
        s_live,
        s_column,
        x,
        x_live,
        x_column,
        x_s,
        K,
        FMT,
        CODED,
        ROWS,
        TOKENS,
        W,
        EVEN,
        KWIDTH,
        PACKED,
        STAGES,
    )
    n = first + tl.arange(0, ROWS)[:, None]
    tok = token0 + tl.arange(0, TOKENS)[None, :]
    at = (tok.to(tl.int64) * G + group) * N + n
    if out.dtype.element_ty == tl.bfloat16:
        total = to_bf16(total)
    tl.store(out + at, total, mask=(n < N) & (tok < T))


@triton.jit(do_not_specialize=["T"])
def _add_parts_kernel(
    parts,  # fp32 [tiles + programs, TOKENS/8, ROWS, 8]; program p's share of tile i is p + i
    out,  # bf16 [T, N]
    T,
    N,
    steps,  # of a tile
    units,  # steps of a program
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    MOST: tl.constexpr,  # programs that share a tile
    EARLY: tl.constexpr,
):
    """Eight tokens of a tile. EARLY: this kernel may start before the one that writes the parts is
    done, and waits for it."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    tile, eight = tl.program_id(0) // (TOKENS // 8), tl.program_id(0) % (TOKENS // 8)
    row, token = tl.arange(0, ROWS)[:, None], tl.arange(0, 8)[None, :]
    program = tile * steps // units
    last = (tile * steps + steps - 1) // units
    parts += (program + tile).to(tl.int64) * (ROWS * TOKENS) + eight * (ROWS * 8)
    at = row * 8 + token
    total = tl.load(parts + at)
    for i in tl.static_range(1, MOST):
        shared = at * 0 + (program + i) <= last
        total += tl.load(parts + i * (ROWS * TOKENS) + at, mask=shared, other=0.0)
    n, t = tile * ROWS + row, eight * 8 + token
    tl.store(out + t.to(tl.int64) * N + n, to_bf16(total), mask=(n < N) & (t < T))
