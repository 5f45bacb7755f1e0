"""e4m3 activations times e4m3 weights on Hopper, 17 to 64 tokens: exact bf16 operands.

out[t, n] = sum_k x[t, k] * w[n, k], work dealt out as `_gemm_hopper_tile` says. As in
`_gemm_hopper`, weights turn into bf16 in registers; but `_gemm_prefill._dequantize_kernel` has
turned the activations into bf16 in the order of K, "e4m3", to which 16 consecutive bytes of
weights, a thread's, decode in place. So asynchronous copies take both operands to shared memory,
and the first copies of weights are under way before the activations are there.

H200, cold, us, against reading the weight alone, at (N, K) = (32768, 1280), (5120, 8192),
(4608, 5120), (25600, 6144): 17.6, 17.7, 12.2, 47.0; 32 tokens 22.1, 25.3, 19.1, 57.3; 64 tokens
24.1, 28.9, 21.9, 67.8. With 64 tokens these come from L2 once more for each tile of rows, as many
bytes as the weight, and partial sums take several MB both ways.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tinfer.kernels._gemm_hopper_tile import (
    COPY,
    COPY_TOKENS,
    HALVES,
    LIFTED,
    LINE_SHARED,
    STAGES,
    STEP,
    WORDS,
    accumulator,
    columns_of,
    copy_weights,
    fragment,
    leave,
    next_stage,
    row_offsets,
    scaled_pairs,
    share,
    stage_before,
    weights_of,
)
from tinfer.kernels._gluon_names import copy, view


# ---------------------------------------------------------------- operands
@gluon.jit
def _weights(words, codes, ROWS: gl.constexpr):
    """uint32 [ROWS, 32] of e4m3 and where its scales lie -> bf16 [ROWS, STEP], times 2^-LIFT.

    Pair j of word 16 b + 4 t + i of a row becomes the pair t of eight columns (b, i, j).
    """
    value = scaled_pairs(words, codes, ROWS)
    value = value.reshape([ROWS, 2, 4, 4, 2, 2])  # row, b, t, i, j, half
    return value.permute((0, 1, 3, 4, 2, 5)).reshape([ROWS, STEP])


@gluon.jit
def _fill_tokens(x_s, stage, x, x_at, there, k, end, TOKENS: gl.constexpr):
    """Start copying its activations; the copies of a step end here."""
    words = view(x_s.index(stage), gl.uint32, [TOKENS, STEP // 2], WORDS)
    copy(words, (x + k // 2) + x_at, mask=there & (k < end))
    async_copy.commit_group()


# ---------------------------------------------------------------- the product
@gluon.jit(do_not_specialize=["T", "units"])
def _linear_hopper_kernel(
    x,  # bf16 [T, K] in order "e4m3" of K, T <= TOKENS, rows of whole 16-byte units
    w,  # e4m3 [N, K], N in whole tiles, rows of whole 16-byte units
    w_scale,  # uint8 [N/32, K/32], ue8m0, rows of whole words
    out,  # bf16 [T, N]; written if WHOLE
    parts,  # fp32, see `leave`; written unless WHOLE
    T, N, K,  # K in whole steps
    x_stride, w_stride, ws_stride,
    units,  # steps of a program
    ROWS: gl.constexpr, TOKENS: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = accumulator(TOKENS)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    FRAGMENT: gl.constexpr = fragment([[0, 1], [0, 2], [8, 0], [0, 16]], [[0, 4], [0, 8]], ROWS)
    w_s = gl.allocate_shared_memory(gl.uint32, [STAGES, ROWS, STEP // 4], WORDS)
    ws_s = gl.allocate_shared_memory(gl.uint32, [STAGES, ROWS // 32], LINE_SHARED)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, STEP], HALVES)

    if not WHOLE:
        gdc_launch_dependents()  # the addition of the parts may take its place and wait
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, COPY_TOKENS))
    x_at = row_offsets(gl.minimum(token, T - 1), x_stride // 2, STEP // 2, COPY_TOKENS)
    there = (token < T)[:, None] & (x_at >= 0)
    w_at = row_offsets(gl.arange(0, ROWS, gl.SliceLayout(1, COPY)), w_stride // 4, 32, COPY)
    x = x.to(gl.pointer_type(gl.uint32))
    w_scale = w_scale.to(gl.pointer_type(gl.uint32))

    begin, stop = share(units, N, K, ROWS)
    steps = K // STEP
    for tile in range(begin // steps, (stop + steps - 1) // steps):
        w_tile, ws_at = weights_of(tile, w, w_stride, ws_stride, ROWS)
        start, end = columns_of(tile, begin, stop, K)
        acc = gl.zeros([ROWS, TOKENS], gl.float32, ACC)
        for s in gl.static_range(STAGES - 1):
            copy_weights(w_s, ws_s, s, w_tile, w_scale, w_at, ws_at, start + s * STEP, end)
        gdc_wait()
        for s in gl.static_range(STAGES - 1):
            _fill_tokens(x_s, s, x, x_at, there, start + s * STEP, end, TOKENS)
        stage = 0
        for k in range(start, end, STEP):
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
            free, later = stage_before(stage, STAGES), k + (STAGES - 1) * STEP
            copy_weights(w_s, ws_s, free, w_tile, w_scale, w_at, ws_at, later, end)
            _fill_tokens(x_s, free, x, x_at, there, later, end, TOKENS)
            words = w_s.index(stage).load(FRAGMENT)
            weights = _weights(words, ws_s.index(stage), ROWS)
            left = gl.convert_layout(weights, LEFT, assert_trivial=True)
            acc = warpgroup_mma(left, x_s.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            stage = next_stage(stage, STAGES)
        async_copy.wait_group(0)
        leave(out, parts, acc * LIFTED, tile, T, N, ROWS, TOKENS, WHOLE)
