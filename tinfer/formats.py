"""The release's number formats: fp8 (e4m3), fp4 (e2m1) and ue8m0, one definition each.

Everything travels as uint8 and is encoded and decoded with integer arithmetic and exact
power-of-two scalings, so nothing depends on a device's or a torch build's fp8 types.

Source: OCP 8-bit floating point specification (e4m3fn), OCP microscaling formats (e2m1, e8m0).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
GROUP = 32  # columns that share one scale, in weights and activations of the release
# Smallest amax that a scale is derived from; keeps all-zero groups finite.
E4M3_AMAX_FLOOR = 1e-4
E2M1_AMAX_FLOOR = 6.0 * 2.0**-126  # ue8m0 scales
E2M1_AMAX_FLOOR_E4M3 = 6.0 * 2.0**-9  # e4m3 scales


# ---------------------------------------------------------------- decoding tables
@functools.cache
def _e4m3_table(device: torch.device) -> Tensor:
    code = torch.arange(256, dtype=torch.int32)
    exponent, mantissa = (code >> 3) & 15, (code & 7).float()
    normal = torch.ldexp(1.0 + mantissa / 8.0, exponent - 7)
    value = torch.where(exponent == 0, torch.ldexp(mantissa, torch.tensor(-9)), normal)
    value = torch.where(code >= 128, -value, value)
    return value.masked_fill((code & 127) == 127, float("nan")).to(device)


@functools.cache
def _e2m1_table(device: torch.device) -> Tensor:
    magnitude = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return torch.cat([magnitude, -magnitude]).to(device)


@functools.cache
def _ue8m0_table(device: torch.device) -> Tensor:
    value = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127).float()
    value[255] = float("nan")
    return value.to(device)


def as_bytes(x: Tensor) -> Tensor:
    """A one-byte tensor (uint8, int8, float8_*) viewed as uint8."""
    if x.element_size() != 1:
        raise TypeError(f"expected a tensor of one-byte elements, got {x.dtype}")
    return x.view(torch.uint8)


def decode_e4m3(code: Tensor) -> Tensor:
    """uint8 e4m3fn codes -> fp32 (0x7F and 0xFF are NaN)."""
    return _e4m3_table(code.device)[code.long()]


def decode_e2m1(code: Tensor) -> Tensor:
    """uint8 e2m1 codes 0..15 -> fp32; 8 is -0."""
    return _e2m1_table(code.device)[code.long()]


def decode_ue8m0(code: Tensor) -> Tensor:
    """uint8 exponents -> fp32 2^(code-127); 0 is 2^-127 (a subnormal), 255 is NaN."""
    return _ue8m0_table(code.device)[code.long()]


# ---------------------------------------------------------------- encoding
def _bits(x: Tensor) -> Tensor:
    return x.float().contiguous().view(torch.int32)


def _pow2(exponent: Tensor) -> Tensor:
    """2^exponent for int32 exponents in the normal range, built from bits."""
    return ((exponent + 127) << 23).view(torch.float32)


def encode_e4m3(x: Tensor) -> Tensor:
    """fp32 -> uint8 e4m3fn: nearest, ties to even, saturating at 448; -0 is kept.

    NaN becomes 0x7F whatever its sign, as in the hardware conversions.
    """
    bits = _bits(x)
    magnitude = x.float().abs().clamp(max=E4M3_MAX)
    exponent = (((bits >> 23) & 255) - 127).clamp(-6, 8)
    steps = torch.round(magnitude * _pow2(3 - exponent)).nan_to_num(0.0).int()
    code = (((exponent + 7) << 3) + steps - 8) | ((bits >> 24) & 128)
    return code.masked_fill(x.isnan(), 127).to(torch.uint8)


def encode_e2m1(x: Tensor) -> Tensor:
    """fp32 -> uint8 e2m1 codes 0..15: nearest, ties to the even code, saturating at 6.

    A negative value that rounds to zero keeps its sign (code 8). NaN becomes +6.
    """
    bits = _bits(x)
    magnitude = x.float().abs().nan_to_num(E2M1_MAX).clamp(max=E2M1_MAX)
    exponent = (((magnitude.view(torch.int32) >> 23) & 255) - 127).clamp(0, 2)
    steps = torch.round(magnitude * _pow2(1 - exponent)).int()
    code = (steps + 2 * exponent) | ((bits >> 28) & 8)
    return code.masked_fill(x.isnan(), 7).to(torch.uint8)


def encode_ue8m0(x: Tensor) -> Tensor:
    """fp32 > 0 -> uint8 exponent of the smallest power of two that is >= x.

    Works on the exponent bits, so an exact power of two is never bumped. Values at or below
    2^-127 give 0, values above 2^127 give 255 (NaN), as does NaN.
    """
    bits = _bits(x)
    code = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
    code = torch.where(bits <= 0x400000, 0, code)
    return torch.where(x.isnan(), 255, code.clamp(0, 255)).to(torch.uint8)


def pack_e2m1(code: Tensor) -> Tensor:
    """codes [..., 2n] -> bytes [..., n]; the even column sits in the low nibble."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """bytes [..., n] -> codes [..., 2n], low nibble first."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


# ---------------------------------------------------------------- quantized weights
@dataclass(frozen=True)
class Fp8Block32:
    """A dense weight: e4m3 `[N, K]` with one ue8m0 per 32x32 tile, tiles padded at the edge."""

    weight: Tensor  # uint8 [N, K]
    scale: Tensor  # uint8 [ceil(N/32), ceil(K/32)]

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Exact in bf16: an e4m3 value times a power of two."""
        n, k = self.weight.shape
        scale = decode_ue8m0(self.scale).repeat_interleave(GROUP, 0)[:n]
        scale = scale.repeat_interleave(GROUP, 1)[:, :k]
        return (decode_e4m3(self.weight) * scale).to(dtype)


@dataclass(frozen=True)
class Fp4Group32:
    """Expert weights: e2m1 packed two a byte `[..., N, K/2]`, one ue8m0 per row per 32 columns."""

    weight: Tensor  # uint8 [..., N, K/2]
    scale: Tensor  # uint8 [..., N, K/32]

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Exact in bf16: an e2m1 value times a power of two."""
        scale = decode_ue8m0(self.scale).repeat_interleave(GROUP, -1)
        return (decode_e2m1(unpack_e2m1(self.weight)) * scale).to(dtype)


@dataclass(frozen=True)
class Fp8Block128:
    """A requantized weight: e4m3 `[..., N, K]`, one fp32 scale per 128x128 tile (lossy)."""

    weight: Tensor  # uint8 [..., N, K]
    scale: Tensor  # fp32 [..., ceil(N/128), ceil(K/128)]

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """One rounding of value times scale."""
        n, k = self.weight.shape[-2:]
        scale = self.scale.repeat_interleave(128, -2)[..., :n, :].repeat_interleave(128, -1)
        return (decode_e4m3(self.weight) * scale[..., :k]).to(dtype)
