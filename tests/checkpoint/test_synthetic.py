"""The synthetic checkpoint: the release's layout, the same each time, worth generating from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from tinfer.cache import CacheSize
from tinfer.chat import Tokenizer, render
from tinfer.checkpoint import expected_tensors, open_checkpoint
from tinfer.config import ModelConfig
from tinfer.engine import Engine
from tinfer.model.build import build_model
from tinfer.model.engram_hash import compressed_token_map
from tinfer.registry import use_kernels
from tinfer.request import Request, SamplingParams
from tinfer.testing.synthetic import main, shard_header, write_checkpoint

RELEASE = Path(__file__).parents[1] / "data/release/config.json"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("synthetic")
    write_checkpoint(path)
    return path


def test_headers_are_written_as_the_release_writes_them() -> None:
    table = expected_tensors(ModelConfig.load(RELEASE))
    layer = {name: spec for name, spec in table.items() if name.startswith("layers.6.")}
    header, _ = shard_header(layer)
    assert len(header) == 258136
    digest = hashlib.sha256(header).hexdigest()
    assert digest == "139eeea4664aba161a4b4cb82a60a86a2429467601ee6584a887825f8137adfd"


def test_layout(directory: Path) -> None:
    config = ModelConfig.load(directory)
    checkpoint = open_checkpoint(directory, config)
    assert checkpoint.names() == expected_tensors(config).keys()
    assert not checkpoint.skipped
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == checkpoint.nbytes
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i:05d}-of-00013.safetensors" for i in range(1, 14)]
    assert sorted(p.name for p in directory.glob("*.safetensors")) == files
    tables = {f for n, f in index["weight_map"].items() if ".engram." in n}
    assert len(tables) == 2
    assert all(".engram." in n for n, f in index["weight_map"].items() if f in tables)


def test_every_kind_of_layer_is_there(directory: Path) -> None:
    config = ModelConfig.load(directory)
    assert {0, 1, 2} == set(config.compress_ratios)
    assert set(config.kv_source_layers) < set(config.index_source_layers)
    assert config.candidate_source_layer < config.index_source_layers[-1]
    assert set(config.index_source_layers) < {i for i, r in enumerate(config.compress_ratios) if r}
    assert config.engram_layer_ids
    assert config.n_mtp_layers > 1
    assert config.dspark_n_routed_experts != config.n_routed_experts


def test_the_same_seed_gives_the_same_files(directory: Path, tmp_path: Path) -> None:
    assert main([str(tmp_path / "again")]) == 0
    assert main([str(tmp_path / "other"), "--seed", "1"]) == 0
    for path in directory.iterdir():
        same = (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
        assert same, path.name
        changed = (tmp_path / "other" / path.name).read_bytes() != path.read_bytes()
        assert changed == path.name.endswith(".safetensors"), path.name


def test_values_are_sane(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    for name in checkpoint.names():
        value = checkpoint.tensor(name)
        if value.dtype != torch.uint8:
            assert torch.isfinite(value).all(), name
            assert value.float().abs().max() > 0, name
        elif checkpoint.spec(name).dtype == "F8_E8M0":
            assert int(value.min()) > 100, name
            assert int(value.max()) < 140, name
        else:
            assert value.unique().numel() > 8, name


def test_a_conversation_can_be_rendered(directory: Path) -> None:
    pytest.importorskip("deepseek_recipe")
    tokenizer = Tokenizer.load(directory)
    assert len(tokenizer) == ModelConfig.load(directory).vocab_size
    question = [{"role": "user", "content": "Where does the river go?"}]
    ids = render(question, thinking=True, effort=50).encode(tokenizer)
    assert ids[0] == 0
    assert ids[-1] == tokenizer.control_id("<think>")
    assert tokenizer.decode(ids).endswith("Where does the river go?<｜Assistant｜><think>")


def test_generation_is_finite_and_varied(directory: Path) -> None:
    config, tokenizer = ModelConfig.load(directory), Tokenizer.load(directory)
    token_map = compressed_token_map(tokenizer.inner, config.engram_compressed_vocab_size)
    model = build_model(config, open_checkpoint(directory, config), "cpu", 64, token_map)
    engine = Engine(model, CacheSize(sequences=2, length=64, chunk=32))
    params = SamplingParams(temperature=0.0, max_new_tokens=16)
    prompts = [tokenizer.encode(t) for t in ("The river comes", "In winter")]
    answers: list[list[int]] = [[], []]
    with use_kernels("ref"):
        for step in engine.generate([Request(p, params) for p in prompts]):
            assert torch.isfinite(step.logits).all()
            top = step.logits.topk(2).values
            assert top[0] > top[1]  # no ties
            answers[step.request].append(int(step.token or 0))
    assert answers[0] != answers[1]
    for answer in answers:
        assert len(answer) == 16
        assert len(set(answer)) >= 8
        assert "\ufffd" not in tokenizer.decode(answer)
