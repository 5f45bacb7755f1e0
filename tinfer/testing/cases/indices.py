"""Cases of the index builders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tinfer.testing.cases import Arguments, Case

Make = Callable[[torch.Generator], Arguments]


def block_table(g: torch.Generator, sequences: int, pages: int) -> Tensor:
    """int32 [S, nblk]: pages in no order, all distinct."""
    order = torch.randperm(sequences * pages, generator=g, device=g.device)
    return order.view(sequences, pages).int()


def _windows(tokens: int, sequences: int, page: int, ring: int, window: int) -> Make:
    def make(g: torch.Generator) -> Arguments:
        like: dict[str, Any] = {"generator": g, "device": g.device}
        last = torch.randint(0, 3 * ring, (tokens,), **like)
        seq = torch.randint(0, sequences, (tokens,), **like)
        seq[::6] = -1
        return {
            "first": (last - window + 1).clamp(min=-2),
            "last": last,
            "seq": seq,
            "block_table": block_table(g, sequences, -(-ring // page)),
            "page_size": page,
            "ring": ring,
            "width": window,
        }

    return make


def _ids(tokens: int, sequences: int, page: int, pages: int, k: int) -> Make:
    def make(g: torch.Generator) -> Arguments:
        like: dict[str, Any] = {"generator": g, "device": g.device}
        ids = torch.randint(-3, page * pages + 3, (tokens, k), **like).int()
        seq = torch.randint(0, sequences, (tokens,), **like)
        seq[::5] = -1
        table = block_table(g, sequences, pages)
        table[:, ::7] = -1
        return {"ids": ids, "seq": seq, "block_table": table, "page_size": page}

    return make


def _moved_range(arguments: Arguments) -> int:
    return int(len(arguments["first"]) * (24 + 4 * arguments["width"]))


def _moved_ids(arguments: Arguments) -> int:
    return int(arguments["ids"].numel() * 8 + 8 * len(arguments["seq"]))


CASES = [
    Case("range_slots", "none", _windows(0, 1, 4, 8, 8)),
    Case("range_slots", "one", _windows(1, 1, 16, 16, 1)),
    Case("range_slots", "wrap", _windows(29, 3, 16, 48, 16)),
    Case("range_slots", "page3", _windows(13, 2, 3, 24, 7)),
    Case("range_slots", "width0", _windows(3, 2, 4, 8, 0)),
    Case(
        "range_slots", "window-4096", _windows(4096, 8, 64, 256, 128),
        real=True, bench=True, bytes=_moved_range,
    ),
    Case("ids_to_slots", "none", _ids(0, 1, 4, 2, 3)),
    Case("ids_to_slots", "few", _ids(7, 3, 16, 5, 9)),
    Case("ids_to_slots", "page3", _ids(5, 2, 3, 9, 65)),
    Case(
        "ids_to_slots", "selected-4096", _ids(4096, 8, 64, 256, 512),
        real=True, bench=True, bytes=_moved_ids,
    ),
]  # fmt: skip
