"""`python -m tinfer.generate`: prompts in, tokens out.

python -m tinfer.generate --prompt "…"                  (the small model inside the package)
python -m tinfer.generate --model DIR --prompt "…"
python -m tinfer.generate --model DIR --ids 0,128803,17607 --temperature 0 --output json
python -m tinfer.generate --model DIR --interactive
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinfer import registry
from tinfer.arguments import DEFAULT_NEW_TOKENS, check_arguments, make_parser
from tinfer.chat import Prompt, TextStream, Tokenizer, parse_completion, render
from tinfer.engine import Engine
from tinfer.model.batch import no_trace
from tinfer.request import Request, SamplingParams
from tinfer.result import Result, save_logits
from tinfer.runtime import Loaded, make_engine, open_model, pick_device
from tinfer.trace import Dump


def _effort(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.lstrip("-").isdigit() else text


# ---------------------------------------------------------------- requests
@dataclass(frozen=True)
class _Template:
    """What all requests of a run share."""

    args: argparse.Namespace
    loaded: Loaded

    def params(self) -> SamplingParams:
        a = self.args
        new = a.max_new_tokens
        if new is None:
            new = len(a.force_ids) + 1 if a.force_ids else DEFAULT_NEW_TOKENS
        stop_ids = () if a.ignore_eos else self.loaded.eos_ids()
        return SamplingParams(
            temperature=a.temperature,
            top_p=a.top_p,
            top_k=a.top_k,
            min_p=a.min_p,
            seed=a.seed,
            max_new_tokens=new,
            stop_ids=stop_ids,
            min_new_tokens=a.min_new_tokens,
            logprobs=a.logprobs,
            logprobs_after_temperature=a.logprobs_after_temperature,
            prompt_logprobs=a.prompt_logprobs,
            repetition_penalty=a.repetition_penalty,
            frequency_penalty=a.frequency_penalty,
            presence_penalty=a.presence_penalty,
            logit_bias=a.logit_bias,
            bad_words=tuple(tuple(self.tokenizer().encode_plain(w)) for w in a.bad_word),
        )

    def tokenizer(self) -> Tokenizer:
        if self.loaded.tokenizer is None:
            raise ValueError("tokenizer.json is missing in the checkpoint; only --ids can be used")
        return self.loaded.tokenizer

    def encode(self, messages: list[dict[str, Any]]) -> list[int]:
        """A conversation, with the run's system message in front unless it has its own."""
        if self.args.system is not None and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self.args.system}, *messages]
        prompt: Prompt = render(messages, self.args.thinking, _effort(self.args.effort))
        return prompt.encode(self.tokenizer())

    def prompt_ids(self, text: str) -> list[int]:
        if self.args.raw:
            return self.tokenizer().encode(text)
        return self.encode([{"role": "user", "content": text}])

    def request(self, ids: Sequence[int], params: SamplingParams) -> Request:
        return Request(ids, params, self.args.force_ids, self.args.prompt_logits)


