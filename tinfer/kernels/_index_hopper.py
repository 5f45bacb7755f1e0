"""Index logits on Hopper for few tokens a sequence: packed e2m1 keys as e4m3 operands.

A program holds the queries of one token, or of all tokens of a sequence where every sequence has
as many, in shared memory and walks over the keys in pairs of tiles of 64. Packed keys and their
scales are copied to shared memory two pairs ahead; a thread reads the words that the tensor
core's left operand wants of it and decodes them in registers (`_index_e4m3`), once for all
tokens. Each group of 32 channels has an accumulator of its own, whose sums are exact; the key's
scales weight them in fp32:

    score = sum_h weight_h relu(sum_g key_scale_g acc_hg)

The last, partial tiles take a walk of their own, one tile at a time, with a factor for each head
and group. So do all keys if a head's scales lie more than 2^11 apart, or if tokens that should
share keys turn out to be of different sequences. Keys with a NaN scale are rare: their scores are
overwritten at the end.

H200, 64 tokens, 32768 keys: 58 us (graph 56). The tensor cores take 15 of them and copying alone
39; with all keys in few pages it still takes 53: 475 instructions of a warp for two tiles, most
of them for two pipes of half rate. With bf16 operands, one accumulator and the same copies it
takes 63 us, with keys loaded into registers instead, where every wait is for all loads, 70.
Steps of four tiles (64 us), 168 registers with products of two tiles in flight (60) and equal
shares across the ends of rows (61) are slower. 16 sequences of 6 tokens: 72 us, 85 one by one.
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

from tinfer.kernels._gluon_names import barrier
from tinfer.kernels._index_copies import (
    COPY_LINE,
    HEADS,
    KEYS,
    LINE_S,
    QUERIES,
    ROWS_S,
    copy_keys,
    load_queries,
    load_weights,
    page_offset,
    places,
)
from tinfer.kernels._index_e4m3 import (
    REACH,
    key_factor,
    key_groups,
    largest_code,
    nan_codes,
    query_groups,
    rest_factor,
    smallest_code,
)

STAGES = gl.constexpr(3)  # pairs of tiles in shared memory
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 32]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, ACC, 4))
LINE = gl.constexpr(gl.SliceLayout(1, ACC))
HEAD = gl.constexpr(gl.SliceLayout(0, ACC))


@gluon.jit
def _store_queries(packed, codes, q_s, t):
    """A token's e4m3 queries to shared memory; whether a head's scales lie too far apart."""
    byte = gl.arange(0, 64, gl.SliceLayout(0, QUERIES))
    code = (codes[:, None] >> (8 * (byte // 16))[None, :]) & 255
    g0, g1, g2, g3 = query_groups(packed, largest_code(codes)[:, None] - code, HEADS)
    q_s.index(4 * t).store(g0)
    q_s.index(4 * t + 1).store(g1)
    q_s.index(4 * t + 2).store(g2)
    q_s.index(4 * t + 3).store(g3)
    return gl.max(largest_code(codes) - smallest_code(codes), 0) > REACH


@gluon.jit
def _product(keys, q_s, place):
    """Start the products of 64 keys with all heads of one group, fp32 [64, 32]."""
    zero = gl.zeros((KEYS, HEADS), gl.float32, ACC)
    left = gl.convert_layout(keys, LEFT, assert_trivial=True)
    return warpgroup_mma(left, q_s.index(place).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _products(g0, g1, g2, g3, q_s, t):
    c0, c1 = _product(g0, q_s, 4 * t), _product(g1, q_s, 4 * t + 1)
    c2, c3 = _product(g2, q_s, 4 * t + 2), _product(g3, q_s, 4 * t + 3)
    return warpgroup_mma_wait(0, deps=[c0, c1, c2, c3])


@gluon.jit
def _by_thread(x, R: gl.constexpr):
    """fp32 [R, 32] as an accumulator holds it -> the eight values that a thread has of a row,
    [R, 4] each."""
    x = gl.permute(gl.reshape(x, [R, 2, 2, 4, 2]), (0, 3, 1, 2, 4))
    a, b = gl.split(x)
    a0, a1 = gl.split(a)
    b0, b1 = gl.split(b)
    a0, a1, b0, b1 = gl.split(a0), gl.split(a1), gl.split(b0), gl.split(b1)
    return a0[0], a0[1], a1[0], a1[1], b0[0], b0[1], b1[0], b1[1]


@gluon.jit
def _weighed(c0, c1, c2, c3, codes, weight):
    """fp32 [64]: scores of 64 keys, but for NaN scales.

    Every rounding is spelt out: a compiler may merge products and sums one way in one loop and
    another way in the next.
    """
    f0, f1 = key_factor(codes, 0), key_factor(codes, 1)
    f2, f3 = key_factor(codes, 2), key_factor(codes, 3)
    dot = c0 * f0[:, None] + c1 * f1[:, None] + c2 * f2[:, None] + c3 * f3[:, None]  # c f is exact
    weight, relu = gl.broadcast(weight[None, :], dot + gl.abs(dot))
    r0, r1, r2, r3, r4, r5, r6, r7 = _by_thread(relu, KEYS)
    w0, w1, w2, w3, w4, w5, w6, w7 = _by_thread(weight, KEYS)
    total = gl.fma(r3, w3, gl.fma(r2, w2, gl.fma(r1, w1, r0 * w0)))
    total = gl.fma(r7, w7, gl.fma(r6, w6, gl.fma(r5, w5, gl.fma(r4, w4, total))))
    return gl.convert_layout(gl.sum(total, axis=1), LINE, assert_trivial=True)


@gluon.jit
def _store_scores(packed, codes, q_s, w_s, weight, out, out_stride, TOKENS: gl.constexpr):
    """Scores of 64 keys that all tokens see."""
    g0, g1, g2, g3 = key_groups(packed, KEYS)
    if TOKENS == 1:
        c0, c1, c2, c3 = _products(g0, g1, g2, g3, q_s, 0)
        gl.store(out, _weighed(c0, c1, c2, c3, codes, weight))
    else:
        for t in range(TOKENS):
            c0, c1, c2, c3 = _products(g0, g1, g2, g3, q_s, t)
            weight = w_s.index(t).load(HEAD)
            gl.store(out, _weighed(c0, c1, c2, c3, codes, weight))
            out += out_stride


@gluon.jit
def _general_scores(packed, codes, q_s, w_s, q_scales, heads, t):
    """fp32 [64]: scores of 64 keys, however far apart the scales of a head."""
    head = gl.arange(0, HEADS, HEAD)
    rest = gl.load(q_scales + head, mask=head < heads, other=0)
    g0, g1, g2, g3 = key_groups(packed, KEYS)
    c0, c1, c2, c3 = _products(g0, g1, g2, g3, q_s, t)
    c0, c1 = c0 * rest_factor(rest, 0)[None, :], c1 * rest_factor(rest, 1)[None, :]
    c2, c3 = c2 * rest_factor(rest, 2)[None, :], c3 * rest_factor(rest, 3)[None, :]
    scores = _weighed(c0, c1, c2, c3, codes, w_s.index(t).load(HEAD))
    return gl.where(_is_nan(codes), float("nan"), scores)


@gluon.jit
def _is_nan(codes):
    return (nan_codes(codes) & -0x7F7F7F80) != 0


@gluon.jit
def _add_nan(
    out_row, out_stride, scales, table, begin, done, page_stride,
    PAGE: gl.constexpr, SCALE_STRIDE: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Overwrite the scores of keys with a NaN scale, of pairs of tiles from begin on."""
    for first in range(begin, done, KEYS):
        row = (first.to(gl.uint32) // KEYS % (PAGE // KEYS) * KEYS).to(gl.uint64)
        at = scales + (page_offset(table, first, done, page_stride, PAGE) + row * SCALE_STRIDE)
        nan = _is_nan(gl.load(at.to(gl.pointer_type(gl.int32))))
        for t in range(TOKENS):
            at_row = out_row + t.to(gl.int64) * out_stride + first
            gl.store(at_row, gl.full((KEYS,), float("nan"), gl.float32, LINE), mask=nan)


@gluon.jit(do_not_specialize=["columns", "splits", "span"])
def _index_logits_hopper_kernel(
    q_ptr,  # uint8 [T, heads, 64]
    q_scale_ptr,  # int32 words [T, heads]
    weights_ptr,  # fp32 [T, heads]
    cache_ptr,  # uint8 pages
    table_ptr,  # int32 [S, nblk]
    seq_ptr,  # int64 [T]
    visible_ptr,  # int32 [T]
    out_ptr,  # fp32 [T, columns]
    columns, splits,
    span,  # pairs of tiles of one program
    heads, table_stride, page_stride, out_stride,
    PAGE: gl.constexpr, DATA_STRIDE: gl.constexpr,
    SCALE_BASE: gl.constexpr, SCALE_STRIDE: gl.constexpr,
    TOKENS: gl.constexpr,  # of one program, a divisor of T
):  # fmt: skip
    q_s = gl.allocate_shared_memory(
        gl.float8e4nv, [4 * TOKENS, HEADS, 32], gl.NVMMASharedLayout(32, 8)
    )
    w_s = gl.allocate_shared_memory(gl.float32, [TOKENS, HEADS], LINE_S)
    k_s = gl.allocate_shared_memory(gl.uint8, [STAGES, 2 * KEYS, 64], ROWS_S)
    s_s = gl.allocate_shared_memory(gl.int32, [STAGES, 2 * KEYS], LINE_S)
    token = gl.program_id(0) // splits * TOKENS
    seq = gl.load(seq_ptr + token)
    least = gl.load(visible_ptr + token)
    queries, query_codes = load_queries(q_ptr, q_scale_ptr, token, heads)
    weight = load_weights(weights_ptr, q_scale_ptr, token, heads)
    together = seq >= 0
    for i in gl.static_range(1, TOKENS):
        together = together & (gl.load(seq_ptr + token + i) == seq)
        least = gl.minimum(least, gl.load(visible_ptr + token + i))
    begin = gl.program_id(0) % splits * span * (2 * KEYS)
    end = gl.minimum(begin + span * (2 * KEYS), columns)
    bound = gl.where(together, gl.minimum(least, end), begin)
    table = table_ptr + gl.maximum(seq, 0) * table_stride
    full = begin + gl.maximum(bound - begin, 0) // (2 * KEYS) * (2 * KEYS)
    keys, scales = places(cache_ptr, DATA_STRIDE, SCALE_BASE, SCALE_STRIDE, 2 * KEYS)
    for i in gl.static_range(STAGES - 1):
        at = begin + i * (2 * KEYS)
        page0 = page_offset(table, at, full, page_stride, PAGE)
        page1 = page_offset(table, at + KEYS, full, page_stride, PAGE)
        copy_keys(k_s.index(i), s_s.index(i), keys, scales, at, page0, page1,
                   at < full, PAGE, DATA_STRIDE, SCALE_STRIDE, 2 * KEYS, True)  # fmt: skip
    at = begin + (STAGES - 1) * (2 * KEYS)
    page0 = page_offset(table, at, full, page_stride, PAGE)
    page1 = page_offset(table, at + KEYS, full, page_stride, PAGE)
    wide = _store_queries(queries, query_codes, q_s, 0)
    w_s.index(0).store(weight)
    for i in gl.static_range(1, TOKENS):
        queries, query_codes = load_queries(q_ptr, q_scale_ptr, token + i, heads)
        wide = wide | _store_queries(queries, query_codes, q_s, i)
        w_s.index(i).store(load_weights(weights_ptr, q_scale_ptr, token + i, heads))
    fence_async_shared()
    barrier()
    own_weight = w_s.index(0).load(HEAD)
    line = gl.arange(0, KEYS, LINE)
    out_row = out_ptr + token.to(gl.int64) * out_stride + line
    done = begin if wide else full
    stage = 0
    nan = gl.full((2 * KEYS,), 0, gl.int32, COPY_LINE)
    for first in range(begin, done, 2 * KEYS):
        async_copy.wait_group(STAGES - 2)
        k_now, s_now = k_s.index(stage), s_s.index(stage)
        k0, k1 = k_now.slice(0, KEYS).load(LEFT), k_now.slice(KEYS, KEYS).load(LEFT)
        s0, s1 = s_now.slice(0, KEYS).load(LINE), s_now.slice(KEYS, KEYS).load(LINE)
        nan |= nan_codes(s_now.load(COPY_LINE))
        at = first + (STAGES - 1) * (2 * KEYS)
        free = gl.where(stage == 0, STAGES - 1, stage - 1)
        copy_keys(k_s.index(free), s_s.index(free), keys, scales, at, page0, page1,
                   at < full, PAGE, DATA_STRIDE, SCALE_STRIDE, 2 * KEYS, True)  # fmt: skip
        at += 2 * KEYS
        page0 = page_offset(table, at, full, page_stride, PAGE)
        page1 = page_offset(table, at + KEYS, full, page_stride, PAGE)
        _store_scores(k0, s0, q_s, w_s, own_weight, out_row + first, out_stride, TOKENS)
        _store_scores(k1, s1, q_s, w_s, own_weight, out_row + first + KEYS, out_stride, TOKENS)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    async_copy.wait_group(0)
    if gl.max(((nan & -0x7F7F7F80) != 0).to(gl.int32), 0) > 0:
        barrier()
        few_scales = cache_ptr + (SCALE_BASE + SCALE_STRIDE * line)
        _add_nan(out_row, out_stride, few_scales, table, begin, done, page_stride,
                 PAGE, SCALE_STRIDE, TOKENS)  # fmt: skip
    run = gl.where(together, TOKENS, 1)
    for start in range(0, TOKENS, run):
        seq = gl.load(seq_ptr + token + start)
        most = gl.load(visible_ptr + token + start)
        for t in range(1, run):
            most = gl.maximum(most, gl.load(visible_ptr + token + start + t))
        bound = gl.where(seq >= 0, gl.minimum(most, end), begin)
        table = table_ptr + gl.maximum(seq, 0) * table_stride
        few, few_scales = places(cache_ptr, DATA_STRIDE, SCALE_BASE, SCALE_STRIDE, KEYS)
        k_now, s_now = k_s.index(0).slice(0, KEYS), s_s.index(0).slice(0, KEYS)
        for first in range(done, end, KEYS):
            page = page_offset(table, first, bound, page_stride, PAGE)
            copy_keys(k_now, s_now, few, few_scales, first, page, page, bound - first,
                       PAGE, DATA_STRIDE, SCALE_STRIDE, KEYS, False)  # fmt: skip
            async_copy.wait_group(0)
            packed, codes = k_now.load(LEFT), s_now.load(LINE)
            for t in range(start, start + run):
                scores = gl.full((KEYS,), float("-inf"), gl.float32, LINE)
                seen = gl.minimum(gl.load(visible_ptr + token + t), bound)
                if first < seen:
                    q_scales = q_scale_ptr + (token + t).to(gl.int64) * heads
                    found = _general_scores(packed, codes, q_s, w_s, q_scales, heads, t)
                    scores = gl.where(first + line < seen, found, scores)
                at_row = out_row + t.to(gl.int64) * out_stride + first
                gl.store(at_row, scores, mask=first + line < end)
