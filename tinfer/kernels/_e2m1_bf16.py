"""e2m1 codes of values that are bf16, in half precision, two at a time.

For x in bf16 (8 significant bits) and a scale s of at most 4 bits, x / s is either one of the
values where rounding to e2m1 ties, or at least 2^-8 of it away from every one. So the quotient may
be off by 2^-12 as long as it hits the ties themselves, and that is what rounding an fp32
approximation to fp16 gives: 11 bits restore every tie exactly and move nothing across one. The
same holds for amax / 6 and the ties of e4m3.

With q = |x / s|, the code 0..7 is the nearest integer, ties to even, to the least of

    2q        steps of 1/2 up to 2
    q + 2     steps of 1 up to 4
    q/2 + 4   steps of 2 beyond

each of which one fp16 multiply-add onto 1024 rounds, leaving the code in the low bits.
`tests/kernels/test_kv_cache.py` compares all pairs of bf16 magnitudes and scales.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.formats import E2M1_AMAX_FLOOR_E4M3, E2M1_MAX
from tinfer.kernels._jit import e4m3_decode, e4m3_encode
from tinfer.kernels._quant import group_scale

_FLOOR = tl.constexpr(E2M1_AMAX_FLOOR_E4M3)
_SIXTH = tl.constexpr(1.0 / E2M1_MAX)


@triton.jit
def e2m1_scale(amax, SCALE: tl.constexpr, NATIVE: tl.constexpr):
    """amax of bf16 values, NaN kept -> (scale as stored, 2 / scale, off by an ulp at most)."""
    if SCALE == "e4m3":
        sixth = tl.minimum(tl.maximum(amax, _FLOOR) * _SIXTH, 512.0)  # 448 is the most e4m3 has
        sixth = sixth.to(tl.float16).to(tl.float32)
        stored = e4m3_encode(tl.where(amax == amax, sixth, float("nan")), NATIVE)
        twice = 2.0 / e4m3_decode(stored, NATIVE)
    else:
        stored, _, inverse = group_scale(amax, "e2m1", SCALE)
        twice = inverse * 2.0
    return stored, twice


def _assembly() -> str:
    """PTX: even $1..$4, odd $5..$8, 2 / scale $9..$12 -> 8 codes in $0."""
    lines = [
        "{ .reg .f32 a, b; .reg .b32 h<4>, m<4>, z<2>, q, r, s, y;",
        ".reg .b32 k<6>; mov.b32 k0, 0x64006400; mov.b32 k1, 0x38003800; mov.b32 k2, 0x64026402;",
        "mov.b32 k3, 0x34003400; mov.b32 k4, 0x64046404; mov.b32 k5, 0x64076407;",
    ]
    for i in range(4):  # 2q of a pair, then the least of 1024 + the three lines and 1031
        lines += [
            f"mul.f32 a, ${1 + i}, ${9 + i}; mul.f32 b, ${5 + i}, ${9 + i};",
            f"cvt.rn.f16x2.f32 h{i}, b, a; and.b32 y, h{i}, 0x7fff7fff;",
            "add.rn.f16x2 q, y, k0; fma.rn.f16x2 r, y, k1, k2; fma.rn.f16x2 s, y, k3, k4;",
            f"min.f16x2 q, q, r; min.f16x2 s, s, k5; min.f16x2 m{i}, q, s;",
        ]
    for i in range(2):  # the codes of two pairs as bytes, evens first, and their signs
        lines += [
            f"prmt.b32 z{i}, m{2 * i}, m{2 * i + 1}, 0x6240;",
            f"prmt.b32 y, h{2 * i}, h{2 * i + 1}, 0x7351; shr.b32 y, y, 4;",
            f"and.b32 y, y, 0x08080808; and.b32 z{i}, z{i}, 0x07070707; or.b32 z{i}, z{i}, y;",
        ]
    lines.append("prmt.b32 q, z0, z1, 0x5410; prmt.b32 r, z0, z1, 0x7632;")
    lines.append("shl.b32 r, r, 4; or.b32 $0, q, r; }")
    return "\n".join(lines)


_ASSEMBLY = tl.constexpr(_assembly())


@triton.jit
def e2m1_bytes(x, twice, PTX: tl.constexpr):
    """fp32 [N, 2n] that holds bf16 values, [N] of 2 / scale -> packed codes uint8 [N, n].

    As the cast of the references: a value that rounds to zero keeps its sign, a group whose scale
    is NaN is all sevens. PTX needs n to be a multiple of 4.
    """
    twice = twice[:, None]
    if PTX:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        packed = tl.inline_asm_elementwise(
            _ASSEMBLY, "=r,r,r,r,r,r,r,r,r,r,r,r,r",
            [even, odd, tl.broadcast_to(twice, even.shape)],
            dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        q2 = tl.minimum(tl.abs(x) * twice, 13.0).to(tl.float16)  # 13 is past the last step; NaN too
        least = tl.minimum(q2 + 1024.0, tl.minimum(q2 * 0.5 + 1026.0, q2 * 0.25 + 1028.0))
        sign = tl.where(twice == twice, 8, 0).to(tl.uint32)
        sign = (x.to(tl.uint32, bitcast=True) >> 28) & sign
        code = (least.to(tl.uint16, bitcast=True) & 7) | sign.to(tl.uint16)
        low, high = tl.split(tl.reshape(code, [x.shape[0], x.shape[1] // 2, 2]))
        packed = (low | (high << 4)).to(tl.uint8)
    return packed
