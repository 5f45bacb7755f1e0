"""The released tokenizer, loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chat.release_tokenizer import release_json
from tinfer.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("release") / "tokenizer.json"
    path.write_text(release_json(), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_file)
