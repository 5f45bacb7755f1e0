"""A seeded small checkpoint in the release's layout: `python -m tinfer.testing.synthetic DIR`.

Every kind of layer is there: window-only, both compression ratios, index and candidate sources,
engram, experts, draft stages. Weights are random with sane magnitudes, each tensor from its own
seed; the head leans towards the word order of a short text, and the draft stages' Markov head
towards the same, so that generation is finite, varied, and worth speculating on. The model
knows nothing: it is for demonstrations and tests.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tinfer.checkpoint import TensorSpec, expected_tensors
from tinfer.compat.casts import per_block_cast, per_token_cast
from tinfer.config import ARCHITECTURE, MODEL_TYPE, ModelConfig
from tinfer.formats import GROUP, as_bytes
from tinfer.model.engram_hash import compressed_token_map, table_rows
from tinfer.testing.synthetic_text import IMAGE, SYSTEM, make_tokenizer, preferences

Values = Callable[[str, tuple[int, ...]], Tensor]

VOCAB = 512
_FILE_ORDER = ("F32", "BF16", "F8_E8M0", "F8_E4M3", "I8")
LEANING = 2.5  # how strongly the head follows the text, in units of log-odds
HEAD_NOISE = 0.7  # standard deviation of what else the head sees
# Sublayers add little to the stream, so that the embedding is still there at the head.
_GAINS = (
    (r"\.wo_b\.", 0.2),
    (r"\.w2\.", 0.3),
    (r"\.engram\.wkv\.", 0.3),
    (r"\.confidence_head\.", 0.1),
)


def nested_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The small model as a `config.json` of the release's shape."""
    heads, orders, start = 4, 2, 97
    compressed = int(compressed_token_map(tokenizer).max()) + 1
    text = {
        "model_type": f"{MODEL_TYPE}_text",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 7,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 128,
        "o_lora_rank": 32,
        "o_groups": 4,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 1024,
        },
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 32,
        "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 0, 0],
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 6],
        "index_n_heads": 4,
        "index_head_dim": 64,
        "index_topk": 32,
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 9,
        "candidate_block_size": 4,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-06,
        "engram_layer_ids": [1, 3],
        "engram_num_embeddings": table_rows(2, orders, heads, start),
        "engram_max_ngram_size": orders + 1,
        "engram_vocab_size": start,
        "engram_n_heads": heads,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": compressed,
        "num_nextn_predict_layers": 2,
        "dspark_block_size": 4,
        "dspark_noise_token_id": tokenizer.token_to_id(SYSTEM),
        "dspark_target_layer_ids": [4, 5, 6],
        "dspark_markov_rank": 64,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 1,
    }
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": tokenizer.token_to_id(IMAGE),
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [GROUP, GROUP],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
    }


