"""Checkpoints: both layouts read exactly; anything wrong is an error before data is read."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.checkpoint import files
from tinfer.checkpoint import CheckpointError, expected_tensors, open_checkpoint
from tinfer.checkpoint.expected import Table, add_fp4, add_fp8
from tinfer.config import ModelConfig
from tinfer.formats import Fp8Block32

DATA = Path(__file__).parents[1] / "data"
MODELS = sorted(p.name for p in files.GOLDEN.iterdir())
SCALED = "layers.1.attn.wq_b.scale"


def raw(value: torch.Tensor) -> torch.Tensor:
    """One-byte types as bytes, to compare with what the reader hands out."""
    return value.view(torch.uint8) if value.element_size() == 1 else value


# ---------------------------------------------------------------- what a checkpoint holds
def test_release_tensors_are_exactly_the_published_ones() -> None:
    packed = (DATA / "release/release_tensors.json.gz").read_bytes()
    listed = json.loads(gzip.decompress(packed))["tensors"]
    published = {name: (dtype, tuple(shape)) for name, dtype, shape, _shard in listed}
    expected = expected_tensors(ModelConfig.load(DATA / "release/config.json"))
    assert len(published) == 96085
    assert {n: (s.dtype, s.shape) for n, s in expected.items()} == published
    assert sum(s.nbytes for s in expected.values()) == 510_286_023_000


@pytest.mark.parametrize("name", MODELS)
def test_golden_tensors_read_as_another_reader_reads_them(name: str) -> None:
    config = ModelConfig.load(files.GOLDEN / name)
    checkpoint = open_checkpoint(files.GOLDEN / name, config, vision=config.vision_n_layers > 0)
    seen = 0
    for path in sorted((files.GOLDEN / name).glob("model*.safetensors")):
        with safe_open(path, "pt") as other:
            for key in other.keys():  # noqa: SIM118
                assert torch.equal(checkpoint.tensor(key), raw(other.get_tensor(key))), key
                seen += 1
    assert seen == len(checkpoint.names()) > 300
    assert not checkpoint.skipped


def test_rows_are_the_rows() -> None:
    checkpoint = open_checkpoint(files.GOLDEN / "hd128")
    name = "layers.2.engram.embed.weight"
    whole = checkpoint.tensor(name)
    assert torch.equal(checkpoint.tensor(name, (10, 37)), whole[10:37])
    assert checkpoint.tensor(name, (5, 5)).shape == (0, whole.shape[1])
    with pytest.raises(IndexError, match=r"must lie in 0\.\.372"):
        checkpoint.tensor(name, (370, 373))
    with pytest.raises(KeyError, match="is not in"):
        checkpoint.tensor("layers.9.attn.wq_a.weight")


def test_views_do_not_copy_the_file() -> None:
    checkpoint = open_checkpoint(files.GOLDEN / "hd128")
    one, two = (checkpoint.tensor("layers.2.engram.embed.weight") for _ in range(2))
    assert one.data_ptr() == two.data_ptr()


def test_bytes_need_no_torch_types_LD04(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("float8_e8m0fnu", "float4_e2m1fn_x2", "float8_e4m3fn"):
        monkeypatch.delattr(torch, name, raising=False)
    checkpoint = open_checkpoint(files.GOLDEN / "text_plain")
    stored = files.golden("text_plain")
    for name in ("layers.0.attn.wq_a.weight", SCALED, "layers.0.ffn.experts.0.w1.weight"):
        value = checkpoint.tensor(name)
        assert value.dtype == torch.uint8
        assert value.numpy().tobytes() == stored[name][2]
    kinds = {checkpoint.spec(n).dtype for n in checkpoint.names()}
    assert kinds == {"F8_E8M0", "F8_E4M3", "I8", "BF16", "F32"}


# ---------------------------------------------------------------- vision in text mode
def test_vision_is_skipped_by_rule_in_text_mode_IM04() -> None:
    checkpoint = open_checkpoint(files.GOLDEN / "vision")
    (rule,) = checkpoint.skipped
    names = checkpoint.skipped[rule]
    assert {n.split(".")[0] for n in names} == {
        "vision", "aligner", "image_start", "image_end", "image_newline",
    }  # fmt: skip
    assert len(names) == 26
    assert not set(names) & checkpoint.names()
    with pytest.raises(KeyError, match="was skipped: text mode"):
        checkpoint.tensor("aligner.w1.weight")
    with_tower = open_checkpoint(files.GOLDEN / "vision", vision=True)
    assert len(with_tower.names()) == len(checkpoint.names()) + 26


def test_unknown_names_are_an_error_IM04(tmp_path: Path) -> None:
    stored = files.golden("text_plain") | {"layers.0.attn.extra.weight": ("F32", [1], bytes(4))}
    files.single(tmp_path, "text_plain", stored)
    with pytest.raises(CheckpointError, match=r"unknown tensor layers\.0\.attn\.extra\.weight"):
        open_checkpoint(tmp_path)


def test_a_text_only_config_skips_a_tower_that_the_file_has_IM04(tmp_path: Path) -> None:
    stored = files.golden("text_plain")
    stored |= {n: t for n, t in files.golden("vision").items() if n.startswith("vision.")}
    files.single(tmp_path, "text_plain", stored)
    skipped = open_checkpoint(tmp_path).skipped
    assert {len(v) for v in skipped.values()} == {19}
    with pytest.raises(CheckpointError, match=r"unknown tensor vision\."):
        open_checkpoint(tmp_path, vision=True)


# ---------------------------------------------------------------- damaged files
def edited(tmp_path: Path, **changes: tuple[str, list[int], bytes] | None) -> Path:
    """text_plain with tensors replaced (or removed); dots are written `__`."""
    stored = files.golden("text_plain")
    for key, value in changes.items():
        name = key.replace("__", ".")
        assert name in stored
        stored.pop(name)
        if value is not None:
            stored[name] = value
    return files.single(tmp_path / "edited", "text_plain", stored)


@pytest.mark.parametrize("cut", [1, 4096, 1_000_000])
def test_a_truncated_shard_names_file_and_sizes_LD01(tmp_path: Path, cut: int) -> None:
    shutil.copytree(files.GOLDEN / "hd128", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model-00002-of-00002.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path)
    text = str(error.value)
    assert f"{path} is truncated: expected {len(data)} bytes" in text
    assert f"the file has {len(data) - cut}" in text


@pytest.mark.parametrize("size", [0, 7, 8, 100])
def test_a_shard_cut_inside_its_header(tmp_path: Path, size: int) -> None:
    files.single(tmp_path, "text_plain", files.golden("text_plain"))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors .*(truncated|not a safetensors)"
    ):
        open_checkpoint(tmp_path)


def test_a_longer_file_a_pointer_and_a_foreign_file(tmp_path: Path) -> None:
    files.single(tmp_path, "text_plain", files.golden("text_plain"))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="longer than its header says"):
        open_checkpoint(tmp_path)
    path.write_bytes(b"version https://git-lfs.example\noid sha256:00\nsize 9\n")
    with pytest.raises(CheckpointError, match="Git LFS pointer"):
        open_checkpoint(tmp_path)
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{nonsense", "broken header"),
        (b'{"a":{"dtype":"F32","shape":[1]}}', "broken header entry"),
        (b'{"a":{"dtype":"Q4","shape":[1],"data_offsets":[0,4]}}', "must be one of F32.*got Q4"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', "must span 8 bytes, got 4"),
        (b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}', "negative size"),
        (b'{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}', "even last size"),
        (
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
            b'"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}',
            "b overlaps",
        ),
        (
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
            b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            "occurs twice",
        ),
    ],
)
def test_a_broken_header_is_refused(tmp_path: Path, header: bytes, message: str) -> None:
    files.single(tmp_path, "text_plain", {})
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    shutil.copytree(files.GOLDEN / "hd128", tmp_path, dirs_exist_ok=True)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 shards are missing.*model-00002-of-00002"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        open_checkpoint(tmp_path)


def test_shards_without_an_index_are_read(tmp_path: Path) -> None:
    shutil.copytree(files.GOLDEN / "hd128", tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert open_checkpoint(tmp_path).names() == open_checkpoint(files.GOLDEN / "hd128").names()


def test_the_index_is_not_trusted(tmp_path: Path) -> None:
    shutil.copytree(files.GOLDEN / "hd128", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = next(iter(index["weight_map"]))
    index["weight_map"][first] = "model-00002-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"00002.safetensors: {first} is missing"):
        open_checkpoint(tmp_path)
    index["weight_map"][first] = "../model.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="must name files beside it"):
        open_checkpoint(tmp_path)
    path.write_text("{}")
    with pytest.raises(CheckpointError, match="no valid weight_map"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards_is_an_error(tmp_path: Path) -> None:
    shutil.copytree(files.GOLDEN / "hd128", tmp_path, dirs_exist_ok=True)
    second = tmp_path / "model-00002-of-00002.safetensors"
    first = files.read(tmp_path / "model-00001-of-00002.safetensors")
    files.write(second, files.read(second) | {"embed.weight": first["embed.weight"]})
    with pytest.raises(CheckpointError, match=r"embed\.weight is in both .*00001.* and .*00002"):
        open_checkpoint(tmp_path)


def test_not_a_checkpoint(tmp_path: Path) -> None:
    shutil.copy(files.GOLDEN / "long/config.json", tmp_path)
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such directory"):
        open_checkpoint(tmp_path / "nowhere")


# ---------------------------------------------------------------- wrong tensors
def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = edited(tmp_path, layers__2__attn__kv_norm__weight=None)
    with pytest.raises(
        CheckpointError, match=r"layers\.2\.attn\.kv_norm\.weight is missing; expected BF16 \[64\]"
    ):
        open_checkpoint(path)


@pytest.mark.parametrize("part", ["attn.wq_b", "attn.wo_a", "ffn.experts.3.w2"])
def test_a_missing_scale_names_its_weight_LD03(tmp_path: Path, part: str) -> None:
    path = edited(tmp_path, **{f"layers__1__{part.replace('.', '__')}__scale": None})
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path)
    text = str(error.value)
    assert f"layers.1.{part}.scale is missing (the scale of layers.1.{part}.weight in" in text
    assert "no default" in text


@pytest.mark.parametrize(
    ("name", "tag", "shape"),
    [
        ("layers.1.attn.wq_b.scale", "F8_E8M0", [16, 1]),  # fp8: one scale per 32x32 tile
        ("layers.1.attn.wq_b.scale", "F32", [16, 2]),
        ("layers.1.attn.wq_b.weight", "I8", [512, 64]),
        ("layers.1.attn.wq_b.weight", "F8_E4M3", [64, 512]),
        ("layers.1.ffn.experts.0.w1.scale", "F8_E8M0", [2, 3]),  # fp4: one per row per 32
        ("layers.1.ffn.experts.0.w1.weight", "F8_E4M3", [64, 48]),
        ("layers.1.ffn.experts.0.w1.weight", "F4", [64, 48]),
        ("layers.1.attn.q_norm.weight", "F32", [64]),
        ("layers.1.ffn.gate.bias", "BF16", [8]),
    ],
)
def test_wrong_shape_or_dtype_LD05(tmp_path: Path, name: str, tag: str, shape: list[int]) -> None:
    size = int(torch.tensor(shape).prod()) * files.BITS[tag] // 8
    path = edited(tmp_path, **{name.replace(".", "__"): (tag, shape, bytes(size))})
    expected = expected_tensors(ModelConfig.load(path))[name]
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path)
    text = str(error.value)
    assert "model.safetensors" in text
    assert f"{name} must be {expected.dtype}" in text
    assert "got" in text


def test_scales_cover_edge_tiles_LD05() -> None:
    table: Table = {}
    add_fp8(table, "dense", 65, 31)
    add_fp4(table, "expert", 65, 96)
    assert {n: s.shape for n, s in table.items()} == {
        "dense.weight": (65, 31),
        "dense.scale": (3, 1),
        "expert.weight": (65, 48),
        "expert.scale": (65, 3),
    }


def test_a_nan_scale_is_found_when_read(tmp_path: Path) -> None:
    tag, shape, data = files.golden("text_plain")[SCALED]
    bad = bytearray(data)
    bad[5] = 255
    path = edited(tmp_path, **{SCALED.replace(".", "__"): (tag, shape, bytes(bad))})
    checkpoint = open_checkpoint(path)
    row, col = divmod(5, shape[1])
    with pytest.raises(
        CheckpointError, match=rf"model\.safetensors: {SCALED} .*255 at \[{row}, {col}\]"
    ):
        checkpoint.tensor(SCALED)
    with pytest.raises(CheckpointError, match=rf"at \[{row}, {col}\]"):
        checkpoint.tensor(SCALED, (row, row + 1))
    assert checkpoint.tensor(SCALED, (0, row)).max() < 255
    assert checkpoint.tensor(SCALED, check_scale=False)[row, col] == 255


def test_misaligned_data_is_read_right(tmp_path: Path) -> None:
    stored = files.golden("text_plain")
    gate = stored.pop("layers.0.ffn.gate.bias")
    odd = stored.pop("layers.0.attn.wkv.scale")
    assert len(odd[2]) % 4
    order = {"layers.0.attn.wkv.scale": odd, "layers.0.ffn.gate.bias": gate} | stored
    files.single(tmp_path, "text_plain", order)
    value = open_checkpoint(tmp_path).tensor("layers.0.ffn.gate.bias")
    assert value.numpy().tobytes() == gate[2]


# ---------------------------------------------------------------- converted, per-rank files
def converted(tmp_path: Path, model: str, ranks: int, fp4_tag: str = "F4") -> Path:
    shutil.copy(files.GOLDEN / model / "config.json", tmp_path)
    for rank, tensors in enumerate(files.convert(files.golden(model), ranks, fp4_tag)):
        files.write(tmp_path / f"model{rank}-mp{ranks}.safetensors", tensors)
    return tmp_path


@pytest.mark.parametrize(
    ("model", "ranks", "tag"), [("hd128", 2, "F4"), ("hd128", 1, "I8"), ("vision", 2, "I8")]
)
def test_a_converted_checkpoint_reads_as_the_release(
    tmp_path: Path, model: str, ranks: int, tag: str
) -> None:
    vision = model == "vision"
    release = open_checkpoint(files.GOLDEN / model, vision=vision)
    checkpoint = open_checkpoint(converted(tmp_path, model, ranks, tag), vision=vision)
    scales = {n for n in release.names() if n.endswith("wo_a.scale")}
    assert checkpoint.names() == release.names() - scales
    for name in checkpoint.names():
        value, whole = checkpoint.tensor(name), release.tensor(name)
        if name.endswith("wo_a.weight"):
            scale = release.tensor(name.replace("weight", "scale"))
            whole = Fp8Block32(whole, scale).dequantize()
        assert torch.equal(value, whole), name
        assert checkpoint.spec(name).shape == tuple(whole.shape)
        if len(whole) > 2:
            rows = (1, len(whole) - 1)
            assert torch.equal(checkpoint.tensor(name, rows), whole[slice(*rows)]), name


def test_padded_engram_rows_are_not_handed_out(tmp_path: Path) -> None:
    stored = files.golden("hd128")
    for part in ("weight", "scale"):  # 371 rows: the last of two ranks is padded by one
        tag, shape, data = stored[f"layers.2.engram.embed.{part}"]
        cut = (tag, [371, shape[1]], data[: 371 * shape[1]])
        stored[f"layers.2.engram.embed.{part}"] = cut
    raw_config = json.loads((files.GOLDEN / "hd128/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw_config | {"engram_num_embeddings": [371]}))
    for rank, tensors in enumerate(files.convert(stored, 2)):
        assert tensors["layers.2.engram.embed.weight"][1][0] == 186
        files.write(tmp_path / f"model{rank}-mp2.safetensors", tensors)
    value = open_checkpoint(tmp_path).tensor("layers.2.engram.embed.weight")
    assert value.numpy().tobytes() == stored["layers.2.engram.embed.weight"][2]


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    path = converted(tmp_path, "hd128", 2)
    (path / "model1-mp2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model1-mp2\.safetensors is missing"):
        open_checkpoint(path)


def test_mixed_conversions_are_refused(tmp_path: Path) -> None:
    path = converted(tmp_path, "hd128", 2)
    shutil.copy(path / "model0-mp2.safetensors", path / "model0-mp4.safetensors")
    with pytest.raises(CheckpointError, match=r"mixes conversions for \[2, 4\] ranks"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("layers.0.attn.wq_a.weight", 1),  # replicated: every rank must hold it
        ("layers.0.attn.wq_b.weight", 1),
        ("layers.0.ffn.experts.4.w1.weight", 1),
    ],
)
def test_a_tensor_missing_from_one_rank(tmp_path: Path, name: str, rank: int) -> None:
    path = converted(tmp_path, "hd128", 2)
    file = path / f"model{rank}-mp2.safetensors"
    tensors = files.read(file)
    del tensors[name]
    files.write(file, tensors)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path)
    assert name in str(error.value)
    assert "is missing" in str(error.value)


def test_ranks_of_different_shapes_are_refused(tmp_path: Path) -> None:
    path = converted(tmp_path, "hd128", 2)
    file = path / "model1-mp2.safetensors"
    tensors = files.read(file)
    tag, (rows, cols), data = tensors["layers.0.attn.wq_b.weight"]
    tensors["layers.0.attn.wq_b.weight"] = (tag, [rows // 2, cols], data[: len(data) // 2])
    files.write(file, tensors)
    with pytest.raises(CheckpointError, match=r"wq_b\.weight must be F8_E4M3 \[512, 96\] over 2"):
        open_checkpoint(path)
