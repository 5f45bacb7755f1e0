"""Launcher of the routed experts.

Routed rows are grouped by expert (`moe_permute`), cut into tiles (`_moe_tiles`), pass the two
expert products (`_moe_stream` for few rows an expert) and are added up in slot order
(`moe_permute` again). Nothing waits for the device: grids cover the worst case.

Source: kernels G3 to G5, E6 and E8 of the contracts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from tinfer.compat.moe_experts import check_moe_experts, is_fp4
from tinfer.kernels._call import MAX_PROGRAMS, contiguous_reason, device_reason, stride_reason
from tinfer.kernels._moe_stream import _expert_down_kernel, _expert_up_kernel
from tinfer.kernels._moe_tiles import expert_tiles
from tinfer.kernels._target import target
from tinfer.kernels.gemm import dequantize, is_packed
from tinfer.kernels.moe_permute import expert_combine, expert_permute

Options = dict[str, Any]


def supports_moe_experts(
    q: Tensor,
    s: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_s: Tensor,
    w2: Tensor,
    w2_s: Tensor,
    limit: float,
    shared: Tensor | None,
) -> str | None:
    """Contiguous weights, ids and routing weights; rows of activations contiguous."""
    whole = {"ids": ids, "weights": weights, "w13": w13, "w13_s": w13_s, "w2": w2, "w2_s": w2_s}
    rows = {"q": q, "s": s, "shared": shared}
    return device_reason(**whole, **rows) or contiguous_reason(**whole) or stride_reason(**rows)


def moe_experts(
    q: Tensor,
    s: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_s: Tensor,
    w2: Tensor,
    w2_s: Tensor,
    limit: float,
    shared: Tensor | None,
) -> Tensor:
    check_moe_experts(q, s, ids, weights, w13, w13_s, w2, w2_s, limit, shared)
    (tokens, dim), experts, routed = q.shape, w13.shape[0], ids.numel()
    if not tokens or not dim or not routed:
        nothing = torch.zeros_like(q, dtype=torch.bfloat16) if shared is None else shared
        return nothing.clone(memory_format=torch.contiguous_format)
    pos_to_token, pos_to_slot, token_to_pos, starts, ends = expert_permute(ids, experts, 1)
    x = dequantize(q, s, 1, eights=is_fp4(w13, dim))
    capacity = _capacity(routed, experts)
    tiles = expert_tiles(starts, ends, routed, capacity)
    h = _up(x, w13, w13_s, tiles, capacity, (pos_to_token, pos_to_slot, weights), limit)
    y = _down(h, w2, w2_s, tiles, capacity)
    return expert_combine(y, token_to_pos, shared)


def _capacity(routed: int, experts: int) -> int:
    """Rows a tile holds: the next power of two above one and a half times the average."""
    return min(max(8, triton.next_power_of_2(3 * routed // (2 * experts))), 64)


def _split(k: int, block: int, most: int) -> int:
    """Warps that share the K of a tile: the most that leave no warp without a block."""
    warps = 1
    while warps < most and k % (2 * warps * block) == 0:
        warps *= 2
    return warps


def _options(x: Tensor, fmt: str, k: int, most: int) -> Options:
    block = 128 if fmt == "e2m1" else 64
    warps = _split(k, block, most)
    even = k % (block * warps) == 0
    packed = is_packed(target(x.device))
    return {"FMT": fmt, "W": warps, "EVEN": even, "KWIDTH": 4, "PACKED": packed, "num_warps": warps}


def _up(
    x: Tensor,
    w: Tensor,
    w_s: Tensor,
    tiles: Tensor,
    capacity: int,
    routing: tuple[Tensor, Tensor, Tensor],
    limit: float,
) -> Tensor:
    """x bf16 [T, D] -> the cast activations bf16 [P, I] of every routed row."""
    pos_to_token, pos_to_slot, weights = routing
    dim, inner = x.shape[1], w.shape[1] // 2
    fmt = "e2m1" if is_fp4(w, dim) else "e4m3"
    h = torch.empty(pos_to_token.numel(), inner, dtype=torch.bfloat16, device=x.device)
    items = tiles.shape[0] * (inner // 32)
    for first in range(0, items, MAX_PROGRAMS):
        _expert_up_kernel[(min(items - first, MAX_PROGRAMS),)](
            x,
            w,
            w_s,
            tiles,
            pos_to_token,
            pos_to_slot,
            weights,
            h,
            first,
            tiles.shape[0],
            dim,
            inner,
            w.shape[2] // 4,
            1,
            TOPK=weights.shape[1],
            LIMIT=limit,
            TOKENS=capacity,
            NATIVE=target(x.device).native_e4m3,
            **_options(x, fmt, dim, 4),
        )
    return h


def _down(h: Tensor, w: Tensor, w_s: Tensor, tiles: Tensor, capacity: int) -> Tensor:
    """Cast activations bf16 [P, I] -> expert outputs bf16 [P, D]."""
    dim, inner = w.shape[1], h.shape[1]
    fmt = "e2m1" if is_fp4(w, inner) else "e4m3"
    y = torch.empty(h.shape[0], dim, dtype=torch.bfloat16, device=h.device)
    rows = 64 if dim % 64 == 0 else 32
    items = tiles.shape[0] * triton.cdiv(dim, rows)
    for first in range(0, items, MAX_PROGRAMS):
        _expert_down_kernel[(min(items - first, MAX_PROGRAMS),)](
            h,
            w,
            w_s,
            tiles,
            y,
            first,
            tiles.shape[0],
            dim,
            inner,
            w.shape[2] // 4,
            1,
            ROWS=rows,
            TOKENS=capacity,
            **_options(h, fmt, inner, 4),
        )
    return y
