"""The list of tiles that the expert products work through, made on the device.

A tile is (expert, first routed row, number of rows), at most CAPACITY rows of one expert; the
list is as long as the worst case, its unused end marked by expert -1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32  # entries a program writes


def tile_bound(routed: int, experts: int, capacity: int) -> int:
    """Tiles that any routing of `routed` rows needs at most."""
    return min(experts, routed) + routed // capacity


@triton.jit
def _expert_tiles_kernel(
    starts,  # int32 [E]
    ends,  # int32 [E]
    tiles,  # int32 [count, 3]
    count,
    E: tl.constexpr,
    CAPACITY: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    bins = tl.arange(0, BINS)
    rows = tl.load(ends + bins, mask=bins < E, other=0) - tl.load(
        starts + bins, mask=bins < E, other=0
    )
    needed = tl.cumsum((rows + CAPACITY - 1) // CAPACITY, axis=0)  # tiles up to and with each
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    passed = (needed[None, :] <= entry[:, None]) & (bins < E)[None, :]
    expert = tl.sum(passed.to(tl.int32), axis=1)
    before = tl.max(tl.where(passed, needed[None, :], 0), axis=1)
    real = expert < E
    start = tl.load(starts + expert, mask=real, other=0) + (entry - before) * CAPACITY
    left = tl.load(ends + expert, mask=real, other=0) - start
    written = entry < count
    tl.store(tiles + entry * 3, tl.where(real, expert, -1), mask=written)
    tl.store(tiles + entry * 3 + 1, start, mask=written)
    tl.store(tiles + entry * 3 + 2, tl.minimum(left, CAPACITY), mask=written)


def expert_tiles(starts: Tensor, ends: Tensor, routed: int, capacity: int) -> Tensor:
    """int32 [tile_bound, 3] from the row range of every expert."""
    experts = starts.numel()
    count = tile_bound(routed, experts, capacity)
    tiles = torch.empty(count, 3, dtype=torch.int32, device=starts.device)
    _expert_tiles_kernel[(triton.cdiv(count, BLOCK),)](
        starts,
        ends,
        tiles,
        count,
        E=experts,
        CAPACITY=capacity,
        BINS=triton.next_power_of_2(experts),
        BLOCK=BLOCK,
    )
    return tiles
