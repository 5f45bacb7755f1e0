"""What a V4.1 checkpoint holds: every tensor's name, shape and stored dtype, from the config."""

from __future__ import annotations

from collections.abc import Callable

from tinfer.checkpoint.shard import TensorSpec
from tinfer.config import ModelConfig
from tinfer.formats import GROUP

Table = dict[str, TensorSpec]
Quantized = Callable[[Table, str, int, int], None]

# Where the reference's own parameters are wider than the release's file; both are read.
_MAY_BE_F32 = (
    "head.weight",  # also markov_head.head.weight
    "compressor.wkv.weight",
    "compressor.wgate.weight",
    "confidence_head.proj.weight",
)


def expected_tensors(config: ModelConfig) -> Table:
    """Name -> specification of every tensor in the release's layout (vision included)."""
    table: Table = {
        "embed.weight": TensorSpec("BF16", (config.vocab_size, config.dim)),
        "norm.weight": TensorSpec("BF16", (config.dim,)),
        "head.weight": TensorSpec("BF16", (config.vocab_size, config.dim)),
    }
    for layer in range(config.n_layers):
        prefix = f"layers.{layer}"
        _block(table, config, prefix, config.n_routed_experts)
        _sources(table, config, prefix, layer)
    for index, layer in enumerate(config.engram_layer_ids):
        _engram(table, config, f"layers.{layer}.engram", config.engram_num_embeddings[index])
    for stage in range(config.n_mtp_layers):
        _block(table, config, f"mtp.{stage}", config.dspark_n_routed_experts)
    if config.n_mtp_layers:
        _draft(table, config)
    if config.vision_n_layers:
        _vision(table, config)
    return table


def accepted_dtypes(name: str, expected: TensorSpec) -> tuple[str, ...]:
    """The stored dtypes that hold `name` without loss."""
    if name.endswith(".wo_a.weight"):
        return ("F8_E4M3", "BF16")  # BF16, without a scale, in converted checkpoints
    if expected.dtype == "I8":
        return ("I8", "F4")
    if expected.dtype == "BF16" and (name.endswith(_MAY_BE_F32) or _is_vision_norm(name)):
        return ("BF16", "F32")
    return (expected.dtype,)


def _is_vision_norm(name: str) -> bool:
    return name.startswith("vision.") and name.rsplit(".", 2)[-2].startswith("norm")


def _bf16(table: Table, name: str, *shape: int) -> None:
    table[name] = TensorSpec("BF16", shape)


def _f32(table: Table, name: str, *shape: int) -> None:
    table[name] = TensorSpec("F32", shape)


