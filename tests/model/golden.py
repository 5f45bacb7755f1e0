"""Golden runs on our model: loading, batches of a run, and taps that check or inject."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tinfer.cache import Cache, CacheSize
from tinfer.checkpoint import open_checkpoint
from tinfer.config import ModelConfig
from tinfer.model.batch import Batch, ImageRows, Trace, no_trace
from tinfer.model.build import Model, build_model
from tinfer.model.engram_hash import compressed_token_map

ROOT = Path(__file__).parents[1] / "data" / "golden"
sys.path.insert(0, str(ROOT))
from check_golden import Golden, ModelRun, compare, errors  # noqa: E402

__all__ = [
    "ROOT",
    "Golden",
    "GoldenRun",
    "ModelRun",
    "compare",
    "errors",
    "golden_runs",
    "load_model",
    "token_map",
]


def token_map(directory: Path, config: ModelConfig) -> Tensor | None:
    """From the checkpoint's own tokenizer, as a user's run builds it."""
    if not config.engram_layer_ids:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return compressed_token_map(tokenizer, config.engram_compressed_vocab_size)


@functools.cache
def load_model(directory: Path, length: int = 256, device: str = "cpu") -> Model:
    config = ModelConfig.load(directory)
    checkpoint = open_checkpoint(directory, config)
    return build_model(config, checkpoint, device, length, token_map(directory, config))


class GoldenRun:
    """One golden run. An `owner` run shares the prompt and prefill of its `verbatim` twin."""

    def __init__(self, run: ModelRun, device: str = "cpu") -> None:
        self.run, self.info, self.name, self.device = run, run.info, run.name, device
        self.model = load_model(run.dir, device=device)
        self.prompt = run if "input_ids" in run.keys() else _twin(run)  # noqa: SIM118
        self.input_ids: Tensor = self.prompt["input_ids"]
        self.tokens: Tensor = run["decode.tokens"]
        self.batch, self.length = self.input_ids.shape
        self.steps = self.tokens.shape[0]

    def expected(self, name: str) -> Tensor | None:
        """A tensor of the run, or of its twin's prefill; None where it was not captured."""
        for source in (self.run, self.prompt):
            if name in source.keys() and (source is self.run or name.startswith("prefill")):  # noqa: SIM118
                return source[name].to(self.device)
        return None

    def report(self, actual: dict[str, Tensor]) -> dict[str, tuple[bool, str]]:
        """Comparison with the end-to-end tolerances, for the names this run has."""
        mine = {k: v for k, v in actual.items() if k in self.run.keys()}  # noqa: SIM118
        report: dict[str, tuple[bool, str]] = self.run.report(mine)
        return report

    def cache(self, chunk: int | None = None) -> Cache:
        return Cache(
            self.model.config, CacheSize(self.batch, 256, chunk or self.length, 16), self.device
        )

    def prefill(self, first: int, last: int, trace: Trace = no_trace) -> Batch:
        """The rows `first..last-1` of every prompt, images included."""
        sequences = [(b, first, self.input_ids[b, first:last].tolist()) for b in range(self.batch)]
        batch = Batch.of(sequences, self.device, trace)
        if not self.info["images"]:
            return batch
        types = self.prompt["token_types"]
        mask = (types[:, first:last] >= 0).flatten().to(self.device)
        rows = ImageRows(self._image_rows(first, last), mask.nonzero()[:, 0])
        return Batch(batch.ids, batch.positions, batch.seq, batch.max_position, mask, rows, trace)

    def decode(self, step: int, trace: Trace = no_trace) -> Batch:
        sequences = [
            (b, self.length + step, [int(self.tokens[step, b])]) for b in range(self.batch)
        ]
        return Batch.of(sequences, self.device, trace)

    def _image_rows(self, first: int, last: int) -> Tensor:
        """Learned start, newline and end vectors; aligner rows of the golden file in between."""
        checkpoint = open_checkpoint(self.run.dir, self.model.config, vision=True)
        learned = {
            0: checkpoint.tensor("image_start"),
            2: checkpoint.tensor("image_newline"),
            3: checkpoint.tensor("image_end"),
        }
        types, out, image = self.prompt["token_types"], [], -1
        for b in range(self.batch):
            aligned: Iterator[Tensor] = iter(())
            for p, kind in enumerate(types[b].tolist()):
                if kind == 0:
                    image += 1
                    aligned = iter(self.prompt[f"image{image}.aligned"])
                row = None if kind < 0 else learned.get(kind)
                if kind == 1:
                    row = next(aligned)
                if row is not None and first <= p < last:
                    out.append(row)
        if not out:
            return learned[0].new_empty(0, self.model.config.dim).to(self.device)
        return torch.stack(out).to(self.device)


def _twin(run: ModelRun) -> ModelRun:
    others = Golden(run.dir.parents[1]).runs(run.model["name"])
    return next(r for r in others if r.info["run"] == run.info["run"] and r is not run)


def golden_runs(capture: str | None = None) -> list[ModelRun]:
    """Every run whose index-key hand-off is ours: identical either way, or the owner's."""
    return [
        r
        for r in Golden(ROOT).runs()
        if r.info["handoff"] != "verbatim" and capture in (None, r.info["capture"])
    ]
