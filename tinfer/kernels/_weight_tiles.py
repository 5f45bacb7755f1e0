"""Decode one tile of a quantized weight, whatever its type.

KIND is "fp4" (`Fp4Group32`), "fp8_32" (`Fp8Block32`) or "fp8_128" (`Fp8Block128`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._jit import e2m1_decode, e4m3_decode, nibbles_unpack, ue8m0_decode


@triton.jit
def load_values(
    w_ptr, s_ptr, matrix, row, column, N, K, R: tl.constexpr, C: tl.constexpr,
    KIND: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """fp32 [R, C] values of one tile; `row` and `column` are its first ones within the matrix."""
    rows = row + tl.arange(0, R)
    line = (tl.cast(matrix, tl.int64) * N + rows)[:, None]
    in_rows = (rows < N)[:, None]
    if KIND == "fp4":
        half = column // 2 + tl.arange(0, C // 2)[None, :]
        packed = tl.load(w_ptr + line * (K // 2) + half, mask=in_rows & (half * 2 < K), other=0)
        value = e2m1_decode(nibbles_unpack(packed))
        group = column // 32 + tl.arange(0, C // 32)[None, :]
        s_at, inside = line * (K // 32) + group, in_rows & (group * 32 < K)
        scale = ue8m0_decode(tl.load(s_ptr + s_at, mask=inside, other=127))  # [R, C / 32]
        WIDTH: tl.constexpr = 32
    else:
        columns = column + tl.arange(0, C)[None, :]
        code = tl.load(w_ptr + line * K + columns, mask=in_rows & (columns < K), other=0)
        value = e4m3_decode(code, NATIVE)
        SIDE: tl.constexpr = 32 if KIND == "fp8_32" else 128
        WIDTH: tl.constexpr = SIDE if SIDE < C else C
        block = column // SIDE + tl.arange(0, C // WIDTH)[None, :]
        down, across = (N + SIDE - 1) // SIDE, (K + SIDE - 1) // SIDE
        s_at = (tl.cast(matrix, tl.int64) * down + rows // SIDE)[:, None] * across + block
        inside = in_rows & (block < across)
        scale = tl.load(s_ptr + s_at, mask=inside, other=0)
        if KIND == "fp8_32":
            scale = ue8m0_decode(scale)
    wide = tl.reshape(value, [R, C // WIDTH, WIDTH]) * scale[:, :, None]
    return tl.reshape(wide, [R, C])


@triton.jit
def tile_of(tile, N, K, R: tl.constexpr, C: tl.constexpr):
    """(matrix, first row, first column) of a tile of R x C."""
    down, across = (N + R - 1) // R, (K + C - 1) // C
    line = tile // across
    return line // down, (line % down) * R, (tile - line * across) * C
