"""Cases of Engram's look-back and hash."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from tinfer.testing.cases import Anchor, Arguments, Case

Spans = list[tuple[int, int, int]]  # slot, first position, tokens; slot -1 is padding


# ---------------------------------------------------------------- look-back
def spans(
    g: Generator,
    batch: Spans,
    ring: int = 11,
    order: int = 4,
    vocab: int = 97,
    dead: float | None = 0.2,
) -> Arguments:
    """A batch of the given spans over a history of random, partly dead, stale entries."""
    device = g.device
    count = sum(n for _, _, n in batch)
    parts = [torch.arange(p, p + n) for _, p, n in batch]
    positions = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
    slots = torch.tensor([s for s, _, n in batch for _ in range(n)], dtype=torch.int64)
    sequences = 1 + max((s for s, _, _ in batch), default=0)
    compressed = max(vocab // 2, 1)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=g, device=device)

    flags = torch.rand(count, generator=g, device=device)
    return {
        "ids": draw(0, vocab, count),
        "positions": positions.to(device),
        "slots": slots.to(device),
        "dead": None if dead is None else flags < dead,
        "token_map": draw(0, compressed, vocab).int(),
        "pad_id": 2,
        "history": draw(-1, compressed, sequences, ring).int(),
        "order": order,
    }


# Decode, prefill from the start, chunks, verification, padding: in one batch.
MIXED: Spans = [(0, 40, 1), (3, 0, 5), (1, 17, 4), (2, 1, 6), (5, 0, 1), (-1, 0, 3), (4, 9, 2)]


def _lookback(name: str, batch: Spans, real: bool = False, **how: object) -> Case:
    bench = real
    return Case(
        "engram_lookback",
        name,
        lambda g: spans(g, batch, **how),  # type: ignore[arg-type]
        real=real,
        bench=bench,
        mutates=("history",),
        bytes=lambda a: a["ids"].numel() * (3 * 8 + 4 + 4 * a["order"]),
    )


RELEASE = {"vocab": 129280, "ring": 16, "dead": None}
LOOKBACK = [
    _lookback("empty", []),
    _lookback("one", [(0, 0, 1)]),
    _lookback("mixed", MIXED),
    _lookback("no_dead", MIXED, dead=None),
    _lookback("all_dead", MIXED, dead=1.0),
    _lookback("least_ring", MIXED, ring=3),
    _lookback("gap", [(0, 5, 2), (0, 9, 2), (1, 3, 1)]),
    _lookback("bigram", MIXED, order=2, ring=1),
    _lookback("longer_than_ring", [(1, 3, 63), (0, 2, 129)], ring=5),
    _lookback("two_blocks", [(1, 5, 700), (0, 1, 500)], ring=4),
    _lookback("prefill_4096", [(0, 0, 4096)], real=True, **RELEASE),
    _lookback("prefill_8x1024", [(i, 77 * i, 1024) for i in range(8)], real=True, **RELEASE),
    _lookback("decode_16", [(i, 1000 + i, 1) for i in range(16)], real=True, **RELEASE),
    _lookback("verify_16x6", [(i, 1000 + i, 6) for i in range(16)], real=True, **RELEASE),
]


# ---------------------------------------------------------------- hash
def hashed(
    g: Generator,
    tokens: int,
    layers: int = 2,
    order: int = 4,
    heads: int = 8,
    start: int = 16000000,
) -> Arguments:
    """Multipliers as large as the release's and odd moduli of about `start`."""
    device = g.device

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=g, device=device)

    moduli = start + 1 + 2 * draw(0, 400, layers, order - 1, heads)
    columns = moduli.flatten(1)
    return {
        "lookback": draw(0, 99092, tokens, order).int(),
        "multipliers": 2 * draw(0, 46539438283891, layers, order) + 1,
        "primes": moduli,
        "offsets": columns.cumsum(1) - columns,
    }


def _hash(
    name: str, tokens: int, real: bool = False, anchor: Anchor | None = None, **how: int
) -> Case:
    return Case(
        "ngram_hash",
        name,
        lambda g: hashed(g, tokens, **how),
        real=real,
        bench=real,
        bytes=lambda a: a["lookback"].numel() * 4 + len(a["lookback"]) * a["offsets"].numel() * 8,
        anchor=anchor,
    )


PEER = "tile_kernels 2.1.0, one layer"
HASH = [
    _hash("empty", 0),
    _hash("one", 1),
    _hash("odd", 63, layers=1, order=3, heads=5, start=57),
    _hash("bigram", 17, layers=3, order=2, heads=1),
    _hash("two_layers", 129),
    _hash("4096", 4096, real=True, anchor=Anchor(PEER, 8.9)),
    _hash("16", 16, real=True, anchor=Anchor(PEER, 8.4)),
]

CASES = LOOKBACK + HASH
