"""Philox against Random123's known answers and the output of cuRAND."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.parity import check_parity
from tinfer import ops
from tinfer.compat.philox import philox4x32
from tinfer.registry import use_kernels
from tinfer.testing.aot import TARGETS, check_family
from tinfer.testing.cases import Case, cases

CASES = cases(family="philox")
IMPLEMENTATIONS = ("ref", pytest.param("triton", marks=pytest.mark.interpret))
DATA = json.loads((Path(__file__).parents[1] / "data" / "sampling" / "philox.json").read_text())


@pytest.mark.interpret
@pytest.mark.parametrize("case", [c for c in CASES if not c.real], ids=lambda c: c.id)
def test_parity(case: Case, seed: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_parity(case, seed, device, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in CASES if c.real], ids=lambda c: c.id)
def test_parity_real(case: Case, seed: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_parity(case, seed, device, monkeypatch)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_compiles(target: str) -> None:
    check_family("philox", target)


def bits64(value: int, device: str) -> Tensor:
    """int64 [1] with the bits of an unsigned 64-bit integer."""
    return torch.tensor([(value + 2**63) % 2**64 - 2**63], device=device)


def words(seed: int, subsequence: int, offset: int, count: int, device: str) -> list[int]:
    stream = (bits64(value, device) for value in (seed, subsequence, offset))
    return [int(w) for w in ops.philox_words(*stream, count)[0]]


@pytest.mark.parametrize("kat", DATA["random123"])
def test_known_answers(kat: dict[str, Any]) -> None:
    counter, key = ([torch.tensor(int(w, 16)) for w in kat[k]] for k in ("counter", "key"))
    got = philox4x32(counter, key, kat["rounds"])
    assert [f"{int(w):08x}" for w in got] == kat["output"]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("kat", [k for k in DATA["random123"] if k["rounds"] == 10][:1])
def test_known_answer_as_stream(kat: dict[str, Any], impl: str, device: str) -> None:
    """A block's counter is (offset // 4, subsequence), its key the seed, low halves first.

    The other answers have counters that no 64-bit offset reaches.
    """
    c, k = ([int(w, 16) for w in kat[name]] for name in ("counter", "key"))
    block, subsequence, seed = c[0] | c[1] << 32, c[2] | c[3] << 32, k[0] | k[1] << 32
    assert block < 2**62
    with use_kernels(impl):
        got = words(seed, subsequence, 4 * block, 4, device)
    assert [f"{w:08x}" for w in got] == kat["output"]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("row", DATA["curand"])
def test_words_of_curand(row: dict[str, Any], impl: str, device: str) -> None:
    with use_kernels(impl):
        got = words(row["seed"], row["subsequence"], row["offset"], 6, device)
    assert [f"{w:08x}" for w in got] == row["words"]


@pytest.mark.parametrize("row", DATA["curand_uniform"])
def test_uniform_of_curand(row: dict[str, Any]) -> None:
    """curand_uniform is fp32(word) * 2^-32 + 2^-33, in (0, 1]."""
    got = words(row["seed"], row["subsequence"], row["offset"], 4, "cpu")
    uniform = torch.tensor(got).float() * 2.0**-32 + 2.0**-33
    assert torch.equal(uniform, torch.tensor(row["values"], dtype=torch.float32))


@pytest.mark.parametrize("word", [0, 0xFFFFFF80, 0xFFFFFFFF])
def test_why_words_stay_integers(word: int) -> None:
    """SM-03: a float made of a word can be exactly 1.0; word % 2^31 is always below the total."""
    uniform = torch.tensor(word).float() * 2.0**-32 + 2.0**-33
    assert 0.0 < float(uniform) <= 1.0
    assert (float(uniform) == 1.0) == (word >= 0xFFFFFF80)
    assert word % 2**31 < 2**31


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_words_do_not_depend_on_where_a_stream_is_cut(impl: str, device: str) -> None:
    with use_kernels(impl):
        whole = words(9, 3, 5, 12, device)
        parts = words(9, 3, 5, 7, device) + words(9, 3, 12, 5, device)
    assert whole == parts
