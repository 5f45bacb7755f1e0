"""Constants of the n-gram hash: compressed token ids, primes, multipliers and table offsets.

A checkpoint holds none of them; they follow from the configuration and the tokenizer.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tinfer.config import ConfigError, ModelConfig

MULTIPLIER_SEED = 10007  # times the layer's number, seeds the layer's multipliers
# White_Space of the Unicode standard; str.strip() would also take U+001C to U+001F.
WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_BLANKS = " \t\r\n"  # runs of these become one space
_LONE = "\ue000"  # stands for a lone space while blanks are stripped; itself becomes a space
_UNKNOWN = "\ufffd"  # in the text of a token that is part of a UTF-8 sequence


# ---------------------------------------------------------------- compressed ids
def normalize(text: str) -> str:
    """The spelling that tokens must share to count as one: no case, accents or extra blanks."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if not unicodedata.category(c).startswith("M"))
    text = "".join(c.lower() for c in text)  # one by one: no final sigma
    kept: list[str] = []
    for c in text:
        blank = c in _BLANKS
        if not (blank and kept and kept[-1] == " "):
            kept.append(" " if blank else c)
    text = "".join(kept)
    text = (_LONE if text == " " else text).strip(WHITE_SPACE)
    return text.replace(_LONE, " ")


def compressed_token_map(tokenizer: Tokenizer, size: int | None = None) -> Tensor:
    """int32 `[V]`: token id -> compressed id, numbered in order of first sight.

    A token whose text is not whole UTF-8 keeps its vocabulary string as key; any other is keyed
    by its normalized text, or its text where nothing is left of that. `size` is the number of
    compressed ids the model was trained with; ConfigError if the tokenizer gives another.
    """
    count = tokenizer.get_vocab_size(with_added_tokens=True)
    texts = tokenizer.decode_batch([[i] for i in range(count)], skip_special_tokens=False)
    numbers: dict[str, int] = {}
    compressed = []
    for i, text in enumerate(texts):
        raw = tokenizer.id_to_token(i) if _UNKNOWN in text else None
        key = raw or normalize(text) or text
        compressed.append(numbers.setdefault(key, len(numbers)))
    if size is not None and len(numbers) != size:
        raise ConfigError(
            f"engram: the tokenizer must give {size} compressed ids, got {len(numbers)}; "
            "it is not the tokenizer of this checkpoint"
        )
    return torch.tensor(compressed, dtype=torch.int32)


# ---------------------------------------------------------------- hash constants
class HashConstants(NamedTuple):
    """int64 on the host: multipliers `[L, n]`, primes `[L, n-1, Hh]`, offsets `[L, (n-1)*Hh]`."""

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor


def hash_constants(config: ModelConfig) -> HashConstants:
    """Constants of every engram layer; ConfigError where the tables' sizes disagree."""
    order, heads = config.engram_max_ngram_size, config.engram_n_heads
    layers = config.engram_layer_ids
    size = config.engram_compressed_vocab_size
    if size < 1:
        raise ConfigError(f"config: engram_compressed_vocab_size must be >= 1, got {size}")
    primes = _primes(len(layers), order - 1, heads, config.engram_vocab_size)
    columns = primes.flatten(1)
    rows = columns.sum(1).tolist()
    if rows != list(config.engram_num_embeddings):
        raise ConfigError(
            f"config: engram_num_embeddings must be {rows} (sums of the primes from "
            f"{config.engram_vocab_size}), got {list(config.engram_num_embeddings)}"
        )
    multipliers = torch.from_numpy(np.stack([_multipliers(i, order, size) for i in layers]))
    return HashConstants(multipliers, primes, columns.cumsum(1) - columns)


def table_rows(layers: int, orders: int, heads: int, start: int) -> list[int]:
    """Rows of each layer's table: the sum of its primes."""
    rows: list[int] = _primes(layers, orders, heads, start).flatten(1).sum(1).tolist()
    return rows


def _multipliers(layer: int, order: int, size: int) -> np.ndarray:
    """Odd, and so small that their product with a compressed id fits int64."""
    bound = max(1, (2**63 - 1) // size // 2)
    drawn = np.random.default_rng(MULTIPLIER_SEED * layer).integers(0, bound, order, dtype=np.int64)
    return drawn * 2 + 1


def _primes(layers: int, orders: int, heads: int, start: int) -> Tensor:
    """The smallest primes >= `start` in order, none handed out twice."""
    unused = _primes_from(start)
    flat = [next(unused) for _ in range(layers * orders * heads)]
    return torch.tensor(flat, dtype=torch.int64).view(layers, orders, heads)


def _primes_from(start: int) -> Iterator[int]:
    n = max(start, 2)
    while True:
        if all(n % d for d in range(2, int(n**0.5) + 1)):
            yield n
        n += 1
