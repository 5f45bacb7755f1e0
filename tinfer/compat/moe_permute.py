"""Grouping of routed rows by expert, and the weighted outputs' way back, as plain torch.

Source: kernels E5, E6, E8 and E9 of the contracts.
"""

from __future__ import annotations

import torch
from torch import Tensor


# ---------------------------------------------------------------- permutation
def permuted_rows(tokens: int, topk: int, num_experts: int, alignment: int) -> int:
    """Rows that hold any routing of `tokens` tokens, every expert's rows padded to `alignment`."""
    routed = tokens * topk
    rows = routed + min(num_experts, routed) * (alignment - 1)
    return -(-rows // alignment) * alignment


def check_expert_permute(ids: Tensor, num_experts: int, alignment: int) -> None:
    """Raise where a call of `expert_permute` is invalid."""
    op = "expert_permute"
    if ids.dim() != 2:
        raise ValueError(f"{op}: ids must be [T, k], got {tuple(ids.shape)}")
    if ids.dtype != torch.int32:
        raise TypeError(f"{op}: ids must be torch.int32, got {ids.dtype}")
    if num_experts < 1:
        raise ValueError(f"{op}: num_experts must be >= 1, got {num_experts}")
    if alignment < 1:
        raise ValueError(f"{op}: alignment must be >= 1, got {alignment}")


def expert_permute(
    ids: Tensor, num_experts: int, alignment: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Order the routed rows by expert, then token, then slot.

    Args:
        ids: int32 `[T, k]` expert of each token and slot. Ids outside `[0, num_experts)`, -1
            included, are dropped.
        num_experts: E.
        alignment: each expert's first row is a multiple of this.

    Returns:
        pos_to_token int32 `[P]`, pos_to_slot int32 `[P]` (-1 in rows that hold nothing),
        token_to_pos int32 `[T, k]` (-1 where dropped), expert_start int32 `[E]` and expert_end
        int32 `[E]` (start + number of rows; the rows up to the next start are padding). P is
        `permuted_rows(T, k, E, alignment)`, the worst case, so nothing waits for the device.

    Raises:
        ValueError, TypeError: shapes or dtypes differ from the above.

    Numerics: integers, exact and deterministic.
    Source: kernels E6.
    """
    check_expert_permute(ids, num_experts, alignment)
    tokens, topk = ids.shape
    device, rows = ids.device, permuted_rows(tokens, topk, num_experts, alignment)
    flat = ids.reshape(-1).long()
    valid = (flat >= 0) & (flat < num_experts)
    key = torch.where(valid, flat, num_experts)
    counts = torch.bincount(key, minlength=num_experts + 1)[:num_experts]
    padded = (counts + alignment - 1) // alignment * alignment
    start = padded.cumsum(0) - padded
    first = counts.cumsum(0) - counts  # rows of smaller experts, unpadded
    order = torch.sort(key, stable=True).indices
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=device)
    expert = key.clamp(max=num_experts - 1)
    pos = torch.where(valid, start[expert] + rank - first[expert], -1)
    pos_to_token = torch.full((rows,), -1, dtype=torch.int32, device=device)
    pos_to_slot = pos_to_token.clone()
    kept = valid.nonzero()[:, 0]
    pos_to_token[pos[kept]] = (kept // max(topk, 1)).int()
    pos_to_slot[pos[kept]] = (kept % max(topk, 1)).int()
    token_to_pos = pos.int().view(tokens, topk)
    return pos_to_token, pos_to_slot, token_to_pos, start.int(), (start + counts).int()


# ---------------------------------------------------------------- combination
def check_expert_combine(x: Tensor, token_to_pos: Tensor, shared: Tensor | None) -> None:
    """Raise where a call of `expert_combine` is invalid."""
    op = "expert_combine"
    if x.dim() != 2:
        raise ValueError(f"{op}: x must be [P, D], got {tuple(x.shape)}")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"{op}: x must be torch.bfloat16 or torch.float32, got {x.dtype}")
    if token_to_pos.dim() != 2:
        raise ValueError(f"{op}: token_to_pos must be [T, k], got {tuple(token_to_pos.shape)}")
    if token_to_pos.dtype != torch.int32:
        raise TypeError(f"{op}: token_to_pos must be torch.int32, got {token_to_pos.dtype}")
    if shared is not None:
        want = (token_to_pos.shape[0], x.shape[1])
        if shared.shape != want:
            raise ValueError(f"{op}: shared must be {list(want)}, got {tuple(shared.shape)}")
        if shared.dtype != torch.bfloat16:
            raise TypeError(f"{op}: shared must be torch.bfloat16, got {shared.dtype}")


def expert_combine(x: Tensor, token_to_pos: Tensor, shared: Tensor | None) -> Tensor:
    """Sum the expert outputs of every token.

    Args:
        x: bf16 or fp32 `[P, D]` expert outputs, route weights already applied.
        token_to_pos: int32 `[T, k]` row of each token and slot; -1 adds nothing.
        shared: bf16 `[T, D]` output of the shared expert, or None.

    Returns:
        bf16 `[T, D]`: slots in ascending order, then `shared`; without any, zeros.

    Raises:
        ValueError, TypeError: shapes or dtypes differ from the above.

    Numerics: fp32 additions in that order, one rounding. Exact.
    Source: kernels E8; golden README trap 19.
    """
    check_expert_combine(x, token_to_pos, shared)
    tokens, topk = token_to_pos.shape
    total = torch.zeros(tokens, x.shape[1], dtype=torch.float32, device=x.device)
    if len(x):
        for i in range(topk):
            pos = token_to_pos[:, i].long()
            row = x[pos.clamp(min=0)].float()
            total = torch.where((pos >= 0)[:, None], total + row, total)
    if shared is not None:
        total = total + shared.float()
    return total.to(torch.bfloat16)
