"""Index logits on Hopper for few tokens a sequence: packed e2m1 keys straight into registers.

A program holds one token's queries in shared memory and walks over its keys in tiles of 64, two
tiles in flight while a third is computed. A thread loads 16 bytes of a row, which is one group of
32 channels, in the place where the tensor core wants its left operand: the channels are taken in
the order

    operand column 16 (2w + j/2) + 8 (j%2) + 2g + e   holds   channel 32g + 8w + j + 4e

(g the group, w the word of it, j and j + 4 the nibbles of a pair of bf16), and the queries are
laid out alike. So keys touch no shared memory, and no barrier separates loading, decoding and
multiplying.

Arithmetic and its range are those of `_index_keys`. H200, 64 tokens, 32768 keys: 68 us, 80 us in
the portable kernel; without decoding it takes 54 us, which is the tensor core's time for 32
columns. mma.sync instead of wgmma takes 76 us, products of two tiles in flight 75 us, e4m3
operands with an accumulator for every group (exact as well) 99 us.

Source: `tinfer.compat.indexer`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tinfer.kernels._index_keys import RESCALE

_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # Triton 3.9 renamed it
KEYS = gl.constexpr(64)
HEADS = gl.constexpr(32)
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
LINE = gl.constexpr(gl.SliceLayout(1, ACC))
_LANES = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
# [row, group, word]: a thread has all words of group lane % 4, and of the row 8 below too.
KEY_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]], _LANES, [[16, 0, 0], [32, 0, 0]], [], [64, 4, 4]
    )
)
QUERY_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2]], _LANES, [[8, 0, 0], [16, 0, 0]], [], [32, 4, 4]
    )
)
_WEIGHT = gl.constexpr(0.5 * RESCALE.value)  # 2 relu(x) = x + |x|
_SCALE_ONE = gl.constexpr((126 - 16) * 0x00800080)
_NAN = gl.constexpr(0x7FC07FC0)
_PAIRS = gl.constexpr(
    "{ .reg .b32 u, t;\n shr.u32 u, $8, 8;\n"
    + "".join(
        f"""and.b32 t, {source}, {mask};
            mul.lo.u32 t, t, {spread};
            and.b32 t, t, 0x81c081c0;
            mul.rn.bf16x2 t, t, $9;
            mov.b32 {{${2 * j}, ${2 * j + 1}}}, t;
        """
        for j, (source, mask, spread) in enumerate(
            (source, mask, spread)
            for source in ("$8", "u")
            for mask, spread in (("0x000f000f", "0x1040"), ("0x00f000f0", "0x0104"))
        )
    )
    + "}"
)


@gluon.jit
def _operand(word, scale, R: gl.constexpr):
    """Words int32 [R, 4, 4] and scale codes uint8 [R, 4] -> bf16 [R, 128], times 2^-16.

    A code above 144 makes its group NaN.
    """
    code = scale.to(gl.int32)
    factor = gl.where(code > 144, _NAN, code * 0x00800080 + _SCALE_ONE)
    word, factor = gl.broadcast(word, gl.expand_dims(factor, 2))
    a0, a1, b0, b1, c0, c1, d0, d1 = gl.inline_asm_elementwise(
        _PAIRS, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [word, factor],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
               gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True, pack=1,
    )  # fmt: skip
    low = gl.join(gl.join(a0, a1), gl.join(b0, b1))  # [R, group, word, e, j % 2]
    high = gl.join(gl.join(c0, c1), gl.join(d0, d1))
    pairs = gl.join(low, high)
    return gl.reshape(gl.permute(pairs, (0, 2, 5, 4, 1, 3)), [R, 128])


@gluon.jit
def _words_at(row, group, word, stride: gl.constexpr):
    return row[:, None, None] * stride + 4 * group[None, :, None] + word[None, None, :]


@gluon.jit
def _load_queries(q_ptr, q_scale_ptr, token, heads, q_s):
    """A token's queries to shared memory, bf16 [32, 128]."""
    head = gl.arange(0, HEADS, gl.SliceLayout(1, gl.SliceLayout(2, QUERY_WORDS)))
    group = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, QUERY_WORDS)))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, QUERY_WORDS)))
    live = head < heads
    row = token.to(gl.int64) * heads + head
    at = q_ptr + _words_at(row, group, word, 16)
    words = gl.load(at, mask=live[:, None, None], other=0)
    at = q_scale_ptr + row[:, None] * 4 + group[None, :]
    q_s.store(_operand(words, gl.load(at, mask=live[:, None], other=0), HEADS))


