"""The rotary angles of every position, one table per kind of layer.

Source: DeepSeek-V4.1-Flash `inference/model.py` (precompute_freqs_cis), as described by the golden
vectors `precompute_freqs_cis`; YaRN is arXiv 2309.00071.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _yarn_ramp(
    rope_dim: int, theta: float, original_length: int, beta_fast: float, beta_slow: float
) -> Tensor:
    """fp32 [rope_dim/2]: 0 where a pair keeps its frequency, 1 where it is divided by factor."""

    def pair(turns: float) -> float:
        """The pair whose angle makes this many turns over the original length."""
        period = original_length / (turns * 2 * math.pi)
        return rope_dim * math.log(period) / (2 * math.log(theta))

    low = max(math.floor(pair(beta_fast)), 0)
    high = min(math.ceil(pair(beta_slow)), rope_dim - 1)
    width = high - low if high != low else 0.001
    index = torch.arange(rope_dim // 2, dtype=torch.float32)
    return ((index - low) / width).clamp(0, 1)


def rope_table(
    rope_dim: int,
    length: int,
    theta: float,
    original_length: int = 0,
    factor: float = 1.0,
    beta_fast: float = 32,
    beta_slow: float = 1,
) -> Tensor:
    """fp32 [length, rope_dim] = `[cos | sin]` of every position, computed on the CPU.

    `original_length` 0 means plain RoPE. Otherwise YaRN: pairs that turn less than `beta_slow`
    times over the original length are slowed by `factor`, those above `beta_fast` kept, with a
    linear ramp between.

    The angle is the fp32 product position * frequency, as in the release: at large positions it
    is off the exact one, and a more exact table would not match what the weights were trained on.
    """
    if rope_dim <= 0 or rope_dim % 2:
        raise ValueError(f"rope_table: rope_dim must be even and positive, got {rope_dim}")
    if length < 0:
        raise ValueError(f"rope_table: length must be >= 0, got {length}")
    exponent = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
    frequency = 1.0 / theta**exponent
    if original_length > 0:
        slowed = _yarn_ramp(rope_dim, theta, original_length, beta_fast, beta_slow)
        kept = 1 - slowed
        frequency = frequency / factor * (1 - kept) + frequency * kept
    angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency)
    turned = torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)
