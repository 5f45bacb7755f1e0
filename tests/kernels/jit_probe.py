"""A kernel that applies one device function of `tinfer.kernels._jit`, and values to try it on."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.formats import decode_e2m1, decode_e4m3
from tinfer.kernels._jit import (
    _dot,
    bf16_mul,
    e2m1_decode,
    e2m1_encode,
    e2m1_round,
    e2m1_to_bf16_raw,
    e4m3_decode,
    e4m3_encode,
    e4m3_round,
    e4m3_to_bf16_raw,
    nibbles_pack,
    nibbles_unpack,
    round_bf16,
    to_bf16,
    to_fp32,
    ue8m0_decode,
    ue8m0_encode,
    ue8m0_reciprocal,
    ue8m0_to_bf16_raw,
)

BLOCK = 4096


@triton.jit
def _probe_kernel(x_ptr, y_ptr, n, WHAT: tl.constexpr, NATIVE: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + i, mask=i < n, other=0)
    if WHAT == "e4m3_encode":
        y = e4m3_encode(x, NATIVE)
    elif WHAT == "e4m3_round":
        y = e4m3_round(x, NATIVE)
    elif WHAT == "e4m3_decode":
        y = e4m3_decode(x, NATIVE)
    elif WHAT == "e4m3_to_bf16":
        y = bf16_mul(e4m3_to_bf16_raw(x), ue8m0_to_bf16_raw(tl.full([N], 127, tl.uint8), 120))
    elif WHAT == "e2m1_encode":
        y = e2m1_encode(x)
    elif WHAT == "e2m1_round":
        y = e2m1_round(x)
    elif WHAT == "e2m1_decode":
        y = e2m1_decode(x)
    elif WHAT == "e2m1_to_bf16":
        y = bf16_mul(e2m1_to_bf16_raw(x), ue8m0_to_bf16_raw(tl.full([N], 127, tl.uint8), 126))
    elif WHAT == "ue8m0_encode":
        y = ue8m0_encode(x)
    elif WHAT == "ue8m0_decode":
        y = ue8m0_decode(x)
    elif WHAT == "ue8m0_reciprocal":
        y = ue8m0_reciprocal(x)
    elif WHAT == "ue8m0_to_bf16":
        y = ue8m0_to_bf16_raw(x, 0)
    elif WHAT == "to_bf16":
        y = to_bf16(x)
    elif WHAT == "round_bf16":
        y = round_bf16(x)
    elif WHAT == "nibbles":
        packed = nibbles_pack(tl.reshape(x & 15, [N // 64, 64]))
        y = tl.reshape(nibbles_unpack(packed), [N])
    else:
        tl.static_assert(WHAT == "to_fp32")
        y = to_fp32(x)
    tl.store(y_ptr + i, y, mask=i < n)


@triton.jit
def _pack_kernel(x_ptr, y_ptr, ROWS: tl.constexpr, N: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None]
    x = tl.load(x_ptr + row * N + tl.arange(0, N)[None, :])
    tl.store(y_ptr + row * (N // 2) + tl.arange(0, N // 2)[None, :], nibbles_pack(x))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, PRECISION: tl.constexpr):
    i, j = tl.arange(0, M)[:, None], tl.arange(0, M)[None, :]
    a, b = tl.load(a_ptr + i * M + j), tl.load(b_ptr + i * M + j)
    c = _dot(a, b, tl.full([M, M], 1.0, tl.float32), PRECISION)
    tl.store(c_ptr + i * M + j, c)


def probe(what: str, x: Tensor, dtype: torch.dtype, native: bool = False) -> Tensor:
    """`what` of every value of x."""
    y = x.new_empty(x.shape, dtype=dtype)
    # The interpreter takes as long for a program as for a million values.
    block = BLOCK if x.is_cuda else min(1 << 20, 1 << (x.numel() - 1).bit_length())
    grid = (triton.cdiv(x.numel(), block),)
    _probe_kernel[grid](x, y, x.numel(), WHAT=what, NATIVE=native, N=block)
    return y


def pack(x: Tensor) -> Tensor:
    """`nibbles_pack` of codes [rows, n], both powers of two."""
    y = x.new_empty((x.shape[0], x.shape[1] // 2))
    _pack_kernel[(1,)](x, y, ROWS=x.shape[0], N=x.shape[1])
    return y


def dot(a: Tensor, b: Tensor, precision: str = "ieee") -> Tensor:
    """1 + a @ b of square matrices, by `_dot`."""
    c = a.new_empty(a.shape, dtype=torch.float32)
    _dot_kernel[(1,)](a, b, c, M=a.shape[0], PRECISION=precision)
    return c


# ---------------------------------------------------------------- values
def all_bf16(device: str) -> Tensor:
    """Every bf16, as fp32."""
    return (torch.arange(1 << 16, device=device, dtype=torch.int32) << 16).view(torch.float32)


def random_fp32(count: int, seed: int, device: str) -> Tensor:
    """Random bit patterns: every exponent, NaN and subnormals alike."""
    g = torch.Generator(device=device).manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=g, device=device)
    return bits.int().view(torch.float32)


def ties(device: str) -> Tensor:
    """Midpoints of neighbouring e4m3 and e2m1 values and their 9 fp32 neighbours on each side.

    Scaled by 2^-12 .. 2^12, both signs.
    """
    code = torch.arange(127, device=device)
    e4m3, e2m1 = decode_e4m3(code), decode_e2m1(code[:8])
    values = torch.cat([e4m3, (e4m3[1:] + e4m3[:-1]) / 2, e2m1, (e2m1[1:] + e2m1[:-1]) / 2])
    scaled = values * 2.0 ** torch.arange(-12, 13, device=device)[:, None]
    near = scaled.flatten().view(torch.int32)[:, None] + torch.arange(-9, 10, device=device)
    near = near.clamp(min=0).int().flatten().view(torch.float32)
    return torch.cat([near, -near])


def same(actual: Tensor, expected: Tensor) -> int:
    """How many elements differ in bits, all NaN taken as one."""
    differ = actual != expected
    if expected.is_floating_point():
        view = torch.int32 if expected.element_size() == 4 else torch.int16
        differ = actual.view(view) != expected.view(view)
        differ &= ~(actual.isnan() & expected.isnan())
    return int(differ.sum())
