"""Accuracy of the batched forward pass: whole answers, every token the most likely one."""

from __future__ import annotations

import random
from collections.abc import Iterable

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tinfer.testing.synthetic_text import BOS, PAD
from tools.nano import text
from tools.nano.draft import Draft, anchors
from tools.nano.model import Backbone, Pass
from tools.nano.rows import Pieces, encode, encode_turn
from tools.nano.text import Turn

ROWS, LENGTH, TOKENS = 256, 64, 16384


def evaluation_turns(seed: int = 1) -> dict[str, list[Turn]]:
    """Every capital, 300 held-out sums, all dates and dialogues."""
    sums = text.additions(True)
    random.Random(seed).shuffle(sums)
    return {
        "capitals": text.capitals(),
        "addition, held out": sums[:300],
        "dates": text.dates(),
        "dialogues": text.dialogues(),
    }


@torch.no_grad()
def exact(model: Backbone, ids: Tensor, weights: Tensor, sparse: bool = True) -> float:
    """Share of rows whose answer tokens are all predicted, given those before."""
    rows, length = ids.shape[0], ids.shape[1] - 1
    model.params.refresh()
    x = model(ids[:, :length], Pass(model.shape(rows, length), sparse))
    right = (model.logits(x).argmax(-1).view(rows, length) == ids[:, 1:]) | (weights[:, 1:] < 1)
    return float(right.all(1).float().mean())


def turn_rows(
    tokenizer: Tokenizer, turns: Iterable[Turn], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Single-turn conversations, padded."""
    ids, weights = [], []
    for turn in turns:
        row, weight = encode_turn(tokenizer, turn)
        row, weight = [*encode(tokenizer, BOS), *row], [0.0, *weight]
        fill = LENGTH + 1 - len(row)
        ids.append(row + [tokenizer.token_to_id(PAD)] * fill)
        weights.append(weight + [0.0] * fill)
    return torch.tensor(ids, device=device), torch.tensor(weights, device=device)


def accuracies(
    model: Backbone, tokenizer: Tokenizer, pieces: Pieces, lengths: Iterable[int], rows: int
) -> dict[str, float]:
    """Of every task; needles at each length, `rows` of them."""
    device, found = model.params.tiles.device, {}
    for name, turns in evaluation_turns().items():
        ids, weights = turn_rows(tokenizer, turns, device)
        parts = zip(ids.split(ROWS), weights.split(ROWS), strict=True)
        found[name] = sum(exact(model, i, w) * len(i) for i, w in parts) / len(ids)
    for length in lengths:
        ids, weights = pieces.compose(pieces.needles(rows, length), length)
        at_once = max(TOKENS // length, 1)
        parts = zip(ids.split(at_once), weights.split(at_once), strict=True)
        found[f"needle {length}"] = sum(exact(model, i, w) * len(i) for i, w in parts) / rows
    return found


@torch.no_grad()
def accepted(model: Backbone, draft: Draft, pieces: Pieces, rows: int = 64) -> float:
    """Mean tokens a step: leading drafts that are right, and the one the backbone adds."""
    length, n = 128, model.config.dspark_block_size
    ids, weights = pieces.compose(pieces.talk(rows, length), length)
    main = anchors(weights[:, :length], 16, n)
    run = Pass(model.shape(rows, length), sparse=True)
    model.params.refresh()
    model(ids[:, :length], run)
    draft.params.refresh()
    drafted = draft(torch.cat(run.taps, -1), ids[:, :length], main, model.params)
    at = (main[..., None] + torch.arange(2, n + 2, device=ids.device)).flatten(1)
    target = ids.gather(1, at).view(-1, n)
    # Past the end of an answer nothing counts.
    counts = (weights.gather(1, at).view(-1, n) >= 1).long().cumprod(1)
    leading = ((drafted.logits.argmax(-1) == target).long() * counts).cumprod(1).sum(1)
    return float((leading + 1).float().mean())
