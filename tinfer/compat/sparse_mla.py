"""Reference of the sparse latent attention: each query attends to the slots its row lists.

Source: DeepSeek-V4.1-Flash `inference/kernel.py` (sparse_attn), as described by the golden
vectors `sparse_attn`; the log2 lse and the row without keys follow the project's contract.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tinfer.compat.checks import require, require_dtype, require_shape
from tinfer.kv_layout import KVLayout, check_cache

LOG2E = 1.0 / math.log(2.0)
BLOCK = 64  # keys that share a running maximum; decides how a probability rounds
GATHER_ELEMENTS = 1 << 24  # bounds the gathered fp32 keys of one chunk of rows


def _check_source(
    op: str,
    name: str,
    cache: Tensor,
    layout: KVLayout,
    slots: Tensor,
    lengths: Tensor | None,
    q: Tensor,
) -> None:
    check_cache(op, cache, layout, f"{name}_cache")
    require(layout.dim == q.shape[2], op, f"{name}_layout.dim", f"{q.shape[2]}", layout.dim)
    require_dtype(op, f"{name}_slots", slots, torch.int32)
    require_shape(op, f"{name}_slots", slots, (q.shape[0], "K"))
    if lengths is not None:
        require_dtype(op, f"{name}_lengths", lengths, torch.int32)
        require_shape(op, f"{name}_lengths", lengths, (q.shape[0],))


def check_sparse_mla(
    q: Tensor,
    window_cache: Tensor,
    window_layout: KVLayout,
    window_slots: Tensor,
    compressed_cache: Tensor | None,
    compressed_layout: KVLayout | None,
    compressed_slots: Tensor | None,
    sink: Tensor | None,
    scale: float,
    window_lengths: Tensor | None = None,
    compressed_lengths: Tensor | None = None,
    value_dim: int | None = None,
) -> None:
    """Raise unless the arguments fit `sparse_mla`."""
    op = "sparse_mla"
    require_dtype(op, "q", q, torch.bfloat16)
    require_shape(op, "q", q, ("T", "H", "D"))
    require(q.shape[1] > 0 and q.shape[2] > 0, op, "q", "[T, H, D] with H, D > 0", list(q.shape))
    _check_source(op, "window", window_cache, window_layout, window_slots, window_lengths, q)
    second = (compressed_cache, compressed_layout, compressed_slots)
    if compressed_cache is None or compressed_layout is None or compressed_slots is None:
        given = [x is not None for x in (*second, compressed_lengths)]
        require(not any(given), op, "compressed_*", "all given or all None", given)
    else:
        _check_source(op, "compressed", *second, compressed_lengths, q)  # type: ignore[arg-type]
    if sink is not None:
        require_dtype(op, "sink", sink, torch.float32)
        require_shape(op, "sink", sink, (q.shape[1],))
    require(math.isfinite(scale), op, "scale", "finite", scale)
    if value_dim is not None:
        require(0 < value_dim <= q.shape[2], op, "value_dim", f"in 1..{q.shape[2]}", value_dim)


def _valid_slots(slots: Tensor, lengths: Tensor | None, rows: int) -> Tensor:
    """The slots, with -1 for everything that is skipped: negative, beyond the cache or length."""
    valid = (slots >= 0) & (slots < rows)
    if lengths is not None:
        valid &= torch.arange(slots.shape[1], device=slots.device) < lengths[:, None]
    return torch.where(valid, slots, -1)


def apply_sink(out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
    """fp32 `out [..., H, V]` times `1 / (1 + exp2(sink * log2(e) - lse))`, rounded to bf16.

    `lse` is in log2 units `[..., H]`. Rows with lse -inf (no key) give zeros whatever the sink.
    """
    if sink is not None:
        factor = 1.0 / (1.0 + torch.exp2(sink * LOG2E - lse))
        out = out * factor[..., None]
    return torch.where(torch.isneginf(lse)[..., None], 0.0, out).to(torch.bfloat16)


def _attend(q: Tensor, kv: Tensor, valid: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(out fp32 without sink, max_logit, log2 lse) of q [T,H,D] over kv [T,K,D] fp32."""
    logits = torch.einsum("thd,tkd->thk", q.float(), kv) * scale
    logits = logits.masked_fill(~valid[:, None, :], float("-inf"))
    running = _running_max(logits)
    top = running[..., -1]
    p = torch.exp2((logits - _finite(running)) * LOG2E)
    rescale = torch.exp2((running - _finite(top)[..., None]) * LOG2E)
    total = (p * rescale).sum(-1)
    out = torch.einsum("thk,tkd->thd", p.to(torch.bfloat16).float() * rescale, kv)
    out = out / torch.where(total == 0, 1.0, total)[..., None]
    return out, top, torch.log2(total) + _finite(top) * LOG2E


