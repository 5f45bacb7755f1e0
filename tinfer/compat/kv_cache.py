"""References of the paged caches: store rows from bf16, load them by slot.

The layouts are `tinfer.kv_layout.KVLayout`; writers and readers share that one description.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinfer.formats import (
    E2M1_AMAX_FLOOR,
    E2M1_AMAX_FLOOR_E4M3,
    E2M1_MAX,
    E4M3_AMAX_FLOOR,
    E4M3_MAX,
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    encode_e2m1,
    encode_e4m3,
    encode_ue8m0,
    pack_e2m1,
    unpack_e2m1,
)
from tinfer.kv_layout import FIRST_CASTS, KVLayout, check_cache


# ---------------------------------------------------------------- rows <-> codes and scales
def _amax(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    grouped = x.float().reshape(*x.shape[:-1], x.shape[-1] // group, group)
    return grouped, grouped.abs().amax(-1)


def _scale_code(amax: Tensor, value: str, scale: str) -> Tensor:
    """The scale of a group from its amax: uint8 codes, or fp32 values for the fp32 scales."""
    top = E4M3_MAX if value == "e4m3" else E2M1_MAX
    if scale == "e4m3":
        return encode_e4m3(amax.clamp(min=E2M1_AMAX_FLOOR_E4M3) / top)
    floor = E4M3_AMAX_FLOOR if value == "e4m3" else E2M1_AMAX_FLOOR
    raw = amax.clamp(min=floor) * torch.tensor(1.0 / top, dtype=torch.float32)
    if scale == "fp32":
        return raw
    code = encode_ue8m0(raw)
    return decode_ue8m0(code) if scale == "fp32_pow2" else code


def _scale_value(code: Tensor, scale: str) -> Tensor:
    if scale == "e4m3":
        return decode_e4m3(code)
    return decode_ue8m0(code) if scale == "ue8m0" else code


def quantize(x: Tensor, value: str, group: int, scale: str) -> tuple[Tensor, Tensor]:
    """bf16 [..., dim] -> (codes uint8, one a channel; scales uint8 or fp32 [..., dim/group]).

    A group whose scale is not finite (it holds NaN; or inf, unless the scale saturates) gets
    codes 0: it decodes to NaN whatever the codes say.
    """
    grouped, amax = _amax(x, group)
    code = _scale_code(amax, value, scale)
    divisor = _scale_value(code, scale)[..., None]
    encode = encode_e4m3 if value == "e4m3" else encode_e2m1
    codes = torch.where(divisor.isfinite(), encode(grouped / divisor), 0)
    return codes.to(torch.uint8).flatten(-2), code


def dequantize(codes: Tensor, scales: Tensor, value: str, group: int, scale: str) -> Tensor:
    """The inverse map, bf16: one fp32 product and one rounding (exact unless scales are fp32)."""
    decoded = (decode_e4m3 if value == "e4m3" else decode_e2m1)(codes)
    factor = _scale_value(scales, scale).repeat_interleave(group, -1)
    return (decoded * factor).to(torch.bfloat16)


def encode_rows(x: Tensor, layout: KVLayout) -> tuple[Tensor, Tensor]:
    """bf16 [T, dim] -> (uint8 [T, data_bytes], uint8 [T, scale_bytes])."""
    group, scale = FIRST_CASTS[layout.first]
    if group:
        x = dequantize(*quantize(x, "e2m1", group, scale), "e2m1", group, scale)
    if layout.value == "bf16":
        return x.contiguous().view(torch.uint8), x.new_empty((len(x), 0), dtype=torch.uint8)
    codes, scales = quantize(x, layout.value, layout.group, layout.scale)
    data = pack_e2m1(codes) if layout.value == "e2m1" else codes
    return data, scales.contiguous().view(torch.uint8)


def decode_rows(data: Tensor, scales: Tensor, layout: KVLayout) -> Tensor:
    """(uint8 [T, data_bytes], uint8 [T, scale_bytes]) -> bf16 [T, dim]."""
    if layout.value == "bf16":
        return data.contiguous().view(torch.bfloat16)
    codes = unpack_e2m1(data) if layout.value == "e2m1" else data
    if layout.scale.startswith("fp32"):
        scales = scales.contiguous().view(torch.float32)
    return dequantize(codes, scales, layout.value, layout.group, layout.scale)


# ---------------------------------------------------------------- pages
def _views(cache: Tensor, layout: KVLayout) -> tuple[Tensor, Tensor]:
    """(codes [pages, page_size, data_bytes], scales [pages, page_size, scale_bytes]) as views."""
    pages, size = cache.shape[0], layout.page_size
    page, start = cache.stride(0), cache.storage_offset()
    shape, stride = (pages, size, layout.data_bytes), (page, layout.data_stride, 1)
    data = cache.as_strided(shape, stride, start)
    shape, stride = (pages, size, layout.scale_bytes), (page, layout.scale_stride, 1)
    return data, cache.as_strided(shape, stride, start + layout.scale_base)


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
        if index.dtype != torch.int64:
            raise TypeError(f"{op}: {name} must be int64, got {index.dtype}")
        if index.shape != x.shape[:1]:
            raise ValueError(f"{op}: {name} must be [{len(x)}], got {list(index.shape)}")
    check_cache(op, cache, layout)


def store_kv(x: Tensor, slots: Tensor, cache: Tensor, layout: KVLayout) -> None:
    """Quantize rows and write them at their slots, in place.

    x       bf16 [T, dim]
    slots   int64 [T], each used once; -1 writes nothing (and that row is not read)
    cache   uint8 [num_pages, layout.page_bytes]

    Raises: TypeError, ValueError for dtypes and shapes. A slot beyond the cache is undefined.
    Numerics: per group of `layout.group` channels, fp32, from `a = max|x|`:
      ue8m0  a floored at 1e-4 (e4m3) or 6*2^-126 (e2m1), s = 2^ceil(log2(a*fp32(1/max))) on the
             exponent bits; code = round(x/s), to nearest even, saturating. The floor is on a,
             never on s, so a stored row equals the model's own quantize-dequantize.
      e4m3   a floored at 6*2^-9, s = e4m3(a/6); code = e2m1(x/s) by true division
      fp32   s = a*fp32(1/max), true division; fp32_pow2 rounds s up to a power of two
    NaN in a group makes its scale NaN; inf too, except that an e4m3 scale saturates at 448.
    Source: the release's act_quant and fp4_act_quant (golden vectors).
    """
    check_store_kv("store_kv", x, slots, cache, layout, None)
    keep = slots >= 0
    data, scales = encode_rows(x[keep], layout)
    page, row = slots[keep] // layout.page_size, slots[keep] % layout.page_size
    data_view, scale_view = _views(cache, layout)
    data_view[page, row] = data
    scale_view[page, row] = scales


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
    positions  int64 [T], below L where slots >= 0
    slots      int64 [T]; -1 writes nothing and reads neither row nor position
    cache      uint8 [num_pages, layout.page_bytes]

    Raises: TypeError, ValueError for dtypes and shapes.
    Numerics: the norm `x * rsqrt(mean(x^2)+eps) * weight` in fp32 is rounded to bf16, the
    rotation in fp32 is rounded to bf16, then `store_kv`: equal to calling the three in turn.
    Source: the release's attention (kv_norm, rope, act_quant) and compressor (rope, fp4).
    """
    check_store_kv_rope(x, weight, cos_sin, positions, slots, cache, layout)
    keep = slots >= 0
    rows = x[keep].float()
    if weight is not None:
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * weight.float()
        rows = rows.to(torch.bfloat16).float()
    cos, sin = cos_sin[positions[keep]].chunk(2, -1)
    start = layout.dim - cos_sin.shape[1]
    left, tail = rows[:, :start], rows[:, start:]
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    roped = torch.cat([left, turned], -1).to(torch.bfloat16)
    store_kv(roped, slots[keep], cache, layout)
