"""Open a checkpoint, verify it against the config, hand out its tensors by name.

Everything is verified from the headers before any data is read: files complete and intact, no
name missing or unknown, every dtype and shape as the config says. A checkpoint either opens
whole or not at all.
"""

from __future__ import annotations

import re
from collections.abc import KeysView
from pathlib import Path

import torch
from torch import Tensor

from tinfer.checkpoint.expected import Table, accepted_dtypes, expected_tensors
from tinfer.checkpoint.layout import Files, Piece, Pieces, find_files, locate
from tinfer.checkpoint.shard import CheckpointError, Shard, TensorSpec
from tinfer.config import ModelConfig
from tinfer.formats import GROUP

VISION = ("vision.", "aligner.", "image_")
_NAN_SCALE = 255


class Checkpoint:
    """Verified, named tensors of one checkpoint. Views are read-only; move them to a device."""

    def __init__(self, files: Files, pieces: Pieces, skipped: dict[str, tuple[str, ...]]) -> None:
        self.files = files
        self.skipped = skipped  # rule -> names that it left out
        self._pieces = pieces
        self._specs = {name: _joined(*p) for name, p in pieces.items()}

    def names(self) -> KeysView[str]:
        """Every tensor's name (a set-like view)."""
        return self._specs.keys()

    def spec(self, name: str) -> TensorSpec:
        """Stored dtype and whole shape; `KeyError` with a reason for a name that is not here."""
        if name not in self._specs:
            raise KeyError(self._absence(name))
        return self._specs[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self._specs.values())

    def tensor(
        self, name: str, rows: tuple[int, int] | None = None, check_scale: bool = True
    ) -> Tensor:
        """The tensor, or its rows `[first, last)`.

        Args:
            name: one of `names()`.
            rows: a range of the first dimension; only these rows are touched.
            check_scale: raise if a ue8m0 scale that is read holds the NaN byte 255. Turn off
                only for a table that is mapped, not read (rows are then checked when fetched).

        Returns:
            fp32, bf16, or uint8 (e4m3, ue8m0 and packed e2m1 bytes). A view of the mapped file,
            not to be written to; a copy where a converted checkpoint's pieces must be joined.

        Raises:
            KeyError: the name is not here. CheckpointError: a NaN scale.
        """
        spec = self.spec(name)
        total = spec.shape[0] if spec.shape else 1
        first, last = rows if rows is not None else (0, total)
        if not 0 <= first <= last <= total:
            raise IndexError(f"checkpoint: rows of {name} must lie in 0..{total}, got {rows}")
        pieces, dim = self._pieces[name]
        if dim == 0:
            value = self._join_rows(pieces, first, last, whole=rows is None)
        else:
            value = torch.cat([p.shard.tensor(name)[first:last] for p in pieces], dim)
        if check_scale and spec.dtype == "F8_E8M0":
            self._check_scale(name, value, first)
        return value

    @staticmethod
    def _join_rows(pieces: list[Piece], first: int, last: int, whole: bool) -> Tensor:
        if len(pieces) == 1:
            value = pieces[0].shard.tensor(pieces[0].name)
            return value if whole else value[first:last]
        parts, start = [], 0
        for piece in pieces:
            low, high = max(first - start, 0), min(last - start, piece.size)
            if low < high:
                parts.append(piece.shard.tensor(piece.name)[low:high])
            start += piece.size
        if not parts:
            return pieces[0].shard.tensor(pieces[0].name)[:0]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _check_scale(self, name: str, value: Tensor, first_row: int) -> None:
        if value.numel() and int(value.max()) == _NAN_SCALE:
            row, col = (int(i) for i in (value == _NAN_SCALE).nonzero()[0])
            path = self._pieces[name][0][0].shard.path
            raise CheckpointError(
                f"checkpoint: {path}: {name} must hold finite scales (bytes 0..254), got the NaN "
                f"byte 255 at [{first_row + row}, {col}]"
            )

    def _absence(self, name: str) -> str:
        for rule, names in self.skipped.items():
            if name in names:
                return f"checkpoint: {name} was skipped: {rule}"
        return f"checkpoint: {name} is not in {self.files.directory}"


