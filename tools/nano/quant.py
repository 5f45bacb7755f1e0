"""Straight-through rounding: forward as the release rounds, backward as if it did not.

The formulas are those of `tinfer.formats`, written as arithmetic that compilers fuse; a test
holds them against `tinfer.compat.casts` bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tinfer.formats import (
    E2M1_AMAX_FLOOR,
    E2M1_AMAX_FLOOR_E4M3,
    E2M1_MAX,
    E4M3_AMAX_FLOOR,
    E4M3_MAX,
    GROUP,
)

_fused: list[bool] = [False]


def use_fused(on: bool) -> None:
    """Take the Triton kernels of `tools.nano.fused` for tensors on a GPU."""
    _fused[0] = on


def is_fused(x: Tensor) -> bool:
    return _fused[0] and x.is_cuda


def _power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two >= x, from the exponent's bits."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
    return (exponent << 23).view(torch.float32)


def _to_e2m1(x: Tensor) -> Tensor:
    a = x.abs()
    low, middle = torch.round(a * 2) * 0.5, torch.round(a)
    high = torch.round(a * 0.5) * 2
    a = torch.where(a < 2, low, torch.where(a < 4, middle, high)).clamp(max=E2M1_MAX)
    return torch.copysign(a, x)


# Each takes `[n, group]`.
def _e4m3(x: Tensor) -> Tensor:
    g = x.float()
    amax = g.abs().amax(-1, keepdim=True).clamp(min=E4M3_AMAX_FLOOR)
    scale = _power_of_two(amax * (1.0 / E4M3_MAX))
    q = (g / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
    return (q * scale).to(torch.bfloat16)


def _e2m1(x: Tensor) -> Tensor:
    g = x.float()
    amax = g.abs().amax(-1, keepdim=True).clamp(min=E2M1_AMAX_FLOOR)
    scale = _power_of_two(amax * (1.0 / E2M1_MAX))
    return (_to_e2m1(g / scale) * scale).to(torch.bfloat16)


def _e2m1_e4m3(x: Tensor) -> Tensor:
    g = x.float()
    amax = g.abs().amax(-1, keepdim=True).clamp(min=E2M1_AMAX_FLOOR_E4M3)
    scale = (amax / E2M1_MAX).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()
    return (_to_e2m1(g / scale) * scale).to(torch.bfloat16)


class _Through(torch.autograd.Function):
    """Rounded forward; the gradient passes, in the input's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Callable[..., Any], group: int) -> Tensor:
        ctx.dtype = x.dtype
        return rounding(x.reshape(-1, group)).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.to(ctx.dtype), None, None


_ROUNDINGS = (_e4m3, _e2m1, _e2m1_e4m3)


# Turned off to measure what rounding costs.
_enabled: list[bool] = [True]


def use_rounding(on: bool) -> None:
    _enabled[0] = on


def _round(x: Tensor, kind: int, group: int) -> Tensor:
    if not _enabled[0]:
        return x.to(torch.bfloat16)
    rounding = _ROUNDINGS[kind]
    if is_fused(x):
        from tools.nano.fused import fake_quant

        rounding = partial(fake_quant, kind=kind)
    return _Through.apply(x, rounding, group)  # type: ignore[no-any-return]


def fp8(x: Tensor) -> Tensor:
    """The activation cast: e4m3 per 32 columns; bf16 out."""
    return _round(x, 0, GROUP)


def fp8_tiles(tiles: Tensor) -> Tensor:
    """fp32 `[n, 1024]`: weights of 32x32 tiles, one scale each."""
    return _round(tiles, 0, GROUP * GROUP)


def fp4(x: Tensor) -> Tensor:
    """e2m1 per 32 columns, power-of-two scales: expert weights, index keys and queries."""
    return _round(x, 1, GROUP)


def fp4_kv(x: Tensor) -> Tensor:
    """e2m1 per 16 columns with e4m3 scales: compressed KV."""
    return _round(x, 2, 16)


# ---------------------------------------------------------------- products
class _LinearF32(torch.autograd.Function):
    """bf16 operands, fp32 result: `linear_fp32` with a bf16 weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.is_cuda:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return x.float() @ weight.float().t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grad.to(torch.bfloat16)
        return grad @ weight, grad.t() @ x


def linear_f32(x: Tensor, weight: Tensor) -> Tensor:
    """bf16 `[T, K]` times bf16 `[N, K]` -> fp32 `[T, N]`."""
    return _LinearF32.apply(x, weight)  # type: ignore[no-any-return]


class _Rows(torch.autograd.Function):
    """Table rows by number; the gradient is summed in fp32."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = table.shape[0]
        return table[ids]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        total = torch.zeros(ctx.rows, grad.shape[-1], dtype=torch.float32, device=grad.device)
        total.index_add_(0, ids.flatten(), flat.float())
        return total.to(grad.dtype), None


def rows(table: Tensor, ids: Tensor) -> Tensor:
    """bf16 `[..., E]` rows of a table."""
    return _Rows.apply(table, ids)  # type: ignore[no-any-return]
