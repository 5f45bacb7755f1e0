"""Sparse latent attention: window KV in every layer, selected compressed KV where there is any."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tinfer import ops
from tinfer.cache import Cache
from tinfer.formats import Fp8Block32
from tinfer.model.batch import Batch
from tinfer.model.compressor import Compressor
from tinfer.model.indexer import Indexer
from tinfer.model.linear import Cast, cast, linear


@dataclass
class Shared:
    """What sources publish for the layers after them, within one forward pass."""

    window_slots: Tensor  # int32 [T, W]: the window each row sees
    store_slots: Tensor  # int64 [T]: where each row's window KV goes
    candidates: Tensor | None = None  # int32 [T, blocks]
    selected: Tensor | None = None  # int32 [T, k]: slots of the chosen compressed positions


@dataclass(frozen=True)
class AttentionWeights:
    sink: Tensor  # fp32 [H]
    wq_a: Fp8Block32
    q_norm: Tensor
    wq_b: Fp8Block32
    wkv: Fp8Block32
    kv_norm: Tensor
    wo_a: Fp8Block32 | Tensor  # fp8 as released, or bf16 from a converted checkpoint
    wo_b: Fp8Block32


@dataclass(frozen=True)
class Attention:
    """One attention sublayer. `kv_source` is the layer whose compressed KV it reads, if any."""

    name: str
    weights: AttentionWeights
    heads: int
    head_dim: int
    groups: int
    norm_eps: float
    rope: Tensor  # fp32 [L, R]
    ratio: int = 0
    kv_source: int | None = None
    compressor: Compressor | None = None
    indexer: Indexer | None = None

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def store_window(
        self, x: Cast, positions: Tensor, slots: Tensor, window: Tensor, cache: Cache
    ) -> None:
        """Project, norm, rotate, quantize and store the window KV of each row."""
        kv = linear(x, self.weights.wkv)
        ops.store_kv_rope(
            kv,
            self.weights.kv_norm,
            self.norm_eps,
            self.rope,
            positions,
            slots,
            window,
            cache.window_layout,
        )

    def __call__(
        self, x: Tensor, batch: Batch, cache: Cache, window: Tensor, shared: Shared
    ) -> Tensor:
        """bf16 `[T, D]` -> bf16 `[T, D]`; `window` is this layer's window cache."""
        w, tokens = self.weights, x.shape[0]
        xc = cast(x)
        qr, qr_q, qr_s = ops.rms_norm_cast(linear(xc, w.wq_a), w.q_norm, self.norm_eps)
        q = ops.linear_fp8(qr_q, qr_s, w.wq_b.weight, w.wq_b.scale)
        q = q.view(tokens, self.heads, self.head_dim)
        ops.apply_rotary_(q, self.rope, batch.positions)
        self.store_window(xc, batch.positions, shared.store_slots, window, cache)
        if self.compressor is not None:
            self.compressor(x, batch, cache)
        if self.indexer is not None:
            shared.selected = self.indexer(x, Cast(qr, qr_q, qr_s), batch, cache, shared)
        o = self._attend(q, window, cache, shared)
        ops.apply_rotary_(o, self.rope, batch.positions, True)
        return self._project(o)

    def _attend(self, q: Tensor, window: Tensor, cache: Cache, shared: Shared) -> Tensor:
        compressed = None if self.kv_source is None else cache.compressed[self.kv_source]
        out, _, _ = ops.sparse_mla(
            q,
            window,
            cache.window_layout,
            shared.window_slots,
            compressed,
            None if compressed is None else cache.compressed_layout,
            None if compressed is None else shared.selected,
            self.weights.sink,
            self.scale,
        )
        return out

    def _project(self, o: Tensor) -> Tensor:
        """Grouped down-projection, then the output projection."""
        grouped = o.reshape(o.shape[0], self.groups, -1)
        wo_a = self.weights.wo_a
        if isinstance(wo_a, Fp8Block32):
            u = ops.linear_grouped(grouped, wo_a.weight, wo_a.scale)
        else:
            u = ops.linear_grouped(grouped, wo_a, None)
        return linear(cast(u.reshape(o.shape[0], -1)), self.weights.wo_b)


def no_selection(tokens: int, device: torch.device) -> Tensor:
    """The selection of a batch in which no compressed position is visible yet."""
    return torch.full((tokens, 1), -1, dtype=torch.int32, device=device)
