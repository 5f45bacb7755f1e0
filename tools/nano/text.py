"""From facts to texts: turns of a conversation, filler sentences, needles; and the tokenizer."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tinfer.testing.synthetic_text import ASSISTANT, BOS, EOS, MARKERS, PAD, THINK_END, USER
from tools.nano import facts

NOISE = "<｜place▁holder▁no▁0｜>"  # stands where the draft stages have no token yet
HELD_OUT = 5  # one of this many sums is never trained on
HEADER = f"{ASSISTANT}{THINK_END}"


@dataclass(frozen=True)
class Turn:
    """A question and its answer."""

    kind: str
    question: str
    answer: str

    @property
    def text(self) -> str:
        """As the conversation encoding spells it, without thinking."""
        return f"{USER}{self.question}{HEADER}{self.answer}{EOS}"


# ---------------------------------------------------------------- turns
def capitals() -> list[Turn]:
    turns = []
    for zh, zh_capital, en, en_capital in facts.CAPITALS:
        en, en_capital = en.replace("_", " "), en_capital.replace("_", " ")
        chinese = f"{zh}的首都是{zh_capital}。"
        english = f"The capital of {en} is {en_capital}."
        for question in (
            f"{zh}的首都是哪里？",
            f"{zh}的首都是哪个城市？",
            f"请问{zh}的首都在哪里？",
        ):
            turns.append(Turn("capital", question, chinese))
        for question in (
            f"What is the capital of {en}?",
            f"Which city is the capital of {en}?",
            f"Tell me the capital of {en}.",
        ):
            turns.append(Turn("capital", question, english))
        turns.append(
            Turn("country", f"{zh_capital}是哪个国家的首都？", f"{zh_capital}是{zh}的首都。")
        )
        turns.append(
            Turn(
                "country",
                f"{en_capital} is the capital of which country?",
                f"{en_capital} is the capital of {en}.",
            )
        )
    return turns


def is_held_out(a: int, b: int) -> bool:
    """Sums that training never sees, in either order."""
    low, high = sorted((a, b))
    return (low * 7919 + high * 104729) % 1009 % HELD_OUT == 0


def addition(a: int, b: int) -> list[Turn]:
    total = a + b
    return [
        Turn("addition", f"{a}加{b}等于多少？", f"{a}加{b}等于{total}。"),
        Turn("addition", f"{a}+{b}=?", f"{a}+{b}={total}"),
        Turn("addition", f"What is {a} plus {b}?", f"{a} plus {b} is {total}."),
    ]


def additions(held_out: bool) -> list[Turn]:
    pairs = itertools.product(range(10, 100), repeat=2)
    return [t for a, b in pairs if is_held_out(a, b) == held_out for t in addition(a, b)]


def dates() -> list[Turn]:
    turns = []
    for i in range(7):
        after, before = (i + 1) % 7, (i - 1) % 7
        zh, en = facts.WEEK_ZH, facts.WEEK_EN
        turns += [
            Turn("date", f"{zh[i]}后面是星期几？", f"{zh[i]}后面是{zh[after]}。"),
            Turn("date", f"{zh[i]}前面是星期几？", f"{zh[i]}前面是{zh[before]}。"),
            Turn("date", f"What day comes after {en[i]}?", f"{en[after]} comes after {en[i]}."),
            Turn("date", f"What day comes before {en[i]}?", f"{en[before]} comes before {en[i]}."),
        ]
    for i, (name, days) in enumerate(facts.MONTHS):
        following = facts.MONTHS[(i + 1) % 12][0]
        turns += [
            Turn("date", f"{i + 1}月有几天？", f"{i + 1}月有{days}天。"),
            Turn("date", f"How many days are in {name}?", f"There are {days} days in {name}."),
            Turn("date", f"What month comes after {name}?", f"{following} comes after {name}."),
        ]
    return turns


def dialogues() -> list[Turn]:
    return [Turn("dialogue", question, answer) for question, answer in facts.DIALOGUES]


# ---------------------------------------------------------------- needles
INTROS = ("请读下面的文字。", "Please read this text.")
ASKS = ("暗号是什么？", " What is the code word?")


def fillers(count: int, seed: int = 0) -> list[str]:
    """Sentences that say nothing of use, half of them Chinese."""
    rng = random.Random(seed)
    f, found = facts, []
    for i in range(count):
        if i % 2:
            who, when = rng.choice(f.SUBJECTS_EN), rng.choice(f.TIMES_EN)
            found.append(f" {who} {rng.choice(f.VERBS_EN)} {rng.choice(f.OBJECTS_EN)} {when}.")
        else:
            who, when = rng.choice(f.SUBJECTS_ZH), rng.choice(f.TIMES_ZH)
            found.append(f"{when}{who}{rng.choice(f.VERBS_ZH)}{rng.choice(f.OBJECTS_ZH)}。")
    return found


def needle(word: str, language: int) -> str:
    return (f"请记住，暗号是 {word}。", f" Remember that the code word is {word}.")[language]


def needle_answer(word: str, language: int) -> str:
    return (f"暗号是 {word}。", f"The code word is {word}.")[language]


# ---------------------------------------------------------------- tokenizer
def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE: digits and Chinese characters apart, control tokens first."""
    tokenizer = Tokenizer(models.BPE())
    words = r"[^\r\n\p{L}\p{P}\p{S}\p{N}]?\p{L}+| ?[\p{P}\p{S}]+|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[0-9]"), "isolated"),
            pre_tokenizers.Split(Regex("[一-龥぀-ゟ゠-ヿ，。？！、：；]"), "isolated"),
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    markers = [*MARKERS, NOISE]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(m, special=m in (BOS, EOS, PAD)) for m in markers],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"vocab_size must be at most {tokenizer.get_vocab_size()}")
    return tokenizer


def _corpus() -> list[str]:
    turns = [*capitals(), *dates(), *dialogues()]
    texts = [text for t in turns for text in (t.question, t.answer)]
    texts += [" ".join(facts.WORDS), " " + " ".join(facts.WORDS)] * 20
    texts += [text for part in (INTROS, ASKS) for text in part] * 20
    texts += [needle(w, i) for w in facts.WORDS for i in range(2)]
    return texts * 3 + fillers(2000)
