"""The draft stages' forward pass on many blocks at once, with gradients, and their losses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tinfer.config import ModelConfig
from tinfer.model.rope import rope_table
from tools.nano import mixes, quant
from tools.nano.attend import allowed, attend, rotate
from tools.nano.model import Blocks
from tools.nano.params import Parameters

PADDING = 8  # keys come in multiples of this


@dataclass
class Drafted:
    logits: Tensor  # fp32 [N, n, V], with the Markov bias of the true token before
    confidence: Tensor  # fp32 [N, n]


class Draft(Blocks):
    """`params` are the draft's own; embedding and head are the backbone's, and stay as they are."""

    def __init__(self, config: ModelConfig, params: Parameters) -> None:
        super().__init__(config, params)
        self._rope: dict[int, tuple[Tensor, Tensor]] = {}
        self._loads: dict[str, Tensor] = {}

    def loads(self) -> dict[str, Tensor]:
        return self._loads

    def __call__(self, taps: Tensor, ids: Tensor, main: Tensor, backbone: Parameters) -> Drafted:
        """Blocks after the positions `main` int64 `[B, A]` of rows `ids` int64 `[B, L]`.

        `taps` bf16 `[B*L, targets*D]`; every position up to main + n + 1 must be in the row.
        """
        cfg, n = self.config, self.config.dspark_block_size
        rows, length = ids.shape
        self._loads = {}
        device = ids.device
        main_x = self.norm(self.linear(quant.fp8(taps), "mtp.0.main_proj"), "mtp.0.main_norm")
        main_q = quant.fp8(main_x)
        cos, sin = self.rope(length + n + 1, device)
        at = main[..., None] + torch.arange(1, n + 1, device=device)  # [B, A, n]
        turn = (cos[at.flatten()], sin[at.flatten()])  # [N*n, 1, R/2]
        seen = main[..., None] - torch.arange(cfg.window_size - 1, -1, -1, device=device)
        bias = self._bias(seen >= 0, n)
        x = self._embedded(ids, at, backbone)
        stream = x[:, None].expand(-1, cfg.hc_mult, -1).contiguous()
        pre = torch.zeros(len(x), cfg.hc_mult, device=device)
        pre[:, 0] = 1.0
        rotation = (cos[:length].repeat(rows, 1, 1), sin[:length].repeat(rows, 1, 1))
        for stage in range(cfg.n_mtp_layers):
            prefix = f"mtp.{stage}"
            kv = self.window_kv(main_q, f"{prefix}.attn")
            kv = quant.fp8(rotate(kv[:, None], *rotation)[:, 0])
            flat = torch.arange(rows, device=device)[:, None, None] * length + seen.clamp(min=0)
            kept = quant.rows(kv, flat.flatten(0, 1))  # [N, W, d]
            for part in ("attn", "ffn"):
                x, (pre, post, comb) = self.enter(prefix, part, stream, pre)
                if part == "attn":
                    y = self.attention(x, f"{prefix}.attn", kept, turn, bias)
                else:
                    sizes = (cfg.dspark_n_routed_experts, cfg.dspark_n_activated_experts)
                    y = self.feed_forward(x, f"{prefix}.ffn", *sizes, self._loads)
                stream = mixes.post(y, stream, post, comb)
        return self._heads(mixes.collapse(stream, pre)[0], ids, at, backbone)

    def rope(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos, sin fp32 `[L, 1, R/2]`, made once: a recorded step must not copy from the host."""
        if length not in self._rope:
            cfg = self.config
            table = rope_table(cfg.rope_head_dim, length, cfg.rope_theta).to(device)
            cos, sin = table[:, None].chunk(2, dim=-1)
            self._rope[length] = (cos, sin)
        return self._rope[length]

    def _embedded(self, ids: Tensor, at: Tensor, backbone: Parameters) -> Tensor:
        """bf16 `[N*n, D]`: the newest token, then noise."""
        tokens = torch.full_like(at, self.config.dspark_noise_token_id)
        tokens[..., 0] = ids.gather(1, at[..., 0])
        return backbone["embed.weight"].detach()[tokens.flatten()]

    @staticmethod
    def _bias(seen: Tensor, n: int) -> Tensor:
        """bf16 `[N, 1, n, W + n + padding]`."""
        seen = seen.flatten(0, 1)
        block = torch.ones(len(seen), n, dtype=torch.bool, device=seen.device)
        keys = torch.cat([seen, block], dim=1)
        keys = F.pad(keys, (0, -keys.shape[1] % PADDING))
        return allowed(keys)[:, None, None].expand(-1, -1, n, -1).contiguous()

    def attention(
        self, x: Tensor, prefix: str, kept: Tensor, turn: tuple[Tensor, Tensor], bias: Tensor
    ) -> Tensor:
        cfg, blocks = self.config, len(kept)
        cos, sin = turn
        xq = quant.fp8(x)
        _, q = self.query(xq, prefix)
        q = rotate(q.view(len(x), cfg.n_heads, -1), cos, sin)
        q = q.view(blocks, -1, cfg.n_heads, cfg.head_dim).transpose(1, 2)
        own = rotate(self.window_kv(xq, prefix)[:, None], cos, sin)
        own = quant.fp8(own.view(blocks, -1, cfg.head_dim))
        kv = torch.cat([kept, own], dim=1)
        kv = F.pad(kv, (0, 0, 0, bias.shape[-1] - kv.shape[1]))
        sink = self.params.fp32(f"{prefix}.attn_sink")
        o, _ = attend(q, kv, bias, sink, cfg.head_dim**-0.5)
        o = rotate(o.transpose(1, 2).reshape(len(x), cfg.n_heads, -1), cos, -sin)
        return self.project(o.flatten(1), prefix)

    def _heads(self, hidden: Tensor, ids: Tensor, at: Tensor, backbone: Parameters) -> Drafted:
        cfg, last = self.config, f"mtp.{self.config.n_mtp_layers - 1}"
        n = cfg.dspark_block_size
        x = mixes.rms_norm(hidden, self.params[f"{last}.norm.weight"], cfg.norm_eps)
        logits = quant.linear_f32(x, backbone["head.weight"].detach())
        before = ids.gather(1, at.flatten(1)).flatten()
        embedding = quant.rows(self.params[f"{last}.markov_head.embed.weight"], before)
        logits = logits + quant.linear_f32(
            embedding, self.params[f"{last}.markov_head.head.weight"]
        )
        features = torch.cat([hidden.detach().float(), embedding.detach().float()], dim=-1)
        weight = self.params[f"{last}.confidence_head.proj.weight"].float()
        return Drafted(logits.view(-1, n, cfg.vocab_size), (features @ weight.t()).view(-1, n))


