"""Device functions of integer sampling: weights, thresholds, exact division, random words.

They repeat the definitions of `tinfer.compat.masses` in 32-bit arithmetic. exp2: the Horner
step floor(acc * r / 2^24) with r < 2^24 is the high half of acc * (r << 8), and every acc but
the last stays below 2^32 (checked for all 2^24 r). Division: with R = floor((2^63 - 1) / W) and
W >= 2^31, the high half of w * R is floor(w * 2^31 / W) or one less, settled by the remainder.

All kernels that use them are launched with `enable_fp_fusion=False`; nothing in here can be
contracted, but the bins that two kernels must agree on could.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.compat import masses as ref

LOG2E = tl.constexpr(ref.LOG2E)
GREEDY_BELOW = tl.constexpr(ref.GREEDY_BELOW)
OK = tl.constexpr(ref.OK)
NOT_FINITE = tl.constexpr(ref.NOT_FINITE)
NO_TOKEN = tl.constexpr(ref.NO_TOKEN)
BAD_PARAMETER = tl.constexpr(ref.BAD_PARAMETER)
INFINITY = tl.constexpr(float("inf"))
NO_LIMIT = tl.constexpr(2**31 - 1)  # a top-k that is off
DEAD = tl.constexpr(-31 * 2**24 - 1)  # `octaves_q24` of logits without weight: this or less


@triton.jit
def slope_of(temperature):
    """fp32 log2(e) / temperature, by IEEE division."""
    return tl.div_rn(tl.full([], LOG2E, tl.float32), temperature)


@triton.jit
def _horner(acc, r, C: tl.constexpr):
    """uint32 floor(acc * r / 2^32) + C, written so that it becomes one multiply-add."""
    return ((acc.to(tl.uint64) * r.to(tl.uint64) + (C << 32)) >> 32).to(tl.uint32)


@triton.jit
def octaves_q24(x, top, slope):
    """int32 floor(y * 2^24) of fp32 logits, DEAD or below where the weight is 0.

    `top` is the row's maximum. Below y = -31 the weight is 0 before -32 is reached.
    """
    y = tl.maximum((x - top) * slope, -32.0)  # also where y is NaN
    return tl.floor(y * 16777216.0).to(tl.int32)


@triton.jit
def _shifted(fraction, q):
    """uint32 (1 + fraction / 2^32) * 2^(31 + floor(q / 2^24)), rounded down."""
    one_to_two = fraction.to(tl.uint64) | (1 << 32)
    shift = (1 - (q >> 24)).to(tl.uint32, bitcast=True)
    return (one_to_two >> shift.to(tl.uint64)).to(tl.uint32)


@triton.jit
def weight_of(q):
    """uint32 weights of `octaves_q24`; that of the maximum, q = 0, is 2^31."""
    r = q.to(tl.uint32, bitcast=True) << 8
    acc = _horner(tl.full(r.shape, 0x00016B1B, tl.uint32), r, 0x00095F92)
    acc = _horner(acc, r, 0x005802C2)
    acc = _horner(acc, r, 0x027608DC)
    acc = _horner(acc, r, 0x0E35981A)
    acc = _horner(acc, r, 0x3D7F7986)
    acc = _horner(acc, r, 0xB1721816)
    return _shifted(tl.umulhi(acc, r), q)


@triton.jit
def _three_steps(y):
    """uint32 the third Horner step of `weight_of` less its constant, plus 0x57000000.

    fp32 by rounding modes, where nothing is lost: what is below floor(y) is a multiple of 2^-24
    after rounding down; acc * r / 2^24, of an acc below 2^23, is added to 2^23 and rounded to zero
    there, all scaled by 2^24. Checked for every fp32 y.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 below, r, acc;
        add.rm.f32 below, $1, 0f4B400000;
        sub.rn.f32 below, below, 0f4B400000;
        sub.rm.f32 r, $1, below;
        fma.rz.f32 acc, r, 0f53B58D80, 0f57095F92;
        sub.rn.f32 acc, acc, 0f57000000;
        fma.rz.f32 acc, acc, r, 0f575802C2;
        sub.rn.f32 acc, acc, 0f57000000;
        fma.rz.f32 $0, acc, r, 0f57000000;
        }""",
        "=r,f",
        [y],
        tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def octaves_and_weight(x, top, slope, NATIVE: tl.constexpr):
    """`octaves_q24` and its `weight_of`; NATIVE: with PTX, on which both depend less.

    The multiplier that gives high halves is several times slower than that of fp32.
    """
    if NATIVE:
        y = tl.maximum((x - top) * slope, -32.0)
        q = tl.floor(y * 16777216.0).to(tl.int32)
        r = q.to(tl.uint32, bitcast=True) << 8
        acc = _three_steps(y) - (0x57000000 - 0x027608DC)
        acc = tl.umulhi(acc, r) + 0x0E35981A
        acc = tl.umulhi(acc, r) + 0x3D7F7986
        acc = tl.umulhi(acc, r) + 0xB1721816
        w = _shifted(tl.umulhi(acc, r), q)
    else:
        q = octaves_q24(x, top, slope)
        w = weight_of(q)
    return q, w


@triton.jit
def weight_q31(x, top, slope):
    """fp32 logits -> uint32 weights; `top` is the row's maximum, whose weight is 2^31."""
    return weight_of(octaves_q24(x, top, slope))


