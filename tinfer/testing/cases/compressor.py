"""Cases of the compressor: ratios, several sequences, chunks that begin and end within a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tinfer.testing.cases import Arguments, Case
from tinfer.testing.compare import BF16_EPS

# One sequence's rows in a call: (row of the state or -1 for padding, first position, rows).
Chunk = tuple[int, int, int]


def _make(
    chunks: list[Chunk], ratio: int, dim: int, ring: int, wide: bool = False
) -> Callable[[torch.Generator], Arguments]:
    def make(g: torch.Generator) -> Arguments:
        tokens = sum(n for _, _, n in chunks)
        like: dict[str, Any] = {"generator": g, "device": g.device}
        kv = torch.randn(tokens, 2 * dim if wide else dim, **like)[:, :dim]
        score = torch.randn(tokens, 2 * dim if wide else dim, **like)[:, -dim:] * 3
        positions = [first + i for _, first, n in chunks for i in range(n)]
        seq = [s for s, _, n in chunks for _ in range(n)]
        sequences = max((s for s, _, _ in chunks), default=0) + 1
        return {
            "kv": kv,
            "score": score,
            "positions": torch.tensor(positions, dtype=torch.int64, device=g.device),
            "seq": torch.tensor(seq, dtype=torch.int64, device=g.device),
            "state": torch.randn(sequences, ring, 2, dim, **like),
            "ratio": ratio,
        }

    return make


def _moved(arguments: Arguments) -> int:
    """Rows in, the pooled rows out, and the state once each way (at most `ring` rows)."""
    tokens, dim = arguments["kv"].shape
    return int(tokens * dim * (4 + 4 + 2) + 2 * arguments["state"].numel() * 4)


def _case(name: str, chunks: list[Chunk], ratio: int, dim: int, ring: int, **kw: Any) -> Case:
    wide = kw.pop("wide", False)
    make = _make(chunks, ratio, dim, ring, wide)
    return Case("compress_pool", name, make, mutates=("state",), bytes=_moved, **kw)


# Sequences of one row and of thousands, most of them begun within a group.
MIXED = [(0, 5, 3000), (1, 0, 1), (2, 77, 1200), (-1, 0, 3), (3, 4, 3700)]
MIXED += [(4 + i, 9 + i, 1) for i in range(288)]

CASES = [
    _case("none", [], 2, 64, 4),
    _case("one-even", [(0, 6, 1)], 2, 64, 4),
    _case("one-odd", [(0, 7, 1)], 2, 64, 4),
    _case("ratio1", [(0, 3, 5)], 1, 64, 3),
    _case("ratio4", [(0, 2, 9), (1, 7, 3)], 4, 64, 11),
    _case("several", [(2, 0, 5), (0, 11, 4), (-1, 0, 2), (1, 8, 6)], 2, 96, 8),
    _case("decode", [(3, 41, 1), (0, 12, 1), (-1, 0, 1), (2, 7, 1)], 2, 64, 8),
    _case("verify", [(0, 9, 6), (1, 16, 6)], 2, 64, 8),
    _case("smallest-ring", [(0, 5, 7)], 2, 64, 2),  # its last row takes the slot its first needs
    _case("long", [(0, 3, 101)], 2, 32, 8),  # two launches
    _case("strided", [(0, 0, 6)], 2, 64, 4, wide=True),
    _case("prefill-8192", [(0, 1, 8192)], 2, 512, 8, real=True, bench=True),
    _case("prefill-mixed", MIXED, 2, 512, 8, real=True),
    _case("decode-64", [(s, 1000 + s, 1) for s in range(64)], 2, 512, 8, real=True, bench=True),
]


def compare_pool(actual: object, expected: object, arguments: Arguments) -> None:
    """Pooled rows within one bf16 ulp of each other, state bit for bit.

    exp and the division differ by at most a few fp32 ulp, so the two values before rounding do
    not straddle more than one rounding boundary: they differ by at most one ulp, and rarely.
    """
    assert isinstance(actual, Tensor)
    assert isinstance(expected, Tensor)
    if expected.dtype == torch.float32:
        assert torch.equal(actual, expected)
        return
    assert actual.dtype == expected.dtype == torch.bfloat16
    a, e = actual.double(), expected.double()
    # Members of opposite sign can cancel: an absolute floor of some fp32 ulp of the largest one.
    floor = 8 * 2.0**-24 * float(arguments["kv"].abs().max() if len(a) else 0.0)
    off = (a - e).abs()
    assert bool((off <= 2 * BF16_EPS * e.abs() + floor).all()), f"off by {off.max()}"
    assert int((off > 0).sum()) <= max(2, e.numel() // 1000)


COMPARE = {"compress_pool": compare_pool}
