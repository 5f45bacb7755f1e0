"""DSpark draft stages: propose a block of tokens from the backbone's hidden state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tinfer import ops
from tinfer.cache import Cache
from tinfer.config import ModelConfig
from tinfer.formats import Fp8Block32
from tinfer.model.attention import Shared
from tinfer.model.batch import Batch, Trace, no_trace
from tinfer.model.hyper_connection import first_pre, leave
from tinfer.model.linear import cast, linear
from tinfer.model.transformer import Block

Pick = Callable[[Tensor], Tensor]  # fp32 logits [B, V] -> int64 tokens [B]


@dataclass(frozen=True)
class Draft:
    """One proposed block per sequence."""

    tokens: Tensor  # int64 [B, n]
    logits: Tensor  # fp32 [B, n, V]: with the Markov bias
    confidence: Tensor  # fp32 [B, n]: a logit, no sigmoid


@dataclass(frozen=True)
class MarkovHead:
    """A rank-r bias of the logits by the token before, and the confidence of each position."""

    embed: Tensor  # [V, r]
    head: Tensor  # [V, r]
    confidence: Tensor  # [1, D + r]

    def __call__(self, hidden: Tensor, logits: Tensor, first: Tensor, pick: Pick) -> Draft:
        """`hidden` bf16 `[B, n, D]` before the norm, `logits` fp32 `[B, n, V]`, `first` `[B]`."""
        token, tokens, rows, scores = first, [], [], []
        for i in range(logits.shape[1]):
            embedding = self.embed[token]
            row = logits[:, i] + ops.linear_fp32(embedding, self.head)
            features = torch.cat([hidden[:, i].float(), embedding.float()], dim=-1)
            scores.append(ops.linear_fp32(features, self.confidence)[:, 0])
            token = pick(row)
            tokens.append(token)
            rows.append(row)
        return Draft(torch.stack(tokens, 1), torch.stack(rows, 1), torch.stack(scores, 1))


@dataclass(frozen=True)
class DSpark:
    config: ModelConfig
    stages: list[Block]
    main_proj: Fp8Block32
    main_norm: Tensor
    norm: Tensor
    markov: MarkovHead
    embed: Tensor  # the backbone's
    head: Tensor  # the backbone's

    def window(self, cache: Cache, stage: int) -> Tensor:
        """The window cache of one stage."""
        return cache.windows[self.config.n_layers + stage]

    def seed(self, taps: Tensor, positions: Tensor, seq: Tensor, cache: Cache) -> Tensor:
        """Fill the stages' windows from the backbone's taps `[T, targets*D]` -> main_x."""
        projected = linear(cast(taps), self.main_proj)
        main_x = cast(ops.rms_norm(projected, self.main_norm, self.config.norm_eps))
        slots = cache.window_store_slots(positions, seq)
        for i, stage in enumerate(self.stages):
            stage.attn.store_window(main_x, positions, slots, self.window(cache, i), cache)
        return main_x.x

    def propose(
        self,
        tokens: Tensor,
        main: Tensor,
        seq: Tensor,
        max_position: int,
        cache: Cache,
        pick: Pick,
        trace: Trace = no_trace,
    ) -> Draft:
        """Draft the block after `tokens` int64 `[B]`, the newest token of each sequence.

        `main` int64 `[B]` is the position before it: the last one the backbone has processed.
        The block stands at positions main+1 .. main+n and sees itself whole, both ways.
        """
        cfg, n, rows = self.config, self.config.dspark_block_size, tokens.shape[0]
        ids = torch.full((rows, n), cfg.dspark_noise_token_id, device=tokens.device)
        ids[:, 0] = tokens
        offsets = torch.arange(1, n + 1, device=tokens.device)
        batch = Batch(
            ids.flatten(),
            (main[:, None] + offsets).flatten(),
            seq.repeat_interleave(n),
            max_position + n,
            trace=trace,
        )
        read = cache.draft_read_slots(main, seq, n).repeat_interleave(n, dim=0)
        store = cache.window_store_slots(batch.positions, batch.seq)
        x, hidden = self._stages(batch, cache, Shared(read, store))
        logits = ops.linear_fp32(x, self.head).view(rows, n, -1)
        return self.markov(hidden.view(rows, n, -1), logits, tokens, pick)

    def _stages(self, batch: Batch, cache: Cache, shared: Shared) -> tuple[Tensor, Tensor]:
        """The normed and the un-normed collapsed hidden state, bf16 `[B*n, D]` each."""
        cfg, trace = self.config, batch.trace
        stream = ops.hc_expand(self.embed[batch.ids], cfg.hc_mult)
        pre = first_pre(batch.num_tokens, cfg.hc_mult, stream.device)
        for i, stage in enumerate(self.stages):
            name = f"dspark.stage{i}"
            x, mix = stage.attn_hc.enter(stream, pre)
            x = trace(f"{name}.attn_in", x)
            y = stage.attn(x, batch, cache, self.window(cache, i), shared)
            y = trace(f"{name}.attn_out", y)
            stream, x, mix = stage.ffn_hc.leave_and_enter(y, stream, mix)
            x = trace(f"{name}.ffn_in", x)
            y = trace(f"{name}.ffn_out", stage.ffn(x, batch))
            stream, pre = leave(y, stream, mix), mix.pre
            trace(f"{name}.out", stream)
            trace(f"{name}.pre_mix", pre)
        hidden = ops.hc_collapse(stream, pre)
        return ops.rms_norm(hidden, self.norm, cfg.norm_eps), hidden
