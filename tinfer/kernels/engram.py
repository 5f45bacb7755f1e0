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
from tinfer.kernels._target import target

_GROUP = tl.constexpr(GROUP)


# ---------------------------------------------------------------- gather
@triton.jit
def _decoded(code, NATIVE: tl.constexpr):
    """e4m3 -> fp32, by the device's own conversion where it has one (equal for all 256 codes)."""
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return e4m3_decode(code)


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
    NATIVE: tl.constexpr,
):
    E: tl.constexpr = GROUPS * _GROUP
    unit = tl.arange(0, BLOCK * GROUPS_P2)[:, None]  # a group of a row
    group = unit % GROUPS_P2
    lane = tl.arange(0, _GROUP)[None, :]
    for block in range(tl.program_id(0), tl.cdiv(N, BLOCK), tl.num_programs(0)):
        item = (block * BLOCK + unit // GROUPS_P2).to(tl.int64)
        live = (item < N) & (group < GROUPS)
        row = tl.load(ids + item, mask=live, other=-1) - row_start
        mine = live & (row >= 0) & (row < rows)
        row = tl.where(mine, row, 0)
        code = tl.load(table + row * table_stride + group * _GROUP + lane, mask=mine, other=0)
        factor = ue8m0_decode(tl.load(scale + row * scale_stride + group, mask=mine, other=0))
        value = _decoded(code, NATIVE) * factor
        tl.store(out + item * E + group * _GROUP + lane, to_bf16(value), mask=live)


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
    device = target(ids.device)
    block, warps = _gather_tiles(count, padded, device.processors)
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
        NATIVE=device.native_e4m3,
        num_warps=warps,
    )
    return out


def _gather_tiles(count: int, groups: int, processors: int) -> tuple[int, int]:
    """Rows a program and its warps: 8 rows of 256 bytes for 4 warps, fewer rows when few.

    4096 tokens of 24 rows on an H200: 27.2 us, as with 16 rows, or 2 warps.
    """
    spread = triton.next_power_of_2(triton.cdiv(count, 2 * processors))
    block = max(min(64 // groups, spread), 1)
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
    CHUNKS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    lane = tl.arange(0, BLOCK)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        token, copy = tl.cast(item // COPIES, tl.int64), item % COPIES
        h_row = stream + token * stream_token + copy * stream_copy
        k_row = kv + token * kv_token + copy * kv_copy
        v_row = kv + token * kv_token + COPIES * kv_copy
        rows, values = (), ()
        dot = tl.zeros([BLOCK], tl.float32)
        square_h = tl.zeros([BLOCK], tl.float32)
        square_k = tl.zeros([BLOCK], tl.float32)
        for c in tl.static_range(CHUNKS):
            column = c * BLOCK + lane
            raw = tl.load(h_row + column, mask=column < D, other=0.0)
            k = to_fp32(tl.load(k_row + column, mask=column < D, other=0.0))
            w = tl.load(weight + copy * D + column, mask=column < D, other=0.0)
            rows = rows + (raw,)  # noqa: RUF005  (triton reads no starred tuple)
            value = tl.load(v_row + column, mask=column < D, other=0.0)
            values = values + (value,)  # noqa: RUF005
            h = to_fp32(raw)
            dot += h * w * k
            square_h += h * h
            square_k += k * k
        scale = tl.rsqrt(tl.sum(square_h, axis=0) / D + eps)
        scale = scale * tl.rsqrt(tl.sum(square_k, axis=0) / D + eps)
        gate = _signed_root_sigmoid(tl.sum(dot, axis=0) * scale * (1.0 / D**0.5), clamp)
        for c in tl.static_range(CHUNKS):
            column = c * BLOCK + lane
            result = to_bf16(to_fp32(rows[c]) + gate * to_fp32(values[c]))
            if HAS_DEAD:
                result = tl.where(tl.load(dead + token) != 0, rows[c], result)
            tl.store(out + tl.cast(item, tl.int64) * D + column, result, mask=column < D)


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
    """Channels of a chunk and the warps of a program, which keeps its whole row in registers.

    4096 tokens of 4 copies of 5120 on an H200: five chunks of 1024 for 2 warps 135 us, for
    4 warps 139 us; one chunk padded to 8192 for 4 warps 140 us; all copies in one program 264 us.
    """
    block = min(1024, triton.next_power_of_2(dim))
    return block, 2 if dim <= 8192 else 8
