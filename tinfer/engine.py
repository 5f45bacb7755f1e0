"""Requests in, tokens out: chunked prefill, decode in one flat batch, sampling, logprobs.

Each step runs one forward pass over the rows of all active sequences: the next prompt chunk of
those still in prefill and one token of those that decode. A request's draws depend on its own
logits, parameters, seed and positions alone, never on what else is in the batch.

With drafts a decode row is followed by the tokens that the draft stages propose. Every row is
drawn from as ever, and the next one counts while the draft is what was drawn: the tokens are
those of the run without drafts, at any temperature, in fewer passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinfer import ops
from tinfer.cache import Cache, CacheSize
from tinfer.compat.masses import status_text
from tinfer.logit_control import LogitControl, Row, logprobs_of
from tinfer.model.batch import Batch, ImageRows, Trace, no_trace
from tinfer.model.build import Model
from tinfer.request import Request, Step, TokenLogprob


@dataclass
class _Sequence:
    index: int
    request: Request
    slot: int
    done: int = 0  # tokens already in the cache
    generated: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)  # proposed behind the newest token
    prompt_logits: list[Tensor] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    def pending(self, chunk: int) -> list[int]:
        """The tokens of the next forward pass."""
        prompt = self.request.prompt_ids
        if self.done < len(prompt):
            return list(prompt[self.done : self.done + chunk])
        return [*self.generated[-1:], *self.drafts]

    @property
    def in_prefill(self) -> bool:
        return self.done < len(self.request.prompt_ids)


class Engine:
    """Runs requests over one model and one cache; with `drafts`, several tokens a pass."""

    def __init__(
        self, model: Model, size: CacheSize, trace: Trace = no_trace, drafts: bool = False
    ) -> None:
        if drafts and model.dspark is None:
            raise ValueError("engine: drafts must be False: the model has no draft stages")
        self.model, self.size, self.trace, self.drafts = model, size, trace, drafts
        self.decode_steps = self.decoded = 0  # of one sequence each; tokens that came of them
        self.cache = Cache(model.config, size, model.device)
        self.control = LogitControl(size.sequences, model.config.vocab_size, model.device)
        self._cancelled: set[int] = set()

    def cancel(self, request: int) -> None:
        """End a request of the running `generate` after its newest token."""
        self._cancelled.add(request)

    def check(self, request: Request) -> None:
        """ValueError for a request that this engine cannot run."""
        prompt, vocab = request.prompt_ids, self.model.config.vocab_size
        if not len(prompt):
            raise ValueError("prompt must have at least one token, got none")
        bad = [i for i in (*prompt, *request.force_ids) if not 0 <= i < vocab]
        if bad:
            raise ValueError(f"token ids must be in [0, {vocab}), got {bad[0]}")
        if len(prompt) > self.size.length:
            raise ValueError(
                f"prompt must fit the context of {self.size.length} tokens, got {len(prompt)}"
            )

    def generate(self, requests: Sequence[Request]) -> Iterator[Step]:
        """Yield every request's tokens as they come; all requests are checked first."""
        for request in requests:
            self.check(request)
        self._cancelled.clear()
        waiting = deque(enumerate(requests))
        free = list(range(self.size.sequences))
        active: list[_Sequence] = []
        while waiting or active:
            while waiting and free:
                index, request = waiting.popleft()
                active.append(_Sequence(index, request, free.pop(0)))
                self.control.begin(active[-1].slot, request)
            for step in self._step(active):
                if all(s.index != step.request for s in active):
                    continue  # cancelled by a token before this one
                yield step
                if step.finish_reason is not None or step.request in self._cancelled:
                    ended = next(s for s in active if s.index == step.request)
                    active.remove(ended)
                    free.append(ended.slot)

    # ------------------------------------------------------------ one forward pass
    @torch.inference_mode()
    def _step(self, active: list[_Sequence]) -> list[Step]:
        if self.drafts:
            self._propose([s for s in active if not s.in_prefill])
        chunks = [(s, s.pending(self.size.chunk)) for s in active]
        batch = self._batch(chunks)
        hidden = self.model.backbone(batch, self.cache)
        if self.model.dspark is not None and hidden.taps is not None:
            self.model.dspark.seed(hidden.taps, batch.positions, batch.seq, self.cache)
        ready: list[tuple[_Sequence, int]] = []  # and the first of its rows to draw from
        rows: list[int] = []
        end = 0
        for sequence, tokens in chunks:
            start, end = end, end + len(tokens)
            if sequence.in_prefill:
                self._keep_prompt(sequence, hidden.x[start:end])
                sequence.done += len(tokens)
                start = end - 1
            else:
                sequence.done += 1
                self.decode_steps += 1
            if not sequence.in_prefill:
                ready.append((sequence, len(rows)))
                rows += range(start, end)
        if not ready:
            return []
        picked = torch.tensor(rows, device=hidden.x.device)
        return self._draw(ready, self.model.backbone.logits(hidden.x[picked]))

    def _propose(self, decoding: list[_Sequence]) -> None:
        """Draft behind the newest token of each sequence, within its context."""
        if not decoding:
            return
        assert self.model.dspark is not None
        last = [s.done - 1 for s in decoding]
        host = [[s.generated[-1] for s in decoding], last, [s.slot for s in decoding]]
        tokens, main, slots = torch.tensor(host).to(self.model.device)
        draft = self.model.dspark.propose(tokens, main, slots, max(last), self.cache, _most_likely)
        for s, proposed in zip(decoding, draft.tokens.tolist(), strict=True):
            s.drafts = proposed[: self.size.length - s.done - 1]

    def _draw(self, ready: list[tuple[_Sequence, int]], logits: Tensor) -> list[Step]:
        """One token a sequence, and one more behind every draft that was right."""
        steps: list[Step] = []
        while ready:
            rows = [row for _, row in ready]
            drawn_from = logits if len(rows) == len(logits) else logits[rows]
            new = self._pick([s for s, _ in ready], drawn_from)
            steps += new
            agreed = []
            for (s, row), step in zip(ready, new, strict=True):
                if step.finish_reason is None and s.drafts and s.drafts.pop(0) == step.token:
                    s.done += 1
                    agreed.append((s, row + 1))
                else:
                    s.drafts = []
            ready = agreed
        return steps

    def _batch(self, chunks: list[tuple[_Sequence, list[int]]]) -> Batch:
        batch = Batch.of(
            [(s.slot, s.done, tokens) for s, tokens in chunks], self.model.device, self.trace
        )
        if all(s.request.image is None for s, _ in chunks):
            return batch
        return self._with_images(batch, chunks)

    def _with_images(self, batch: Batch, chunks: list[tuple[_Sequence, list[int]]]) -> Batch:
        """Mark image rows and place their embeddings; a span may straddle chunks."""
        marks: list[bool] = []
        parts: list[Tensor] = []
        for s, tokens in chunks:
            image = list(s.request.image or ()) if s.in_prefill else []
            mine = image[s.done : s.done + len(tokens)] or [False] * len(tokens)
            if s.request.image_rows is not None:
                before = sum(image[: s.done])
                parts.append(s.request.image_rows[before : before + sum(mine)])
            marks.extend(mine)
        where = [i for i, m in enumerate(marks) if m]
        device = self.model.device
        rows = ImageRows(
            torch.cat(parts).to(device), torch.tensor(where, dtype=torch.int64, device=device)
        )
        mask = torch.tensor(marks, device=device)
        return Batch(
            batch.ids, batch.positions, batch.seq, batch.max_position, mask, rows, batch.trace
        )

    def _keep_prompt(self, s: _Sequence, x: Tensor) -> None:
        """Logits and logprobs of prompt rows, for the requests that want them."""
        params = s.request.params
        if not s.request.prompt_logits and params.prompt_logprobs is None:
            return
        logits = self.model.backbone.logits(x)
        if s.request.prompt_logits:
            s.prompt_logits.append(logits)
        following = list(s.request.prompt_ids[s.done + 1 : s.done + 1 + len(x)])
        if params.prompt_logprobs is not None and following:
            rows = logits[: len(following)]
            s.prompt_logprobs += logprobs_of(rows, following, params.prompt_logprobs, None)

    # ------------------------------------------------------------ choosing tokens
    def _pick(self, ready: list[_Sequence], logits: Tensor) -> list[Step]:
        rows = [Row(s.slot, s.request, s.generated) for s in ready]
        tokens, status = self._sample(ready, self.control(logits, rows))
        forced = [
            s.request.force_ids[len(s.generated)]
            if len(s.generated) < len(s.request.force_ids)
            else t
            for s, t in zip(ready, tokens, strict=True)
        ]
        self.control.produced(rows, forced)
        scores = self._scores(ready, logits, forced)
        return [
            self._advance(s, logits[i], forced[i], status[i], scores[i])
            for i, s in enumerate(ready)
        ]

    def _sample(self, ready: list[_Sequence], logits: Tensor) -> tuple[list[int], list[int]]:
        """Host lists of tokens and status words: the one device sync of a step."""
        params = [s.request.params for s in ready]
        device = logits.device
        floats = torch.tensor([[p.temperature, p.top_p, p.min_p] for p in params])
        floats = floats.to(device, torch.float32)
        wrapped = [(p.seed + 2**63) % 2**64 - 2**63 for p in params]  # u64 bits as int64
        whole = torch.tensor([wrapped, [s.done for s in ready], [p.top_k for p in params]])
        whole = whole.to(device)
        tokens, status = ops.sample(
            logits,
            floats[:, 0].contiguous(),
            whole[2].int(),
            floats[:, 1].contiguous(),
            floats[:, 2].contiguous(),
            whole[0],
            whole[1],
        )
        both: list[list[int]] = torch.stack([tokens, status.long()]).tolist()
        return both[0], both[1]

    def _scores(
        self, ready: list[_Sequence], logits: Tensor, tokens: list[int]
    ) -> list[TokenLogprob | None]:
        """Logprobs of the chosen tokens, for the requests that want them."""
        wanted = [s.request.params.logprobs for s in ready]
        if all(n is None for n in wanted):
            return [None] * len(ready)
        # Raw logits are at temperature 1; greedy rows (0) have no other temperature.
        scales = [
            p.temperature if p.logprobs_after_temperature and p.temperature > 0 else 1.0
            for p in (s.request.params for s in ready)
        ]
        temperature = torch.tensor(scales, dtype=torch.float32, device=logits.device)
        found = logprobs_of(logits, tokens, max(n or 0 for n in wanted), temperature)
        return [
            None if n is None else (own, top[:n])
            for (own, top), n in zip(found, wanted, strict=True)
        ]

    def _advance(
        self,
        s: _Sequence,
        logits: Tensor,
        token: int,
        status: int,
        score: TokenLogprob | None,
    ) -> Step:
        """Append the token to its sequence and say whether that ends it."""
        params = s.request.params
        prompt_logits = torch.cat(s.prompt_logits) if s.prompt_logits else None
        prompt = (prompt_logits, tuple(s.prompt_logprobs))
        s.prompt_logits, s.prompt_logprobs = [], []
        if params.max_new_tokens == 0:
            return Step(s.index, None, logits, None, (), "length", *prompt)
        if status != 0 and len(s.generated) >= len(s.request.force_ids):
            error = f"error: {status_text(status)}"
            return Step(s.index, None, logits, None, (), error, *prompt)
        s.generated.append(token)
        self.decoded += len(s.generated) > 1  # the first one comes of the prompt
        reason = self._finish_reason(s, token)
        own, top = (None, ()) if score is None else score
        return Step(s.index, token, logits, own, top, reason, *prompt)

    def _finish_reason(self, s: _Sequence, token: int) -> str | None:
        """Why the sequence ends with this token, or None."""
        params = s.request.params
        if token in params.stop_ids and len(s.generated) > len(s.request.force_ids):
            return "stop"
        if len(s.generated) >= params.max_new_tokens or s.done >= self.size.length:
            return "length"
        return None


def _most_likely(logits: Tensor) -> Tensor:
    return logits.argmax(-1)
