"""Tiles for swapped matrix products: weights are the left operand and never leave registers.

A tensor-core fragment wants from a thread two rows (g and g + 8, g = lane / 4) and, along K, pairs
of columns that depend on t = lane % 4. The order of K within a product is free as long as both
operands agree, so a thread loads 16 consecutive bytes of a row (t-th of four such pieces), and
what those bytes hold, decoded in place, *is* its fragment: no shared memory, no shuffles.

    format     bytes -> columns a thread   block of K   pairs a 32-bit word holds
    "e2m1"     16 -> 32 (one scale group)      128      (0,4) (1,5) (2,6) (3,7)
    "e4m3"     16 -> 16                         64      (0,2) (1,3)
    "bf16"     16 -> 8                          32      (0,1)

Words carry the index n = ((r * WARPS) + warp) * 32 + lane, where r counts groups of 8 rows and
the warps of a program split K among themselves: warp w takes the blocks w, w + WARPS, ...
Shapes below: R = rows / 8, W = WARPS. Every layout is right on every device; on NVIDIA's no data
moves between threads.

Scales multiply pairs of bf16. `RAW` values are the stored value times 2^-120 (e4m3) or 2^-126
(e2m1); weight factors leave a factor 2^-LIFT to the accumulator, so that no scale from 2^-60 to
2^60 leaves bf16's range.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._jit import INTERPRET, _dot, bf16_mul

SIGNS = tl.constexpr(0x80008000)
LIFT = tl.constexpr(60)  # exponent left to the accumulator by `weight_factor`

# Columns that one thread's 16 bytes hold, by format.
PIECE = {"e2m1": 32, "e4m3": 16, "bf16": 8}


# ---------------------------------------------------------------- indices
@triton.jit
def lane_index(ROWS: tl.constexpr, WARPS: tl.constexpr):
    """(row, warp, t) of each n, int32 [ROWS/8 * WARPS * 32]."""
    n = tl.arange(0, ROWS * WARPS * 4)
    return (n // (32 * WARPS)) * 8 + ((n >> 2) & 7), (n >> 5) % WARPS, n & 3


@triton.jit
def token_index(TOKENS: tl.constexpr, WARPS: tl.constexpr, WORDS: tl.constexpr):
    """(token, warp, t, word group) of each n of a bf16 token tile, WORDS groups of 4 words."""
    n = tl.arange(0, TOKENS * WARPS * 4 * WORDS)
    rest = n // (32 * WARPS)
    token = (rest % (TOKENS // 8)) * 8 + ((n >> 2) & 7)
    return token, (n >> 5) % WARPS, n & 3, rest // (TOKENS // 8)


# ---------------------------------------------------------------- decoding words to pairs
@triton.jit
def pairs_e2m1(w):
    """uint32 [...] of 8 codes -> uint32 [..., 2, 2] of RAW bf16 pairs, indexed (j % 2, j / 2)."""
    high = w >> 8
    p0 = ((w & 0x000F000F) * 0x1040) & 0x81C081C0  # nibbles 0 and 4, twice: << 6 and << 12
    p1 = ((w & 0x00F000F0) * 0x0104) & 0x81C081C0
    p2 = ((high & 0x000F000F) * 0x1040) & 0x81C081C0
    p3 = ((high & 0x00F000F0) * 0x0104) & 0x81C081C0
    return tl.join(tl.join(p0, p1), tl.join(p2, p3))


@triton.jit
def pairs_e4m3(w):
    """uint32 [...] of 4 codes -> uint32 [..., 2] of RAW bf16 pairs."""
    p0 = ((w << 8) & SIGNS) | ((w << 4) & 0x07F007F0)
    p1 = (w & SIGNS) | ((w >> 4) & 0x07F007F0)
    return tl.join(p0, p1)


@triton.jit
def nan_pairs(p):
    """RAW e4m3 pairs with the NaN codes turned into bf16 NaN."""
    nan = ((p & 0x07F007F0) + 0x00100010) >> 11
    return p | ((nan & 0x00010001) * 0x7FC0)


@triton.jit
def _split_pairs(p):
    """uint32 [...] -> bf16 [..., 2], low half first."""
    low = (p & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high = (p >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _packed_mul(a, b):
    """bf16 pairs times bf16 pairs, one instruction a word."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }",
        "=r,r,r",
        [a, b],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _join_pairs(v):
    """bf16 [..., 2] -> uint32 [...]: the inverse of `_split_pairs`."""
    low, high = tl.split(v.to(tl.uint16, bitcast=True))
    return low.to(tl.uint32) | (high.to(tl.uint32) << 16)


