"""Expert products of many tokens an expert for Hopper, warp-specialized.

A program walks over items: a tile of tokens (`_moe_tiles`) and a block of 256 weight rows. Four
consumers own 64 of these rows each; a producer copies packed weights and tokens, 128 columns a
step, into a ring of buffers and runs ahead into the next item. Weights are decoded straight into
the left operand's registers, as in `_gemm_tile`; while some consumers decode, the tensor cores
work for others.

A tile of at most N1 tokens takes one product, a larger one a second of N2 columns on the same
decoded weights. Items of one tile follow each other, so that its tokens stay in the L2 cache.

Both products leave rows of bf16. What follows the first, SwiGLU and the cast, is a launch of its
own (`_moe_activate`, 91 us): done by the consumers it made 16272 instructions of 4432 and a first
product of 5451 us; which of its costs weighs most was not measured.

4096 tokens hold an H200 at its power limit (715 W, 1.6 GHz of 1.98), and what was tried against
waiting shows no gain beyond the noise. Medians of four interleaved rounds, both products, us: this
4171; with 256 columns a step and the next item's scales loaded ahead, consumers that take turns at
the tensor cores 4300, that hand over after half a step's products 4116, that decode 64 columns
while the 64 before are multiplied 4242. Clocks fell from round to round: this one's first product
went from 2553 to 2875. Cold in whole, one run each: 4170 this, 4079, 4180, and the last 4213
without loading ahead.

Signals, by place in `bars`: s: buffer s is full; STAGES + s: all consumers are done with it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tinfer.kernels._gemm_hopper_tile import scaled
from tinfer.kernels._gemm_stream import SCALE_BACK
from tinfer.kernels._gemm_tile import weight_factor
from tinfer.kernels._gluon_names import copy

STEP = gl.constexpr(128)  # columns
ROWS = gl.constexpr(64)  # of one consumer
# Which words of a step [row, 16] a thread holds: four of two rows, see `_gemm_tile`; PIECES is
# the same with the 16 words taken apart into pieces (one scale each) of four.
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 16],
    )
)
PIECES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 4],
    )
)
CODES = gl.constexpr(gl.SliceLayout(2, PIECES.value))


# ---------------------------------------------------------------- weights to a left operand
@gluon.jit
def _decode(words, codes, LEFT: gl.constexpr):
    """uint32 [64, 16] with ue8m0 codes [64, 4] -> bf16 [64, 128], columns in order "e2m1"."""
    factor = weight_factor(codes, 126)
    zeros = gl.full([ROWS, 4, 4], 0, gl.uint32, PIECES)
    factor, _ = gl.broadcast(gl.expand_dims(factor, 2), zeros)
    factor = gl.convert_layout(gl.reshape(factor, [ROWS, 16]), WORDS, assert_trivial=True)
    high = words >> 8  # what follows: see `pairs_e2m1`
    p0 = scaled(((words & 0x000F000F) * 0x1040) & 0x81C081C0, factor)
    p1 = scaled(((words & 0x00F000F0) * 0x0104) & 0x81C081C0, factor)
    p2 = scaled(((high & 0x000F000F) * 0x1040) & 0x81C081C0, factor)
    p3 = scaled(((high & 0x00F000F0) * 0x0104) & 0x81C081C0, factor)
    p = gl.join(gl.join(p0, p1), gl.join(p2, p3))
    first = (p & 0xFFFF).to(gl.uint16).to(gl.bfloat16, bitcast=True)
    second = (p >> 16).to(gl.uint16).to(gl.bfloat16, bitcast=True)
    v = gl.reshape(gl.join(first, second), [ROWS, 4, 4, 2, 2, 2])  # row t i j0 j1 h
    v = gl.reshape(gl.permute(v, (0, 2, 4, 3, 1, 5)), [ROWS, STEP])
    return gl.convert_layout(v, LEFT, assert_trivial=True)


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    stage += 1
    return gl.where(stage == STAGES, 0, stage), gl.where(stage == STAGES, phase ^ 1, phase)


@gluon.jit
def _product(
    w_s, x_s, x2_s, bars, codes_at, K, stage, phase,
    C: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """fp32 [64, N1] and, if N2, [64, N2]; scale codes are loaded two steps ahead."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N1, 16])
    ACC2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N2 if N2 else 16, 16])
    acc = gl.zeros((ROWS, N1), gl.float32, ACC)
    acc2 = gl.zeros((ROWS, N2 if N2 else 16), gl.float32, ACC2)
    zero = gl.zeros((ROWS, 4), gl.int32, CODES)
    codes = gl.load(codes_at)
    next_codes = gl.load(codes_at + 4, mask=zero + STEP < K, other=0)
    for k in range(0, K, STEP):
        codes_at += 4
        last_codes = gl.load(codes_at + 4, mask=zero + (k + 2 * STEP) < K, other=0)
        mbarrier.wait(bars.index(stage), phase)
        words = w_s.index(stage).slice(C * ROWS, ROWS).load(WORDS)
        a = _decode(words, codes, gl.DotOperandLayout(0, ACC, 2))
        acc = warpgroup_mma(a, x_s.index(stage).permute((1, 0)), acc, is_async=True)
        if N2:
            a = gl.convert_layout(a, gl.DotOperandLayout(0, ACC2, 2), assert_trivial=True)
            acc2 = warpgroup_mma(a, x2_s.index(stage).permute((1, 0)), acc2, is_async=True)
            acc, acc2 = warpgroup_mma_wait(0, deps=[acc, acc2])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(bars.index(STAGES + stage), count=1)
        codes, next_codes = next_codes, last_codes
        stage, phase = _next(stage, phase, STAGES)
    return acc, acc2, stage, phase


