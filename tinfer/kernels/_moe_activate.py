"""Between the expert products where the first one stores gate and up as they are (`_moe_hopper`).

Clamp, SiLU, routing weight and fp8 cast as `_moe_stream` has them; the cast values are exact in
bf16, their columns in order "e2m1": of 128, column t i h j goes to i j t h (see `_gemm_tile`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._jit import to_fp32
from tinfer.kernels._moe_stream import cast_groups, gated
from tinfer.kernels._round import round_bf16_packed


@triton.jit
def _tile(
    gate_up, pos_to_token, pos_to_slot, weights, h, pos, column, rows, INNER,
    TOPK: tl.constexpr, LIMIT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Rows `pos` and the 128 columns `column` of h."""
    ROWS: tl.constexpr = pos.shape[0]
    token = tl.load(pos_to_token + pos, mask=pos < rows, other=-1)
    live = token >= 0
    slot = tl.load(pos_to_slot + pos, mask=live, other=0)
    weight = tl.load(weights + token.to(tl.int64) * TOPK + slot, mask=live, other=0.0)
    pos, live, column = pos.to(tl.int64)[:, None], live[:, None], column[None, :]
    at = gate_up + pos * (2 * INNER) + column
    gate = to_fp32(tl.load(at, mask=live, other=0.0))
    up = to_fp32(tl.load(at + INNER, mask=live, other=0.0))
    y = round_bf16_packed(gated(gate, up, weight[:, None], LIMIT), NATIVE)
    y = cast_groups(tl.reshape(y, (ROWS * 4, 32, 1)), NATIVE)
    y = tl.permute(tl.reshape(y, (ROWS, 4, 4, 2, 4)), (0, 2, 4, 1, 3))
    tl.store(h + pos * INNER + column, tl.reshape(y, (ROWS, 128)), mask=live)


@triton.jit(do_not_specialize=["rows"])
def _expert_activate_kernel(
    gate_up,  # bf16 [P, 2I]
    pos_to_token,  # int32 [P], -1: no row
    pos_to_slot,  # int32 [P]
    weights,  # fp32 [T, TOPK]
    h,  # bf16 [P, I]
    rows,  # P
    INNER,
    TOPK: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    NATIVE: tl.constexpr,  # whether the device converts to e4m3
):
    blocks = INNER // 128
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * blocks, tl.num_programs(0)):
        pos = tile // blocks * ROWS + tl.arange(0, ROWS)
        column = tile % blocks * 128 + tl.arange(0, 128)
        _tile(
            gate_up, pos_to_token, pos_to_slot, weights, h, pos, column, rows, INNER,
            TOPK, LIMIT, NATIVE,
        )  # fmt: skip
