"""The kernel that collects the candidates around a row's cut, and sums up what lies before them.

The weights of each slice before the candidates are estimates, for the draw in `_sample_cut`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._masses import octaves_q24, slope_of, wants_cut
from tinfer.kernels._sample_slices import (
    HIGHEST,
    LOWEST,
    MASS,
    MEMBER_COUNT,
    MEMBERS,
    MISSED,
    MODE,
    SAMPLED,
    WHERE,
    load_tile,
)


@triton.jit
def _collect(
    source, begin, V, top, slope, highest, lowest, x_out, id_out, counter, BLOCK: tl.constexpr
):
    """Append a slice's candidates of lowest..highest, in any order."""
    TILE: tl.constexpr = min(BLOCK, 1024)  # few registers: this is rare
    for start in range(begin, begin + BLOCK, TILE):
        column = start + tl.arange(0, TILE)
        x = load_tile(source, column, V)
        q = octaves_q24(x, top, slope)
        hit = (q <= highest) & (q >= lowest)
        at = tl.atomic_add(counter + tl.zeros_like(column), 1, mask=hit, sem="relaxed")
        hit = hit & (at < MEMBERS)
        tl.store(x_out + at, x, mask=hit)
        tl.store(id_out + at, column, mask=hit)


@triton.jit
def _scan_slice(source, column, V, top, slope, highest, lowest):
    """(estimated weight and count of a slice's candidates above highest, whether some are below
    that but not below lowest)."""
    x = load_tile(source, column, V)
    q = octaves_q24(x, top, slope)
    before = q > highest
    # Both counts are below 2^15.
    counts = tl.sum(tl.where(before, 1, tl.where(q >= lowest, 1 << 15, 0)))
    estimate = tl.sum(tl.where(before, tl.exp2((x - top) * slope), 0.0))
    return estimate, counts & 0x7FFF, counts > 0x7FFF


@triton.jit
def _sample_scan_kernel(
    logits,  # fp32 | bf16 [B, V]
    temperature,  # fp32 [B]
    top_k,  # int32 [B]
    top_p,  # fp32 [B]
    part32,  # int32 [B, 3, SLICES]
    counters,  # int32 [B, 2]
    place32,  # int32 [B, 5]
    member_x,  # fp32 [B, MEMBERS]
    member_id,  # int32 [B, MEMBERS]
    estimates,  # fp32 [B, SLICES]
    record32,  # int32 [B, 6]
    record_x,  # fp32 [B, 2]
    stride,
    V,
    GROUPS: tl.constexpr,  # programs of a row
    SLICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // GROUPS).to(tl.int64)
    is_cut = wants_cut(tl.load(top_k + row), tl.load(top_p + row), V)
    if is_cut & (tl.load(record32 + row * 6 + MODE) == SAMPLED):
        place = place32 + row * 5
        if tl.load(place + WHERE) != MISSED:
            highest, lowest = tl.load(place + HIGHEST), tl.load(place + LOWEST)
            source, top = logits + row * stride, tl.load(record_x + row * 2)
            slope = slope_of(tl.load(temperature + row))
            for s in range(tl.program_id(0) % GROUPS, SLICES, GROUPS):
                column = s * BLOCK + tl.arange(0, BLOCK)
                estimate, count, hits = _scan_slice(source, column, V, top, slope, highest, lowest)
                tl.store(estimates + row * SLICES + s, estimate)
                tl.store(part32 + (row * 3 + MASS) * SLICES + s, count)
                if hits:
                    _collect(
                        source, s * BLOCK, V, top, slope, highest, lowest, member_x + row * MEMBERS,
                        member_id + row * MEMBERS, counters + row * 2 + MEMBER_COUNT, BLOCK,
                    )  # fmt: skip
