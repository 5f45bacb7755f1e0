"""Cases of the random words: 64-bit seeds, subsequences and offsets of either sign."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tinfer.testing.cases import Arguments, Case


def _words(streams: int, count: int) -> Callable[[torch.Generator], Arguments]:
    def make(g: torch.Generator) -> Arguments:
        def bits() -> torch.Tensor:
            return torch.randint(-(2**63), 2**63 - 1, (streams,), generator=g, device=g.device)

        return {
            "seeds": bits(),
            "subsequences": bits(),
            "offsets": bits().clamp(max=2**63 - 100),
            "count": count,
        }

    return make


CASES = [
    Case("philox_words", "40x7", _words(40, 7)),
    Case("philox_words", "3x0", _words(3, 0)),
    Case("philox_words", "0x4", _words(0, 4)),
    Case("philox_words", "4096x64", _words(4096, 64), real=True),
]
