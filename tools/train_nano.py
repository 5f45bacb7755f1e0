"""Make the embedded checkpoint: `python tools/train_nano.py OUT [--budget SECONDS]`.

Trains the backbone with every rounding of the release in its forward pass, then the draft stages
behind it, and writes a checkpoint in the release's format. One H200 takes some four minutes; on a
CPU it works too, with `--tokens` and `--steps` made small. The data is generated: see tools/nano.
`--start DIR --rate 6e-4` goes on from a checkpoint, on long rows.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tinfer.checkpoint import open_checkpoint
from tinfer.config import ModelConfig
from tinfer.model.engram_hash import compressed_token_map
from tools.nano import measure, quant, text
from tools.nano import steps as steps_module
from tools.nano.config import VOCAB, config_dict
from tools.nano.draft import Draft, anchors
from tools.nano.export import export
from tools.nano.model import Backbone
from tools.nano.params import Parameters
from tools.nano.rows import Pieces
from tools.nano.steps import BackboneStep, DraftStep, Optimizer, rate_at
from tools.nano.stored import restore

# Up to this share of the training: (length, selected keys only) -> share of the steps.
PHASES = [
    (0.45, {(128, False): 0.9, (512, False): 0.1}),
    (0.65, {(128, False): 0.75, (512, False): 0.15, (2048, False): 0.1}),
    (
        1.00,
        {
            (128, True): 0.74,
            (512, True): 0.12,
            (1024, True): 0.06,
            (2048, True): 0.05,
            (4096, True): 0.03,
        },
    ),
]
# With --start: what few of the steps above have seen.
FURTHER = [(1.00, {(128, True): 0.2, (1024, True): 0.1, (2048, True): 0.2, (4096, True): 0.5})]


class Clock:
    def __init__(self, out: Path) -> None:
        self.start, self.log = time.perf_counter(), out / "train.log"
        out.mkdir(parents=True, exist_ok=True)

    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def say(self, line: str) -> None:
        line = f"[{self.seconds():6.1f} s] {line}"
        print(line, flush=True)
        with self.log.open("a") as file:
            file.write(line + "\n")


def train_backbone(
    args: argparse.Namespace, model: Backbone, pieces: Pieces, clock: Clock, seconds: float
) -> int:
    rng, begin, step = Random(args.seed), clock.seconds(), 0
    optimizer = Optimizer(model.params, args.rate)
    clock.say("optimizer ready")
    ready: dict[tuple[int, bool], BackboneStep] = {}
    while True:
        progress = max((clock.seconds() - begin) / seconds, step / args.steps if args.steps else 0)
        if progress >= 1:
            return step
        phases = PHASES if args.start is None else FURTHER
        phase = next(p for end, p in phases if progress < end)
        kinds = [k for k in phase if k[0] <= args.longest]
        kind = rng.choices(kinds, [phase[k] for k in kinds])[0]
        if kind not in ready:
            length = kind[0]
            ready[kind] = BackboneStep(model, optimizer, max(args.tokens // length, 1), *kind)
            clock.say(f"recorded {kind}")
        unit = ready[kind]
        rows, length = unit.ids.shape[0], unit.shape.length
        needles = rows // 5 if length <= 128 else -(-rows * 3 // 4)
        ids, weights = pieces.batch(rows, length, needles)
        unit.ids.copy_(ids)
        unit.weights.copy_(weights)
        optimizer.set_rate(rate_at(progress, args.rate))
        unit.run()
        optimizer.step()
        step += 1
        if step % args.every == 0:
            m = unit.meters
            if not math.isfinite(m.loss.item()):
                raise FloatingPointError(f"the loss of step {step} is not finite")
            clock.say(
                f"step {step} {progress:.2f} {kind} loss {m.loss.item():.4f} index "
                f"{m.index.item():.3f} right {m.right.item():.3f} norm {optimizer.norm.item():.2f}"
            )


def train_draft(
    args: argparse.Namespace,
    model: Backbone,
    draft: Draft,
    pieces: Pieces,
    clock: Clock,
    seconds: float,
) -> int:
    begin, step = clock.seconds(), 0
    optimizer = Optimizer(draft.params, args.rate)
    rows, length, n = max(args.tokens // 256, 1), 128, model.config.dspark_block_size
    unit = DraftStep(model, draft, optimizer, rows, length, 16)
    clock.say("recorded the draft's step")
    while True:
        progress = max((clock.seconds() - begin) / seconds, step / args.steps if args.steps else 0)
        if progress >= 1:
            return step
        ids, weights = pieces.batch(rows, length, rows // 8)
        unit.ids.copy_(ids)
        unit.weights.copy_(weights)
        unit.main.copy_(anchors(weights[:, :length], unit.main.shape[1], n))
        optimizer.set_rate(rate_at(progress, args.rate))
        unit.run()
        optimizer.step()
        step += 1
        if step % args.every == 0:
            clock.say(f"draft step {step} loss {unit.loss.item():.4f} sure {unit.sure.item():.4f}")


def setting(start: Path | None) -> tuple[Tokenizer, dict[str, Any]]:
    """Tokenizer and config.json, of the checkpoint to go on from or anew."""
    if start is None:
        tokenizer = text.make_tokenizer(VOCAB)
        return tokenizer, config_dict(tokenizer)
    tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
    return tokenizer, json.loads((start / "config.json").read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds, all in all")
    parser.add_argument("--start", type=Path, help="go on from this checkpoint, on long rows")
    parser.add_argument("--steps", type=int, help="stop each part after this many")
    parser.add_argument("--tokens", type=int, default=16384, help="in a step")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--longest", type=int, default=4096, help="rows in training")
    parser.add_argument("--every", type=int, default=200, help="steps between log lines")
    parser.add_argument("--fused", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    clock, device = Clock(args.out), torch.device(args.device)
    quant.use_fused(args.fused)
    steps_module.GRAPHS[0] = args.graphs
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    tokenizer, raw = setting(args.start)
    config = ModelConfig.from_dict(raw)
    pieces = Pieces.make(tokenizer, device)
    backbone, drafting = (Parameters(config, args.seed, draft=d) for d in (False, True))
    if args.start is not None:
        restore(open_checkpoint(args.start, config), backbone, drafting)
    backbone.to(device)
    model = Backbone(config, backbone, compressed_token_map(tokenizer))
    draft = Draft(config, drafting.to(device))
    clock.say(f"{len(pieces.ids)} pieces, {sum(p.numel() for p in backbone.parameters())} weights")
    left = args.budget - clock.seconds()
    steps = train_backbone(args, model, pieces, clock, 0.8 * left)
    clock.say(f"backbone: {steps} steps")
    left = args.budget - clock.seconds()
    steps = train_draft(args, model, draft, pieces, clock, max(left - 5, 1))
    clock.say(f"draft: {steps} steps")
    export(args.out / "nano", raw, tokenizer, backbone, draft.params)
    clock.say("exported")
    lengths = [n for n in (128, 512, 1024, 2048, 4096) if n <= args.longest]
    for name, share in measure.accuracies(model, tokenizer, pieces, lengths, 32).items():
        clock.say(f"{name}: {share:.3f}")
    quant.use_rounding(False)
    for name, share in measure.accuracies(model, tokenizer, pieces, lengths[:3], 32).items():
        clock.say(f"without rounding, {name}: {share:.3f}")
    quant.use_rounding(True)
    clock.say(f"tokens a step with drafts: {measure.accepted(model, draft, pieces):.2f}")


if __name__ == "__main__":
    main()
