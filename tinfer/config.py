"""The model's configuration: read once at the edge, checked, frozen, passed down explicitly.

Two spellings of the same facts are read: the release's nested `config.json` (text_config,
vision_config, quantization_config) and the flat file of its inference code. Field names here are
the flat ones; `Key.hf` gives the nested one. A missing key is an error, never a default, except
for the few that one of the two files does not carry (`Key.default`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from tinfer.config_checks import ConfigError, check_relations
from tinfer.config_keys import (
    ANY,
    EVEN,
    LAYERS,
    NATURAL,
    NATURALS,
    REQUIRED,
    Key,
    Rule,
    flatten,
    one_of,
    read_json,
    typed,
)

__all__ = ["ConfigError", "ModelConfig"]

MODEL_TYPE = "deepseek_v41"
ARCHITECTURE = "DeepseekV41ForCausalLM"

# The nested file's other keys: those with one legal value, and those that say nothing we use.
_FIXED: dict[str, Any] = {
    "text_config.model_type": "deepseek_v41_text",
    "text_config.num_key_value_heads": 1,
    "text_config.hidden_act": "silu",
    "text_config.attention_bias": False,
    "text_config.tie_word_embeddings": False,
    "text_config.topk_method": "noaux_tc",
    "text_config.rope_scaling.rope_type": "yarn",
    "vision_config.model_type": "deepseek_v41_vision",
    "quantization_config.quant_method": "fp8",
    "quantization_config.activation_scheme": "dynamic",
    "quantization_config.weight_block_size": [32, 32],
    "quantization_config.scale_fmt": "ue8m0",
}
_IGNORED_HF = {
    "architectures",
    "model_type",
    "dtype",
    "transformers_version",
    "text_config.attention_dropout",
    "text_config.initializer_range",
    "text_config.use_cache",
}
_IGNORED_FLAT = {"max_batch_size", "temperature"}


@dataclass(frozen=True)
class ModelConfig:
    """DeepSeek-V4.1 as one flat, checked record. Layer lists are tuples."""

    vocab_size: Annotated[int, Key("text_config.vocab_size")]
    dim: Annotated[int, Key("text_config.hidden_size")]
    moe_inter_dim: Annotated[int, Key("text_config.moe_intermediate_size")]
    n_layers: Annotated[int, Key("text_config.num_hidden_layers")]
    n_mtp_layers: Annotated[int, Key("text_config.num_nextn_predict_layers", NATURAL)]
    n_heads: Annotated[int, Key("text_config.num_attention_heads")]
    n_routed_experts: Annotated[int, Key("text_config.n_routed_experts")]
    n_shared_experts: Annotated[
        int, Key("text_config.n_shared_experts", Rule("1", lambda v: v == 1))
    ]
    n_activated_experts: Annotated[int, Key("text_config.num_experts_per_tok")]
    score_func: Annotated[
        str, Key("text_config.scoring_func", one_of("sqrtsoftplus", "softmax", "sigmoid"))
    ]
    gate_temp: Annotated[float, Key(None, default=1.0)]
    norm_topk_prob: Annotated[bool, Key("text_config.norm_topk_prob", ANY, default=True)]
    route_scale: Annotated[float, Key("text_config.routed_scaling_factor")]
    swiglu_limit: Annotated[float, Key("text_config.swiglu_limit", NATURAL)]
    q_lora_rank: Annotated[int, Key("text_config.q_lora_rank")]
    head_dim: Annotated[int, Key("text_config.head_dim")]
    rope_head_dim: Annotated[int, Key("text_config.qk_rope_head_dim", EVEN)]
    norm_eps: Annotated[float, Key("text_config.rms_norm_eps")]
    o_groups: Annotated[int, Key("text_config.o_groups")]
    o_lora_rank: Annotated[int, Key("text_config.o_lora_rank")]
    window_size: Annotated[int, Key("text_config.sliding_window")]
    compress_ratios: Annotated[tuple[int, ...], Key("text_config.compress_ratios", NATURALS)]
    kv_source_layers: Annotated[tuple[int, ...], Key("text_config.kv_source_layer_ids", LAYERS)]
    index_source_layers: Annotated[
        tuple[int, ...], Key("text_config.index_source_layer_ids", LAYERS)
    ]
    compress_rope_theta: Annotated[float, Key("text_config.compress_rope_theta")]
    original_seq_len: Annotated[
        int, Key("text_config.rope_scaling.original_max_position_embeddings")
    ]
    rope_theta: Annotated[float, Key("text_config.rope_theta")]
    rope_factor: Annotated[float, Key("text_config.rope_scaling.factor")]
    beta_fast: Annotated[float, Key("text_config.rope_scaling.beta_fast")]
    beta_slow: Annotated[float, Key("text_config.rope_scaling.beta_slow")]
    index_n_heads: Annotated[int, Key("text_config.index_n_heads")]
    index_head_dim: Annotated[int, Key("text_config.index_head_dim")]
    index_topk: Annotated[int, Key("text_config.index_topk")]
    candidate_source_layer: Annotated[
        int, Key("text_config.candidate_source_layer_id", Rule("-1 or a layer", lambda v: v >= -1))
    ]
    candidate_topk_blocks: Annotated[int, Key("text_config.candidate_topk_blocks", NATURAL)]
    candidate_block_size: Annotated[int, Key("text_config.candidate_block_size", NATURAL)]
    hc_mult: Annotated[int, Key("text_config.hc_mult")]
    hc_sinkhorn_iters: Annotated[int, Key("text_config.hc_sinkhorn_iters")]
    hc_eps: Annotated[float, Key("text_config.hc_eps")]
    engram_layer_ids: Annotated[tuple[int, ...], Key("text_config.engram_layer_ids", LAYERS)]
    engram_num_embeddings: Annotated[
        tuple[int, ...], Key("text_config.engram_num_embeddings", NATURALS)
    ]
    engram_max_ngram_size: Annotated[int, Key("text_config.engram_max_ngram_size")]
    engram_vocab_size: Annotated[int, Key("text_config.engram_vocab_size", NATURAL)]
    engram_n_heads: Annotated[int, Key("text_config.engram_n_heads", NATURAL)]
    engram_head_dim: Annotated[int, Key("text_config.engram_head_dim", NATURAL)]
    engram_pad_id: Annotated[int, Key("text_config.engram_pad_token_id", NATURAL)]
    engram_compressed_vocab_size: Annotated[
        int, Key("text_config.engram_compressed_vocab_size", NATURAL)
    ]
    vision_n_layers: Annotated[int, Key("vision_config.num_hidden_layers", NATURAL)]
    vision_dim: Annotated[int, Key("vision_config.hidden_size")]
    vision_n_heads: Annotated[int, Key("vision_config.num_attention_heads")]
    vision_inter_dim: Annotated[int, Key("vision_config.intermediate_size")]
    vision_patch_size: Annotated[int, Key("vision_config.patch_size")]
    vision_rope_theta: Annotated[float, Key("vision_config.rope_theta")]
    vision_downsample_ratio: Annotated[int, Key("vision_config.downsample_ratio")]
    vision_max_n_token: Annotated[int, Key("vision_config.max_image_tokens")]
    vision_min_pixels: Annotated[int, Key("vision_config.min_pixels")]
    vision_max_wh_ratio: Annotated[float | None, Key("vision_config.max_wh_ratio")]
    image_token_id: Annotated[int, Key("image_token_id", NATURAL)]
    dspark_block_size: Annotated[int, Key("text_config.dspark_block_size", NATURAL)]
    dspark_noise_token_id: Annotated[int, Key("text_config.dspark_noise_token_id", NATURAL)]
    dspark_target_layer_ids: Annotated[
        tuple[int, ...], Key("text_config.dspark_target_layer_ids", LAYERS)
    ]
    dspark_markov_rank: Annotated[int, Key("text_config.dspark_markov_rank", NATURAL)]
    dspark_n_routed_experts: Annotated[int, Key("text_config.dspark_n_routed_experts", NATURAL)]
    dspark_n_activated_experts: Annotated[
        int, Key("text_config.dspark_num_experts_per_tok", NATURAL)
    ]
    dtype: Annotated[str, Key("quantization_config.quant_method", one_of("fp8"))]
    expert_dtype: Annotated[str, Key("quantization_config.expert_dtype", one_of("fp4", "fp8"))]
    # 0 stands for "not given" until `_resolve` runs: the flat file may leave it out.
    max_seq_len: Annotated[int, Key("text_config.max_position_embeddings", NATURAL, default=0)]
    bos_token_id: Annotated[int, Key("bos_token_id", NATURAL, default=0)]
    eos_token_id: Annotated[int, Key("eos_token_id", NATURAL, default=1)]
    pad_token_id: Annotated[int, Key("pad_token_id", NATURAL, default=2)]

    # ------------------------------------------------------------ reading
    @classmethod
    def load(cls, path: str | Path) -> ModelConfig:
        """Read a checkpoint directory's `config.json` (or the file itself), nested or flat."""
        return cls.from_dict(read_json(Path(path)))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Build and check a config from either spelling; unknown keys are warned about by name."""
        nested = "text_config" in raw or "model_type" in raw or "architectures" in raw
        if nested:
            _check_model(raw)
            flat = flatten(raw)
            _check_fixed(flat)
        else:
            flat = dict(raw)
            _check_flat_model(flat)
        keys = _keys()
        names = {f: (k.hf if nested and k.hf else f) for f, k in keys.items()}
        text_only = nested and "vision_config" not in raw
        missing = [
            name
            for f, name in names.items()
            if name not in flat
            and keys[f].default is REQUIRED
            and not (text_only and f.startswith("vision_"))
        ]
        if missing:
            raise ConfigError(f"config: missing {', '.join(missing)}; the file must give every key")
        if text_only:
            flat |= {names[f]: v for f, v in _NO_VISION.items()}
        ignored = _IGNORED_HF | set(_FIXED) if nested else _IGNORED_FLAT
        _warn_unknown(sorted(set(flat) - set(names.values()) - ignored))
        hints = get_type_hints(cls)
        values = {
            f: typed(names[f], flat.get(names[f], keys[f].default), hints[f], keys[f].rule)
            for f in keys
        }
        config = cls(**_resolve(values))
        check_relations(config)
        return config

    # ------------------------------------------------------------ layer roles
    @property
    def engram_columns(self) -> int:
        """Table rows fetched per token and engram layer: n-gram orders times heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed KV `layer` reads, or None for a window-only layer."""
        return _last_at_or_before(self.kv_source_layers, layer, self.compress_ratios)

    def index_source(self, layer: int) -> int | None:
        """The layer whose selection `layer` uses, or None for a window-only layer."""
        return _last_at_or_before(self.index_source_layers, layer, self.compress_ratios)


# What a text-only checkpoint (no vision_config) means; sizes are unused then.
_NO_VISION: dict[str, Any] = {
    "vision_n_layers": 0,
    "vision_dim": 1,
    "vision_n_heads": 1,
    "vision_inter_dim": 1,
    "vision_patch_size": 1,
    "vision_rope_theta": 10000.0,
    "vision_downsample_ratio": 1,
    "vision_max_n_token": 1,
    "vision_min_pixels": 1,
    "vision_max_wh_ratio": None,
}


def _keys() -> dict[str, Key]:
    hints = get_type_hints(ModelConfig, include_extras=True)
    return {f.name: get_args(hints[f.name])[1] for f in fields(ModelConfig)}


def _last_at_or_before(sources: tuple[int, ...], layer: int, ratios: tuple[int, ...]) -> int | None:
    if ratios[layer] == 0:
        return None
    return max((s for s in sources if s <= layer), default=None)


def _check_model(raw: Mapping[str, Any]) -> None:
    """Accept exactly V4.1: a prefix match would run V4 weights as V4.1."""
    kind, architectures = raw.get("model_type"), raw.get("architectures", [ARCHITECTURE])
    if kind != MODEL_TYPE or architectures != [ARCHITECTURE]:
        raise ConfigError(
            f"config: this is a {kind or 'nameless'} model ({architectures}); tinfer runs "
            f"DeepSeek-V4.1 only (model_type must be {MODEL_TYPE!r}, "
            f"architectures [{ARCHITECTURE!r}])"
        )


def _check_flat_model(flat: Mapping[str, Any]) -> None:
    """The flat file names no model: keys that only V4.1 has (or no longer has) tell."""
    if "n_hash_layers" in flat or not {"kv_source_layers", "engram_layer_ids"} & set(flat):
        raise ConfigError(
            "config: this is not a DeepSeek-V4.1 configuration (no kv_source_layers, no "
            "engram_layer_ids, or hash-routed layers of V4); tinfer runs DeepSeek-V4.1 only"
        )


def _check_fixed(flat: Mapping[str, Any]) -> None:
    for name, value in _FIXED.items():
        if name in flat and flat[name] != value:
            raise ConfigError(f"config: {name} must be {value!r}, got {flat[name]!r}")


def _warn_unknown(unknown: list[str]) -> None:
    if unknown:
        warnings.warn(f"config: unknown keys ignored: {', '.join(unknown)}", stacklevel=4)


def _resolve(values: dict[str, Any]) -> dict[str, Any]:
    """Fill what is derived: the context length, and draft experts given as 0 (the backbone's)."""
    context = round(values["rope_factor"] * values["original_seq_len"])
    values["max_seq_len"] = values["max_seq_len"] or context
    for name in ("n_routed_experts", "n_activated_experts"):
        values[f"dspark_{name}"] = values[f"dspark_{name}"] or values[name]
    return values
