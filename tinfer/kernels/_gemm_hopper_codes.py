"""e4m3 activations times e4m3 weights on Hopper, up to 16 tokens: both decoded where they multiply.

out[t, n] = sum_k x[t, k] * w[n, k]. One launch, and no partial sums in memory: a program has whole
rows of weights; its four warps share out K, and rows where K is short. Codes of both operands come
through shared memory, asynchronously, and turn into fp16 in registers, exactly, by the hardware's
conversion. Tensor cores multiply 32 columns, one group of scales, at a time; fp32 sums take that up
times both scales, a power of two, so nothing is rounded before it is added.

H200, cold, us, against reading the weight alone, at (N, K) = (32768, 1280), (5120, 8192),
(4608, 5120), (25600, 6144): 17.6, 17.7, 12.2, 47.0; 1 token 19.1, 19.9, 13.9, 50.6; 16 tokens 19.6,
21.2, 15.3, 54.4. Tried at (5120, 8192), 16 tokens: warp-group products that share decoded
activations and split K between programs 22.0, of which 2.0 add the parts; decoding weights by
integer arithmetic 22.2.

A thread's word of codes is two pairs of columns, (0, 1) and (2, 3), which become its columns of the
first and the second half of a fragment of 16: an order of K that both operands share.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from tinfer.kernels._gemm_hopper_tile import (
    COPY,
    LINE,
    LINE_SHARED,
    STEP,
    WORDS,
    next_stage,
    stage_before,
)
from tinfer.kernels._gluon_names import copy

FACTORS = gl.constexpr(gl.BlockedLayout([1, 2], [16, 2], [4, 1], [1, 0]))  # four groups a row


# ---------------------------------------------------------------- layouts
@gluon.constexpr_function
def _rows_by(unit, count):
    """Bases of `count`, a power of two, blocks of `unit` rows."""
    return [[unit << i, 0] for i in range(count.bit_length() - 1)]


@gluon.constexpr_function
def _weight_words(rows, deep):
    """Layout of words [deep * rows, 32] as the left operand wants them."""
    own = rows * deep // 4  # of a warp
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0], [0, 4], [0, 8], [0, 16], *_rows_by(16, own // 16)],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=_rows_by(own, 4),
        block_bases=[],
        shape=[deep * rows, 32],
    )


@gluon.constexpr_function
def _token_words(tokens, deep):
    """Layout of words [deep * tokens, 32] as the right operand wants them: warps that share out
    rows have the same ones."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 4], [0, 8], [0, 16], *_rows_by(8, tokens // 8)],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[*_rows_by(0, 4 // deep), *_rows_by(tokens, deep)],
        block_bases=[],
        shape=[deep * tokens, 32],
    )


# ---------------------------------------------------------------- operands
@gluon.jit
def _pairs(words):
    """uint32 [...] of four e4m3 -> fp16 pairs (0, 1) and (2, 3) [..., 2]; NaN codes give NaN."""
    low, high = gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2;"
        " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
        "=r,=r,r",
        [words],
        dtype=(gl.uint32, gl.uint32),
        is_pure=True,
        pack=1,
    )
    return gl.join(low, high)


