"""Packed rows for the Hopper decode kernel: loaded into registers early, decoded late.

    e4m3   value * 2^-120 in bf16 by moving the code's fields, times 2^120, times the scale
    e2m1   value * 2^-126 likewise; with e4m3 scales (FOLDED) one product does, by the scale times
           2^118: such a tile is 2^-8 of the rows, which the caller undoes where it is free

Every product is exact. Rows hold no NaN code: the cache's writer makes a group's scale NaN.
A register of the tile holds two channels; a thread loads 16 bytes of codes at a time and lanes go
down the rows, so that the eight stores of a phase fall into different banks.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tinfer.kernels._gluon_names import view

KEYS = gl.constexpr(64)
DIM = gl.constexpr(512)
WARPS = gl.constexpr(8)  # of a program
FOLD = gl.constexpr(2.0**-8)


def _ptx_e4m3() -> str:
    """A word of four codes and a scale for each half -> two registers of two channels."""
    lines = "".join(
        f"""
    prmt.b32 x, $2, 0, 0x{2 * k + 1}{2 * k + 1}{2 * k}{2 * k};
    shr.u32 t, x, 4;
    and.b32 t, t, 0x07f007f0;
    lop3.b32 t, x, 0x80008000, t, 0xea;
    fma.rn.bf16x2 t, t, big, zero;
    fma.rn.bf16x2 ${k}, t, ${4 + k}, zero;"""
        for k in range(2)
    )
    return f"""{{
    .reg .b32 x, t, big, zero;
    mov.b32 zero, 0x80008000;
    mov.b32 big, 0x7b807b80;{lines}
}}"""


def _ptx_e2m1(folded: bool) -> str:
    """A word of eight codes and a scale for each byte -> four registers of two channels."""
    raise_it = "" if folded else "fma.rn.bf16x2 t, t, big, zero;"
    lines = "".join(
        f"""
    prmt.b32 x, y, $4, 0x{4 + k}{4 + k}{k}{k};
    shr.u32 t, x, 6;
    and.b32 t, t, 0x01c001c0;
    lop3.b32 t, x, 0x80008000, t, 0xea;
    {raise_it}
    fma.rn.bf16x2 ${k}, t, ${8 + k}, zero;"""
        for k in range(4)
    )
    return f"""{{
    .reg .b32 x, y, t, big, zero;
    mov.b32 zero, 0x80008000;
    mov.b32 big, 0x7e807e80;
    shl.b32 y, $4, 4;{lines}
}}"""


_PTX_E4M3 = gl.constexpr(_ptx_e4m3())
_PTX_E2M1 = gl.constexpr(_ptx_e2m1(False))
_PTX_E2M1_FOLDED = gl.constexpr(_ptx_e2m1(True))


# ---------------------------------------------------------------- register layouts
@gluon.constexpr_function
def folded(layout):
    """Whether tiles of this layout are 2^-8 of the rows."""
    return layout[0] == "e2m1" and layout[2] == "e4m3"


@gluon.constexpr_function
def _pairs(layout):
    """Registers of two channels that a word of codes makes."""
    return 4 if layout[0] == "e2m1" else 2


@gluon.constexpr_function
def _words_cube(layout):
    """[KEYS, words of a row, registers of a word]."""
    pairs = 4 if layout[0] == "e2m1" else 2
    return gl.BlockedLayout([1, 4, pairs], [8, 4, 1], [8, 1, 1], [0, 2, 1])


@gluon.constexpr_function
def _scales_cube(layout):
    """[KEYS, scales of a row, registers of a scale], the registers where the words' are."""
    each, chunk = layout[1] // 2, 16 if layout[0] == "e2m1" else 8
    along = min(each, chunk)
    lanes = each // along
    return gl.BlockedLayout(
        [1, chunk // along, along], [8, 4 // lanes, lanes], [8, 1, 1], [0, 2, 1]
    )


@gluon.constexpr_function
def rows_layout():
    """Of slots: each thread holds those whose rows it loads."""
    return gl.SliceLayout(
        1, gl.SliceLayout(2, gl.BlockedLayout([1, 4, 4], [8, 4, 1], [8, 1, 1], [0, 2, 1]))
    )


# ---------------------------------------------------------------- load, decode
@gluon.jit
def _row_at(slot, page_stride, STRIDE: gl.constexpr, LAYOUT: gl.constexpr):
    """int64 [KEYS]: where each slot's row starts, by a row stride within the page."""
    return (slot // LAYOUT[3]).to(gl.int64) * page_stride + (slot % LAYOUT[3]) * STRIDE


@gluon.jit
def load_rows(cache, slot, page_stride, LAYOUT: gl.constexpr):
    """(int32 words of codes, uint8 scales) of the slots' rows; zeros where a slot is -1."""
    words: gl.constexpr = gl.SliceLayout(2, _words_cube(LAYOUT))
    COUNT: gl.constexpr = DIM // (2 * _pairs(LAYOUT))
    row = gl.convert_layout(slot, gl.SliceLayout(1, words))
    base = (cache + _row_at(row, page_stride, LAYOUT[4], LAYOUT)).to(gl.pointer_type(gl.int32))
    column = gl.arange(0, COUNT, gl.SliceLayout(0, words))[None, :]
    code = gl.load(base[:, None] + column, mask=(row >= 0)[:, None], other=0)

    flat: gl.constexpr = gl.SliceLayout(2, _scales_cube(LAYOUT))
    row = gl.convert_layout(slot, gl.SliceLayout(1, flat))
    group = gl.arange(0, DIM // LAYOUT[1], gl.SliceLayout(0, flat))[None, :]
    at = _row_at(row, page_stride, LAYOUT[6], LAYOUT)[:, None] + LAYOUT[5]
    return code, gl.load(cache + at + group, mask=(row >= 0)[:, None], other=0)


@gluon.jit
def _scale_bits(code, LAYOUT: gl.constexpr):
    """uint8 -> int32 with the scale's bf16 bits in both halves."""
    c = code.to(gl.int32)
    if LAYOUT[2] == "e4m3":
        raw = ((c & 0x80) << 24) | ((c & 0x7F) << 20)
        value = raw.to(gl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
        if folded(LAYOUT):
            value = value * 3.32306998946229e35  # 2^118
        bits = (value.to(gl.int32, bitcast=True) >> 16) & 0xFFFF
        bits = gl.where((c & 0x7F) == 0x7F, 0x7FC0, bits)
    else:
        bits = gl.where(c == 0, 0x40, gl.where(c == 255, 0x7FC0, c << 7))
    return bits | (bits << 16)


@gluon.jit
def _spread(value, EACH: gl.constexpr):
    """[KEYS, n] -> [KEYS, n * EACH], every element repeated."""
    cube: gl.constexpr = value.type.layout.parent
    shape: gl.constexpr = [KEYS, value.shape[1], EACH]
    wide, _ = gl.broadcast(gl.expand_dims(value, 2), gl.full(shape, 0, gl.int32, cube))
    return gl.reshape(wide, [KEYS, shape[1] * EACH])


@gluon.jit
def store_rows(code, scale, tile, LAYOUT: gl.constexpr):
    """Decode loaded rows to bf16 and store them in shared memory."""
    PAIRS: gl.constexpr = _pairs(LAYOUT)
    flat: gl.constexpr = gl.BlockedLayout([1, 4 * PAIRS], [8, 4], [WARPS, 1], [0, 1])
    words = gl.convert_layout(_spread(code, PAIRS), flat)
    scales = gl.convert_layout(_spread(_scale_bits(scale, LAYOUT), LAYOUT[1] // 2), flat)
    if LAYOUT[0] == "e4m3":
        value = gl.inline_asm_elementwise(
            _PTX_E4M3, "=r,=r,r,r,r,r", [words, scales], gl.int32, is_pure=True, pack=2
        )
    else:
        PTX: gl.constexpr = _PTX_E2M1_FOLDED if folded(LAYOUT) else _PTX_E2M1
        value = gl.inline_asm_elementwise(
            PTX, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [words, scales], gl.int32, is_pure=True, pack=4
        )
    view(tile, gl.int32, [KEYS, DIM // 2], gl.NVMMASharedLayout(128, 32)).store(value)