@triton.jit
def scaled_words(p, factor, LOWERED: tl.constexpr, PACKED: tl.constexpr):
    """Pairs times a factor held twice in a word; exact by construction.

    LOWERED: `p` is RAW e4m3, lifted by 2^120 first so that every code 0..255 of a factor is right.
    """
    factor = tl.broadcast_to(factor, p.shape)
    lift = tl.full(p.shape, 0x7B807B80, tl.uint32)  # 2^120 twice
    if PACKED and not INTERPRET:
        if LOWERED:
            p = _packed_mul(p, lift)
        p = _packed_mul(p, factor)
    else:
        v = _split_pairs(p)
        if LOWERED:
            v = bf16_mul(v, _split_pairs(lift))
        p = _join_pairs(bf16_mul(v, _split_pairs(factor)))
    return p


@triton.jit
def twice(field):
    """A bf16 bit pattern -> the same pattern in both halves of a word."""
    return field | (field << 16)


@triton.jit
def weight_factor(code, RAW: tl.constexpr):
    """ue8m0 -> 2^(code - 127 + RAW - LIFT) twice in a word, clamped to bf16's normal range."""
    field = code.to(tl.int32) + (RAW - LIFT)
    return twice((tl.minimum(tl.maximum(field, 1), 254) << 7).to(tl.uint32))


@triton.jit
def token_factor(code):
    """ue8m0 -> 2^(code - 127) twice in a word, all codes: 0 is subnormal, 255 is NaN."""
    c = code.to(tl.uint32)
    field = tl.where(c == 0, 0x40, tl.where(c == 255, 0x7FC0, c << 7))
    return twice(field.to(tl.uint32))


# ---------------------------------------------------------------- fragments
@triton.jit
def _fragment(v, ROWS: tl.constexpr, W: tl.constexpr, FMT: tl.constexpr, KWIDTH: tl.constexpr):
    """bf16 [R*W*32, 4 words, pairs.., 2] -> [W, ROWS, block of K] in a fragment's order of K.

    KWIDTH, the consecutive K of a thread, is the compiler's choice for the dot: 4 for the
    warp-level instruction when 16-bit halves are joined, 2 for the warp-group one.
    """
    R: tl.constexpr = ROWS // 8
    if FMT == "e2m1":
        v = tl.reshape(v, (R, W, 8, 4, 4, 2, 2, 2))  # r w g t i j0 j1 h
        if KWIDTH == 2:
            v = tl.permute(v, (1, 0, 2, 4, 6, 5, 3, 7))
        else:
            v = tl.permute(v, (1, 0, 2, 4, 5, 3, 6, 7))
        v = tl.reshape(v, (W, ROWS, 128))
    else:
        PARTS: tl.constexpr = 4 if FMT == "e4m3" else 2
        v = tl.reshape(v, (R, W, 8, 4, PARTS, 2, 2))  # r w g t i j h
        if KWIDTH == 2:
            v = tl.permute(v, (1, 0, 2, 4, 5, 3, 6))
        else:
            v = tl.permute(v, (1, 0, 2, 4, 3, 5, 6))
        v = tl.reshape(v, (W, ROWS, PARTS * 16))
    return v


@triton.jit
def decoded(words, factor, FMT: tl.constexpr, PACKED: tl.constexpr):
    """uint32 [n, 4] of codes times factor [n, 1] -> bf16 [n, 4 words * pairs, 2]."""
    PAIRS: tl.constexpr = 16 if FMT == "e2m1" else 8
    p = pairs_e2m1(words) if FMT == "e2m1" else pairs_e4m3(words)
    p = tl.reshape(p, (words.shape[0], PAIRS))
    return _split_pairs(scaled_words(p, factor, False, PACKED))


