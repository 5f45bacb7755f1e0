"""What products of few tokens with e4m3 weights share on Hopper: how work is dealt out, copied,
decoded and left.

A program multiplies ROWS weight rows with all tokens, STEP columns of K a step, while asynchronous
copies of the next steps are under way. Work is dealt out in `units`, steps a program: programs
take the steps of all tiles in turn and need not end where a tile does. Unless every program has one
whole tile (WHOLE), partial sums go to `parts`, and `_gemm_decode._add_parts_kernel` adds a tile's
in the order of K: the same bits on every run.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tinfer.kernels._gluon_names import copy

STEP = gl.constexpr(128)  # columns; four ue8m0 codes, one word
STAGES = gl.constexpr(3)
WARPS = gl.constexpr(4)
LIFT = gl.constexpr(60)  # weights are decoded times 2^-LIFT: no scale leaves bf16's range
LIFTED = gl.constexpr(2.0**60)

WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32))
HALVES = gl.constexpr(gl.NVMMASharedLayout(128, 16))
LINE_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
COPY = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))  # weights, 32 words a row
COPY_TOKENS = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))  # 64 words a row
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.constexpr_function
def accumulator(tokens):
    """Layout of sums [rows, tokens]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 16])


@gluon.constexpr_function
def fragment(columns, lanes, rows):
    """Layout of words of weights [rows, 32] as the left operand wants them: the bases of a
    thread's words and of the four threads of a row, along columns."""
    more = [[64, 0]] if rows > 64 else []
    return gl.DistributedLinearLayout(
        reg_bases=[*columns, *more],
        lane_bases=[*lanes, [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[rows, 32],
    )


# ---------------------------------------------------------------- shares of the work
@gluon.jit
def row_offsets(rows, stride, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Offsets of the elements of a tile whose rows start at `rows * stride`."""
    return rows[:, None] * stride + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def next_stage(stage, COUNT: gl.constexpr):
    return gl.where(stage + 1 == COUNT, 0, stage + 1)


@gluon.jit
def stage_before(stage, COUNT: gl.constexpr):
    return gl.where(stage == 0, COUNT - 1, stage - 1)


@gluon.jit
def share(units, N, K, ROWS: gl.constexpr):
    """First step of this program and the one after its last, over all tiles."""
    begin = gl.program_id(0) * units
    return begin, gl.minimum(begin + units, gl.cdiv(N, ROWS) * (K // STEP))


@gluon.jit
def columns_of(tile, begin, stop, K):
    """Where this program's steps of a tile start and end."""
    steps = K // STEP
    start = gl.maximum(begin - tile * steps, 0) * STEP
    return start, gl.minimum(stop - tile * steps, steps) * STEP


@gluon.jit
def _write(out, total, first, T, N, ROWS: gl.constexpr, TOKENS: gl.constexpr):
    WIDE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    value = gl.convert_layout(total.to(gl.bfloat16), WIDE)
    n = first + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))[:, None]
    t = gl.arange(0, TOKENS, gl.SliceLayout(0, WIDE))[None, :]
    gl.store(out + t.to(gl.int64) * N + n, value, mask=(n < N) & (t < T))


@gluon.jit
def leave(
    out, parts, total, tile, T, N,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Write a tile to `out`, or a program's share of it to `parts` [slot, TOKENS/8, ROWS, 8]."""
    if WHOLE:
        _write(out, total, tile * ROWS, T, N, ROWS, TOKENS)
    else:
        ACC: gl.constexpr = total.type.layout
        row = gl.arange(0, ROWS, gl.SliceLayout(1, ACC))[:, None]
        token = gl.arange(0, TOKENS, gl.SliceLayout(0, ACC))[None, :]
        parts += (gl.program_id(0) + tile).to(gl.int64) * (ROWS * TOKENS)
        gl.store(parts + (token // 8 * ROWS + row) * 8 + token % 8, total)


# ---------------------------------------------------------------- weights
@gluon.jit
def scaled(pairs, factor):
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
def scaled_pairs(words, codes, ROWS: gl.constexpr):
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
    return _halves(scaled(pairs, factor))


@gluon.jit
def weights_of(tile, w, w_stride, ws_stride, ROWS: gl.constexpr):
    """Where a tile's words of weights start, and the offsets of its scales' words."""
    first = tile * ROWS
    ws_at = (first // 32 + gl.arange(0, ROWS // 32, LINE)) * (ws_stride // 4)
    return w.to(gl.pointer_type(gl.uint32)) + first.to(gl.int64) * (w_stride // 4), ws_at


@gluon.jit
def copy_weights(w_s, ws_s, stage, w, w_scale, w_at, ws_at, k, end):
    """Start copying the weights of the step at column k, if there is one, into a stage."""
    live = k < end
    copy(w_s.index(stage), (w + k // 4) + w_at, mask=live)
    copy(ws_s.index(stage), (w_scale + k // STEP) + ws_at, mask=live)
