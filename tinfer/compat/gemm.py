"""Dense projections: what each op computes, in plain torch.

Quantized operands are stored numbers times powers of two, so dequantizing them is exact; the
sums run in fp32 and the result is rounded once. Leading dimensions are flattened by the caller.

Source: DeepSeek-V4.1-Flash technical description; OCP microscaling formats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinfer.compat.checks import require, require_dtype, require_shape
from tinfer.formats import GROUP, Fp4Group32, Fp8Block32, decode_e4m3, decode_ue8m0

FLOATS = (torch.bfloat16, torch.float32)


def ceil_div(a: int, b: int) -> int:
    """The smallest integer >= a / b."""
    return -(-a // b)


def dequantize_rows(q: Tensor, s: Tensor) -> Tensor:
    """Activations: e4m3 bytes [T, K] with one ue8m0 byte per 32 columns -> fp32, exact."""
    scale = decode_ue8m0(s).repeat_interleave(GROUP, -1)[..., : q.shape[-1]]
    return decode_e4m3(q) * scale


def _check_rows(op: str, q: Tensor, s: Tensor) -> None:
    require_dtype(op, "q", q, torch.uint8)
    require_dtype(op, "s", s, torch.uint8)
    require_shape(op, "q", q, ["T", "K"])
    require_shape(op, "s", s, [q.shape[0], ceil_div(q.shape[1], GROUP)])


def check_linear_fp8(
    q: Tensor, s: Tensor, weight: Tensor, scale: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> None:
    """The arguments' rules, for the reference and the kernel alike."""
    _check_rows("linear_fp8", q, s)
    require_dtype("linear_fp8", "weight", weight, torch.uint8)
    require_dtype("linear_fp8", "scale", scale, torch.uint8)
    require_shape("linear_fp8", "weight", weight, ["N", q.shape[1]])
    n, k = weight.shape
    require_shape("linear_fp8", "scale", scale, [ceil_div(n, GROUP), ceil_div(k, GROUP)])
    require(out_dtype in FLOATS, "linear_fp8", "out_dtype", "bfloat16 or float32", out_dtype)