@triton.jit
def weight_tile(
    words,  # uint32 [R*W*32, 4]
    factor,  # uint32 [R*W*32], or [W*32] where all rows share one (a scale tile is 32 rows tall)
    ROWS: tl.constexpr,
    W: tl.constexpr,
    FMT: tl.constexpr,
    KWIDTH: tl.constexpr,
    PACKED: tl.constexpr,
):
    """bf16 [W, ROWS, block]: weight rows, decoded, times 2^-LIFT where they were encoded."""
    R: tl.constexpr = ROWS // 8
    if FMT == "bf16":
        v = _split_pairs(words)
    else:
        if FMT == "e2m1":
            p = tl.reshape(pairs_e2m1(words), (R, W * 32, 16))
        else:
            p = tl.reshape(pairs_e4m3(words), (R, W * 32, 8))
        if factor.shape[0] == W * 32:
            factor = factor[None, :, None]
        else:
            factor = tl.reshape(factor, (R, W * 32))[:, :, None]
        v = _split_pairs(scaled_words(p, factor, False, PACKED))
    return _fragment(v, ROWS, W, FMT, KWIDTH)


@triton.jit
def coded_token_tile(
    words,  # uint32 [R*W*32, 4] of e4m3 codes
    factor,  # uint32 [R*W*32]
    TOKENS: tl.constexpr,
    W: tl.constexpr,
    KWIDTH: tl.constexpr,
    PACKED: tl.constexpr,
):
    """bf16 [W, TOKENS, 64]: fp8 activations for an "e4m3" weight tile; NaN codes give NaN."""
    R: tl.constexpr = TOKENS // 8
    p = tl.reshape(nan_pairs(pairs_e4m3(words)), (R, W * 32, 8))
    factor = tl.reshape(factor, (R, W * 32))[:, :, None]
    v = _split_pairs(scaled_words(p, factor, True, PACKED))
    return _fragment(v, TOKENS, W, "e4m3", KWIDTH)


@triton.jit
def token_tile(
    words,  # uint32 [G*R*W*32, 4] with G groups of 4 words a thread, see `token_index`
    TOKENS: tl.constexpr,
    W: tl.constexpr,
    FMT: tl.constexpr,  # of the weights
    KWIDTH: tl.constexpr,
):
    """bf16 [W, TOKENS, block]: bf16 activations for a weight tile of format FMT.

    For "e2m1" weights the columns must lie in memory in the order 0 4 1 5 2 6 3 7 of each eight.
    """
    R: tl.constexpr = TOKENS // 8
    G: tl.constexpr = words.shape[0] // (R * W * 32)
    if FMT == "bf16":
        v = _fragment(_split_pairs(words), TOKENS, W, FMT, KWIDTH)
    else:
        if FMT == "e4m3":  # words (0,1) (2,3) -> pairs (0,2) (1,3)
            first, second = tl.split(tl.reshape(words, (G * R * W * 32, 2, 2)))
            low = (first & 0xFFFF) | (second << 16)
            words = tl.join(low, (first >> 16) | (second & 0xFFFF0000))
        # "e4m3": i1 r w g t i0 j h;  "e2m1": i r w g t j1 j0 h
        v = tl.reshape(_split_pairs(words), (G, R, W, 8, 4, 2, 2, 2))
        if KWIDTH == 2:
            v = tl.permute(v, (2, 1, 3, 0, 5, 6, 4, 7))
        elif FMT == "e2m1":  # an instruction's two registers of tokens are then neighbours
            v = tl.permute(v, (2, 1, 3, 0, 6, 4, 5, 7))
        else:
            v = tl.permute(v, (2, 1, 3, 0, 5, 4, 6, 7))
        v = tl.reshape(v, (W, TOKENS, G * 32))
    return v


@triton.jit
def accumulate(acc, weights, tokens):
    """acc [W, ROWS, TOKENS] + weights [W, ROWS, K] @ tokens [W, TOKENS, K] transposed, fp32."""
    return _dot(weights, tl.permute(tokens, (0, 2, 1)), acc)
