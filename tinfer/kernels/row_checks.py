"""Checks around sampling: one program per row (outliers), or per block of rows (stop ids).

Source: the references' contracts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.compat.row_checks import check_detect_outlier_and_abort, check_match_stop
from tinfer.kernels._call import MAX_PROGRAMS, contiguous_reason, device_reason, stride_reason
from tinfer.kernels._jit import to_fp32
from tinfer.kernels._masses import INFINITY, NO_TOKEN, NOT_FINITE, OK

STOP_BLOCK = 64
OUTLIER_TILE = 8192


@triton.jit(do_not_specialize=["R"])
def _match_stop_kernel(
    tokens,  # int64 [R]
    stop_ids,  # int64 [R, M]
    out,  # uint8 [R]
    R,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row, mask=row < R, other=-1)
    hit = tl.zeros([BLOCK], tl.int32)
    for m in range(M):
        stop = tl.load(stop_ids + row.to(tl.int64) * M + m, mask=row < R, other=-1)
        hit |= ((stop >= 0) & (stop == token)).to(tl.int32)
    tl.store(out + row, hit.to(tl.uint8), mask=row < R)


def supports_match_stop(tokens: Tensor, stop_ids: Tensor) -> str | None:
    """Contiguous tensors on one device."""
    tensors = {"tokens": tokens, "stop_ids": stop_ids}
    return device_reason(**tensors) or contiguous_reason(**tensors)


def match_stop(tokens: Tensor, stop_ids: Tensor) -> Tensor:
    check_match_stop(tokens, stop_ids)
    out = torch.empty(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    if tokens.shape[0]:
        _match_stop_kernel[(triton.cdiv(tokens.shape[0], STOP_BLOCK),)](
            tokens, stop_ids, out.view(torch.uint8), tokens.shape[0], M=stop_ids.shape[1],
            BLOCK=STOP_BLOCK, num_warps=1,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["limit"])
def _detect_outlier_kernel(
    x,  # fp32 | bf16 [R, N]
    counts,  # int32 [R, 3]
    status,  # int32 [R]
    limit,
    stride,
    N,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    nan, above = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    below, beyond = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    for start in range(0, N, TILE):
        column = start + tl.arange(0, TILE)
        value = to_fp32(tl.load(x + row * stride + column, mask=column < N, other=0.0))
        nan += (value != value).to(tl.int32)
        above += (value == INFINITY).to(tl.int32)
        below += ((value == -INFINITY) & (column < N)).to(tl.int32)
        finite = tl.abs(value) < INFINITY
        beyond += (finite & (tl.abs(value) > limit)).to(tl.int32)
    nans, highs, lows = tl.sum(nan), tl.sum(above), tl.sum(below)
    word = tl.where(lows == N, NO_TOKEN, OK)
    word = tl.where(nans + highs > 0, NOT_FINITE, word)
    tl.store(counts + row * 3, nans)
    tl.store(counts + row * 3 + 1, highs + lows)
    tl.store(counts + row * 3 + 2, tl.sum(beyond))
    tl.store(status + row, word)


def supports_detect_outlier_and_abort(x: Tensor, limit: float) -> str | None:
    """At most 65535 rows, contiguous in themselves."""
    if x.shape[0] > MAX_PROGRAMS:
        return f"more than {MAX_PROGRAMS} rows"
    return device_reason(x=x) or stride_reason(x=x)


def detect_outlier_and_abort(x: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    check_detect_outlier_and_abort(x, limit)
    rows, columns = x.shape
    counts = torch.empty(rows, 3, dtype=torch.int32, device=x.device)
    status = torch.empty(rows, dtype=torch.int32, device=x.device)
    if rows:
        tile = min(OUTLIER_TILE, triton.next_power_of_2(max(columns, 1)))
        _detect_outlier_kernel[(rows,)](
            x, counts, status, float(limit), x.stride(0), columns, TILE=tile,
            num_warps=max(tile // 512, 1),
        )  # fmt: skip
    return counts, status
