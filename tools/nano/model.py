"""The release's forward pass over a batch of whole rows, with gradients.

Every rounding point of `tinfer.model` is here (a test compares the two); what is not here is
state: rows are complete, so caches are plain tensors and visibility is a mask.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from tinfer.config import ModelConfig
from tinfer.model.engram import GATE_CLAMP
from tinfer.model.engram_hash import hash_constants
from tinfer.model.rope import rope_table
from tools.nano import mixes, quant
from tools.nano.attend import allowed, attend, rotate
from tools.nano.index import Index, index_scores, select
from tools.nano.params import Parameters


@dataclass
class Shape:
    """What depends on rows and length alone."""

    rows: int
    length: int
    bias: dict[int, Tensor]  # ratio -> additive mask [1, 1, L, L + L/ratio]
    visible: dict[int, Tensor]  # ratio -> bool [L, L/ratio]
    rope: dict[bool, tuple[Tensor, Tensor]]  # compressed? -> cos, sin [B*L, 1, R/2]


@dataclass
class Pass:
    """One forward pass."""

    shape: Shape
    sparse: bool = False  # attend only to what the indexer selects
    tail: int = 0  # queries at the end of each row that teach the indexer; 0: none
    compressed: dict[int, Tensor] = field(default_factory=dict)  # KV source -> [B, L/ratio, d]
    keys: dict[int, Tensor] = field(default_factory=dict)  # KV source -> index keys
    index: Index | None = None  # of the newest index source
    candidates: Tensor | None = None  # bool [B, L, L/ratio]
    loads: dict[str, Tensor] = field(default_factory=dict)  # layer -> tokens per expert
    index_losses: list[Tensor] = field(default_factory=list)
    taps: list[Tensor] = field(default_factory=list)


def swiglu(gate_up: Tensor, weights: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (F.silu(gate) * up * weights[..., None]).to(torch.bfloat16).flatten(1)


def engram_gate(stream: Tensor, kv: Tensor, weight: Tensor, eps: float) -> Tensor:
    h, k, value = stream.float(), kv[:, :-1].float(), kv[:, -1:].float()
    rstd_h = torch.rsqrt(h.square().mean(-1) + eps)
    rstd_k = torch.rsqrt(k.square().mean(-1) + eps)
    g = (h * weight * k).sum(-1) * rstd_h * rstd_k * h.shape[-1] ** -0.5
    root = g.abs().clamp(min=GATE_CLAMP).sqrt()
    gate = torch.sigmoid(torch.where(g < 0, -root, root))
    return (h + gate[..., None] * value).to(torch.bfloat16)


class Blocks:
    """The sublayers that backbone and draft stages share."""

    def __init__(self, config: ModelConfig, params: Parameters) -> None:
        self.config, self.params = config, params

    def enter(
        self, prefix: str, part: str, stream: Tensor, pre: Tensor
    ) -> tuple[Tensor, mixes.Mixes]:
        """A sublayer's normed input, and its mixes."""
        cfg, p, name = self.config, self.params, f"{prefix}.hc_{part}"
        x, square = mixes.collapse(stream, pre)
        mix = mixes.mix(
            stream,
            torch.rsqrt(square[:, None] + cfg.norm_eps),
            p[f"{name}_fn"],
            p.fp32(f"{name}_scale"),
            p.fp32(f"{name}_base"),
            cfg.hc_eps,
            cfg.hc_sinkhorn_iters,
        )
        return self.norm(x, f"{prefix}.{part}_norm"), mix

    def norm(self, x: Tensor, name: str) -> Tensor:
        return mixes.rms_norm(x, self.params[f"{name}.weight"], self.config.norm_eps)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.params[f"{name}.weight"])

    def query(self, xq: Tensor, prefix: str) -> tuple[Tensor, Tensor]:
        """The fp8 query latent, and the heads `[T, H*d]` before rotation."""
        qr = quant.fp8(self.norm(self.linear(xq, f"{prefix}.wq_a"), f"{prefix}.q_norm"))
        return qr, self.linear(qr, f"{prefix}.wq_b")

    def window_kv(self, xq: Tensor, prefix: str) -> Tensor:
        """`[T, d]`, normed, neither rotated nor quantized."""
        return self.norm(self.linear(xq, f"{prefix}.wkv"), f"{prefix}.kv_norm")

    def project(self, o: Tensor, prefix: str) -> Tensor:
        """bf16 `[T, H*d]` -> `[T, D]`."""
        groups = self.config.o_groups
        wo_a = self.params[f"{prefix}.wo_a.weight"].view(groups, -1, o.shape[1] // groups)
        u = torch.bmm(o.view(len(o), groups, -1).transpose(0, 1), wo_a.transpose(1, 2))
        return self.linear(quant.fp8(u.transpose(0, 1).reshape(len(o), -1)), f"{prefix}.wo_b")

    def feed_forward(
        self, x: Tensor, prefix: str, experts: int, topk: int, loads: dict[str, Tensor]
    ) -> Tensor:
        """Every expert runs on every token; a weight of zero keeps the unchosen out."""
        cfg, p, tokens = self.config, self.params, len(x)
        logits = quant.linear_f32(x, p[f"{prefix}.gate.weight"]).clamp(min=-30.0)
        scores = F.softplus(logits).sqrt()
        chosen = (scores.detach() + p.fp32(f"{prefix}.gate.bias").detach()).topk(topk, -1).indices
        hit = torch.zeros_like(scores).scatter_(1, chosen, 1.0)
        loads[prefix] = hit.sum(0)
        weights = scores * hit
        weights = weights / weights.sum(-1, keepdim=True) * cfg.route_scale
        weights = torch.cat([weights, torch.ones_like(weights[:, :1])], dim=1)
        w13, w2 = p.experts(prefix, experts)
        shared = f"{prefix}.shared_experts"
        w13 = torch.cat([w13.flatten(0, 1), p[f"{shared}.w1.weight"], p[f"{shared}.w3.weight"]])
        w2 = torch.cat([w2.transpose(0, 1).flatten(1), p[f"{shared}.w2.weight"]], dim=1)
        gate_up = F.linear(quant.fp8(x), w13).view(tokens, experts + 1, -1)
        return F.linear(quant.fp8(swiglu(gate_up, weights, cfg.swiglu_limit)), w2)


class Backbone(Blocks):
    """All layers, from ids to the normed hidden state."""

    def __init__(self, config: ModelConfig, params: Parameters, token_map: Tensor) -> None:
        super().__init__(config, params)
        device = params.tiles.device
        constants = hash_constants(config)
        self.multipliers = constants.multipliers.to(device)
        self.primes, self.offsets = constants.primes.to(device), constants.offsets.to(device)
        self.token_map = token_map.to(device).long()
        self.pad = int(token_map[config.engram_pad_id])

    def shape(self, rows: int, length: int) -> Shape:
        cfg, device = self.config, self.params.tiles.device
        yarn = (cfg.original_seq_len, cfg.rope_factor, cfg.beta_fast, cfg.beta_slow)
        tables = {
            False: rope_table(cfg.rope_head_dim, length, cfg.rope_theta),
            True: rope_table(cfg.rope_head_dim, length, cfg.compress_rope_theta, *yarn),
        }
        rope = {}
        for kind, table in tables.items():
            cos, sin = table.to(device).repeat(rows, 1)[:, None].chunk(2, dim=-1)
            rope[kind] = (cos.contiguous(), sin.contiguous())
        i, j = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)
        window = (j <= i) & (j > i - cfg.window_size)
        visible = {r: j[: length // r] < (i + 1) // r for r in set(cfg.compress_ratios) if r}
        bias = {0: allowed(window)[None, None]}
        for r, mask in visible.items():
            bias[r] = allowed(torch.cat([window, mask], dim=1))[None, None]
        return Shape(rows, length, bias, visible, rope)

    # ------------------------------------------------------------ layers
    def __call__(self, ids: Tensor, run: Pass) -> Tensor:
        """int64 `[B, L]` -> bf16 `[B*L, D]`; taps, loads and index losses are left in `run`."""
        cfg, copies = self.config, self.config.hc_mult
        x = quant.rows(self.params["embed.weight"], ids.flatten())
        stream = x[:, None].expand(-1, copies, -1).contiguous()
        pre = torch.zeros(len(x), copies, device=x.device)
        pre[:, 0] = 1.0
        hashes = self.hashes(ids)
        for i in range(cfg.n_layers):
            prefix = f"layers.{i}"
            if i in cfg.engram_layer_ids:
                stream = self.engram(stream, hashes[cfg.engram_layer_ids.index(i)], prefix)
            if i in cfg.dspark_target_layer_ids:
                run.taps.append(stream.float().mean(1).to(torch.bfloat16))
            for part in ("attn", "ffn"):
                x, (pre, post, comb) = self.enter(prefix, part, stream, pre)
                if part == "attn":
                    y = self.attention(x, i, run)
                else:
                    sizes = (cfg.n_routed_experts, cfg.n_activated_experts)
                    y = self.feed_forward(x, f"{prefix}.ffn", *sizes, run.loads)
                stream = mixes.post(y, stream, post, comb)
        return self.norm(mixes.collapse(stream, pre)[0], "norm")

    def logits(self, x: Tensor) -> Tensor:
        return quant.linear_f32(x, self.params["head.weight"])

    def hashes(self, ids: Tensor) -> Tensor:
        """int64 `[layers, T, columns]`."""
        mapped = self.token_map[ids]
        product = [mapped * self.multipliers[:, :1, None]]
        columns = []
        rolling = product[0]
        for j in range(1, self.config.engram_max_ngram_size):
            back = F.pad(mapped[:, :-j], (j, 0), value=self.pad)
            rolling = rolling ^ (back * self.multipliers[:, j, None, None])
            columns.append(rolling[..., None] % self.primes[:, j - 1, None, None, :])
        return torch.cat(columns, dim=-1).flatten(1, 2) + self.offsets[:, None]

    def engram(self, stream: Tensor, ids: Tensor, prefix: str) -> Tensor:
        p, name = self.params, f"{prefix}.engram"
        found = quant.rows(p[f"{name}.embed.weight"], ids).flatten(1)
        kv = self.linear(quant.fp8(found), f"{name}.wkv").view(len(ids), -1, self.config.dim)
        weight = p[f"{name}.q_weight"].float() * p[f"{name}.k_weight"].float()
        return engram_gate(stream, kv, weight, self.config.norm_eps)

    # ------------------------------------------------------------ attention
    def attention(self, x: Tensor, layer: int, run: Pass) -> Tensor:
        cfg, shape, prefix = self.config, run.shape, f"layers.{layer}.attn"
        rows, length, ratio = shape.rows, shape.length, cfg.compress_ratios[layer]
        cos, sin = shape.rope[ratio > 0]
        xq = quant.fp8(x)
        qr, q = self.query(xq, prefix)
        q = rotate(q.view(len(x), cfg.n_heads, -1), cos, sin)
        q = q.view(rows, length, cfg.n_heads, -1).transpose(1, 2)
        kv = rotate(self.window_kv(xq, prefix)[:, None], cos, sin)
        kv = quant.fp8(kv.view(rows, length, -1))
        bias = shape.bias[ratio]
        if ratio:
            if layer in cfg.kv_source_layers:
                self.compress(x, layer, run)
            if layer in cfg.index_source_layers:
                run.index = self.index(x, qr, layer, run)
            kv = torch.cat([kv, run.compressed[cfg.kv_source(layer)]], dim=1)
            if run.sparse and run.index is not None and run.index.selected is not None:
                window = shape.bias[0].expand(rows, -1, -1, -1)
                bias = torch.cat([window, allowed(run.index.selected)[:, None]], dim=3)
        sink = self.params.fp32(f"{prefix}.attn_sink")
        o, lse = attend(q, kv, bias, sink, cfg.head_dim**-0.5)
        if ratio and run.tail and run.index is not None:
            run.index_losses.append(self.teach_index(q, kv, lse, ratio, run))
        o = rotate(o.transpose(1, 2).reshape(len(x), cfg.n_heads, -1), cos, -sin)
        return self.project(o.flatten(1), prefix)

    def compress(self, x: Tensor, layer: int, run: Pass) -> None:
        """Publish the layer's compressed KV and index keys."""
        cfg, p, prefix = self.config, self.params, f"layers.{layer}.attn"
        rows, ratio = run.shape.rows, cfg.compress_ratios[layer]
        wkv = p[f"{prefix}.compressor.wkv.weight"]
        if ratio == 1:
            pooled = F.linear(x, wkv)
        else:
            kv = quant.linear_f32(x, wkv).unflatten(0, (-1, ratio))
            score = quant.linear_f32(x, p[f"{prefix}.compressor.wgate.weight"])
            weights = score.unflatten(0, (-1, ratio)).softmax(1)
            pooled = (weights * kv).sum(1).to(torch.bfloat16)
        latent = self.norm(pooled, f"{prefix}.compressor.norm")
        cos, sin = (t[::ratio].contiguous() for t in run.shape.rope[True])
        stood = rotate(latent[:, None], cos, sin)
        run.compressed[layer] = quant.fp4_kv(stood.view(rows, -1, cfg.head_dim))
        # The indexer learns from the attention it imitates, and does not pull at the rest.
        key = self.norm(
            self.linear(latent.detach(), f"{prefix}.indexer.wk"), f"{prefix}.indexer.k_norm"
        )
        key = rotate(key[:, None], cos, sin)
        run.keys[layer] = quant.fp4(key.view(rows, -1, cfg.index_head_dim))

    def index(self, x: Tensor, qr: Tensor, layer: int, run: Pass) -> Index:
        """Scores of the layer's own queries; with `sparse`, also what they select."""
        cfg, shape, prefix = self.config, run.shape, f"layers.{layer}.attn.indexer"
        q = self.linear(qr.detach(), f"{prefix}.wq_b")
        q = rotate(q.view(len(x), cfg.index_n_heads, -1), *shape.rope[True])
        q = quant.fp4(q.view(shape.rows, shape.length, cfg.index_n_heads, -1))
        weights = self.linear(x.detach(), f"{prefix}.weights_proj").float()
        weights = weights * (cfg.index_head_dim**-0.5 * cfg.index_n_heads**-0.5)
        weights = weights.view(shape.rows, shape.length, -1)
        keys = run.keys[cfg.kv_source(layer)]
        index = Index(index_scores(q, keys, weights, run.tail) if run.tail else None, None)
        visible = shape.visible[cfg.compress_ratios[layer]]
        if run.sparse and visible.shape[1] > cfg.index_topk:
            with torch.no_grad():
                scores = index_scores(q, keys, weights, shape.length)
                scores = scores.masked_fill(~visible, float("-inf"))
                index.selected, run.candidates = select(scores, layer, cfg, run.candidates)
        return index

    def teach_index(self, q: Tensor, kv: Tensor, lse: Tensor, ratio: int, run: Pass) -> Tensor:
        """Cross entropy of the indexer's choice against the attention summed over heads."""
        assert run.index is not None
        assert run.index.scores is not None
        length, tail, visible = run.shape.length, run.tail, run.shape.visible[ratio]
        visible = visible[length - tail :]
        with torch.no_grad():
            logits = q[:, :, length - tail :] @ kv[:, None, length:].transpose(-1, -2)
            logits = logits.float() * self.config.head_dim**-0.5
            p = torch.exp(logits - lse[:, :, length - tail : length, None])
            target = p.masked_fill(~visible, 0.0).sum(1)
            target = target / self.config.n_heads
        scores = run.index.scores.masked_fill(~visible, -1e9)
        return -(target * scores.log_softmax(-1)).sum(-1)
