"""References of the clamped SwiGLU with routing weight, alone and with the fp8 cast.

Source: DeepSeek-V4.1-Flash `inference/model.py` (Expert.forward), as described by the golden
vectors `expert`; the bound by row ends follows TileKernels' `psum_num_tokens_per_expert`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinfer.compat.casts import per_token_cast
from tinfer.compat.checks import require, require_dtype, require_shape
from tinfer.formats import GROUP


def check_swiglu(
    gate_up: Tensor,
    limit: float,
    weights: Tensor | None,
    row_ends: Tensor | None,
    alignment: int,
    op: str = "swiglu",
) -> None:
    """Raise unless the arguments fit `swiglu`."""
    require_dtype(op, "gate_up", gate_up, torch.bfloat16)
    require_shape(op, "gate_up", gate_up, ("T", "2I"))
    require(gate_up.shape[1] % 2 == 0, op, "gate_up", "[T, 2I]", list(gate_up.shape))
    require(limit >= 0, op, "limit", ">= 0 (0: no clamp)", limit)
    require(alignment >= 1, op, "alignment", ">= 1", alignment)
    if weights is not None:
        require_dtype(op, "weights", weights, torch.float32)
        require_shape(op, "weights", weights, (gate_up.shape[0],))
    if row_ends is not None:
        require_dtype(op, "row_ends", row_ends, torch.int32)
        require_shape(op, "row_ends", row_ends, ("E",))


def check_swiglu_cast(
    gate_up: Tensor,
    limit: float,
    weights: Tensor | None,
    row_ends: Tensor | None,
    alignment: int,
) -> None:
    """Raise unless the arguments fit `swiglu_cast`."""
    op = "swiglu_cast"
    check_swiglu(gate_up, limit, weights, row_ends, alignment, op)
    rule = f"[T, 2I] with I a multiple of {GROUP}"
    require(gate_up.shape[1] % (2 * GROUP) == 0, op, "gate_up", rule, list(gate_up.shape))


def live_rows(rows: int, row_ends: Tensor, alignment: int) -> Tensor:
    """bool [rows]: the rows that belong to a segment.

    Segment e ends before row `row_ends[e]`; the first starts at 0, the others at the end of the
    segment before rounded up to a multiple of `alignment`.
    """
    ends = row_ends.long()
    starts = torch.zeros_like(ends)
    starts[1:] = (ends[:-1] + alignment - 1) // alignment * alignment
    row = torch.arange(rows, device=row_ends.device)[:, None]
    return ((row >= starts) & (row < ends)).any(-1)


def swiglu(
    gate_up: Tensor,
    limit: float,
    weights: Tensor | None,
    row_ends: Tensor | None = None,
    alignment: int = 1,
) -> Tensor:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit) * weight` per row.

    Args:
        gate_up: bf16 [T, 2I], gate in the first half of a row and up in the second; rows may be
            strided, their elements contiguous.
        limit: the clamp; 0 means none. The gate is clamped from above only.
        weights: fp32 [T], one routing weight per row; None means 1.
        row_ends: int32 [E] on the device, nondecreasing: only the rows of these segments are
            computed (see `live_rows`; one element is a plain row count). None: all rows.
        alignment: where segments after the first start.

    Returns:
        bf16 [T, I]. Rows outside the segments are unspecified: the kernel leaves them unwritten,
        the reference sets them to NaN.

    Raises:
        TypeError: wrong dtype. ValueError: wrong shape, negative limit.

    Numerics: fp32 from the bf16 inputs, multiplied left to right, weight last, one rounding to
        bf16. NaN passes the clamp.
    """
    check_swiglu(gate_up, limit, weights, row_ends, alignment)
    gate, up = gate_up.float().chunk(2, dim=-1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    product = torch.nn.functional.silu(gate) * up
    if weights is not None:
        product = product * weights[:, None]
    out = product.to(torch.bfloat16)
    if row_ends is not None:
        out[~live_rows(len(out), row_ends, alignment)] = float("nan")
    return out


def swiglu_cast(
    gate_up: Tensor,
    limit: float,
    weights: Tensor | None,
    row_ends: Tensor | None = None,
    alignment: int = 1,
) -> tuple[Tensor, Tensor]:
    """`swiglu`, its bf16 result cast to e4m3 in groups of 32 with ue8m0 scales.

    Args:
        gate_up, limit, weights, row_ends, alignment: as for `swiglu`, with I a multiple of 32.

    Returns:
        q uint8 e4m3 codes [T, I]; s uint8 ue8m0 codes [T, I/32]; unspecified outside the segments.

    Raises:
        TypeError, ValueError: as `swiglu`; I not a multiple of 32.

    Numerics: the product is rounded to bf16 and then cast, as in the release.
    """
    check_swiglu_cast(gate_up, limit, weights, row_ends, alignment)
    product = swiglu(gate_up, limit, weights, row_ends, alignment)
    return per_token_cast(product, "e4m3", GROUP, "ue8m0")
