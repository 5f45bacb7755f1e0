"""Cases of the permutation by expert and of the combination."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from tinfer.testing.cases import Arguments, Case


def choices(
    g: Generator, tokens: int, topk: int, experts: int, dropped: float = 0.0, crowd: int = 0
) -> Tensor:
    """int32 `[T, k]` distinct experts a token; some -1; with `crowd` all tokens choose the same."""
    order = torch.rand(1 if crowd else tokens, experts, generator=g, device=g.device).argsort(-1)
    ids = order[:, :topk].expand(tokens, topk).int()
    lost = torch.rand(tokens, topk, generator=g, device=g.device) < dropped
    return torch.where(lost, -1, ids).int().contiguous()


def _permute(name: str, tokens: int, topk: int, experts: int, alignment: int, real: bool = False,
             dropped: float = 0.0, crowd: int = 0) -> Case:  # fmt: skip
    def make(g: Generator) -> Arguments:
        ids = choices(g, tokens, topk, experts, dropped, crowd)
        return {"ids": ids, "num_experts": experts, "alignment": alignment}

    def nbytes(a: Arguments) -> int:
        used = a["ids"].numel() + experts * alignment // 2  # about what is filled, rows and padding
        return int(4 * (2 * a["ids"].numel() + 2 * used + 2 * experts))

    return Case("expert_permute", name, make, real=real, bench=real, bytes=nbytes)


PERMUTE = [
    _permute("empty", 0, 6, 384, 64),
    _permute("one", 1, 6, 384, 64),
    _permute("model", 15, 3, 6, 16),
    _permute("top1", 33, 1, 5, 1),
    _permute("dropped", 63, 6, 24, 8, dropped=0.5),
    _permute("all_dropped", 7, 2, 8, 32, dropped=1.1),
    _permute("crowd", 129, 6, 96, 64, crowd=1),
    _permute("blocks", 700, 6, 384, 128, dropped=0.1),
    _permute("16", 16, 6, 384, 16, real=True),
    _permute("64", 64, 6, 384, 64, real=True),
    _permute("4096", 4096, 6, 384, 128, real=True),
    _permute("4096_crowd", 4096, 6, 384, 128, real=True, crowd=1),
    _permute("20000", 20000, 6, 384, 128, real=True, dropped=0.3),
]


def combined(
    g: Generator,
    tokens: int,
    topk: int,
    dim: int,
    shared: bool = True,
    dropped: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
) -> Arguments:
    """Twice as many rows as are used, in any order; NaN in those that are not."""
    count = tokens * topk
    rows = torch.randperm(2 * count, generator=g, device=g.device)
    token_to_pos = rows[:count].view(tokens, topk).int()
    lost = torch.rand(tokens, topk, generator=g, device=g.device) < dropped
    x = torch.randn(2 * count, dim, generator=g, device=g.device).to(dtype)
    x[rows[count:]] = float("nan")
    ours = torch.randn(tokens, dim, generator=g, device=g.device).bfloat16()
    token_to_pos = torch.where(lost, -1, token_to_pos).int()
    return {"x": x, "token_to_pos": token_to_pos, "shared": ours if shared else None}


def _combine(
    name: str, tokens: int, topk: int, dim: int, real: bool = False, **how: object
) -> Case:
    def nbytes(a: Arguments) -> int:
        rows = a["token_to_pos"].numel() * a["x"].element_size()
        return int(dim * (rows + 2 * tokens * (2 if a["shared"] is not None else 1)))

    return Case(
        "expert_combine",
        name,
        lambda g: combined(g, tokens, topk, dim, **how),  # type: ignore[arg-type]
        real=real,
        bench=real,
        bytes=nbytes,
    )


COMBINE = [
    _combine("empty", 0, 6, 64),
    _combine("one", 1, 6, 5120),
    _combine("model", 63, 3, 96),
    _combine("not_shared", 17, 6, 160, shared=False),
    _combine("dropped", 33, 6, 64, dropped=0.5),
    _combine("all_dropped", 9, 2, 64, dropped=1.1, shared=False),
    _combine("fp32", 33, 6, 2000, dtype=torch.float32),
    _combine("4096", 4096, 6, 5120, real=True),
    _combine("16", 16, 6, 5120, real=True),
]

CASES = PERMUTE + COMBINE
