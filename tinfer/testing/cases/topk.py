"""Cases of the selections: lengths from nothing to everything, ties, NaN, infinities, segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tinfer.testing.cases import Anchor, Arguments, Case

Make = Callable[[torch.Generator], Arguments]


def _normal(g: torch.Generator, shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape, generator=g, device=g.device)


def _tied(g: torch.Generator, shape: tuple[int, int]) -> Tensor:
    """Few distinct values, among them both zeros."""
    levels = torch.tensor([-2.0, -0.0, 0.0, 1.0], device=g.device)
    return levels[torch.randint(0, 4, shape, generator=g, device=g.device)]


def _constant(g: torch.Generator, shape: tuple[int, int]) -> Tensor:
    return torch.full(shape, -1.5, device=g.device)


def _special(g: torch.Generator, shape: tuple[int, int]) -> Tensor:
    """NaN of both signs, infinities, subnormals and ordinary values."""
    levels = torch.tensor([float("nan"), 0.0, float("inf"), float("-inf"), 1e-42, -1e-42, 7.0])
    levels = torch.cat([levels, -levels[:1]]).to(g.device)
    return levels[torch.randint(0, 8, shape, generator=g, device=g.device)]


def _lengths(g: torch.Generator, rows: int, columns: int) -> Tensor:
    """int32 [T]: nothing, everything, too much, one, and random."""
    lengths = torch.randint(0, columns + 1, (rows,), generator=g, device=g.device).int()
    for i, n in enumerate((0, columns, columns + 9, 1)):
        lengths[i : i + 1] = n
    return lengths


def _topk(
    rows: int,
    columns: int,
    k: int,
    draw: Callable[[torch.Generator, tuple[int, int]], Tensor] = _normal,
    padded: int = 0,
    full: bool = False,
    offset: bool = False,
) -> Make:
    """`padded` adds columns of storage behind every row."""

    def make(g: torch.Generator) -> Arguments:
        scores = draw(g, (rows, columns + padded))[:, :columns]
        lengths = _lengths(g, rows, columns)
        if full:
            lengths = torch.full((rows,), columns, dtype=torch.int32, device=g.device)
        arguments: dict[str, Any] = {"scores": scores, "lengths": lengths, "k": k}
        if offset:
            arguments["offset"] = 1000 * torch.arange(rows, dtype=torch.int32, device=g.device)
        return arguments

    return make


def _causal(rows: int, columns: int, k: int) -> Make:
    """Prefill rows whose lengths grow from one to all columns."""

    def make(g: torch.Generator) -> Arguments:
        lengths = torch.arange(1, rows + 1, device=g.device) * columns // rows
        return {"scores": _normal(g, (rows, columns)), "lengths": lengths.int(), "k": k}

    return make


def _blocks(
    rows: int, columns: int, size: int, k: int, draw: Any = _normal, full: bool = False
) -> Make:
    def make(g: torch.Generator) -> Arguments:
        arguments = _topk(rows, columns, k, draw, full=full)(g)
        return arguments | {"block_size": size}

    return make


def _restore(rows: int, blocks: int, size: int, k: int) -> Make:
    def make(g: torch.Generator) -> Arguments:
        like: dict[str, Any] = {"generator": g, "device": g.device}
        return {
            "ids": torch.randint(-2, blocks * size + 3, (rows, k), **like).int(),
            "blocks": torch.randint(-1, 99, (rows, blocks), **like).int(),
            "block_size": size,
        }

    return make


def _candidate_lengths(lengths: list[int], size: int, k: int) -> Make:
    def make(g: torch.Generator) -> Arguments:
        given = torch.tensor(lengths, dtype=torch.int32, device=g.device)
        return {"lengths": given, "block_size": size, "k": k}

    return make


def _read(arguments: Arguments) -> int:
    """Scores below each length, and the indices written."""
    rows, columns = arguments["scores"].shape
    seen = int(arguments["lengths"].clamp(0, columns).sum())
    return int(4 * (seen + rows + rows * arguments["k"]))


def _ids_moved(arguments: Arguments) -> int:
    return int(8 * arguments["ids"].numel() + 4 * arguments["blocks"].numel())


def _real(op: str, name: str, make: Make, **kw: Any) -> Case:
    return Case(op, name, make, real=True, bench=True, **kw)


CASES = [
    Case("topk_indices", "no-rows", _topk(0, 8, 2)),
    Case("topk_indices", "no-columns", _topk(2, 0, 3)),
    Case("topk_indices", "k1", _topk(5, 63, 1)),
    Case("topk_indices", "k-above-n", _topk(5, 17, 40)),
    Case("topk_indices", "tails", _topk(6, 129, 16)),
    Case("topk_indices", "tied", _topk(6, 200, 32, _tied)),
    Case("topk_indices", "constant", _topk(5, 100, 33, _constant)),
    Case("topk_indices", "special", _topk(8, 256, 48, _special)),
    Case("topk_indices", "padded", _topk(6, 250, 64, padded=6)),
    Case("topk_indices", "odd-stride", _topk(6, 250, 64, padded=3)),
    Case("topk_indices", "offset", _topk(6, 96, 7, offset=True)),
    Case("topk_indices", "tiles", _topk(9, 5000, 100)),
    Case("topk_indices", "tiles-tied", _topk(9, 5000, 100, _tied)),
    Case("topk_indices", "tiles-special", _topk(9, 4099, 300, _special)),
    Case("topk_indices", "segments", _topk(5, 40000, 512)),
    Case("topk_indices", "segments-tied", _topk(5, 33000, 100, _tied)),
    Case("topk_indices", "segments-special", _topk(5, 33000, 300, _special)),
    _real("topk_indices", "64x131072-512", _topk(64, 131072, 512, full=True), bytes=_read,
          anchor=Anchor("DeepSelect (CUDA)", 28.2)),
    _real("topk_indices", "4096x16384-512", _topk(4096, 16384, 512, full=True), bytes=_read,
          anchor=Anchor("sglang topk_v2 (CUDA)", 133.9)),
    _real("topk_indices", "4096x16384-causal", _causal(4096, 16384, 512), bytes=_read),
    _real("topk_indices", "1x131072-512", _topk(1, 131072, 512, full=True), bytes=_read),
    _real("topk_indices", "16x1048576-512", _topk(16, 1 << 20, 512, full=True), bytes=_read),
    _real("topk_indices", "16x1048576-2048", _topk(16, 1 << 20, 2048, full=True), bytes=_read),
    Case("candidate_blocks", "no-rows", _blocks(0, 8, 4, 2)),
    Case("candidate_blocks", "no-columns", _blocks(2, 0, 4, 2)),
    Case("candidate_blocks", "k1", _blocks(6, 61, 8, 1)),
    Case("candidate_blocks", "size5", _blocks(6, 61, 5, 4)),
    Case("candidate_blocks", "all-blocks", _blocks(6, 61, 8, 9)),
    Case("candidate_blocks", "tied", _blocks(6, 200, 8, 7, _tied)),
    Case("candidate_blocks", "special", _blocks(8, 130, 8, 5, _special)),
    Case("candidate_blocks", "segments", _blocks(3, 17000, 2, 20)),
    _real("candidate_blocks", "4096x16384", _blocks(4096, 16384, 8, 512, full=True), bytes=_read),
    _real("candidate_blocks", "64x131072", _blocks(64, 131072, 8, 2048, full=True), bytes=_read),
    Case("candidate_lengths", "edges", _candidate_lengths([0, 1, 7, 8, 9, 63, 64, 65, 200], 8, 8)),
    Case("candidate_lengths", "size5", _candidate_lengths([0, 1, 5, 6, 19, 20, 21], 5, 3)),
    Case("candidate_lengths", "none", _candidate_lengths([], 8, 8)),
    Case("restore_candidates", "none", _restore(0, 3, 8, 5)),
    Case("restore_candidates", "no-blocks", _restore(2, 0, 8, 5)),
    Case("restore_candidates", "few", _restore(5, 9, 8, 33)),
    Case("restore_candidates", "size5", _restore(3, 4, 5, 7)),
    _real("restore_candidates", "4096x512", _restore(4096, 2048, 8, 512), bytes=_ids_moved),
]  # fmt: skip
