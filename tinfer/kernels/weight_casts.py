"""Conversions of quantized weights at load time, a whole layer's experts in one launch.

Leading dimensions are matrices; a tile never crosses from one into the next. Tiles are counted
matrix by matrix, row of tiles by row of tiles, and programs stride over them.

Exact: equal to the references bit for bit. Source: `tinfer.compat.weight_casts`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.compat.weight_casts import (
    Weight,
    check_dequantize_weight,
    check_fp4_to_fp8,
    check_requantize_fp4,
    check_requantize_fp8,
    check_transpose_weight_scales,
    lossy_error,
)
from tinfer.formats import Fp4Group32, Fp8Block32, Fp8Block128
from tinfer.kernels._call import MAX_PROGRAMS, device_reason, words_of
from tinfer.kernels._dequantize_fp4 import _dequantize_fp4_kernel
from tinfer.kernels._fp4_to_fp8 import NO_TILE, _fp4_spread_kernel, _fp4_to_fp8_kernel
from tinfer.kernels._jit import to_bf16
from tinfer.kernels._requantize import _requantize_fp4_kernel, _requantize_fp8_kernel
from tinfer.kernels._target import target
from tinfer.kernels._weight_tiles import load_values, tile_of


# ---------------------------------------------------------------- kernels
@triton.jit(do_not_specialize=["tiles"])
def _dequantize_kernel(
    w_ptr,
    s_ptr,
    y_ptr,  # [matrices, N, K] bf16 or fp32
    N,
    K,
    tiles,
    R: tl.constexpr,
    C: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
):
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        matrix, row, column = tile_of(tile, N, K, R, C)
        value = load_values(w_ptr, s_ptr, matrix, row, column, N, K, R, C, KIND, NATIVE)
        if y_ptr.dtype.element_ty == tl.bfloat16:
            value = to_bf16(value)
        rows, columns = row + tl.arange(0, R), column + tl.arange(0, C)[None, :]
        at = (tl.cast(matrix, tl.int64) * N + rows)[:, None] * K + columns
        tl.store(y_ptr + at, value, mask=(rows < N)[:, None] & (columns < K))


@triton.jit(do_not_specialize=["tiles"])
def _pack_scales_kernel(
    s_ptr,  # uint8 or fp32 [matrices, lines, columns], any strides
    y_ptr,  # int32 [matrices, words, lines * BLOCK], then the same of the transposed matrices
    matrices,
    lines,
    columns,
    tiles,
    stride_matrix,
    stride_line,
    stride_column,
    BLOCK: tl.constexpr,
    R: tl.constexpr,
):
    own_words, own_rows = (columns + 3) // 4, lines * BLOCK
    own_tiles = matrices * own_words * ((own_rows + R - 1) // R)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        turned = tile >= own_tiles
        height, width = tl.where(turned, columns, lines), tl.where(turned, lines, columns)
        stride_down = tl.where(turned, stride_column, stride_line)
        stride_across = tl.where(turned, stride_line, stride_column)
        words, rows = (width + 3) // 4, height * BLOCK
        across = (rows + R - 1) // R
        here = tile - tl.where(turned, own_tiles, 0)
        line = here // across
        matrix, word = line // words, line % words
        row = (here - line * across) * R + tl.arange(0, R)
        column = word * 4 + tl.arange(0, 4)[None, :]
        at = tl.cast(matrix, tl.int64) * stride_matrix + (row // BLOCK)[:, None] * stride_down
        inside = (row < rows)[:, None] & (column < width)
        s = tl.load(s_ptr + at + column * stride_across, mask=inside, other=0)  # [R, 4]
        if s_ptr.dtype.element_ty == tl.float32:
            s = s.to(tl.int32, bitcast=True) >> 23
        shift = (tl.arange(0, 4) * 8)[None, :]
        packed = tl.sum(s.to(tl.int32) << shift, axis=1)
        before = tl.where(turned, tl.cast(matrices, tl.int64) * own_words * own_rows, 0)
        to = before + tl.cast(line, tl.int64) * rows + row
        tl.store(y_ptr + to, packed, mask=row < rows)


# ---------------------------------------------------------------- launchers
def _grid(tiles: int) -> tuple[int]:
    return (min(tiles, MAX_PROGRAMS),)


def _device_reason(weight: Weight) -> str | None:
    """Other types pass, for the check to refuse."""
    if not isinstance(weight, (Fp4Group32, Fp8Block32, Fp8Block128)):
        return None
    return device_reason(weight=weight.weight, scale=weight.scale)


def _kind(weight: Weight) -> str:
    if isinstance(weight, Fp4Group32):
        return "fp4"
    return "fp8_32" if isinstance(weight, Fp8Block32) else "fp8_128"


def _values_shape(weight: Weight) -> tuple[int, ...]:
    *lead, columns = weight.weight.shape
    return (*lead, columns * 2 if isinstance(weight, Fp4Group32) else columns)


def _tiles(shape: tuple[int, ...], rows: int, columns: int) -> int:
    matrices = 1
    for size in shape[:-2]:
        matrices *= size
    return matrices * -(-shape[-2] // rows) * -(-shape[-1] // columns)


def _fp4_tiles(block: int) -> tuple[int, int]:
    """(columns a program, warps).

    H200, 8x2304x5120 by 32x32 tiles: 43 us, as a copy; 128 columns and 4 warps 47. By 128x128
    tiles 49 us. The call takes 30 us more, in which the host waits for the verdict.
    """
    return (512, 4) if block == 32 else (128, 8)


def _dequantize_tiles() -> tuple[int, int, int]:
    """(rows, columns, warps). H200, fp8 of 32768x1280: 36.0 us; 8 warps 41.7, 128 columns 39.3."""
    return 32, 256, 4


def _dequantize_fp4_tiles() -> tuple[int, int, int]:
    """(rows, columns, warps). H200, 4x2304x5120: 35.6 us; 16 rows and 4 warps 36.3."""
    return 8, 256, 2


def supports_fp4_to_fp8(weight: Fp4Group32, block: int) -> str | None:
    aligned = weight.weight.is_contiguous() and weight.weight.storage_offset() % 4 == 0
    if not aligned:
        return "the packed weight is not contiguous and aligned to 4 bytes"
    return _device_reason(weight)


def fp4_to_fp8(weight: Fp4Group32, block: int) -> tuple[Tensor, Tensor]:
    """The host waits for the verdict on the scales, and then no longer than for a launch."""
    check_fp4_to_fp8(weight, block)
    scale = weight.scale.contiguous()
    wide = _look_for_wide_tiles(scale, block)
    codes, scales = _fold(weight, scale, block, None)
    if not wide():
        return codes, scales
    first = torch.full((1,), NO_TILE.value, dtype=torch.int32, device=codes.device)
    codes, scales = _fold(weight, scale, block, first)
    if (tile := int(first.item())) == NO_TILE.value:
        return codes, scales
    raise lossy_error("fp4_to_fp8", block, _unravel(tile, scales.shape))


def _look_for_wide_tiles(scale: Tensor, block: int) -> Callable[[], bool]:
    """Launch; the result waits for the verdict, which CUDA and HIP write to pinned host memory."""
    if scale.is_cuda:
        wide = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    else:
        wide = torch.zeros(1, dtype=torch.int32, device=scale.device)
    shape = (*scale.shape[:-1], scale.shape[-1] * 32)
    groups = 32 if block == 128 else 128
    if tiles := _tiles(shape, block, groups * 32):
        _fp4_spread_kernel[_grid(tiles)](
            scale, wide, shape[-1], tiles, B=block, G=groups, num_warps=4
        )
    if not scale.is_cuda:
        return lambda: bool(wide)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(scale.device))

    def verdict() -> bool:
        done.synchronize()
        return bool(wide)

    return verdict


def _fold(
    weight: Fp4Group32, scale: Tensor, block: int, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes and scales. With `first` value by value: it gets the first tile with one rounded."""
    shape = _values_shape(weight)
    codes = weight.weight.new_empty(shape)
    scales = weight.weight.new_empty((*shape[:-2], shape[-2] // block, shape[-1] // block))
    width, warps = _fp4_tiles(block)
    if tiles := _tiles(shape, block, width):
        _fp4_to_fp8_kernel[_grid(tiles)](
            weight.weight.view(torch.int32), scale, codes.view(torch.int32), scales,
            scales if first is None else first, shape[-1], tiles, B=block, C=width, W=2,
            EXACT=first is not None, PTX=target(codes.device).ptx, num_warps=warps,
        )  # fmt: skip
    return codes, scales


def _unravel(index: int, shape: torch.Size) -> tuple[int, ...]:
    at = []
    for size in reversed(shape):
        index, inner = divmod(index, size)
        at.append(inner)
    return tuple(reversed(at))


def supports_dequantize_weight(weight: Weight, dtype: torch.dtype) -> str | None:
    return _device_reason(weight)


def dequantize_weight(weight: Weight, dtype: torch.dtype) -> Tensor:
    check_dequantize_weight(weight, dtype)
    shape = _values_shape(weight)
    y = weight.weight.new_empty(shape, dtype=dtype)
    if y.numel() == 0:
        return y
    device, scale = target(y.device), weight.scale.contiguous()
    if isinstance(weight, Fp4Group32) and dtype == torch.bfloat16:
        rows, columns, warps = _dequantize_fp4_tiles()
        tiles = _tiles(shape, rows, columns)
        _dequantize_fp4_kernel[_grid(tiles)](
            words_of(weight.weight), scale, y.view(torch.int32), shape[-2], shape[-1], tiles,
            R=rows, C=columns, W=2, PTX=device.ptx, num_warps=warps,
        )  # fmt: skip
        return y
    rows, columns, warps = _dequantize_tiles()
    tiles = _tiles(shape, rows, columns)
    _dequantize_kernel[_grid(tiles)](
        weight.weight.contiguous(), scale, y, shape[-2], shape[-1], tiles,
        R=rows, C=columns, KIND=_kind(weight), NATIVE=device.native_e4m3,
        num_warps=warps,
    )  # fmt: skip
    return y


def _new_block128(weight: Fp4Group32 | Fp8Block32) -> Fp8Block128:
    shape = _values_shape(weight)
    size = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    scales = weight.weight.new_empty(size, dtype=torch.float32)
    return Fp8Block128(weight.weight.new_empty(shape), scales)


def supports_requantize_fp4(weight: Fp4Group32, scale_fmt: str) -> str | None:
    return _device_reason(weight)


def requantize_fp4(weight: Fp4Group32, scale_fmt: str) -> Fp8Block128:
    """H200, 8x2304x5120: a thread's unit is a group, 51 us; half a group (two tables) 67 us."""
    check_requantize_fp4(weight, scale_fmt)
    out = _new_block128(weight)
    if out.weight.numel():
        tiles, device = out.scale.numel(), target(out.weight.device)
        _requantize_fp4_kernel[_grid(tiles)](
            words_of(weight.weight), weight.scale.contiguous(), out.weight.view(torch.int32),
            out.scale, *out.weight.shape[-2:], tiles, W=4, SCALE=scale_fmt,
            NATIVE=device.native_e4m3, PTX=device.ptx, num_warps=4,
        )  # fmt: skip
    return out


def supports_requantize_fp8(weight: Fp8Block32, scale_fmt: str) -> str | None:
    return _device_reason(weight)


def requantize_fp8(weight: Fp8Block32, scale_fmt: str) -> Fp8Block128:
    check_requantize_fp8(weight, scale_fmt)
    out = _new_block128(weight)
    if out.weight.numel():
        tiles, device = out.scale.numel(), target(out.weight.device)
        _requantize_fp8_kernel[_grid(tiles)](
            weight.weight.contiguous(), weight.scale.contiguous(), out.weight, out.scale,
            *out.weight.shape, tiles, SCALE=scale_fmt,
            WHOLE=not any(side % 128 for side in out.weight.shape),
            NATIVE=device.native_e4m3, num_warps=4,
        )  # fmt: skip
    return out


def supports_transpose_weight_scales(scales: list[Tensor], block: int) -> str | None:
    return device_reason(**{f"scales[{i}]": s for i, s in enumerate(scales)})


def transpose_weight_scales(scales: list[Tensor], block: int) -> list[tuple[Tensor, Tensor]]:
    check_transpose_weight_scales(scales, block)
    return [_packed(s, block) for s in scales]


def _packed(s: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Both tensors, parts of one allocation that one launch fills."""
    matrices, (lines, columns) = s if s.dim() == 3 else s[None], s.shape[-2:]
    width, tiles = 256, 0
    sizes = [(-(-columns // 4), lines * block), (-(-lines // 4), columns * block)]
    storage = s.new_empty(len(matrices) * sum(w * r for w, r in sizes), dtype=torch.int32)
    for words, rows in sizes:
        tiles += len(matrices) * words * -(-rows // width)
    if tiles:
        _pack_scales_kernel[_grid(tiles)](
            matrices, storage, len(matrices), lines, columns, tiles, *matrices.stride(),
            BLOCK=block, R=width, num_warps=2,
        )  # fmt: skip
    parts = storage.split([len(matrices) * w * r for w, r in sizes])
    first, second = (
        part.view(*s.shape[:-2], *size).transpose(-1, -2)
        for part, size in zip(parts, sizes, strict=True)
    )
    return first, second
