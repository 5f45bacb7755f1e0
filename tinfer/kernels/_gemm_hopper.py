"""Projections of few tokens on Hopper: weights stream through shared memory to the tensor cores.

out[t, n] = sum_k x[t, k] * w[n, k]: a program multiplies ROWS weight rows with all tokens, 128
columns of K a step, while asynchronous copies of the next steps are under way. Both operands are
e4m3 and are multiplied as they are. Each block of 32 columns has its own product, which is scaled
(a power of two a weight tile and a power of two a token) and added in fp32; so the tensor cores,
which add fp8 products with fewer than 24 bits, sum 32 terms at most. A scale code 0 (2^-127, which
no cast writes) counts as 0.

Work is dealt out in `units`, steps a program: programs take the steps of all tiles in turn and
need not end where a tile does. Unless every program has one whole tile (WHOLE), partial sums go to
`parts`, and `_gemm_decode._add_parts_kernel` adds a tile's in the order of K: the same bits on
every run.
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

# Renamed between the versions of Triton that are supported.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

STEP = gl.constexpr(128)  # columns; four ue8m0 codes, one word


# ---------------------------------------------------------------- what both kernels share
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


# ---------------------------------------------------------------- e4m3 x e4m3
@gluon.jit
def _power(word, J: gl.constexpr):
    """Code J, 1..254, of a word of four ue8m0 -> fp32 2^(code - 127); 0 gives 0, 255 infinity."""
    if J == 3:
        bits = (word >> 1) & 0x7F800000
    else:
        bits = (word << (23 - 8 * J)) & 0x7F800000
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _nan_codes(word):
    """Not 0 where one of four ue8m0 is 255, that is NaN."""
    return (0xFEFEFEFE - word) & word & 0x80808080


@gluon.jit
def _block(a, b, zero, J: gl.constexpr):
    """Start the product of block J of a step."""
    left, right = a.slice(32 * J, 32, 1), b.slice(32 * J, 32, 1).permute((1, 0))
    return warpgroup_mma(left, right, zero, use_acc=False, is_async=True)


@gluon.jit
def _add_block(acc, part, w_codes, x_codes, J: gl.constexpr):
    """acc + part times the block's scales, [ROWS/32 tiles, 32, TOKENS]."""
    factor = _power(w_codes, J)[:, None] * _power(x_codes, J)[None, :]
    return acc + part.reshape(acc.shape) * factor.expand_dims(1)


@gluon.jit
def _fill(
    w_s, x_s, ws_s, xs_s, stage, w, x, w_scale, x_scale, w_at, x_at, ws_at, xs_at, k, end, there,
):  # fmt: skip
    """Start copying the step at column k, if it exists, into a stage. Tokens that are not `there`
    become zeros: all programs read the same tokens, so no row may be asked for in their place."""
    live = k < end
    _copy(w_s.index(stage), (w + k) + w_at, mask=live)
    _copy(x_s.index(stage), (x + k) + x_at, mask=there & live)
    _copy(ws_s.index(stage), (w_scale + k // STEP) + ws_at, mask=live)
    _copy(xs_s.index(stage), (x_scale + k // STEP) + xs_at, mask=live)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["T", "units"])
def _linear_hopper_kernel(
    x,  # e4m3 [T, K], T <= TOKENS, rows of whole 16-byte units
    x_scale,  # uint8 [T, K/32], ue8m0, rows of whole words
    w,  # e4m3 [N, K], rows of whole 16-byte units
    w_scale,  # uint8 [ceil(N/32), K/32], ue8m0, rows of whole words
    out,  # bf16 [T, N]; written if WHOLE
    parts,  # fp32, see `_leave`; written unless WHOLE
    T, N, K,  # K in whole steps
    x_stride, xs_stride, w_stride, ws_stride,
    units,  # steps of a program
    ROWS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, WHOLE: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 32])
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 8)
    COPY: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    LINE_S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    w_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, STEP], TILE)
    x_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TOKENS, STEP], TILE)
    ws_s = gl.allocate_shared_memory(gl.uint32, [STAGES, ROWS // 32], LINE_S)
    xs_s = gl.allocate_shared_memory(gl.uint32, [STAGES, TOKENS], LINE_S)

    if not WHOLE:
        gdc_launch_dependents()  # the addition of the parts may take its place and wait
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, COPY))
    x_at = _row_offsets(token, x_stride, STEP, COPY)
    there = (token < T)[:, None]
    xs_at = gl.minimum(gl.arange(0, TOKENS, LINE), T - 1) * (xs_stride // 4)
    x = x.to(gl.pointer_type(gl.float8e4nv))
    x_scale = x_scale.to(gl.pointer_type(gl.uint32))
    w_scale = w_scale.to(gl.pointer_type(gl.uint32))
    zero = gl.zeros([ROWS, TOKENS], gl.float32, ACC)
    FACTOR: gl.constexpr = gl.SliceLayout(1, zero.reshape([ROWS // 32, 32, TOKENS]).type.layout)

    begin, stop = _share(units, N, K, ROWS)
    steps = K // STEP
    for tile in range(begin // steps, (stop + steps - 1) // steps):
        first = tile * ROWS
        # Rows beyond the edge repeat the last one: their products are not stored.
        row = gl.minimum(gl.arange(0, ROWS, gl.SliceLayout(1, COPY)), N - 1 - first)
        w_at = _row_offsets(row, w_stride, STEP, COPY)
        scale_row = gl.minimum(first // 32 + gl.arange(0, ROWS // 32, LINE), (N - 1) // 32)
        ws_at = scale_row * (ws_stride // 4)
        w_tile = w.to(gl.pointer_type(gl.float8e4nv)) + first.to(gl.int64) * w_stride
        start = gl.maximum(begin - tile * steps, 0) * STEP
        end = gl.minimum(stop - tile * steps, steps) * STEP
        acc = zero.reshape([ROWS // 32, 32, TOKENS])
        nan = gl.zeros([TOKENS], gl.uint32, LINE)
        for s in gl.static_range(STAGES - 1):
            _fill(
                w_s, x_s, ws_s, xs_s, s, w_tile, x, w_scale, x_scale, w_at, x_at, ws_at, xs_at,
                start + s * STEP, end, there,
            )  # fmt: skip
        stage = 0
        for k in range(start, end, STEP):
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
            nan |= _nan_codes(xs_s.index(stage).load(LINE))
            w_codes = ws_s.index(stage).load(gl.SliceLayout(1, FACTOR))
            x_codes = xs_s.index(stage).load(gl.SliceLayout(0, FACTOR))
            a, b = w_s.index(stage), x_s.index(stage)
            part = _block(a, b, zero, 0)
            for j in gl.static_range(4):
                part = warpgroup_mma_wait(0, deps=[part])
                acc = _add_block(acc, part, w_codes, x_codes, j)
                if j < 3:
                    part = _block(a, b, zero, j + 1)
                if j == 2:
                    _fill(
                        w_s, x_s, ws_s, xs_s, _before(stage, STAGES), w_tile, x, w_scale, x_scale,
                        w_at, x_at, ws_at, xs_at, k + (STAGES - 1) * STEP, end, there,
                    )  # fmt: skip
            stage = _next(stage, STAGES)
        async_copy.wait_group(0)
        total = gl.convert_layout(acc.reshape([ROWS, TOKENS]), ACC)
        nan = gl.convert_layout(nan, gl.SliceLayout(0, ACC))
        total = gl.where((nan != 0)[None, :], float("nan"), total)
        _leave(out, parts, total, tile, T, N, ROWS, TOKENS, WARPS, WHOLE)
