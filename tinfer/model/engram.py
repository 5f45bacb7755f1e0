"""Engram: n-gram memory rows added to the residual stream through a learned gate."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tinfer import ops
from tinfer.cache import Cache
from tinfer.formats import Fp8Block32
from tinfer.model.batch import Batch
from tinfer.model.engram_table import EngramTable
from tinfer.model.linear import cast, linear

GATE_CLAMP = 1e-6  # floor of |g| under the square root


@dataclass(frozen=True)
class EngramHash:
    """Row ids of every engram layer, hashed from the compressed ids of the last tokens."""

    token_map: Tensor  # int32 [V]
    pad_id: int  # compressed id that blocked look-backs take
    multipliers: Tensor  # int64 [L, n]
    primes: Tensor  # int64 [L, n-1, heads]
    offsets: Tensor  # int64 [L, (n-1)*heads]

    def __call__(self, batch: Batch, cache: Cache) -> Tensor:
        """int64 `[L, T, (n-1)*heads]`; also moves the look-back history on."""
        lookback = ops.engram_lookback(
            batch.ids,
            batch.positions,
            batch.seq,
            batch.image,
            self.token_map,
            self.pad_id,
            cache.engram_history,
            self.multipliers.shape[1],
        )
        return ops.ngram_hash(lookback, self.multipliers, self.primes, self.offsets)


@dataclass(frozen=True)
class Engram:
    """One layer's memory: table, projection to C keys and one value, gate."""

    table: EngramTable
    wkv: Fp8Block32  # [(C+1)*D, columns*dim]: C keys, then the value
    weight: Tensor  # fp32 [C, D]: q_weight * k_weight
    norm_eps: float

    def __call__(self, stream: Tensor, hashes: Tensor, batch: Batch) -> Tensor:
        """bf16 `[T, C, D]` -> bf16 `[T, C, D]`; image rows pass through bit for bit."""
        tokens, copies, dim = stream.shape
        kv = linear(cast(self.table.gather(hashes)), self.wkv).view(tokens, copies + 1, dim)
        return ops.engram_gate(stream, kv, self.weight, batch.image, self.norm_eps, GATE_CLAMP)