def _running_max(logits: Tensor) -> Tensor:
    """For each key, the maximum over its block of `BLOCK` keys and all blocks before it."""
    keys = logits.shape[-1]
    padded = F.pad(logits, (0, -keys % BLOCK), value=float("-inf"))
    blocks = padded.unflatten(-1, (-1, BLOCK)).amax(-1).cummax(-1).values
    running: Tensor = blocks.repeat_interleave(BLOCK, -1)[..., :keys]
    return running


def _finite(x: Tensor) -> Tensor:
    return torch.where(torch.isneginf(x), 0.0, x)


def sparse_mla(
    q: Tensor,
    window_cache: Tensor,
    window_layout: KVLayout,
    window_slots: Tensor,
    compressed_cache: Tensor | None,
    compressed_layout: KVLayout | None,
    compressed_slots: Tensor | None,
    sink: Tensor | None,
    scale: float,
    window_lengths: Tensor | None = None,
    compressed_lengths: Tensor | None = None,
    value_dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One softmax over the slots that a query's row lists in two caches; key and value are one.

    Args:
        q: bf16 [T, H, D], last dimension contiguous.
        window_cache, window_layout: uint8 [pages, page_bytes] and its KVLayout of dim D.
        window_slots: int32 [T, W], W >= 0, absolute slots `page * page_size + row`, any order.
        compressed_cache, compressed_layout, compressed_slots: the second source, int32 [T, K],
            or None for all three. The list is a continuation of the window's.
        sink: fp32 [H], a logit that enters only the denominator, unscaled; None: no sink.
        scale: factor of `q . k`.
        window_lengths, compressed_lengths: int32 [T]; entries of a row at or beyond its length
            are ignored. None: all count.
        value_dim: the leading channels of a row that are its value; None means all D. (D 576
            with value_dim 512 is the layout of rows with separate rope channels.)

    Returns:
        out: bf16 [T, H, value_dim].
        max_logit: fp32 [T, H], the largest `scale * q.k`; -inf in a row without keys.
        lse: fp32 [T, H], log2 of the sum of exp(scale * q.k), without the sink; -inf in a row
            without keys.

    Raises:
        TypeError: wrong dtype. ValueError: wrong shape, a layout of another dim, or a second
        source given in part.

    Numerics: rows are dequantized to bf16, which is exact; logits, exponentials and sums are
        fp32; probabilities are rounded to bf16 before they multiply the values, while the
        denominator sums them unrounded; the result takes one rounding to bf16. What is rounded
        is relative to the running maximum: that of the key's block of 64 entries of the two
        lists taken as one, and of all blocks before it (a kernel that splits a list of more
        than two blocks may let the maximum start anew in each split). A slot that is negative
        or beyond its cache is skipped: its memory is not used, not even when it holds NaN. A
        slot listed twice counts twice. There is no causal mask: the slots say what is visible.
        A row without keys gives zeros. sink +inf gives zeros, -inf is no sink.
    """
    check_sparse_mla(
        q,
        window_cache,
        window_layout,
        window_slots,
        compressed_cache,
        compressed_layout,
        compressed_slots,
        sink,
        scale,
        window_lengths,
        compressed_lengths,
        value_dim,
    )
    from tinfer.compat.kv_cache import load_kv

    sources = [(window_cache, window_layout, window_slots, window_lengths)]
    if compressed_cache is not None and compressed_layout and compressed_slots is not None:
        second = (compressed_cache, compressed_layout, compressed_slots, compressed_lengths)
        sources.append(second)
    tokens, heads, dim = q.shape
    width = sum(s.shape[1] for _, _, s, _ in sources)
    value_dim = dim if value_dim is None else value_dim
    out = q.new_zeros(tokens, heads, value_dim)
    max_logit = torch.full((tokens, heads), float("-inf"), device=q.device)
    lse = max_logit.clone()
    step = max(1, GATHER_ELEMENTS // max(1, width * dim))
    for start in range(0, tokens if width else 0, step):
        part = slice(start, start + step)
        keys, valid = [], []
        for cache, layout, slots, lengths in sources:
            rows = cache.shape[0] * layout.page_size
            ids = _valid_slots(slots[part], None if lengths is None else lengths[part], rows)
            keys.append(load_kv(cache, layout, ids.long()).float())
            valid.append(ids >= 0)
        kv, ok = torch.cat(keys, 1), torch.cat(valid, 1)
        value, max_logit[part], lse[part] = _attend(q[part], kv, ok, scale)
        out[part] = apply_sink(value[..., :value_dim], lse[part], sink)
    return out, max_logit, lse
