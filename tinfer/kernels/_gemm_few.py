"""Launchers of products of few tokens, bound by reading the weight once.

On Hopper, aligned e4m3 weights meet bf16 activations in `_gemm_hopper` and e4m3 ones in
`_gemm_hopper_codes` or, more than 16 tokens, `_gemm_hopper_linear`; everything else, and every
other device, goes through `_gemm_decode`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from tinfer.formats import GROUP
from tinfer.kernels._gemm_decode import _add_parts_kernel, _few_tokens_kernel
from tinfer.kernels._target import TRITON, Target, target

FEW_TOKENS = 64
_CODED_TOKENS = 16  # of `_gemm_hopper_codes`
COLUMNS = {torch.uint8: 16, torch.bfloat16: 8}  # of one 16-byte piece
Tiles = dict[str, Any]
_STEP = 128  # columns of a step of `_gemm_hopper`


def is_packed(device: Target) -> bool:
    """Whether pairs of bf16 multiply in one instruction of inline assembly."""
    return device.backend == "cuda"


def aligned(x: Tensor, unit: int = 16) -> bool:
    """Whether every row starts at a multiple of `unit` bytes; memory itself is allocated at one."""
    starts = (x.storage_offset(), *x.stride()[:-1])
    return all(s * x.element_size() % unit == 0 for s in starts)


def takes_few(x: Tensor, w: Tensor) -> bool:
    whole = x.shape[-1] % COLUMNS[w.dtype] == 0 and aligned(x) and aligned(w)
    return x.shape[0] <= FEW_TOKENS and whole and x.shape[-1] > 0


def few_tokens(x: Tensor, x_s: Tensor | None, w: Tensor, w_s: Tensor | None, out: Tensor) -> None:
    """x [T, G, K], w [G*N, K] -> out [T, G, N], T <= FEW_TOKENS."""
    if x_s is None and w_s is not None and takes_hopper(x, w, w_s, target(x.device)):
        _few_on_hopper(x, w, w_s, out)
    else:
        _few_anywhere(x, x_s, w, w_s, out)


# ---------------------------------------------------------------- any device
def few_tiles(tokens: int, n: int, k: int, fmt: torch.dtype, processors: int) -> Tiles:
    """ROWS weight rows a program, W warps splitting K, STAGES steps in flight.

    H200, cold, us at e4m3 (N, K) = (32768, 1280) and (5120, 8192): 16 tokens, W=4: 28.9 and 33.9
    (W=8: 45.4 and 37.6); 64 tokens, W=2: 59.2 and 94.9, W=4: 71.1 and 80.6. bf16 (384, 5120), 16
    tokens: 8 rows, W=8 11.9 (32 rows, W=4: 17.7): few rows need every processor they can get.
    """
    tile = max(8, triton.next_power_of_2(tokens))
    narrow = fmt == torch.bfloat16 and 2 * triton.cdiv(n, 32) < processors
    most = 8 if narrow else 2 if tile > 32 and k <= 2048 else 4
    block, warps = 4 * COLUMNS[fmt], 1
    while warps < most and 2 * warps * block <= k:
        warps *= 2
    stages = 3 if tile > 32 and warps >= 4 else 4
    return {"ROWS": 8 if narrow else 32, "W": warps, "TOKENS": tile, "STAGES": stages}


def _few_anywhere(
    x: Tensor, x_s: Tensor | None, w: Tensor, w_s: Tensor | None, out: Tensor
) -> None:
    tokens, groups, k = x.shape
    n = w.shape[0] // groups
    device = target(x.device)
    tiles = few_tiles(tokens, n, k, w.dtype, device.processors)
    block = 4 * COLUMNS[w.dtype]
    programs = triton.cdiv(n, tiles["ROWS"]) * groups
    _few_tokens_kernel[(programs,)](
        x,
        x if x_s is None else x_s,
        w,
        w if w_s is None else w_s,
        out,
        tokens,
        n,
        k,
        groups,
        x.stride(0) * x.element_size() // 4,
        x.stride(1) * x.element_size() // 4,
        0 if x_s is None else x_s.stride(0),
        w.stride(0) * w.element_size() // 4,
        0 if w_s is None else w_s.stride(0),
        1,
        FMT="bf16" if w_s is None else "e4m3",
        CODED=x_s is not None,
        EVEN=n % tiles["ROWS"] == 0 and k % (block * tiles["W"]) == 0,
        SHARED_SCALE=n % GROUP == 0 or groups == 1,
        KWIDTH=4,
        PACKED=is_packed(device),
        num_warps=tiles["W"],
        **tiles,
    )


# ---------------------------------------------------------------- Hopper
@dataclass(frozen=True)
class CodesTiles:
    """`deep`: parts of K that the warps of a program take at once, 128 columns each."""

    rows: int
    tokens: int
    stages: int
    deep: int


def codes_tiles(tokens: int, n: int, k: int, processors: int) -> CodesTiles:
    """Tiles for e4m3 activations where these stay codes. Few rows a program keep all processors
    busy without splitting K between programs; where rows abound and K is short, warps share rows.

    H200, cold, us, 16 tokens, rows and depth (16, 4), (32, 4), (64, 1): (5120, 8192) 21.2, 23.1, -;
    (25600, 6144) 56.5, 54.4, 62.0; (32768, 1280) -, -, 19.6, where (32, 2) takes 22.7. 16 rows, 3
    and 4 stages: (5120, 8192) 21.6 and 21.2; 3 and 6 stages: (512, 5120) 10.3 and 9.6.
    """
    tile, steps = 8 if tokens <= 8 else 16, k // _STEP
    if steps % 4 == 0:
        rows, deep = 32 if tile == 16 and n // 32 >= 4 * processors else 16, 4
    elif steps % 2 or n // 64 >= 3 * processors:
        rows, deep = 64, 1
    else:
        rows, deep = 32, 2
    programs = n // rows
    stages = 6 if programs <= processors else 4 if deep == 4 and programs <= 3 * processors else 3
    return CodesTiles(rows, tile, stages, deep)


def takes_codes(q: Tensor, s: Tensor) -> bool:
    """Whether `_gemm_hopper_codes` takes a call that `takes_hopper` takes."""
    return q.shape[0] <= _CODED_TOKENS and aligned(s, 4) and s.storage_offset() % 4 == 0


def codes_on_hopper(q: Tensor, s: Tensor, w: Tensor, w_s: Tensor, out: Tensor) -> None:
    """q e4m3 [T, K], w [N, K] -> out [T, N], for arguments of `takes_codes`."""
    from tinfer.kernels._gemm_hopper_codes import _codes_hopper_kernel

    tokens, k = q.shape
    n = w.shape[0]
    tiles = codes_tiles(tokens, n, k, target(q.device).processors)
    _codes_hopper_kernel[(n // tiles.rows,)](
        q, s, w, w_s, out, tokens, n, k, q.stride(0), s.stride(0), w.stride(0), w_s.stride(0),
        ROWS=tiles.rows, TOKENS=tiles.tokens, STAGES=tiles.stages, DEEP=tiles.deep, num_warps=4,
    )  # fmt: skip


@dataclass(frozen=True)
class HopperTiles:
    """`units`: steps of 128 columns a program takes, all of a tile's if `whole`."""

    rows: int
    tokens: int
    units: int
    programs: int
    whole: bool

    def sharers(self, steps: int) -> int:
        """At most so many programs share a tile of `steps`."""
        return (steps - 2) // self.units + 2


