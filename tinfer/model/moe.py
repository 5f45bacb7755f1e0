"""Mixture of experts: gate, routed FP4 experts, one shared FP8 expert."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tinfer import ops
from tinfer.formats import Fp4Group32, Fp8Block32
from tinfer.model.batch import Batch
from tinfer.model.linear import cast, linear

# FP4 as released, or folded losslessly into fp8 tiles by a converter; stacked over experts.
ExpertWeight = Fp4Group32 | Fp8Block32


@dataclass(frozen=True)
class Gate:
    weight: Tensor  # bf16 [E, D]
    bias: Tensor  # fp32 [E]
    bias_vl: Tensor | None  # fp32 [E]: replaces `bias` for image rows
    topk: int
    route_scale: float
    score_func: str
    temperature: float
    normalize: bool

    def __call__(self, x: Tensor, image: Tensor | None) -> tuple[Tensor, Tensor]:
        """int32 ids and fp32 weights `[T, k]`."""
        logits = ops.linear_fp32(x, self.weight)
        if self.temperature != 1.0:
            logits = logits / self.temperature
        return ops.moe_gate(
            logits,
            self.bias,
            self.bias_vl,
            image,
            self.topk,
            self.route_scale,
            self.score_func,
            self.normalize,
        )


@dataclass(frozen=True)
class MoE:
    name: str
    gate: Gate
    w13: ExpertWeight  # [E, 2I, D] unpacked: the rows of w1, then those of w3
    w2: ExpertWeight  # [E, D, I] unpacked
    shared_w13: Fp8Block32
    shared_w2: Fp8Block32
    limit: float

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """bf16 `[T, D]` -> bf16 `[T, D]`."""
        ids, weights = self.gate(x, batch.image)
        ids = batch.trace(f"{self.name}.gate_indices", ids)
        weights = batch.trace(f"{self.name}.gate_weights", weights)
        xc = cast(x)
        hidden_q, hidden_s = ops.swiglu_cast(linear(xc, self.shared_w13), self.limit, None)
        shared = ops.linear_fp8(hidden_q, hidden_s, self.shared_w2.weight, self.shared_w2.scale)
        return ops.moe_experts(
            xc.q,
            xc.s,
            ids,
            weights,
            self.w13.weight,
            self.w13.scale,
            self.w2.weight,
            self.w2.scale,
            self.limit,
            shared,
        )
