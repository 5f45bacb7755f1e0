"""bf16 activations times e4m3 weights on Hopper, few tokens: weights stream to the tensor cores.

out[t, n] = sum_k x[t, k] * w[n, k]: a program multiplies ROWS weight rows with all tokens, 128
columns of K a step, while asynchronous copies of the next steps are under way. Weights turn into
bf16 in registers, exactly, in the place where a tensor-core fragment wants them: four codes of a
word a thread. Of these it takes the pairs of columns (0, 2) and (1, 3), which are cheapest to
decode, so activations are stored to shared memory in that order of K.

Work is dealt out in `units`, steps a program: programs take the steps of all tiles in turn and
need not end where a tile does. Unless every program has one whole tile (WHOLE), partial sums go to
`parts`, and `_gemm_decode._add_parts_kernel` adds a tile's in the order of K: the same bits on
every run.

Not done: fp8 tensor cores on the codes themselves. They add 32 products with about 13 bits, which
stays within bf16's own rounding but turns so many roundings over that golden models left their
tolerance (attention outputs off by 1.9e-2 where the reference's noise allows 1.5e-2).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

# Renamed between the versions of Triton that are supported.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_view = (
    getattr(shared_memory_descriptor, "reinterpret", None) or shared_memory_descriptor._reinterpret
)

STEP = gl.constexpr(128)  # columns; four ue8m0 codes, one word
LIFT = gl.constexpr(60)  # weights are decoded times 2^-LIFT: no scale leaves bf16's range
LIFTED = gl.constexpr(2.0**60)


# ---------------------------------------------------------------- shares of the work
@gluon.jit
def _row_offsets(rows, stride, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Offsets of the elements of a tile whose rows start at `rows * stride`."""
    return rows[:, None] * stride + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _next(stage, STAGES: gl.constexpr):
    return gl.where(stage + 1 == STAGES, 0, stage + 1)


@gluon.jit
def _before(stage, STAGES: gl.constexpr):
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def _share(units, N, K, ROWS: gl.constexpr):
    """First step of this program and the one after its last, over all tiles."""
    begin = gl.program_id(0) * units
    return begin, gl.minimum(begin + units, gl.cdiv(N, ROWS) * (K // STEP))


@gluon.jit
def _write(out, total, first, T, N, ROWS: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr):
    WIDE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    value = gl.convert_layout(total.to(gl.bfloat16), WIDE)
    n = first + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))[:, None]
    t = gl.arange(0, TOKENS, gl.SliceLayout(0, WIDE))[None, :]
    gl.store(out + t.to(gl.int64) * N + n, value, mask=(n < N) & (t < T))


