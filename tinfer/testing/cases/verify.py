"""Cases of verification: spans of 0 to 6 rows, drafts of every kind, dead rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from tinfer.testing.cases import Arguments, Case
from tinfer.testing.cases.sampling import VOCAB, mixed_parameters, random_bits


def spans(rows: int, device: torch.device) -> Tensor:
    """int32 [B+1] over `rows` rows: spans of 3, 0, 5, 1, 6, 2, ... rows, then one of padding."""
    cu, lengths = [0], itertools.cycle((3, 0, 5, 1, 6, 2))
    while cu[-1] < rows:
        cu.append(min(cu[-1] + next(lengths), rows))
    return torch.tensor([*cu, rows], dtype=torch.int32, device=device)


def _equality(rows: int, golden: bool, unowned: int = 0) -> Callable[[torch.Generator], Arguments]:
    def make(g: torch.Generator) -> Arguments:
        def tokens() -> Tensor:
            return (torch.rand(rows, generator=g, device=g.device) < 0.2).long()

        cu = spans(rows - unowned, g.device)
        mask = torch.rand(len(cu) - 1, generator=g, device=g.device) < 0.5
        return {
            "target_tokens": tokens(),
            "draft_tokens": tokens(),
            "cu_rows": cu,
            "golden_tokens": tokens() if golden else None,
            "golden_mask": mask if golden else None,
        }

    return make


def _rejection(
    rows: int, columns: int, sampled: bool, dtype: torch.dtype = torch.float32
) -> Callable[[torch.Generator], Arguments]:
    """Draft tokens come from the draft's likely ones, so that some are accepted."""

    def make(g: torch.Generator) -> Arguments:
        def noise() -> Tensor:
            return torch.randn(rows, columns, generator=g, device=g.device)

        logits = noise() * 2
        draft = logits + noise() * 0.3
        tokens = draft.argmax(-1)
        parameters = mixed_parameters(g, rows)
        logits[3:4, columns // 2] = math.nan
        draft[4:5] = -math.inf
        tokens[5:6], tokens[6:7] = -1, columns
        positions = torch.randint(0, 2**33, (rows,), generator=g, device=g.device)
        return {
            "logits": logits.to(dtype),
            "draft_logits": draft.to(dtype) if sampled else None,
            "draft_tokens": tokens,
            "cu_rows": spans(rows, g.device),
            **parameters,
            "seeds": random_bits(g, rows),
            "positions": positions,
        }

    return make


CASES = [
    Case("get_accept_result", "40", _equality(40, False)),
    Case("get_accept_result", "golden-40", _equality(40, True)),
    Case("get_accept_result", "unowned-12", _equality(12, True, 3)),
    Case("get_accept_result", "0", _equality(0, False)),
    Case("verify_drafts", "greedy-7x33", _rejection(7, 33, False)),
    Case("verify_drafts", "sampled-7x33", _rejection(7, 33, True)),
    Case("verify_drafts", "bf16-4x33", _rejection(4, 33, True, torch.bfloat16)),
    Case("verify_drafts", "0x33", _rejection(0, 33, True)),
    Case("get_accept_result", "4096", _equality(4096, True), real=True),
    Case("verify_drafts", f"greedy-64x{VOCAB}", _rejection(64, VOCAB, False), real=True),
    Case("verify_drafts", f"sampled-64x{VOCAB}", _rejection(64, VOCAB, True), real=True),
]
