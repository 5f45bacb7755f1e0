"""Launcher of the routed experts.

Routed rows are grouped by expert (`moe_permute`), cut into tiles (`_moe_tiles`), pass the two
expert products (`_moe_stream` for few rows an expert, `_moe_many` for many, `_moe_hopper` on
Hopper where it is faster) and are added up in slot order (`moe_permute` again).
Nothing waits for the device: grids cover the worst case.

Source: kernels G3 to G5, E6 and E8 of the contracts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from tinfer.compat.moe_experts import check_moe_experts, is_fp4
from tinfer.kernels._call import MAX_PROGRAMS, contiguous_reason, device_reason, stride_reason
from tinfer.kernels._moe_activate import _expert_activate_kernel
from tinfer.kernels._moe_many import _expert_down_many_kernel, _expert_up_many_kernel
from tinfer.kernels._moe_stream import _expert_down_kernel, _expert_up_kernel
from tinfer.kernels._moe_tiles import expert_tiles
from tinfer.kernels._target import TRITON, Target, target
from tinfer.kernels.gemm import dequantize, is_packed
from tinfer.kernels.moe_permute import expert_combine, expert_permute

Options = dict[str, Any]
BLOCKS = {"e2m1": 128, "e4m3": 64}  # columns of a block of K
ACTIVATED = 16  # rows a program of `_moe_activate` takes at a time


@dataclass(frozen=True)
class Plan:
    """How one call is computed: the format, the tiles' capacity, and what each kernel is given."""

    fmt: str
    average: float  # rows an expert gets
    order: str  # of the activations' columns
    capacity: int
    sizes: tuple[int, ...]  # token columns of a tile's products: one, or (N0, N1, N2)
    packed: bool
    stages: int  # of activations on their way, where shared memory holds them
    hopper: bool = False  # whether `_moe_hopper` computes the products

    @property
    def many(self) -> bool:
        return len(self.sizes) > 1

    def streamed(self, k: int, stages: int) -> Options:
        """Constants of a `_moe_stream` kernel over K columns: two warps share them if they can."""
        warps = 2 if k % (2 * BLOCKS[self.fmt]) == 0 else 1
        even = k % (BLOCKS[self.fmt] * warps) == 0
        tile = {"FMT": self.fmt, "TOKENS": self.sizes[0], "W": warps, "EVEN": even, "KWIDTH": 4}
        return tile | {"PACKED": self.packed, "STAGES": stages, "num_warps": warps}

    def shared(self) -> Options:
        """Constants of a `_moe_many` kernel."""
        sizes = dict(zip(("N0", "N1", "N2"), self.sizes, strict=True))
        tile = {"FMT": self.fmt, "WARPS": 4, "PACKED": self.packed}
        stages = {"STAGES": self.stages, "num_stages": self.stages}
        return tile | sizes | stages | {"num_warps": 4}