def linear_fp8(
    q: Tensor, s: Tensor, weight: Tensor, scale: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Multiply fp8 activations with an fp8 weight of 32x32 tiles.

    Args:
        q: uint8 [T, K], e4m3 codes.
        s: uint8 [T, ceil(K/32)], one ue8m0 per 32 columns of a row.
        weight: uint8 [N, K], e4m3 codes.
        scale: uint8 [ceil(N/32), ceil(K/32)], one ue8m0 per tile, from 2^-60 to 2^60 (codes 67
            to 187: kernels for few tokens keep the exponent in bf16); edge tiles may be partial.
        out_dtype: bfloat16 or float32.

    Returns: [T, N] of `out_dtype`, contiguous.
    Raises: ValueError on a shape, TypeError on a dtype.
    Numerics: exact products, sums in fp32, one rounding to `out_dtype`.
    Source: block-scaled fp8 GEMM of the release (32-wide groups, ue8m0 scales).
    """
    check_linear_fp8(q, s, weight, scale, out_dtype)
    w = Fp8Block32(weight, scale).dequantize(torch.float32)
    return (dequantize_rows(q, s) @ w.t()).to(out_dtype)


def check_linear_fp4(
    q: Tensor, s: Tensor, weight: Tensor, scale: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> None:
    """The arguments' rules, for the reference and the kernel alike."""
    _check_rows("linear_fp4", q, s)
    require_dtype("linear_fp4", "weight", weight, torch.uint8)
    require_dtype("linear_fp4", "scale", scale, torch.uint8)
    k = q.shape[1]
    require(k % GROUP == 0, "linear_fp4", "q", f"of columns divisible by {GROUP}", k)
    require_shape("linear_fp4", "weight", weight, ["N", k // 2])
    require_shape("linear_fp4", "scale", scale, [weight.shape[0], k // GROUP])
    require(out_dtype in FLOATS, "linear_fp4", "out_dtype", "bfloat16 or float32", out_dtype)


def linear_fp4(
    q: Tensor, s: Tensor, weight: Tensor, scale: Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Multiply fp8 activations with an fp4 weight (one expert's matrix on its own).

    Args:
        q: uint8 [T, K], e4m3 codes; K divisible by 32.
        s: uint8 [T, K/32], one ue8m0 per 32 columns of a row.
        weight: uint8 [N, K/2], two e2m1 codes a byte, the even column in the low nibble.
        scale: uint8 [N, K/32], one ue8m0 per row per 32 columns.
        out_dtype: bfloat16 or float32.

    Returns: [T, N] of `out_dtype`, contiguous.
    Raises: ValueError on a shape, TypeError on a dtype.
    Numerics: exact products, sums in fp32, one rounding to `out_dtype`.
    Source: fp8 x fp4 GEMM of the release.
    """
    check_linear_fp4(q, s, weight, scale, out_dtype)
    w = Fp4Group32(weight, scale).dequantize(torch.float32)
    return (dequantize_rows(q, s) @ w.t()).to(out_dtype)


def check_linear_bf16(x: Tensor, weight: Tensor) -> None:
    """The arguments' rules, for the reference and the kernel alike."""
    require_dtype("linear_bf16", "x", x, torch.bfloat16)
    require_dtype("linear_bf16", "weight", weight, torch.bfloat16)
    require_shape("linear_bf16", "x", x, ["T", "K"])
    require_shape("linear_bf16", "weight", weight, ["N", x.shape[1]])


def linear_bf16(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply bf16 activations with a bf16 weight.

    Args:
        x: bf16 [T, K].
        weight: bf16 [N, K].

    Returns: bf16 [T, N], contiguous.
    Raises: ValueError on a shape, TypeError on a dtype.
    Numerics: exact products, sums in fp32, one rounding to bf16.
    Source: the release's unquantized projections (index weights, ratio-1 compressor).
    """
    check_linear_bf16(x, weight)
    return (x.float() @ weight.float().t()).to(torch.bfloat16)


def check_linear_fp32(x: Tensor, weight: Tensor) -> None:
    """The arguments' rules, for the reference and the kernel alike."""
    require_dtype("linear_fp32", "x", x, *FLOATS)
    require_dtype("linear_fp32", "weight", weight, *FLOATS)
    require_shape("linear_fp32", "x", x, ["T", "K"])
    require_shape("linear_fp32", "weight", weight, ["N", x.shape[1]])


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply with fp32 accuracy: routing gate, compressor of ratio 2, head, confidence.

    Args:
        x: bf16 or fp32 [T, K].
        weight: bf16 or fp32 [N, K].

    Returns: fp32 [T, N], contiguous.
    Raises: ValueError on a shape, TypeError on a dtype.
    Numerics: no operand loses bits (no TF32, no bf16 rounding of an fp32 operand); fp32 sums.
    Source: the release keeps gate, head and the pooled compressors in fp32.
    """
    check_linear_fp32(x, weight)
    return x.float() @ weight.float().t()


def check_linear_grouped(x: Tensor, weight: Tensor, scale: Tensor | None) -> None:
    """The arguments' rules, for the reference and the kernel alike."""
    require_dtype("linear_grouped", "x", x, torch.bfloat16)
    require_shape("linear_grouped", "x", x, ["T", "G", "K"])
    g, k = x.shape[1:]
    require_shape("linear_grouped", "weight", weight, ["G*R", k])
    n = weight.shape[0]
    require(g > 0, "linear_grouped", "x", "of at least one group", g)
    require(n % g == 0, "linear_grouped", "weight", f"of rows divisible by {g}", n)
    if scale is None:
        require_dtype("linear_grouped", "weight", weight, torch.bfloat16)
        return
    require_dtype("linear_grouped", "weight", weight, torch.uint8)
    require_dtype("linear_grouped", "scale", scale, torch.uint8)
    require_shape("linear_grouped", "scale", scale, [ceil_div(n, GROUP), ceil_div(k, GROUP)])


def linear_grouped(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """Block-diagonal projection: group g of `x` meets row block g of the weight.

    Args:
        x: bf16 [T, G, K]; the activation is never quantized.
        weight: uint8 [G*R, K] e4m3 codes, or bf16 [G*R, K] when `scale` is None.
        scale: uint8 [ceil(G*R/32), ceil(K/32)], one ue8m0 per 32x32 tile, from 2^-60 to 2^60,
            or None.

    Returns: bf16 [T, G, R], contiguous.
    Raises: ValueError on a shape, TypeError on a dtype.
    Numerics: the weight is dequantized exactly, sums in fp32, one rounding to bf16.
    Source: the release's first output projection of the attention (`wo_a`).
    """
    check_linear_grouped(x, weight, scale)
    g, k = x.shape[1:]
    w = weight.float() if scale is None else Fp8Block32(weight, scale).dequantize(torch.float32)
    return torch.einsum("tgk,grk->tgr", x.float(), w.view(g, -1, k)).to(torch.bfloat16)
