"""The flat batch every forward pass takes: tokens of several sequences as one list of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

# A tap on a named intermediate: it may record the tensor, and returns it or a replacement.
Trace = Callable[[str, Tensor], Tensor]


def no_trace(name: str, value: Tensor) -> Tensor:
    """The tap that looks at nothing."""
    return value


@dataclass(frozen=True)
class ImageRows:
    """Embeddings that take the place of token embeddings at the image positions of a batch."""

    rows: Tensor  # bf16 [N, D]
    where: Tensor  # int64 [N]: row of the batch each embedding goes to


@dataclass(frozen=True)
class Batch:
    """Rows of one forward pass.

    The rows of one sequence are contiguous and in ascending position, so prefill, a chunk of
    it at any split, decode of one token and verification of several are the same call.
    `max_position` is a host-side bound of `positions`: it sizes buffers without a device sync.
    """

    ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    seq: Tensor  # int64 [T]: the cache slot of the row's sequence
    max_position: int
    image: Tensor | None = None  # bool [T]: rows inside an image span (prefill only)
    image_rows: ImageRows | None = None
    trace: Trace = field(default=no_trace)

    @property
    def num_tokens(self) -> int:
        return self.ids.shape[0]

    @classmethod
    def of(
        cls,
        sequences: list[tuple[int, int, list[int]]],
        device: torch.device | str,
        trace: Trace = no_trace,
    ) -> Batch:
        """Build from `(cache slot, first position, token ids)` per sequence."""
        ids = [i for _, _, tokens in sequences for i in tokens]
        positions = [first + i for _, first, tokens in sequences for i in range(len(tokens))]
        seq = [slot for slot, _, tokens in sequences for _ in tokens]
        packed = torch.tensor([ids, positions, seq], dtype=torch.int64).to(device)
        return cls(packed[0], packed[1], packed[2], max(positions, default=0), trace=trace)