@gluon.jit
def _leave(
    out, parts, total, tile, T, N,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Write a tile to `out`, or a program's share of it to `parts` [slot, TOKENS/8, ROWS, 8]."""
    if WHOLE:
        _write(out, total, tile * ROWS, T, N, ROWS, TOKENS, WARPS)
    else:
        ACC: gl.constexpr = total.type.layout
        row = gl.arange(0, ROWS, gl.SliceLayout(1, ACC))[:, None]
        token = gl.arange(0, TOKENS, gl.SliceLayout(0, ACC))[None, :]
        parts += (gl.program_id(0) + tile).to(gl.int64) * (ROWS * TOKENS)
        gl.store(parts + (token // 8 * ROWS + row) * 8 + token % 8, total)


# ---------------------------------------------------------------- the product
@gluon.jit
def _scaled(pairs, factor):
    """bf16 pairs times bf16 pairs, one instruction a word."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }",
        "=r,r,r",
        [pairs, factor],
        dtype=gl.uint32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _halves(words):
    """uint32 [...] -> bf16 [..., 2], low half first."""
    low = (words & 0xFFFF).to(gl.uint16).to(gl.bfloat16, bitcast=True)
    high = (words >> 16).to(gl.uint16).to(gl.bfloat16, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def _scaled_pairs(words, codes, ROWS: gl.constexpr):
    """uint32 [ROWS, 32] of e4m3 and where its scales lie -> bf16 [.., 32 words, 2 pairs, 2 halves]
    of ROWS rows, times 2^-LIFT. A word's pairs are its columns (0, 2) and (1, 3)."""
    low = ((words << 8) & 0x80008000) | ((words << 4) & 0x07F007F0)  # times 2^-120
    high = (words & 0x80008000) | ((words >> 4) & 0x07F007F0)
    pairs = gl.join(low, high).reshape([ROWS // 32, 32, 4, 8, 2])  # .., scale, word, pair
    SCALE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, pairs.type.layout)))
    code = codes.load(gl.SliceLayout(1, SCALE))
    shift = (gl.arange(0, 4, gl.SliceLayout(0, SCALE)) * 8).to(gl.uint32)
    code = ((code.expand_dims(1) >> shift.expand_dims(0)) & 0xFF).to(gl.int32)
    field = gl.minimum(gl.maximum(code + (120 - LIFT), 1), 254) << 7
    factor = (field | (field << 16)).to(gl.uint32).expand_dims(1).expand_dims(3).expand_dims(4)
    pairs, factor = gl.broadcast(pairs, factor)
    return _halves(_scaled(pairs, factor))


@gluon.jit
def _decoded(words, codes, ROWS: gl.constexpr):
    """uint32 [ROWS, 32] of e4m3 and where its scales lie -> bf16 [ROWS, STEP], times 2^-LIFT.

    Word 4 c + t of a row becomes the pairs t and 4 + t of the 16 columns of chunk c.
    """
    value = _scaled_pairs(words, codes, ROWS).reshape([ROWS, 8, 4, 2, 2])  # row, c, t, pair, half
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
def _copy_weights(w_s, ws_s, stage, w, w_scale, w_at, ws_at, k, end):
    """Start copying the weights of the step at column k, if there is one, into a stage."""
    live = k < end
    _copy(w_s.index(stage), (w + k // 4) + w_at, mask=live)
    _copy(ws_s.index(stage), (w_scale + k // STEP) + ws_at, mask=live)


@gluon.jit
def _fill_weights(w_s, ws_s, stage, w, w_scale, w_at, ws_at, k, end):
    """`_copy_weights`; the copies of a step end here."""
    _copy_weights(w_s, ws_s, stage, w, w_scale, w_at, ws_at, k, end)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["T", "units"])
def _grouped_hopper_kernel(
    x,  # bf16 [T, G, K], T <= TOKENS, groups contiguous, rows of whole 16-byte units
    w,  # e4m3 [G*R, K], rows of whole 16-byte units
    w_scale,  # uint8 [ceil(G*R/32), K/32], ue8m0, rows of whole words
    out,  # bf16 [T, G*R]; written if WHOLE
    parts,  # fp32, see `_leave`; written unless WHOLE
    T, N, K,  # N = G*R; K in whole steps
    R,  # weight rows of a group, whole tiles
    x_stride, w_stride, ws_stride,
    units,  # steps of a program
    ROWS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, WHOLE: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32)
    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    LINE_S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    X_COPY: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])
    FRAGMENT: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[8, 0], [0, 4], [0, 8], [0, 16]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]] if WARPS == 4 else [[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[ROWS, 32],
    )
    w_s = gl.allocate_shared_memory(gl.uint32, [STAGES, ROWS, STEP // 4], WORDS)
    ws_s = gl.allocate_shared_memory(gl.uint32, [STAGES, ROWS // 32], LINE_S)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [2, TOKENS, STEP], gl.NVMMASharedLayout(128, 16))

    if not WHOLE:
        gdc_launch_dependents()  # the addition of the parts may take its place and wait
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, X_COPY))
    there = (token < T)[:, None]
    x_at = _row_offsets(gl.minimum(token, T - 1), x_stride // 2, STEP // 2, X_COPY)
    w_at = _row_offsets(gl.arange(0, ROWS, gl.SliceLayout(1, COPY)), w_stride // 4, 32, COPY)
    w_scale = w_scale.to(gl.pointer_type(gl.uint32))

    begin, stop = _share(units, N, K, ROWS)
    steps = K // STEP
    for tile in range(begin // steps, (stop + steps - 1) // steps):
        first = tile * ROWS
        ws_at = (first // 32 + gl.arange(0, ROWS // 32, LINE)) * (ws_stride // 4)
        x_tile = x.to(gl.pointer_type(gl.uint32)) + first // R * (K // 2)
        w_tile = w.to(gl.pointer_type(gl.uint32)) + first.to(gl.int64) * (w_stride // 4)
        start = gl.maximum(begin - tile * steps, 0) * STEP
        end = gl.minimum(stop - tile * steps, steps) * STEP
        acc = gl.zeros([ROWS, TOKENS], gl.float32, ACC)
        for s in gl.static_range(STAGES - 1):
            _fill_weights(w_s, ws_s, s, w_tile, w_scale, w_at, ws_at, start + s * STEP, end)
        ahead = _activations(x_tile + start // 2 + x_at, there, TOKENS)
        stage = 0
        side = 0
        for k in range(start, end, STEP):
            x_now = x_s.index(side)
            _view(x_now, gl.uint32, [TOKENS, STEP // 2], WORDS).store(_reordered(ahead, TOKENS))
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
            after = gl.minimum(k + STEP, end - STEP) // 2
            ahead = _activations(x_tile + after + x_at, there, TOKENS)
            weights = _decoded(w_s.index(stage).load(FRAGMENT), ws_s.index(stage), ROWS)
            left = gl.convert_layout(weights, LEFT, assert_trivial=True)
            acc = warpgroup_mma(left, x_now.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            _fill_weights(
                w_s, ws_s, _before(stage, STAGES), w_tile, w_scale, w_at, ws_at,
                k + (STAGES - 1) * STEP, end,
            )  # fmt: skip
            stage = _next(stage, STAGES)
            side = 1 - side
        async_copy.wait_group(0)
        _leave(out, parts, acc * LIFTED, tile, T, N, ROWS, TOKENS, WARPS, WHOLE)
