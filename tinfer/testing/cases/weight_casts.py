"""Cases of the weight conversions: batches of experts, partial tiles, the model's own matrices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from tinfer.compat.weight_casts import requantize_fp8
from tinfer.formats import Fp4Group32, Fp8Block32, Fp8Block128
from tinfer.testing.cases import Arguments, Case
from tinfer.testing.cases.casts import same_bits

Make = Callable[[Generator], Arguments]


# ---------------------------------------------------------------- weights
def _bytes(g: Generator, *shape: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, generator=g, device=g.device, dtype=torch.uint8)


def fp4(g: Generator, *shape: int, spread: int = 6) -> Fp4Group32:
    """Random codes with scales of 2^-12 up to 2^(spread-12)."""
    *lead, n, k = shape
    scale = _bytes(g, *lead, n, k // 32, low=115, high=116 + spread)
    return Fp4Group32(_bytes(g, *lead, n, k // 2), scale)


def fp4_scaled(g: Generator, *shape: int, low: int, high: int) -> Fp4Group32:
    """Random codes under every scale from low up to high, which is left out; 255 is NaN."""
    *lead, n, k = shape
    return Fp4Group32(_bytes(g, *lead, n, k // 2), _bytes(g, *lead, n, k // 32, low=low, high=high))


def fp8(g: Generator, n: int, k: int, low: int = 110, high: int = 124) -> Fp8Block32:
    """Random finite codes, zeros among them, in 32x32 tiles."""
    code = _bytes(g, n, k)
    code = torch.where((code & 127) == 127, 0, code)
    return Fp8Block32(code, _bytes(g, -(-n // 32), -(-k // 32), low=low, high=high))


def fp8_edges(g: Generator, n: int, k: int) -> Fp8Block32:
    """Every code, NaN too, under every scale from 2^-127 to NaN."""
    code = torch.arange(n * k, device=g.device).view(n, k).to(torch.uint8)
    return Fp8Block32(code, _bytes(g, -(-n // 32), -(-k // 32)))


def _scales(g: Generator, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    found = [_bytes(g, *shape, low=1, high=255) for shape in shapes]
    if dtype == torch.uint8:
        return found
    return [torch.ldexp(torch.ones_like(s, dtype=dtype), s.int() - 127) for s in found]


# ---------------------------------------------------------------- comparison
def same_weights(actual: Any, expected: Any, arguments: Arguments) -> None:
    """`same_bits` over tensors, weights, and lists of tuples of them."""
    if isinstance(expected, Fp8Block128):
        assert isinstance(actual, Fp8Block128)
        actual, expected = dataclasses.astuple(actual), dataclasses.astuple(expected)
    if isinstance(expected, list):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            assert all(t.stride(-2) == 1 for t in (*a, *e))
            same_bits(a, e, arguments)
    else:
        same_bits(actual, expected, arguments)


OPS = ("fp4_to_fp8", "requantize_fp4", "requantize_fp8", "dequantize_weight")
COMPARE = dict.fromkeys((*OPS, "transpose_weight_scales"), same_weights)


# ---------------------------------------------------------------- cases
def _lossless(block: int, *shape: int, spread: int = 6) -> Make:
    return lambda g: {"weight": fp4(g, *shape, spread=spread), "block": block}


def _back(make: Callable[[Generator], Any], fmt: str = "fp32") -> Make:
    return lambda g: {"weight": make(g), "scale_fmt": fmt}


def _fp4_back(*shape: int, fmt: str = "fp32") -> Make:
    return _back(lambda g: fp4(g, *shape), fmt)


def _fp8_back(n: int, k: int, fmt: str = "fp32") -> Make:
    return _back(lambda g: fp8(g, n, k), fmt)


def _values(make: Callable[[Generator], Any], dtype: torch.dtype = torch.bfloat16) -> Make:
    return lambda g: {"weight": make(g), "dtype": dtype}


def _transpose(dtype: torch.dtype, block: int, *shapes: tuple[int, ...]) -> Make:
    return lambda g: {"scales": _scales(g, dtype, *shapes), "block": block}


def _weight_bytes(result_bytes: float) -> Callable[[Arguments], int]:
    def count(a: Arguments) -> int:
        w = a["weight"]
        values = w.weight.numel() * (2 if isinstance(w, Fp4Group32) else 1)
        return int(w.weight.nbytes + w.scale.nbytes + values * result_bytes)

    return count


def _real(op: str, name: str, make: Make, result_bytes: float) -> Case:
    # The lossless fold asks the device whether it was exact.
    captures = op != "fp4_to_fp8"
    count = _weight_bytes(result_bytes)
    return Case(op, name, make, True, True, captures=captures, bytes=count)


CASES = [
    Case("fp4_to_fp8", "one_tile", _lossless(32, 32, 32)),
    Case("fp4_to_fp8", "ragged_grid", _lossless(32, 2, 96, 160)),
    Case("fp4_to_fp8", "widest_fast", _lossless(32, 64, 96, spread=12)),
    Case("fp4_to_fp8", "widest_exact", _lossless(32, 64, 64, spread=14)),
    Case("fp4_to_fp8", "block_128", _lossless(128, 2, 128, 384)),
    Case("fp4_to_fp8", "block_128_wide", _lossless(128, 128, 256, spread=14)),
    Case("fp4_to_fp8", "empty", _lossless(32, 0, 32, 64)),
    Case("requantize_fp4", "experts", _fp4_back(2, 128, 256)),
    Case("requantize_fp4", "partial", _fp4_back(3, 96, 160)),
    Case("requantize_fp4", "pow2", _fp4_back(1, 64, 128, fmt="fp32_pow2")),
    Case("requantize_fp4", "empty", _fp4_back(0, 64, 128)),
    Case("requantize_fp4", "widest", _back(lambda g: fp4_scaled(g, 160, 256, low=0, high=253))),
    Case("requantize_fp4", "least", _back(lambda g: fp4_scaled(g, 128, 128, low=0, high=9))),
    Case("requantize_fp4", "nan", _back(lambda g: fp4_scaled(g, 128, 160, low=0, high=256))),
    Case("requantize_fp8", "square", _fp8_back(128, 256)),
    Case("requantize_fp8", "partial", _fp8_back(100, 150)),
    Case("requantize_fp8", "pow2", _fp8_back(130, 128, "fp32_pow2")),
    Case("requantize_fp8", "widest", _back(lambda g: fp8(g, 256, 256, low=0, high=246))),
    Case("requantize_fp8", "widest_pow2", _back(lambda g: fp8(g, 160, 128, 0, 246), "fp32_pow2")),
    Case("requantize_fp8", "least", _back(lambda g: fp8(g, 128, 160, low=0, high=9))),
    Case("requantize_fp8", "nan", _back(lambda g: fp8_edges(g, 256, 128))),
    Case("dequantize_weight", "fp8", _values(lambda g: fp8(g, 100, 150))),
    Case("dequantize_weight", "fp8_fp32", _values(lambda g: fp8(g, 33, 64), torch.float32)),
    Case("dequantize_weight", "fp8_edges", _values(lambda g: fp8_edges(g, 256, 256))),
    Case("dequantize_weight", "fp4", _values(lambda g: fp4(g, 3, 40, 96))),
    Case(
        "dequantize_weight", "fp4_edges", _values(lambda g: fp4_scaled(g, 40, 96, low=0, high=256))
    ),
    Case("dequantize_weight", "fp4_fp32", _values(lambda g: fp4(g, 33, 64), torch.float32)),
    Case(
        "dequantize_weight", "fp8_128", _values(lambda g: requantize_fp8(fp8(g, 140, 200), "fp32"))
    ),
    Case("transpose_weight_scales", "none", _transpose(torch.uint8, 32)),
    Case("transpose_weight_scales", "bytes_32", _transpose(torch.uint8, 32, (4, 8), (3, 8, 12))),
    Case("transpose_weight_scales", "fp32_128", _transpose(torch.float32, 128, (3, 6), (2, 1, 5))),
    _real("fp4_to_fp8", "8x2304x5120", _lossless(32, 8, 2304, 5120), 1 + 1 / 1024),
    _real("fp4_to_fp8", "128-8x2304x5120", _lossless(128, 8, 2304, 5120), 1.0),
    _real("requantize_fp4", "8x2304x5120", _fp4_back(8, 2304, 5120), 1.0),
    _real("requantize_fp8", "32768x1280", _fp8_back(32768, 1280), 1.0),
    _real("dequantize_weight", "fp8-32768x1280", _values(lambda g: fp8(g, 32768, 1280)), 2.0),
    _real("dequantize_weight", "fp4-4x2304x5120", _values(lambda g: fp4(g, 4, 2304, 5120)), 2.0),
    Case(
        "transpose_weight_scales", "8x72x160", _transpose(torch.uint8, 32, (8, 72, 160)), True, True
    ),
]
