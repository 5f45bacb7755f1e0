"""The released tokenizer, the compressed ids made from it, and text that streams."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tinfer.config import ConfigError
from tinfer.model.engram_hash import compressed_token_map
from tinfer.tokenizer import TextStream, Tokenizer, TokenizerError

DATA = Path(__file__).parents[1] / "data"
GOLDEN = DATA / "golden/models"
MIXED = "中国的首都是哪里？ 👩‍👩‍👧‍👦 naïve Ⅷ 𓀀𓀁\n\tfin 한국어 ﷽"


# ---------------------------------------------------------------- ids
def test_special_ids(tokenizer: Tokenizer) -> None:
    assert len(tokenizer) == 129280
    for spelling, index in {
        "<｜begin▁of▁sentence｜>": 0,
        "<｜end▁of▁sentence｜>": 1,
        "<｜▁pad▁｜>": 2,
        "<｜System｜>": 128799,
        "<｜User｜>": 128803,
        "<｜Assistant｜>": 128804,
        "<think>": 128821,
        "</think>": 128822,
        "｜DSML｜": 128825,
        "<｜latest_reminder｜>": 128828,
        "<｜action｜>": 128829,
        "<｜query｜>": 128830,
        "<｜authority｜>": 128831,
        "<｜domain｜>": 128832,
        "<｜title｜>": 128836,
        "<｜read_url｜>": 128845,
        "<｜deepseek_image｜>": 129264,
    }.items():
        assert tokenizer.control_id(spelling) == index
        assert tokenizer.encode(spelling) == [index]
        assert tokenizer.is_control(index)
        assert tokenizer.spelling(index) == spelling
    assert not tokenizer.is_control(17607)
    assert tokenizer.spelling(129280) is None


def test_round_trip(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(MIXED)) == MIXED
    assert tokenizer.decode(tokenizer.encode_plain(MIXED)) == MIXED


@pytest.mark.parametrize(
    "text", ["<｜User｜>", "a<think>b</think>", "<｜begin▁of▁sentence｜>", "｜DSML｜"]
)
def test_typed_control_strings_stay_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_plain(text)
    assert not any(tokenizer.is_control(i) for i in ids)
    assert tokenizer.decode(ids) == text
    assert any(tokenizer.is_control(i) for i in tokenizer.encode(text))


def test_segments(tokenizer: Tokenizer) -> None:
    text = "<｜User｜>say <｜User｜>!<｜Assistant｜></think>"
    ids = tokenizer.encode_segments(text, [(0, 8), (21, 34), (34, 42)])
    assert ids == [128803, *tokenizer.encode_plain("say <｜User｜>!"), 128804, 128822]
    assert tokenizer.encode_segments("Hi", []) == tokenizer.encode("Hi")
    with pytest.raises(TokenizerError, match="no say token"):
        tokenizer.encode_segments(text, [(8, 11)])


def test_special_tokens_do_not_leak_when_left_out_TK04(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a"), 1, 128804, 128822, *tokenizer.encode("b"), 128825, 129264, 0]
    assert tokenizer.decode(ids, keep_control=False) == "ab"
    kept = tokenizer.decode(ids)
    assert kept.startswith("a<｜end▁of▁sentence｜><｜Assistant｜></think>b｜DSML｜")
    stream = TextStream(tokenizer, keep_control=False)
    assert "".join([*map(stream.push, ids), stream.finish()]) == "ab"
    stream = TextStream(tokenizer)
    assert "".join([*map(stream.push, ids), stream.finish()]) == kept


def test_a_missing_or_broken_file(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no such file: .*tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_without_markers_still_reads_text() -> None:
    small = Tokenizer.load(GOLDEN / "text_plain")
    assert small.encode("w3 W4w5") == [6, 9, 10]
    assert small.decode([6, 9, 10]) == "w3 W4w5"
    with pytest.raises(TokenizerError, match="'hello' cannot be encoded"):
        small.encode("hello")
    assert small.added == {}
    with pytest.raises(TokenizerError, match=r"no <｜User｜> token.*use raw text or ids"):
        small.control_id("<｜User｜>")


# ---------------------------------------------------------------- streaming
@pytest.mark.parametrize("text", [MIXED, "plain words", "한", ""])
def test_streams_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    stream = TextStream(tokenizer)
    parts = [stream.push(i) for i in tokenizer.encode(text)] + [stream.finish()]
    assert "".join(parts) == text
    assert not any("\ufffd" in p for p in parts)


def test_every_character_comes_as_soon_as_it_is_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("𓀀")
    assert len(ids) > 1
    stream = TextStream(tokenizer)
    assert [stream.push(i) for i in ids] == [""] * (len(ids) - 1) + ["𓀀"]
    assert stream.finish() == ""


def test_text_before_an_unfinished_character_is_not_held_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x𓀀")
    stream = TextStream(tokenizer)
    assert stream.push(ids[0]) == "x"
    assert "".join(map(stream.push, ids[1:])) == "𓀀"


def test_bytes_that_never_become_a_character(tokenizer: Tokenizer) -> None:
    first = tokenizer.encode("𓀀")[0]
    stream = TextStream(tokenizer)
    text = "".join(stream.push(first) for _ in range(40))
    assert "\ufffd" in text  # it does not wait for ever
    hello = tokenizer.encode("hello")
    assert (text + "".join(map(stream.push, hello)) + stream.finish()).endswith("hello")
    stream = TextStream(tokenizer)
    assert stream.push(first) == ""
    assert stream.push(1).endswith("<｜end▁of▁sentence｜>")
    stream = TextStream(tokenizer)
    stream.push(first)
    assert set(stream.finish()) == {"\ufffd"}


def run(tokenizer: Tokenizer, text: str, stop: list[str]) -> tuple[str, str | None]:
    stream = TextStream(tokenizer, stop)
    shown = "".join([*map(stream.push, tokenizer.encode(text)), stream.finish()])
    return shown, stream.stopped


@pytest.mark.parametrize(
    ("text", "stop", "shown", "stopped"),
    [
        ("one two three", ["two"], "one ", "two"),
        ("one two three", [" thr"], "one two", " thr"),
        ("one two three", ["e t"], "on", "e t"),
        ("one two three", ["four", "two", "one"], "", "one"),
        ("one two thre", ["three"], "one two thre", None),  # held back, then let go
        ("aab", ["ab"], "a", "ab"),
        ("aaab", ["aab"], "a", "aab"),
        ("北京。好", ["。"], "北京", "。"),
        ("nothing", [], "nothing", None),
    ],
)
def test_stop_strings(
    tokenizer: Tokenizer, text: str, stop: list[str], shown: str, stopped: str | None
) -> None:
    assert run(tokenizer, text, stop) == (shown, stopped)


def test_no_part_of_a_stop_string_is_ever_shown(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["\n\nUser:"])
    shown = ""
    for token in tokenizer.encode("answer\n\nUser: more"):
        shown += stream.push(token)
        assert "answer".startswith(shown)
    assert (shown, stream.stopped, stream.finish()) == ("answer", "\n\nUser:", "")
    with pytest.raises(ValueError, match="must not be empty"):
        TextStream(tokenizer, [""])


# ---------------------------------------------------------------- engram map
def test_the_compressed_ids_of_the_release(tokenizer: Tokenizer) -> None:
    found = compressed_token_map(tokenizer.inner, 99092)
    assert found.dtype == torch.int32
    digest = hashlib.sha256(found.numpy().astype("<i4").tobytes()).hexdigest()
    assert digest == "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"
    for token, compressed in {
        0: 0, 1: 1, 2: 2, 128799: 98611, 128803: 98615, 128804: 98616, 128821: 98633,
        128822: 98634, 129264: 99076, 129275: 99087, 129279: 99091, 455: 237, 1805: 237,
        20852: 237, 270: 237, 619: 39, 71: 39, 223: 174, 201: 174, 200: 174, 17607: 14070,
    }.items():  # fmt: skip
        assert int(found[token]) == compressed, token
    with pytest.raises(ConfigError, match="must give 128 compressed ids, got 99092"):
        compressed_token_map(tokenizer.inner, 128)


@pytest.mark.parametrize("name", ["hd128", "six_types", "vision"])
def test_golden_maps(name: str) -> None:
    found = compressed_token_map(Tokenizer.load(GOLDEN / name).inner)
    golden = load_file(GOLDEN / name / "engram_constants.safetensors")["token_map"]
    assert np.array_equal(found.numpy(), golden.numpy())
