"""Cases of the earlier sampler's draw: sorted candidates, masses of any total."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tinfer.testing.cases import Arguments, Case
from tinfer.testing.cases.sampling import mixed_parameters, random_bits


def keys(g: torch.Generator, rows: int) -> dict[str, Tensor]:
    positions = torch.randint(0, 2**40, (rows,), generator=g, device=g.device)
    return {"seeds": random_bits(g, rows), "positions": positions}


def _draw(rows: int, width: int) -> Callable[[torch.Generator], Arguments]:
    def make(g: torch.Generator) -> Arguments:
        # Totals on both sides of 2^31, and one row without any mass.
        top = 2**32 // width
        masses = torch.randint(0, top, (rows, width), generator=g, device=g.device)
        masses[rows // 2 : rows // 2 + 1] = 0
        return {"masses": masses, **keys(g, rows)}

    return make


def _sample(rows: int, width: int) -> Callable[[torch.Generator], Arguments]:
    def make(g: torch.Generator) -> Arguments:
        values = torch.randn(rows, width, generator=g, device=g.device) * 3
        values[1:2, width // 2 :] = -math.inf
        values = values.sort(dim=-1, descending=True)[0]
        values[2:3] = -math.inf
        values[3:4, :1] = math.nan
        ids = torch.randint(0, 129280, (rows, width), generator=g, device=g.device)
        return {"values": values, "ids": ids, **mixed_parameters(g, rows), **keys(g, rows)}

    return make


CASES = [Case("seeds_compat_draw", f"{b}x{k}", _draw(b, k)) for b, k in ((5, 6), (2, 1), (0, 3))]
CASES += [
    Case("sample_seeds_compat", f"{b}x{k}", _sample(b, k)) for b, k in ((6, 200), (3, 1), (0, 3))
]
CASES += [
    Case("seeds_compat_draw", "64x4096", _draw(64, 4096), real=True),
    Case("sample_seeds_compat", "64x4096", _sample(64, 4096), real=True),
]
