"""The backbone: embedding, blocks, head; one call for prefill, chunks, decode and verification."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tinfer import ops
from tinfer.cache import Cache
from tinfer.config import ModelConfig
from tinfer.model.attention import Attention, Shared
from tinfer.model.batch import Batch
from tinfer.model.engram import Engram, EngramHash
from tinfer.model.hyper_connection import HyperConnection, first_pre, leave
from tinfer.model.moe import MoE


@dataclass(frozen=True)
class Block:
    """Two sublayers, each behind its hyper-connection; some blocks begin with an engram."""

    attn_hc: HyperConnection
    attn: Attention
    ffn_hc: HyperConnection
    ffn: MoE
    engram: Engram | None = None


@dataclass(frozen=True)
class Hidden:
    """What a forward pass leaves behind for the heads."""

    x: Tensor  # bf16 [T, D]: collapsed and normed
    taps: Tensor | None  # bf16 [T, targets*D]: the draft stages' input


@dataclass(frozen=True)
class Transformer:
    config: ModelConfig
    embed: Tensor  # bf16 [V, D]
    blocks: list[Block]
    norm: Tensor  # [D]
    head: Tensor  # [V, D]
    engram_hash: EngramHash | None

    def __call__(self, batch: Batch, cache: Cache) -> Hidden:
        """Run the batch and update the caches."""
        cfg, trace = self.config, batch.trace
        stream = ops.hc_expand(self._embed(batch), cfg.hc_mult)
        hashes = self._hashes(batch, cache)
        shared = Shared(
            cache.window_read_slots(batch), cache.window_store_slots(batch.positions, batch.seq)
        )
        pre = first_pre(batch.num_tokens, cfg.hc_mult, stream.device)
        taps: list[Tensor] = []
        y = mix = None
        for i, block in enumerate(self.blocks):
            name = f"layer{i}"
            # Write back the FFN of the block before and enter attention: in one pass, unless
            # an engram changes the stream in between.
            if y is None or mix is None or block.engram is not None:
                if y is not None and mix is not None:
                    stream, pre = leave(y, stream, mix), mix.pre
                    self._trace_out(batch, i - 1, stream, pre)
                stream = self._engram(i, block, stream, hashes, batch)
                x, mix = block.attn_hc.enter(stream, pre)
            else:
                pre = mix.pre
                stream, x, mix = block.attn_hc.leave_and_enter(y, stream, mix)
                self._trace_out(batch, i - 1, stream, pre)
            if i in cfg.dspark_target_layer_ids:
                taps.append(ops.hc_mean(stream))
            x = trace(f"{name}.attn_in", x)
            y = block.attn(x, batch, cache, cache.windows[i], shared)
            y = trace(f"{name}.attn_out", y)
            stream, x, mix = block.ffn_hc.leave_and_enter(y, stream, mix)
            y = trace(f"{name}.ffn_out", block.ffn(trace(f"{name}.ffn_in", x), batch))
        if y is None or mix is None:
            raise ValueError("the model has no layers")
        stream = leave(y, stream, mix)
        self._trace_out(batch, len(self.blocks) - 1, stream, mix.pre)
        x = ops.hc_collapse_norm(stream, mix.pre, self.norm, cfg.norm_eps)
        main = trace("main_hidden", torch.cat(taps, dim=-1)) if taps else None
        return Hidden(trace("final_hidden", x), main)

    def logits(self, x: Tensor) -> Tensor:
        """fp32 `[T, V]` of normed hidden rows."""
        return ops.linear_fp32(x, self.head)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """bf16 `[..., D]`."""
        return self.embed[ids]

    def _embed(self, batch: Batch) -> Tensor:
        x = batch.trace("embed", self.embed_tokens(batch.ids))
        if batch.image_rows is not None:
            x = x.index_copy(0, batch.image_rows.where, batch.image_rows.rows.to(x.dtype))
        return x

    def _hashes(self, batch: Batch, cache: Cache) -> Tensor | None:
        if self.engram_hash is None:
            return None
        return batch.trace("engram_hash", self.engram_hash(batch, cache))

    def _engram(
        self, layer: int, block: Block, stream: Tensor, hashes: Tensor | None, batch: Batch
    ) -> Tensor:
        stream = batch.trace(f"layer{layer}.in", stream)
        if block.engram is None or hashes is None:
            return stream
        row = self.config.engram_layer_ids.index(layer)
        stream = block.engram(stream, hashes[row], batch)
        return batch.trace(f"layer{layer}.engram_out", stream)

    @staticmethod
    def _trace_out(batch: Batch, layer: int, stream: Tensor, pre: Tensor) -> None:
        batch.trace(f"layer{layer}.out", stream)
        batch.trace(f"layer{layer}.pre_mix", pre)
