"""The routed experts of one feed-forward layer, from routing to the combined output.

Per token and chosen expert: `W2 . cast(silu(min(g, L)) * clamp(u, -L, L) * weight)` with
`g, u = W1 x, W3 x`; the routed outputs are summed in slot order and the shared expert's is added.

Source: DeepSeek-V4.1-Flash technical description (feed-forward); OCP microscaling formats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinfer.compat.checks import require, require_dtype, require_shape
from tinfer.compat.gemm import dequantize_rows
from tinfer.formats import (
    E4M3_AMAX_FLOOR,
    E4M3_MAX,
    GROUP,
    Fp4Group32,
    Fp8Block32,
    decode_e4m3,
    decode_ue8m0,
    encode_e4m3,
    encode_ue8m0,
)

OP = "moe_experts"


def is_fp4(w13: Tensor, dim: int) -> bool:
    """Packed fp4 holds two columns a byte; fp8 weights hold one."""
    return w13.shape[-1] * 2 == dim


def check_moe_experts(
    q: Tensor,
    s: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_s: Tensor,
    w2: Tensor,
    w2_s: Tensor,
    limit: float,
    shared: Tensor | None,
) -> None:
    """The arguments' rules, for the reference and the kernel alike."""
    byte_args = {"q": q, "s": s, "w13": w13, "w13_s": w13_s, "w2": w2, "w2_s": w2_s}
    for name, value in byte_args.items():
        require_dtype(OP, name, value, torch.uint8)
    require_dtype(OP, "ids", ids, torch.int32)
    require_dtype(OP, "weights", weights, torch.float32)
    require_shape(OP, "q", q, ["T", "D"])
    tokens, dim = q.shape
    require_shape(OP, "ids", ids, [tokens, "k"])
    require_shape(OP, "weights", weights, ids.shape)
    require(dim % GROUP == 0, OP, "q", f"of columns divisible by {GROUP}", dim)
    require_shape(OP, "s", s, [tokens, dim // GROUP])
    _check_weights(dim, w13, w13_s, w2, w2_s)
    require(limit >= 0, OP, "limit", ">= 0 (0: no clamp)", limit)
    if shared is not None:
        require_dtype(OP, "shared", shared, torch.bfloat16)
        require_shape(OP, "shared", shared, [tokens, dim])


def _check_weights(dim: int, w13: Tensor, w13_s: Tensor, w2: Tensor, w2_s: Tensor) -> None:
    require_shape(OP, "w13", w13, ["E", "2I", "D/2 or D"])
    experts, rows, columns = w13.shape
    inner = rows // 2
    require(rows % (2 * GROUP) == 0, OP, "w13", f"of rows divisible by {2 * GROUP}", rows)
    require(columns in (dim, dim // 2), OP, "w13", f"of {dim // 2} or {dim} columns", columns)
    if is_fp4(w13, dim):
        require_shape(OP, "w13_s", w13_s, [experts, rows, dim // GROUP])
        require_shape(OP, "w2", w2, [experts, dim, inner // 2])
        require_shape(OP, "w2_s", w2_s, [experts, dim, inner // GROUP])
    else:
        require_shape(OP, "w13_s", w13_s, [experts, rows // GROUP, dim // GROUP])
        require_shape(OP, "w2", w2, [experts, dim, inner])
        require_shape(OP, "w2_s", w2_s, [experts, dim // GROUP, inner // GROUP])


def _weight(weight: Tensor, scale: Tensor, fp4: bool) -> Tensor:
    stored = Fp4Group32(weight, scale) if fp4 else Fp8Block32(weight, scale)
    return stored.dequantize(torch.float32)


def _cast_back(x: Tensor) -> Tensor:
    """The fp8 activation cast of bf16 rows (per 32 columns, ue8m0) and its exact decoding."""
    groups = x.float().view(*x.shape[:-1], -1, GROUP)
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=E4M3_AMAX_FLOOR)
    scale = decode_ue8m0(encode_ue8m0(amax * (1.0 / E4M3_MAX)))
    return (decode_e4m3(encode_e4m3(groups / scale)) * scale).flatten(-2)


def _expert(x: Tensor, weight: Tensor, w13: Tensor, w2: Tensor, limit: float) -> Tensor:
    """One expert on its rows: fp32 [n, D], routing weights fp32 [n] -> bf16 [n, D]."""
    gate, up = (x @ w13.t()).to(torch.bfloat16).float().chunk(2, -1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    hidden = gate / (1.0 + torch.exp(-gate)) * up * weight[:, None]
    return (_cast_back(hidden.to(torch.bfloat16)) @ w2.t()).to(torch.bfloat16)


def moe_experts(
    q: Tensor,
    s: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_s: Tensor,
    w2: Tensor,
    w2_s: Tensor,
    limit: float,
    shared: Tensor | None,
) -> Tensor:
    """Run every token through its chosen experts and combine.

    Args:
        q: uint8 [T, D], the input as e4m3 codes.
        s: uint8 [T, D/32], ue8m0 scales of `q`.
        ids: int32 [T, k], expert of each slot; -1: not routed here, adds nothing.
        weights: fp32 [T, k], routing weights; they multiply before W2.
        w13: uint8 [E, 2I, D/2] packed e2m1 (rows: W1 then W3), or [E, 2I, D] e4m3.
        w13_s: uint8 ue8m0 [E, 2I, D/32] for fp4, [E, 2I/32, D/32] (32x32 tiles) for fp8.
        w2: uint8 [E, D, I/2] packed e2m1, or [E, D, I] e4m3; the same format as `w13`.
        w2_s: uint8 ue8m0 [E, D, I/32] for fp4, [E, D/32, I/32] for fp8. Both scales lie from
            2^-60 to 2^60 (codes 67 to 187).
        limit: clamp of the SwiGLU (gate from above, up on both sides); 0: none.
        shared: bf16 [T, D], the shared expert's output, added last; None: nothing to add.

    Returns: bf16 [T, D], contiguous.
    Raises: ValueError on a shape, TypeError on a dtype. D and I must be divisible by 32.
    Numerics: GEMMs as `linear_fp4` / `linear_fp8` (exact products, fp32 sums, bf16 results);
        SwiGLU in fp32 with the routing weight, rounded to bf16, then the fp8 activation cast;
        routed outputs summed in fp32 in slot order, `shared` last, one rounding to bf16.
    Source: the release's routed expert layer.
    """
    check_moe_experts(q, s, ids, weights, w13, w13_s, w2, w2_s, limit, shared)
    tokens, dim = q.shape
    x, fp4 = dequantize_rows(q, s), is_fp4(w13, dim)
    routed = torch.zeros(tokens, ids.shape[1], dim, dtype=torch.bfloat16, device=q.device)
    for e in torch.unique(ids[ids >= 0]).tolist():
        token, slot = (ids == e).nonzero(as_tuple=True)
        up_gate, down = _weight(w13[e], w13_s[e], fp4), _weight(w2[e], w2_s[e], fp4)
        routed[token, slot] = _expert(x[token], weights[token, slot], up_gate, down, limit)
    total = torch.zeros(tokens, dim, dtype=torch.float32, device=q.device)
    for slot in range(ids.shape[1]):
        total += routed[:, slot].float()
    if shared is not None:
        total += shared.float()
    return total.to(torch.bfloat16)