# ---------------------------------------------------------------- values
class _Values:
    """Values of every tensor: `weights(name)` in fp32, or bf16 where they are stored so."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer, seed: int) -> None:
        self.config, self.seed = config, seed
        embed = self._normal("embed.weight", config.vocab_size, config.dim)
        noise = HEAD_NOISE * self._normal("head.weight", config.vocab_size, config.dim)
        leaning = preferences(tokenizer)
        rank = config.dspark_markov_rank
        u, s, v = torch.linalg.svd(leaning)
        root = s[:rank].sqrt()
        last = f"mtp.{config.n_mtp_layers - 1}.markov_head"
        self._made: dict[str, Tensor] = {
            "embed.weight": embed,
            "head.weight": LEANING * (leaning @ embed) / config.dim + noise / math.sqrt(config.dim),
            f"{last}.embed.weight": v.T[:, :rank] * root,
            f"{last}.head.weight": LEANING * u[:, :rank] * root,
        }

    def _normal(self, name: str, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}/{name}".encode()))
        return torch.randn(*shape, generator=generator)

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """fp32 values of an unquantized shape."""
        if name in self._made:
            return self._made[name]
        noise = self._normal(name, *shape)
        if ".hc_" in name:
            return self._hyper_connection(name, noise)
        if "norm" in name or name.endswith(("q_weight", "k_weight")):
            return 1 + 0.1 * noise
        if len(shape) == 1:  # sinks, routing bias
            return 0.05 * noise
        gain = next((g for pattern, g in _GAINS if re.search(pattern, name)), 1.0)
        return noise * (1.0 if ".engram.embed." in name else gain / math.sqrt(shape[-1]))

    def _hyper_connection(self, name: str, noise: Tensor) -> Tensor:
        """Mixes that keep the copies apart and move a little with the token."""
        if name.endswith("_scale"):
            return torch.ones_like(noise)
        if name.endswith("_fn"):
            return 0.3 * noise / math.sqrt(noise.shape[1])
        copies = self.config.hc_mult
        base = 0.1 * noise
        base[2 * copies :] += 3 * torch.eye(copies).flatten()
        return base


def _stored(
    name: str, table: dict[str, TensorSpec], values: Values
) -> Iterator[tuple[str, Tensor]]:
    """The tensor as stored, and its scale where it has one."""
    spec = table[name]
    scale = name[: -len("weight")] + "scale"
    if spec.dtype == "I8":
        n, packed = spec.shape
        q, s = per_token_cast(values(name, (n, 2 * packed)), "e2m1", GROUP, "ue8m0")
    elif spec.dtype == "F8_E4M3" and ".engram.embed." in name:
        q, s = per_token_cast(values(name, spec.shape), "e4m3", GROUP, "ue8m0")
    elif spec.dtype == "F8_E4M3":
        q, s = per_block_cast(values(name, spec.shape), (GROUP, GROUP), "ue8m0")
    else:
        kind = torch.bfloat16 if spec.dtype == "BF16" else torch.float32
        yield name, values(name, spec.shape).to(kind)
        return
    yield name, q
    yield scale, s


# ---------------------------------------------------------------- files
def shard_header(specs: dict[str, TensorSpec]) -> tuple[bytes, list[str]]:
    """A safetensors header in the release's form, and the tensors' order in the file."""
    names = sorted(specs, key=lambda n: (_FILE_ORDER.index(specs[n].dtype), n))
    header, end = {}, 0
    for name in names:
        spec, begin = specs[name], end
        end += spec.nbytes
        header[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8), names


def _write_shard(path: Path, specs: dict[str, TensorSpec], values: dict[str, Tensor]) -> None:
    header, names = shard_header(specs)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for name in names:
            value = values[name].contiguous()
            raw = value if value.element_size() == 1 else value.view(torch.uint8)
            file.write(as_bytes(raw).numpy().tobytes())


def _shard_of(name: str, config: ModelConfig) -> int:
    """The release's placement: globals, one shard per layer, head, stages, one per engram."""
    part = name.split(".")
    if ".engram." in name:
        return (
            1
            + config.n_layers
            + 1
            + config.n_mtp_layers
            + config.engram_layer_ids.index(int(part[1]))
        )
    if part[0] == "layers":
        return 1 + int(part[1])
    if part[0] == "mtp":
        return 2 + config.n_layers + int(part[1])
    return 0 if part[0] == "embed" else 1 + config.n_layers


def write_checkpoint(directory: str | Path, seed: int = 0) -> ModelConfig:
    """Write config, tokenizer, index and shards; the same seed gives the same files."""
    tokenizer = make_tokenizer(VOCAB)
    raw = nested_config(tokenizer)
    values = _Values(ModelConfig.from_dict(raw), tokenizer, seed)
    return write_release(directory, raw, tokenizer, values)


def write_release(
    directory: str | Path, raw: dict[str, Any], tokenizer: Tokenizer, values: Values
) -> ModelConfig:
    """Quantize and write a checkpoint in the release's layout.

    `values(name, shape)` gives a tensor in the shape it has before quantization, at least as
    precise as it is stored.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = ModelConfig.from_dict(raw)
    table = expected_tensors(config)
    shards: dict[int, dict[str, Tensor]] = {}
    for name in table:
        if not name.endswith(".scale"):
            for part, value in _stored(name, table, values):
                shards.setdefault(_shard_of(part, config), {})[part] = value
    weight_map: dict[str, str] = {}
    for number, shard in sorted(shards.items()):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(directory / file, {name: table[name] for name in shard}, shard)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(spec.nbytes for spec in table.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    tokenizer.save(str(directory / "tokenizer.json"))
    return config


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tinfer.testing.synthetic", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    config = write_checkpoint(args.directory, args.seed)
    size = sum(p.stat().st_size for p in args.directory.glob("*.safetensors"))
    sys.stdout.write(
        f"{args.directory}: {config.n_layers} layers, {config.n_mtp_layers} draft stages, "
        f"{size / (1 << 20):.1f} MiB, seed {args.seed}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
