"""Engram's values: table gather and gated write-back, as plain torch.

Source: the release's reference (engram.py); kernels R3 to R5 of the contracts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinfer import formats
from tinfer.formats import GROUP


# ---------------------------------------------------------------- gather
def check_engram_gather(table: Tensor, scale: Tensor, ids: Tensor, row_start: int) -> None:
    """Raise where a call of `engram_gather` is invalid."""
    op = "engram_gather"
    if table.dim() != 2 or table.shape[1] % GROUP:
        raise ValueError(f"{op}: table must be [rows, E % {GROUP} == 0], got {tuple(table.shape)}")
    groups = (table.shape[0], table.shape[1] // GROUP)
    if scale.shape != groups:
        raise ValueError(f"{op}: scale must be {groups}, got {tuple(scale.shape)}")
    if ids.dim() != 2:
        raise ValueError(f"{op}: ids must be [T, cols], got {tuple(ids.shape)}")
    for name, x, dtype in (
        ("table", table, torch.uint8),
        ("scale", scale, torch.uint8),
        ("ids", ids, torch.int64),
    ):
        if x.dtype != dtype:
            raise TypeError(f"{op}: {name} must be {dtype}, got {x.dtype}")
    if row_start < 0:
        raise ValueError(f"{op}: row_start must be >= 0, got {row_start}")


def engram_gather(table: Tensor, scale: Tensor, ids: Tensor, row_start: int) -> Tensor:
    """Fetch and dequantize the table rows of every token.

    Args:
        table: uint8 `[rows, E]` e4m3 codes; `scale`: uint8 `[rows, E/32]` ue8m0.
        ids: int64 `[T, cols]` global row numbers.
        row_start: global number of the table's first row, for a shard.

    Returns:
        bf16 `[T, cols*E]`: `value * 2^(scale-127)`; rows outside `[row_start, row_start+rows)`,
        -1 included, are +0. Shards are combined by adding the results as integers: exactly one
        is non-zero, and a float sum would lose the sign of -0.

    Raises:
        ValueError, TypeError: shapes or dtypes differ from the above.

    Numerics: exact; one rounding only where the product is below bf16's normal range.
    Source: kernels R5.
    """
    check_engram_gather(table, scale, ids, row_start)
    tokens, columns, width = ids.shape[0], ids.shape[1], table.shape[1]
    local = ids - row_start
    mine = (local >= 0) & (local < len(table))
    if not len(table):
        return torch.zeros(tokens, columns * width, dtype=torch.bfloat16, device=ids.device)
    row = torch.where(mine, local, 0).to(table.device)
    factor = formats.decode_ue8m0(scale[row]).repeat_interleave(GROUP, -1)
    value = (formats.decode_e4m3(table[row]) * factor).to(ids.device, torch.bfloat16)
    return value.masked_fill(~mine[..., None], 0.0).reshape(tokens, columns * width)


# ---------------------------------------------------------------- gate
def check_engram_gate(
    stream: Tensor, kv: Tensor, weight: Tensor, dead: Tensor | None, eps: float, clamp: float
) -> None:
    """Raise where a call of `engram_gate` is invalid."""
    op = "engram_gate"
    if stream.dim() != 3:
        raise ValueError(f"{op}: stream must be [T, C, D], got {tuple(stream.shape)}")
    tokens, copies, dim = stream.shape
    if kv.shape != (tokens, copies + 1, dim):
        want = [tokens, copies + 1, dim]
        raise ValueError(f"{op}: kv must be {want}, got {tuple(kv.shape)}")
    if weight.shape != (copies, dim):
        raise ValueError(f"{op}: weight must be {[copies, dim]}, got {tuple(weight.shape)}")
    if dead is not None and dead.shape != (tokens,):
        raise ValueError(f"{op}: dead must be [{tokens}], got {tuple(dead.shape)}")
    for name, x, dtype in (
        ("stream", stream, torch.bfloat16),
        ("kv", kv, torch.bfloat16),
        ("weight", weight, torch.float32),
        ("dead", dead, torch.bool),
    ):
        if x is not None and x.dtype != dtype:
            raise TypeError(f"{op}: {name} must be {dtype}, got {x.dtype}")
    if eps < 0 or clamp < 0:
        raise ValueError(f"{op}: eps and clamp must be >= 0, got {eps} and {clamp}")


def engram_gate(
    stream: Tensor, kv: Tensor, weight: Tensor, dead: Tensor | None, eps: float, clamp: float
) -> Tensor:
    """Add the gated engram value to every copy of the stream.

    Args:
        stream: bf16 `[T, C, D]`.
        kv: bf16 `[T, C+1, D]`: one key per copy, then the value shared by all copies.
        weight: fp32 `[C, D]`, the product of the query's and the key's norm weights.
        dead: bool `[T]`, True for tokens that stay as they are, or None.
        eps: added to both mean squares; `clamp`: floor of |g| under the root.

    Returns:
        bf16 `[T, C, D]`: with `g = sum(h*w*k) * rstd(h) * rstd(k) * D^-0.5`,
        `h + sigmoid(copysign(sqrt(max(|g|, clamp)), g)) * value`. A zero carries its sign into
        the root, so g = -0 gives the negative one. Dead rows are copied bit for bit.

    Raises:
        ValueError, TypeError: shapes or dtypes differ from the above.

    Numerics: fp32, one rounding at the end.
    Source: kernels R4; model.md section 4.
    """
    check_engram_gate(stream, kv, weight, dead, eps, clamp)
    h, k, value = stream.float(), kv[:, :-1].float(), kv[:, -1:].float()
    rstd_h = torch.rsqrt(h.square().mean(-1) + eps)
    rstd_k = torch.rsqrt(k.square().mean(-1) + eps)
    g = (h * weight * k).sum(-1) * rstd_h * rstd_k * h.shape[-1] ** -0.5
    gate = torch.sigmoid(torch.copysign(g.abs().clamp(min=clamp).sqrt(), g))
    out = (h + gate[..., None] * value).to(torch.bfloat16)
    return out if dead is None else torch.where(dead[:, None, None], stream, out)
