"""Configuration: both spellings, every value checked, no silent defaults."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tinfer.config import ConfigError, ModelConfig

DATA = Path(__file__).parents[1] / "data"
RELEASE = DATA / "release" / "config.json"
GOLDEN = sorted(p.name for p in (DATA / "golden/models").iterdir())


def nested() -> dict[str, Any]:
    return json.loads(RELEASE.read_text())


def flat(name: str = "six_types") -> dict[str, Any]:
    return json.loads((DATA / "golden/models" / name / "config.json").read_text())


def test_the_release_config_is_the_published_file() -> None:
    digest = hashlib.sha256(RELEASE.read_bytes()).hexdigest()
    assert digest == "8be45ce0476004a3f529fd896115a4a2e800a129ad2d3ec05b16050f52e21879"


def test_release_values() -> None:
    c = ModelConfig.load(RELEASE)
    assert (c.dim, c.n_layers, c.n_mtp_layers, c.vocab_size) == (5120, 40, 3, 129280)
    assert c.compress_ratios == (0, 0, *[2] * 18, *[1] * 20, 0, 0, 0)
    assert c.norm_eps == 1e-20
    assert (c.rope_theta, c.compress_rope_theta, c.rope_factor) == (10000, 160000, 16)
    assert (c.max_seq_len, c.original_seq_len) == (1048576, 65536)
    assert (c.dspark_n_routed_experts, c.dspark_n_activated_experts) == (128, 3)
    assert (c.bos_token_id, c.eos_token_id, c.pad_token_id, c.image_token_id) == (0, 1, 2, 129264)
    assert (c.gate_temp, c.norm_topk_prob, c.expert_dtype) == (1.0, True, "fp4")
    assert c.vision_max_wh_ratio is None
    assert c.engram_columns == 24


def test_release_sources() -> None:
    c = ModelConfig.load(RELEASE)
    assert [c.kv_source(x) for x in (0, 1, 2, 7, 8, 19, 20, 39)] == [
        None,
        None,
        2,
        2,
        8,
        14,
        20,
        20,
    ]
    assert [c.index_source(x) for x in (1, 7, 23, 24, 39)] == [None, 2, 20, 24, 36]


def test_the_flat_file_of_the_release_gives_the_same_config() -> None:
    c = ModelConfig.load(RELEASE)
    spelled = {k: v for k, v in dataclasses.asdict(c).items() if not k.endswith("_token_id")}
    for key in ("gate_temp", "norm_topk_prob", "max_seq_len"):  # the shipped file lacks them
        del spelled[key]
    spelled |= {"image_token_id": 129264, "dspark_noise_token_id": 128799}
    assert ModelConfig.from_dict(json.loads(json.dumps(spelled))) == c


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_configs_load(name: str) -> None:
    c = ModelConfig.load(DATA / "golden/models" / name)
    raw = flat(name)
    for key, value in raw.items():
        if key not in ("max_batch_size", "temperature") and not key.startswith("dspark_n_"):
            found = getattr(c, key)
            assert found == (tuple(value) if isinstance(value, list) else value), key
    assert c.dspark_n_routed_experts == (raw["dspark_n_routed_experts"] or c.n_routed_experts)


REQUIRED = sorted(
    set(flat()) - {"max_batch_size", "temperature", "gate_temp", "norm_topk_prob", "max_seq_len"}
)


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_flat_key_is_an_error_RN02(key: str) -> None:
    raw = flat()
    del raw[key]
    with pytest.raises(ConfigError, match=f"missing {key}"):
        ModelConfig.from_dict(raw)


def test_a_missing_nested_key_is_an_error_and_the_file_wins_RN02() -> None:
    raw = nested()
    raw["text_config"]["compress_rope_theta"] = 40000
    assert ModelConfig.from_dict(raw).compress_rope_theta == 40000
    del raw["text_config"]["compress_rope_theta"]
    with pytest.raises(ConfigError, match=r"missing text_config\.compress_rope_theta"):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize("kind", ["deepseek_v4", "deepseek_v41_text", "deepseek_v411", None])
def test_only_v41_is_accepted_IM05(kind: str | None) -> None:
    raw = nested() | {"model_type": kind}
    with pytest.raises(ConfigError, match=r"tinfer runs DeepSeek-V4\.1 only") as error:
        ModelConfig.from_dict(raw)
    assert "\n" not in str(error.value)


def test_a_v4_architecture_or_flat_file_is_refused_IM05() -> None:
    with pytest.raises(ConfigError, match=r"V4\.1 only"):
        ModelConfig.from_dict(nested() | {"architectures": ["DeepseekV4ForCausalLM"]})
    v4 = {k: v for k, v in flat().items() if k not in ("kv_source_layers", "engram_layer_ids")}
    with pytest.raises(ConfigError, match=r"not a DeepSeek-V4\.1 configuration"):
        ModelConfig.from_dict(v4)
    with pytest.raises(ConfigError, match=r"not a DeepSeek-V4\.1 configuration"):
        ModelConfig.from_dict(flat() | {"n_hash_layers": 3})


def test_unknown_keys_are_warned_about_by_name() -> None:
    raw = nested()
    raw["text_config"]["moe_layers"] = 3
    with pytest.warns(UserWarning, match=r"unknown keys ignored: text_config\.moe_layers$"):
        ModelConfig.from_dict(raw)
    with pytest.warns(UserWarning, match="unknown keys ignored: colour, shape$"):
        ModelConfig.from_dict(flat() | {"shape": 1, "colour": 2})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": "96"}, "dim must be an integer, got '96'"),
        ({"dim": 0}, "dim must be positive, got 0"),
        ({"dim": True}, "dim must be an integer, got True"),
        ({"dim": 100}, "dim must be a multiple of 32"),
        ({"norm_eps": float("nan")}, "norm_eps must be a number, got nan"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
        ({"score_func": "tanh"}, "score_func must be 'sqrtsoftplus' or"),
        ({"expert_dtype": "int4"}, "expert_dtype must be 'fp4' or 'fp8', got 'int4'"),
        ({"n_shared_experts": 2}, "n_shared_experts must be 1, got 2"),
        ({"compress_ratios": [0, 2, 2, 1, 1]}, "compress_ratios must be 7 numbers long, got 5"),
        ({"compress_ratios": [0, 2, 2, 1, 1, 1, 2]}, "compress_ratios must be 0 on draft stages"),
        ({"compress_ratios": [0, 2, 1, 1, 1, 1, 0]}, "one of layer 2's ratio at or before it"),
        ({"compress_ratios": [0, 2.5, 2, 1, 1, 1, 0]}, "compress_ratios must be a list of int"),
        ({"kv_source_layers": [3, 1]}, "kv_source_layers must be ascending layer numbers"),
        ({"kv_source_layers": [0, 1, 3]}, "kv_source_layers must be layers with a compress_ratio"),
        ({"index_source_layers": [1]}, "kv_source_layers must be a subset"),
        ({"candidate_source_layer": 2}, "candidate_source_layer must be an index source"),
        ({"candidate_topk_blocks": 8}, "at least index_topk"),
        ({"engram_num_embeddings": [660]}, "engram_num_embeddings must be one per engram layer"),
        ({"engram_layer_ids": [0, 6]}, "engram_layer_ids must be below n_layers"),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size must be at least 2"),
        ({"engram_pad_id": 256}, "engram_pad_id must be below vocab_size"),
        ({"dspark_block_size": 0}, "dspark_block_size must be 0 exactly when"),
        ({"dspark_target_layer_ids": []}, "dspark_target_layer_ids must be layers"),
        ({"dspark_noise_token_id": 256}, "dspark_noise_token_id must be below vocab_size"),
        ({"n_activated_experts": 5}, "n_activated_experts must be at most n_routed_experts"),
        ({"rope_head_dim": 15}, "rope_head_dim must be even"),
        ({"n_heads": 5}, "n_heads must be a multiple of o_groups"),
        ({"eos_token_id": 300}, "eos_token_id must be below vocab_size"),
    ],
)
def test_a_bad_value_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_dict(flat() | changes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("text_config", "num_key_value_heads", 8),
        ("text_config", "hidden_act", "gelu"),
        ("text_config", "tie_word_embeddings", True),
        ("quantization_config", "weight_block_size", [128, 128]),
        ("quantization_config", "scale_fmt", "fp32"),
    ],
)
def test_a_variant_that_the_code_does_not_compute_is_refused(
    section: str, key: str, value: Any
) -> None:
    raw = nested()
    raw[section][key] = value
    with pytest.raises(ConfigError, match=f"{section}.{key} must be"):
        ModelConfig.from_dict(raw)


def test_a_checkpoint_without_a_vision_section_is_text_only() -> None:
    raw = nested()
    del raw["vision_config"]
    assert ModelConfig.from_dict(raw).vision_n_layers == 0


def test_paths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or directory"):
        ModelConfig.load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"not a checkpoint: it has no config\.json"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        ModelConfig.load(tmp_path)
