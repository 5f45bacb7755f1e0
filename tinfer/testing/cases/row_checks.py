"""Cases of the checks around sampling."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tinfer.testing.cases import Arguments, Case
from tinfer.testing.cases.sampling import VOCAB, dead_rows


def _stops(rows: int, width: int) -> Callable[[torch.Generator], Arguments]:
    def make(g: torch.Generator) -> Arguments:
        def some(*shape: int) -> torch.Tensor:
            return torch.randint(-1, 6, shape, generator=g, device=g.device)

        return {"tokens": some(rows), "stop_ids": some(rows, width)}

    return make


def _outliers(
    columns: int, dtype: torch.dtype = torch.float32, limit: float = 1.5
) -> Callable[[torch.Generator], Arguments]:
    def make(g: torch.Generator) -> Arguments:
        x = dead_rows(g, columns)
        x[0, columns // 2] = -math.inf
        return {"x": x.to(dtype), "limit": limit}

    return make


CASES = [
    Case("match_stop", "70x3", _stops(70, 3)),
    Case("match_stop", "5x0", _stops(5, 0)),
    Case("match_stop", "0x2", _stops(0, 2)),
    Case("detect_outlier_and_abort", "5x300", _outliers(300)),
    Case("detect_outlier_and_abort", "bf16-5x63", _outliers(63, torch.bfloat16)),
    Case("detect_outlier_and_abort", "no_limit-5x9", _outliers(9, limit=math.inf)),
    Case("match_stop", "4096x16", _stops(4096, 16), real=True),
    Case("detect_outlier_and_abort", f"5x{VOCAB}", _outliers(VOCAB), real=True),
]
