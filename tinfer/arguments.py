"""The command line of `tinfer.generate`: flags, their meaning, mistakes seen without a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from tinfer.runtime import NANO

DEFAULT_NEW_TOKENS = 200


class Parser(argparse.ArgumentParser):
    """One line per mistake."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be integers with commas, got {text!r}") from error


def _bias(text: str) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return tuple((int(i), float(value)) for i, value in pairs)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be id:value pairs, got {text!r}") from error


def make_parser() -> argparse.ArgumentParser:
    p = Parser(prog="python -m tinfer.generate", description="Prompts in, tokens out.")
    p.add_argument("--model", type=Path, default=NANO, help="default: the small one inside")
    what = p.add_argument_group("what to continue")
    what.add_argument("--prompt", action="append", default=[], help="a user message; repeatable")
    what.add_argument(
        "--prompt-file", type=Path, help="one prompt a line, or .jsonl: one conversation a line"
    )
    what.add_argument("--interactive", action="store_true", help="talk; Ctrl-C stops an answer")
    what.add_argument("--ids", type=_ids, action="append", default=[], help="raw ids; repeatable")
    what.add_argument("--force-ids", type=_ids, default=[], help="ids to take before sampling")
    what.add_argument("--raw", action="store_true", help="no conversation around --prompt")
    what.add_argument("--system", help="system message")
    what.add_argument("--thinking", action=argparse.BooleanOptionalAction, default=False)
    what.add_argument("--effort", help="1..100, low, high or max; with --thinking")
    how = p.add_argument_group("how tokens are chosen")
    how.add_argument("--max-new-tokens", type=int, help=f"default {DEFAULT_NEW_TOKENS}")
    how.add_argument("--temperature", type=float, default=1.0, help="0: argmax")
    how.add_argument("--top-p", type=float, default=1.0)
    how.add_argument("--top-k", type=int, default=0, help="0: off")
    how.add_argument("--min-p", type=float, default=0.0)
    how.add_argument("--seed", type=int, default=0)
    how.add_argument("--stop", action="append", default=[], help="stop string; repeatable")
    how.add_argument("--ignore-eos", action="store_true")
    how.add_argument("--min-new-tokens", type=int, default=0, help="no stop token before")
    how.add_argument(
        "--drafts", action="store_true", help="several tokens a step: the same ones, sooner"
    )
    how.add_argument("--repetition-penalty", type=float, default=1.0)
    how.add_argument("--frequency-penalty", type=float, default=0.0)
    how.add_argument("--presence-penalty", type=float, default=0.0)
    how.add_argument("--logit-bias", type=_bias, default=(), metavar="ID:VALUE,…")
    how.add_argument("--bad-word", action="append", default=[], help="never completed; repeatable")
    where = p.add_argument_group("where and with which kernels")
    where.add_argument("--device", help="default: the accelerator torch finds, else cpu")
    where.add_argument("--kernels", help="auto|triton|ref[,op=…]; default: TINFER_KERNELS")
    where.add_argument("--strict", action="store_true", help="a fallback to ref is an error")
    where.add_argument("--max-batch", type=int, default=16, help="requests at once")
    where.add_argument("--chunk", type=int, default=2048, help="prompt tokens per forward pass")
    out = p.add_argument_group("output")
    out.add_argument("--output", choices=("text", "json"), default="text")
    out.add_argument("--logprobs", type=int, metavar="N", help="with the N most likely tokens")
    out.add_argument("--prompt-logprobs", type=int, metavar="N", help="the same for the prompt")
    out.add_argument("--logprobs-after-temperature", action="store_true")
    out.add_argument("--logits-out", type=Path, metavar="FILE", help="fp32 logits, safetensors")
    out.add_argument("--prompt-logits", action="store_true", help="those of the prompt as well")
    out.add_argument("--dump", type=Path, metavar="DIR", help="every layer's intermediates")
    out.add_argument("--report-kernels", action="store_true", help="which implementation ran")
    out.add_argument("--quiet", action="store_true", help="no progress bar, no statistics")
    return p


def check_arguments(args: argparse.Namespace) -> None:
    """Mistakes that need no model to be seen."""
    sources = [bool(args.prompt), args.prompt_file is not None, bool(args.ids), args.interactive]
    if sum(sources) != 1:
        raise ValueError("give exactly one of --prompt, --prompt-file, --ids, --interactive")
    if args.prompt_logits and args.logits_out is None:
        raise ValueError("--prompt-logits needs --logits-out")
    for name in ("max_batch", "chunk"):
        if getattr(args, name) < 1:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be positive, got {getattr(args, name)}")
