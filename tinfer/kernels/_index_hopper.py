"""Index logits on Hopper for few tokens a sequence: packed e2m1 keys as e4m3 operands.

A program holds one token's queries in shared memory and walks over its keys in pairs of tiles of
64. Packed keys and their scales are copied to shared memory two pairs ahead; a thread reads the
words that the tensor core's left operand wants of it and decodes them in registers
(`_index_e4m3`). Each group of 32 channels has an accumulator of its own, whose sums are exact;
the key's scales weight them in fp32:

    score = sum_h weight_h relu(sum_g key_scale_g acc_hg)

The last, partial tiles take a walk of their own. So do all keys of a token that has a head with
scales more than 2^11 apart: one tile at a time, with a factor for each head and group.

H200, 64 tokens, 32768 keys: 59 us; 53 us if all keys lie in few pages, 39 us (graph) if they are
only copied. With bf16 operands and one accumulator for all groups it takes 63 us, with keys
loaded straight into registers, where every wait is for all loads, 70 us.
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

from tinfer.kernels._index_e4m3 import (
    REACH,
    head_factor,
    key_factor,
    key_groups,
    largest_code,
    query_groups,
    rest_factor,
    smallest_code,
)

_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # Triton 3.9 renamed it
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
KEYS = gl.constexpr(64)
HEADS = gl.constexpr(32)
STAGES = gl.constexpr(3)  # pairs of tiles in shared memory
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 32]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, ACC, 4))
LINE = gl.constexpr(gl.SliceLayout(1, ACC))
COPY = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))
COPY_LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
QUERIES = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
ROWS_S = gl.constexpr(gl.SwizzledSharedLayout(16, 2, 4, [1, 0]))
HEAD = gl.constexpr(gl.SliceLayout(0, ACC))
LINE_S = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _load_queries(q_ptr, q_scale_ptr, token, heads):
    """Packed queries of a token [32, 64] and the four scale codes of each head [32]."""
    head = gl.arange(0, HEADS, gl.SliceLayout(1, QUERIES))
    byte = gl.arange(0, 64, gl.SliceLayout(0, QUERIES))
    row = token.to(gl.int64) * heads + head
    live = head < heads
    at = q_ptr + row[:, None] * 64 + byte[None, :]
    return (
        gl.load(at, mask=live[:, None], other=0),
        gl.load(q_scale_ptr + row, mask=live, other=0),
    )


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
def _store_weights(w_s, weights_ptr, q_scale_ptr, token, heads):
    head = gl.arange(0, HEADS, COPY_LINE)
    at = token.to(gl.int64) * heads + head
    codes = gl.load(q_scale_ptr + at, mask=head < heads, other=0)
    weight = gl.load(weights_ptr + at, mask=head < heads, other=0.0)
    w_s.store(weight * (0.5 * head_factor(codes)))  # 2 relu(x) = x + |x|


@gluon.jit
def _offset(table, first, bound, page_stride, PAGE: gl.constexpr):
    """Bytes from the cache's begin to the page of key `first`, if that is below the bound."""
    page = gl.load(table + first.to(gl.uint32) // PAGE, mask=first < bound, other=0)
    return page.to(gl.uint32).to(gl.uint64) * page_stride.to(gl.uint32).to(gl.uint64)


@gluon.jit
def _places(
    cache_ptr, DATA_STRIDE: gl.constexpr, SCALE_BASE: gl.constexpr, SCALE_STRIDE: gl.constexpr,
    N: gl.constexpr,
):  # fmt: skip
    """Where a thread finds its part of N keys and of their scales, were they in one row at 0."""
    row = gl.arange(0, N, gl.SliceLayout(1, COPY))
    byte = gl.arange(0, 64, gl.SliceLayout(0, COPY))
    line = gl.arange(0, N, COPY_LINE)
    keys = cache_ptr + (row[:, None] * DATA_STRIDE + byte[None, :])
    return keys, cache_ptr + (line * SCALE_STRIDE + SCALE_BASE)


@gluon.jit
def _copy_keys(
    k_s, s_s, keys, scales, first, page0, page1, count,
    PAGE: gl.constexpr, DATA_STRIDE: gl.constexpr, SCALE_STRIDE: gl.constexpr,
    N: gl.constexpr, ALL: gl.constexpr,
):  # fmt: skip
    """Start copying keys first .. first + N - 1, of two tiles of 64 with pages of their own.

    `count` is whether to copy at all if ALL, otherwise the number of keys that may be read.
    """
    row = gl.arange(0, N, gl.SliceLayout(1, COPY))
    line = gl.arange(0, N, COPY_LINE)
    tile = first.to(gl.uint32) // KEYS
    in0 = (tile % (PAGE // KEYS) * KEYS).to(gl.uint64)
    in1 = ((tile + 1) % (PAGE // KEYS) * KEYS).to(gl.uint64) - KEYS
    keys += gl.where(row < KEYS, page0 + in0 * DATA_STRIDE, page1 + in1 * DATA_STRIDE)[:, None]
    scales += gl.where(line < KEYS, page0 + in0 * SCALE_STRIDE, page1 + in1 * SCALE_STRIDE)
    keys = gl.max_contiguous(gl.multiple_of(keys, [1, 16]), [1, 16])
    scales = scales.to(gl.pointer_type(gl.int32))
    if ALL:
        _copy(k_s, keys, mask=count)
        _copy(s_s, scales, mask=count)
    else:
        _copy(k_s, keys, mask=(row < count)[:, None])
        _copy(s_s, scales, mask=line < count)
    async_copy.commit_group()


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
def _weighed(c0, c1, c2, c3, codes, weight):
    """fp32 [64]: scores of 64 keys."""
    f0, f1 = key_factor(codes, 0), key_factor(codes, 1)
    f2, f3 = key_factor(codes, 2), key_factor(codes, 3)
    dot = c0 * f0[:, None] + c1 * f1[:, None] + c2 * f2[:, None] + c3 * f3[:, None]
    scores = gl.sum((dot + gl.abs(dot)) * weight[None, :], axis=1)
    return gl.fma((f0 + f1) + (f2 + f3), gl.zeros_like(f0), scores)  # NaN if one is infinite


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
    return _weighed(c0, c1, c2, c3, codes, w_s.index(t).load(HEAD))


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
    queries, query_codes = _load_queries(q_ptr, q_scale_ptr, token, heads)
    together = seq >= 0
    for i in gl.static_range(1, TOKENS):
        together = together & (gl.load(seq_ptr + token + i) == seq)
        least = gl.minimum(least, gl.load(visible_ptr + token + i))
    begin = gl.program_id(0) % splits * span * (2 * KEYS)
    end = gl.minimum(begin + span * (2 * KEYS), columns)
    bound = gl.where(together, gl.minimum(least, end), begin)
    table = table_ptr + gl.maximum(seq, 0) * table_stride
    full = begin + gl.maximum(bound - begin, 0) // (2 * KEYS) * (2 * KEYS)
    keys, scales = _places(cache_ptr, DATA_STRIDE, SCALE_BASE, SCALE_STRIDE, 2 * KEYS)
    for i in gl.static_range(STAGES - 1):
        at = begin + i * (2 * KEYS)
        page0 = _offset(table, at, full, page_stride, PAGE)
        page1 = _offset(table, at + KEYS, full, page_stride, PAGE)
        _copy_keys(k_s.index(i), s_s.index(i), keys, scales, at, page0, page1,
                   at < full, PAGE, DATA_STRIDE, SCALE_STRIDE, 2 * KEYS, True)  # fmt: skip
    at = begin + (STAGES - 1) * (2 * KEYS)
    page0 = _offset(table, at, full, page_stride, PAGE)
    page1 = _offset(table, at + KEYS, full, page_stride, PAGE)
    wide = _store_queries(queries, query_codes, q_s, 0)
    _store_weights(w_s.index(0), weights_ptr, q_scale_ptr, token, heads)
    for i in gl.static_range(1, TOKENS):
        queries, query_codes = _load_queries(q_ptr, q_scale_ptr, token + i, heads)
        wide = wide | _store_queries(queries, query_codes, q_s, i)
        _store_weights(w_s.index(i), weights_ptr, q_scale_ptr, token + i, heads)
    fence_async_shared()
    _barrier()
    weight = w_s.index(0).load(HEAD)
    line = gl.arange(0, KEYS, LINE)
    out_row = out_ptr + token.to(gl.int64) * out_stride + line
    done = begin if wide else full
    stage = 0
    for first in range(begin, done, 2 * KEYS):
        async_copy.wait_group(STAGES - 2)
        k_now, s_now = k_s.index(stage), s_s.index(stage)
        k0, k1 = k_now.slice(0, KEYS).load(LEFT), k_now.slice(KEYS, KEYS).load(LEFT)
        s0, s1 = s_now.slice(0, KEYS).load(LINE), s_now.slice(KEYS, KEYS).load(LINE)
        at = first + (STAGES - 1) * (2 * KEYS)
        free = gl.where(stage == 0, STAGES - 1, stage - 1)
        _copy_keys(k_s.index(free), s_s.index(free), keys, scales, at, page0, page1,
                   at < full, PAGE, DATA_STRIDE, SCALE_STRIDE, 2 * KEYS, True)  # fmt: skip
        at += 2 * KEYS
        page0 = _offset(table, at, full, page_stride, PAGE)
        page1 = _offset(table, at + KEYS, full, page_stride, PAGE)
        _store_scores(k0, s0, q_s, w_s, weight, out_row + first, out_stride, TOKENS)
        _store_scores(k1, s1, q_s, w_s, weight, out_row + first + KEYS, out_stride, TOKENS)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    async_copy.wait_group(0)
    run = gl.where(together, TOKENS, 1)
    for start in range(0, TOKENS, run):
        seq = gl.load(seq_ptr + token + start)
        most = gl.load(visible_ptr + token + start)
        for t in range(1, run):
            most = gl.maximum(most, gl.load(visible_ptr + token + start + t))
        bound = gl.where(seq >= 0, gl.minimum(most, end), begin)
        table = table_ptr + gl.maximum(seq, 0) * table_stride
        few, few_scales = _places(cache_ptr, DATA_STRIDE, SCALE_BASE, SCALE_STRIDE, KEYS)
        k_now, s_now = k_s.index(0).slice(0, KEYS), s_s.index(0).slice(0, KEYS)
        for first in range(done, end, KEYS):
            page = _offset(table, first, bound, page_stride, PAGE)
            _copy_keys(k_now, s_now, few, few_scales, first, page, page, bound - first,
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
