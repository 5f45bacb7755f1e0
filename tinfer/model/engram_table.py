"""Where an engram table lives, and how the rows of a batch are fetched from there.

A table of the release takes 101 GB, so it may stay in device memory, in pinned host memory that
the kernel reads across the bus, or in the memory-mapped checkpoint file.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tinfer import ops
from tinfer.formats import as_bytes


class TensorSource(Protocol):
    """What a checkpoint offers here: tensors by name, on the host, without reading them whole."""

    def tensor(self, name: str) -> Tensor: ...


class EngramTable(Protocol):
    """Rows by number."""

    @property
    def capturable(self) -> bool:
        """Whether `gather` waits for nothing, so that a graph may capture it."""
        ...

    def gather(self, ids: Tensor) -> Tensor:
        """int64 `[T, cols]` global row numbers -> bf16 `[T, cols*E]`, see ops.engram_gather."""
        ...


# ---------------------------------------------------------------- kinds of table
@dataclass(frozen=True)
class ResidentTable:
    """A table, or the shard that begins at `row_start`, in memory that the device can address."""

    table: Tensor  # uint8 [rows, E]
    scale: Tensor  # uint8 [rows, E/32]
    row_start: int = 0

    @property
    def capturable(self) -> bool:
        return True

    def gather(self, ids: Tensor) -> Tensor:
        return ops.engram_gather(self.table, self.scale, ids, self.row_start)


@dataclass
class StagedTable:
    """A memory-mapped table: the distinct rows of a batch are read at once and sent along.

    The ids come to the host, so a batch waits for the device, and cannot be captured. The rows
    are read in ascending order by `readers` threads, because what a row costs is one page
    fault's latency.
    """

    table: Tensor  # uint8 [rows, E], on the host
    scale: Tensor  # uint8 [rows, E/32], on the host
    row_start: int = 0
    readers: int = 16
    rows_read: int = field(default=0, init=False)

    @property
    def capturable(self) -> bool:
        return False

    def gather(self, ids: Tensor) -> Tensor:
        rows, inverse = torch.unique(ids.cpu() - self.row_start, return_inverse=True)
        mine = (rows >= 0) & (rows < len(self.table))
        staged = torch.where(mine, mine.cumsum(0) - 1, -1)[inverse]
        table, scale = self._read(rows[mine], ids.device)
        return ops.engram_gather(table, scale, staged.to(ids.device), 0)

    def _read(self, rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        pin = device.type == "cuda"
        count = len(rows)
        table = torch.empty(count, self.table.shape[1], dtype=torch.uint8, pin_memory=pin)
        scale = torch.empty(count, self.scale.shape[1], dtype=torch.uint8, pin_memory=pin)

        def read(part: slice) -> None:
            torch.index_select(self.table, 0, rows[part], out=table[part])
            torch.index_select(self.scale, 0, rows[part], out=scale[part])

        step = max(-(-count // self.readers), 64)
        parts = [slice(i, min(i + step, count)) for i in range(0, count, step)]
        if len(parts) < 2:
            for part in parts:
                read(part)
        else:
            with ThreadPoolExecutor(len(parts)) as pool:
                list(pool.map(read, parts))
        self.rows_read += count
        return table.to(device, non_blocking=True), scale.to(device, non_blocking=True)


@dataclass(frozen=True)
class ShardedTable:
    """This rank's rows of a table that is spread over ranks, every rank asking for all ids.

    `add_` sums an int32 tensor over the ranks in place. Exactly one rank's result is not zero,
    and integers, unlike floats, keep the -0 and the subnormals of that one.
    """

    local: EngramTable
    add_: Callable[[Tensor], object]

    @property
    def capturable(self) -> bool:
        return self.local.capturable

    def gather(self, ids: Tensor) -> Tensor:
        rows = self.local.gather(ids)
        self.add_(rows.view(torch.int32))
        return rows


def shard_rows(rows: int, rank: int, world: int) -> range:
    """The table rows of one rank: `ceil(rows / world)` each, the last ranks' fewer or none."""
    if not 0 <= rank < world:
        raise ValueError(f"engram: rank must be in 0..{world - 1}, got {rank}")
    step = -(-rows // world)
    return range(min(rank * step, rows), min((rank + 1) * step, rows))


# ---------------------------------------------------------------- from a checkpoint
def _mapped(source: TensorSource, name: str, rows: range | None) -> tuple[Tensor, Tensor, int]:
    table = as_bytes(source.tensor(f"{name}.weight"))
    scale = as_bytes(source.tensor(f"{name}.scale"))
    mine = range(len(table)) if rows is None else rows
    return table[mine.start : mine.stop], scale[mine.start : mine.stop], mine.start


def device_table(
    source: TensorSource, name: str, device: torch.device, rows: range | None = None
) -> EngramTable:
    """The table `name` (all of it, or `rows`) copied to the device."""
    table, scale, start = _mapped(source, name, rows)
    return ResidentTable(table.to(device, copy=True), scale.to(device, copy=True), start)


def pinned_table(
    source: TensorSource, name: str, device: torch.device, rows: range | None = None
) -> EngramTable:
    """The table copied to page-locked host memory, which the kernel reads across the bus."""
    table, scale, start = _mapped(source, name, rows)
    pin = device.type == "cuda"

    def pinned(x: Tensor) -> Tensor:
        return torch.empty_like(x, pin_memory=pin).copy_(x)

    return ResidentTable(pinned(table), pinned(scale), start)


def mapped_table(
    source: TensorSource, name: str, device: torch.device, rows: range | None = None
) -> EngramTable:
    """The table left in the checkpoint file; each batch's rows are staged to the ids' device."""
    table, scale, start = _mapped(source, name, rows)
    return StagedTable(table, scale, start)


TABLES = {"device": device_table, "pinned": pinned_table, "mapped": mapped_table}
