"""RMSNorm, RMSNorm with the fp8 cast, and rotary embedding.

    y = weight * (x * rsqrt(sum(x^2) / H + eps))

The launchers and their tile choices; the kernels are `_rms_norm` and `_rotary`.

Source: written for this project; the contract is `tinfer.compat.norm_rope`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tinfer.compat.norm_rope import check_apply_rotary_, check_rms_norm, check_rms_norm_cast
from tinfer.formats import GROUP
from tinfer.kernels._call import MAX_PROGRAMS, device_reason
from tinfer.kernels._rms_norm import rms_norm_kernel
from tinfer.kernels._rotary import rotary_kernel
from tinfer.kernels._target import target

MAX_WIDTH = 16384  # columns of a row that one program still holds in registers


def split_width(width: int, least: int = 1) -> tuple[int, int]:
    """Two powers of two (main, rest) that cover `width` columns; rest is 0 or at least `least`."""
    main = max(1 << (width.bit_length() - 1), least)
    if main >= width:
        return main, 0
    return main, max(triton.next_power_of_2(width - main), least)


def _norm_tiles(width: int) -> tuple[int, int, int]:
    """(columns of a chunk, up to 8 chunks, warps): 8 columns a thread where the width allows.

    H200, codes of 4096 rows of 5120: rows loaded ahead by 4 programs a multiprocessor 22.7 us,
    one row a program 25.1, with the weight loaded before the sum 26.0.
    """
    chunk = max(min(width & -width, 1024), GROUP)
    chunk = max(chunk, triton.next_power_of_2(triton.cdiv(width, 8)))
    return chunk, triton.cdiv(width, chunk), max(1, min(chunk // 256, 8))


def _norm_reason(x: Tensor, weight: Tensor | None) -> str | None:
    if x.shape[-1] > MAX_WIDTH:
        return f"rows of more than {MAX_WIDTH} columns"
    return device_reason(x=x, weight=weight)


def _launch_norm(
    x: Tensor, weight: Tensor | None, eps: float, y: Tensor | None, q: Tensor | None
) -> Tensor | None:
    """Norm the rows of x into y and, if q is given, into codes q and the scales returned."""
    width = x.shape[-1]
    x = x.reshape(-1, width)
    x = x if x.stride(1) == 1 else x.contiguous()
    s = None
    if q is not None:
        s = torch.empty(*q.shape[:-1], width // GROUP, dtype=torch.uint8, device=x.device)
    if not x.shape[0]:
        return s
    chunk, chunks, warps = _norm_tiles(width)
    device = target(x.device)
    programs = min(x.shape[0], device.processors * (16 // warps), MAX_PROGRAMS)
    rms_norm_kernel[(programs,)](
        x,
        x if weight is None else weight.contiguous(),
        x if y is None else y,
        x if q is None else q,
        x if s is None else s,
        x.shape[0],
        width,
        x.stride(0),
        eps,
        HAS_WEIGHT=weight is not None,
        WRITE_Y=y is not None,
        WRITE_Q=q is not None,
        C=chunk,
        CHUNKS=chunks,
        WHOLE=width % chunk == 0,
        AHEAD=x.shape[0] > programs,
        NATIVE=device.native_e4m3,
        num_warps=warps,
    )
    return s


def supports_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> str | None:
    """Rows of up to 16384 columns, on one device."""
    return _norm_reason(x, weight)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    check_rms_norm(x, weight, eps)
    y = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    _launch_norm(x, weight, eps, y, None)
    return y


def supports_rms_norm_cast(x: Tensor, weight: Tensor | None, eps: float) -> str | None:
    """Rows of up to 16384 columns, on one device."""
    return _norm_reason(x, weight)


def rms_norm_cast(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    check_rms_norm_cast(x, weight, eps)
    y = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    q = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    s = _launch_norm(x, weight, eps, y, q)
    assert s is not None
    return y, q, s


def supports_rms_norm_codes(x: Tensor, weight: Tensor | None, eps: float) -> str | None:
    """Rows of up to 16384 columns, on one device."""
    return _norm_reason(x, weight)


def rms_norm_codes(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    check_rms_norm_cast(x, weight, eps, "rms_norm_codes")
    q = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    s = _launch_norm(x, weight, eps, None, q)
    assert s is not None
    return q, s


def _rotary_tiles(heads: int, half: int) -> tuple[int, int]:
    """(tokens, heads) of a tile: 512 pairs, one warp, one token's heads where there are enough.

    H200, 4096 tokens of 64 heads of 64 channels: 23.5 us; 2 warps for 32 heads 23.6.
    """
    rows = max(512 // half, 1)
    block_h = min(rows, triton.next_power_of_2(heads))
    return rows // block_h, block_h


def supports_apply_rotary_(
    x: Tensor, cos_sin: Tensor, positions: Tensor, inverse: bool = False
) -> str | None:
    """Contiguous channels and table, on one device."""
    if x.stride(2) != 1 or not cos_sin.is_contiguous():
        return "channels of x or cos_sin are not contiguous"
    return device_reason(x=x, cos_sin=cos_sin, positions=positions)


def apply_rotary_(x: Tensor, cos_sin: Tensor, positions: Tensor, inverse: bool = False) -> None:
    check_apply_rotary_(x, cos_sin, positions, inverse)
    tokens, heads, width = x.shape
    rope = cos_sin.shape[1]
    if not tokens * heads * rope:
        return
    half = triton.next_power_of_2(rope // 2)
    block_t, block_h = _rotary_tiles(heads, half)
    tiles = triton.cdiv(tokens, block_t) * triton.cdiv(heads, block_h)
    rotary_kernel[(min(tiles, MAX_PROGRAMS),)](
        x[..., width - rope :],
        cos_sin,
        positions.contiguous(),
        tokens,
        heads,
        x.stride(0),
        x.stride(1),
        INVERSE=inverse,
        HALF=rope // 2,
        P=half,
        BLOCK_T=block_t,
        BLOCK_H=block_h,
        num_warps=1,
        enable_fp_fusion=False,
    )
