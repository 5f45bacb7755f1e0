"""Engram's values: table gather with dequantization, and the gated write-back.

Gather: a row is E e4m3 codes in one array and E/32 ue8m0 bytes in another, both at a row number
that may pass 2^31 bytes, so offsets are int64. Value times power of two in fp32, one rounding.

Gate: one program per token and copy. `sum(h*w*k)`, `sum(h*h)` and `sum(k*k)` are taken in fp32
over one pass of the row; `h + gate * value` is rounded once.

Source: kernels R4 and R5 of the contracts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.compat.engram import check_engram_gate, check_engram_gather
from tinfer.formats import GROUP
from tinfer.kernels._call import MAX_PROGRAMS, contiguous_reason, device_reason, stride_reason
from tinfer.kernels._jit import INTERPRET, e4m3_decode, to_bf16, to_fp32, ue8m0_decode

_GROUP = tl.constexpr(GROUP)


# ---------------------------------------------------------------- gather
@triton.jit(do_not_specialize=["N", "rows", "row_start"])
def _engram_gather_kernel(
    table,  # uint8 [rows, E]
    scale,  # uint8 [rows, E/32]
    ids,  # int64 [N]
    out,  # bf16 [N, E]
    N,
    rows,
    row_start,
    table_stride,
    scale_stride,
    GROUPS: tl.constexpr,
    GROUPS_P2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    E: tl.constexpr = GROUPS * _GROUP
    group = tl.arange(0, GROUPS_P2)
    lane = tl.arange(0, _GROUP)
    inside = group < GROUPS
    column = (group * _GROUP)[None, :, None] + lane[None, None, :]
    for block in range(tl.program_id(0), tl.cdiv(N, BLOCK), tl.num_programs(0)):
        item = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        live = item < N
        row = tl.load(ids + item, mask=live, other=-1) - row_start
        mine = live & (row >= 0) & (row < rows)
        row = tl.where(mine, row, 0)
        valid = mine[:, None] & inside[None, :]
        at = (row * table_stride)[:, None, None] + column
        code = tl.load(table + at, mask=valid[:, :, None], other=0)
        at_scale = (row * scale_stride)[:, None] + group[None, :]
        factor = ue8m0_decode(tl.load(scale + at_scale, mask=valid, other=0))
        value = e4m3_decode(code) * factor[:, :, None]
        keep = (live[:, None] & inside[None, :])[:, :, None]
        tl.store(out + (item * E)[:, None, None] + column, to_bf16(value), mask=keep)


def supports_engram_gather(table: Tensor, scale: Tensor, ids: Tensor, row_start: int) -> str | None:
    """Tables on the ids' device or in pinned host memory, rows strided or not."""
    if not INTERPRET.value and ids.is_cuda:
        for name, x in (("table", table), ("scale", scale)):
            if not (x.is_cuda or x.is_pinned()):
                return f"{name} is in pageable host memory"
    else:
        reason = device_reason(ids=ids, table=table, scale=scale)
        if reason is not None:
            return reason
    return stride_reason(table=table, scale=scale) or contiguous_reason(ids=ids)


def engram_gather(table: Tensor, scale: Tensor, ids: Tensor, row_start: int) -> Tensor:
    check_engram_gather(table, scale, ids, row_start)
    (rows, width), count = table.shape, ids.numel()
    out = torch.empty(ids.shape[0], ids.shape[1] * width, dtype=torch.bfloat16, device=ids.device)
    if not out.numel():
        return out
    groups = width // GROUP
    padded = triton.next_power_of_2(groups)
    block, warps = _gather_tiles(count, padded)
    _engram_gather_kernel[(min(triton.cdiv(count, block), MAX_PROGRAMS),)](
        table,
        scale,
        ids,
        out,
        count,
        rows,
        row_start,
        table.stride(0),
        scale.stride(0),
        GROUPS=groups,
        GROUPS_P2=padded,
        BLOCK=block,
        num_warps=warps,
    )
    return out


