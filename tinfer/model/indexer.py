"""The indexer: which compressed positions a query attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tinfer import ops
from tinfer.cache import Cache
from tinfer.chunks import row_chunks
from tinfer.formats import Fp8Block32
from tinfer.model.batch import Batch
from tinfer.model.linear import Cast, linear

if TYPE_CHECKING:
    from tinfer.model.attention import Shared


@dataclass(frozen=True)
class Candidates:
    """Candidate blocks: the source publishes them, index layers after it choose among them."""

    blocks: int
    block_size: int
    is_source: bool


@dataclass(frozen=True)
class Indexer:
    """Scores index keys per head with relu, sums them by learned weights, keeps the best."""

    layer: int
    ratio: int
    kv_source: int
    wq_b: Fp8Block32
    weights_proj: Tensor  # bf16 [Hi, D]
    heads: int
    head_dim: int
    topk: int
    rope: Tensor
    candidates: Candidates | None = None

    def query(self, x: Tensor, qr: Cast, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """fp4 queries `[T, Hi, Di/2]`, their scales, and fp32 head weights `[T, Hi]`."""
        q = linear(qr, self.wq_b).view(x.shape[0], self.heads, self.head_dim)
        ops.apply_rotary_(q, self.rope, batch.positions)
        packed, scales = ops.per_token_cast(q, "e2m1", 32, "ue8m0")
        weights = ops.linear_bf16(x, self.weights_proj).float()
        return packed, scales, weights * (self.head_dim**-0.5 * self.heads**-0.5)

    def __call__(self, x: Tensor, qr: Cast, batch: Batch, cache: Cache, shared: Shared) -> Tensor:
        """int32 `[T, k]` slots of the chosen positions, ascending, -1 at the end."""
        bound = (batch.max_position + 1) // self.ratio
        k = max(1, min(self.topk, bound))
        if bound == 0:
            return torch.full((x.shape[0], k), -1, dtype=torch.int32, device=x.device)
        visible = ((batch.positions + 1) // self.ratio).int()
        ids = self._choose(self.query(x, qr, batch), visible, bound, k, batch, cache, shared)
        ids = batch.trace(f"layer{self.layer}.index_ids", ids)
        table = cache.compressed_table[self.ratio]
        return ops.ids_to_slots(ids, batch.seq, table, cache.page_size)

    def _choose(
        self,
        query: tuple[Tensor, Tensor, Tensor],
        visible: Tensor,
        bound: int,
        k: int,
        batch: Batch,
        cache: Cache,
        shared: Shared,
    ) -> Tensor:
        """Scores, candidates and choice in chunks of rows, so that scores stay within a budget."""
        own = self.candidates
        restricted = own is not None and not own.is_source and bound > own.blocks * own.block_size
        columns = own.blocks * own.block_size if own is not None and restricted else bound
        given, chosen, published = shared.candidates, [], []
        for rows in row_chunks(visible.shape[0], columns):
            part = (*(q[rows] for q in query),)
            seq, seen = batch.seq[rows], visible[rows]
            if own is not None and restricted:
                assert given is not None
                ids = self._among(part, given[rows], seq, seen, k, own, cache)
            else:
                scores = self._scores(part, seq, seen, bound, cache)
                scores = batch.trace(f"layer{self.layer}.index_scores", scores)
                if own is not None and own.is_source:
                    published.append(ops.candidate_blocks(scores, seen, own.block_size, own.blocks))
                ids = ops.topk_indices(scores, seen, k)
            chosen.append(ids)
        if published:
            shared.candidates = published[0] if len(published) == 1 else torch.cat(published)
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen)

    def _scores(
        self, query: tuple[Tensor, ...], seq: Tensor, visible: Tensor, bound: int, cache: Cache
    ) -> Tensor:
        q, q_s, weights = query
        keys, table = cache.index_keys[self.kv_source], cache.compressed_table[self.ratio]
        return ops.index_logits(
            q, q_s, weights, keys, cache.index_layout, table, seq, visible, bound
        )

    def _among(
        self,
        query: tuple[Tensor, ...],
        blocks: Tensor,
        seq: Tensor,
        visible: Tensor,
        k: int,
        own: Candidates,
        cache: Cache,
    ) -> Tensor:
        """The choice among candidate blocks only."""
        q, q_s, weights = query
        keys, table = cache.index_keys[self.kv_source], cache.compressed_table[self.ratio]
        layout, size = cache.index_layout, own.block_size
        scores = ops.index_logits_blocks(
            q, q_s, weights, keys, layout, table, seq, blocks, size, visible
        )
        lengths = ops.candidate_lengths(visible, size, own.blocks)
        return ops.restore_candidates(ops.topk_indices(scores, lengths, k), blocks, size)
