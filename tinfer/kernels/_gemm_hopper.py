"""bf16 activations times e4m3 weights on Hopper, few tokens: weights stream to the tensor cores.

out[t, n] = sum_k x[t, k] * w[n, k], work dealt out as `_gemm_hopper_tile` says. Weights turn into
bf16 in registers, exactly, in the place where a tensor-core fragment wants them: four codes of a
word a thread. Of these it takes the pairs of columns (0, 2) and (1, 3), which are cheapest to
decode, so activations are stored to shared memory in that order of K.

Not done: fp8 tensor cores on the codes themselves. They add 32 products with about 13 bits, which
stays within bf16's own rounding but turns so many roundings over that golden models left their
tolerance (attention outputs off by 1.9e-2 where the reference's noise allows 1.5e-2).
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
from triton.language.extra.cuda import gdc_launch_dependents

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
from tinfer.kernels._gluon_names import view


# ---------------------------------------------------------------- operands
@gluon.jit
def _decoded(words, codes, ROWS: gl.constexpr):
    """uint32 [ROWS, 32] of e4m3 and where its scales lie -> bf16 [ROWS, STEP], times 2^-LIFT.

    Word 4 c + t of a row becomes the pairs t and 4 + t of the 16 columns of chunk c.
    """
    value = scaled_pairs(words, codes, ROWS).reshape([ROWS, 8, 4, 2, 2])  # row, c, t, pair, half
    return value.permute((0, 1, 3, 2, 4)).reshape([ROWS, STEP])


@gluon.jit
def _reordered(words, TOKENS: gl.constexpr):
    """uint32 [TOKENS, 64] of bf16 pairs, in the order of K that `_decoded` gives weights."""
    first, second = gl.split(words.reshape([TOKENS, 8, 4, 2]))
    low = (first & 0xFFFF) | (second << 16)
    high = (first >> 16) | (second & 0xFFFF0000)
    return gl.join(low, high).permute((0, 1, 3, 2)).reshape([TOKENS, 64])


@gluon.jit
def _activations(at, there, TOKENS: gl.constexpr):
    """Zeros for tokens that are not `there`: all programs read the same ones, so the last row may
    not be asked for in their place many times over. Where few are missing, masks only take the
    registers that a third program on the processor needs."""
    if TOKENS <= 32:
        words = gl.load(at, mask=there, other=0)
    else:
        words = gl.load(at)
    return words


@gluon.jit
def _fill_weights(w_s, ws_s, stage, w, w_scale, w_at, ws_at, k, end):
    """`copy_weights`; the copies of a step end here."""
    copy_weights(w_s, ws_s, stage, w, w_scale, w_at, ws_at, k, end)
    async_copy.commit_group()


# ---------------------------------------------------------------- the product
@gluon.jit(do_not_specialize=["T", "units"])
def _grouped_hopper_kernel(
    x,  # bf16 [T, G, K], T <= TOKENS, groups contiguous, rows of whole 16-byte units
    w,  # e4m3 [G*R, K], rows of whole 16-byte units
    w_scale,  # uint8 [ceil(G*R/32), K/32], ue8m0, rows of whole words
    out,  # bf16 [T, G*R]; written if WHOLE
    parts,  # fp32, see `leave`; written unless WHOLE
    T, N, K,  # N = G*R; K in whole steps
    R,  # weight rows of a group, whole tiles
    x_stride, w_stride, ws_stride,
    units,  # steps of a program
    ROWS: gl.constexpr, TOKENS: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = accumulator(TOKENS)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    FRAGMENT: gl.constexpr = fragment([[8, 0], [0, 4], [0, 8], [0, 16]], [[0, 1], [0, 2]], ROWS)
    w_s = gl.allocate_shared_memory(gl.uint32, [STAGES, ROWS, STEP // 4], WORDS)
    ws_s = gl.allocate_shared_memory(gl.uint32, [STAGES, ROWS // 32], LINE_SHARED)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [2, TOKENS, STEP], HALVES)

    if not WHOLE:
        gdc_launch_dependents()  # the addition of the parts may take its place and wait
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, COPY_TOKENS))
    there = (token < T)[:, None]
    x_at = row_offsets(gl.minimum(token, T - 1), x_stride // 2, STEP // 2, COPY_TOKENS)
    w_at = row_offsets(gl.arange(0, ROWS, gl.SliceLayout(1, COPY)), w_stride // 4, 32, COPY)
    w_scale = w_scale.to(gl.pointer_type(gl.uint32))

    begin, stop = share(units, N, K, ROWS)
    steps = K // STEP
    for tile in range(begin // steps, (stop + steps - 1) // steps):
        x_tile = x.to(gl.pointer_type(gl.uint32)) + tile * ROWS // R * (K // 2)
        w_tile, ws_at = weights_of(tile, w, w_stride, ws_stride, ROWS)
        start, end = columns_of(tile, begin, stop, K)
        acc = gl.zeros([ROWS, TOKENS], gl.float32, ACC)
        for s in gl.static_range(STAGES - 1):
            _fill_weights(w_s, ws_s, s, w_tile, w_scale, w_at, ws_at, start + s * STEP, end)
        ahead = _activations(x_tile + start // 2 + x_at, there, TOKENS)
        stage = 0
        side = 0
        for k in range(start, end, STEP):
            x_now = x_s.index(side)
            view(x_now, gl.uint32, [TOKENS, STEP // 2], WORDS).store(_reordered(ahead, TOKENS))
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
            after = gl.minimum(k + STEP, end - STEP) // 2
            ahead = _activations(x_tile + after + x_at, there, TOKENS)
            weights = _decoded(w_s.index(stage).load(FRAGMENT), ws_s.index(stage), ROWS)
            left = gl.convert_layout(weights, LEFT, assert_trivial=True)
            acc = warpgroup_mma(left, x_now.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            free, later = stage_before(stage, STAGES), k + (STAGES - 1) * STEP
            _fill_weights(w_s, ws_s, free, w_tile, w_scale, w_at, ws_at, later, end)
            stage = next_stage(stage, STAGES)
            side = 1 - side
        async_copy.wait_group(0)
        leave(out, parts, acc * LIFTED, tile, T, N, ROWS, TOKENS, WHOLE)
