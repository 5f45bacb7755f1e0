"""What changes logits before sampling: penalties, bias, bans; all per request, all optional."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinfer import ops
from tinfer.request import Request, SamplingParams, TokenLogprob


@dataclass(frozen=True)
class Row:
    """One row of logits: its sequence's slot, request and output so far."""

    slot: int
    request: Request
    generated: Sequence[int]

    @property
    def params(self) -> SamplingParams:
        return self.request.params


def _penalized(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0


def _table(rows: list[list[int]], device: torch.device) -> Tensor:
    """int64 `[R, M]`, short rows filled with -1."""
    width = max((len(r) for r in rows), default=0)
    return torch.tensor([r + [-1] * (width - len(r)) for r in rows], device=device)


class LogitControl:
    """Applies the requests' wishes in the order: penalties, bias, bans.

    Token counts live on the device, `[sequences, V]`, once any request has a penalty.
    """

    def __init__(self, sequences: int, vocab: int, device: torch.device) -> None:
        self._shape, self._device = (sequences, vocab), device
        self._counts: Tensor | None = None

    def begin(self, slot: int, request: Request) -> None:
        """A slot takes up a new request: forget the last one's tokens, note the prompt's."""
        if not _penalized(request.params):
            return
        if self._counts is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        self._counts[slot] = 0
        self._count([slot] * len(request.prompt_ids), list(request.prompt_ids), True)

    def produced(self, rows: list[Row], tokens: list[int]) -> None:
        """Note the tokens that were chosen."""
        mine = [(r.slot, t) for r, t in zip(rows, tokens, strict=True) if _penalized(r.params)]
        if mine:
            self._count([s for s, _ in mine], [t for _, t in mine], False)

    def __call__(self, logits: Tensor, rows: list[Row]) -> Tensor:
        """Logits to sample from; the given ones are not changed."""
        early = [len(r.generated) < r.params.min_new_tokens for r in rows]
        penalized = any(_penalized(r.params) for r in rows)
        biased = any(r.params.logit_bias for r in rows)
        worded = any(r.params.bad_words for r in rows)
        if not (penalized or biased or worded or any(early)):
            return logits
        logits = logits.clone()
        if penalized:
            self._penalties(logits, rows)
        if biased:
            self._bias(logits, rows)
        if any(early):
            stop = [list(r.params.stop_ids) if e else [] for r, e in zip(rows, early, strict=True)]
            ops.ban_tokens_(logits, _table(stop, self._device), None)
        if worded:
            self._bad_words(logits, rows)
        return logits

    def _count(self, slots: list[int], tokens: list[int], in_prompt: bool) -> None:
        if self._counts is None:
            return
        packed = torch.tensor([slots, tokens], device=self._device)
        ops.count_tokens_(self._counts, packed[0], packed[1], in_prompt)

    def _penalties(self, logits: Tensor, rows: list[Row]) -> None:
        if self._counts is None:
            return
        slots = [r.slot if _penalized(r.params) else -1 for r in rows]
        values = torch.tensor(
            [
                [
                    r.params.repetition_penalty,
                    r.params.frequency_penalty,
                    r.params.presence_penalty,
                ]
                for r in rows
            ],
            dtype=torch.float32,
            device=self._device,
        )
        repetition, frequency, presence = (v.contiguous() for v in values.unbind(1))
        where = torch.tensor(slots, device=self._device)
        ops.apply_penalties_(logits, self._counts, where, repetition, frequency, presence, None)

    def _bias(self, logits: Tensor, rows: list[Row]) -> None:
        ids = _table([[i for i, _ in r.params.logit_bias] for r in rows], self._device)
        bias = torch.zeros(ids.shape, dtype=torch.float32)
        for row, r in enumerate(rows):
            for column, (_, value) in enumerate(r.params.logit_bias):
                bias[row, column] = value
        ops.add_logit_bias_(logits, ids, bias.to(self._device))

    def _bad_words(self, logits: Tensor, rows: list[Row]) -> None:
        longest = max(len(w) for r in rows for w in r.params.bad_words)
        count = max(len(r.params.bad_words) for r in rows)
        words = torch.full((len(rows), count, longest), -1)
        history = torch.full((len(rows), longest - 1), -1)
        for row, r in enumerate(rows):
            for at, word in enumerate(r.params.bad_words):
                words[row, at, longest - len(word) :] = torch.tensor(word)
            before = [*r.request.prompt_ids, *r.generated][-(longest - 1) :] if longest > 1 else []
            if before:
                history[row, -len(before) :] = torch.tensor(before)
        ops.ban_sequences_(logits, words.to(self._device), history.to(self._device))


def logprobs_of(
    logits: Tensor, tokens: list[int], top_n: int, temperature: Tensor | None
) -> list[TokenLogprob]:
    """Logprob of each row's token, and of the row's `top_n` most likely ones."""
    chosen = torch.tensor(tokens, device=logits.device)
    own, values, ids = ops.token_logprobs(logits, chosen, top_n, temperature)
    rows = zip(own.tolist(), values.tolist(), ids.tolist(), strict=True)
    return [(o, tuple(zip(i, v, strict=True))) for o, v, i in rows]