def _plan(routed: int, experts: int, dim: int, inner: int, fp4: bool, device: Target) -> Plan:
    """By the average number of rows an expert gets.

    H200, 4096 tokens, 6 of 384 fp4 experts: 4170 us by `_moe_hopper`, 4560 by `_moe_many` for the
    first product (2984 us of it) and `_moe_hopper` for the second (1304, by `_moe_many` 1460).
    """
    fmt, average = ("e2m1" if fp4 else "e4m3"), routed / experts
    packed, small = is_packed(device), device.shared_kib < 128
    stages = 2 if small else 3
    if average > 12 and not (dim % 128 or inner % 128):
        sizes, hopper = (32, 32, 0), False
        if average > 96 and not small:
            sizes = (64, 128, 0)
        elif average > 32:
            sizes = (64, 64, 16)
            hopper = fmt == "e2m1" and (device.backend, device.arch) == ("cuda", 90)
        capacity = max(sizes[0], sizes[1] + sizes[2])
        hopper = hopper and TRITON >= (3, 6)
        return Plan(fmt, average, fmt, capacity, sizes, packed, stages, hopper)
    tile = 8 if average <= 5 else 16 if average <= 12 else 64
    order = "eights" if fp4 else "natural"
    return Plan(fmt, average, order, tile, (tile,), packed, stages)


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
    for name in ("w13", "w2"):
        if whole[name].storage_offset() % 4:
            return f"{name} starts within a word of memory"
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
    plan = _plan(routed, experts, dim, w13.shape[1] // 2, is_fp4(w13, dim), target(q.device))
    pos_to_token, pos_to_slot, token_to_pos, starts, ends = expert_permute(ids, experts, 1)
    x = dequantize(q, s, 1, plan.order)
    tiles = expert_tiles(starts, ends, routed, plan.capacity)
    h = _up(plan, x, w13, w13_s, tiles, (pos_to_token, pos_to_slot, weights), limit)
    y = _down(plan, h, w2, w2_s, tiles)
    return expert_combine(y, token_to_pos, shared)


def _up(
    plan: Plan,
    x: Tensor,
    w: Tensor,
    w_s: Tensor,
    tiles: Tensor,
    routing: tuple[Tensor, Tensor, Tensor],
    limit: float,
) -> Tensor:
    """x bf16 [T, D] -> the cast activations bf16 [P, I] of every routed row."""
    dim, inner, count = x.shape[1], w.shape[1] // 2, tiles.shape[0]
    topk = routing[2].shape[1]
    h = torch.empty(routing[0].numel(), inner, dtype=torch.bfloat16, device=x.device)
    if plan.hopper and w.storage_offset() % 16 == 0:  # rows of whole copies
        gate_up = torch.empty(h.shape[0], 2 * inner, dtype=torch.bfloat16, device=x.device)
        _rows_hopper(plan, x, routing[0], w, w_s, tiles, gate_up)
        _activate(gate_up, routing, limit, h)
        return h
    same = {"TOPK": topk, "LIMIT": limit}
    if plan.many:
        kernel, columns, constants = _expert_up_many_kernel, 64, plan.shared()
    else:
        kernel, columns = _expert_up_kernel, 32
        constants = plan.streamed(dim, 2 if plan.average > 2 else 3)
    items = count * (inner // columns)
    for first in range(0, items, MAX_PROGRAMS):
        kernel[(min(items - first, MAX_PROGRAMS),)](
            x, w, w_s, tiles, *routing, h, first, count, dim, inner, w.shape[2] // 4, 1,
            **same, **constants,
        )  # fmt: skip
    return h


def _down(plan: Plan, h: Tensor, w: Tensor, w_s: Tensor, tiles: Tensor) -> Tensor:
    """Cast activations bf16 [P, I] -> expert outputs bf16 [P, D]."""
    dim, inner, count = w.shape[1], h.shape[1], tiles.shape[0]
    y = torch.empty(h.shape[0], dim, dtype=torch.bfloat16, device=h.device)
    if plan.hopper and w.storage_offset() % 16 == 0:
        _rows_hopper(plan, h, None, w, w_s, tiles, y)
        return y
    if plan.many:
        kernel, rows, constants = _expert_down_many_kernel, 128, plan.shared() | {"REP": 2}
    else:
        kernel, rows = _expert_down_kernel, 32 if dim % 64 else 64
        constants = plan.streamed(inner, 3) | {"ROWS": rows}
    items = count * triton.cdiv(dim, rows)
    for first in range(0, items, MAX_PROGRAMS):
        kernel[(min(items - first, MAX_PROGRAMS),)](
            h, w, w_s, tiles, y, first, count, dim, inner, w.shape[2] // 4, 1, **constants
        )
    return y


def _rows_hopper(
    plan: Plan,
    x: Tensor,
    pos_to_token: Tensor | None,
    w: Tensor,
    w_s: Tensor,
    tiles: Tensor,
    y: Tensor,
) -> None:
    """y = the experts' rows times those of x that `pos_to_token` names, by default one after
    another: programs walk over tiles and blocks of 256 weight rows."""
    from tinfer.kernels._moe_hopper import _expert_rows_hopper_kernel

    rows, k, count = w.shape[1], x.shape[1], tiles.shape[0]
    programs = min(target(x.device).processors, count * triton.cdiv(rows, 256))
    _expert_rows_hopper_kernel[(programs,)](
        x, tiles if pos_to_token is None else pos_to_token, w, w_s, tiles, y, count, rows, k,
        w.shape[2] // 4, GATHER=pos_to_token is not None, N1=plan.sizes[1], N2=plan.sizes[2],
        STAGES=4, CONSUMER_REGISTERS=104, num_warps=4,
    )  # fmt: skip


def _activate(
    gate_up: Tensor, routing: tuple[Tensor, Tensor, Tensor], limit: float, h: Tensor
) -> None:
    """Gate and up bf16 [P, 2I] -> the cast activations h bf16 [P, I]."""
    (rows, inner), topk = h.shape, routing[2].shape[1]
    tiles = triton.cdiv(rows, ACTIVATED) * (inner // 128)
    _expert_activate_kernel[(min(tiles, MAX_PROGRAMS),)](
        gate_up, *routing, h, rows, inner, TOPK=topk, LIMIT=limit, ROWS=ACTIVATED,
        NATIVE=target(h.device).native_e4m3, num_warps=4,
    )  # fmt: skip
