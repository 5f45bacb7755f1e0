"""Device functions that turn packed e2m1 rows of 128 channels into e4m3 dot operands (Hopper).

A group of 32 channels, 16 bytes, becomes one step of the tensor core: its low nibbles, then its
high ones, on both sides. A key's nibble moves to where e4m3 has sign, lowest exponent bits and
highest mantissa bit, which is the value times 2^-6 (0.5 as a subnormal). A query's nibble is
looked up in a table of the eight e4m3 codes of its magnitude, scaled by 2^6 in the group with the
head's largest scale and by 2^-d of that in a group whose scale is 2^d smaller, as far as e4m3's
normal exponents go (d = 11). Products of a group are multiples of one power of two and their sums
take 13 bits, which the tensor core adds exactly.

Key scales multiply a group's sum as 2^(code - 127); code 0 counts as zero. Query scales go to the
head's weight, and what is left of d above 11 to `rest_factor`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

REACH = gl.constexpr(11)
_SPLIT = gl.constexpr("""{ .reg .b32 s, t;
    shr.u32 t, $2, 2;
    and.b32 t, t, 0x1c1c1c1c;
    lop3.b32 $1, $2, 0x80808080, t, 0xEA;
    shl.b32 t, $2, 2;
    and.b32 t, t, 0x1c1c1c1c;
    shl.b32 s, $2, 4;
    lop3.b32 $0, s, 0x80808080, t, 0xEA; }""")
# $3: four times the exponent step 8 * (11 - d), added to the codes of 0.5 .. 6 at d = 11.
_LOOK_UP = gl.constexpr("""{ .reg .b32 lo, hi, m, p, q;
    and.b32 lo, $3, 0xffffff00;
    add.u32 lo, lo, 0x14100800;
    add.u32 hi, $3, 0x24201c18;
    and.b32 m, $2, 0x77777777;
    prmt.b32 p, lo, hi, m;
    shr.u32 m, m, 16;
    prmt.b32 q, lo, hi, m;
    prmt.b32 lo, p, q, 0x6420;
    prmt.b32 hi, p, q, 0x7531;
    shl.b32 m, $2, 4;
    lop3.b32 $0, m, 0x80808080, lo, 0xEA;
    lop3.b32 $1, $2, 0x80808080, hi, 0xEA; }""")


@gluon.jit
def _groups(low, high, R: gl.constexpr):
    """e4m3 codes of the nibbles of bytes [R, 64] -> four groups, e4m3 [R, 32]."""
    both = gl.reshape(gl.join(low, high), [R, 2, 2, 16, 2]).to(gl.float8e4nv, bitcast=True)
    even, odd = gl.split(gl.permute(both, (0, 4, 3, 1, 2)))
    g0, g2 = gl.split(even)
    g1, g3 = gl.split(odd)
    g0, g1 = gl.reshape(g0, [R, 32]), gl.reshape(g1, [R, 32])
    return g0, g1, gl.reshape(g2, [R, 32]), gl.reshape(g3, [R, 32])


@gluon.jit
def key_groups(packed, R: gl.constexpr):
    """Bytes [R, 64] -> four e4m3 [R, 32], times 2^-6. Stays in front of what follows it."""
    low, high = gl.inline_asm_elementwise(
        _SPLIT, "=r,=r,r", [packed], dtype=(gl.uint8, gl.uint8), is_pure=False, pack=4
    )
    return _groups(low, high, R)


@gluon.jit
def query_groups(packed, behind, R: gl.constexpr):
    """Bytes [R, 64] and how far their scale lies behind the head's largest, as an exponent."""
    step = (8 * gl.maximum(REACH - behind, 0)).to(gl.uint8)
    low, high = gl.inline_asm_elementwise(
        _LOOK_UP, "=r,=r,r,r", [packed, step], dtype=(gl.uint8, gl.uint8), is_pure=True, pack=4
    )
    return _groups(low, high, R)


@gluon.jit
def code_of(word, G: gl.constexpr):
    """Scale code of group G from the four codes of a row, int32."""
    return (word >> (8 * G)) & 255


@gluon.jit
def largest_code(word):
    pair = gl.maximum(code_of(word, 0), code_of(word, 1))
    return gl.maximum(pair, gl.maximum(code_of(word, 2), code_of(word, 3)))


@gluon.jit
def smallest_code(word):
    pair = gl.minimum(code_of(word, 0), code_of(word, 1))
    return gl.minimum(pair, gl.minimum(code_of(word, 2), code_of(word, 3)))


@gluon.jit
def key_factor(word, G: gl.constexpr):
    """fp32 scale of group G from a key's four codes; infinite for NaN (`nan_codes`)."""
    if G == 3:
        shifted = word >> 1
    else:
        shifted = word << (23 - 8 * G)
    return (shifted & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit
def nan_codes(word):
    """Bit 8 i + 7 is set where byte i of the word is 255, other bits are arbitrary."""
    return ((word & 0x7F7F7F7F) + 0x01010101) & word


@gluon.jit
def rest_factor(word, G: gl.constexpr):
    """fp32 part of group G's scale, relative to the head's largest, that e4m3 cannot hold."""
    left = largest_code(word) - code_of(word, G) - REACH
    return ((127 - gl.minimum(gl.maximum(left, 0), 126)) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def head_factor(word):
    """fp32 largest scale of a head, NaN for NaN."""
    top = largest_code(word)
    return gl.where(top == 255, 0x7FC00000, top << 23).to(gl.float32, bitcast=True)
