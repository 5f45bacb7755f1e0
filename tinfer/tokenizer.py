"""The checkpoint's tokenizer, and token ids to text as they come.

Two ways to encode: with the added vocabulary (`encode`: control strings become control ids, for
raw prompts) and without it (`encode_plain`: text that somebody typed can never become a control
token). `encode_segments` joins the two for a rendered conversation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

REPLACEMENT = "\ufffd"  # what an unfinished UTF-8 sequence decodes to
_MAX_PENDING = 16  # tokens held back for one; more is not unfinished but invalid


class TokenizerError(ValueError):
    """A tokenizer that is missing, broken, or not the model's."""


class Tokenizer:
    """`tokenizer.json` with what generation needs."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self.inner = inner
        self.added: dict[str, int] = {
            token.content: index for index, token in inner.get_added_tokens_decoder().items()
        }
        self._added_ids = frozenset(self.added.values())

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read `tokenizer.json` from a checkpoint directory (or the file itself)."""
        path = Path(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise TokenizerError(f"tokenizer: no such file: {path}")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises no narrower one
            raise TokenizerError(f"tokenizer: {path} cannot be read: {error}") from error

    def __len__(self) -> int:
        return int(self.inner.get_vocab_size(with_added_tokens=True))

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same model without added tokens."""
        plain = tokenizers.Tokenizer(self.inner.model)
        for part in ("normalizer", "pre_tokenizer"):
            value: Any = getattr(self.inner, part)
            if value is not None:
                setattr(plain, part, value)
        return plain

    # ------------------------------------------------------------ text to ids
    def encode(self, text: str) -> list[int]:
        """Ids of `text`; spellings of control tokens become control ids. Nothing is added."""
        return _encode(self.inner, text)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` as ordinary text, whatever it spells."""
        return _encode(self._plain, text)

    def encode_segments(self, text: str, control: Iterable[tuple[int, int]]) -> list[int]:
        """Ids of `text` where the `control` ranges, and only they, are control tokens.

        Raises:
            TokenizerError: a range spells no added token.
        """
        ids, start = [], 0
        for first, last in control:
            ids += self.encode_plain(text[start:first]) if first > start else []
            ids.append(self.control_id(text[first:last]))
            start = last
        return ids + (self.encode_plain(text[start:]) if start < len(text) else [])

    def control_id(self, spelling: str) -> int:
        """The id of an added token."""
        if spelling not in self.added:
            raise TokenizerError(
                f"tokenizer: it has no {spelling} token, so it cannot carry a conversation; "
                "use raw text or ids"
            )
        return self.added[spelling]

    # ------------------------------------------------------------ ids to text
    def decode(self, ids: Sequence[int], keep_control: bool = True) -> str:
        """Text of `ids`; `keep_control=False` leaves out every added token, special or not."""
        if not keep_control:
            ids = [i for i in ids if i not in self._added_ids]
        return str(self.inner.decode(list(ids), skip_special_tokens=False))

    def is_control(self, token: int) -> bool:
        """An added token: a marker, not text."""
        return token in self._added_ids

    def spelling(self, token: int) -> str | None:
        """The raw vocabulary string, or None for an id that does not exist."""
        found: str | None = self.inner.id_to_token(token)
        return found


def _encode(inner: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        return list(inner.encode(text, add_special_tokens=False).ids)
    except Exception as error:  # the library raises no narrower one
        raise TokenizerError(f"tokenizer: {text[:40]!r} cannot be encoded: {error}") from error


class TextStream:
    """Turns ids into text one at a time, never splitting a character, cutting at stop strings.

    `push` returns the text that has become certain. Bytes of an unfinished character are held
    back until it is finished, and so is text that may turn out to be the start of a stop string.
    After a stop string was met, `stopped` holds it, the text before it has been returned, and
    further ids give nothing.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), keep_control: bool = True
    ) -> None:
        if any(not s for s in stop):
            raise ValueError("stop: strings must not be empty")
        self.stopped: str | None = None
        self._tokenizer, self._stop, self._keep = tokenizer, tuple(stop), keep_control
        self._ids: list[int] = []  # since the last time that every character was finished
        self._shown = ""  # their text that has been passed on
        self._held = ""  # text that may begin a stop string

    def push(self, token: int) -> str:
        """Add an id; return the text that is now certain."""
        if self.stopped is not None:
            return ""
        if self._tokenizer.is_control(token):
            text = self._finish_characters()
            if self._keep:
                text += self._tokenizer.decode([token])
            return self._cut(text)
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        finished = text.rstrip(REPLACEMENT)
        whole = len(finished) == len(text) or len(self._ids) > _MAX_PENDING
        new = (text if whole else finished)[len(self._shown) :]
        self._shown += new
        if whole:
            self._ids, self._shown = [], ""
        return self._cut(new)

    def finish(self) -> str:
        """The rest: unfinished characters as U+FFFD, and text held back for a stop string."""
        if self.stopped is not None:
            return ""
        text = self._cut(self._finish_characters())
        held, self._held = self._held, ""
        return text + held if self.stopped is None else text

    def _finish_characters(self) -> str:
        text = self._tokenizer.decode(self._ids)[len(self._shown) :] if self._ids else ""
        self._ids, self._shown = [], ""
        return text

    def _cut(self, new: str) -> str:
        """Pass `new` through the stop strings."""
        if not self._stop:
            return new
        text = self._held + new
        hits = [(at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if hits:
            at, self.stopped = min(hits)
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, s) for s in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper start of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
