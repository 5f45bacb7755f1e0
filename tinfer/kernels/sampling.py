"""The sampler: launchers of the kernels in `_sample_*`, which `_sample_slices` puts in order.

Source: the reference's contract; philox of Triton's own library, addressed as cuRAND does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from tinfer.compat.sampling import check_sample, check_token_masses
from tinfer.kernels._call import device_reason, stride_reason
from tinfer.kernels._sample_cut import _sample_cut_kernel
from tinfer.kernels._sample_floors import (
    _sample_draw_kernel,
    _sample_floors_kernel,
    _token_masses_kernel,
)
from tinfer.kernels._sample_row import _sample_row_kernel
from tinfer.kernels._sample_scan import _sample_scan_kernel
from tinfer.kernels._sample_slices import FINE, MEMBERS, STATUS, _sample_stats_kernel
from tinfer.kernels._sample_weights import _sample_weights_kernel
from tinfer.kernels._target import target

MAX_COLUMNS = 1 << 20
MAX_SLICES = 64
SAMPLE = 4096  # logits of a row that tell where its cut is


def _sample_tiles(rows: int, columns: int, may_cut: bool) -> tuple[int, int, int, int]:
    """(columns of a slice, warps of its program, columns of a tile, warps where it loops).

    Without cuts the passes that loop are over few rows: short programs are done sooner.
    """
    many = rows > 8
    block = 4096 if many and may_cut else 2048
    block = max(block, triton.next_power_of_2(triton.cdiv(columns, MAX_SLICES)))
    block = min(block, triton.next_power_of_2(columns))
    tile = min(block, 1024 if many and not may_cut else 512)
    return block, max(min(block // 512, 16), 1), tile, max(tile // 128, 1)


@dataclass(frozen=True)
class RowMasses:
    """What the kernels that follow need to compute any mass of any row."""

    filters: tuple[Tensor, Tensor]  # temperature and min_p, fp32 [B]
    records: tuple[Tensor, ...]  # record32 [B, 6], record_x [B, 2], kept_total [B]
    part32: Tensor  # int32 [B, 3, SLICES]
    sizes: dict[str, int]  # SLICES, PADDED, BLOCK
    tile: int
    warps: int

    @property
    def slices(self) -> int:
        return self.sizes["SLICES"]

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """What kernels take beside the filters, in the order of their parameters."""
        return (*self.records, self.part32)


def row_masses(
    logits: Tensor,
    filters: tuple[Tensor, Tensor, Tensor, Tensor],
    keys: tuple[Tensor, Tensor, int] | None,
    out: tuple[Tensor, Tensor] | None,
    may_cut: bool,
) -> RowMasses:
    """Launch the kernels that prepare the masses of every row; at least one row.

    With `keys` (seeds, positions, purpose) and `out` (tokens, statuses) most rows are drawn from
    on the way; the record's mode says which are left. Without `may_cut` nothing closes records.
    """
    rows, columns = logits.shape
    block, warps, tile, tile_warps = _sample_tiles(rows, columns, may_cut)
    slices = triton.cdiv(columns, block)
    sample_size = min(SAMPLE, triton.next_power_of_2(columns))
    sizes = {"SLICES": slices, "PADDED": triton.next_power_of_2(slices), "BLOCK": block}

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=logits.device)

    maxima, estimates = empty(slices, dtype=torch.float32), empty(slices, dtype=torch.float32)
    part32, part64 = empty(3, slices), empty(3, slices, dtype=torch.int64)
    fine = (empty(FINE.value, dtype=torch.int64), empty(FINE.value))
    ranges, counters = empty(3), empty(2)
    place32, place64 = empty(5), empty(2, dtype=torch.int64)
    found = (empty(MEMBERS.value, dtype=torch.float32), empty(MEMBERS.value))
    records = (empty(6), empty(2, dtype=torch.float32), empty(dtype=torch.int64))
    temperature, _, _, min_p = filters
    seeds, positions, purpose = keys or (logits, logits, 0)
    tokens, statuses = out or (logits, logits)
    sized, grid = (logits.stride(0), columns), (rows * slices,)
    draws = {"PURPOSE": purpose, "DRAWS": keys is not None}
    on = target(logits.device)
    native, early = {"NATIVE": on.ptx}, {"CHAINED": on.chains_launches}
    plain = {"enable_fp_fusion": False}
    after = plain | early | ({"launch_pdl": True} if on.chains_launches else {})
    direct = {"DIRECT": on.ptx and block >= 32 * warps and tile >= 32 * tile_warps}
    whole, wide = {"num_warps": warps}, {"num_warps": max(min(2 * warps, 8), warps)}
    ranked = {"num_warps": min(2 * warps, 16)}
    tiled = {"TILE": tile, "num_warps": tile_warps}
    _sample_stats_kernel[grid](
        logits, temperature, maxima, estimates, *fine, counters, *sized, may_cut,
        SLICES=slices, BLOCK=block, **whole, **plain, **early,
    )  # fmt: skip
    _sample_row_kernel[(rows,)](
        logits, *filters, seeds, positions, tokens, statuses, maxima, estimates, ranges,
        *records[:2], *sized, MAY_CUT=may_cut, SAMPLE=sample_size, **draws, **sizes,
        **wide, **after,
    )  # fmt: skip
    _sample_weights_kernel[grid](
        logits, *filters, part32, part64, *fine, ranges, counters, place32, place64, *records,
        *sized, MAY_CUT=may_cut, **native, **direct, **sizes, **tiled, **after,
    )  # fmt: skip
    if may_cut:
        collected = (part32, counters, place32, *found, estimates)
        groups = slices if rows <= 8 else max(slices // 4, 1)
        _sample_scan_kernel[(rows * groups,)](
            logits, *filters[:3], *collected, *records[:2], *sized, groups, **direct,
            SLICES=slices, BLOCK=block, **whole, **after,
        )  # fmt: skip
        _sample_cut_kernel[(rows,)](
            logits, *filters, seeds, positions, tokens, *collected, place64, *records, *sized,
            **draws, **sizes, **ranked, **after,
        )  # fmt: skip
    masses = (*records, part32, *sized)
    _sample_floors_kernel[grid](
        logits, temperature, min_p, *masses, **native, SLICES=slices, BLOCK=block,
        TILE=min(2 * tile, block), num_warps=tile_warps, **after,
    )  # fmt: skip
    if keys is not None:
        _sample_draw_kernel[(rows,)](
            logits, temperature, min_p, *keys[:2], tokens, *masses, PURPOSE=purpose, **native,
            **sizes, **wide, **after,
        )  # fmt: skip
    return RowMasses((temperature, min_p), records, part32, sizes, tile, tile_warps)


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
    may_cut: bool = True,
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
    may_cut: bool = True,
) -> tuple[Tensor, Tensor]:
    check_sample(logits, temperature, top_k, top_p, min_p, seeds, positions, purpose)
    rows = logits.shape[0]
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    status = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if not rows:
        return tokens, status
    filters = (temperature, top_k, top_p, min_p)
    row_masses(logits, filters, (seeds, positions, purpose), (tokens, status), may_cut)
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
    if not rows:
        return masses, torch.empty(rows, dtype=torch.int32, device=logits.device)
    m = row_masses(logits, (temperature, top_k, top_p, min_p), None, None, True)
    _token_masses_kernel[(rows * m.slices,)](
        logits, *m.filters, *m.records, m.part32, masses, logits.stride(0), columns, **m.sizes,
        TILE=m.tile, num_warps=m.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return masses, m.records[0][:, STATUS.value].clone()