@gluon.jit
def _page(table, key, bound, PAGE: gl.constexpr):
    return gl.load(table + key.to(gl.uint32) // PAGE, mask=key < bound, other=0)


@gluon.jit
def _load_keys(
    words_ptr, cache_ptr, page, first, mask, page_stride, page_words,
    PAGE: gl.constexpr, DATA_STRIDE: gl.constexpr, SCALE_BASE: gl.constexpr,
    SCALE_STRIDE: gl.constexpr, ALL: gl.constexpr,
):  # fmt: skip
    """Words int32 [64, 4, 4] and scale codes uint8 [64, 4] of the keys first .. first + 63.

    `mask` is whether to load at all if ALL, otherwise the number of keys that may be read.
    """
    lane = gl.arange(0, KEYS, gl.SliceLayout(1, gl.SliceLayout(2, KEY_WORDS)))
    group = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, KEY_WORDS)))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, KEY_WORDS)))
    row = (first.to(gl.uint32) % PAGE).to(gl.int32) + lane
    words_ptr += page.to(gl.int64) * page_words
    cache_ptr += page.to(gl.int64) * page_stride
    words_at = words_ptr + _words_at(row, group, word, DATA_STRIDE // 4)
    scale_at = cache_ptr + (SCALE_BASE + row[:, None] * SCALE_STRIDE + group[None, :])
    if ALL:
        words = gl.load(words_at, mask=mask, other=0)
        scale = gl.load(scale_at, mask=mask, other=0)
    else:
        seen = lane < mask
        words = gl.load(words_at, mask=seen[:, None, None], other=0)
        scale = gl.load(scale_at, mask=seen[:, None], other=0)
    return words, scale


@gluon.jit
def _scores(words, scale, q_s, weight):
    """fp32 [64]: scores of 64 keys."""
    keys = gl.convert_layout(_operand(words, scale, KEYS), gl.DotOperandLayout(0, ACC, 2))
    acc = gl.zeros((KEYS, HEADS), gl.float32, ACC)
    acc = warpgroup_mma(keys, q_s.permute((1, 0)), acc, use_acc=False, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    return gl.sum((acc + gl.abs(acc)) * weight[None, :], axis=1)


@gluon.jit(do_not_specialize=["columns", "splits", "span"])
def _index_logits_hopper_kernel(
    q_ptr,  # int32 words [T, heads, 16]
    q_scale_ptr,  # uint8 [T, heads, 4]
    weights_ptr,  # fp32 [T, heads]
    cache_ptr,  # uint8 pages
    words_ptr,  # the same as int32 words
    table_ptr,  # int32 [S, nblk]
    seq_ptr,  # int64 [T]
    visible_ptr,  # int32 [T]
    out_ptr,  # fp32 [T, columns]
    columns, splits,
    span,  # pairs of tiles of one program
    heads, table_stride, page_stride, page_words, out_stride,
    PAGE: gl.constexpr, DATA_STRIDE: gl.constexpr,
    SCALE_BASE: gl.constexpr, SCALE_STRIDE: gl.constexpr,
):  # fmt: skip
    q_s = gl.allocate_shared_memory(gl.bfloat16, [HEADS, 128], gl.NVMMASharedLayout(128, 16))
    token = gl.program_id(0) // splits
    begin = gl.program_id(0) % splits * span * (2 * KEYS)
    end = gl.minimum(begin + span * (2 * KEYS), columns)
    seq = gl.load(seq_ptr + token)
    visible = gl.load(visible_ptr + token)
    bound = gl.where(seq >= 0, gl.minimum(visible, end), begin)
    table = table_ptr + gl.maximum(seq, 0) * table_stride
    full = begin + gl.maximum(bound - begin, 0) // (2 * KEYS) * (2 * KEYS)
    p0, p1 = _page(table, begin, full, PAGE), _page(table, begin + KEYS, full, PAGE)
    w0, s0 = _load_keys(
        words_ptr, cache_ptr, p0, begin, begin < full, page_stride, page_words,
        PAGE, DATA_STRIDE, SCALE_BASE, SCALE_STRIDE, True,
    )  # fmt: skip
    w1, s1 = _load_keys(
        words_ptr, cache_ptr, p1, begin + KEYS, begin < full, page_stride, page_words,
        PAGE, DATA_STRIDE, SCALE_BASE, SCALE_STRIDE, True,
    )  # fmt: skip
    p0 = _page(table, begin + 2 * KEYS, full, PAGE)
    p1 = _page(table, begin + 3 * KEYS, full, PAGE)
    _load_queries(q_ptr, q_scale_ptr, token, heads, q_s)
    fence_async_shared()
    _barrier()
    head = gl.arange(0, HEADS, gl.SliceLayout(0, ACC))
    at = weights_ptr + token.to(gl.int64) * heads + head
    weight = gl.load(at, mask=head < heads, other=0.0) * _WEIGHT
    line = gl.arange(0, KEYS, LINE)
    out_row = out_ptr + token.to(gl.int64) * out_stride
    for first in range(begin, full, 2 * KEYS):
        more = first + 2 * KEYS < full
        gl.store(out_row + first + line, _scores(w0, s0, q_s, weight))
        w0, s0 = _load_keys(
            words_ptr, cache_ptr, p0, first + 2 * KEYS, more, page_stride, page_words,
            PAGE, DATA_STRIDE, SCALE_BASE, SCALE_STRIDE, True,
        )  # fmt: skip
        p0 = _page(table, first + 4 * KEYS, full, PAGE)
        gl.store(out_row + first + KEYS + line, _scores(w1, s1, q_s, weight))
        w1, s1 = _load_keys(
            words_ptr, cache_ptr, p1, first + 3 * KEYS, more, page_stride, page_words,
            PAGE, DATA_STRIDE, SCALE_BASE, SCALE_STRIDE, True,
        )  # fmt: skip
        p1 = _page(table, first + 5 * KEYS, full, PAGE)
    for first in range(full, end, KEYS):
        scores = gl.full((KEYS,), float("-inf"), gl.float32, LINE)
        if first < bound:
            page = _page(table, first, bound, PAGE)
            words, scale = _load_keys(
                words_ptr, cache_ptr, page, first, bound - first, page_stride, page_words,
                PAGE, DATA_STRIDE, SCALE_BASE, SCALE_STRIDE, False,
            )  # fmt: skip
            found = _scores(words, scale, q_s, weight)
            scores = gl.where(first + line < bound, found, scores)
        gl.store(out_row + first + line, scores, mask=first + line < end)
