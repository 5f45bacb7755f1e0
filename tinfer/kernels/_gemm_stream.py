"""The loop of a product that streams weights from memory into tensor-core fragments.

A step covers BLOCK * W columns, one block a warp; the words of the steps ahead are on their way
through shared memory, from which every thread reads back what it asked for. The warps' partial
sums are added in a fixed order at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._gemm_tile import (
    LIFT,
    accumulate,
    coded_token_tile,
    token_factor,
    token_tile,
    weight_factor,
    weight_tile,
)

SCALE_BACK = tl.constexpr(2.0**LIFT.value)


@triton.jit
def warp_lanes(BLOCK: tl.constexpr, W: tl.constexpr):
    """First column, within a step, of the piece of each lane; int32 [W*32]."""
    lane = tl.arange(0, W * 32)
    return (lane >> 5) * BLOCK + (lane & 3) * (BLOCK // 4)


@triton.jit
def _fetch(pointers, live, column, k, K, EVEN: tl.constexpr):
    """Words [n, 4] or codes [n] of the step that starts at column k; 0 where there are none."""
    ok = column * 0 + k < K if EVEN else live & (column + k < K)
    if len(pointers.shape) == 2:
        ok = ok[:, None]
    return tl.load(pointers, mask=ok, other=0)


@triton.jit
def streamed(
    w,  # pointers to words, [R*W*32, 4], with the columns and rows they stand at
    w_live,
    w_column,
    s,  # pointers to ue8m0 codes, [R*W*32] or one for all rows [W*32]
    s_live,
    s_column,
    x,  # pointers to words of activations
    x_live,
    x_column,
    xs,  # pointers to their ue8m0 codes where they are e4m3
    K,
    FMT: tl.constexpr,
    CODED: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    W: tl.constexpr,
    EVEN: tl.constexpr,  # every row exists, and every warp has whole blocks
    KWIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,  # steps of words in flight, in shared memory
):
    """fp32 [ROWS, TOKENS]: weights @ activations."""
    BLOCK: tl.constexpr = 128 if FMT == "e2m1" else (64 if FMT == "e4m3" else 32)
    STEP: tl.constexpr = BLOCK * W
    RAW: tl.constexpr = 126 if FMT == "e2m1" else 120
    X_WORDS: tl.constexpr = 16 if CODED else BLOCK // 2  # of a block
    codes = _fetch(s, s_live, s_column, 0, K, EVEN) if FMT != "bf16" else w_column
    x_codes = _fetch(xs, x_live, x_column, 0, K, False) if CODED else x_column
    acc = tl.zeros((W, ROWS, TOKENS), tl.float32)
    for k in tl.range(0, K, STEP, num_stages=STAGES):
        words = _fetch(w, w_live, w_column, k, K, EVEN)
        x_words = _fetch(x, x_live, x_column, k, K, False)
        w += 16 * W
        x += X_WORDS * W
        factor = codes
        if FMT != "bf16":
            s += STEP // 32
            factor = weight_factor(codes, RAW)
            codes = _fetch(s, s_live, s_column, k + STEP, K, EVEN)
        a = weight_tile(words, factor, ROWS, W, FMT, KWIDTH, PACKED)
        if CODED:
            xs += STEP // 32
            b = coded_token_tile(x_words, token_factor(x_codes), TOKENS, W, KWIDTH, PACKED)
            x_codes = _fetch(xs, x_live, x_column, k + STEP, K, False)
        else:
            b = token_tile(x_words, TOKENS, W, FMT, KWIDTH)
        acc = accumulate(acc, a, b)
    total = tl.sum(acc, axis=0)
    if FMT != "bf16":
        total = total * SCALE_BACK
    return total
