"""Device functions on packed FP4 weights: eight e2m1 codes a word, looked up in a group's table.

Within one group of 32 columns the eight magnitudes of e2m1 map to eight results. A group's table
is computed once; its results are then picked by the codes themselves, four bytes an instruction
where the device has a byte permutation (PTX), by shifts elsewhere.

Tensors are int32: words [U, R, W] are 8 W columns of units [U, R]; a unit lies in one group of
row R. Units come first because Triton deals the first axis to neighbouring threads where several
have a stride: so neighbours read and write neighbouring words.
"""

from __future__ import annotations

import triton
import triton.language as tl

_GUARDS = tl.constexpr(-0x77777778)  # 0x88888888: a nibble's fourth bit
SIGNS = tl.constexpr(0x40404040)


@triton.jit
def _permute(low, high, selectors):
    """PTX prmt: four bytes of the eight in (low, high). A selector's top bit spreads the sign."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [low, high, selectors],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def pick_bytes(low, high, codes, PTX: tl.constexpr):
    """Byte j: that of the eight in (low, high) which magnitude j of the low half-word numbers."""
    if PTX:
        picked = _permute(low, high, codes & 0x7777)
    else:
        picked = tl.zeros_like(codes)
        for j in tl.static_range(4):
            code = codes >> (4 * j)
            table = tl.where((code & 4) != 0, high, low)
            picked |= ((table >> ((code & 3) * 8)) & 0xFF) << (8 * j)
    return picked


@triton.jit
def signed_bytes(low, high, codes, signs, PTX: tl.constexpr):
    """`pick_bytes` with the codes' signs as top bits; signs is 0x40404040, or 0 to drop them."""
    if PTX:  # a positive code picks from signs, a negative one the spread sign of that, 0
        negative = (_permute(signs, signs, codes) << 1) ^ (signs << 1)
    else:
        negative = ((codes & 0x8) << 4) | ((codes & 0x80) << 8)
        negative |= ((codes & 0x800) << 12) | ((codes & 0x8000) << 16)
        negative &= signs << 1
    return pick_bytes(low, high, codes, PTX) | negative


@triton.jit
def merge_bytes(low, high, PTX: tl.constexpr):
    """(low0 high0 low1 high1, low2 high2 low3 high3): bytes of two words, first byte lowest."""
    if PTX:
        near = _permute(low, high, tl.full([1, 1, 1], 0x5140, tl.int32))
        far = _permute(low, high, tl.full([1, 1, 1], 0x7362, tl.int32))
    else:
        near = (low & 0xFF) | ((low & 0xFF00) << 8) | ((high & 0xFF) << 8) | ((high & 0xFF00) << 16)
        far = ((low >> 16) & 0xFF) | ((low >> 8) & 0xFF0000)
        far |= ((high >> 8) & 0xFF00) | (high & -0x1000000)
    return near, far


@triton.jit
def _greater(a, b):
    """The greater magnitude, nibble by nibble; the fourth bits are clear."""
    not_less = ((a | _GUARDS) - b) & _GUARDS
    keep = not_less - ((not_less >> 3) & 0x11111111)
    return (a & keep) | (b & ~keep)


@triton.jit
def largest_magnitude(words):
    """[U, R, W] -> [U, R]: the largest of the 8 W magnitude codes, 0 to 7."""
    U: tl.constexpr = words.shape[0]
    R: tl.constexpr = words.shape[1]
    top = words & 0x77777777
    if words.shape[2] == 4:
        a, b = tl.split(tl.reshape(top, [U, R, 2, 2]))
        top = _greater(a, b)
    if words.shape[2] >= 2:
        a, b = tl.split(top)
        top = _greater(a, b)
    else:
        top = tl.reshape(top, [U, R])
    top = _greater(top, (top >> 16) & 0x7777)
    top = _greater(top, top >> 8)
    return _greater(top, top >> 4) & 7


@triton.jit
def words_at(first_ptr, index, W: tl.constexpr):
    """Pointers [U, R, W] to the W words from W * index [U, R] on."""
    return first_ptr + (index * W)[:, :, None] + tl.arange(0, W)[None, None, :]


@triton.jit
def bytes_of(words, low, high, signs, PTX: tl.constexpr):
    """[U, R, W] -> [U, R, 2 W]: four bytes a word, picked from the tables [U, R]."""
    U: tl.constexpr = words.shape[0]
    R: tl.constexpr = words.shape[1]
    W: tl.constexpr = words.shape[2]
    low, high, signs = low[:, :, None], high[:, :, None], signs[:, :, None]
    even = signed_bytes(low, high, words, signs, PTX)
    odd = signed_bytes(low, high, words >> 16, signs, PTX)
    return tl.reshape(tl.join(even, odd), [U, R, 2 * W])
