"""Cases of logit processing: every op in place, fp32 and bf16, fills, dead logits."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tinfer.compat.logit_processing import IN_PROMPT
from tinfer.testing.cases import Arguments, Case
from tinfer.testing.cases.sampling import VOCAB

SEQUENCES = 6


def _logits(g: torch.Generator, rows: int, columns: int, bf16: bool) -> Tensor:
    x = torch.randn(rows, columns, generator=g, device=g.device) * 3
    x[:1, columns // 2 :] = -math.inf
    return x.bfloat16() if bf16 else x


def _integers(g: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=g, device=g.device)


def _counts(g: torch.Generator, columns: int) -> Tensor:
    counts = _integers(g, -4, 4, SEQUENCES, columns).clamp(min=0)
    prompt = _integers(g, 0, 2, SEQUENCES, columns) * IN_PROMPT
    return (counts + prompt).int()


def _counting(tokens: int, columns: int, in_prompt: bool) -> Callable[..., Arguments]:
    def make(g: torch.Generator) -> Arguments:
        return {
            "counts": torch.zeros(SEQUENCES, columns, dtype=torch.int32, device=g.device),
            "slots": _integers(g, -1, SEQUENCES + 1, tokens),
            "tokens": _integers(g, -1, columns + 1, tokens),
            "in_prompt": in_prompt,
        }

    return make


def _penalties(
    rows: int, columns: int, pending: int = 0, bf16: bool = False
) -> Callable[..., Arguments]:
    def make(g: torch.Generator) -> Arguments:
        def pick(*values: float) -> Tensor:
            return torch.tensor(values, device=g.device)[_integers(g, 0, len(values), rows)]

        return {
            "logits": _logits(g, rows, columns, bf16),
            "counts": _counts(g, columns),
            "slots": _integers(g, -1, SEQUENCES, rows),
            "repetition": pick(1.0, 1.3, 0.7),
            "frequency": pick(0.0, 0.3, -0.7),
            "presence": pick(0.0, 0.9, -0.1),
            "pending": _integers(g, -1, columns, rows, pending) if pending else None,
        }

    return make


def _unique(g: torch.Generator, rows: int, columns: int, width: int) -> Tensor:
    """int64 [rows, width], unique in a row, with a fill and ids outside the row."""
    ids = torch.rand(rows, columns + 2, generator=g, device=g.device).argsort(-1)[:, :width]
    ids[:, -1:] = -1
    return ids.contiguous()


def _bias(rows: int, columns: int, width: int, bf16: bool = False) -> Callable[..., Arguments]:
    def make(g: torch.Generator) -> Arguments:
        bias = torch.randn(rows, width, generator=g, device=g.device) * 5
        bias[:1, :1] = -math.inf
        ids = _unique(g, rows, columns, width)
        return {"logits": _logits(g, rows, columns, bf16), "ids": ids, "bias": bias}

    return make


def _bans(
    rows: int, columns: int, width: int, some: bool, bf16: bool = False
) -> Callable[..., Arguments]:
    def make(g: torch.Generator) -> Arguments:
        return {
            "logits": _logits(g, rows, columns, bf16),
            "ids": _integers(g, -1, columns + 1, rows, width),
            "active": _integers(g, 0, 2, rows).bool() if some else None,
        }

    return make


def _words(rows: int, columns: int, words: int, length: int) -> Callable[..., Arguments]:
    """Few distinct tokens, so that some prefixes match."""

    def make(g: torch.Generator) -> Arguments:
        shape = (rows, words, length)
        given = _integers(g, 0, min(3, columns), *shape)
        filled = torch.arange(length, device=g.device) < _integers(g, 0, length + 1, rows, words, 1)
        return {
            "logits": _logits(g, rows, columns, False),
            "words": torch.where(filled, -1, given),
            "history": _integers(g, -1, min(3, columns), rows, length - 1),
        }

    return make


def _case(op: str, name: str, make: Callable[..., Arguments], real: bool = False) -> Case:
    changed = "counts" if op == "count_tokens_" else "logits"
    return Case(op, name, make, real=real, mutates=(changed,))


CASES = [
    _case("count_tokens_", "prompt-200x63", _counting(200, 63, True)),
    _case("count_tokens_", "output-200x63", _counting(200, 63, False)),
    _case("count_tokens_", "0x63", _counting(0, 63, False)),
    _case("apply_penalties_", "5x300", _penalties(5, 300)),
    _case("apply_penalties_", "pending-5x63-4", _penalties(5, 63, 4)),
    _case("apply_penalties_", "bf16-3x5000", _penalties(3, 5000, 2, True)),
    _case("apply_penalties_", "2x1", _penalties(2, 1)),
    _case("apply_penalties_", "0x63", _penalties(0, 63)),
    _case("add_logit_bias_", "4x63-9", _bias(4, 63, 9)),
    _case("add_logit_bias_", "bf16-2x300-40", _bias(2, 300, 40, True)),
    _case("add_logit_bias_", "2x63-0", _bias(2, 63, 0)),
    _case("ban_tokens_", "4x63-9", _bans(4, 63, 9, True)),
    _case("ban_tokens_", "all-bf16-3x63-9", _bans(3, 63, 9, False, True)),
    _case("ban_tokens_", "0x63-3", _bans(0, 63, 3, True)),
    _case("ban_sequences_", "4x63-8x3", _words(4, 63, 8, 3)),
    _case("ban_sequences_", "3x9-4x1", _words(3, 9, 4, 1)),
    _case("ban_sequences_", "2x9-0x2", _words(2, 9, 0, 2)),
]
CASES += [
    _case("count_tokens_", f"output-64x{VOCAB}", _counting(64, VOCAB, False), True),
    _case("add_logit_bias_", f"64x{VOCAB}-300", _bias(64, VOCAB, 300), True),
    _case("ban_tokens_", f"64x{VOCAB}-16", _bans(64, VOCAB, 16, True), True),
    _case("ban_sequences_", f"64x{VOCAB}-32x4", _words(64, VOCAB, 32, 4), True),
    Case(
        "apply_penalties_",
        f"64x{VOCAB}",
        _penalties(64, VOCAB, 5),
        real=True,
        bench=True,
        mutates=("logits",),
        bytes=lambda a: a["logits"].numel() * 4,  # the counts; logits only where a token is seen
    ),
]
