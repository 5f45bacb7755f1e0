"""Cases of log-probabilities: dead logits, ties, tokens outside the row, temperatures."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tinfer.testing.cases import Arguments, Case
from tinfer.testing.cases.sampling import VOCAB, logits_of

MAX_ERROR = 1e-5  # of a log-probability, relative above magnitude 1; of a probability


def _tokens(g: torch.Generator, rows: int, columns: int) -> Tensor:
    """Tokens of which the first ones lie outside the row."""
    tokens = torch.randint(0, columns, (rows,), generator=g, device=g.device)
    tokens[:1], tokens[1:2] = -1, columns
    return tokens


def _scores(
    kind: str, rows: int, columns: int, top_n: int | None, scaled: bool, bf16: bool = False
) -> Callable[[torch.Generator], Arguments]:
    """`top_n` None: an op without that argument."""

    def make(g: torch.Generator) -> Arguments:
        logits = logits_of(kind, g, rows, columns)
        lists = {} if top_n is None else {"top_n": top_n}
        temperature = None
        if scaled:
            values = torch.tensor([1.0, 0.0, 0.3, 5.0], device=g.device)
            temperature = values[torch.arange(rows, device=g.device) % 4]
        return {
            "logits": logits.bfloat16() if bf16 else logits,
            "tokens": _tokens(g, rows, columns),
            **lists,
            "temperature": temperature,
        }

    return make


def _dead(g: torch.Generator) -> Arguments:
    logits = torch.full((3, 70), -math.inf, device=g.device)
    logits[1, 5] = 2.0
    logits[2] = 1.0
    tokens = torch.tensor([0, 5, -1], device=g.device)
    return {"logits": logits, "tokens": tokens, "top_n": 4, "temperature": None}


def _lookup(
    rows: int, width: int, queries: int, by_key: bool, dtype: torch.dtype = torch.int32
) -> Callable[[torch.Generator], Arguments]:
    def make(g: torch.Generator) -> Arguments:
        pick = torch.rand(rows, 2 * width + 1, generator=g, device=g.device).argsort(-1)
        keys = pick[:, :width].to(dtype).contiguous()
        keys[:, width // 2 : width // 2 + 1] = -1
        wanted = torch.randint(-1, width + 2, (rows, queries), generator=g, device=g.device)
        return {
            "keys": keys,
            "values": torch.randn(rows, width, generator=g, device=g.device),
            "queries": wanted,
            "by_key": by_key,
            "default": -math.inf,
        }

    return make


def _bytes(a: Arguments) -> int:
    return a["logits"].numel() * a["logits"].element_size()


def compare(actual: Any, expected: Any, _: Arguments) -> None:
    """Floats within MAX_ERROR, relative above magnitude 1; infinities, NaN and ids alike."""
    mine, theirs = (x if isinstance(x, tuple) else (x,) for x in (actual, expected))
    for a, e in zip(mine, theirs, strict=True):
        assert a.shape == e.shape, f"shape {list(a.shape)}, want {list(e.shape)}"
        assert a.dtype == e.dtype, f"{a.dtype}, want {e.dtype}"
        if not e.is_floating_point():
            assert torch.equal(a, e), "ids differ"
            continue
        same = torch.where(e.isfinite(), 0.0, e).nan_to_num(0.5)
        assert torch.equal(torch.where(a.isfinite(), 0.0, a).nan_to_num(0.5), same)
        error = (a - e)[e.isfinite()].abs() / e[e.isfinite()].abs().clamp(min=1.0)
        assert not error.numel() or error.max().item() <= MAX_ERROR, f"error {error.max().item()}"


COMPARE = {"token_logprobs": compare, "sum_smaller_probs": compare}

_SHAPES: list[tuple[str, str, int, int, int, bool, bool]] = [
    ("normal-4x300-5", "normal", 4, 300, 5, False, False),
    ("scaled-4x300-5", "normal", 4, 300, 5, True, False),
    ("sliced-2x5000-2", "normal", 2, 5000, 2, True, False),
    ("ties-3x129-20", "ties", 3, 129, 20, False, False),
    ("masked-3x63-9", "masked", 3, 63, 9, True, False),
    ("bf16-3x63-3", "normal", 3, 63, 3, True, True),
    ("one-3x1-1", "normal", 3, 1, 1, False, False),
    ("none-3x63-0", "normal", 3, 63, 0, True, False),
    ("empty-0x63-2", "normal", 0, 63, 2, False, False),
]
CASES = [
    Case("token_logprobs", n, _scores(kind, b, v, top, scaled, bf16))
    for n, kind, b, v, top, scaled, bf16 in _SHAPES
]
CASES += [Case("token_logprobs", "dead-3x70-4", _dead)]
CASES += [
    Case("sum_smaller_probs", n.rsplit("-", 1)[0], _scores(kind, b, v, None, scaled, bf16))
    for n, kind, b, v, _, scaled, bf16 in _SHAPES
]
CASES += [
    Case("map_lookup", "by_key-3x40x5", _lookup(3, 40, 5, True)),
    Case("map_lookup", "by_position-3x40x5", _lookup(3, 40, 5, False)),
    Case("map_lookup", "long_keys-2x9x3", _lookup(2, 9, 3, True, torch.int64)),
    Case("map_lookup", "empty-2x0x3", _lookup(2, 0, 3, True)),
    Case("map_lookup", "by_key-64x4096x8", _lookup(64, 4096, 8, True), real=True),
]
_REAL = [(64, 0), (64, 20), (1, 20), (512, 1)]
CASES += [
    Case(
        "token_logprobs",
        f"{b}x{VOCAB}-{n}",
        _scores("normal", b, VOCAB, n, False),
        real=True,
        bench=True,
        bytes=_bytes,
    )
    for b, n in _REAL
]
CASES += [
    Case(
        "sum_smaller_probs",
        f"64x{VOCAB}",
        _scores("normal", 64, VOCAB, None, True),
        real=True,
        bench=True,
        bytes=_bytes,
    )
]
