"""From a checkpoint's named tensors to the model, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tinfer.checkpoint import Checkpoint
from tinfer.config import ModelConfig
from tinfer.formats import Fp4Group32, Fp8Block32
from tinfer.model.attention import Attention, AttentionWeights
from tinfer.model.compressor import Compressor
from tinfer.model.dspark import DSpark, MarkovHead
from tinfer.model.engram import Engram, EngramHash
from tinfer.model.engram_hash import hash_constants
from tinfer.model.engram_table import EngramTable, ResidentTable
from tinfer.model.hyper_connection import HyperConnection
from tinfer.model.indexer import Candidates, Indexer
from tinfer.model.moe import ExpertWeight, Gate, MoE
from tinfer.model.rope import rope_table
from tinfer.model.transformer import Block, Transformer

Progress = Callable[[int], None]  # bytes read since the last call
TableFactory = Callable[[Tensor, Tensor, torch.device], EngramTable]


@dataclass(frozen=True)
class Model:
    """The backbone and, where the checkpoint has them, the draft stages."""

    config: ModelConfig
    backbone: Transformer
    dspark: DSpark | None
    device: torch.device


def resident_table(weight: Tensor, scale: Tensor, device: torch.device) -> EngramTable:
    """The whole table in the device's memory."""
    return ResidentTable(weight.to(device, copy=True), scale.to(device, copy=True))


