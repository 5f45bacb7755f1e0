"""A small tokenizer and the word order that a synthetic model is made to prefer."""

from __future__ import annotations

import itertools

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
THINK, THINK_END = "<think>", "</think>"
IMAGE = "<｜deepseek_image｜>"
MARKERS = (
    BOS,
    EOS,
    PAD,
    SYSTEM,
    USER,
    ASSISTANT,
    THINK,
    THINK_END,
    "｜DSML｜",
    "<｜latest_reminder｜>",
    IMAGE,
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
)

# Answers; the model's word order comes from them, so it must stay longer than the vocabulary.
TEXT = """\
The river comes down from the hills and turns the old mill before it reaches the sea.
A small boat waits at the landing, and the fisherman mends his net while the light is good.
When the wind turns north the gulls come inland, and everyone knows that rain is near.
The baker opens her door before sunrise; the smell of bread walks through the whole street.
On market day the square is full of carts, of apples and cheese, of dogs and children.
The clock on the tower has been slow for years, and nobody in the town would have it set right.
In the evening the lamps are lit one after the other, and the bridge shines in the water.
A letter takes three days to cross the mountains, but news of a wedding arrives in one.
The school stands behind the church, and its garden grows beans, roses and a fig tree.
Old men play chess under the trees; the winner buys the wine and the loser tells the story.
The road to the harbour is paved with round stones that the sea has made over many years.
In winter the snow closes the pass, and the town lives on its own bread, wine and songs.
Travellers ask for the way to the city, and are told to follow the river until it is wide.
The river is wide only at the end, where the ships are, and where the songs were written.
She writes down the weather every morning: the wind, the rain, the colour of the hills.
He counts the ships as they come in, and at night he tells the children where each has been.
"""
# A pause for thought, in characters that answers do not use: it always comes to an end.
THOUGHT = "…!"


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` ids with the release's control tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(m, special=m in (BOS, EOS, PAD)) for m in MARKERS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    found = tokenizer.get_vocab_size()
    if found != vocab_size:
        raise ValueError(f"synthetic: vocab_size must be at most {found} for this text")
    return tokenizer


def preferences(tokenizer: Tokenizer) -> Tensor:
    """fp32 `[V, V]`: log-odds that row follows column in the text, 0 where it never does."""
    vocab = tokenizer.get_vocab_size()
    counts = torch.zeros(vocab, vocab)
    for line in TEXT.splitlines():
        for opening in (THINK_END, USER):
            _count(counts, tokenizer.encode(f"{opening}{line}").ids)
        # Most lines run on into the next one, some end the answer.
        last, space = tokenizer.encode(line).ids[-1], tokenizer.encode(f"\n{line}").ids[:2]
        _count(counts, [last, *space])
        _count(counts, [last, *space])
        counts[tokenizer.token_to_id(EOS), last] += 1
    _count(counts, tokenizer.encode(f"{THINK}{THOUGHT}{THINK_END}").ids)
    for marker in (BOS, PAD):
        counts[tokenizer.token_to_id(USER), tokenizer.token_to_id(marker)] += 1
    chance = counts / counts.sum(0, keepdim=True).clamp(min=1)
    return torch.log(chance * vocab).clamp(min=0)


def _count(counts: Tensor, ids: list[int]) -> None:
    for previous, following in itertools.pairwise(ids):
        counts[following, previous] += 1
