"""The kernel of the rotary embedding: pairs of adjacent channels of some heads of some tokens.

Compiled without fused multiply-add it equals the reference bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._jit import to_bf16, to_fp32


@triton.jit(do_not_specialize=["tokens"])
def rotary_kernel(
    x, cos_sin, positions, tokens, heads, stride_t, stride_h,
    INVERSE: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """x points at the first rotated channel; P is HALF padded to a power of two."""
    across = (heads + BLOCK_H - 1) // BLOCK_H
    tiles = (tokens + BLOCK_T - 1) // BLOCK_T * across
    pair = tl.arange(0, P)[None, None, :]  # [1, 1, P]
    channel = tl.arange(0, 2 * P)[None, None, :]
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        block = tile // across
        token = (block * BLOCK_T + tl.arange(0, BLOCK_T))[:, None, None]  # [BT, 1, 1]
        head = ((tile - block * across) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :, None]
        live = token < tokens
        position = tl.load(positions + token, mask=live, other=0)
        at = x + token.to(tl.int64) * stride_t + head.to(tl.int64) * stride_h + channel
        inside = live & (head < heads) & (channel < 2 * HALF)
        value = to_fp32(tl.load(at, mask=inside, other=0.0))
        angle = cos_sin + position * (2 * HALF) + pair
        known = live & (pair < HALF)
        cos = tl.load(angle, mask=known, other=0.0)
        sin = tl.load(angle + HALF, mask=known, other=0.0)
        if INVERSE:
            sin = -sin
        a, b = tl.split(tl.reshape(value, [BLOCK_T, BLOCK_H, P, 2]))
        turned = tl.interleave(a * cos - b * sin, a * sin + b * cos)
        tl.store(at, to_bf16(turned), mask=inside)