def _gather_tiles(count: int, groups: int) -> tuple[int, int]:
    """Rows a program and its warps: 32 rows of 256 bytes for 4 warps, fewer rows when few."""
    block = min(max(256 // groups, 1), triton.next_power_of_2(triton.cdiv(count, 264)))
    return block, 4 if block * groups >= 32 else 1


# ---------------------------------------------------------------- gate
@triton.jit(do_not_specialize=["items"])
def _engram_gate_kernel(
    stream,  # bf16 [T, COPIES, D]
    kv,  # bf16 [T, COPIES + 1, D]
    weight,  # fp32 [COPIES, D]
    dead,  # uint8 [T]
    out,  # bf16 [T, COPIES, D]
    items,  # T * COPIES
    stream_token,
    stream_copy,
    kv_token,
    kv_copy,
    eps,
    clamp,
    COPIES: tl.constexpr,
    D: tl.constexpr,
    HAS_DEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    mask = column < D
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        token, copy = tl.cast(item // COPIES, tl.int64), item % COPIES
        row = kv + token * kv_token
        h_raw = tl.load(stream + token * stream_token + copy * stream_copy + column, mask, 0.0)
        k = to_fp32(tl.load(row + copy * kv_copy + column, mask, 0.0))
        w = tl.load(weight + copy * D + column, mask, 0.0)
        value = to_fp32(tl.load(row + COPIES * kv_copy + column, mask, 0.0))
        h = to_fp32(h_raw)
        dot = tl.sum(h * w * k, axis=0)
        mean_h = tl.sum(h * h, axis=0) / D
        mean_k = tl.sum(k * k, axis=0) / D
        g = dot * tl.rsqrt(mean_h + eps) * tl.rsqrt(mean_k + eps) * (1.0 / D**0.5)
        gate = _signed_root_sigmoid(g, clamp)
        result = to_bf16(h + gate * value)
        if HAS_DEAD:
            result = tl.where(tl.load(dead + token) != 0, h_raw, result)
        tl.store(out + tl.cast(item, tl.int64) * D + column, result, mask=mask)


@triton.jit
def _signed_root_sigmoid(g, clamp):
    """sigmoid(copysign(sqrt(max(|g|, clamp)), g)); the sign of -0 counts, NaN stays NaN."""
    bits = g.to(tl.int32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    root = tl.sqrt(tl.maximum(magnitude, clamp, propagate_nan=tl.PropagateNan.ALL))
    signed = tl.where(bits < 0, -root, root)
    return 1.0 / (1.0 + tl.exp2(signed * -1.4426950408889634))


def supports_engram_gate(
    stream: Tensor, kv: Tensor, weight: Tensor, dead: Tensor | None, eps: float, clamp: float
) -> str | None:
    """Tensors on one device, channels contiguous, at most 16384 of them."""
    if stream.shape[-1] > 16384:
        return f"{stream.shape[-1]} channels do not fit one program"
    return (
        device_reason(stream=stream, kv=kv, weight=weight, dead=dead)
        or stride_reason(stream=stream, kv=kv)
        or contiguous_reason(weight=weight, dead=dead)
    )


def engram_gate(
    stream: Tensor, kv: Tensor, weight: Tensor, dead: Tensor | None, eps: float, clamp: float
) -> Tensor:
    check_engram_gate(stream, kv, weight, dead, eps, clamp)
    tokens, copies, dim = stream.shape
    out = torch.empty(tokens, copies, dim, dtype=torch.bfloat16, device=stream.device)
    if not out.numel():
        return out
    block, warps = _gate_tiles(dim)
    items = tokens * copies
    _engram_gate_kernel[(min(items, MAX_PROGRAMS),)](
        stream,
        kv,
        weight,
        weight if dead is None else dead.view(torch.uint8),
        out,
        items,
        stream.stride(0),
        stream.stride(1),
        kv.stride(0),
        kv.stride(1),
        eps,
        clamp,
        COPIES=copies,
        D=dim,
        HAS_DEAD=dead is not None,
        BLOCK=block,
        num_warps=warps,
    )
    return out


def _gate_tiles(dim: int) -> tuple[int, int]:
    """Channels of a program (all of them) and its warps."""
    block = triton.next_power_of_2(dim)
    return block, max(1, min(8, block // 512))
