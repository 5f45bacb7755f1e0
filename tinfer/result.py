"""What one request has produced so far: its JSON record, its logits as a file."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tinfer.request import Request, Step, TokenLogprob
from tinfer.tokenizer import TextStream


@dataclass
class Result:
    """Takes a request's steps in, as they come."""

    request: Request
    stream: TextStream | None
    started: float
    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    prompt_logits: Tensor | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    first_token: float | None = None
    ended: float | None = None

    def add(self, step: Step, keep_logits: bool) -> str:
        """Take a step in; return the text that has become certain."""
        now = time.perf_counter()
        self.first_token = self.first_token or now
        if keep_logits:
            self.logits.append(step.logits.float().cpu())
        if step.prompt_logits is not None:
            self.prompt_logits = step.prompt_logits.float().cpu()
        self.prompt_logprobs = step.prompt_logprobs or self.prompt_logprobs
        new = ""
        if step.token is not None:
            self.ids.append(step.token)
            is_stop = step.finish_reason == "stop"  # the end marker is an id, not text
            if self.stream is not None and not is_stop:
                new = self.stream.push(step.token)
        if step.logprob is not None:
            self.logprobs.append(step.logprob)
            self.top_logprobs.append(list(step.top_logprobs))
        self.finish_reason = step.finish_reason
        if self.stream is not None and self.stream.stopped is not None:
            self.finish_reason = "stop"
        if self.finish_reason is not None:
            self.ended = now
            new += self.stream.finish() if self.stream is not None else ""
        self.text += new
        return new

    def record(self, load_seconds: float) -> dict[str, Any]:
        """The JSON object of this request."""
        first, end = self.first_token or self.started, self.ended or time.perf_counter()
        decode, prompt = end - first, self.request.prompt_ids
        wanted = self.request.params.logprobs is not None
        of_prompt = self.request.params.prompt_logprobs is not None
        return {
            "prompt_ids": list(prompt),
            "ids": self.ids,
            "text": self.text if self.stream is not None else None,
            "logprobs": self.logprobs if wanted else None,
            "top_logprobs": [dict(t) for t in self.top_logprobs] if wanted else None,
            "prompt_logprobs": [None, *(p for p, _ in self.prompt_logprobs)] if of_prompt else None,
            "finish_reason": self.finish_reason,
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(self.ids),
                "total_tokens": len(prompt) + len(self.ids),
            },
            "timing": {
                "load_s": round(load_seconds, 4),
                "first_token_s": round(first - self.started, 4),
                "decode_s": round(decode, 4),
                "decode_tokens_per_s": round((len(self.ids) - 1) / decode, 2) if decode else None,
            },
        }


def save_logits(path: Path, results: list[Result]) -> None:
    """`logits` and `prompt_logits`; with several requests, `.0`, `.1`, … behind the names."""
    tensors = {}
    for i, result in enumerate(results):
        suffix = f".{i}" if len(results) > 1 else ""
        tensors[f"logits{suffix}"] = torch.stack(result.logits)
        if result.prompt_logits is not None:
            tensors[f"prompt_logits{suffix}"] = result.prompt_logits
    try:
        save_file(tensors, str(path))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"--logits-out {path} cannot be written: {error}") from error
