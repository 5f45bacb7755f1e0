"""The producer of the Hopper sparse attention: listed bf16 rows to tiles in shared memory.

Rows travel by asynchronous copies. The slots of a block are loaded while the one before it is
being copied.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tinfer.kernels._gluon_names import copy

HEADS = gl.constexpr(64)
KEYS = gl.constexpr(64)
HALF = gl.constexpr(256)
FULL, EMPTY, READY = gl.constexpr(0), gl.constexpr(2), gl.constexpr(4)
DONE, Q_FULL, Q_EMPTY = gl.constexpr(6), gl.constexpr(7), gl.constexpr(8)
# Rows of the small fp32 lines: 0-1 maxima, 2-3 rescale factors, 4-5 sums, 6-7 biases of keys.
TOP, RESCALE, TOTAL, BIAS = gl.constexpr(0), gl.constexpr(2), gl.constexpr(4), gl.constexpr(6)


# ---------------------------------------------------------------- slots
@gluon.jit
def _load_slots(slots, start, count, rows, layout: gl.constexpr):
    """int32 [64] slots from `start`; -1 where beyond `count` or not in 0..rows-1."""
    at = start + gl.arange(0, KEYS, layout)
    slot = gl.load(slots + at, mask=at < count, other=-1)
    return gl.where((slot >= 0) & (slot < rows), slot, -1)


@gluon.jit
def _blocks(slots, count, rows, WIDTH: gl.constexpr, SCAN: gl.constexpr):
    """Blocks of 64 entries: up to the last valid slot, or (sooner known) up to `count`."""
    last = count
    if SCAN:
        layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
        at = gl.arange(0, WIDTH, layout)
        slot = gl.load(slots + at, mask=at < count, other=-1)
        last = gl.max(gl.where((slot >= 0) & (slot < rows), at + 1, 0), axis=0)
    return gl.cdiv(gl.maximum(last, 0), KEYS)


@gluon.jit
def _row_at(slot, page_stride, STRIDE: gl.constexpr, LAYOUT: gl.constexpr):
    """int64 [64]: where each slot's row starts, by a row stride within the page."""
    return (slot // LAYOUT[3]).to(gl.int64) * page_stride + (slot % LAYOUT[3]) * STRIDE


# ---------------------------------------------------------------- tiles
@gluon.jit
def _copy_rows(cache, slot, page_stride, k_s, bars, B, free, LAYOUT: gl.constexpr):
    layout: gl.constexpr = slot.type.layout.parent
    column = gl.arange(0, HALF, gl.SliceLayout(0, layout))[None, :]
    at = cache + _row_at(slot, page_stride, LAYOUT[4] // 2, LAYOUT)[:, None] + column
    mbarrier.wait(bars.index(EMPTY + B), free)
    for half in gl.static_range(2):
        copy(k_s.index(2 * B + half), at + half * HALF, mask=(slot >= 0)[:, None])


@gluon.jit
def _fill(
    cache, slot, page_stride, k_s, lines, bars, B: gl.constexpr, free, LAYOUT: gl.constexpr
):  # fmt: skip
    """Bring a block into buffer B once it is free, and say so."""
    _copy_rows(cache, slot, page_stride, k_s, bars, B, free, LAYOUT)
    lines.index(BIAS + B).store(gl.where(slot >= 0, 0.0, float("-inf")))
    mbarrier.arrive(bars.index(FULL + B), count=1)
    async_copy.mbarrier_arrive(bars.index(FULL + B), increment_count=False)


@gluon.jit
def _listed(
    block, last, window_blocks, window, window_count, window_rows,
    compressed, compressed_count, compressed_rows,
    layout: gl.constexpr, COMPRESSED_WIDTH: gl.constexpr,
):  # fmt: skip
    """The slots of a block of the two lists in turn; none at or beyond block `last`."""
    slots, start, limit, rows = window, block, window_count, window_rows
    if COMPRESSED_WIDTH:
        here = block < window_blocks
        slots = gl.where(here, window, compressed)
        start = gl.where(here, block, block - window_blocks)
        limit = gl.where(here, window_count, compressed_count)
        rows = gl.where(here, window_rows, compressed_rows)
    return _load_slots(slots, start * KEYS, gl.where(block < last, limit, 0), rows, layout)


@gluon.jit
def _produce(
    q_s, k_s, lines, pairs_s, bars, items, splits, heads,
    q, q_stride_t, q_stride_h,
    window_cache, window_slots, window_lengths, window_width, window_rows,
    window_page_stride, window_slots_stride,
    compressed_cache, compressed_slots, compressed_lengths, compressed_width, compressed_rows,
    compressed_page_stride, compressed_slots_stride,
    WINDOW: gl.constexpr, COMPRESSED: gl.constexpr,
    WINDOW_WIDTH: gl.constexpr, COMPRESSED_WIDTH: gl.constexpr, SCAN: gl.constexpr,
):  # fmt: skip
    """Gather each item's queries, then every block of its keys into the buffers."""
    row_wise: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, row_wise)
    column = gl.arange(0, HALF, gl.SliceLayout(0, row_wise))[None, :]
    head_blocks = gl.cdiv(heads, HEADS)
    turn = 0
    filled = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        split = item % splits
        token = (item // splits // head_blocks).to(gl.int64)
        first_head = item // splits % head_blocks * HEADS
        window = window_slots + token * window_slots_stride
        window_count, compressed_count = window_width, compressed_width
        if window_lengths is not None:
            window_count = gl.minimum(window_count, gl.load(window_lengths + token))
        window_blocks = _blocks(window, window_count, window_rows, WINDOW_WIDTH, SCAN)
        blocks = window_blocks
        compressed = compressed_slots + token * compressed_slots_stride
        if COMPRESSED_WIDTH:
            if compressed_lengths is not None:
                compressed_count = gl.minimum(compressed_count, gl.load(compressed_lengths + token))
            blocks += _blocks(compressed, compressed_count, compressed_rows, COMPRESSED_WIDTH, SCAN)
        first, last = split * blocks // splits, (split + 1) * blocks // splits
        pairs = gl.maximum(gl.cdiv(last - first, 2), 1)

        mbarrier.wait(bars.index(Q_EMPTY), (turn & 1) ^ 1)
        pairs_s.store(gl.full([1], pairs, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
        head = first_head + gl.arange(0, HEADS, gl.SliceLayout(1, row_wise))[:, None]
        q_at = q + token * q_stride_t + head * q_stride_h + column
        for half in gl.static_range(2):
            copy(q_s.index(half), q_at + half * HALF, mask=head < heads)
        mbarrier.arrive(bars.index(Q_FULL), count=1)
        async_copy.mbarrier_arrive(bars.index(Q_FULL), increment_count=False)
        turn += 1  # noqa: SIM113  device code

        slot = _listed(
            first, last, window_blocks, window, window_count, window_rows,
            compressed, compressed_count, compressed_rows, by_row, COMPRESSED_WIDTH,
        )  # fmt: skip
        for pair in range(pairs):
            for b in gl.static_range(2):
                block = first + 2 * pair + b
                free = (filled & 1) ^ 1
                ahead = _listed(
                    block + 1, last, window_blocks, window, window_count, window_rows,
                    compressed, compressed_count, compressed_rows, by_row, COMPRESSED_WIDTH,
                )  # fmt: skip
                if COMPRESSED_WIDTH == 0:
                    _fill(window_cache, slot, window_page_stride, k_s, lines, bars, b, free, WINDOW)
                elif WINDOW == COMPRESSED:
                    here = block < window_blocks
                    cache = gl.where(here, window_cache, compressed_cache)
                    stride = gl.where(here, window_page_stride, compressed_page_stride)
                    _fill(cache, slot, stride, k_s, lines, bars, b, free, WINDOW)
                elif block < window_blocks:
                    _fill(window_cache, slot, window_page_stride, k_s, lines, bars, b, free, WINDOW)
                else:
                    _fill(
                        compressed_cache, slot, compressed_page_stride, k_s, lines, bars, b, free,
                        COMPRESSED,
                    )  # fmt: skip
                slot = ahead
            filled += 1
