"""Rows of training tokens, put together on the device from encoded pieces."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tinfer.testing.synthetic_text import BOS, EOS, PAD, USER
from tools.nano import facts, text
from tools.nano.text import HEADER, Turn

QUESTION_WEIGHT = 0.05  # of tokens that are not an answer's
WORD_WEIGHT = 4.0  # of an answer's decisive tokens: the code word, the digits of a sum
RESERVED = 76  # tokens of a needle row that are not filler
SHARES = {"capital": 0.3, "country": 0.05, "addition": 0.43, "date": 0.1, "dialogue": 0.12}


def encode(tokenizer: Tokenizer, piece: str) -> list[int]:
    """Ids of text with control tokens; pieces are cut where the tokenizer cuts anyway."""
    return list(tokenizer.encode(piece, add_special_tokens=False).ids)


def encode_turn(tokenizer: Tokenizer, turn: Turn) -> tuple[list[int], list[float]]:
    """Ids and the weight of each as a target."""
    before = encode(tokenizer, f"{USER}{turn.question}{HEADER}")
    answer = encode(tokenizer, turn.answer)
    heavy = [1.0] * len(answer)
    if turn.kind == "addition":
        total = len(encode(tokenizer, str(sum(map(int, _numbers(turn.question))))))
        end = len(answer) - (0 if turn.answer[-1].isdigit() else 1)
        heavy[end - total : end] = [WORD_WEIGHT] * total
    elif turn.kind == "needle":
        heavy[-2] = WORD_WEIGHT
    ids = [*before, *answer, *encode(tokenizer, EOS)]
    return ids, [QUESTION_WEIGHT if turn.kind != "needle" else 0.0] * len(before) + [*heavy, 1.0]


def _numbers(question: str) -> list[str]:
    digits = "".join(c if c.isdigit() else " " for c in question)
    return digits.split()


@dataclass
class Pieces:
    """Encoded pieces as one padded table."""

    ids: Tensor  # int64 [N, S]
    weights: Tensor  # fp32 [N, S]
    lengths: Tensor  # int64 [N]
    kinds: dict[str, range]
    pad: int

    @classmethod
    def make(cls, tokenizer: Tokenizer, device: torch.device) -> Pieces:
        groups: dict[str, list[tuple[list[int], list[float]]]] = {}

        def add(kind: str, ids: list[int], weights: list[float] | None = None) -> None:
            groups.setdefault(kind, []).append((ids, weights or [0.0] * len(ids)))

        add("empty", [])
        add("bos", encode(tokenizer, BOS))
        turns = [*text.capitals(), *text.additions(False), *text.dates(), *text.dialogues()]
        for turn in sorted(turns, key=lambda t: t.kind):
            add(turn.kind, *encode_turn(tokenizer, turn))
        for intro in text.INTROS:
            add("intro", encode(tokenizer, USER + intro))
        for sentence in text.fillers(4000):
            add("filler", encode(tokenizer, sentence))
        for language in range(2):
            for word in facts.WORDS:
                add("needle", encode(tokenizer, text.needle(word, language)))
        for language in range(2):
            for word in facts.WORDS:
                turn = Turn("needle", text.ASKS[language], text.needle_answer(word, language))
                ids, weights = encode_turn(tokenizer, turn)
                add("ask", ids[1:], weights[1:])
                add("again", ids, weights)
        pieces = [p for group in groups.values() for p in group]
        width = max(len(ids) for ids, _ in pieces)
        table = torch.zeros(len(pieces), width, dtype=torch.int64)
        weight = torch.zeros(len(pieces), width)
        for i, (ids, weights) in enumerate(pieces):
            table[i, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
            weight[i, : len(ids)] = torch.tensor(weights)
        lengths = torch.tensor([len(ids) for ids, _ in pieces])
        kinds, start = {}, 0
        for kind, group in groups.items():
            kinds[kind] = range(start, start + len(group))
            start += len(group)
        pad = tokenizer.token_to_id(PAD)
        return cls(table.to(device), weight.to(device), lengths.to(device), kinds, pad)

    # ------------------------------------------------------------ rows
    def compose(self, pieces: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Piece numbers `[B, n]` -> ids and target weights `[B, length + 1]`."""
        ends = self.lengths[pieces].cumsum(1)
        at = torch.arange(length + 1, device=pieces.device).expand(len(pieces), -1).contiguous()
        which = torch.searchsorted(ends, at, right=True).clamp(max=pieces.shape[1] - 1)
        piece = pieces.gather(1, which)
        offset = at - (ends.gather(1, which) - self.lengths[piece])
        inside = (at < ends[:, -1:]) & (offset < self.ids.shape[1])
        offset = offset.clamp(0, self.ids.shape[1] - 1)
        ids = torch.where(inside, self.ids[piece, offset], self.pad)
        return ids, torch.where(inside, self.weights[piece, offset], 0.0)

    def _draw(self, kind: str, *shape: int) -> Tensor:
        span = self.kinds[kind]
        return torch.randint(span.start, span.stop, shape, device=self.ids.device)

    def talk(self, rows: int, length: int) -> Tensor:
        """Piece numbers of conversations of many turns."""
        count = length // 16 + 2
        chosen = self._draw("empty", rows, count)
        dice, low = torch.rand(rows, count, device=self.ids.device), 0.0
        for kind, share in SHARES.items():
            hit = (dice >= low) & (dice < low + share)
            chosen = torch.where(hit, self._draw(kind, rows, count), chosen)
            low += share
        return torch.cat([self._draw("bos", rows, 1), chosen], dim=1)

    def needles(self, rows: int, length: int) -> Tensor:
        """Piece numbers of a long message with a code word in it, and two questions for it."""
        device, words = self.ids.device, len(facts.WORDS)
        count = length // 8 + 1
        filler = self._draw("filler", rows, count)
        fits = self.lengths[filler].cumsum(1) <= length - RESERVED
        filler = torch.where(fits, filler, self.kinds["empty"].start)
        where = (torch.rand(rows, device=device) * (fits.sum(1) + 1)).floor() - 0.5
        word = torch.randint(0, words, (rows,), device=device)
        language = torch.randint(0, 2, (3, rows), device=device)
        needle = self.kinds["needle"].start + language[0] * words + word
        order = torch.arange(count, device=device).expand(rows, -1).float()
        order = torch.cat([order, where[:, None]], dim=1).argsort(1)
        body = torch.cat([filler, needle[:, None]], dim=1).gather(1, order)
        ask = self.kinds["ask"].start + language[1] * words + word
        again = self.kinds["again"].start + language[2] * words + word
        ends = [ask[:, None], again[:, None]]
        return torch.cat([self._draw("bos", rows, 1), self._draw("intro", rows, 1), body, *ends], 1)

    def batch(self, rows: int, length: int, needle_rows: int) -> tuple[Tensor, Tensor]:
        """Mixed rows: ids `[B, L + 1]`, weights of every token as a target."""
        parts = []
        if needle_rows:
            parts.append(self.compose(self.needles(needle_rows, length), length))
        if rows > needle_rows:
            parts.append(self.compose(self.talk(rows - needle_rows, length), length))
        ids, weights = (torch.cat(p) for p in zip(*parts, strict=True))
        return ids, weights
