"""Reference of the compressor's pooling over groups of `ratio` tokens, with carried state."""

from __future__ import annotations

import torch
from torch import Tensor


def check_compress_pool(
    kv: Tensor, score: Tensor, positions: Tensor, seq: Tensor, state: Tensor, ratio: int
) -> None:
    op = "compress_pool"
    for name, x in (("kv", kv), ("score", score), ("state", state)):
        if x.dtype != torch.float32:
            raise TypeError(f"{op}: {name} must be float32, got {x.dtype}")
    if kv.dim() != 2 or score.shape != kv.shape:
        raise ValueError(
            f"{op}: kv and score must be [T, D] alike, got {list(kv.shape)}, {list(score.shape)}"
        )
    for name, x in (("positions", positions), ("seq", seq)):
        if x.dtype != torch.int64:
            raise TypeError(f"{op}: {name} must be int64, got {x.dtype}")
        if x.shape != kv.shape[:1]:
            raise ValueError(f"{op}: {name} must be [{len(kv)}], got {list(x.shape)}")
    if ratio < 1:
        raise ValueError(f"{op}: ratio must be positive, got {ratio}")
    ring = state.shape[1] if state.dim() == 4 else 0
    if state.dim() != 4 or state.shape[2:] != (2, kv.shape[1]) or ring < ratio:
        raise ValueError(
            f"{op}: state must be [S, ring >= {ratio}, 2, {kv.shape[1]}], got {list(state.shape)}"
        )
    if not state.is_contiguous():
        raise ValueError(f"{op}: state must be contiguous, got strides {list(state.stride())}")


def compress_pool(
    kv: Tensor, score: Tensor, positions: Tensor, seq: Tensor, state: Tensor, ratio: int
) -> Tensor:
    """Softmax-weighted mean over each complete group of `ratio` tokens, channel by channel.

    kv, score  fp32 [T, D]; the rows of one sequence are contiguous, positions ascending by 1
    positions  int64 [T]
    seq        int64 [T], row of `state`; -1 marks a padded row (zeros out, no state written)
    state      fp32 [S, ring, 2, D]: kv and score of position p at ring slot p % ring; the op
               writes the last `ring` rows of every sequence. A roll-back to position p needs no
               repair while ring >= ratio - 1 + (tokens taken back).

    Returns: bf16 [T, D]; row t holds the group that ends at its position where
    (position + 1) % ratio == 0, and zeros elsewhere. Members of the group that are not rows of
    this call come from `state`, so any split of a sequence into calls gives the same bits.
    Raises: TypeError, ValueError for dtypes and shapes.
    Numerics: fp32 softmax over the group (maximum subtracted), members added oldest first, one
    rounding to bf16.
    Source: the release's compressor (golden vectors, ratios 2 and 4).
    """
    check_compress_pool(kv, score, positions, seq, state, ratio)
    tokens, ring = len(kv), state.shape[1]
    row = torch.arange(tokens, device=kv.device)
    slot = seq.clamp(min=0)
    members = []
    for back in range(ratio - 1, -1, -1):
        source, earlier = (row - back).clamp(min=0), (positions - back) % ring
        here = (row >= back) & (seq[source] == seq) & (positions[source] == positions - back)
        carried = state[slot, earlier]
        members.append(torch.where(here[:, None], kv[source], carried[:, 0]))
        members.append(torch.where(here[:, None], score[source], carried[:, 1]))
    weights = torch.stack(members[1::2]).softmax(0)
    pooled = torch.zeros_like(kv)
    for weight, value in zip(weights, members[0::2], strict=True):
        pooled = pooled + weight * value
    done = ((positions + 1) % ratio == 0) & (seq >= 0)
    out = torch.where(done[:, None], pooled, 0.0).to(torch.bfloat16)

    later = (row + ring).clamp(max=max(tokens - 1, 0))
    last = (row + ring >= tokens) | (seq[later] != seq) if tokens else seq.bool()
    keep = last & (seq >= 0)
    where = (seq[keep], positions[keep] % ring)
    state[where] = torch.stack([kv[keep], score[keep]], 1)
    return out
