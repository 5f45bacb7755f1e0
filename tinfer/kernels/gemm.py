"""Launchers of the projections: which kernel takes which sizes.

Few tokens: `_gemm_few`, the weight read once in its stored form. Many tokens: `_gemm_prefill`,
operands dequantized to bf16 once, then one large product. fp32 operands: three bf16 terms each.

Source: kernels G1 to G9 of the contracts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from tinfer.compat.gemm import (
    check_linear_bf16,
    check_linear_fp4,
    check_linear_fp8,
    check_linear_fp32,
    check_linear_grouped,
)
from tinfer.formats import GROUP
from tinfer.kernels._call import MAX_PROGRAMS, device_reason, stride_reason
from tinfer.kernels._gemm_few import (
    aligned,
    codes_on_hopper,
    few_tokens,
    is_packed,
    linear_on_hopper,
    takes_codes,
    takes_few,
    takes_hopper,
)
from tinfer.kernels._gemm_prefill import (
    ORDERS,
    _dequantize_fp4_kernel,
    _dequantize_kernel,
    _dequantize_ragged_kernel,
    _matmul_fp32_kernel,
    _matmul_kernel,
    _matmul_tma_kernel,
)
from tinfer.kernels._target import Target, target

Tiles = dict[str, Any]


# ---------------------------------------------------------------- many tokens
def dequantize(
    q: Tensor, s: Tensor, tall: int, order: str = "natural", chained: bool = False
) -> Tensor:
    """e4m3 [R, K] with a scale per `tall` rows and 32 columns -> bf16 [R, K], contiguous.

    `order` of the columns: a key of `ORDERS`; all but "natural" need K in whole units of it.
    `chained`: the next kernel starts early and waits on the device.
    """
    rows, k = q.shape
    out = torch.empty(rows, k, dtype=torch.bfloat16, device=q.device)
    if not out.numel():
        return out
    whole = not (k % 8 or q.stride(0) % 8 or q.storage_offset() % 4)
    if order != "natural" and not whole:
        q, whole = q.clone(memory_format=torch.contiguous_format), True
    if not whole:
        block = 1024
        grid = (min(triton.cdiv(out.numel(), block), MAX_PROGRAMS),)
        sizes = (out.numel(), k, q.stride(0), s.stride(0))
        _dequantize_ragged_kernel[grid](q, s, out, *sizes, TALL=tall, BLOCK=block)
        return out
    pieces, block = out.numel() // 8, 512
    _dequantize_kernel[(min(triton.cdiv(pieces, block), MAX_PROGRAMS),)](
        q,
        s,
        out,
        pieces,
        k,
        q.stride(0) // 4,
        s.stride(0),
        TALL=tall,
        ORDER=ORDERS[order],
        BLOCK=block,
        PACKED=is_packed(target(q.device)),
        CHAINED=chained,
        num_warps=4,
    )
    return out


def _matmul_tiles(tokens: int, n: int, groups: int, device: Target, out: torch.dtype) -> Tiles:
    """Blocks, warps and stages of the bf16 product.

    H200, 4096 tokens, cold, us: gate (384, 5120) with tiles of 128x128 39.7, of 64x128 61.6: one
    round of larger tiles beats two of smaller ones.
    """
    tiles: Tiles = {"BM": 128, "BN": 128, "BK": 64, "BAND": 8, "num_warps": 8, "num_stages": 3}
    if device.backend == "interpret":
        return tiles | {"BM": 32, "BN": 32, "BK": 32}
    if device.shared_kib < 128:  # 99 or 64 KiB
        return tiles | {"BK": 32, "num_stages": 2 if device.backend == "hip" else 3}
    if device.backend == "cuda" and int(device.arch) >= 90:
        count = triton.cdiv(tokens, 128) * groups
        # fp32 results take twice the room in shared memory on their way out
        if out == torch.bfloat16 and count * triton.cdiv(n, 256) >= device.processors:
            return tiles | {"BN": 256, "num_stages": 4}
        if 2 * count * triton.cdiv(n, 128) < device.processors:
            return tiles | {"BM": 64, "num_warps": 4, "num_stages": 4}
        return tiles | {"num_stages": 5}
    return tiles


def _matmul(x: Tensor, w: Tensor, out: Tensor, groups: int) -> None:
    """x bf16 [T, G*K], w bf16 [G*N, K] -> out [T, G*N]."""
    tokens, n, k = x.shape[0], w.shape[0] // groups, w.shape[1]
    device = target(x.device)
    tiles = _matmul_tiles(tokens, n, groups, device, out.dtype)
    bm, bn = tiles["BM"], tiles["BN"]
    count = triton.cdiv(tokens, bm) * triton.cdiv(n, bn) * groups
    sizes = (tokens, n, k, groups, x.stride(0), w.stride(0))
    if _takes_descriptors(x, w, out, groups, bn, device):
        triton.set_allocator(_workspace)
        programs = min(device.processors, count)
        _matmul_tma_kernel[(programs,)](
            x, w, out, *sizes, PROGRAMS=programs, PARTS=2 if bn == 256 else 1, **tiles
        )
        return
    even = k % tiles["BK"] == 0
    _matmul_kernel[(min(count, MAX_PROGRAMS),)](x, w, out, *sizes, EVEN_K=even, **tiles)


def _takes_descriptors(
    x: Tensor, w: Tensor, out: Tensor, groups: int, bn: int, device: Target
) -> bool:
    if device.backend == "hip" or (device.backend == "cuda" and int(device.arch) < 90):
        return False
    n, k = w.shape[0] // groups, w.shape[1]
    whole = (groups == 1 or (n % bn == 0 and k % 64 == 0)) and aligned(x) and aligned(w)
    return whole and aligned(out.view(out.shape[0], -1))


def _workspace(size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory for the tile descriptors that programs build."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


# ---------------------------------------------------------------- linear_fp8, linear_fp4
def supports_linear_fp8(
    q: Tensor, s: Tensor, weight: Tensor, scale: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> str | None:
    """Rows contiguous."""
    operands = {"q": q, "s": s, "weight": weight, "scale": scale}
    return device_reason(**operands) or stride_reason(**operands)


def linear_fp8(
    q: Tensor, s: Tensor, weight: Tensor, scale: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    check_linear_fp8(q, s, weight, scale, out_dtype)
    out = torch.empty(q.shape[0], weight.shape[0], dtype=out_dtype, device=q.device)
    if not out.numel() or not q.shape[1]:
        return out.zero_()
    if not takes_few(q, weight):
        _matmul(dequantize(q, s, 1), dequantize(weight, scale, GROUP), out, 1)
    elif out_dtype == torch.float32 or not takes_hopper(
        q[:, None], weight, scale, target(q.device)
    ):
        few_tokens(q[:, None], s, weight, scale, out[:, None])
    elif takes_codes(q, s):
        codes_on_hopper(q, s, weight, scale, out)
    else:
        linear_on_hopper(dequantize(q, s, 1, "e4m3", chained=True), weight, scale, out)
    return out


def supports_linear_fp4(
    q: Tensor, s: Tensor, weight: Tensor, scale: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> str | None:
    """Rows contiguous."""
    operands = {"q": q, "s": s, "weight": weight, "scale": scale}
    return device_reason(**operands) or stride_reason(**operands)


def linear_fp4(
    q: Tensor, s: Tensor, weight: Tensor, scale: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    check_linear_fp4(q, s, weight, scale, out_dtype)
    out = torch.empty(q.shape[0], weight.shape[0], dtype=out_dtype, device=q.device)
    if not out.numel() or not q.shape[1]:
        return out.zero_()
    w = torch.empty(weight.shape[0], q.shape[1], dtype=torch.bfloat16, device=q.device)
    block = 1024
    grid = (min(triton.cdiv(w.numel(), block), MAX_PROGRAMS),)
    sizes = (w.numel(), w.shape[1], weight.stride(0), scale.stride(0))
    _dequantize_fp4_kernel[grid](weight, scale, w, *sizes, BLOCK=block)
    _matmul(dequantize(q, s, 1), w, out, 1)
    return out


# ---------------------------------------------------------------- linear_bf16, linear_grouped
def supports_linear_bf16(x: Tensor, weight: Tensor) -> str | None:
    """Rows contiguous."""
    return device_reason(x=x, weight=weight) or stride_reason(x=x, weight=weight)


def linear_bf16(x: Tensor, weight: Tensor) -> Tensor:
    check_linear_bf16(x, weight)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
    _product(x, weight, out)
    return out


def _product(x: Tensor, weight: Tensor, out: Tensor) -> None:
    if not out.numel() or not x.shape[1]:
        out.zero_()
    elif takes_few(x, weight):
        few_tokens(x[:, None], None, weight, None, out[:, None])
    else:
        _matmul(x, weight, out, 1)


def supports_linear_grouped(x: Tensor, weight: Tensor, scale: Tensor | None) -> str | None:
    """Rows contiguous; the groups of a token in one piece."""
    operands = {"x": x, "weight": weight, "scale": scale}
    if x.numel() and x.shape[1] > 1 and x.stride(1) != x.shape[2]:
        return f"x has stride {x.stride(1)} between groups of {x.shape[2]}"
    return device_reason(**operands) or stride_reason(**operands)


def linear_grouped(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """The inverse rotation of the attention output, which comes before, is not fused in.

    It changes 64 of 512 channels in place: 14 us beside 380 us of product at 4096 tokens, 2 us
    beside 13 us at 16 (H200, in a graph). In the product every column tile of a group would
    rotate again, and tiles could not go from memory straight to the tensor cores. The place that
    would save the pass is the end of the attention kernel, where the output is in registers.
    """
    check_linear_grouped(x, weight, scale)
    tokens, groups, k = x.shape
    rows = weight.shape[0] // groups
    out = torch.empty(tokens, groups, rows, dtype=torch.bfloat16, device=x.device)
    if not out.numel() or not k:
        return out.zero_()
    if takes_few(x, weight):
        few_tokens(x, None, weight, scale, out)
        return out
    if scale is not None:
        weight = dequantize(weight, scale, GROUP)
    flat = torch.as_strided(x, (tokens, groups * k), (x.stride(0), 1))
    _matmul(flat, weight, out, groups)
    return out


# ---------------------------------------------------------------- linear_fp32
def supports_linear_fp32(x: Tensor, weight: Tensor) -> str | None:
    """Rows contiguous."""
    return device_reason(x=x, weight=weight) or stride_reason(x=x, weight=weight)


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    check_linear_fp32(x, weight)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    if x.dtype == weight.dtype == torch.bfloat16 or not out.numel() or not x.shape[1]:
        _product(x, weight, out)
        return out
    bm = 16 if x.shape[0] <= 16 else 64
    count = triton.cdiv(x.shape[0], bm) * triton.cdiv(weight.shape[0], 32)
    sizes = (*x.shape[:1], *weight.shape, x.stride(0), weight.stride(0))
    grid = (min(count, MAX_PROGRAMS),)
    blocks = {"BM": bm, "BN": 32, "BK": 32, "W": 4}
    _matmul_fp32_kernel[grid](x, weight, out, *sizes, **blocks, num_warps=4, num_stages=2)
    return out
