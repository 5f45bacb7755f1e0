"""The producer of the Hopper sparse attention: listed rows to bf16 tiles in shared memory.

bf16 rows travel by asynchronous copies. Packed rows are loaded into registers while the buffer
is still in use, then decoded, two channels at a time, and stored:

    e4m3   value * 2^-120 in bf16 by moving the code's fields, times 2^120, times the scale
    e2m1   value * 2^-126 likewise; low and high nibble become the two halves of a register

Every product is exact. Rows hold no NaN code: the cache's writer makes a group's scale NaN.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

HEADS = gl.constexpr(64)
KEYS = gl.constexpr(64)
HALF = gl.constexpr(256)
FULL, EMPTY, READY = gl.constexpr(0), gl.constexpr(2), gl.constexpr(4)
DONE, Q_FULL, Q_EMPTY = gl.constexpr(6), gl.constexpr(7), gl.constexpr(8)
# Rows of the small fp32 lines: 0-1 maxima, 2-3 rescale factors, 4-5 sums, 6-7 biases of keys.
TOP, RESCALE, TOTAL, BIAS = gl.constexpr(0), gl.constexpr(2), gl.constexpr(4), gl.constexpr(6)
# Triton 3.9 renamed both.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_view = (
    getattr(shared_memory_descriptor, "reinterpret", None) or shared_memory_descriptor._reinterpret
)

_PTX_E4M3 = gl.constexpr("""{
    .reg .b32 lo, hi, t, big, zero;
    mov.b32 zero, 0x80008000;
    mov.b32 big, 0x7b807b80;
    prmt.b32 lo, $2, 0, 0x1404;
    prmt.b32 hi, $2, 0, 0x3424;
    shr.u32 t, lo, 4;
    and.b32 t, t, 0x07f007f0;
    lop3.b32 lo, lo, 0x80008000, t, 0xea;
    shr.u32 t, hi, 4;
    and.b32 t, t, 0x07f007f0;
    lop3.b32 hi, hi, 0x80008000, t, 0xea;
    fma.rn.bf16x2 lo, lo, big, zero;
    fma.rn.bf16x2 hi, hi, big, zero;
    fma.rn.bf16x2 $0, lo, $3, zero;
    fma.rn.bf16x2 $1, hi, $5, zero;
}""")
_PTX_E2M1 = gl.constexpr(
    """{
    .reg .b32 x, y, t, big, zero;
    mov.b32 zero, 0x80008000;
    mov.b32 big, 0x7e807e80;
    shr.u32 y, $4, 4;
"""
    + "".join(
        f"""
    prmt.b32 x, $4, y, 0x{4 + k}{4 + k}{k}{k};
    shl.b32 t, x, 12;
    shl.b32 x, x, 6;
    and.b32 t, t, 0x80008000;
    lop3.b32 t, x, 0x01c001c0, t, 0xea;
    fma.rn.bf16x2 t, t, big, zero;
    fma.rn.bf16x2 ${k}, t, ${5 + k}, zero;
"""
        for k in range(4)
    )
    + "}"
)


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
def _copy_bf16(cache, slot, page_stride, k_s, bars, B, free, LAYOUT: gl.constexpr):
    layout: gl.constexpr = slot.type.layout.parent
    column = gl.arange(0, HALF, gl.SliceLayout(0, layout))[None, :]
    at = cache + _row_at(slot, page_stride, LAYOUT[4] // 2, LAYOUT)[:, None] + column
    mbarrier.wait(bars.index(EMPTY + B), free)
    for half in gl.static_range(2):
        _copy(k_s.index(2 * B + half), at + half * HALF, mask=(slot >= 0)[:, None])


@gluon.jit
def _twice(bits):
    """16 bits in an int32 -> the same bits in both halves."""
    return bits | (bits << 16)


@gluon.jit
def _e4m3_scale(code):
    """uint8 e4m3 -> int32 with its bf16 bits twice; 0x7F gives NaN."""
    c = code.to(gl.int32)
    raw = ((c & 0x80) << 24) | ((c & 0x7F) << 20)
    bits = (raw.to(gl.float32, bitcast=True) * 1.329227995784916e36).to(gl.int32, bitcast=True)
    return _twice(gl.where((c & 0x7F) == 0x7F, 0x7FC0, (bits >> 16) & 0xFFFF))


@gluon.jit
def _ue8m0_scale(code):
    """uint8 ue8m0 -> int32 with its bf16 bits twice; 0 is 2^-127, 255 gives NaN."""
    c = code.to(gl.int32)
    return _twice(gl.where(c == 0, 0x40, gl.where(c == 255, 0x7FC0, c << 7)))


@gluon.jit
def _spread_scales(
    cache, slot, page_stride, half, LAYOUT: gl.constexpr, CODES: gl.constexpr, EACH: gl.constexpr
):
    """int32 [64, 256 or 128]: each code's scale of half a row, for codes EACH to a scale."""
    COUNT: gl.constexpr = HALF // LAYOUT[1]
    # The codes' layout with its columns taken apart into scale and position.
    GROUPS: gl.constexpr = 16 // EACH if EACH < 16 else 1
    ALONG: gl.constexpr = EACH if EACH < 16 else 16
    LANES: gl.constexpr = EACH // ALONG
    cube: gl.constexpr = gl.BlockedLayout(
        [1, GROUPS, ALONG], [8, 4 // LANES, LANES], [4, 1, 1], [0, 2, 1]
    )
    flat: gl.constexpr = gl.SliceLayout(2, cube)
    rows = gl.convert_layout(slot, gl.SliceLayout(1, flat))
    column = gl.arange(0, COUNT, gl.SliceLayout(0, flat))[None, :]
    at = _row_at(rows, page_stride, LAYOUT[6], LAYOUT)[:, None] + (LAYOUT[5] + half * COUNT)
    code = gl.load(cache + at + column, mask=(rows >= 0)[:, None], other=0)
    value = _e4m3_scale(code) if LAYOUT[2] == "e4m3" else _ue8m0_scale(code)
    wide, _ = gl.broadcast(
        gl.expand_dims(value, 2), gl.full([KEYS, COUNT, EACH], 0, gl.int32, cube)
    )
    return gl.convert_layout(gl.reshape(wide, [KEYS, COUNT * EACH]), CODES)


@gluon.jit
def _load_codes(cache, slot, page_stride, half, BYTES: gl.constexpr, LAYOUT: gl.constexpr):
    layout: gl.constexpr = slot.type.layout.parent
    column = gl.arange(0, BYTES, gl.SliceLayout(0, layout))[None, :]
    at = _row_at(slot, page_stride, LAYOUT[4], LAYOUT)[:, None] + half * BYTES
    return gl.load(cache + at + column, mask=(slot >= 0)[:, None], other=0)


@gluon.jit
def _load_half(cache, slot, page_stride, half, LAYOUT: gl.constexpr):
    """(codes, scales) of one half of the rows, a scale to each code."""
    CODES: gl.constexpr = slot.type.layout.parent
    PACK: gl.constexpr = 2 if LAYOUT[0] == "e2m1" else 1
    code = _load_codes(cache, slot, page_stride, half, HALF // PACK, LAYOUT)
    scale = _spread_scales(cache, slot, page_stride, half, LAYOUT, CODES, LAYOUT[1] // PACK)
    return code, scale


@gluon.jit
def _store_half(code, scale, tile, LAYOUT: gl.constexpr):
    words: gl.constexpr = gl.NVMMASharedLayout(128, 32)
    if LAYOUT[0] == "e4m3":
        value = gl.inline_asm_elementwise(
            _PTX_E4M3, "=r,=r,r,r,r,r,r", [code, scale], gl.bfloat16, is_pure=True, pack=4
        )
        tile.store(value)
    else:
        value = gl.inline_asm_elementwise(
            _PTX_E2M1, "=r,=r,=r,=r,r,r,r,r,r", [code, scale], gl.int32, is_pure=True, pack=4
        )
        _view(tile, gl.int32, [KEYS, HALF // 2], words).store(value)


@gluon.jit
def _decode_packed(cache, slot, page_stride, k_s, bars, B, free, LAYOUT: gl.constexpr):
    """Load a block, wait for the buffer, decode and store."""
    code, scale = _load_half(cache, slot, page_stride, 0, LAYOUT)
    if LAYOUT[0] == "e4m3":  # the second half's registers are free only now
        mbarrier.wait(bars.index(EMPTY + B), free)
        code_1, scale_1 = _load_half(cache, slot, page_stride, 1, LAYOUT)
    else:
        code_1, scale_1 = _load_half(cache, slot, page_stride, 1, LAYOUT)
        mbarrier.wait(bars.index(EMPTY + B), free)
    _store_half(code, scale, k_s.index(2 * B), LAYOUT)
    _store_half(code_1, scale_1, k_s.index(2 * B + 1), LAYOUT)


@gluon.jit
def _fill(
    cache, slot, page_stride, k_s, lines, bars, B: gl.constexpr, free, LAYOUT: gl.constexpr
):  # fmt: skip
    """Bring a block into buffer B once it is free, and say so."""
    if LAYOUT[0] == "bf16":
        _copy_bf16(cache, slot, page_stride, k_s, bars, B, free, LAYOUT)
    else:
        _decode_packed(cache, slot, page_stride, k_s, bars, B, free, LAYOUT)
        fence_async_shared()
    lines.index(BIAS + B).store(gl.where(slot >= 0, 0.0, float("-inf")))
    mbarrier.arrive(bars.index(FULL + B), count=1)
    if LAYOUT[0] == "bf16":
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
    # Lanes down the rows: eight stores of a phase fall into different banks.
    bytes_wise: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [0, 1])
    tile: gl.constexpr = row_wise if WINDOW[0] == "bf16" else bytes_wise
    by_row: gl.constexpr = gl.SliceLayout(1, tile)
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
            _copy(q_s.index(half), q_at + half * HALF, mask=head < heads)
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
                elif WINDOW == COMPRESSED and WINDOW[0] == "bf16":
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
