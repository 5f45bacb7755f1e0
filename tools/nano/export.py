"""Trained parameters to a checkpoint in the release's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from tinfer.config import ModelConfig
from tinfer.testing.synthetic import write_release
from tools.nano.params import Parameters


def export(
    directory: Path,
    raw: dict[str, Any],
    tokenizer: Tokenizer,
    backbone: Parameters,
    draft: Parameters,
) -> ModelConfig:
    """Write config, tokenizer, index and shards."""

    def values(name: str, shape: tuple[int, ...]) -> Tensor:
        value = (draft if name.startswith("mtp.") else backbone).value(name)
        assert value.shape == shape, f"{name}: {tuple(value.shape)} for {shape}"
        return value

    return write_release(directory, raw, tokenizer, values)
