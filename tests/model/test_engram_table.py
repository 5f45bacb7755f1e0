"""Engram tables on the device, pinned and mapped: the same rows, few reads, and shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tinfer.compat.engram import engram_gather
from tinfer.model.engram_table import (
    TABLES,
    EngramTable,
    ResidentTable,
    ShardedTable,
    StagedTable,
    mapped_table,
    shard_rows,
)
from tinfer.registry import use_kernels
from tinfer.testing.cases.engram import gathered
from tinfer.testing.compare import assert_exact

ROWS, WIDTH, NAME = 5000, 256, "layers.1.engram.embed"


class File:
    """Tensors of a safetensors file, memory-mapped."""

    def __init__(self, path: Path) -> None:
        self.open = safe_open(path, "pt")

    def tensor(self, name: str) -> Tensor:
        return self.open.get_tensor(name)


@pytest.fixture
def call(seed: int) -> dict[str, Tensor]:
    """512 tokens whose n-grams repeat, some ids out of range."""
    a = gathered(torch.Generator().manual_seed(seed), 512, 24, WIDTH, ROWS)
    a["ids"][256:] = a["ids"][:256]
    a["ids"][::7, 3] = ROWS + 5
    return a


@pytest.fixture
def file(call: dict[str, Tensor], tmp_path: Path) -> File:
    path = tmp_path / "table.safetensors"
    weight = call["table"].view(torch.float8_e4m3fn)
    scale = call["scale"].view(torch.float8_e8m0fnu)
    save_file({f"{NAME}.weight": weight, f"{NAME}.scale": scale}, path)
    return File(path)


@pytest.mark.parametrize("kind", TABLES)
def test_tables_agree(kind: str, call: dict[str, Tensor], file: File, device: str) -> None:
    table = TABLES[kind](file, NAME, torch.device(device))
    ids = call["ids"].to(device)
    with use_kernels("auto" if device == "cuda" else "ref"):
        assert_exact(table.gather(ids).cpu(), engram_gather(**call))
        assert table.gather(ids[:0]).shape == (0, 24 * WIDTH)
        assert_exact(table.gather(ids[:1]).cpu(), engram_gather(**call)[:1])
    assert table.capturable == (kind != "mapped")


def test_eg12_a_chunk_reads_its_distinct_rows_once(call: dict[str, Tensor], file: File) -> None:
    table = mapped_table(file, NAME, torch.device("cpu"))
    assert isinstance(table, StagedTable)
    distinct = call["ids"].unique()
    distinct = distinct[(distinct >= 0) & (distinct < ROWS)]
    with use_kernels("ref"):
        table.gather(call["ids"])
    assert table.rows_read == len(distinct) < call["ids"].numel() // 2


def test_eg13_rows_through_the_mapping_are_the_files_bytes(
    call: dict[str, Tensor], file: File, tmp_path: Path, seed: int
) -> None:
    table = mapped_table(file, NAME, torch.device("cpu"))
    assert isinstance(table, StagedTable)
    rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))[:1000]
    weight, scale = table._read(rows, torch.device("cpu"))
    raw = (tmp_path / "table.safetensors").read_bytes()
    for got, name, width in ((weight, "weight", WIDTH), (scale, "scale", WIDTH // 32)):
        start = raw.index(call["table" if name == "weight" else "scale"].numpy().tobytes()[:4096])
        for row, value in zip(rows.tolist(), got, strict=True):
            at = start + row * width
            assert raw[at : at + width] == value.numpy().tobytes()


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", TABLES)
def test_eg09_shards(
    world: int, kind: str, call: dict[str, Tensor], file: File, device: str
) -> None:
    """Every rank asks for all ids; the integer sum of the answers is the whole table's."""
    ids, total = call["ids"].to(device), torch.zeros(512, 12 * WIDTH, dtype=torch.int32)
    total = total.to(device)
    with use_kernels("auto" if device == "cuda" else "ref"):
        for rank in range(world):
            rows = shard_rows(ROWS, rank, world)
            local = TABLES[kind](file, NAME, torch.device(device), rows)
            ShardedTable(local, total.add_).gather(ids)
    assert_exact(total.view(torch.bfloat16).cpu(), engram_gather(**call))


def test_eg08_ranks_with_different_numbers_of_tokens(call: dict[str, Tensor]) -> None:
    """0, 1 and 5 tokens: every rank calls its collective, with an empty tensor if it must."""
    seen: list[tuple[int, ...]] = []
    table: EngramTable = ResidentTable(call["table"], call["scale"])
    sharded = ShardedTable(table, lambda x: seen.append(tuple(x.shape)))
    with use_kernels("ref"):
        for tokens in (0, 1, 5):
            sharded.gather(call["ids"][:tokens])
    assert seen == [(0, 12 * WIDTH), (1, 12 * WIDTH), (5, 12 * WIDTH)]


def test_shard_rows_cover_the_table() -> None:
    """The release's split: ceil(rows / ranks) rows each."""
    assert [len(shard_rows(384006168, r, 8)) for r in range(8)] == [48000771] * 8
    assert [len(shard_rows(384016682, r, 4)) for r in range(4)] == [96004171] * 3 + [96004169]
    spread = [row for r in range(4) for row in shard_rows(5, r, 4)]
    assert spread == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.3, got 4"):
        shard_rows(5, 4, 4)
