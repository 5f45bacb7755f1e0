"""The embedded checkpoint: complete, small, and right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tinfer import generate, registry
from tinfer.cache import CacheSize
from tinfer.chat import Tokenizer, render
from tinfer.checkpoint import expected_tensors, open_checkpoint
from tinfer.config import ModelConfig
from tinfer.engine import Engine
from tinfer.model.engram_hash import compressed_token_map
from tinfer.request import Request, SamplingParams
from tinfer.runtime import NANO, Loaded, load_model, open_model
from tools.nano import golden, questions
from tools.nano.ablation import ABLATIONS, ablate
from tools.nano.questions import Question, prompt_ids

HERE = Path(__file__).parent
QUESTIONS = list(questions.load(HERE / "questions.jsonl"))


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return open_model(NANO, torch.device("cpu"))


@pytest.fixture(scope="module")
def model(loaded):
    with registry.use_kernels("ref"):
        return load_model(loaded, 5000, quiet=True)[0]


def ids_of(model, loaded: Loaded, asked: list[Question], kernels="ref", drafts=False):
    """Greedy ids of every question, the end token included; and the engine that gave them."""
    params = SamplingParams(temperature=0.0, max_new_tokens=64, stop_ids=loaded.eos_ids())
    prompts = [prompt_ids(loaded.tokenizer, q.prompt) for q in asked]
    longest = max(map(len, prompts))
    engine = Engine(model, CacheSize(len(asked), longest + 64, min(longest, 1024)), drafts=drafts)
    ids: list[list[int]] = [[] for _ in asked]
    with registry.use_kernels(kernels):
        for step in engine.generate([Request(p, params) for p in prompts]):
            ids[step.request].append(step.token)
    return ids, engine


def answers(model, loaded: Loaded, asked: list[Question]) -> list[str]:
    ids, _ = ids_of(model, loaded, asked)
    return [loaded.tokenizer.decode([i for i in x if i not in loaded.eos_ids()]) for x in ids]


# ---------------------------------------------------------------- the files
def test_it_is_small_and_in_the_releases_format() -> None:
    config = ModelConfig.load(NANO)
    checkpoint = open_checkpoint(NANO, config)
    assert checkpoint.names() == expected_tensors(config).keys()
    assert sum(p.stat().st_size for p in NANO.iterdir()) <= 12_000_000
    kinds = {checkpoint.spec(name).dtype for name in checkpoint.names()}
    assert kinds == {"F32", "BF16", "F8_E8M0", "F8_E4M3", "I8"}


def test_every_mechanism_is_on() -> None:
    config = ModelConfig.load(NANO)
    assert set(config.compress_ratios) == {0, 1, 2}
    assert len(config.kv_source_layers) == 3
    assert len(config.index_source_layers) == 4
    assert config.candidate_source_layer < config.index_source_layers[-1]
    assert config.candidate_topk_blocks * config.candidate_block_size < 512
    assert config.index_topk <= 64
    assert config.hc_mult == 4
    assert len(config.engram_layer_ids) == 2
    assert config.n_routed_experts > config.n_activated_experts > 1
    assert config.n_mtp_layers == 2
    assert config.dspark_markov_rank > 0


def test_training_moved_every_tensor() -> None:
    """No mechanism was left at its initial value: routing biases, sinks, scales and norms moved."""
    config = ModelConfig.load(NANO)
    checkpoint = open_checkpoint(NANO, config)
    still = []
    for name in checkpoint.names():
        value = checkpoint.tensor(name)
        if value.dtype in (torch.float32, torch.bfloat16) and value.dim() == 1:
            flat = value.float()
            if bool((flat == flat[0]).all()):
                still.append(name)
    assert not still


def test_tokenizer(loaded: Loaded) -> None:
    tokenizer = Tokenizer.load(NANO)
    config = loaded.config
    assert len(tokenizer) == config.vocab_size
    mapped = compressed_token_map(tokenizer.inner, config.engram_compressed_vocab_size)
    assert len(mapped) == config.vocab_size
    for question in QUESTIONS[::40]:
        want = render([{"role": "user", "content": question.prompt}]).encode(tokenizer)
        assert prompt_ids(tokenizer, question.prompt) == want
    for text in ("12+34", "你好，世界！", "Any bytes: \u2603 é 𝄞"):
        assert tokenizer.decode(tokenizer.encode_plain(text)) == text


# ---------------------------------------------------------------- what it says
EXAMPLES = {
    "中国的首都是哪里？": "中国的首都是北京。",
    "法国的首都是哪里？": "法国的首都是巴黎。",
    "What is the capital of Japan?": "The capital of Japan is Tokyo.",
    "What is 47 plus 85?": "47 plus 85 is 132.",
}


def from_the_command_line(capsys, prompts: list[str], *flags: str) -> list[str]:
    """Answers of the model that is there when none is named."""
    arguments = [part for prompt in prompts for part in ("--prompt", prompt)]
    arguments += ["--temperature", "0", "--kernels", "ref", "--output", "json", *flags]
    assert generate.main(arguments) == 0
    return [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("flags", [(), ("--drafts",)])
def test_the_command_line_answers_by_default(capsys, flags) -> None:
    assert from_the_command_line(capsys, list(EXAMPLES), *flags) == list(EXAMPLES.values())


@pytest.mark.slow
def test_the_command_line_finds_a_code_word(capsys, loaded: Loaded) -> None:
    """Stated more than 2,000 tokens before the question."""
    question = next(q for q in QUESTIONS if q.task == "needle 4096")
    word = question.answer.rstrip(".。").split()[-1]
    after = question.prompt.partition(word)[2]
    assert len(loaded.tokenizer.encode_plain(after)) > 2000
    assert from_the_command_line(capsys, [question.prompt]) == [question.answer]


def test_golden_ids_and_logits(model, loaded: Loaded, device: str) -> None:
    """Ids exactly; on a CPU logits too, up to another machine's order of summation.

    A GPU's order flips more fp8 codes: 7 % on an H200, where the references of `test_golden` are
    compared in full.
    """
    stored = load_file(golden.FILE)
    prompts = [stored[f"{i}/prompt"].tolist() for i in range(len(golden.PROMPTS))]
    assert prompts == [prompt_ids(loaded.tokenizer, p) for p in golden.PROMPTS]
    with registry.use_kernels("ref"):
        found = golden.run(model, loaded, prompts)
    for i, entry in enumerate(found):
        assert entry["ids"].tolist() == stored[f"{i}/ids"].tolist()
        want = stored[f"{i}/logits"]
        # One flipped fp8 code a layer moves logits by some percent (golden README: 1 to 4 %).
        assert device != "cpu" or (entry["logits"] - want).norm() <= 0.04 * want.norm()


@pytest.mark.parametrize("task", dict.fromkeys(q.task for q in QUESTIONS))
def test_recorded_answers_are_right(loaded: Loaded, task: str) -> None:
    """What the references said to every question, on the device that trained the model."""
    asked = [q for q in QUESTIONS if q.task == task]
    said = [loaded.tokenizer.decode(list(q.ids[:-1])) for q in asked]
    right = sum(s == q.answer for s, q in zip(said, asked, strict=True))
    assert right >= (0.95 if task == "capitals" else 0.9) * len(asked)


def test_answers_are_the_recorded_ids(model, loaded: Loaded) -> None:
    """A sample of each short task; the whole set is tools/eval_nano.py's."""
    asked = [
        q
        for task in ("capitals", "addition", "dates", "dialogues")
        for q in [q for q in QUESTIONS if q.task == task][::12]
    ]
    ids, _ = ids_of(model, loaded, asked)
    assert [tuple(i) for i in ids] == [q.ids for q in asked]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["triton", "ref"])
