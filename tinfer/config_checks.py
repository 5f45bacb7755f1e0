"""Checks that span several configuration values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinfer.formats import GROUP

if TYPE_CHECKING:
    from tinfer.config import ModelConfig


class ConfigError(ValueError):
    """A configuration that is not a valid DeepSeek-V4.1 one."""


def _require(ok: bool, name: str, words: str, value: Any) -> None:
    if not ok:
        raise ConfigError(f"config: {name} must be {words}, got {value!r}")


def check_relations(c: ModelConfig) -> None:
    """Raise ConfigError unless the values fit together."""
    _check_sizes(c)
    _check_layers(c)
    _check_candidates(c)
    _check_engram(c)
    _check_draft(c)
    _check_vision(c)


def _check_sizes(c: ModelConfig) -> None:
    for name in ("dim", "moe_inter_dim", "q_lora_rank", "head_dim", "index_head_dim"):
        value = getattr(c, name)
        _require(value % GROUP == 0, name, f"a multiple of {GROUP} (one scale per {GROUP})", value)
    rank = c.o_groups * c.o_lora_rank
    _require(rank % GROUP == 0, "o_groups * o_lora_rank", f"a multiple of {GROUP}", rank)
    _require(c.n_heads % c.o_groups == 0, "n_heads", "a multiple of o_groups", c.n_heads)
    for name in ("head_dim", "index_head_dim"):
        _require(
            getattr(c, name) >= c.rope_head_dim, name, "at least rope_head_dim", getattr(c, name)
        )
    for name in ("n_activated_experts", "dspark_n_activated_experts"):
        pool = name.replace("activated", "routed")
        _require(getattr(c, name) <= getattr(c, pool), name, f"at most {pool}", getattr(c, name))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        _require(getattr(c, name) < c.vocab_size, name, "below vocab_size", getattr(c, name))


def _check_layers(c: ModelConfig) -> None:
    """One ratio per layer and draft stage; every compressed layer has a source it can read."""
    ratios, stages = c.compress_ratios, c.n_layers + c.n_mtp_layers
    _require(len(ratios) == stages, "compress_ratios", f"{stages} numbers long", len(ratios))
    _require(not any(ratios[c.n_layers :]), "compress_ratios", "0 on draft stages", list(ratios))
    for name in ("kv_source_layers", "index_source_layers"):
        layers = getattr(c, name)
        ok = all(x < c.n_layers and ratios[x] > 0 for x in layers)
        _require(ok, name, "layers with a compress_ratio above 0", list(layers))
    owners = set(c.kv_source_layers)
    ok = owners <= set(c.index_source_layers)
    _require(ok, "kv_source_layers", "a subset of index_source_layers", list(c.kv_source_layers))
    for layer in range(c.n_layers):
        source = c.kv_source(layer)
        ok = ratios[layer] == 0 or (source is not None and ratios[source] == ratios[layer])
        _require(
            ok, "kv_source_layers", f"one of layer {layer}'s ratio at or before it", sorted(owners)
        )


def _check_candidates(c: ModelConfig) -> None:
    source, blocks, size = c.candidate_source_layer, c.candidate_topk_blocks, c.candidate_block_size
    if source < 0:
        return
    _require(source in c.index_source_layers, "candidate_source_layer", "an index source", source)
    _require(blocks > 0, "candidate_topk_blocks", "positive", blocks)
    _require(size > 0, "candidate_block_size", "positive", size)
    users = [x for x in c.index_source_layers if x > source]
    same = all(c.kv_source(x) == c.kv_source(source) for x in users)
    _require(same, "index_source_layers", "readers of the candidate source's keys after it", users)
    # The newest block is always kept and may hold a single visible position.
    _require(
        (blocks - 1) * size + 1 >= c.index_topk,
        "(candidate_topk_blocks - 1) * candidate_block_size + 1",
        f"at least index_topk ({c.index_topk})",
        (blocks - 1) * size + 1,
    )


def _check_engram(c: ModelConfig) -> None:
    layers, rows = c.engram_layer_ids, c.engram_num_embeddings
    _require(len(rows) == len(layers), "engram_num_embeddings", "one per engram layer", len(rows))
    if not layers:
        return
    _require(layers[-1] < c.n_layers, "engram_layer_ids", "below n_layers", list(layers))
    _require(min(rows) > 0, "engram_num_embeddings", "positive", list(rows))
    for name, least in (
        ("engram_max_ngram_size", 2),
        ("engram_vocab_size", 1),
        ("engram_n_heads", 1),
        ("engram_head_dim", 1),
        ("engram_compressed_vocab_size", 1),
    ):
        _require(getattr(c, name) >= least, name, f"at least {least}", getattr(c, name))
    width = c.engram_head_dim
    _require(width % GROUP == 0, "engram_head_dim", f"a multiple of {GROUP}", width)
    classes = c.engram_compressed_vocab_size
    ok = classes <= c.vocab_size
    _require(ok, "engram_compressed_vocab_size", "at most vocab_size", classes)
    _require(c.engram_pad_id < c.vocab_size, "engram_pad_id", "below vocab_size", c.engram_pad_id)


def _check_draft(c: ModelConfig) -> None:
    ok = (c.n_mtp_layers > 0) == (c.dspark_block_size > 0)
    _require(ok, "dspark_block_size", "0 exactly when n_mtp_layers is 0", c.dspark_block_size)
    if c.n_mtp_layers == 0:
        return
    targets, noise = c.dspark_target_layer_ids, c.dspark_noise_token_id
    ok = bool(targets) and targets[-1] < c.n_layers
    _require(ok, "dspark_target_layer_ids", "layers below n_layers", list(targets))
    _require(noise < c.vocab_size, "dspark_noise_token_id", "below vocab_size", noise)
    _require(c.dspark_markov_rank > 0, "dspark_markov_rank", "positive", c.dspark_markov_rank)


def _check_vision(c: ModelConfig) -> None:
    if c.vision_n_layers == 0:
        return
    heads, width = c.vision_n_heads, c.vision_dim
    # Two axes of rotate-half pairs share each head.
    ok = width % heads == 0 and (width // heads) % 4 == 0
    _require(ok, "vision_dim / vision_n_heads", "a multiple of 4", width / heads)
    ok = c.image_token_id < c.vocab_size
    _require(ok, "image_token_id", "below vocab_size", c.image_token_id)