def add_fp8(table: Table, name: str, n: int, k: int) -> None:
    """A dense weight: one scale per 32x32 tile, tiles padded at the edges."""
    table[f"{name}.weight"] = TensorSpec("F8_E4M3", (n, k))
    table[f"{name}.scale"] = TensorSpec("F8_E8M0", (-(-n // GROUP), -(-k // GROUP)))


def add_fp4(table: Table, name: str, n: int, k: int) -> None:
    """An expert weight: two values a byte, one scale per row per 32 columns."""
    table[f"{name}.weight"] = TensorSpec("I8", (n, k // 2))
    table[f"{name}.scale"] = TensorSpec("F8_E8M0", (n, k // GROUP))


def _block(table: Table, c: ModelConfig, prefix: str, experts: int) -> None:
    _attention(table, c, f"{prefix}.attn")
    for part in ("attn", "ffn"):
        mixes = (2 + c.hc_mult) * c.hc_mult
        _bf16(table, f"{prefix}.{part}_norm.weight", c.dim)
        _f32(table, f"{prefix}.hc_{part}_fn", mixes, c.hc_mult * c.dim)
        _f32(table, f"{prefix}.hc_{part}_base", mixes)
        _f32(table, f"{prefix}.hc_{part}_scale", 3)
    _bf16(table, f"{prefix}.ffn.gate.weight", experts, c.dim)
    _f32(table, f"{prefix}.ffn.gate.bias", experts)
    if c.vision_n_layers:
        _f32(table, f"{prefix}.ffn.gate.bias_vl", experts)
    quantized = add_fp4 if c.expert_dtype == "fp4" else add_fp8
    for expert in range(experts):
        _mlp(table, c, f"{prefix}.ffn.experts.{expert}", quantized)
    _mlp(table, c, f"{prefix}.ffn.shared_experts", add_fp8)


def _mlp(table: Table, c: ModelConfig, name: str, quantized: Quantized) -> None:
    quantized(table, f"{name}.w1", c.moe_inter_dim, c.dim)
    quantized(table, f"{name}.w3", c.moe_inter_dim, c.dim)
    quantized(table, f"{name}.w2", c.dim, c.moe_inter_dim)


def _attention(table: Table, c: ModelConfig, name: str) -> None:
    rank = c.o_groups * c.o_lora_rank
    _f32(table, f"{name}.attn_sink", c.n_heads)
    add_fp8(table, f"{name}.wq_a", c.q_lora_rank, c.dim)
    _bf16(table, f"{name}.q_norm.weight", c.q_lora_rank)
    add_fp8(table, f"{name}.wq_b", c.n_heads * c.head_dim, c.q_lora_rank)
    add_fp8(table, f"{name}.wkv", c.head_dim, c.dim)
    _bf16(table, f"{name}.kv_norm.weight", c.head_dim)
    add_fp8(table, f"{name}.wo_a", rank, c.n_heads * c.head_dim // c.o_groups)
    add_fp8(table, f"{name}.wo_b", c.dim, rank)


def _sources(table: Table, c: ModelConfig, prefix: str, layer: int) -> None:
    """Compressor and index key at KV sources, index query at index sources."""
    compressor, indexer = f"{prefix}.attn.compressor", f"{prefix}.attn.indexer"
    if layer in c.kv_source_layers:
        _bf16(table, f"{compressor}.wkv.weight", c.head_dim, c.dim)
        if c.compress_ratios[layer] > 1:
            _bf16(table, f"{compressor}.wgate.weight", c.head_dim, c.dim)
        _bf16(table, f"{compressor}.norm.weight", c.head_dim)
        _bf16(table, f"{indexer}.wk.weight", c.index_head_dim, c.head_dim)
        _bf16(table, f"{indexer}.k_norm.weight", c.index_head_dim)
    if layer in c.index_source_layers:
        add_fp8(table, f"{indexer}.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        _bf16(table, f"{indexer}.weights_proj.weight", c.index_n_heads, c.dim)


def _engram(table: Table, c: ModelConfig, name: str, rows: int) -> None:
    width = c.engram_head_dim
    table[f"{name}.embed.weight"] = TensorSpec("F8_E4M3", (rows, width))
    table[f"{name}.embed.scale"] = TensorSpec("F8_E8M0", (rows, width // GROUP))
    _bf16(table, f"{name}.q_weight", c.hc_mult, c.dim)
    _bf16(table, f"{name}.k_weight", c.hc_mult, c.dim)
    add_fp8(table, f"{name}.wkv", (c.hc_mult + 1) * c.dim, c.engram_columns * width)


def _draft(table: Table, c: ModelConfig) -> None:
    last = f"mtp.{c.n_mtp_layers - 1}"
    add_fp8(table, "mtp.0.main_proj", c.dim, len(c.dspark_target_layer_ids) * c.dim)
    _bf16(table, "mtp.0.main_norm.weight", c.dim)
    _bf16(table, f"{last}.norm.weight", c.dim)
    _bf16(table, f"{last}.markov_head.embed.weight", c.vocab_size, c.dspark_markov_rank)
    _bf16(table, f"{last}.markov_head.head.weight", c.vocab_size, c.dspark_markov_rank)
    _bf16(table, f"{last}.confidence_head.proj.weight", 1, c.dim + c.dspark_markov_rank)


def _vision(table: Table, c: ModelConfig) -> None:
    width, inter = c.vision_dim, c.vision_inter_dim
    for name in ("image_start", "image_end", "image_newline"):
        _bf16(table, name, c.dim)
    _biased(table, "vision.patch_embed.proj", width, 3 * c.vision_patch_size**2)
    for block in range(c.vision_n_layers):
        prefix = f"vision.blocks.{block}"
        _bf16(table, f"{prefix}.norm1.weight", width)
        _bf16(table, f"{prefix}.norm2.weight", width)
        _biased(table, f"{prefix}.attn.wqkv", 3 * width, width)
        _biased(table, f"{prefix}.attn.wo", width, width)
        _bf16(table, f"{prefix}.mlp.w1.weight", 2 * inter, width)
        _bf16(table, f"{prefix}.mlp.w2.weight", width, inter)
    _bf16(table, "vision.norm.weight", width)
    _biased(table, "aligner.w1", c.dim, width * c.vision_downsample_ratio**2)
    _biased(table, "aligner.w2", c.dim, c.dim)


def _biased(table: Table, name: str, n: int, k: int) -> None:
    _bf16(table, f"{name}.weight", n, k)
    _bf16(table, f"{name}.bias", n)
