"""Make checkpoint files for the tests: golden models rewritten, damaged, or converted."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
from pathlib import Path

import torch
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "data/golden/models"
BITS = {"F32": 32, "BF16": 16, "F8_E4M3": 8, "F8_E8M0": 8, "I8": 8, "F4": 4, "F16": 16}

Stored = dict[str, tuple[str, list[int], bytes]]  # name -> dtype tag, shape, data


def read(path: Path) -> Stored:
    """Every tensor of a safetensors file as raw bytes."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    body = data[8 + size :]
    return {
        name: (e["dtype"], e["shape"], body[slice(*e["data_offsets"])])
        for name, e in header.items()
    }


def write(path: Path, tensors: Stored) -> None:
    header, offset = {}, 0
    for name, (tag, shape, data) in tensors.items():
        assert math.prod(shape) * BITS[tag] // 8 == len(data), name
        end = offset + len(data)
        header[name] = {"dtype": tag, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(d[2] for d in tensors.values()))


def golden(name: str) -> Stored:
    stored: Stored = {}
    for path in sorted((GOLDEN / name).glob("model*.safetensors")):
        stored |= read(path)
    return stored


def single(directory: Path, model: str, tensors: Stored) -> Path:
    """A directory with the golden model's config and one `model.safetensors`."""
    directory.mkdir(exist_ok=True)
    shutil.copy(GOLDEN / model / "config.json", directory)
    write(directory / "model.safetensors", tensors)
    return directory


def _array(stored: tuple[str, list[int], bytes]) -> Tensor:
    tag, shape, data = stored
    kind = {32: torch.float32, 16: torch.bfloat16, 8: torch.uint8}[BITS[tag]]
    return torch.frombuffer(bytearray(data), dtype=kind).view(shape)


def _bytes(tag: str, value: Tensor) -> tuple[str, list[int], bytes]:
    raw = value.contiguous().view(torch.uint8).numpy().tobytes()
    return tag, list(value.shape), raw


def convert(stored: Stored, ranks: int, fp4_tag: str = "F4") -> list[Stored]:
    """The release's conversion for `ranks` tensor-parallel ranks, written down independently."""
    experts = {
        kind: 1 + max((int(m[1]) for n in stored if (m := re.match(pattern, n))), default=-1)
        for kind, pattern in (
            ("layers", r"layers\.\d+\.ffn\.experts\.(\d+)\."),
            ("mtp", r"mtp\.\d+\.ffn\.experts\.(\d+)\."),
        )
    }
    out: list[Stored] = [{} for _ in range(ranks)]
    for name, entry in stored.items():
        tag, value = entry[0], _array(entry)
        expert = re.match(r"(layers|mtp)\.\d+\.ffn\.experts\.(\d+)\.", name)
        if expert:
            each = experts[expert[1]] // ranks
            shape = list(value.shape)
            if tag == "I8" and fp4_tag == "F4":
                entry = ("F4", [*shape[:-1], shape[-1] * 2], entry[2])
            out[int(expert[2]) // each][name] = entry
            continue
        if ".engram.embed." in name:
            each = -(-value.shape[0] // ranks)
            fill = 127 if name.endswith("scale") else 0
            padded = torch.full((each * ranks, value.shape[1]), fill, dtype=torch.uint8)
            padded[: value.shape[0]] = value
            parts = padded.chunk(ranks)
        elif name.startswith(("vision.", "aligner.")):
            parts = [value] * ranks
        elif re.search(r"(^|\.)(embed|head|wq_b|wo_a|weights_proj)\.(weight|scale)$", name) or (
            name.endswith("attn_sink")
        ):
            parts = value.chunk(ranks, 0)
        elif re.search(r"\.wo_b\.(weight|scale)$", name):
            parts = value.chunk(ranks, 1)
        else:
            parts = [value] * ranks
        for rank, part in enumerate(parts):
            out[rank][name] = _bytes(tag, part)
    for rank in out:
        _widen_wo_a(rank)
    return out


def _widen_wo_a(rank: Stored) -> None:
    """wo_a becomes BF16 and loses its scale."""
    for name in [n for n in rank if n.endswith("wo_a.scale")]:
        weight = name.replace("scale", "weight")
        scale = _array(rank.pop(name)).to(torch.float32)
        codes = _array(rank[weight]).view(torch.float8_e4m3fn).float()
        tiles = torch.exp2(scale - 127).repeat_interleave(32, 0).repeat_interleave(32, 1)
        value = codes * tiles[: codes.shape[0], : codes.shape[1]]
        rank[weight] = _bytes("BF16", value.bfloat16())
