"""The memory plan: the release's published sums, and what does not fit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint import files
from tinfer.checkpoint import CheckpointError, TensorSpec, expected_tensors
from tinfer.checkpoint.__main__ import main
from tinfer.checkpoint.expected import Table
from tinfer.checkpoint.host import host_memory_limit
from tinfer.checkpoint.layout import split_dim
from tinfer.checkpoint.plan import (
    GIB,
    TABLES,
    Demand,
    Memory,
    component,
    make_plan,
    needs,
    require_fit,
    shortfalls,
)
from tinfer.config import ConfigError, ModelConfig

RELEASE = Path(__file__).parents[1] / "data/release/config.json"


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.load(RELEASE)


@pytest.fixture(scope="module")
def table(config: ModelConfig) -> Table:
    return expected_tensors(config)


def test_components_of_the_release(config: ModelConfig, table: Table) -> None:
    found = {c.name: c.total for c in make_plan(config, table).components}
    assert found == {
        "routed experts": 288_777_830_400,
        "engram tables": 202_758_032_400,
        "engram projections": 315_043_840,
        "attention": 5_069_721_600,
        "shared experts": 1_416_960_000,
        "embedding": 1_323_827_200,
        "head": 1_323_827_200,
        "gates": 157_409_280,
        "hyper-connections": 157_295_040,
        "indexer": 45_130_752,
        "compressor": 36_704_256,
        "norms": 829_440,
        "image tokens": 30_720,
        "draft experts": 7_219_445_760,
        "draft stages, rest": 713_428_872,
        "vision tower": 970_506_240,
    }
    assert sum(found.values()) == 510_286_023_000


@pytest.mark.parametrize(
    ("ranks", "total", "without_tables"),
    [(1, 475.24, 286.41), (2, 239.32, 144.90), (4, 121.36, 74.15), (8, 62.38, 38.78)],
)
def test_ranks_with_wo_a_in_fp8(
    config: ModelConfig, table: Table, ranks: int, total: float, without_tables: float
) -> None:
    plan = make_plan(config, table, ranks)
    assert round((plan.rank_weights + plan.rank_tables) / GIB, 2) == total
    assert round(plan.rank_weights / GIB, 2) == without_tables


@pytest.mark.parametrize(
    ("ranks", "total"),
    [(1, 511_727_454_552), (2, 257_689_320_912), (4, 130_670_254_224), (8, 67_160_720_880)],
)
def test_ranks_with_wo_a_in_bf16(config: ModelConfig, table: Table, ranks: int, total: int) -> None:
    wide = {n: s for n, s in table.items() if not n.endswith("wo_a.scale")}
    wide |= {n: TensorSpec("BF16", s.shape) for n, s in wide.items() if n.endswith("wo_a.weight")}
    plan = make_plan(config, wide, ranks)
    assert plan.rank_weights + plan.rank_tables == total


def test_caches_of_the_release(config: ModelConfig, table: Table) -> None:
    plan = make_plan(config, table)
    assert plan.cache_per_token == 890
    rings, drafts, partial, history = 2_703_360, 202_752, 24_576, 12
    assert plan.cache_per_sequence == rings + drafts + partial + history
    assert plan.caches(1_048_576, 2) == 2 * (933_232_640 + plan.cache_per_sequence)


@pytest.mark.parametrize("name", sorted(p.name for p in files.GOLDEN.iterdir()))
def test_every_golden_tensor_has_a_component(name: str) -> None:
    config = ModelConfig.load(files.GOLDEN / name)
    table = expected_tensors(config)
    plan = make_plan(config, table)
    assert plan.total == sum(s.nbytes for s in table.values())
    assert (plan.total_tables > 0) == bool(config.engram_layer_ids)
    with pytest.raises(ValueError, match="no component"):
        component("something.weight")


def test_sa13_sinks_are_split_and_hyper_connections_are_not(table: Table) -> None:
    """A rank holds its heads' sinks; the 24 rows of the hyper-connections stay whole."""
    sinks = [n for n in table if n.endswith("attn_sink")]
    mixes = [n for n in table if ".hc_" in n or n.startswith("hc_")]
    assert {table[n].shape for n in sinks} == {(64,)}
    assert {split_dim(n) for n in sinks} == {0}
    assert mixes
    assert {split_dim(n) for n in mixes} == {None}


@pytest.mark.parametrize(
    ("ranks", "message"),
    [(0, "ranks must be positive"), (3, "ranks must divide o_groups"), (16, "divide o_groups")],
)
def test_ranks_that_do_not_divide(
    config: ModelConfig, table: Table, ranks: int, message: str
) -> None:
    """SA-13: refused before anything is loaded, with the sizes."""
    with pytest.raises(ConfigError, match=message):
        make_plan(config, table, ranks)


