"""Launchers of the sparse latent attention.

    s = q k^T;  m = max s;  p = exp2((s - m) * scale * log2 e);  o = (sum bf16(p) v) / sum p

Logits, exponentials and sums are fp32, p is rounded to bf16 before it meets the values, and the
result once to bf16. Rows are gathered from both caches by slot and dequantized in registers,
which is exact. Few tokens split their keys over several programs; the merge is exact and its
order fixed, but the number of splits, hence the last bit, depends on the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tinfer.compat.sparse_mla import check_sparse_mla
from tinfer.kernels._call import MAX_PROGRAMS, device_reason
from tinfer.kernels._target import Target, target
from tinfer.kernels.sparse_mla_combine import _sparse_mla_combine_kernel
from tinfer.kernels.sparse_mla_forward import _sparse_mla_kernel
from tinfer.kernels.sparse_mla_tile import Key, layout_key
from tinfer.kv_layout import KVLayout

SLOT_LIMIT = 2**31 - 1  # slots are int32
MAX_SPLITS = 32


@dataclass(frozen=True)
class _Source:
    """One cache as the kernel takes it."""

    cache: Tensor  # bf16 elements for bf16 rows, else bytes
    key: Key
    slots: Tensor
    lengths: Tensor | None

    @classmethod
    def of(cls, cache: Tensor, layout: KVLayout, slots: Tensor, lengths: Tensor | None) -> _Source:
        key = layout_key(layout, cache)
        slots = slots if slots.stride(1) == 1 else slots.contiguous()
        lengths = lengths if lengths is None else lengths.contiguous()
        elements = cache.view(torch.bfloat16) if layout.value == "bf16" else cache
        return cls(elements, key, slots, lengths)

    @property
    def width(self) -> int:
        return self.slots.shape[1]

    def rows(self, part: slice) -> _Source:
        """The same cache for a part of the queries."""
        lengths = None if self.lengths is None else self.lengths[part]
        return replace(self, slots=self.slots[part], lengths=lengths)

    def scalars(self) -> tuple[int, int, int, int]:
        """(width, rows, page stride, slots stride)."""
        rows = min(self.cache.shape[0] * self.key[3], SLOT_LIMIT)
        return self.width, rows, self.cache.stride(0), self.slots.stride(0)


def _pow2(n: int) -> int:
    return triton.next_power_of_2(max(n, 16))


class Tile(NamedTuple):
    """What one program handles at a time, and how it is compiled."""

    heads: int
    keys: int
    warps: int
    stages: int


def _sparse_mla_tiles(heads: int, dim: int, packed: bool, on: Target) -> Tile:
    """The tile for a target class.

    Shared memory holds the queries, the keys of `stages` blocks in bf16 (packed rows: one block
    in bf16 and the raw rows) and the probabilities.
    """
    block_h = min(64, _pow2(heads))
    if on.shared_kib >= 227:
        return Tile(block_h, 64, 8, 2)
    if on.shared_kib >= 160:
        return Tile(block_h, 32, 8, 2)
    if on.backend == "hip":
        return Tile(min(block_h, 16), 32, 4, 1)
    return Tile(min(block_h, 32), 16, 4, 1 if packed else 2)


def _splits(programs: int, blocks: int, processors: int) -> int:
    """Splits of each row's blocks that fill the processors, all but the last equally long."""
    wanted = min(max(processors // max(programs, 1), 1), max(blocks, 1), MAX_SPLITS)
    return triton.cdiv(max(blocks, 1), triton.cdiv(max(blocks, 1), wanted))


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
    if q.stride(2) != 1:
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
    sources = [_Source.of(window_cache, window_layout, window_slots, window_lengths)]
    if compressed_cache is not None and compressed_layout and compressed_slots is not None:
        second = (compressed_cache, compressed_layout, compressed_slots, compressed_lengths)
        sources.append(_Source.of(*second))
    sink = sink if sink is None else sink.contiguous()
    return _launch(q, sources, sink, scale, value_dim or q.shape[2])


def _launch(
    q: Tensor, sources: list[_Source], sink: Tensor | None, scale: float, value_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the results and attend to at most MAX_PROGRAMS programs' rows at a time."""
    tokens, heads, dim = q.shape
    out = q.new_empty(tokens, heads, value_dim)
    max_logit = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    lse = torch.empty_like(max_logit)
    packed = any(s.key[0] != "bf16" for s in sources)
    tile = _sparse_mla_tiles(heads, dim, packed, target(q.device))
    step = MAX_PROGRAMS // triton.cdiv(heads, tile.heads)
    for start in range(0, tokens, step):
        rows = slice(start, start + step)
        results = (out[rows], max_logit[rows], lse[rows])
        _attend(q[rows], [s.rows(rows) for s in sources], sink, scale, tile, results)
    return out, max_logit, lse


def _attend(
    q: Tensor,
    sources: list[_Source],
    sink: Tensor | None,
    scale: float,
    tile: Tile,
    results: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Attend and, where the keys are split, merge."""
    tokens, heads, dim = q.shape
    value_dim = results[0].shape[2]
    on = target(q.device)
    programs = tokens * triton.cdiv(heads, tile.heads)
    blocks = sum(triton.cdiv(s.width, tile.keys) for s in sources)
    splits = _splits(programs, blocks, on.processors)
    parts = results
    if splits > 1:
        shapes = ((tokens, heads, splits, value_dim), *[(tokens, heads, splits)] * 2)
        parts = tuple(torch.empty(s, dtype=torch.float32, device=q.device) for s in shapes)
    window, second = sources[0], sources[-1]
    _sparse_mla_kernel[(programs * splits,)](
        q, window.cache, window.slots, window.lengths,
        second.cache, second.slots, second.lengths, sink if splits == 1 else None,
        *parts, scale, heads, splits, *q.stride()[:2], *parts[0].stride()[:3],
        *window.scalars(), *second.scalars(),
        WINDOW=window.key, COMPRESSED=second.key,
        WINDOW_WIDTH=_pow2(window.width),
        COMPRESSED_WIDTH=_pow2(second.width) if len(sources) > 1 else 0,
        VALUE=value_dim, BLOCK_V=_pow2(value_dim),
        TAIL=dim - value_dim, BLOCK_T=_pow2(dim - value_dim),
        BLOCK_H=tile.heads, BLOCK_N=tile.keys, STAGES=tile.stages, SCAN=splits == 1,
        PTX=on.backend == "cuda", num_warps=tile.warps,
    )  # fmt: skip
    if splits > 1:
        _sparse_mla_combine_kernel[(tokens * heads,)](
            *parts, sink, *results, heads, splits,
            BLOCK_S=triton.next_power_of_2(splits), VALUE=value_dim, BLOCK_V=_pow2(value_dim),
            num_warps=4,
        )  # fmt: skip
