"""Where each tensor lies: the release's shards, a single file, or converted per-rank files.

A converted checkpoint (`model{i}-mp{N}.safetensors`) was split by rule; the pieces of a tensor
are listed here in order with the dimension they join on, so that the reader can hand out the
whole tensor, or rows of it, whatever the layout. The split rules:

    dim 0   embed, head, attn_sink, wq_b (attention and indexer), wo_a, weights_proj, and the
            Markov head's embed and head
    dim 1   wo_b
    experts whole, in contiguous blocks of ids per rank (numbers stay global)
    engram  embed rows, ceil(rows / N) a rank, the last rank padded
    others  replicated
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from tinfer.checkpoint.expected import Table
from tinfer.checkpoint.shard import CheckpointError, Shard, TensorSpec

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_CONVERTED = re.compile(r"model(\d+)-mp(\d+)\.safetensors")
_RELEASED = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
_EXPERT = re.compile(r"^(layers|mtp)\.\d+\.ffn\.experts\.(\d+)\.")
_ENGRAM = re.compile(r"\.engram\.embed\.(weight|scale)$")
_DIM_0 = {"embed", "head", "wq_b", "wo_a", "weights_proj"}


@dataclass(frozen=True)
class Piece:
    """A stored tensor that is a part (or all) of a logical one; `size` counts along the join."""

    shard: Shard
    name: str
    size: int

    @property
    def spec(self) -> TensorSpec:
        return self.shard.entries[self.name].spec


@dataclass(frozen=True)
class Files:
    """The files of a checkpoint: one list entry for a release, one per rank when converted."""

    directory: Path
    shards: list[Shard]
    ranks: int  # 0: not converted

    def describe(self) -> str:
        if self.ranks:
            return f"converted for {self.ranks} ranks"
        return f"release layout, {len(self.shards)} file{'s' * (len(self.shards) > 1)}"


# ---------------------------------------------------------------- finding the files
def find_files(directory: Path) -> Files:
    """Open every shard's header; all files of the layout must be there and be intact."""
    if not directory.is_dir():
        raise CheckpointError(f"checkpoint: no such directory: {directory}")
    if (directory / INDEX).is_file():
        return Files(directory, _indexed(directory), 0)
    if (directory / SINGLE).is_file():
        return Files(directory, [Shard(directory / SINGLE)], 0)
    names = sorted(p.name for p in directory.glob("model*.safetensors"))
    released = [m for m in map(_RELEASED.fullmatch, names) if m]
    if released:
        count = int(released[0][2])
        paths = [
            directory / f"model-{i:0{len(released[0][2])}d}-of-{released[0][2]}.safetensors"
            for i in range(1, count + 1)
        ]
        return Files(directory, [Shard(p) for p in paths], 0)
    converted = [m for m in map(_CONVERTED.fullmatch, names) if m]
    if converted:
        return _converted(directory, sorted({int(m[2]) for m in converted}))
    raise CheckpointError(
        f"checkpoint: {directory} is not a checkpoint: it has no {INDEX}, {SINGLE} or "
        "model0-mpN.safetensors"
    )


def _indexed(directory: Path) -> list[Shard]:
    path = directory / INDEX
    try:
        weight_map = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint: {path} has no valid weight_map: {error}") from error
    files = sorted(set(weight_map.values()))
    foreign = [f for f in files if not isinstance(f, str) or Path(f).name != f]
    if foreign:
        raise CheckpointError(f"checkpoint: {path} must name files beside it, got {foreign[0]!r}")
    missing = [f for f in files if not (directory / f).is_file()]
    if missing:
        raise CheckpointError(
            f"checkpoint: {len(missing)} of {len(files)} shards are missing from {directory}: "
            f"{', '.join(missing[:4])}{' …' if len(missing) > 4 else ''}"
        )
    shards = [Shard(directory / f) for f in files]
    held = {shard.path.name: shard.entries for shard in shards}
    for name, file in weight_map.items():
        if name not in held[file]:
            raise CheckpointError(
                f"checkpoint: {directory / file}: {name} is missing; {INDEX} lists it there"
            )
    return shards


def _converted(directory: Path, counts: list[int]) -> Files:
    if len(counts) != 1:
        raise CheckpointError(
            f"checkpoint: {directory} mixes conversions for {counts} ranks; keep one"
        )
    ranks = counts[0]
    paths = [directory / f"model{i}-mp{ranks}.safetensors" for i in range(ranks)]
    return Files(directory, [Shard(p) for p in paths], ranks)


# ---------------------------------------------------------------- the pieces of each tensor
Pieces = dict[str, tuple[list[Piece], int]]  # name -> (pieces in order, dimension they join on)


def locate(files: Files, expected: Table) -> tuple[Pieces, dict[str, Shard]]:
    """The pieces of every stored tensor, and every stored name with a file that holds it."""
    if files.ranks > 1:
        return _locate_split(files, expected)
    stored: dict[str, Shard] = {}
    for shard in files.shards:
        for name in shard.entries:
            if name in stored:
                raise CheckpointError(
                    f"checkpoint: {name} is in both {stored[name].path} and {shard.path}"
                )
            stored[name] = shard
    pieces = {n: ([Piece(s, n, _rows(s.entries[n].spec, 0))], 0) for n, s in stored.items()}
    return pieces, stored


def _rows(spec: TensorSpec, dim: int) -> int:
    return spec.shape[dim] if spec.shape else 1


def _locate_split(files: Files, expected: Table) -> tuple[Pieces, dict[str, Shard]]:
    stored = {name: shard for shard in reversed(files.shards) for name in shard.entries}
    experts = _expert_counts(expected)
    pieces: Pieces = {}
    for name in stored:
        dim = split_dim(name)
        expert = _EXPERT.match(name)
        if expert:
            count = experts.get(expert[1], 1)
            rank = min(int(expert[2]) * files.ranks // count, files.ranks - 1)
            owners = [files.shards[rank]]
        else:
            owners = files.shards
        for shard in owners:
            if name not in shard.entries:
                raise CheckpointError(f"checkpoint: {shard.path}: {name} is missing")
        if dim is None:
            owners = owners[:1]
        sizes = [_rows(s.entries[name].spec, dim or 0) for s in owners]
        if _ENGRAM.search(name) and name in expected:
            sizes = _unpadded(expected[name].shape[0], sizes)
        pieces[name] = ([Piece(s, name, n) for s, n in zip(owners, sizes, strict=True)], dim or 0)
    return pieces, stored


def split_dim(name: str) -> int | None:
    """The dimension a converted tensor is split on, or None if a rank holds it whole."""
    parts = name.split(".")
    if _EXPERT.match(name) or parts[0] in ("vision", "aligner"):
        return None
    if _ENGRAM.search(name) or parts[-1] == "attn_sink":
        return 0
    key = parts[-2] if len(parts) > 1 else name
    return 0 if key in _DIM_0 else 1 if key == "wo_b" else None


def _expert_counts(expected: Table) -> dict[str, int]:
    """Routed experts of the backbone and of the draft stages, by the name's first part."""
    counts: dict[str, int] = {}
    for name in expected:
        expert = _EXPERT.match(name)
        if expert:
            counts[expert[1]] = max(counts.get(expert[1], 0), int(expert[2]) + 1)
    return counts


def _unpadded(rows: int, sizes: list[int]) -> list[int]:
    """The rows of each rank's engram table that are real; only the last rank's are padded."""
    each = -(-rows // len(sizes))
    return [max(0, min(size, rows - each * i)) for i, size in enumerate(sizes)]
