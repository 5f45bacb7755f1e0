"""Ask a checkpoint the committed questions: `python tools/eval_nano.py [--model DIR]`.

Greedy, in chat format, through the engine; an answer counts when it is right to the letter.
The questions come with the ids that the references gave, so a run under TINFER_KERNELS=triton
says how many answers are the same token by token. `--drafts` asks again with speculative steps,
`--ablate` with one mechanism at a time taken away.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tinfer.cache import CacheSize
from tinfer.chat import Tokenizer
from tinfer.engine import Engine
from tinfer.model.build import Model
from tinfer.model.engram_hash import compressed_token_map
from tinfer.request import Request, SamplingParams
from tinfer.runtime import Loaded, load_model, open_model, pick_device
from tools.nano import questions
from tools.nano.ablation import ABLATIONS, ablate
from tools.nano.questions import Question
from tools.nano.stored import compare, load_backbone

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = ROOT / "tests/assets/questions.jsonl"


def answer(
    model: Model,
    loaded: Loaded,
    asked: Sequence[Question],
    args: argparse.Namespace,
    drafts: bool = False,
) -> tuple[list[list[int]], Engine]:
    """Generated ids of every question, the end token included; and the engine that did it."""
    assert loaded.tokenizer is not None
    params = SamplingParams(
        temperature=0.0, max_new_tokens=args.new_tokens, stop_ids=loaded.eos_ids()
    )
    prompts = [questions.prompt_ids(loaded.tokenizer, q.prompt) for q in asked]
    longest = max(map(len, prompts))
    size = CacheSize(
        min(args.batch, len(asked)), longest + args.new_tokens, min(longest, args.chunk)
    )
    ids: list[list[int]] = [[] for _ in asked]
    engine = Engine(model, size, drafts=drafts)
    for step in engine.generate([Request(p, params) for p in prompts]):
        if step.token is not None:
            ids[step.request].append(step.token)
    return ids, engine


def said(tokenizer: Tokenizer, ids: list[int], eos: tuple[int, ...]) -> str:
    return tokenizer.decode(ids[:-1] if ids and ids[-1] in eos else ids)


def scores(
    model: Model, loaded: Loaded, asked: list[Question], args: argparse.Namespace
) -> tuple[dict[str, tuple[int, int]], list[list[int]]]:
    """Task -> (right, asked), and the ids in the order of the questions."""
    tokenizer, eos = loaded.tokenizer, loaded.eos_ids()
    assert tokenizer is not None
    found: dict[str, tuple[int, int]] = {}
    ids: list[list[int]] = []
    for task in dict.fromkeys(q.task for q in asked):
        mine = [q for q in asked if q.task == task]
        new, _ = answer(model, loaded, mine, args)
        right = 0
        for q, i in zip(mine, new, strict=True):
            good = said(tokenizer, i, eos) == q.answer
            right += good
            if not good and args.verbose:
                print(f"  {q.prompt[-40:]!r}: {said(tokenizer, i, eos)!r}, not {q.answer!r}")
        found[task] = (right, len(mine))
        ids += new
    return found, ids


def drafted(
    model: Model,
    loaded: Loaded,
    asked: list[Question],
    ids: list[list[int]],
    args: argparse.Namespace,
) -> None:
    """Print, by task, tokens a step with drafts and how many answers are those without."""
    for task in dict.fromkeys(q.task for q in asked):
        pairs = [(q, i) for q, i in zip(asked, ids, strict=True) if q.task == task]
        new, engine = answer(model, loaded, [q for q, _ in pairs], args, drafts=True)
        same = sum(i == n for (_, i), n in zip(pairs, new, strict=True))
        a_step = engine.decoded / engine.decode_steps
        print(f"drafts, {task}: {a_step:.2f} tokens a step, {same} of {len(new)} unchanged")


def unrounded(loaded: Loaded, asked: list[Question]) -> str:
    """Accuracy of the training forward pass with and without rounding activations and caches."""
    assert loaded.tokenizer is not None
    backbone = load_backbone(loaded, compressed_token_map(loaded.tokenizer.inner))
    with_it, without = compare(backbone, loaded, asked)
    return f"teacher-forced: {with_it:.1%} with rounding, {without:.1%} without"


def row(name: str, found: dict[str, tuple[int, int]]) -> str:
    return f"| {name} | " + " | ".join(f"{r / n:.1%}" for r, n in found.values()) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "tinfer/assets/nano")
    parser.add_argument("--questions", type=Path, default=QUESTIONS)
    parser.add_argument("--make", action="store_true", help="draw the questions anew, and stop")
    parser.add_argument("--tasks", help="only tasks that begin with one of these, with commas")
    parser.add_argument("--every", type=int, default=1, help="ask every n-th question of a task")
    parser.add_argument(
        "--ablate", nargs="?", const="", help="only what begins so; nothing: everything"
    )
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--unrounded", action="store_true", help="what rounding costs")
    parser.add_argument("--drafts", action="store_true", help="again with speculative steps")
    parser.add_argument("--device")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--record", action="store_true", help="keep the ids as the reference's")
    parser.add_argument("--ids-out", type=Path, help="JSON, in the order of the questions")
    parser.add_argument("--verbose", action="store_true", help="print wrong answers")
    args = parser.parse_args()
    loaded = open_model(args.model, pick_device(args.device))
    assert loaded.tokenizer is not None
    if args.make:
        args.questions.parent.mkdir(parents=True, exist_ok=True)
        questions.save(args.questions, questions.make_questions(loaded.tokenizer.inner))
        return
    asked = list(questions.load(args.questions))
    if args.tasks:
        asked = [q for q in asked if q.task.startswith(tuple(args.tasks.split(",")))]
    tasks = dict.fromkeys(q.task for q in asked)
    asked = [q for t in tasks for q in [q for q in asked if q.task == t][:: args.every]]
    model, _ = load_model(loaded, questions.LENGTHS[-1] + 256, quiet=True)
    start = time.perf_counter()
    found, ids = scores(model, loaded, asked, args)
    print(f"kernels {os.environ.get('TINFER_KERNELS', 'auto')} on {loaded.device}")
    print("| | " + " | ".join(f"{t} ({n})" for t, (_, n) in found.items()) + " |")
    print("|---|" + "---|" * len(found))
    print(row("as it is", found), flush=True)
    known = [(list(q.ids), i) for q, i in zip(asked, ids, strict=True) if q.ids]
    print(f"the reference's ids: {sum(a == b for a, b in known)} of {len(known)}", flush=True)
    if args.record:
        questions.record(args.questions, asked, ids)
    if args.ids_out is not None:
        args.ids_out.write_text(json.dumps(ids))
    if args.unrounded:
        print(unrounded(loaded, asked))
    if args.drafts:
        drafted(model, loaded, asked, ids, args)
    for name, edit in ABLATIONS.items():
        if args.ablate is not None and name.startswith(args.ablate):
            print(row(name, scores(ablate(model, edit), loaded, asked, args)[0]), flush=True)
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