@gluon.jit
def _store_rows(total, y, pos, rows, first, D):
    """fp32 [64, N] -> N rows of y from row `pos` on, 64 columns from `first` on."""
    N: gl.constexpr = total.shape[1]
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    value = gl.permute((total * SCALE_BACK).to(gl.bfloat16), (1, 0))
    value = gl.convert_layout(value, OUT)
    n = gl.arange(0, N, gl.SliceLayout(1, OUT))
    d = first + gl.arange(0, ROWS, gl.SliceLayout(0, OUT))
    to = y + (pos + n).to(gl.int64)[:, None] * D + d[None, :]
    gl.store(to, value, mask=(n < rows)[:, None] & (d < D)[None, :])


# ---------------------------------------------------------------- roles
@gluon.jit
def _item(item, tiles, blocks):
    """(first row, expert or -1, first routed row, number of them) of an item."""
    tile = item // blocks
    expert = gl.load(tiles + tile * 3).to(gl.int64)
    pos, rows = gl.load(tiles + tile * 3 + 1), gl.load(tiles + tile * 3 + 2)
    return (item - tile * blocks) * 256, expert, pos, rows


@gluon.jit
def _consume(
    w_s, x_s, x2_s, bars, w_codes, tiles, y, count, D, K,
    N1: gl.constexpr, N2: gl.constexpr, STAGES: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Consumer C: rows 64 * C .. 64 * C + 63 of every block."""
    blocks = gl.cdiv(D, 256)
    stage, phase = 0, 0
    item, items = gl.program_id(0), count * blocks
    while item < items:
        first, expert, pos, rows = _item(item, tiles, blocks)
        if expert >= 0:
            first += C * ROWS
            row = gl.minimum(first + gl.arange(0, ROWS, gl.SliceLayout(1, CODES)), D - 1)
            at = row[:, None] * (K // 32) + gl.arange(0, 4, gl.SliceLayout(0, CODES))[None, :]
            codes_at = w_codes + expert * D * (K // 32) + at
            if rows <= N1:
                low, _, stage, phase = _product(
                    w_s, x_s, x2_s, bars, codes_at, K, stage, phase, C, N1, 0, STAGES
                )
                _store_rows(low, y, pos, rows, first, D)
            else:
                low, high, stage, phase = _product(
                    w_s, x_s, x2_s, bars, codes_at, K, stage, phase, C, N1, N2, STAGES
                )
                _store_rows(low, y, pos, rows, first, D)
                _store_rows(high, y, pos + N1, rows - N1, first, D)
        else:
            item = items  # only unused tiles follow
        item += gl.num_programs(0)


@gluon.jit
def _token_rows(x, pos_to_token, pos, n, rows, K, GATHER: gl.constexpr):
    """Pointers [n, 1] to the token of each routed row; of those past the tile's rows to some."""
    row = pos + n
    if GATHER:
        row = gl.load(pos_to_token + row, mask=n < rows, other=0)
    return (x + row.to(gl.int64) * K)[:, None]


@gluon.jit
def _produce(
    w_s, x_s, x2_s, bars, x, pos_to_token, w, w_stride, tiles, count, D, K,
    N1: gl.constexpr, N2: gl.constexpr, STAGES: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    W: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    X: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    blocks = gl.cdiv(D, 256)
    w_stride = gl.multiple_of(w_stride, 4)
    r = gl.arange(0, 256, gl.SliceLayout(1, W))
    word = gl.arange(0, 16, gl.SliceLayout(0, W))[None, :]
    column = gl.arange(0, STEP, gl.SliceLayout(0, X))[None, :]
    n1 = gl.arange(0, N1, gl.SliceLayout(1, X))
    n2 = N1 + gl.arange(0, N2, gl.SliceLayout(1, X))
    stage, phase = 0, 1
    item, items = gl.program_id(0), count * blocks
    while item < items:
        first, expert, pos, rows = _item(item, tiles, blocks)
        if expert >= 0:
            row = gl.minimum(first + r, D - 1)[:, None]
            w_at = w + expert * D * w_stride + (row * w_stride + word)
            x_at = _token_rows(x, pos_to_token, pos, n1, rows, K, GATHER) + column
            x2_at = _token_rows(x, pos_to_token, pos, n2, rows, K, GATHER) + column
            live, live2 = (n1 < rows)[:, None], (n2 < rows)[:, None]
            for k in range(0, K, STEP):
                mbarrier.wait(bars.index(STAGES + stage), phase)
                copy(w_s.index(stage), w_at + k // 8)
                copy(x_s.index(stage), x_at + k, mask=live)
                if rows > N1:
                    copy(x2_s.index(stage), x2_at + k, mask=live2)
                async_copy.mbarrier_arrive(bars.index(stage), increment_count=False)
                stage, phase = _next(stage, phase, STAGES)
        else:
            item = items
        item += gl.num_programs(0)


@gluon.jit(do_not_specialize=["count"])
def _expert_rows_hopper_kernel(
    x,  # bf16 [P, K], or [T, K] with GATHER; columns in order "e2m1"
    pos_to_token,  # int32 [P], the row of x behind a routed one
    w,  # uint8 [E, D, K/2]
    w_codes,  # uint8 [E, D, K/32]
    tiles,  # int32 [count, 3]
    y,  # bf16 [P, D]
    count, D, K,
    w_stride,  # words of a row
    GATHER: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    plain: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    w_s = gl.allocate_shared_memory(gl.uint32, [STAGES, 4 * ROWS, 16], plain)
    x_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N1, STEP], tile)
    x2_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N2, STEP], tile)
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=128)
        mbarrier.init(bars.index(STAGES + s), count=4)
    fence_async_shared()
    words = w.to(gl.pointer_type(gl.uint32), bitcast=True)
    gl.warp_specialize(
        [
            # Written out: an assignment would turn the constants into values.
            (_consume, (
                w_s, x_s, x2_s, bars, w_codes, tiles, y, count, D, K, N1, N2, STAGES, 0,
            )),
            (_consume, (
                w_s, x_s, x2_s, bars, w_codes, tiles, y, count, D, K, N1, N2, STAGES, 1,
            )),
            (_consume, (
                w_s, x_s, x2_s, bars, w_codes, tiles, y, count, D, K, N1, N2, STAGES, 2,
            )),
            (_consume, (
                w_s, x_s, x2_s, bars, w_codes, tiles, y, count, D, K, N1, N2, STAGES, 3,
            )),
            (_produce, (
                w_s, x_s, x2_s, bars, x, pos_to_token, words, w_stride, tiles, count, D, K,
                N1, N2, STAGES, GATHER,
            )),
        ],
        [4, 4, 4, 4],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, CONSUMER_REGISTERS, 480 - 4 * CONSUMER_REGISTERS],
    )  # fmt: skip
