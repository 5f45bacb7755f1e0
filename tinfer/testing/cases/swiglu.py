"""Cases of the clamped SwiGLU and its cast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Generator, Tensor

from tinfer.compat.swiglu import live_rows
from tinfer.testing.cases import Anchor, Arguments, Case, Compare
from tinfer.testing.cases.norm_rope import compare_codes, randn
from tinfer.testing.compare import assert_ulps

# The kernel's exponential and quotient are within 2^-21 of the reference's, relative.
FLIPS = 2.0**-12


def _plain(
    g: Generator, rows: int, width: int, limit: float = 10.0, weighted: bool = True
) -> Arguments:
    weights = torch.rand(rows, generator=g, device=g.device) if weighted else None
    return {"gate_up": 6 * randn(g, rows, 2 * width), "limit": limit, "weights": weights}


def _strided(g: Generator) -> Arguments:
    a = _plain(g, 9, 96)
    return a | {"gate_up": randn(g, 9, 400)[:, 100:292]}


def _special(g: Generator) -> Arguments:
    """Zero, tiny, huge, NaN and infinite values; weights zero, negative and NaN."""
    a = _plain(g, 8, 96, limit=10.0)
    x, w = a["gate_up"], a["weights"]
    x[0] = 0.0
    x[1] *= 1e-30
    x[2] *= 1e30
    x[3, 5], x[3, 100] = float("nan"), float("nan")
    x[4, 0], x[4, 96] = float("-inf"), float("inf")
    w[5], w[6], w[7] = 0.0, -1.0, float("nan")
    return a


def _counted(g: Generator, rows: int, width: int, ends: list[int], alignment: int) -> Arguments:
    row_ends = torch.tensor(ends, dtype=torch.int32, device=g.device)
    return _plain(g, rows, width) | {"row_ends": row_ends, "alignment": alignment}


def _experts(g: Generator, width: int) -> Arguments:
    """384 segments of 0 to 127 rows, each starting at a multiple of 128."""
    counts = torch.randint(0, 128, (384,), generator=g, device=g.device)
    padded = (counts + 127) // 128 * 128
    row_ends = (padded.cumsum(0) - padded + counts).to(torch.int32)
    return _plain(g, 384 * 128, width) | {"row_ends": row_ends, "alignment": 128}


def _bytes(op: str, a: Arguments) -> int:
    rows, width = a["gate_up"].shape[0], a["gate_up"].shape[1] // 2
    if (ends := a.get("row_ends")) is not None:
        rows = int(live_rows(rows, ends, a["alignment"]).sum())
    written = width * 2 if op == "swiglu" else width + width // 32
    return rows * (width * 4 + written + (0 if a["weights"] is None else 4))


_PEER = "tile_kernels swiglu_forward_and_per_token_cast per-32"
_PEERS = {24576: Anchor(_PEER, 97.2), 96: Anchor(_PEER, 6.3)}
_SMALL: list[tuple[str, Callable[[Generator], Arguments]]] = [
    ("1x96", partial(_plain, rows=1, width=96)),
    ("0x96", partial(_plain, rows=0, width=96)),
    ("63x32_no_weight", partial(_plain, rows=63, width=32, weighted=False)),
    ("129x64_no_clamp", partial(_plain, rows=129, width=64, limit=0.0)),
    ("5x160_tight", partial(_plain, rows=5, width=160, limit=0.5)),
    ("9x96_strided", _strided),
    ("8x96_special", _special),
    ("40x64_counted", partial(_counted, rows=40, width=64, ends=[17], alignment=1)),
    ("40x64_nothing", partial(_counted, rows=40, width=64, ends=[0], alignment=1)),
    ("40x64_segments", partial(_counted, rows=40, width=64, ends=[3, 8, 8, 21, 40], alignment=8)),
]


def _cases() -> list[Case]:
    small = [Case(op, name, make) for op in ("swiglu", "swiglu_cast") for name, make in _SMALL]
    real = [
        Case(
            op,
            name,
            make,
            real=True,
            bench=True,
            bytes=partial(_bytes, op),
            anchor=_PEERS.get(rows) if op == "swiglu_cast" else None,
        )
        for op in ("swiglu", "swiglu_cast")
        for name, rows, make in (
            ("24576x2304", 24576, partial(_plain, rows=24576, width=2304)),
            ("4096x2304_shared", 4096, partial(_plain, rows=4096, width=2304, weighted=False)),
            ("96x2304", 96, partial(_plain, rows=96, width=2304)),
            ("16x2304_shared", 16, partial(_plain, rows=16, width=2304, weighted=False)),
            ("384_experts", 0, partial(_experts, width=2304)),
        )
    ]
    return small + real


def _live(x: Tensor, arguments: Arguments) -> Tensor:
    """The rows that the op defines."""
    if arguments.get("row_ends") is None:
        return x
    return x[live_rows(len(x), arguments["row_ends"], arguments["alignment"])]


def _compare(actual: Tensor, expected: Tensor, arguments: Arguments) -> None:
    assert_ulps(_live(actual, arguments), _live(expected, arguments), FLIPS)


def _compare_cast(
    actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], arguments: Arguments
) -> None:
    mine = (_live(actual[0], arguments), _live(actual[1], arguments))
    theirs = (_live(expected[0], arguments), _live(expected[1], arguments))
    compare_codes(mine, theirs, FLIPS)


CASES: list[Case] = _cases()
COMPARE: dict[str, Compare] = {"swiglu": _compare, "swiglu_cast": _compare_cast}