def open_checkpoint(
    directory: str | Path, config: ModelConfig | None = None, vision: bool = False
) -> Checkpoint:
    """Open and verify a checkpoint directory.

    Args:
        directory: the release's layout (index and shards, or one `model.safetensors`) or
            converted per-rank files, all ranks in one directory.
        config: what to verify against; read from the directory if None.
        vision: also require and hand out the vision tower; otherwise its tensors are skipped
            by rule and listed in `Checkpoint.skipped`.

    Raises:
        CheckpointError: anything missing, damaged, unknown or of another shape or dtype; the
            message names the file, the tensor, what was expected and what was found.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"checkpoint: no such directory: {directory}")
    config = config or ModelConfig.load(directory)
    expected = expected_tensors(config)
    files = find_files(directory)
    pieces, stored = locate(files, expected)
    if not vision:
        expected = {n: s for n, s in expected.items() if not n.startswith(VISION)}
    skipped = _skip(stored, expected, vision)
    _check_names(files, stored, expected, pieces)
    kept = {name: pieces[name] for name in stored if name in expected}
    for name, (parts, dim) in kept.items():
        _check_spec(name, parts, dim, expected[name])
    return Checkpoint(files, kept, skipped)


def _skip(stored: dict[str, Shard], expected: Table, vision: bool) -> dict[str, tuple[str, ...]]:
    """Take out of `stored` what a rule leaves out, and say which rule."""
    skipped: dict[str, list[str]] = {}
    for name in [n for n in stored if n not in expected]:
        rule = _skip_rule(name, vision)
        if rule:
            skipped.setdefault(rule, []).append(name)
            del stored[name]
    return {rule: tuple(names) for rule, names in skipped.items()}


def _skip_rule(name: str, vision: bool) -> str | None:
    """Why a tensor that the model does not take may still be there; None if it may not."""
    if re.fullmatch(r"mtp\.\d+\.(embed|head)\.weight", name):
        return "draft stages share the backbone's embedding and head"
    if not vision and (name.startswith(VISION) or name.endswith(".gate.bias_vl")):
        return "text mode: no vision tower"
    return None


def _check_names(files: Files, stored: dict[str, Shard], expected: Table, pieces: Pieces) -> None:
    unknown = [n for n in stored if n not in expected]
    if unknown:
        raise CheckpointError(
            f"checkpoint: {stored[unknown[0]].path}: unknown tensor {unknown[0]}{_more(unknown)}; "
            "the config does not call for it"
        )
    wide = {n for n in expected if _wide_wo_a(n, pieces)}
    both = [n for n in wide if n in stored]
    if both:
        raise CheckpointError(
            f"checkpoint: {stored[both[0]].path}: {both[0]} must not be there: its weight is BF16"
        )
    missing = [n for n in expected if n not in stored and n not in wide]
    if missing:
        name = missing[0]
        weight = name[: -len("scale")] + "weight"
        of = ""
        if name.endswith(".scale") and weight in stored:
            of = f" (the scale of {weight} in {stored[weight].path.name}; it has no default)"
        raise CheckpointError(
            f"checkpoint: {files.directory}: {name} is missing{of}{_more(missing)}; "
            f"expected {expected[name]}"
        )


def _wide_wo_a(name: str, pieces: Pieces) -> bool:
    """`name` is the scale of a converted wo_a, which is BF16 and has none."""
    if not name.endswith(".wo_a.scale"):
        return False
    weight = pieces.get(name[: -len("scale")] + "weight")
    return weight is not None and weight[0][0].spec.dtype == "BF16"


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _joined(pieces: list[Piece], dim: int) -> TensorSpec:
    """The whole tensor's specification."""
    spec = pieces[0].spec
    shape = list(spec.shape)
    if shape and len(pieces) > 1:
        shape[dim] = sum(p.size for p in pieces)
    return TensorSpec(spec.dtype, tuple(shape))


def _across(piece: Piece, dim: int) -> tuple[int, ...]:
    """A piece's shape without the dimension that pieces join on."""
    return piece.spec.shape[:dim] + piece.spec.shape[dim + 1 :]


def _check_spec(name: str, pieces: list[Piece], dim: int, expected: TensorSpec) -> None:
    accepted = accepted_dtypes(name, expected)
    found = _joined(pieces, dim)
    path = pieces[0].shard.path
    for piece in pieces:
        alike = piece.spec.dtype == found.dtype and _across(piece, dim) == _across(pieces[0], dim)
        if piece.spec.dtype not in accepted or not alike:
            raise CheckpointError(
                f"checkpoint: {piece.shard.path}: {name} must be {' or '.join(accepted)}, "
                f"got {piece.spec}"
            )
    if found.shape != expected.shape:
        parts = f" over {len(pieces)} ranks" if len(pieces) > 1 else ""
        raise CheckpointError(f"checkpoint: {path}: {name} must be {expected}{parts}, got {found}")
    whole_tiles = found.dtype != "F8_E4M3" or ".engram.embed." in name
    if len(pieces) > 1 and not whole_tiles and any(p.size % GROUP for p in pieces):
        raise CheckpointError(
            f"checkpoint: {path}: {name} must be split at multiples of {GROUP} "
            f"(its scale tiles), got parts of {[p.size for p in pieces]}"
        )
