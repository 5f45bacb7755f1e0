"""What a model will need, before anything is loaded: weights by component, caches, and the fit.

Everything follows from the config and the stored dtypes; nothing is allocated. Ranks share the
weights by the split rules of `layout`; caches are replicated, because every attention head reads
the same latent.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from tinfer.checkpoint.expected import Table
from tinfer.checkpoint.layout import split_dim
from tinfer.checkpoint.shard import CheckpointError
from tinfer.config import ConfigError, ModelConfig
from tinfer.kv_layout import KVLayout

GIB = 1 << 30
TABLES = "engram tables"
PLACEMENTS = ("device", "host", "disk")

_COMPONENTS: tuple[tuple[str, str], ...] = (
    (r"layers\.\d+\.ffn\.experts\.", "routed experts"),
    (r"layers\.\d+\.engram\.embed\.", TABLES),
    (r"layers\.\d+\.engram\.", "engram projections"),
    (r"layers\.\d+\.attn\.indexer\.", "indexer"),
    (r"layers\.\d+\.attn\.compressor\.", "compressor"),
    (r"layers\.\d+\.attn\.", "attention"),
    (r"layers\.\d+\.ffn\.shared_experts\.", "shared experts"),
    (r"layers\.\d+\.ffn\.gate\.", "gates"),
    (r"layers\.\d+\.hc_", "hyper-connections"),
    (r"(?:layers\.\d+\.(?:attn|ffn)_)?norm\.", "norms"),
    (r"embed\.", "embedding"),
    (r"head\.", "head"),
    (r"mtp\.\d+\.ffn\.experts\.", "draft experts"),
    (r"mtp\.", "draft stages, rest"),
    (r"image_", "image tokens"),
    (r"vision\.|aligner\.", "vision tower"),
)
_PATTERN = re.compile("|".join(f"({p})" for p, _ in _COMPONENTS))


@dataclass(frozen=True)
class Component:
    """One part of the weights: bytes in the checkpoint, and on the rank that holds most."""

    name: str
    total: int
    rank: int


@dataclass(frozen=True)
class Plan:
    """Bytes, all of them. Cache bytes are those of one rank; every rank holds the same."""

    ranks: int
    components: tuple[Component, ...]
    cache_per_token: int  # compressed KV and index keys, per token of context
    cache_per_sequence: int  # window rings and the other state that does not grow

    @property
    def total(self) -> int:
        return sum(c.total for c in self.components)

    @property
    def rank_tables(self) -> int:
        """Engram tables on one rank."""
        return sum(c.rank for c in self.components if c.name == TABLES)

    @property
    def total_tables(self) -> int:
        return sum(c.total for c in self.components if c.name == TABLES)

    @property
    def rank_weights(self) -> int:
        """Everything but the engram tables, on one rank."""
        return sum(c.rank for c in self.components) - self.rank_tables

    def caches(self, context: int, sequences: int) -> int:
        """Caches of `sequences` sequences of `context` tokens each, on one rank."""
        return sequences * (self.cache_per_sequence + context * self.cache_per_token)


def component(name: str) -> str:
    """The component that a tensor is counted under."""
    found = _PATTERN.match(name)
    if found is None or found.lastindex is None:
        raise ValueError(f"plan: no component for tensor {name}")
    return _COMPONENTS[found.lastindex - 1][1]


def make_plan(config: ModelConfig, table: Table, ranks: int = 1) -> Plan:
    """The plan for tensor and expert parallelism over `ranks`.

    `table` holds the stored specifications (`expected_tensors`, or a checkpoint's own).
    """
    check_ranks(config, ranks)
    totals: dict[str, list[int]] = {name: [0, 0] for _, name in _COMPONENTS}
    for name, spec in table.items():
        entry = totals[component(name)]
        entry[0] += spec.nbytes
        entry[1] += _rank_bytes(name, spec.shape, spec.nbytes, ranks)
    parts = tuple(Component(n, t, r) for n, (t, r) in totals.items() if t)
    return Plan(ranks, parts, *_cache_bytes(config))


def check_ranks(config: ModelConfig, ranks: int) -> None:
    """Everything that is split must divide by the number of ranks."""
    if ranks < 1:
        raise ConfigError(f"plan: ranks must be positive, got {ranks}")
    for name in (
        "o_groups",
        "n_heads",
        "index_n_heads",
        "n_routed_experts",
        "dspark_n_routed_experts",
        "vocab_size",
    ):
        if getattr(config, name) % ranks:
            raise ConfigError(
                f"plan: ranks must divide {name} ({getattr(config, name)}), got {ranks}"
            )


def _rank_bytes(name: str, shape: tuple[int, ...], nbytes: int, ranks: int) -> int:
    if ".ffn.experts." in name:
        # Whole experts go to ranks: on average, which is exact because the count divides.
        return nbytes // ranks
    dim = split_dim(name)
    if dim is None:
        return nbytes
    return nbytes // shape[dim] * -(-shape[dim] // ranks)


def _cache_bytes(config: ModelConfig) -> tuple[int, int]:
    """(per token of context, per sequence)."""
    compressed = KVLayout.compressed_fp4(config.head_dim, 1).row_bytes
    index = KVLayout.index_fp4(config.index_head_dim, 1).row_bytes
    ratios = [config.compress_ratios[layer] for layer in config.kv_source_layers]
    per_token = math.ceil(sum((compressed + index) / ratio for ratio in ratios))
    rings = config.n_layers + config.n_mtp_layers
    window = KVLayout.window_fp8(config.head_dim, 1).row_bytes * config.window_size * rings
    # Half-filled groups: kv and score of a group's tokens in fp32.
    partial = sum(2 * ratio * config.head_dim * 4 for ratio in ratios if ratio > 1)
    history = 4 * (config.engram_max_ngram_size - 1) if config.engram_layer_ids else 0
    return per_token, window + partial + history


# ---------------------------------------------------------------- does it fit
@dataclass(frozen=True)
class Memory:
    """What there is, in bytes. `device` None: the model runs on the host."""

    device: int | None
    host: int | None  # None: unknown


@dataclass(frozen=True)
class Demand:
    """What a run asks for: context and sequences, and where the engram tables live."""

    context: int
    sequences: int
    tables: str  # one of PLACEMENTS; "disk" maps the file and needs page cache only


def needs(plan: Plan, demand: Demand, on_host: bool) -> dict[str, int]:
    """Bytes of "device" (one rank) and "host" (all ranks of this machine)."""
    caches = plan.caches(demand.context, demand.sequences)
    device = plan.rank_weights + caches
    host = plan.total_tables if demand.tables == "host" else 0
    if demand.tables == "device":
        device += plan.rank_tables
    if on_host:
        return {"device": 0, "host": plan.ranks * device + host}
    return {"device": device, "host": host}


def shortfalls(plan: Plan, demand: Demand, memory: Memory) -> list[str]:
    """What does not fit, one line each; empty when everything does."""
    need = needs(plan, demand, on_host=memory.device is None)
    lines = []
    for place, limit in (("device", memory.device), ("host", memory.host)):
        if limit is not None and need[place] > limit:
            each = " a rank" if place == "device" and plan.ranks > 1 else ""
            lines.append(
                f"{place} memory: {need[place] / GIB:.2f} GiB needed{each}, "
                f"{limit / GIB:.2f} GiB available"
            )
    return lines


def require_fit(plan: Plan, demand: Demand, memory: Memory) -> None:
    """Raise CheckpointError, with the whole sum, unless the run fits. Call before loading."""
    lacking = shortfalls(plan, demand, memory)
    if not lacking:
        return
    rows = {
        "weights": plan.rank_weights,
        f"engram tables ({demand.tables})": plan.rank_tables,
        f"caches ({demand.sequences} x {demand.context:,} tokens)": plan.caches(
            demand.context, demand.sequences
        ),
    }
    table = [f"  {name:<40}{size / GIB:>12.3f} GiB" for name, size in rows.items() if size]
    limits = {"device limit": memory.device, "host limit": memory.host}
    table += [f"  {n:<40}{size / GIB:>12.3f} GiB" for n, size in limits.items() if size is not None]
    raise CheckpointError(
        "\n".join([f"checkpoint: does not fit: {'; '.join(lacking)}", "one rank needs:", *table])
    )
