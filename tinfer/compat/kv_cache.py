"""References of the paged caches: store rows from bf16, load them by slot.

The layouts are `tinfer.kv_layout.KVLayout`; writers and readers share that one description.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinfer.compat.casts import cast_back, fake_quant_, per_token_cast
from tinfer.compat.norm_rope import apply_rotary_, rms_norm
from tinfer.kv_layout import FIRST_CASTS, KVLayout, check_cache


# ---------------------------------------------------------------- rows <-> codes and scales
def encode_rows(x: Tensor, layout: KVLayout) -> tuple[Tensor, Tensor]:
    """bf16 [T, dim] -> (uint8 [T, data_bytes], uint8 [T, scale_bytes])."""
    group, scale = FIRST_CASTS[layout.first]
    if group:
        x = x.clone()
        fake_quant_(x, "e2m1", group, scale)
    if layout.value == "bf16":
        return x.contiguous().view(torch.uint8), x.new_empty((len(x), 0), dtype=torch.uint8)
    codes, scales = per_token_cast(x, layout.value, layout.group, layout.scale)
    return codes, scales.contiguous().view(torch.uint8)


def decode_rows(data: Tensor, scales: Tensor, layout: KVLayout) -> Tensor:
    """(uint8 [T, data_bytes], uint8 [T, scale_bytes]) -> bf16 [T, dim]."""
    if layout.value == "bf16":
        return data.contiguous().view(torch.bfloat16)
    if layout.scale.startswith("fp32"):
        scales = scales.contiguous().view(torch.float32)
    return cast_back(data, scales, layout.value, layout.group, layout.scale, torch.bfloat16)


# ---------------------------------------------------------------- pages
def _views(cache: Tensor, layout: KVLayout) -> tuple[Tensor, Tensor]:
    """(codes [pages, page_size, data_bytes], scales [pages, page_size, scale_bytes]) as views."""
    pages, size = cache.shape[0], layout.page_size
    page, start = cache.stride(0), cache.storage_offset()
    shape, stride = (pages, size, layout.data_bytes), (page, layout.data_stride, 1)
    data = cache.as_strided(shape, stride, start)
    shape, stride = (pages, size, layout.scale_bytes), (page, layout.scale_stride, 1)
    return data, cache.as_strided(shape, stride, start + layout.scale_base)


def write_rows(x: Tensor, slots: Tensor, cache: Tensor, layout: KVLayout) -> None:
    """`store_kv` where every slot is valid."""
    data, scales = encode_rows(x, layout)
    slots = slots.long()
    page, row = slots // layout.page_size, slots % layout.page_size
    data_view, scale_view = _views(cache, layout)
    data_view[page, row] = data
    scale_view[page, row] = scales


def check_store_kv(
    op: str, x: Tensor, slots: Tensor, cache: Tensor, layout: KVLayout, positions: Tensor | None
) -> None:
    """Shared by store_kv and store_kv_rope."""
    if x.dtype != torch.bfloat16:
        raise TypeError(f"{op}: x must be bfloat16, got {x.dtype}")
    if x.dim() != 2 or x.shape[1] != layout.dim:
        raise ValueError(f"{op}: x must be [T, {layout.dim}], got {list(x.shape)}")
    for name, index in (("slots", slots), ("positions", positions)):
        if index is None:
            continue
        if index.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{op}: {name} must be int32 or int64, got {index.dtype}")
        if index.shape != x.shape[:1]:
            raise ValueError(f"{op}: {name} must be [{len(x)}], got {list(index.shape)}")
    check_cache(op, cache, layout)


def store_kv(x: Tensor, slots: Tensor, cache: Tensor, layout: KVLayout) -> None:
    """Quantize rows and write them at their slots, in place.

    x       bf16 [T, dim]
    slots   int32 or int64 [T], each used once; -1 writes nothing
    cache   uint8 [num_pages, layout.page_bytes]

    Raises: TypeError, ValueError for dtypes and shapes. A slot beyond the cache is undefined.
    Numerics: `per_token_cast(x, layout.value, layout.group, layout.scale)`, after `fake_quant_`
      for layouts with a first cast. The floors are on a group's amax, never on the scale, so a
      stored row equals the model's own quantize-dequantize. NaN in a group makes that group NaN;
      so does infinity unless the scale is e4m3, which saturates.
    Source: the release's act_quant and fp4_act_quant (golden vectors).
    """
    check_store_kv("store_kv", x, slots, cache, layout, None)
    keep = slots >= 0
    write_rows(x[keep], slots[keep], cache, layout)


def check_load_kv(cache: Tensor, layout: KVLayout, slots: Tensor) -> None:
    if slots.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"load_kv: slots must be int32 or int64, got {slots.dtype}")
    check_cache("load_kv", cache, layout)


def load_kv(cache: Tensor, layout: KVLayout, slots: Tensor) -> Tensor:
    """Rows by slot, dequantized.

    cache   uint8 [num_pages, layout.page_bytes]
    slots   int32 or int64 [...]; -1 gives a row of zeros without touching memory

    Returns: bf16 [..., dim].
    Raises: TypeError, ValueError for dtypes and shapes. A slot beyond the cache is undefined.
    Numerics: value times scale in fp32, one rounding; exact for every scale but a free fp32 one.
    """
    check_load_kv(cache, layout, slots)
    flat = slots.reshape(-1).long()
    keep = flat >= 0
    data_view, scale_view = _views(cache, layout)
    page, row = flat[keep] // layout.page_size, flat[keep] % layout.page_size
    out = torch.zeros(len(flat), layout.dim, dtype=torch.bfloat16, device=cache.device)
    out[keep] = decode_rows(data_view[page, row], scale_view[page, row], layout)
    return out.view(*slots.shape, layout.dim)


def check_store_kv_rope(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    layout: KVLayout,
) -> None:
    op = "store_kv_rope"
    check_store_kv(op, x, slots, cache, layout, positions)
    if weight is not None and weight.shape != (layout.dim,):
        raise ValueError(f"{op}: weight must be [{layout.dim}], got {list(weight.shape)}")
    if weight is not None and weight.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"{op}: weight must be bfloat16 or float32, got {weight.dtype}")
    if weight is not None and not eps >= 0:
        raise ValueError(f"{op}: eps must be >= 0, got {eps}")
    if cos_sin.dtype != torch.float32:
        raise TypeError(f"{op}: cos_sin must be float32, got {cos_sin.dtype}")
    if cos_sin.dim() != 2 or cos_sin.shape[1] % 2 or cos_sin.shape[1] > layout.dim:
        raise ValueError(
            f"{op}: cos_sin must be [L, R] with R even and at most {layout.dim}, "
            f"got {list(cos_sin.shape)}"
        )


def store_kv_rope(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    layout: KVLayout,
) -> None:
    """RMSNorm (with a weight), rotate the last R channels, quantize and store, in one pass.

    x          bf16 [T, dim]
    weight     bf16 or fp32 [dim], or None for rows that are already normed
    cos_sin    fp32 [L, R] = [cos (R/2) | sin (R/2)], turning adjacent channel pairs
    positions  int32 or int64 [T], below L where slots >= 0
    slots      int32 or int64 [T]; -1 writes nothing, whatever its position is
    cache      uint8 [num_pages, layout.page_bytes]

    Raises: TypeError, ValueError for dtypes and shapes.
    Numerics: equal to `rms_norm` (rounded to bf16), `apply_rotary_` (rounded to bf16) and
    `store_kv` in turn.
    Source: the release's attention (kv_norm, rope, act_quant) and compressor (rope, fp4).
    """
    check_store_kv_rope(x, weight, eps, cos_sin, positions, slots, cache, layout)
    keep = slots >= 0
    rows = x[keep] if weight is None else rms_norm(x[keep], weight, eps)
    rows = rows[:, None].clone()
    apply_rotary_(rows, cos_sin, positions[keep].long())
    store_kv(rows[:, 0], slots[keep], cache, layout)