def test_every_answer_on_a_gpu(kernels: str) -> None:
    """All questions, all lengths: the recorded ids, whatever computes them."""
    there = open_model(NANO, torch.device("cuda"))
    model, _ = load_model(there, 5000, quiet=True)
    for task in dict.fromkeys(q.task for q in QUESTIONS):
        asked = [q for q in QUESTIONS if q.task == task]
        ids, _ = ids_of(model, there, asked, kernels)
        assert [tuple(i) for i in ids] == [q.ids for q in asked], task


@pytest.mark.slow
@pytest.mark.parametrize("length", questions.LENGTHS)
def test_needle(model, loaded: Loaded, length: int) -> None:
    """Top-k and candidate selection find one word among thousands of tokens."""
    asked = [q for q in QUESTIONS if q.task == f"needle {length}"][:1]
    assert len(prompt_ids(loaded.tokenizer, asked[0].prompt)) > 0.9 * length
    assert answers(model, loaded, asked) == [q.answer for q in asked]


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_drafts_give_the_same_ids_in_fewer_steps(model, loaded: Loaded, every: int) -> None:
    """Speculative steps through the engine: at least two tokens each on the dialogues."""
    asked = [q for q in QUESTIONS if q.task == "dialogues"][::every]
    ids, engine = ids_of(model, loaded, asked, drafts=True)
    assert ids == ids_of(model, loaded, asked)[0]
    assert engine.decoded >= 2.0 * engine.decode_steps


@pytest.mark.parametrize("name", ["without Engram", "router shuffled"])
def test_a_mechanism_taken_away_is_missed(model, loaded: Loaded, name: str) -> None:
    asked = [q for q in QUESTIONS if q.task == "addition"][:12]
    asked += [q for q in QUESTIONS if q.task == "capitals"][:12]
    right = sum(
        s == q.answer
        for q, s in zip(asked, answers(ablate(model, ABLATIONS[name]), loaded, asked), strict=True)
    )
    assert right < 0.9 * len(asked)