def losses(drafted: Drafted, ids: Tensor, weights: Tensor, main: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross entropy of drafts and of confidences, over positions that answers hold."""
    n = drafted.logits.shape[1]
    target_at = (main[..., None] + torch.arange(2, n + 2, device=ids.device)).flatten(1)
    target = ids.gather(1, target_at).view(-1, n)
    counts = (weights.gather(1, target_at).view(-1, n) >= 1).float()
    entropy = F.cross_entropy(drafted.logits.flatten(0, 1), target.flatten(), reduction="none")
    right = (drafted.logits.argmax(-1) == target).float()
    sure = F.binary_cross_entropy_with_logits(drafted.confidence, right, reduction="none")
    total = counts.sum().clamp(min=1)
    return (entropy.view_as(counts) * counts).sum() / total, (sure * counts).sum() / total


def anchors(weights: Tensor, count: int, block: int) -> Tensor:
    """int64 `[B, count]` random main positions whose first draft is an answer's token."""
    length = weights.shape[1]
    usable = (weights >= 1).float()
    usable = F.pad(usable[:, 2:], (0, 2))
    usable[:, length - block - 1 :] = 0
    usable = usable + 1e-6  # a row without an answer still gives positions; they count nothing
    usable[:, length - block - 1 :] = 0
    return torch.multinomial(usable, count, replacement=True)
