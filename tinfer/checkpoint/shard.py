"""One safetensors file: its header checked against its size, its tensors as views of a map.

The header is parsed here, not by a library, for three reasons: F8_E8M0 and F4 must be readable
with any torch build (they are bytes to us), a truncated file must be an error before a mapped
page reads as zeros, and nothing may be copied.

Layout: 8 bytes little-endian header length, a JSON header `name -> {dtype, shape, data_offsets}`
with offsets relative to the end of the header, then the data, without holes.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Storage tag -> (bits of one element, dtype of the view we hand out).
DTYPES: dict[str, tuple[int, torch.dtype]] = {
    "F32": (32, torch.float32),
    "BF16": (16, torch.bfloat16),
    "F8_E4M3": (8, torch.uint8),
    "F8_E8M0": (8, torch.uint8),
    "I8": (8, torch.uint8),  # two e2m1 values
    "F4": (4, torch.uint8),  # the same, counted in values
}
_MAX_HEADER = 1 << 28


class CheckpointError(ValueError):
    """A checkpoint that is not complete, not intact, or not the configured model's."""


@dataclass(frozen=True)
class TensorSpec:
    """How a tensor is stored: safetensors dtype tag, and its shape (packed F4/I8 in bytes)."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the data; F4 shapes are already in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype][1].itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Entry:
    """A tensor's place in its file: absolute byte offset and specification."""

    offset: int
    spec: TensorSpec


class Shard:
    """A safetensors file. Opening reads and checks the header; data is mapped at the first use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise CheckpointError(f"checkpoint: shard {path} is missing")
        self.entries = _parse(path)

    @cached_property
    def _bytes(self) -> Tensor:
        with self.path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with warnings.catch_warnings():  # torch warns that the map is read-only; it is meant to be
            warnings.simplefilter("ignore", UserWarning)
            return torch.frombuffer(mapped, dtype=torch.uint8)

    def tensor(self, name: str) -> Tensor:
        """A read-only view of the map (a copy only if the file aligns the data badly)."""
        entry = self.entries[name]
        dtype = DTYPES[entry.spec.dtype][1]
        raw = self._bytes[entry.offset : entry.offset + entry.spec.nbytes]
        if entry.offset % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(entry.spec.shape)


def _parse(path: Path) -> dict[str, Entry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if head == b"version ":
            raise CheckpointError(f"checkpoint: {path} is a Git LFS pointer; fetch the file itself")
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= _MAX_HEADER:
            raise CheckpointError(f"checkpoint: {path} ({size} bytes) is not a safetensors file")
        if 8 + length > size:
            raise CheckpointError(
                f"checkpoint: {path} is truncated: the header alone needs {8 + length} bytes, "
                f"the file has {size}"
            )
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except ValueError as error:
        raise CheckpointError(f"checkpoint: {path} has a broken header: {error}") from error
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, raw, 8 + length) for name, raw in header.items()}
    _check_extent(path, entries, 8 + length, size)
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _entry(path: Path, name: str, raw: Any, base: int) -> Entry:
    try:
        tag, shape = raw["dtype"], tuple(int(n) for n in raw["shape"])
        begin, end = (int(n) for n in raw["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint: {path}: {name} has a broken header entry") from error
    if tag not in DTYPES:
        known = ", ".join(DTYPES)
        raise CheckpointError(f"checkpoint: {path}: {name} must be one of {known}, got {tag}")
    if min(shape, default=1) < 0 or begin < 0:
        raise CheckpointError(f"checkpoint: {path}: {name} has a negative size or offset")
    if tag == "F4":
        if not shape or shape[-1] % 2:
            raise CheckpointError(f"checkpoint: {path}: {name} must have an even last size")
        shape = (*shape[:-1], shape[-1] // 2)
    spec = TensorSpec(tag, shape)
    if end - begin != spec.nbytes:
        raise CheckpointError(
            f"checkpoint: {path}: {name} ({spec}) must span {spec.nbytes} bytes, got {end - begin}"
        )
    return Entry(base + begin, spec)


def _check_extent(path: Path, entries: dict[str, Entry], base: int, size: int) -> None:
    """The tensors must tile the data area, and the file must end where they end."""
    end = base
    for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
        if entry.offset < end:
            raise CheckpointError(f"checkpoint: {path}: {name} overlaps another tensor")
        end = entry.offset + entry.spec.nbytes
    if size != end:
        state = "truncated" if size < end else "longer than its header says"
        raise CheckpointError(
            f"checkpoint: {path} is {state}: expected {end} bytes "
            f"(8 + header + data), the file has {size}"
        )
