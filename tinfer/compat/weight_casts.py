"""Conversions of quantized weights between the release's formats and coarser ones, at load time.

The type of a weight says what its scales mean (`tinfer.formats`): `Fp4Group32` has one ue8m0 per
row per 32 columns, `Fp8Block32` one per 32x32 tile, `Fp8Block128` one fp32 per 128x128 tile.
Expanding the scales of one along the axes of another is a silent error, so no function here
takes a bare pair of tensors.

Conversions check that they are possible, which waits for the device: they belong to loading.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinfer.compat.casts import BLOCKS, pack_ue8m0, per_block_cast
from tinfer.formats import (
    GROUP,
    Fp4Group32,
    Fp8Block32,
    Fp8Block128,
    decode_e2m1,
    decode_e4m3,
    encode_e4m3,
    unpack_e2m1,
)

Weight = Fp4Group32 | Fp8Block32 | Fp8Block128
# The largest e2m1 value times 2^6 is 384, the last such power of two below e4m3's 448.
HEADROOM = 6


# ---------------------------------------------------------------- argument checks
def _shape_error(op: str, name: str, want: tuple[int, ...], got: Tensor) -> ValueError:
    return ValueError(f"{op}: {name} must have shape {want}, got {tuple(got.shape)}")


def _check_bytes(op: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.uint8:
            raise TypeError(f"{op}: {name} must be uint8, got {tensor.dtype}")


def check_fp4_group32(op: str, weight: Fp4Group32) -> None:
    _check_bytes(op, weight=weight.weight, scale=weight.scale)
    *lead, half = weight.weight.shape
    if len(lead) < 1 or half * 2 % GROUP:
        raise ValueError(f"{op}: weight must be [..., N, K/2] with K a multiple of {GROUP}")
    if weight.scale.shape != (want := (*lead, half * 2 // GROUP)):
        raise _shape_error(op, "scale", want, weight.scale)


def check_fp8_block32(op: str, weight: Fp8Block32) -> None:
    _check_bytes(op, weight=weight.weight, scale=weight.scale)
    if weight.weight.dim() != 2:
        raise ValueError(f"{op}: weight must be [N, K], got {tuple(weight.weight.shape)}")
    n, k = weight.weight.shape
    if weight.scale.shape != (want := (-(-n // GROUP), -(-k // GROUP))):
        raise _shape_error(op, "scale", want, weight.scale)


def check_fp8_block128(op: str, weight: Fp8Block128) -> None:
    _check_bytes(op, weight=weight.weight)
    if weight.scale.dtype != torch.float32:
        raise TypeError(f"{op}: scale must be float32, got {weight.scale.dtype}")
    *lead, n, k = weight.weight.shape
    if weight.scale.shape != (want := (*lead, -(-n // 128), -(-k // 128))):
        raise _shape_error(op, "scale", want, weight.scale)


def check_fp4_to_fp8(weight: Fp4Group32, block: int) -> None:
    op = "fp4_to_fp8"
    check_fp4_group32(op, weight)
    if block not in BLOCKS:
        raise ValueError(f"{op}: block must be one of {BLOCKS}, got {block}")
    n, k = weight.weight.shape[-2], weight.weight.shape[-1] * 2
    if n % block or k % block:
        raise ValueError(f"{op}: N and K must be multiples of {block}, got {n} and {k}")


def _check_requantized(op: str, scale_fmt: str) -> None:
    if scale_fmt not in ("fp32", "fp32_pow2"):
        raise ValueError(f"{op}: scale_fmt must be fp32 or fp32_pow2, got {scale_fmt!r}")


def check_requantize_fp4(weight: Fp4Group32, scale_fmt: str) -> None:
    check_fp4_group32("requantize_fp4", weight)
    _check_requantized("requantize_fp4", scale_fmt)


def check_requantize_fp8(weight: Fp8Block32, scale_fmt: str) -> None:
    check_fp8_block32("requantize_fp8", weight)
    _check_requantized("requantize_fp8", scale_fmt)


def check_dequantize_weight(weight: Weight, dtype: torch.dtype) -> None:
    op = "dequantize_weight"
    if isinstance(weight, Fp4Group32):
        check_fp4_group32(op, weight)
    elif isinstance(weight, Fp8Block32):
        check_fp8_block32(op, weight)
    elif isinstance(weight, Fp8Block128):
        check_fp8_block128(op, weight)
    else:
        raise TypeError(f"{op}: weight must be a quantized weight, got {type(weight).__name__}")
    if dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"{op}: dtype must be bfloat16 or float32, got {dtype}")


def check_transpose_weight_scales(scales: list[Tensor], block: int) -> None:
    op = "transpose_weight_scales"
    if block not in BLOCKS:
        raise ValueError(f"{op}: block must be one of {BLOCKS}, got {block}")
    for i, s in enumerate(scales):
        if s.dtype not in (torch.uint8, torch.float32):
            raise TypeError(f"{op}: scales[{i}] must be uint8 or float32, got {s.dtype}")
        if s.dim() not in (2, 3):
            raise ValueError(f"{op}: scales[{i}] must be 2-D or 3-D, got {tuple(s.shape)}")
        if any(side * block % 128 for side in s.shape[-2:]):
            raise ValueError(f"{op}: scales[{i}] must cover multiples of 128, got {tuple(s.shape)}")
        if s.dtype == torch.float32 and bool((s.contiguous().view(torch.int32) & 0x807FFFFF).any()):
            raise ValueError(f"{op}: scales[{i}] must be powers of two from 2^-126 to 2^127 or 0")


def lossy_error(op: str, block: int, tile: tuple[int, ...]) -> ValueError:
    """The error of a lossless conversion that cannot be; `tile` is the first offending tile."""
    return ValueError(
        f"{op}: scales must allow exact e4m3 values in every {block}x{block} tile, "
        f"got a wider spread or a NaN in tile {tile}; use requantize_fp4 to round"
    )


# ---------------------------------------------------------------- conversions
def fp4_to_fp8(weight: Fp4Group32, block: int) -> tuple[Tensor, Tensor]:
    """Expert weights as e4m3 with one ue8m0 per tile, without rounding.

    Args:
        weight: [..., N, K], N and K multiples of `block`.
        block: side of a tile, 32 or 128.
    Returns:
        uint8 e4m3 [..., N, K] and uint8 ue8m0 [..., N/block, K/block].
    Raises:
        ValueError if a value of some tile is not exact (scales that differ by more than 2^14
        within a tile may not be) or a scale is NaN.
    Numerics:
        Exact: the tile's exponent is max(0, largest exponent of the tile - 6), values are
        multiplied by 2^(own exponent - tile's exponent).
    Source: the release's convert step (golden vectors fp4_to_fp8).
    """
    check_fp4_to_fp8(weight, block)
    exponent = weight.scale.int().unflatten(-1, (-1, block // GROUP)).unflatten(-3, (-1, block))
    tile = (exponent.amax((-3, -1)) - HEADROOM).clamp(min=0)  # [..., N/b, K/b]
    # -40 is beyond every exact case, and keeps the products normal.
    shift = (exponent - tile[..., None, :, None]).clamp(min=-40)
    shift = shift.flatten(-2).flatten(-3, -2).repeat_interleave(GROUP, -1)
    value = torch.ldexp(decode_e2m1(unpack_e2m1(weight.weight)), shift)
    code = encode_e4m3(value)
    wrong = (decode_e4m3(code) != value).unflatten(-1, (-1, block)).unflatten(-3, (-1, block))
    lossy = wrong.any(-1).any(-2) | (exponent == 255).any(-1).any(-2)
    if bool(lossy.any()):
        raise lossy_error("fp4_to_fp8", block, tuple(int(i) for i in lossy.nonzero()[0]))
    return code, tile.to(torch.uint8)


def requantize_fp4(weight: Fp4Group32, scale_fmt: str) -> Fp8Block128:
    """Expert weights as e4m3 with one fp32 scale per 128x128 tile (rounds: 2.7 % a value).

    Args:
        weight: [..., N, K]; tiles at the edges may be partial.
        scale_fmt: "fp32" or "fp32_pow2".
    Numerics:
        `per_block_cast((128, 128), scale_fmt)` of the exact fp32 values of each matrix.
    """
    check_requantize_fp4(weight, scale_fmt)
    return _requantize(weight.dequantize(torch.float32), scale_fmt)


def requantize_fp8(weight: Fp8Block32, scale_fmt: str) -> Fp8Block128:
    """A dense weight as e4m3 with one fp32 scale per 128x128 tile (rounds).

    Args:
        weight: [N, K]; tiles at the edges may be partial.
        scale_fmt: "fp32" or "fp32_pow2".
    Numerics:
        `per_block_cast((128, 128), scale_fmt)` of the exact fp32 values.
    """
    check_requantize_fp8(weight, scale_fmt)
    return _requantize(weight.dequantize(torch.float32), scale_fmt)


def _requantize(values: Tensor, scale_fmt: str) -> Fp8Block128:
    matrices = values.flatten(0, -3) if values.dim() > 2 else values[None]
    n, k = matrices.shape[-2:]
    q = values.new_empty(matrices.shape, dtype=torch.uint8)
    s = values.new_empty((len(matrices), -(-n // 128), -(-k // 128)))
    for i, matrix in enumerate(matrices):
        q[i], s[i] = per_block_cast(matrix, (128, 128), scale_fmt)
    lead = values.shape[:-2]
    return Fp8Block128(q.view(values.shape), s.view(*lead, *s.shape[1:]))


def dequantize_weight(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The values of a quantized weight.

    Args:
        weight: any of the three types.
        dtype: torch.bfloat16 or torch.float32.
    Returns:
        [..., N, K].
    Numerics:
        One product in fp32, rounded to `dtype`: exact in bf16 for power-of-two scales. A ue8m0
        of 0 is 2^-127.
    Source: golden vectors wo_a_dequant.
    """
    check_dequantize_weight(weight, dtype)
    return weight.dequantize(dtype)


def transpose_weight_scales(scales: list[Tensor], block: int) -> list[tuple[Tensor, Tensor]]:
    """Packed scales of weights, by rows and by columns, as a block-scaled GEMM reads them.

    Args:
        scales: each [N/block, K/block] or [G, N/block, K/block], ue8m0 bytes or fp32 powers of two
            (0.0 counts as byte 0); N and K multiples of 128.
        block: 32 or 128.
    Returns:
        For each, two int32 tensors. The first is [(G,) N, ceil(K/block/4)], stride 1 along N: byte
        j of word w is the exponent of K-block 4w+j, repeated for each of the block's rows. The
        second is the same of the transposed matrix: [(G,) K, ceil(N/block/4)], stride 1 along K.
        Missing bytes of the last word are zero.
    """
    check_transpose_weight_scales(scales, block)
    return [(_by_rows(s, block), _by_rows(s.transpose(-1, -2), block)) for s in scales]


def _by_rows(scale: Tensor, block: int) -> Tensor:
    if scale.dtype == torch.float32:
        scale = (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    rows = pack_ue8m0(scale).repeat_interleave(block, -2)
    return rows.transpose(-1, -2).contiguous().transpose(-1, -2)
