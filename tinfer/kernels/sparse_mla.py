"""Launchers of the sparse latent attention.

    s = q k^T;  m = max s;  p = exp2((s - m) * scale * log2 e);  o = (sum bf16(p) v) / sum p

Logits, exponentials and sums are fp32, p is rounded to bf16 before it meets the values, with m
the running maximum of groups of 64 keys of both lists, and the result once to bf16. Rows are
gathered from both caches by slot and dequantized in registers, which is exact. Few tokens split
their keys over several programs; the merge is exact and its order fixed, but the running maximum
starts anew in each split, and the number of splits, hence the rounding of p, depends on the
number of tokens. Lists of up to 128 keys are never split.

`_sparse_mla_forward` runs everywhere; on Hopper `_sparse_mla_packed` takes the release's packed
rows of 512 channels and `_sparse_mla_hopper` many tokens over bf16 rows. The choice
(`_sparse_mla_plan`) is a pure function of sizes, layouts and target.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from tinfer.compat.sparse_mla import BLOCK, check_sparse_mla
from tinfer.kernels._call import MAX_PROGRAMS, device_reason, scattered
from tinfer.kernels._sparse_mla_combine import _sparse_mla_combine_kernel
from tinfer.kernels._sparse_mla_forward import _sparse_mla_kernel
from tinfer.kernels._sparse_mla_plan import (
    HOPPER_WIDTH,
    Source,
    form_of,
    groups_of,
    packed_split,
    portable_tile,
    pow2,
    splits_of,
    straddles,
)
from tinfer.kernels._target import target
from tinfer.kv_layout import KVLayout

Results = tuple[Tensor, Tensor, Tensor]


def _unsupported_layout(cache: Tensor, layout: KVLayout, name: str, value_dim: int) -> str | None:
    if layout.value == "bf16":
        odd = cache.stride(0) % 2 or cache.storage_offset() % 2
        return f"the {name} cache's bf16 rows are not aligned to two bytes" if odd else None
    if layout.scale not in ("ue8m0", "e4m3"):
        return f"{name} scales are {layout.scale}"
    group = layout.group
    if group & (group - 1) or group < 2 or value_dim % group or layout.dim % group:
        return f"{name} rows in groups of {group} do not divide {value_dim} of {layout.dim}"
    return None


def supports_sparse_mla(
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
) -> str | None:
    """Why this valid call has no kernel, or None."""
    reason = device_reason(
        q=q,
        window_cache=window_cache,
        window_slots=window_slots,
        window_lengths=window_lengths,
        compressed_cache=compressed_cache,
        compressed_slots=compressed_slots,
        compressed_lengths=compressed_lengths,
        sink=sink,
    )
    if reason is not None:
        return reason
    if scale <= 0:
        return f"scale is {scale}, not positive"
    if scattered(q):
        return "q's last dimension is not contiguous"
    if q.shape[2] > 1024:
        return f"rows of {q.shape[2]} channels exceed a tile"
    value_dim = value_dim or q.shape[2]
    reason = _unsupported_layout(window_cache, window_layout, "window", value_dim)
    if reason is None and compressed_cache is not None and compressed_layout is not None:
        reason = _unsupported_layout(compressed_cache, compressed_layout, "compressed", value_dim)
    return reason


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
    """See `tinfer.compat.sparse_mla`."""
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
    sources = [Source.of(window_cache, window_layout, window_slots, window_lengths)]
    if compressed_cache is not None and compressed_layout and compressed_slots is not None:
        second = (compressed_cache, compressed_layout, compressed_slots, compressed_lengths)
        sources.append(Source.of(*second))
    sink = sink if sink is None else sink.contiguous()
    value_dim = value_dim or q.shape[2]
    out = q.new_empty(*q.shape[:2], value_dim)
    max_logit = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    results = (out, max_logit, torch.empty_like(max_logit))
    if not len(q):
        return results
    on = target(q.device)
    form = form_of(q, sources, value_dim, on)
    if form == "unpack":
        layouts = (window_layout, compressed_layout)
        sources = [s.unpacked(x) for s, x in zip(sources, layouts, strict=False) if x]
    attend = {"portable": _attend_portable, "packed": _attend_packed}.get(form, _attend_hopper)
    attend(q, sources, sink, scale, results)
    return results


def _parts(results: Results, splits: int) -> Results:
    """Where the kernels write: the results, or fp32 parts of every split."""
    if splits == 1:
        return results
    tokens, heads, value_dim = results[0].shape
    like = {"dtype": torch.float32, "device": results[0].device}
    out = torch.empty(tokens, heads, splits, value_dim, **like)
    max_logit = torch.empty(tokens, heads, splits, **like)
    return out, max_logit, torch.empty_like(max_logit)


def _steps(tokens: int, programs: int) -> Iterator[slice]:
    """The rows in steps of MAX_PROGRAMS programs, `programs` to a row."""
    step = MAX_PROGRAMS // programs
    return (slice(begin, begin + step) for begin in range(0, tokens, step))


def _strides(parts: Results, splits: int) -> tuple[int, int, int]:
    """Of tokens, heads and splits. A single split's is 0, not the 1 of a channel, which would
    hide from the compiler that rows start where whole vectors can be stored."""
    token, head, split = parts[0].stride()[:3]
    return token, head, split if splits > 1 else 0


def _combine(parts: Results, sink: Tensor | None, results: Results, early: bool = False) -> None:
    """Merge the parts, if there are several. `early`: the kernel before lets this one start."""
    if parts is results:
        return
    tokens, heads, splits, value_dim = parts[0].shape
    _sparse_mla_combine_kernel[(tokens * heads,)](
        *parts, sink, *results, heads, splits,
        BLOCK_S=triton.next_power_of_2(splits), VALUE=value_dim, BLOCK_V=pow2(value_dim),
        EARLY=early, num_warps=4, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def _attend_portable(
    q: Tensor, sources: list[Source], sink: Tensor | None, scale: float, results: Results
) -> None:
    """Attend, MAX_PROGRAMS programs at a time, and merge where the keys are split."""
    tokens, heads, dim = q.shape
    value_dim = results[0].shape[2]
    on = target(q.device)
    tile = portable_tile(heads, any(s.packed for s in sources), on)
    head_blocks = triton.cdiv(heads, tile.heads)
    splits = splits_of(tokens * head_blocks, groups_of(sources), on.processors)
    aligned = tile.keys == BLOCK and not straddles(sources)
    for rows in _steps(tokens, head_blocks * splits):
        part = (results[0][rows], results[1][rows], results[2][rows])
        parts = _parts(part, splits)
        window, second = sources[0].rows(rows), sources[-1].rows(rows)
        _sparse_mla_kernel[(len(part[0]) * head_blocks * splits,)](
            q[rows], window.cache, window.slots, window.lengths,
            second.cache, second.slots, second.lengths, sink if splits == 1 else None,
            *parts, scale, heads, splits, *q.stride()[:2], *_strides(parts, splits),
            *window.scalars(), *second.scalars(),
            WINDOW=window.key, COMPRESSED=second.key,
            WINDOW_WIDTH=pow2(window.width),
            COMPRESSED_WIDTH=pow2(second.width) if len(sources) > 1 else 0,
            VALUE=value_dim, BLOCK_V=pow2(value_dim),
            TAIL=dim - value_dim, BLOCK_T=pow2(dim - value_dim),
            BLOCK_H=tile.heads, BLOCK_N=tile.keys, STAGES=tile.stages, SCAN=splits == 1,
            ALIGNED=aligned, PTX=on.backend == "cuda", num_warps=tile.warps,
        )  # fmt: skip
        _combine(parts, sink, part)


def _attend_packed(
    q: Tensor, sources: list[Source], sink: Tensor | None, scale: float, results: Results
) -> None:
    """The same with the Hopper kernel for packed rows."""
    from tinfer.kernels._sparse_mla_packed import _sparse_mla_packed_kernel

    tokens, heads, _ = q.shape
    on = target(q.device)
    each, splits = packed_split(tokens, heads, groups_of(sources), on.processors)
    head_blocks = triton.cdiv(heads, each)
    for rows in _steps(tokens, head_blocks * splits):
        part = (results[0][rows], results[1][rows], results[2][rows])
        parts = _parts(part, splits)
        window, second = sources[0].rows(rows), sources[-1].rows(rows)
        _sparse_mla_packed_kernel[(len(part[0]) * head_blocks * splits,)](
            q[rows], window.cache, window.slots, window.lengths,
            second.cache, second.slots, second.lengths, sink if splits == 1 else None,
            *parts, scale, heads, splits, *q.stride()[:2], *_strides(parts, splits),
            *window.scalars(), *second.scalars(), each, 0,
            WINDOW=window.key, COMPRESSED=second.key,
            WINDOW_WIDTH=max(pow2(window.width), HOPPER_WIDTH),
            COMPRESSED_WIDTH=max(pow2(second.width), HOPPER_WIDTH) if len(sources) > 1 else 0,
            SCAN=splits == 1, num_warps=8,
        )  # fmt: skip
        _combine(parts, sink, part, early=True)


def _attend_hopper(
    q: Tensor, sources: list[Source], sink: Tensor | None, scale: float, results: Results
) -> None:
    """The same with the warp-specialized kernel, whose programs walk over the rows."""
    from tinfer.kernels._sparse_mla_hopper import _sparse_mla_hopper_kernel

    tokens, heads, _ = q.shape
    on = target(q.device)
    rows = tokens * triton.cdiv(heads, 64)
    splits = splits_of(rows, groups_of(sources), on.processors)
    parts = _parts(results, splits)
    window, second = sources[0], sources[-1]
    _sparse_mla_hopper_kernel[(min(rows * splits, on.processors),)](
        q, window.cache, window.slots, window.lengths,
        second.cache, second.slots, second.lengths, sink if splits == 1 else None,
        *parts, scale, heads, splits, *q.stride()[:2], *_strides(parts, splits),
        *window.scalars(), *second.scalars(), rows * splits, 0,
        WINDOW=window.key, COMPRESSED=second.key,
        WINDOW_WIDTH=max(pow2(window.width), HOPPER_WIDTH),
        COMPRESSED_WIDTH=max(pow2(second.width), HOPPER_WIDTH) if len(sources) > 1 else 0,
        SCAN=splits == 1, num_warps=4,
    )  # fmt: skip
    _combine(parts, sink, results)
