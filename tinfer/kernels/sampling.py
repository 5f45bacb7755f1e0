"""The sampler: masses of every row by `_sample_rows` and `_sample_cut`, then one draw.

The draw reads the row's slices' sums of floored masses, of which it knows the shortfall to 2^31,
finds the slice in which the random word falls, and computes the masses of that slice once more.

Source: the reference's contract; philox of Triton's own library, addressed as cuRAND does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.compat.sampling import check_sample, check_token_masses
from tinfer.kernels._call import device_reason, stride_reason
from tinfer.kernels._jit import to_fp32
from tinfer.kernels._masses import INFINITY, first_word
from tinfer.kernels._sample_cut import _sample_cut_kernel
from tinfer.kernels._sample_rows import (
    BINS,
    ENDED,
    FINE,
    GREEDY,
    MASS,
    MEMBERS,
    MODE,
    ROW_FIRST,
    SAMPLED,
    STATUS,
    _sample_floors_kernel,
    _sample_stats_kernel,
    _sample_weights_kernel,
    floor_mass,
)

MAX_COLUMNS = 1 << 20
MAX_SLICES = 64


# ---------------------------------------------------------------- kernels
@triton.jit
def _slice_masses(part32, row, SLICES: tl.constexpr, PADDED: tl.constexpr):
    """int64 sums of the floored masses of every slice."""
    s = tl.arange(0, PADDED)
    part = tl.load(part32 + (row * 5 + MASS) * SLICES + s, mask=s < SLICES, other=0)
    return part.to(tl.int64) & 0xFFFFFFFF


@triton.jit(do_not_specialize=["V"])
def _sample_draw_kernel(
    logits,  # fp32 | bf16 [B, V]
    temperature,  # fp32 [B]
    min_p,  # fp32 [B]
    seeds,  # int64 [B]
    positions,  # int64 [B]
    record32,  # int32 [B, 4]
    record_x,  # fp32 [B, 2]
    kept_total,  # int64 [B]
    part32,  # int32 [B, 5, SLICES]
    tokens,  # int64 [B]
    status,  # int32 [B]
    stride,
    V,
    PURPOSE: tl.constexpr,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    mode = tl.load(record32 + row * 4 + MODE)
    first = tl.load(record32 + row * 4 + ROW_FIRST)
    token = tl.where(mode == GREEDY, first, 0)
    if mode == SAMPLED:
        word = first_word(tl.load(seeds + row), tl.load(positions + row), PURPOSE)
        target = word & 0x7FFFFFFF
        s = tl.arange(0, PADDED)
        part = _slice_masses(part32, row, SLICES, PADDED)
        rest = 2147483648 - tl.sum(part)
        part += tl.where(s == first // BLOCK, rest, 0)
        upto = tl.cumsum(part)
        mine = tl.sum((upto <= target).to(tl.int32))
        before = tl.sum(tl.where(s == mine, upto - part, 0))
        column = mine * BLOCK + tl.arange(0, BLOCK)
        x = to_fp32(tl.load(logits + row * stride + column, mask=column < V, other=-INFINITY))
        mass = floor_mass(x, column, row, temperature, min_p, record32, record_x, kept_total)
        mass = mass.to(tl.int32, bitcast=True)
        mass += tl.where(column == first, rest.to(tl.int32), 0)
        # A sum of 2^31 wraps; one less is compared, with a target that is below 2^31.
        passed = tl.cumsum(mass) - 1 >= (target - before).to(tl.int32)
        token = mine * BLOCK + tl.sum((passed == 0).to(tl.int32))
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(status + row, tl.load(record32 + row * 4 + STATUS))


@triton.jit(do_not_specialize=["V"])
def _token_masses_kernel(
    logits,  # fp32 | bf16 [B, V]
    temperature,  # fp32 [B]
    min_p,  # fp32 [B]
    record32,  # int32 [B, 4]
    record_x,  # fp32 [B, 2]
    kept_total,  # int64 [B]
    part32,  # int32 [B, 5, SLICES]
    masses,  # int64 [B, V]
    status,  # int32 [B]
    stride,
    V,
    SLICES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // SLICES).to(tl.int64)
    column = (tl.program_id(0) % SLICES) * BLOCK + tl.arange(0, BLOCK)
    mode = tl.load(record32 + row * 4 + MODE)
    first = tl.load(record32 + row * 4 + ROW_FIRST)
    mass = tl.zeros([BLOCK], tl.int64)
    if mode == SAMPLED:
        x = to_fp32(tl.load(logits + row * stride + column, mask=column < V, other=-INFINITY))
        floors = floor_mass(x, column, row, temperature, min_p, record32, record_x, kept_total)
        mass = floors.to(tl.int64)
    rest = 2147483648 - tl.sum(_slice_masses(part32, row, SLICES, PADDED))
    mass += tl.where((column == first) & (mode != ENDED), rest, 0)
    tl.store(masses + row * V + column, mass, mask=column < V)
    tl.store(status + row, tl.load(record32 + row * 4 + STATUS))


# ---------------------------------------------------------------- launchers
def _sample_tiles(rows: int, columns: int) -> tuple[int, int]:
    """(columns of a slice, warps): few rows are cut finer, to fill the device."""
    block = 2048 if rows <= 8 else 4096 if rows <= 32 else 8192
    block = max(block, triton.next_power_of_2(triton.cdiv(columns, MAX_SLICES)))
    block = min(block, triton.next_power_of_2(columns))
    return block, max(min(block // 1024, 16), 1)


@dataclass(frozen=True)
class RowMasses:
    """What the kernels that follow need to compute any mass of any row."""

    logits: Tensor  # fp32 | bf16 [B, V]
    temperature: Tensor  # fp32 [B]
    min_p: Tensor  # fp32 [B]
    record32: Tensor  # int32 [B, 4]
    record_x: Tensor  # fp32 [B, 2]
    kept_total: Tensor  # int64 [B]
    part32: Tensor  # int32 [B, 5, SLICES]
    block: int
    warps: int

    @property
    def slices(self) -> int:
        return self.part32.shape[2]

    @property
    def sizes(self) -> dict[str, int]:
        padded = triton.next_power_of_2(self.slices)
        return {"SLICES": self.slices, "PADDED": padded, "BLOCK": self.block}

    @property
    def row_arguments(self) -> tuple[Tensor, ...]:
        return (self.temperature, self.min_p)

    @property
    def records(self) -> tuple[Tensor, ...]:
        return (self.record32, self.record_x, self.kept_total, self.part32)


def row_masses(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> RowMasses:
    """Launch the kernels that prepare the masses of every row; at least one row."""
    rows, columns = logits.shape
    block, warps = _sample_tiles(rows, columns)
    slices = triton.cdiv(columns, block)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=logits.device)

    maxima, part32 = empty(slices, dtype=torch.float32), empty(5, slices)
    part64, kept_total = empty(3, slices, dtype=torch.int64), empty(dtype=torch.int64)
    bins, ranges = empty(slices, BINS.value), empty(3)
    fine = (empty(FINE.value, dtype=torch.int64), empty(FINE.value))
    members, member_id = empty(), empty(MEMBERS.value)
    member_x, record_x = empty(MEMBERS.value, dtype=torch.float32), empty(2, dtype=torch.float32)
    record32 = empty(4)
    out = RowMasses(
        logits, temperature, min_p, record32, record_x, kept_total, part32, block, warps
    )
    filters = (temperature, top_k, top_p)
    meta = {"num_warps": warps, "enable_fp_fusion": False}
    sized = (logits.stride(0), columns)
    grid = (rows * slices,)
    _sample_stats_kernel[grid](
        logits, *filters, maxima, part32, bins, *fine, members, *sized, slices, block, **meta
    )
    _sample_weights_kernel[grid](
        logits, *filters, min_p, maxima, part32, part64, bins, *fine, ranges, *sized,
        **out.sizes, **meta,
    )  # fmt: skip
    sizes = out.sizes
    tile, cut_warps = _cut_tiles(columns)
    sizes["TILE"] = tile
    del sizes["BLOCK"]
    _sample_cut_kernel[(rows,)](
        logits, *filters, min_p, maxima, part32, part64, *fine, ranges, members, member_x,
        member_id, record32, record_x, kept_total, *sized, **sizes, num_warps=cut_warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    _sample_floors_kernel[grid](
        logits, temperature, min_p, record32, record_x, kept_total, part32, *sized, slices, block,
        **meta,
    )  # fmt: skip
    return out


def _cut_tiles(columns: int) -> tuple[int, int]:
    """(columns a step, warps) of the one program that scans a row for its cut."""
    tile = min(8192, triton.next_power_of_2(columns))
    return tile, max(min(tile // 512, 16), 1)


def _supports(**tensors: Tensor) -> str | None:
    logits = tensors.pop("logits")
    if logits.shape[1] > MAX_COLUMNS:
        return f"more than {MAX_COLUMNS} columns"
    return device_reason(logits=logits, **tensors) or stride_reason(logits=logits, **tensors)


def supports_sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    purpose: int = 0,
) -> str | None:
    """Up to 2^20 columns, contiguous; tensors on one device."""
    return _supports(
        logits=logits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
        positions=positions,
    )


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    purpose: int = 0,
) -> tuple[Tensor, Tensor]:
    check_sample(logits, temperature, top_k, top_p, min_p, seeds, positions, purpose)
    rows, columns = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    status = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if not rows:
        return tokens, status
    m = row_masses(logits, temperature, top_k, top_p, min_p)
    _sample_draw_kernel[(rows,)](
        logits,
        *m.row_arguments,
        seeds,
        positions,
        *m.records,
        tokens,
        status,
        logits.stride(0),
        columns,
        PURPOSE=purpose,
        **m.sizes,
        num_warps=m.warps,
        enable_fp_fusion=False,
    )
    return tokens, status


def supports_token_masses(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> str | None:
    """Up to 2^20 columns, contiguous; tensors on one device."""
    return _supports(logits=logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def token_masses(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    check_token_masses(logits, temperature, top_k, top_p, min_p)
    rows, columns = logits.shape
    masses = torch.empty(rows, columns, dtype=torch.int64, device=logits.device)
    status = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if not rows:
        return masses, status
    m = row_masses(logits, temperature, top_k, top_p, min_p)
    _token_masses_kernel[(rows * m.slices,)](
        logits,
        *m.row_arguments,
        *m.records,
        masses,
        status,
        logits.stride(0),
        columns,
        **m.sizes,
        num_warps=m.warps,
        enable_fp_fusion=False,
    )
    return masses, status
