"""Constants of the n-gram hash: the release's figures, golden token maps, wrong tokenizers."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest
import torch
from tokenizers import Regex, Tokenizer, normalizers

from tests.data.golden.check_golden import Golden, OpCase
from tests.release import release_token_map, release_tokenizer
from tinfer.config import ConfigError, ModelConfig
from tinfer.model.engram_hash import compressed_token_map, hash_constants, normalize

GOLDEN = Golden("tests/data/golden")
MODELS = list(GOLDEN.index["models"])
MAP_DIGEST = "26b9be2936d236a124ba318a998c417bc7032e3e92a3107fe98deee49f1dc496"


def config_of(**changes: object) -> ModelConfig:
    """A golden model's configuration, changed."""
    raw = json.loads((GOLDEN.root / MODELS[0]["dir"] / "config.json").read_text())
    return ModelConfig.from_dict(raw | changes)


def release_config() -> ModelConfig:
    """The release's engram figures in a small model; layers 1 and 14 need no such layers here."""
    small = config_of()
    return dataclasses.replace(
        small,
        engram_layer_ids=(1, 14),
        engram_num_embeddings=(384006168, 384016682),
        engram_max_ngram_size=4,
        engram_vocab_size=16000000,
        engram_n_heads=8,
        engram_compressed_vocab_size=99092,
    )


# ---------------------------------------------------------------- primes and multipliers
def test_eg01_primes_of_the_release() -> None:
    c = hash_constants(release_config())
    assert c.primes.flatten(1).sum(1).tolist() == [384006168, 384016682]
    flat = c.primes.flatten().tolist()
    assert flat[:3] == [16000057, 16000079, 16000081]
    assert (flat[23], flat[24], flat[47]) == (16000463, 16000477, 16000889)
    assert c.offsets[:, 0].tolist() == [0, 0]
    assert c.offsets[0, [12, 23]].tolist() == [192001740, 368005705]
    assert c.offsets[1, [12, 23]].tolist() == [192007016, 368015793]


def test_eg02_multipliers_of_the_release() -> None:
    c = hash_constants(release_config())
    assert c.multipliers.tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]
    assert int(c.multipliers.max()) * 99091 < 2**63


@pytest.mark.parametrize("case", GOLDEN.ops("ngram_hash"), ids=lambda c: c.case)
def test_golden_constants(case: OpCase) -> None:
    p = case.params
    names = ("engram_layer_ids", "engram_max_ngram_size", "engram_n_heads", "engram_vocab_size")
    rows = tuple(case.outputs["primes"].flatten(1).sum(1).tolist())
    config = dataclasses.replace(
        config_of(),
        **{n: tuple(p[n]) if isinstance(p[n], list) else p[n] for n in names},
        engram_compressed_vocab_size=p["compressed_vocab_size"],
        engram_num_embeddings=rows,
    )
    case.check(hash_constants(config)._asdict())


@pytest.mark.parametrize("model", [m["name"] for m in MODELS])
def test_eg14_constants_of_golden_checkpoints(model: str) -> None:
    """A checkpoint holds none of the constants: configuration and tokenizer give them all."""
    directory = GOLDEN.root / next(m["dir"] for m in MODELS if m["name"] == model)
    config = ModelConfig.load(directory)
    if not config.engram_layer_ids:
        pytest.skip("no engram layer")
    from safetensors.torch import load_file

    want = load_file(directory / "engram_constants.safetensors")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    token_map = compressed_token_map(tokenizer, config.engram_compressed_vocab_size)
    assert torch.equal(token_map.long(), want["token_map"].long())
    assert int(token_map[config.engram_pad_id]) == int(want["pad_id"])
    for name, value in hash_constants(config)._asdict().items():
        assert torch.equal(value.flatten(), want[name].flatten().long()), name


def test_tables_of_another_size_are_refused() -> None:
    config = dataclasses.replace(release_config(), engram_num_embeddings=(384006168, 384016683))
    with pytest.raises(
        ConfigError, match=r"engram_num_embeddings must be \[384006168, 384016682\]"
    ):
        hash_constants(config)


# ---------------------------------------------------------------- compressed ids
@pytest.mark.parametrize("case", GOLDEN.ops("compressed_token_map"), ids=lambda c: c.case)
def test_golden_token_map(case: OpCase) -> None:
    tokenizer = Tokenizer.from_file(str(GOLDEN.root / case.params["tokenizer"]))
    token_map = compressed_token_map(tokenizer, case.params["compressed_vocab_size"])
    case.check({"token_map": token_map.long()})


def test_eg14_token_map_of_the_release() -> None:
    token_map = release_token_map()
    assert (len(token_map), int(token_map.max()) + 1) == (129280, 99092)
    assert hashlib.sha256(token_map.numpy().astype("<i8").tobytes()).hexdigest() == MAP_DIGEST
    assert token_map[[0, 1, 2, 128799, 129264]].tolist() == [0, 1, 2, 98611, 99076]
    assert token_map[[455, 1805, 20852, 270, 619, 71]].tolist() == [237] * 4 + [39] * 2
    assert token_map[[223, 201, 200, 17607]].tolist() == [174, 174, 174, 14070]
    assert token_map[-5:].tolist() == [99087, 99088, 99089, 99090, 99091]


def test_normalize_agrees_with_the_tokenizers_library() -> None:
    """An independent implementation, over the release's vocabulary."""
    space, lone = normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), "\ue000"
    other = normalizers.Sequence(
        [
            *(normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents()),
            *(normalizers.Lowercase(), space, normalizers.Replace(Regex("^ $"), lone)),
            *(normalizers.Strip(), normalizers.Replace(lone, " ")),
        ]
    )
    tokenizer = release_tokenizer()
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(0, 129280, 7)]
    texts += ["", " ", "  ", " \t\r\n", "\x1c", "\x85a\u3000", "\ue000", "a\ue000 ", "ΣΑΣ", "İ"]
    assert [t for t in texts if normalize(t) != other.normalize_str(t)] == []


def test_another_tokenizer_is_refused() -> None:
    case = GOLDEN.ops("compressed_token_map")[0]
    tokenizer = Tokenizer.from_file(str(GOLDEN.root / case.params["tokenizer"]))
    with pytest.raises(ConfigError, match="must give 99092 compressed ids, got 41"):
        compressed_token_map(tokenizer, 99092)
