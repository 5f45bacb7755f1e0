"""How programs walk over the groups of a matrix, on the device and on the host.

Groups are numbered row by row; contiguous data is one long row. A tile takes N units of U
consecutive groups of a row (U > 1 where scales are packed into words). With ROWS, for
column-major scales, a tile takes ROWS rows instead of one piece of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton
import triton.language as tl
from torch import Tensor

from tinfer.kernels._call import MAX_PROGRAMS


@triton.jit
def units_of_tile(tile, units_per_row, ONE_ROW: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr):
    """(row, unit within the row), int32 [N], of the N units of a tile."""
    i = tl.arange(0, N)
    if ROWS:
        tiles_per_band = (units_per_row + N // ROWS - 1) // (N // ROWS)
        band = tile // tiles_per_band
        unit = (tile - band * tiles_per_band) * (N // ROWS) + i // ROWS
        return band * ROWS + i % ROWS, unit
    index = tile * N + i
    if ONE_ROW:
        return tl.zeros([N], tl.int32), index
    row = index // units_per_row
    return row, index - row * units_per_row


@triton.jit
def groups_of_units(row, unit, U: tl.constexpr):
    """(row, group within the row), int32 [N * U], of N units of U groups."""
    if U == 1:
        return row, unit
    N: tl.constexpr = row.shape[0]
    rows = tl.broadcast_to(row[:, None], [N, U])
    groups = unit[:, None] * U + tl.arange(0, U)[None, :]
    return tl.reshape(rows, [N * U]), tl.reshape(groups, [N * U])


@triton.jit
def offsets(row, column, stride_row, stride_column):
    """int64 offsets row * stride_row + column * stride_column."""
    return row.to(tl.int64) * stride_row + column.to(tl.int64) * stride_column


@triton.jit
def with_columns(start, N: tl.constexpr):
    return start[:, None] + tl.arange(0, N)[None, :]


# ---------------------------------------------------------------- host
@dataclass(frozen=True)
class Walk:
    """How tiles of `tile` groups, `unit` groups a unit, cover [rows, groups]."""

    rows: int
    groups: int
    tile: int
    unit: int = 1
    band: int = 0
    one_row: bool = False

    @property
    def tiles(self) -> int:
        units, n = -(-self.groups // self.unit), self.tile // self.unit
        if self.band:
            return -(-self.rows // self.band) * -(-units // (n // self.band))
        return -(-self.rows * units // n)

    @property
    def grid(self) -> tuple[int]:
        return (min(self.tiles, MAX_PROGRAMS),)

    def joined(self) -> Walk:
        """The same groups as one row."""
        return replace(self, rows=1, groups=self.rows * self.groups, one_row=True)


def as_rows(x: Tensor) -> Tensor | None:
    """x as [rows, K] without a copy: unit column stride and one stride between rows."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return None
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError:
        return None
