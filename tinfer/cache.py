"""The state that sequences carry between forward passes.

Every cache is paged: a row's slot comes from a block table, so the model does not know whether
pages are handed out densely, as here, or on demand. Rejected draft tokens need no undo: each
state is addressed by absolute position and is written again before it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tinfer import ops
from tinfer.config import ModelConfig
from tinfer.kv_layout import KVLayout

if TYPE_CHECKING:
    from tinfer.model.batch import Batch


@dataclass(frozen=True)
class CacheSize:
    """Capacities: sequences at once, tokens of each, rows of one sequence in one forward pass."""

    sequences: int
    length: int
    chunk: int
    page_size: int = 64


class Cache:
    """Window rings, compressed KV, index keys, half-filled groups and engram history.

    Dense: sequence `s` owns pages `s*n .. s*n+n-1` of every cache.
    """

    def __init__(self, config: ModelConfig, size: CacheSize, device: torch.device | str) -> None:
        self.size, self.page_size, self.device = size, size.page_size, torch.device(device)
        draft = config.dspark_block_size
        page = size.page_size
        self.window = config.window_size
        self.window_layout = KVLayout.window_fp8(config.head_dim, page)
        self.compressed_layout = KVLayout.compressed_fp4(config.head_dim, page)
        self.index_layout = KVLayout.index_fp4(config.index_head_dim, page)
        # A pass writes up to `chunk` rows (or a draft block) before the oldest one is read.
        span = self.window + max(size.chunk, 1 + draft)
        self.ring = self.window_layout.pages(min(span, size.length + draft)) * page
        layers = config.n_layers + config.n_mtp_layers
        self.window_table = self._dense_table(self.ring // page)
        self.windows = [self._pages(self.window_layout, self.ring // page) for _ in range(layers)]
        self.compressed: dict[int, Tensor] = {}
        self.index_keys: dict[int, Tensor] = {}
        self.pool_state: dict[int, Tensor] = {}
        self.compressed_table: dict[int, Tensor] = {}
        for layer in config.kv_source_layers:
            self._add_source(layer, config.compress_ratios[layer], config.head_dim, draft)
        history = config.engram_max_ngram_size + draft + 1
        shape = (size.sequences, history)
        self.engram_history = torch.zeros(shape, dtype=torch.int32, device=self.device)

    def _add_source(self, layer: int, ratio: int, dim: int, draft: int) -> None:
        groups = -(-self.size.length // ratio)
        blocks = self.compressed_layout.pages(groups)
        self.compressed[layer] = self._pages(self.compressed_layout, blocks)
        self.index_keys[layer] = self._pages(self.index_layout, blocks)
        self.compressed_table.setdefault(ratio, self._dense_table(blocks))
        if ratio > 1:
            shape = (self.size.sequences, ratio + draft + 1, 2, dim)
            self.pool_state[layer] = torch.zeros(shape, dtype=torch.float32, device=self.device)

    def _pages(self, layout: KVLayout, per_sequence: int) -> Tensor:
        return layout.allocate(self.size.sequences * per_sequence, self.device)

    def _dense_table(self, per_sequence: int) -> Tensor:
        pages = torch.arange(self.size.sequences * per_sequence, dtype=torch.int32)
        return pages.view(self.size.sequences, per_sequence).to(self.device)

    def _window_range(self, first: Tensor, last: Tensor, seq: Tensor, width: int) -> Tensor:
        return ops.range_slots(
            first, last, seq, self.window_table, self.page_size, self.ring, width
        )

    def window_read_slots(self, batch: Batch) -> Tensor:
        """int32 `[T, W]`: the window of each row, oldest first."""
        first = (batch.positions - self.window + 1).clamp(min=0)
        return self._window_range(first, batch.positions, batch.seq, self.window)

    def window_store_slots(self, positions: Tensor, seq: Tensor) -> Tensor:
        """int64 `[T]`: where the window KV of each position goes."""
        return self._window_range(positions, positions, seq, 1)[:, 0].long()

    def draft_read_slots(self, main: Tensor, seq: Tensor, block: int) -> Tensor:
        """int32 `[B, W + block]`: the window up to `main` and the whole draft block behind it."""
        first = (main - self.window + 1).clamp(min=0)
        seen = self._window_range(first, main, seq, self.window)
        drafts = self._window_range(main + 1, main + block, seq, block)
        return torch.cat([seen, drafts], dim=1)

    def group_slots(self, batch: Batch, ratio: int) -> Tensor:
        """int64 `[T]`: the slot of the group that each row completes, -1 for none."""
        group = batch.positions // ratio
        table = self.compressed_table[ratio]
        slots = ops.ids_to_slots(group.int()[:, None], batch.seq, table, self.page_size)[:, 0]
        return torch.where((batch.positions + 1) % ratio == 0, slots.long(), -1)