@gluon.jit
def _groups(words, DEEP: gl.constexpr, ROWS: gl.constexpr):
    """uint32 [DEEP * ROWS, 32] of e4m3 -> fp16 [DEEP, ROWS, 32] of each of four groups."""
    pairs = _pairs(words)
    low = (pairs & 0xFFFF).to(gl.uint16).to(gl.float16, bitcast=True)
    high = (pairs >> 16).to(gl.uint16).to(gl.float16, bitcast=True)
    value = gl.join(low, high).reshape([DEEP, ROWS, 2, 2, 2, 4, 2, 2])
    value = value.permute((0, 1, 4, 6, 5, 7, 2, 3))  # .., chunk, pair, thread, half, group
    even, odd = gl.split(value.reshape([DEEP, ROWS, 32, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


# ---------------------------------------------------------------- scales
@gluon.jit
def _bytes(words):
    """uint32 [n] -> its bytes, uint32 [n, 4] as FACTORS."""
    words = gl.convert_layout(words, gl.SliceLayout(1, FACTORS))
    shift = (gl.arange(0, 4, gl.SliceLayout(0, FACTORS)) * 8).to(gl.uint32)
    return (words.expand_dims(1) >> shift.expand_dims(0)) & 0xFF


@gluon.jit
def _factors(codes, w_codes, DEEP: gl.constexpr, TALL: gl.constexpr, TOKENS: gl.constexpr):
    """Where ue8m0 of activations [DEEP * TOKENS] and weights [DEEP * TALL] lie, four a word -> fp32
    of both scales [DEEP * TALL * TOKENS, 4]. Right for every code of activations, and those from 1
    to 254 of weights."""
    LINE_OF: gl.constexpr = gl.SliceLayout(1, FACTORS)
    zero = gl.zeros([DEEP * TALL * TOKENS], gl.uint32, LINE_OF).reshape([DEEP, TALL, TOKENS])
    word = _loaded(codes, gl.SliceLayout(1, zero.type.layout), DEEP, TOKENS).expand_dims(1)
    code = _bytes((word | zero).reshape([DEEP * TALL * TOKENS]))
    field = gl.where(code == 0, 0x00400000, gl.where(code == 255, 0x7FC00000, code << 23))
    factor = field.to(gl.uint32).to(gl.float32, bitcast=True)
    word = _loaded(w_codes, gl.SliceLayout(2, zero.type.layout), DEEP, TALL).expand_dims(2)
    code = _bytes((word | zero).reshape([DEEP * TALL * TOKENS]))
    return factor * (code << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _loaded(place, layout: gl.constexpr, A: gl.constexpr, B: gl.constexpr):
    """What lies in A * B elements -> [A, B] in `layout`."""
    flat = gl.zeros([A, B], gl.uint32, layout).reshape([A * B])
    return gl.convert_layout(place.load(flat.type.layout).reshape([A, B]), layout)


# ---------------------------------------------------------------- the product
@gluon.jit
def _fill(rings, sources, offsets, ends, stage, k):
    """Start copying a step: weights, their scales, activations, their scales."""
    for i in gl.static_range(4):
        step = k // 4 if i % 2 == 0 else k // STEP
        copy(rings[i].index(stage), (sources[i] + step) + offsets[i], mask=k < ends[i])
    async_copy.commit_group()


@gluon.jit
def _added(total, weights, tokens, factors, ACC: gl.constexpr):
    """total [DEEP, TALL, rows, TOKENS] plus the product of a group of columns times its factors,
    [DEEP * TALL * TOKENS] where they lie."""
    DEEP: gl.constexpr = total.shape[0]
    TALL: gl.constexpr = total.shape[1]
    TOKENS: gl.constexpr = total.shape[3]
    left = gl.convert_layout(weights, gl.DotOperandLayout(0, ACC, 2), assert_trivial=True)
    right = tokens.permute((0, 2, 1))
    right = gl.convert_layout(right, gl.DotOperandLayout(1, ACC, 2), assert_trivial=True)
    part = mma_v2(left, right, gl.zeros([DEEP, weights.shape[1], TOKENS], gl.float32, ACC))
    BY_TOKEN: gl.constexpr = gl.SliceLayout(2, total.type.layout)
    flat = gl.zeros([DEEP, TALL, TOKENS], gl.float32, BY_TOKEN).reshape([DEEP * TALL * TOKENS])
    factor = factors.load(flat.type.layout).reshape([DEEP, TALL, TOKENS])
    factor = gl.convert_layout(factor, BY_TOKEN, assert_trivial=True).expand_dims(2)
    part, factor = gl.broadcast(part.reshape(total.shape), factor)
    return gl.fma(part, factor, total)


@gluon.jit
def _write(out, total, first, T, N, ROWS: gl.constexpr, TOKENS: gl.constexpr):
    LINES: gl.constexpr = gl.BlockedLayout([8, 1], [ROWS // 8, 256 // ROWS], [1, 4], [0, 1])
    value = gl.convert_layout(total.to(gl.bfloat16), LINES)
    n = first + gl.arange(0, ROWS, gl.SliceLayout(1, LINES))[:, None]
    t = gl.arange(0, TOKENS, gl.SliceLayout(0, LINES))[None, :]
    gl.store(out + t.to(gl.int64) * N + n, value, mask=t < T)


@gluon.jit(do_not_specialize=["T"])
def _codes_hopper_kernel(
    x,  # e4m3 [T, K], T <= TOKENS, rows of whole 16-byte units
    x_scale,  # uint8 [T, K/32], ue8m0, rows of whole words
    w,  # e4m3 [N, K], N in whole ROWS, rows of whole 16-byte units
    w_scale,  # uint8 [ceil(N/32), K/32], ue8m0, rows of whole words
    out,  # bf16 [T, N]
    T, N, K,  # K in whole steps of DEEP * STEP
    x_stride, xs_stride, w_stride, ws_stride,
    ROWS: gl.constexpr,  # of a program, in one tile of scales or whole ones
    TOKENS: gl.constexpr, STAGES: gl.constexpr,
    DEEP: gl.constexpr,  # parts of K a step, 4 / DEEP warps each
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [DEEP, 4 // DEEP, 1], [1, 16, 8])
    TALL: gl.constexpr = (ROWS + 31) // 32
    SETS: gl.constexpr = DEEP * TALL * TOKENS
    rings = (
        gl.allocate_shared_memory(gl.uint32, [STAGES, DEEP * ROWS, 32], WORDS),
        gl.allocate_shared_memory(gl.uint32, [STAGES, DEEP * TALL], LINE_SHARED),
        gl.allocate_shared_memory(gl.uint32, [STAGES, DEEP * TOKENS, 32], WORDS),
        gl.allocate_shared_memory(gl.uint32, [STAGES, DEEP * TOKENS], LINE_SHARED),
    )
    factors = gl.allocate_shared_memory(gl.float32, [4 * SETS], LINE_SHARED)

    first = gl.program_id(0) * ROWS
    column = gl.arange(0, 32, gl.SliceLayout(0, COPY))[None, :]
    row = gl.arange(0, DEEP * ROWS, gl.SliceLayout(1, COPY))[:, None]
    token = gl.arange(0, DEEP * TOKENS, gl.SliceLayout(1, COPY))[:, None]
    line = gl.arange(0, DEEP * TOKENS, LINE)
    tile = gl.arange(0, DEEP * TALL, LINE)
    sources = (
        w.to(gl.pointer_type(gl.uint32)) + first.to(gl.int64) * (w_stride // 4),
        w_scale.to(gl.pointer_type(gl.uint32)) + first // 32 * (ws_stride // 4),
        x.to(gl.pointer_type(gl.uint32)),
        x_scale.to(gl.pointer_type(gl.uint32)),
    )
    offsets = (
        row % ROWS * (w_stride // 4) + row // ROWS * 32 + column,
        tile % TALL * (ws_stride // 4) + tile // TALL,
        gl.minimum(token % TOKENS, T - 1) * (x_stride // 4) + token // TOKENS * 32 + column,
        line % TOKENS * (xs_stride // 4) + line // TOKENS,
    )
    there = (token % TOKENS < T) & (column >= 0)
    ends = (K, K, gl.where(there, K, 0), gl.where(line % TOKENS < T, K, 0))
    for s in gl.static_range(STAGES - 1):
        _fill(rings, sources, offsets, ends, s, s * (STEP * DEEP))
    total = gl.zeros([DEEP, ROWS, TOKENS], gl.float32, ACC)
    total = total.reshape([DEEP, TALL, ROWS // TALL, TOKENS])
    stage = 0
    for k in range(0, K, STEP * DEEP):
        async_copy.wait_group(STAGES - 2)
        # all reads before the copies: one barrier separates them, and the factors' writes and reads
        words = rings[0].index(stage).load(_weight_words(ROWS, DEEP))
        x_words = rings[2].index(stage).load(_token_words(TOKENS, DEEP))
        factor = _factors(rings[3].index(stage), rings[1].index(stage), DEEP, TALL, TOKENS)
        factors.store(factor.permute((1, 0)).reshape([4 * SETS]))
        free, later = stage_before(stage, STAGES), k + (STAGES - 1) * (STEP * DEEP)
        _fill(rings, sources, offsets, ends, free, later)
        weights = _groups(words, DEEP, ROWS)
        tokens = _groups(x_words, DEEP, TOKENS)
        for i in gl.static_range(4):
            total = _added(total, weights[i], tokens[i], factors.slice(i * SETS, SETS), ACC)
        stage = next_stage(stage, STAGES)
    async_copy.wait_group(0)
    total = gl.sum(total.reshape([DEEP, ROWS, TOKENS]), axis=0)
    _write(out, total, first, T, N, ROWS, TOKENS)