def hopper_tiles(tokens: int, n: int, k: int, processors: int) -> HopperTiles:
    """Tiles of 64 rows. A tile a program where that keeps the device busy; otherwise all
    processors get the same number of steps, `resident` programs each; up to 17 share a tile.

    H200, us in a graph: (8 x 1024, 4096), 16 tokens: 4 a processor, 3 stages 13.0, 3 and 4 15.2.
    """
    rows, tile, steps = 64, max(8, triton.next_power_of_2(tokens)), k // _STEP
    resident = 4 if tile <= 16 else 3
    tiles, slots = triton.cdiv(n, rows), resident * processors
    whole = tiles >= 2 * processors if tile <= 32 else 0.9 * slots <= tiles <= slots
    fair = max(triton.cdiv(tiles * steps, slots), triton.cdiv(steps, 16))
    units = steps if whole else min(steps, fair)
    return HopperTiles(rows, tile, units, triton.cdiv(tiles * steps, units), units == steps)


def linear_tiles(tokens: int, n: int, k: int, processors: int) -> HopperTiles:
    """Tiles for e4m3 activations: all processors get about the same number of steps, at most a
    tile's, and tiles the same number of programs where partial sums are many and that costs little.

    All tokens come from L2 anew for every tile of rows, T * 2 / rows bytes for each of the weight,
    so many tokens want tall tiles if there are enough. H200, cold, us, 64 tokens, 64 and 128 rows:
    (32768, 1280) 28.5 and 23.3, (25600, 6144) 87.7 and 66.9, (4608, 5120) 22.0 and 24.5; programs
    of 13 and 16 of 64 steps: (5120, 8192) 30.5 and 28.9.
    """
    tile, steps = max(8, triton.next_power_of_2(tokens)), k // _STEP
    tall = tile > 32 and n % 128 == 0 and n // 128 >= processors
    rows, resident = (128, 2) if tall else (64, 3)
    tiles = triton.cdiv(n, rows)
    fair = max(triton.cdiv(tiles * steps, resident * processors), triton.cdiv(steps, 16))
    even = [u for u in range(fair, fair * 5 // 4 + 1) if tile > 32 and steps % u == 0]
    units = min(steps, even[0] if even else fair)
    return HopperTiles(rows, tile, units, triton.cdiv(tiles * steps, units), units == steps)


def takes_hopper(x: Tensor, w: Tensor, w_s: Tensor, device: Target) -> bool:
    """Whether `_gemm_hopper` takes the call: K in whole steps, groups of whole tiles, rows of
    whole copies."""
    if device.backend != "cuda" or device.arch != 90 or TRITON < (3, 6):
        return False
    if x.shape[2] % _STEP or w.shape[0] // x.shape[1] % 64:
        return False
    return aligned(x) and aligned(w) and aligned(w_s, 4)


def _few_on_hopper(x: Tensor, w: Tensor, w_s: Tensor, out: Tensor) -> None:
    from tinfer.kernels._gemm_hopper import _grouped_hopper_kernel

    tokens, groups, k = x.shape
    n = w.shape[0]
    device = target(x.device)
    tiles = hopper_tiles(tokens, n, k, device.processors)
    parts = _room_for_parts(tiles, n, out)
    _grouped_hopper_kernel[(tiles.programs,)](
        x, w, w_s, out, parts, tokens, n, k, n // groups,
        x.stride(0), w.stride(0), w_s.stride(0), tiles.units,
        ROWS=tiles.rows, TOKENS=tiles.tokens, WHOLE=tiles.whole, num_warps=4,
    )  # fmt: skip
    _add_parts(tiles, parts, out, tokens, n, k // _STEP, device)


def linear_on_hopper(x: Tensor, w: Tensor, w_s: Tensor, out: Tensor) -> None:
    """x bf16 [T, K] in order "e4m3", T <= FEW_TOKENS, just written by a launch that lets the next
    one start early; w [N, K] -> out [T, N]."""
    from tinfer.kernels._gemm_hopper_linear import _linear_hopper_kernel

    tokens, k = x.shape
    n = w.shape[0]
    device = target(x.device)
    tiles = linear_tiles(tokens, n, k, device.processors)
    parts = _room_for_parts(tiles, n, out)
    _linear_hopper_kernel[(tiles.programs,)](
        x, w, w_s, out, parts, tokens, n, k, x.stride(0), w.stride(0), w_s.stride(0), tiles.units,
        ROWS=tiles.rows, TOKENS=tiles.tokens, WHOLE=tiles.whole, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    _add_parts(tiles, parts, out, tokens, n, k // _STEP, device)


def _room_for_parts(tiles: HopperTiles, n: int, out: Tensor) -> Tensor:
    if tiles.whole:
        return out
    elements = (tiles.programs + triton.cdiv(n, tiles.rows)) * tiles.rows * tiles.tokens
    return torch.empty(elements, dtype=torch.float32, device=out.device)


def _add_parts(
    tiles: HopperTiles, parts: Tensor, out: Tensor, tokens: int, n: int, steps: int, device: Target
) -> None:
    if tiles.whole:
        return
    early = device.chains_launches
    options = {"launch_pdl": True} if early else {}
    _add_parts_kernel[(triton.cdiv(n, tiles.rows) * tiles.tokens // 8,)](
        parts, out, tokens, n, steps, tiles.units, MOST=tiles.sharers(steps), EARLY=early,
        ROWS=tiles.rows, TOKENS=tiles.tokens, num_warps=2, **options,
    )  # fmt: skip
