"""A checkpoint's weights as training parameters: to measure the forward pass with and without
the rounding of activations and caches. What training kept in fp32 is not in the file, so the
weights are the stored ones either way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinfer.checkpoint import Checkpoint
from tinfer.compat.casts import cast_back
from tinfer.formats import Fp4Group32, Fp8Block32
from tinfer.runtime import Loaded
from tinfer.tokenizer import Tokenizer
from tools.nano import measure, quant
from tools.nano.model import Backbone
from tools.nano.params import Parameters
from tools.nano.questions import Question, prompt_ids

TOKENS = {"cpu": 1024, "cuda": 8192}  # of a batch


def value(checkpoint: Checkpoint, name: str) -> Tensor:
    """fp32, exactly what is stored."""
    stored = checkpoint.tensor(name)
    scale = name[: -len("weight")] + "scale"
    if scale not in checkpoint.names():
        return stored.float()
    factor = checkpoint.tensor(scale)
    if ".engram.embed." in name:
        return cast_back(stored.view(torch.uint8), factor, "e4m3", 32, "ue8m0", torch.float32)
    kind = Fp4Group32 if ".experts." in name and ".shared_experts." not in name else Fp8Block32
    return kind(stored.view(torch.uint8), factor.view(torch.uint8)).dequantize(torch.float32)


def restore(checkpoint: Checkpoint, *parts: Parameters) -> None:
    """Set every parameter to what the file stores."""
    with torch.no_grad():
        for params in parts:
            for name in params.shapes:
                params.set(name, value(checkpoint, name))


def load_backbone(loaded: Loaded, token_map: Tensor) -> Backbone:
    params = Parameters(loaded.config, 0, draft=False)
    restore(loaded.checkpoint, params)
    return Backbone(loaded.config, params.to(loaded.device), token_map)


def teacher_forced(model: Backbone, tokenizer: Tokenizer, asked: Sequence[Question]) -> float:
    """Share of answers whose every token is the most likely one, given those before."""
    rows = []
    for question in asked:
        before = prompt_ids(tokenizer, question.prompt)
        said = [*tokenizer.encode_plain(question.answer), model.config.eos_token_id]
        rows.append(([*before, *said], [0.0] * len(before) + [1.0] * len(said)))
    rows.sort(key=lambda row: len(row[0]))
    device = model.params.tiles.device
    right, start = 0.0, 0
    while start < len(rows):
        part = [
            row
            for count, row in enumerate(rows[start:], 1)
            if count == 1 or count * len(row[0]) <= TOKENS[device.type]
        ]
        # Whole groups of tokens and a last target; fused attention wants multiples of 8 keys.
        width = -(-(len(part[-1][0]) - 1) // 16) * 16 + 1
        ids = torch.full((len(part), width), model.config.pad_token_id)
        weights = torch.zeros(len(part), width)
        for i, (row, weight) in enumerate(part):
            ids[i, : len(row)], weights[i, : len(row)] = torch.tensor(row), torch.tensor(weight)
        right += measure.exact(model, ids.to(device), weights.to(device)) * len(part)
        start += len(part)
    return right / len(asked)


def compare(model: Backbone, loaded: Loaded, asked: Sequence[Question]) -> tuple[float, float]:
    """Accuracy with every rounding of the release, and with none but the weights' own."""
    assert loaded.tokenizer is not None
    rounded = teacher_forced(model, loaded.tokenizer, asked)
    quant.use_rounding(False)
    try:
        return rounded, teacher_forced(model, loaded.tokenizer, asked)
    finally:
        quant.use_rounding(True)