@dataclass
class _Builder:
    config: ModelConfig
    checkpoint: Checkpoint
    device: torch.device
    length: int  # longest position that will be asked for
    progress: Progress
    engram_table: TableFactory

    def __post_init__(self) -> None:
        cfg = self.config
        dim, yarn = (
            cfg.rope_head_dim,
            (
                cfg.original_seq_len,
                cfg.rope_factor,
                cfg.beta_fast,
                cfg.beta_slow,
            ),
        )
        plain = rope_table(dim, self.length, cfg.rope_theta)
        self.rope = {False: plain.to(self.device)}
        if any(cfg.compress_ratios):
            scaled = rope_table(dim, self.length, cfg.compress_rope_theta, *yarn)
            self.rope[True] = scaled.to(self.device)

    # ------------------------------------------------------------ tensors
    def has(self, name: str) -> bool:
        return name in self.checkpoint.names()

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor on the device; `copy` so that it does not keep the file mapped."""
        value = self.checkpoint.tensor(name)
        self.progress(value.numel() * value.element_size())
        return value.to(self.device, dtype or value.dtype, copy=True)

    def fp8(self, name: str) -> Fp8Block32:
        return Fp8Block32(self.tensor(f"{name}.weight"), self.tensor(f"{name}.scale"))

    def fp8_or_bf16(self, name: str) -> Fp8Block32 | Tensor:
        return self.fp8(name) if self.has(f"{name}.scale") else self.tensor(f"{name}.weight")

    def fp8_stacked(self, *names: str) -> Fp8Block32:
        """Weights of whole 32-row tiles, one under the other."""
        parts = [self.fp8(n) for n in names]
        return Fp8Block32(torch.cat([p.weight for p in parts]), torch.cat([p.scale for p in parts]))

    def experts(self, prefix: str, count: int) -> tuple[ExpertWeight, ExpertWeight]:
        """(w1 over w3, w2) of all experts, copied straight into their place on the device.

        FP4 as released, or the lossless fp8 form of a converted checkpoint.
        """
        dim, inter = self.config.dim, self.config.moe_inter_dim
        packed, rows = (2, 1) if self.config.expert_dtype == "fp4" else (1, 32)
        w13 = self._bytes(count, 2 * inter, dim // packed)
        w13_s = self._bytes(count, 2 * inter // rows, dim // 32)
        w2 = self._bytes(count, dim, inter // packed)
        w2_s = self._bytes(count, dim // rows, inter // 32)
        for e in range(count):
            name = f"{prefix}.experts.{e}"
            for i, part in enumerate(("w1", "w3")):
                self._fill(w13[e].unflatten(0, (2, -1))[i], f"{name}.{part}.weight")
                self._fill(w13_s[e].unflatten(0, (2, -1))[i], f"{name}.{part}.scale")
            self._fill(w2[e], f"{name}.w2.weight")
            self._fill(w2_s[e], f"{name}.w2.scale")
        form = Fp4Group32 if self.config.expert_dtype == "fp4" else Fp8Block32
        return form(w13, w13_s), form(w2, w2_s)

    def _bytes(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=self.device)

    def _fill(self, out: Tensor, name: str) -> None:
        value = self.checkpoint.tensor(name)
        self.progress(value.numel())
        out.copy_(value)

    # ------------------------------------------------------------ modules
    def hyper_connection(self, prefix: str, part: str) -> HyperConnection:
        cfg = self.config
        return HyperConnection(
            self.tensor(f"{prefix}.hc_{part}_fn"),
            self.tensor(f"{prefix}.hc_{part}_scale"),
            self.tensor(f"{prefix}.hc_{part}_base"),
            self.tensor(f"{prefix}.{part}_norm.weight"),
            cfg.norm_eps,
            cfg.hc_eps,
            cfg.hc_sinkhorn_iters,
        )

    def compressor(self, layer: int, ratio: int) -> Compressor:
        prefix = f"layers.{layer}.attn"
        # The release projects in bf16 at ratio 1 and in fp32 above.
        dtype = torch.bfloat16 if ratio == 1 else torch.float32
        gate = self.tensor(f"{prefix}.compressor.wgate.weight", dtype) if ratio > 1 else None
        return Compressor(
            layer,
            ratio,
            self.tensor(f"{prefix}.compressor.wkv.weight", dtype),
            gate,
            self.tensor(f"{prefix}.compressor.norm.weight"),
            self.tensor(f"{prefix}.indexer.wk.weight", torch.bfloat16),
            self.tensor(f"{prefix}.indexer.k_norm.weight"),
            self.config.norm_eps,
            self.rope[True],
        )

    def indexer(self, layer: int, ratio: int, kv_source: int) -> Indexer:
        cfg, prefix = self.config, f"layers.{layer}.attn.indexer"
        candidates, source = None, cfg.candidate_source_layer
        if source is not None and layer >= source and cfg.candidate_topk_blocks > 0:
            candidates = Candidates(
                cfg.candidate_topk_blocks, cfg.candidate_block_size, layer == source
            )
        return Indexer(
            layer,
            ratio,
            kv_source,
            self.fp8(f"{prefix}.wq_b"),
            self.tensor(f"{prefix}.weights_proj.weight", torch.bfloat16),
            cfg.index_n_heads,
            cfg.index_head_dim,
            cfg.index_topk,
            self.rope[True],
            candidates,
        )

    def attention(self, prefix: str, name: str, layer: int | None) -> Attention:
        """`layer` is None for a draft stage: window attention only."""
        cfg, p = self.config, f"{prefix}.attn"
        weights = AttentionWeights(
            self.tensor(f"{p}.attn_sink"),
            self.fp8(f"{p}.wq_a"),
            self.tensor(f"{p}.q_norm.weight"),
            self.fp8(f"{p}.wq_b"),
            self.fp8(f"{p}.wkv"),
            self.tensor(f"{p}.kv_norm.weight"),
            self.fp8_or_bf16(f"{p}.wo_a"),
            self.fp8(f"{p}.wo_b"),
        )
        ratio = 0 if layer is None else cfg.compress_ratios[layer]
        compressor = indexer = source = None
        if layer is not None and ratio > 0:
            source = max(s for s in cfg.kv_source_layers if s <= layer)
            if layer in cfg.kv_source_layers:
                compressor = self.compressor(layer, ratio)
            if layer in cfg.index_source_layers:
                indexer = self.indexer(layer, ratio, source)
        return Attention(
            name,
            weights,
            cfg.n_heads,
            cfg.head_dim,
            cfg.o_groups,
            cfg.norm_eps,
            self.rope[ratio > 0],
            ratio,
            source,
            compressor,
            indexer,
        )

    def moe(self, prefix: str, name: str, experts: int, topk: int) -> MoE:
        cfg, p = self.config, f"{prefix}.ffn"
        gate = Gate(
            self.tensor(f"{p}.gate.weight"),
            self.tensor(f"{p}.gate.bias"),
            self.tensor(f"{p}.gate.bias_vl") if self.has(f"{p}.gate.bias_vl") else None,
            topk,
            cfg.route_scale,
            cfg.score_func,
            cfg.gate_temp,
            cfg.norm_topk_prob,
        )
        w13, w2 = self.experts(p, experts)
        shared = f"{p}.shared_experts"
        return MoE(
            name,
            gate,
            w13,
            w2,
            self.fp8_stacked(f"{shared}.w1", f"{shared}.w3"),
            self.fp8(f"{shared}.w2"),
            cfg.swiglu_limit,
        )

    def engram(self, layer: int) -> Engram:
        p = f"layers.{layer}.engram"
        q, k = self.tensor(f"{p}.q_weight").float(), self.tensor(f"{p}.k_weight").float()
        source = self.checkpoint.tensor
        table = self.engram_table(
            source(f"{p}.embed.weight"), source(f"{p}.embed.scale"), self.device
        )
        return Engram(table, self.fp8(f"{p}.wkv"), q * k, self.config.norm_eps)

    def block(self, layer: int) -> Block:
        cfg, prefix, name = self.config, f"layers.{layer}", f"layer{layer}"
        return Block(
            self.hyper_connection(prefix, "attn"),
            self.attention(prefix, name, layer),
            self.hyper_connection(prefix, "ffn"),
            self.moe(prefix, name, cfg.n_routed_experts, cfg.n_activated_experts),
            self.engram(layer) if layer in cfg.engram_layer_ids else None,
        )

    def backbone(self, token_map: Tensor | None) -> Transformer:
        cfg = self.config
        return Transformer(
            cfg,
            self.tensor("embed.weight"),
            [self.block(i) for i in range(cfg.n_layers)],
            self.tensor("norm.weight"),
            self.tensor("head.weight"),
            self.engram_hash(token_map),
        )

    def engram_hash(self, token_map: Tensor | None) -> EngramHash | None:
        cfg = self.config
        if not cfg.engram_layer_ids:
            return None
        if token_map is None:
            raise ValueError("build: token_map must be given for a model with engram layers")
        constants = hash_constants(cfg)
        pad = int(token_map[cfg.engram_pad_id])
        return EngramHash(
            token_map.to(self.device, torch.int32),
            pad,
            constants.multipliers.to(self.device),
            constants.primes.to(self.device),
            constants.offsets.to(self.device),
        )

    def draft(self, backbone: Transformer) -> DSpark | None:
        cfg, last = self.config, self.config.n_mtp_layers - 1
        if cfg.n_mtp_layers == 0 or cfg.dspark_block_size == 0:
            return None
        experts = cfg.dspark_n_routed_experts or cfg.n_routed_experts
        topk = cfg.dspark_n_activated_experts or cfg.n_activated_experts
        stages = [
            Block(
                self.hyper_connection(f"mtp.{m}", "attn"),
                self.attention(f"mtp.{m}", f"dspark.stage{m}", None),
                self.hyper_connection(f"mtp.{m}", "ffn"),
                self.moe(f"mtp.{m}", f"dspark.stage{m}", experts, topk),
            )
            for m in range(cfg.n_mtp_layers)
        ]
        markov = MarkovHead(
            self.tensor(f"mtp.{last}.markov_head.embed.weight"),
            self.tensor(f"mtp.{last}.markov_head.head.weight"),
            self.tensor(f"mtp.{last}.confidence_head.proj.weight", torch.float32),
        )
        return DSpark(
            cfg,
            stages,
            self.fp8("mtp.0.main_proj"),
            self.tensor("mtp.0.main_norm.weight"),
            self.tensor(f"mtp.{last}.norm.weight"),
            markov,
            backbone.embed,
            backbone.head,
        )


def build_model(
    config: ModelConfig,
    checkpoint: Checkpoint,
    device: torch.device | str,
    length: int,
    token_map: Tensor | None = None,
    progress: Progress = lambda _: None,
    engram_table: TableFactory = resident_table,
) -> Model:
    """Load every tensor of the text model to `device`.

    `length` bounds the positions (it sizes the rope tables); `token_map` int `[V]` maps token
    ids to compressed ids and is needed when the model has engram layers.
    """
    device = torch.device(device)
    builder = _Builder(config, checkpoint, device, length, progress, engram_table)
    backbone = builder.backbone(token_map)
    return Model(config, backbone, builder.draft(backbone), device)