@triton.jit
def lane_sum(x, SIZE: tl.constexpr):
    """[SIZE] -> sums of 4 neighbours, which one thread holds: fewer accumulators in a loop."""
    LANE: tl.constexpr = min(SIZE, 4)
    return tl.sum(tl.reshape(x, [SIZE // LANE, LANE]), axis=1)


@triton.jit
def share_24(top_p):
    """floor(top_p * 2^24), at most 2^24."""
    return tl.floor(tl.minimum(top_p, 1.0) * 16777216.0).to(tl.int32)


@triton.jit
def top_p_threshold(total, top_p):
    """int64 floor(total * share / 2^24) for totals below 2^48."""
    share = share_24(top_p).to(tl.int64)
    return (total >> 24) * share + (((total & 0xFFFFFF) * share) >> 24)


@triton.jit
def min_p_threshold(min_p):
    """uint32 ceil(min_p * 2^31)."""
    return tl.ceil(tl.minimum(min_p, 1.0) * 2147483648.0).to(tl.int64).to(tl.uint32)


@triton.jit
def top_k_limit(top_k, V):
    """int32 number of candidates that top-k keeps, NO_LIMIT when it is off."""
    return tl.where((top_k > 0) & (top_k < V), top_k, NO_LIMIT)


@triton.jit
def wants_cut(top_k, top_p, V):
    """Whether top-k or top-p can drop anything."""
    return ((top_k > 0) & (top_k < V)) | (share_24(top_p) < 16777216)


@triton.jit
def reciprocal(total):
    """uint32 R for `divide`; 2^31 <= total < 2^48."""
    return (9223372036854775807 // total).to(tl.uint32)


@triton.jit
def divide(w, total, inverse):
    """uint32 floor(w * 2^31 / total) for w <= 2^31 <= total."""
    quotient = tl.umulhi(w, inverse + tl.zeros_like(w))
    rest = (w.to(tl.int64) << 31) - quotient.to(tl.int64) * total
    return quotient + (rest >= total).to(tl.uint32)


@triton.jit
def is_bad(temperature, top_p, min_p):
    """Whether a parameter means nothing: NaN, negative, or an infinite temperature."""
    fine = (temperature >= 0) & (temperature < INFINITY) & (top_p >= 0) & (min_p >= 0)
    return fine == 0


@triton.jit
def first_word(seed, position, PURPOSE: tl.constexpr):
    """int64 in 0..2^32-1: word 0 of curand_init(seed, PURPOSE, 4 * position)."""
    low = position.to(tl.uint32)
    high = (position >> 32).to(tl.uint32)
    stream = tl.full([], PURPOSE, tl.uint32)
    word, _, _, _ = tl.philox(seed, low, high, stream, tl.full([], 0, tl.uint32))
    return word.to(tl.int64) & 0xFFFFFFFF
