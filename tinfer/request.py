"""What a request asks for and what it gets: plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

from torch import Tensor

TopLogprobs = tuple[tuple[int, float], ...]  # (token, logprob), most likely first
TokenLogprob = tuple[float, TopLogprobs]  # of the token itself, and of the most likely ones


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen. Every cut is off at its default."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_new_tokens: int = 200
    stop_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0  # stop ids are banned before
    logprobs: int | None = None  # top-N beside each token's own logprob; None: none at all
    logprobs_after_temperature: bool = False
    prompt_logprobs: int | None = None  # the same for every prompt token but the first
    repetition_penalty: float = 1.0  # over prompt and output; > 1 discourages
    frequency_penalty: float = 0.0  # per occurrence in the output
    presence_penalty: float = 0.0  # once for occurring in the output
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed

    def __post_init__(self) -> None:
        rules = {
            "temperature": (self.temperature >= 0, ">= 0", self.temperature),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]", self.top_p),
            "top_k": (self.top_k >= 0, ">= 0 (0: off)", self.top_k),
            "min_p": (0 <= self.min_p <= 1, "in [0, 1]", self.min_p),
            "max_new_tokens": (self.max_new_tokens >= 0, ">= 0", self.max_new_tokens),
            "min_new_tokens": (self.min_new_tokens >= 0, ">= 0", self.min_new_tokens),
            "repetition_penalty": (self.repetition_penalty > 0, "> 0", self.repetition_penalty),
            "frequency_penalty": (isfinite(self.frequency_penalty), "finite", "not a number"),
            "presence_penalty": (isfinite(self.presence_penalty), "finite", "not a number"),
            "logit_bias": (
                len({i for i, _ in self.logit_bias}) == len(self.logit_bias),
                "one value per token id",
                self.logit_bias,
            ),
            "bad_words": (all(self.bad_words), "sequences of at least one token", "an empty one"),
        }
        for name in ("logprobs", "prompt_logprobs"):
            n = getattr(self, name)
            rules[name] = (n is None or n >= 0, ">= 0", n)
        for name, (ok, rule, got) in rules.items():
            if not ok:
                raise ValueError(f"{name} must be {rule}, got {got}")


@dataclass(frozen=True)
class Request:
    """One prompt. `force_ids` are taken instead of the first sampled tokens."""

    prompt_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    force_ids: Sequence[int] = ()
    prompt_logits: bool = False
    image: Sequence[bool] | None = None  # the prompt rows inside image spans
    image_rows: Tensor | None = None  # bf16 [n, D]: one embedding for each of those rows


@dataclass(frozen=True)
class Step:
    """One token of one request. The last step of a request has a finish reason.

    `token` is None on the single step of a request that asks for no tokens, and where the
    request ends in an error.
    """

    request: int
    token: int | None
    logits: Tensor  # fp32 [V]: what the token was drawn from, on the model's device
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: str | None = None  # "stop", "length" or "error: …"
    prompt_logits: Tensor | None = None  # fp32 [prompt, V], on a request's first step
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of prompt tokens 1.., on the first step
