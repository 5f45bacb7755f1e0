"""Compressed KV and index keys of a KV-source layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tinfer import ops
from tinfer.cache import Cache
from tinfer.model.batch import Batch


@dataclass(frozen=True)
class Compressor:
    """Pools `ratio` tokens into one latent, and stores it as KV and as an index key."""

    layer: int
    ratio: int
    wkv: Tensor  # bf16 [d, D] (ratio 1: bf16 projection; above: fp32)
    wgate: Tensor | None  # [d, D], only above ratio 1
    norm: Tensor  # [d]
    wk: Tensor  # bf16 [index dim, d]
    k_norm: Tensor  # [index dim]
    norm_eps: float
    rope: Tensor

    def latent(self, x: Tensor, batch: Batch, cache: Cache) -> Tensor:
        """bf16 [T, d]; a row counts only where its token completes a group."""
        if self.wgate is None:
            pooled = ops.linear_bf16(x, self.wkv)
        else:
            pooled = ops.compress_pool(
                ops.linear_fp32(x, self.wkv),
                ops.linear_fp32(x, self.wgate),
                batch.positions,
                batch.seq,
                cache.pool_state[self.layer],
                self.ratio,
            )
        return ops.rms_norm(pooled, self.norm, self.norm_eps)

    def __call__(self, x: Tensor, batch: Batch, cache: Cache) -> None:
        """Store the latents and index keys that this batch completes."""
        latent = batch.trace(f"layer{self.layer}.latent", self.latent(x, batch, cache))
        group = batch.positions // self.ratio
        slots = cache.group_slots(batch, self.ratio)
        first = group * self.ratio  # a group stands at the position of its first token
        ops.store_kv_rope(
            latent,
            None,
            self.norm_eps,
            self.rope,
            first,
            slots,
            cache.compressed[self.layer],
            cache.compressed_layout,
        )
        key = ops.linear_bf16(latent, self.wk.to(torch.bfloat16))
        ops.store_kv_rope(
            key,
            self.k_norm,
            self.norm_eps,
            self.rope,
            first,
            slots,
            cache.index_keys[self.layer],
            cache.index_layout,
        )