def test_what_does_not_fit(config: ModelConfig, table: Table) -> None:
    plan = make_plan(config, table, 2)
    on_device, on_host = Demand(8192, 1, "device"), Demand(8192, 1, "host")
    memory = Memory(device=150 * GIB, host=100 * GIB)
    (line,) = shortfalls(plan, on_device, memory)
    assert line.startswith("device memory: ")
    assert "GiB needed a rank, 150.00 GiB available" in line
    (line,) = shortfalls(plan, on_host, memory)
    assert line == "host memory: 188.83 GiB needed, 100.00 GiB available"
    assert shortfalls(plan, Demand(8192, 1, "disk"), memory) == []
    exact = needs(plan, on_device, on_host=False)["device"]
    assert shortfalls(plan, on_device, Memory(exact, None)) == []
    assert shortfalls(plan, on_device, Memory(exact - 1, None))
    # On the host, everything of every rank counts.
    whole = needs(plan, on_host, on_host=True)
    assert whole["device"] == 0
    assert whole["host"] == plan.total_tables + 2 * (plan.rank_weights + plan.caches(8192, 1))


def test_loading_stops_with_a_table_when_the_group_is_too_small_LD06(
    config: ModelConfig, table: Table, tmp_path: Path
) -> None:
    (tmp_path / "memory.max").write_text(f"{64 * GIB}\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/\n")
    (tmp_path / "meminfo").write_text("MemTotal:       1056784384 kB\n")
    limit = host_memory_limit(proc=tmp_path, sys=tmp_path)
    assert limit == 64 * GIB
    plan = make_plan(config, table, 8)
    with pytest.raises(CheckpointError) as error:
        require_fit(plan, Demand(8192, 4, "host"), Memory(139 * GIB, limit))
    text = str(error.value)
    assert "does not fit: host memory: 188.83 GiB needed, 64.00 GiB available" in text
    for row in ("weights", "engram tables (host)", "caches (4 x 8,192 tokens)", "host limit"):
        assert row in text
    require_fit(plan, Demand(8192, 4, "disk"), Memory(139 * GIB, limit))


def test_the_smallest_limit_above_us_counts(tmp_path: Path) -> None:
    proc, sys_root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    assert host_memory_limit(proc, sys_root) is None
    (proc / "meminfo").write_text("MemFree: 1 kB\nMemTotal:  2048 kB\n")
    assert host_memory_limit(proc, sys_root) == 2048 * 1024
    inner = sys_root / "outer/inner"
    inner.mkdir(parents=True)
    (proc / "self/cgroup").write_text("0::/outer/inner\n")
    (inner / "memory.max").write_text("max\n")
    (sys_root / "outer/memory.max").write_text("1048576\n")
    assert host_memory_limit(proc, sys_root) == 1048576
    (inner / "memory.max").write_text("4096\n")
    assert host_memory_limit(proc, sys_root) == 4096
    old = sys_root / "memory/job"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("2048\n")
    (proc / "self/cgroup").write_text("5:cpu:/x\n3:memory,hugetlb:/job\n0::/outer/inner\n")
    assert host_memory_limit(proc, sys_root) == 2048


# ---------------------------------------------------------------- the command
def test_inspect_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["inspect", str(RELEASE), "--ranks", "4", "--device-memory", "100", "--vision"]
    assert main(args) == 0
    text = capsys.readouterr().out
    assert "890 B per token" in text
    assert "121.36 GiB" in text
    assert "engram tables on device  DOES NOT FIT: device memory: 121.3" in text
    assert "engram tables on disk    fits" in text


def test_inspect_reads_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(files.GOLDEN / "vision"), "--output", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = {c["name"] for c in found["components"]}
    assert TABLES in names
    assert "vision tower" not in names
    assert main(["inspect", str(files.GOLDEN / "vision"), "--vision"]) == 0
    assert "459 tensors, all as expected" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "no such file or directory: nowhere"),
        ([str(files.GOLDEN)], "has no config.json"),
        ([str(RELEASE.parent)], "is not a checkpoint"),
        ([str(RELEASE), "--ranks", "3"], "ranks must divide"),
        ([str(RELEASE), "--context", "0"], "must be positive"),
    ],
)
def test_inspect_errors_are_one_line(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", *args]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_inspect_runs_as_a_module() -> None:
    path = files.GOLDEN / "text_plain"
    command = [sys.executable, "-m", "tinfer.checkpoint", "inspect", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "326 tensors, all as expected" in done.stdout
