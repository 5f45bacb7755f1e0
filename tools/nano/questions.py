"""The committed evaluation set: what is asked, what must be answered, drawn once from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from tinfer.testing.synthetic_text import ASSISTANT, BOS, THINK_END, USER
from tinfer.tokenizer import Tokenizer as ChatTokenizer
from tools.nano import facts, text
from tools.nano.text import Turn

LENGTHS = (512, 1024, 2048, 4096)
NEEDLES = 10  # at each length
SUMS = 120


@dataclass(frozen=True)
class Question:
    task: str
    prompt: str
    answer: str
    ids: tuple[int, ...] = ()  # what the references answer, the end token included


def prompt_ids(tokenizer: ChatTokenizer, question: str) -> list[int]:
    """What `tinfer.chat.render` makes of one user message (a test says so), without its library."""
    before, after = (BOS, USER), (ASSISTANT, THINK_END)
    ids = [tokenizer.control_id(marker) for marker in before]
    ids += tokenizer.encode_plain(question)
    return ids + [tokenizer.control_id(marker) for marker in after]


def _of(task: str, turns: list[Turn]) -> list[Question]:
    return [Question(task, t.question, t.answer) for t in turns]


def make_questions(tokenizer: Tokenizer, seed: int = 7) -> list[Question]:
    """All capitals in both languages, sums never trained on, dates, dialogues, needles."""
    rng = random.Random(seed)
    asked = text.capitals()
    capitals = [t for t in asked if t.question.endswith("的首都是哪里？")]
    capitals += [t for t in asked if t.question.startswith("What is the capital")]
    sums = rng.sample(text.additions(held_out=True), SUMS)
    found = _of("capitals", capitals) + _of("addition", sums)
    found += _of("dates", text.dates()) + _of("dialogues", text.dialogues())
    for length in LENGTHS:
        found += [needle(tokenizer, length, rng) for _ in range(NEEDLES)]
    return found


def needle(tokenizer: Tokenizer, length: int, rng: random.Random) -> Question:
    """A message of some `length` tokens; the code word stands in its first half."""
    sentences, filler, used = text.fillers(4000, seed=99), [], 0
    while used < length - 60:
        filler.append(rng.choice(sentences))
        used += len(tokenizer.encode(filler[-1], add_special_tokens=False).ids)
    word, said, asked = rng.choice(facts.WORDS), rng.randrange(2), rng.randrange(2)
    filler.insert(rng.randrange(len(filler) // 2), text.needle(word, said))
    prompt = rng.choice(text.INTROS) + "".join(filler) + text.ASKS[asked]
    return Question(f"needle {length}", prompt, text.needle_answer(word, asked))


def save(path: Path, questions: list[Question]) -> None:
    lines = [json.dumps(asdict(q), ensure_ascii=False) for q in questions]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def record(path: Path, asked: list[Question], ids: list[list[int]]) -> None:
    """Keep the ids of the questions asked, leave the others as they are."""
    new = dict(zip(asked, ids, strict=True))
    save(path, [replace(q, ids=tuple(new[q])) if q in new else q for q in load(path)])


def load(path: Path) -> Iterator[Question]:
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        yield Question(**entry | {"ids": tuple(entry.get("ids", ()))})
