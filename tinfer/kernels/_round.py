"""Rounding to bf16 and back two values at a time.

A value that is needed both as bf16 and, rounded, in fp32 compiles to one scalar conversion each,
which NVIDIA's GPUs do at an eighth of their rate; the packed conversion is as fast as any other
instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._jit import round_bf16, to_bf16, to_fp32

_PACKED = tl.constexpr(
    "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2;"
    " shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }"
)


@triton.jit
def round_bf16_packed(x, NATIVE: tl.constexpr):
    """fp32 -> the nearest bf16 value, kept in fp32; as `round_bf16`. NATIVE: PTX of sm_80 on."""
    if NATIVE:
        bits = tl.inline_asm_elementwise(
            _PACKED,
            "=r,=r,r,r",
            [x.to(tl.int32, bitcast=True)],
            dtype=tl.int32,
            is_pure=True,
            pack=2,
        )
        return bits.to(tl.float32, bitcast=True)
    return round_bf16(x)


@triton.jit
def pairs_to_bf16(x, NATIVE: tl.constexpr):
    """fp32 -> bf16 as `to_bf16`, two values an instruction, which is not done twice where the
    result is stored and, by `pairs_to_fp32`, also computed with. NATIVE: PTX of sm_80 on."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return to_bf16(x)


@triton.jit
def pairs_to_fp32(x, NATIVE: tl.constexpr):
    """bf16 -> fp32, exact."""
    if NATIVE:
        bits = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=r,r", [x],
            dtype=tl.int32, is_pure=True, pack=2,
        )  # fmt: skip
        return bits.to(tl.float32, bitcast=True)
    return to_fp32(x)