def _file_prompts(path: Path, template: _Template) -> Iterator[list[int]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompt-file {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            yield template.prompt_ids(line)
            continue
        try:
            case = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"--prompt-file {path}:{number} is not JSON: {error}") from error
        messages = case.get("messages") if isinstance(case, dict) else case
        if not isinstance(messages, list):
            raise ValueError(f"--prompt-file {path}:{number} must be a message list, or have one")
        yield template.encode(messages)


def _requests(template: _Template) -> list[Request]:
    args = template.args
    if args.ids:
        prompts = list(args.ids)
    elif args.prompt_file is not None:
        prompts = list(_file_prompts(args.prompt_file, template))
        if not prompts:
            raise ValueError(f"--prompt-file {args.prompt_file} has no prompts")
    else:
        prompts = [template.prompt_ids(text) for text in args.prompt]
    params = template.params()
    return [template.request(ids, params) for ids in prompts]


# ---------------------------------------------------------------- running
def _run(
    engine: Engine, template: _Template, requests: list[Request]
) -> Iterator[tuple[int, Result, str]]:
    """`(request, its result, new text)` for every step."""
    args, tokenizer = template.args, template.loaded.tokenizer
    started = time.perf_counter()
    results = [
        Result(r, TextStream(tokenizer, args.stop) if tokenizer else None, started)
        for r in requests
    ]
    for step in engine.generate(requests):
        result = results[step.request]
        new = result.add(step, args.logits_out is not None)
        if result.finish_reason is not None and step.finish_reason is None:
            engine.cancel(step.request)
        yield step.request, result, new


def _batch(template: _Template) -> int:
    args = template.args
    requests = _requests(template)
    trace = Dump(args.dump) if args.dump is not None else no_trace
    engine, load_seconds = make_engine(
        template.loaded,
        requests,
        max_batch=args.max_batch,
        chunk=args.chunk,
        quiet=args.quiet,
        trace=trace,
        drafts=args.drafts,
    )
    results: dict[int, Result] = {}
    printed = 0
    streaming = args.output == "text" and len(requests) == 1
    for index, result, new in _run(engine, template, requests):
        results[index] = result
        if streaming:
            _write(new)
        while printed in results and results[printed].finish_reason is not None:
            if not streaming:
                _print_result(args, results[printed], printed, len(requests), load_seconds)
            printed += 1
    done = [results[i] for i in range(len(requests))]
    if streaming:
        _write("\n" if done[0].stream is not None else f"{done[0].ids}\n")
    if args.logits_out is not None:
        save_logits(args.logits_out, done)
    _statistics(args, done, load_seconds, engine)
    failed = [r.finish_reason for r in done if (r.finish_reason or "").startswith("error")]
    for reason in failed:
        sys.stderr.write(f"{reason}\n")
    return 1 if failed else 0


def _print_result(
    args: argparse.Namespace, result: Result, index: int, count: int, load_seconds: float
) -> None:
    if args.output == "json":
        _write(json.dumps(result.record(load_seconds), ensure_ascii=False) + "\n")
        return
    head = f"[{index}] " if count > 1 else ""
    _write(f"{head}{result.text if result.stream is not None else result.ids}\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _statistics(
    args: argparse.Namespace, results: list[Result], load_seconds: float, engine: Engine
) -> None:
    if args.report_kernels:
        sys.stderr.write(registry.report() + "\n")
    if args.quiet:
        return
    start = min(r.started for r in results)
    first = max(r.first_token or start for r in results)
    end = max(r.ended or start for r in results)
    prompt = sum(len(r.request.prompt_ids) for r in results)
    new = sum(len(r.ids) for r in results)
    rate = (new - len(results)) / (end - first) if end > first else 0.0
    a_step = f", {engine.decoded / max(engine.decode_steps, 1):.2f} a step" if args.drafts else ""
    sys.stderr.write(
        f"loaded in {load_seconds:.2f} s; {prompt} prompt tokens to the first token in "
        f"{first - start:.2f} s; {new} new tokens, {rate:.1f} tokens/s in decode{a_step}\n"
    )


# ---------------------------------------------------------------- conversation
def _interactive(template: _Template) -> int:
    """A dialogue on the terminal. Ctrl-C stops the answer; Ctrl-D or /exit leaves."""
    args, loaded = template.args, template.loaded
    params = template.params()
    template.encode([{"role": "user", "content": "?"}])  # fails here if it cannot converse
    room = min(loaded.context, 65536)
    probe = template.request([0] * 1, replace(params, max_new_tokens=room - 1))
    engine, _ = make_engine(
        loaded, [probe], max_batch=1, chunk=args.chunk, quiet=args.quiet, drafts=args.drafts
    )
    history: list[dict[str, Any]] = []
    while True:
        try:
            line = input(">>> ")
        except (EOFError, KeyboardInterrupt):
            _write("\n")
            return 0
        if line.strip() == "/exit":
            return 0
        if line.strip() == "/clear":
            history.clear()
            continue
        if line.strip():
            _turn(engine, template, params, history, line)


def _turn(
    engine: Engine,
    template: _Template,
    params: SamplingParams,
    history: list[dict[str, Any]],
    line: str,
) -> None:
    """One question and its answer; an answer that is stopped is kept as far as it got."""
    history.append({"role": "user", "content": line})
    ids = template.encode(history)
    if len(ids) >= engine.size.length:
        history.pop()
        _write(f"the conversation has filled the context of {engine.size.length}; /clear it\n")
        return
    said: list[str] = []
    try:
        for _, _, new in _run(engine, template, [template.request(ids, params)]):
            said.append(new)
            _write(new)
    except KeyboardInterrupt:
        _write(" …")
    _write("\n")
    answer = parse_completion("".join(said), template.args.thinking)
    history.append(answer.message())


# ---------------------------------------------------------------- main
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 done, 1 a request failed, 2 bad input (one line says what)."""
    args = make_parser().parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        check_arguments(args)
        policy = registry.current_policy()
        spec = args.kernels if args.kernels is not None else policy.spec
        strict = args.strict or policy.strict
        with registry.use_kernels(spec, strict=strict), registry.use_gemm():
            template = _Template(args, open_model(args.model, pick_device(args.device)))
            template.params()  # a wrong parameter is seen before anything loads
            return _interactive(template) if args.interactive else _batch(template)
    except (ValueError, ImportError, registry.UnsupportedError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
