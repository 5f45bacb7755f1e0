"""Device functions of the index logits on Hopper: queries and weights, copies of keys ahead."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from tinfer.kernels._gluon_names import copy
from tinfer.kernels._index_e4m3 import head_factor

KEYS = gl.constexpr(64)
HEADS = gl.constexpr(32)
COPY = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))
COPY_LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
QUERIES = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
ROWS_S = gl.constexpr(gl.SwizzledSharedLayout(16, 2, 4, [1, 0]))
LINE_S = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def load_queries(q_ptr, q_scale_ptr, token, heads):
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
def load_weights(weights_ptr, q_scale_ptr, token, heads):
    """Weights of a token, times half the largest scale of the head, [32]."""
    head = gl.arange(0, HEADS, COPY_LINE)
    at = token.to(gl.int64) * heads + head
    codes = gl.load(q_scale_ptr + at, mask=head < heads, other=0)
    weight = gl.load(weights_ptr + at, mask=head < heads, other=0.0)
    return weight * (0.5 * head_factor(codes))  # 2 relu(x) = x + |x|


@gluon.jit
def page_offset(table, first, bound, page_stride, PAGE: gl.constexpr):
    """Bytes from the cache's begin to the page of key `first`, if that is below the bound."""
    page = gl.load(table + first.to(gl.uint32) // PAGE, mask=first < bound, other=0)
    return page.to(gl.uint32).to(gl.uint64) * page_stride.to(gl.uint32).to(gl.uint64)


@gluon.jit
def places(
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
def copy_keys(
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
        copy(k_s, keys, mask=count)
        copy(s_s, scales, mask=count)
    else:
        copy(k_s, keys, mask=(row < count)[:, None])
        copy(s_s, scales, mask=line < count)
    async_copy.commit_group()
