"""Index scores and selections of whole rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tinfer.config import ModelConfig


@dataclass
class Index:
    """What an index source publishes to the layers after it."""

    scores: Tensor | None  # fp32 [B, tail, L/ratio], of the last queries, with gradients
    selected: Tensor | None  # bool [B, L, L/ratio]; None: everything visible


def index_scores(q: Tensor, keys: Tensor, weights: Tensor, tail: int) -> Tensor:
    """fp32 `[B, tail, K]`: `sum_h relu(q_h . k) * w_h` for the last `tail` queries of each row."""
    q, weights = q[:, -tail:], weights[:, -tail:]
    rows, length, heads, dim = q.shape
    dots = q.reshape(rows, length * heads, dim) @ keys.transpose(1, 2)
    dots = torch.relu(dots.float()).view(rows, length, heads, -1)
    return (dots * weights[..., None]).sum(2)


def select(
    scores: Tensor, layer: int, config: ModelConfig, candidates: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Masks of the selected positions and of the candidates to pass on; -inf is invisible."""
    source, size = config.candidate_source_layer, config.candidate_block_size
    if layer == source:
        candidates = candidate_mask(scores, config.candidate_topk_blocks, size)
    elif layer > source and candidates is not None:
        scores = scores.masked_fill(~candidates, float("-inf"))
    bound = scores.topk(config.index_topk, dim=-1).values[..., -1:]
    return (scores >= bound) & (scores > float("-inf")), candidates


def candidate_mask(scores: Tensor, blocks: int, size: int) -> Tensor | None:
    """Positions of the best blocks; each query's newest block is among them."""
    length = scores.shape[-1]
    count = -(-length // size)
    if count <= blocks:
        return None
    scores = F.pad(scores, (0, count * size - length), value=float("-inf"))
    best = scores.unflatten(-1, (count, size)).amax(-1)
    newest = (scores > float("-inf")).sum(-1, keepdim=True).clamp(min=1).sub(1) // size
    best = best.scatter(-1, newest, float("inf"))
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(-1, best.topk(blocks, dim=-1).indices, True)
    return kept.repeat_interleave(size, dim=-1)[..., :length]
