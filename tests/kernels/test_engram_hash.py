"""Engram's addresses: golden hashes, chunking at any split, roll-back, published vectors."""

from __future__ import annotations

import hashlib
import itertools

import pytest
import torch
from torch import Tensor

from tests.data.golden.check_golden import Golden, OpCase
from tests.kernels.parity import check_parity
from tests.release import release_token_map
from tinfer import ops
from tinfer.compat.engram_hash import engram_lookback, ngram_hash
from tinfer.registry import use_kernels
from tinfer.testing.aot import TARGETS, check_family
from tinfer.testing.cases import Case, cases
from tinfer.testing.cases.engram_hash import hashed, spans

CASES = cases(family="engram_hash")
IMPLEMENTATIONS = ("ref", pytest.param("triton", marks=pytest.mark.interpret))
GOLDEN = Golden("tests/data/golden").ops("ngram_hash")
each_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


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
    check_family("engram_hash", target)


# ---------------------------------------------------------------- sequences
class Hasher:
    """Feeds sequences chunk by chunk and hashes them."""

    def __init__(
        self, constants: tuple[Tensor, Tensor, Tensor], token_map: Tensor, pad: int, ring: int
    ):
        self.constants, self.token_map, self.pad = constants, token_map, pad
        self.device, self.order = token_map.device, constants[0].shape[1]
        self.history = torch.full((8, ring), 77, dtype=torch.int32, device=self.device)

    def __call__(self, batch: list[tuple[int, int, Tensor]], dead: Tensor | None = None) -> Tensor:
        """Rows of (slot, first position, ids) one after another -> int64 [T, L, columns]."""
        device = self.device
        ids = torch.cat([i for _, _, i in batch]).to(device)
        positions = torch.cat([p + torch.arange(len(i)) for _, p, i in batch]).to(device)
        slots = torch.cat([torch.full((len(i),), s) for s, _, i in batch]).to(device)
        dead = None if dead is None else dead.to(device).contiguous()
        lookback = ops.engram_lookback(
            ids, positions, slots, dead, self.token_map, self.pad, self.history, self.order
        )
        return ops.ngram_hash(lookback, *self.constants).transpose(0, 1).cpu()


def golden_hasher(case: OpCase, device: str, ring: int | None = None) -> Hasher:
    o, p = case.outputs, case.params
    token_map = case.inputs.get("token_map", torch.arange(p["compressed_vocab_size"])).int()
    pad = int(case.inputs["pad_compressed"] if "pad_compressed" in case.inputs else o["pad_id"])
    constants = tuple(o[n].to(device) for n in ("multipliers", "primes", "offsets"))
    least = p["engram_max_ngram_size"] - 1
    return Hasher(constants, token_map.to(device), pad, ring or least)  # type: ignore[arg-type]


@each_implementation
@pytest.mark.parametrize("chunk", [1, 3, 17])
@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c.case)
def test_golden(case: OpCase, chunk: int, impl: str, device: str) -> None:
    """EG-10: the hash of a position does not depend on how its sequence was cut."""
    ids, length = case.inputs["input_ids"], case.inputs["input_ids"].shape[1]
    hasher = golden_hasher(case, device)
    with use_kernels(impl):
        parts = [
            hasher([(slot, at, row[at : at + chunk]) for slot, row in enumerate(ids)])
            for at in range(0, length, chunk)
        ]
    hashes = torch.cat([p.unflatten(0, (len(ids), -1)) for p in parts], 1)
    case.check({"hash_ids": hashes})


@each_implementation
@pytest.mark.parametrize("cut", [1, 4, 11])
@pytest.mark.parametrize(
    "case", [c for c in GOLDEN if "token_mask" in c.inputs], ids=lambda c: c.case
)
def test_golden_masked(case: OpCase, cut: int, impl: str, device: str) -> None:
    """Image tokens block what follows, across chunks and into decode."""
    ids, dead = case.inputs["input_ids"], ~case.inputs["token_mask"]
    prompt, hasher = dead.shape[1], golden_hasher(case, device)
    edges = [*range(0, prompt, cut), *range(prompt, ids.shape[1] + 1)]
    parts = []
    with use_kernels(impl):
        for low, high in itertools.pairwise(edges):
            mask = dead[:, low:high].flatten() if low < prompt else None
            rows = [(slot, low, row[low:high]) for slot, row in enumerate(ids)]
            parts.append(hasher(rows, mask).unflatten(0, (len(ids), -1)))
    case.check({"hash_ids_masked": torch.cat(parts, 1)})


@each_implementation
def test_rollback_of_drafts(impl: str, device: str, seed: int) -> None:
    """Rejected drafts leave no trace in a ring of order - 1 + drafts entries."""
    case, g = GOLDEN[0], torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 512, (40,), generator=g)
    drafts, clean, speculating = 5, golden_hasher(case, device), golden_hasher(case, device, 3 + 5)
    with use_kernels(impl):
        expected = torch.cat([clean([(2, p, ids[p : p + 1])]) for p in range(40)])
        at, got = 0, []
        while at + 1 + drafts <= 40:
            accepted = int(torch.randint(0, drafts + 1, (1,), generator=g))
            wrong = torch.randint(0, 512, (drafts - accepted,), generator=g)
            block = torch.cat([ids[at : at + 1 + accepted], wrong])
            got.append(speculating([(2, at, block)])[: 1 + accepted])
            at += 1 + accepted
    assert torch.equal(torch.cat(got), expected[:at])
    assert at > 20


@each_implementation
def test_slot_reuse_reads_no_stale_history(impl: str, device: str) -> None:
    case = GOLDEN[0]
    hasher, fresh = golden_hasher(case, device), golden_hasher(case, device)
    ids = torch.arange(3, 12)
    with use_kernels(impl):
        hasher([(1, 0, ids)])
        assert torch.equal(hasher([(1, 0, ids[:2])]), fresh([(1, 0, ids[:2])]))


@each_implementation
def test_ids_outside_the_map_count_as_dead(impl: str, device: str) -> None:
    token_map = torch.arange(10, dtype=torch.int32, device=device)
    history = torch.full((1, 4), 9, dtype=torch.int32, device=device)
    ids = torch.tensor([5, 10, 7, -1, 6], device=device)
    rows = torch.arange(5, device=device)
    with use_kernels(impl):
        out = ops.engram_lookback(ids, rows, rows * 0, None, token_map, 2, history, 3)
    assert out.tolist() == [[5, 2, 2], [2, 2, 2], [7, 2, 2], [2, 2, 2], [6, 2, 2]]
    assert history.tolist() == [[6, -1, 7, -1]]


# ---------------------------------------------------------------- published vectors
PROMPT = [0, 128803, 17607, 2793, 3139, 12108, 1148, 128804, 128822]
DIGESTS = (
    "c4563ad46162811a9a3a5add23499a64340c4e1f83e32f7e9bcf030955da6f00",
    "d01cb73eb0378779466e9b9492eed8699d4163303b9c6e8b4383a0126674833f",
)


@each_implementation
def test_release_prompt(impl: str, device: str) -> None:
    token_map = release_token_map().to(device)
    hasher = Hasher(golden_hasher(GOLDEN[-1], device).constants, token_map, int(token_map[2]), 3)
    with use_kernels(impl):
        hashes = hasher([(0, 0, torch.tensor(PROMPT))])
    assert hashes[0, 0, :4].tolist() == [5702652, 24393184, 39183301, 61503783]
    assert hashes[8, 1, -2:].tolist() == [353620830, 379361269]
    for layer, digest in enumerate(DIGESTS):
        data = hashes[:, layer].contiguous().numpy().astype("<i8").tobytes()
        assert hashlib.sha256(data).hexdigest() == digest


@each_implementation
def test_eg03_hash_of_compressed_ids(impl: str, device: str) -> None:
    hasher = golden_hasher(GOLDEN[-1], device)
    hasher.pad = 2
    with use_kernels(impl):
        hashes = hasher([(0, 0, torch.tensor([5, 7, 11, 13]))])
    some = hashes[..., [0, 8, 16, 23]]
    assert some[3, 0].tolist() == [4449004, 128589888, 268272278, 369904649]
    assert some[0, 0].tolist() == [5412672, 143494632, 256353435, 372009279]
    assert some[3, 1].tolist() == [15143247, 134948014, 267543071, 378459855]


# ---------------------------------------------------------------- edges
@pytest.mark.interpret
def test_more_blocks_than_programs(monkeypatch: pytest.MonkeyPatch, device: str, seed: int) -> None:
    """SA-18, TP-01: beyond the portable grid programs loop."""
    monkeypatch.setattr("tinfer.kernels.engram_hash.MAX_PROGRAMS", 4)
    a = hashed(torch.Generator(device=device).manual_seed(seed), 129)
    with use_kernels("triton"):
        assert torch.equal(ops.ngram_hash(**a), ngram_hash(**a))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [65535, 65536, 70000])
def test_many_rows(tokens: int, device: str, seed: int) -> None:
    """SA-18."""
    g = torch.Generator(device=device).manual_seed(seed)
    a, b = spans(g, [(0, 3, tokens)]), hashed(g, tokens)
    mine = a | {"history": a["history"].clone()}
    with use_kernels("triton"):
        assert torch.equal(ops.engram_lookback(**mine), engram_lookback(**a))
        assert torch.equal(mine["history"], a["history"])
        assert torch.equal(ops.ngram_hash(**b), ngram_hash(**b))


@pytest.mark.gpu
def test_graph_replay(device: str, seed: int) -> None:
    """Captured once, replayed on other tokens and a moved history."""
    g = torch.Generator(device=device).manual_seed(seed)
    batch = [(s, 5 + s, 6) for s in range(16)]
    calls = [(spans(g, batch), hashed(g, 1)) for _ in range(2)]
    a, b = ({k: v.clone() if isinstance(v, Tensor) else v for k, v in c.items()} for c in calls[0])

    def run() -> Tensor:
        rows = ops.engram_lookback(**a)
        return ops.ngram_hash(rows, b["multipliers"], b["primes"], b["offsets"])

    with use_kernels("triton"):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
    for now, _ in calls:
        for name, value in now.items():
            if isinstance(value, Tensor):
                a[name].copy_(value)
        graph.replay()
        rows = engram_lookback(**now)
        want = ngram_hash(rows, b["multipliers"], b["primes"], b["offsets"])
        assert torch.equal(out, want)
        assert torch.equal(a["history"], now["history"])


@each_implementation
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"order": 13}, ValueError, r"order must be in 1\.\.12, got 13"),
        ({"pad_id": -1}, ValueError, "pad_id must be >= 0, got -1"),
        ({"ids": torch.zeros(3, dtype=torch.int32)}, TypeError, "ids must be torch.int64"),
        ({"positions": torch.zeros(4, dtype=torch.int64)}, ValueError, r"positions must be \[T\]"),
        ({"history": torch.zeros(2, dtype=torch.int32)}, ValueError, "history must have rank 2"),
    ],
)
def test_lookback_errors(
    impl: str, change: dict[str, object], error: type, message: str, seed: int
) -> None:
    a = spans(torch.Generator().manual_seed(seed), [(0, 0, 3)]) | change
    with use_kernels("ref" if impl == "ref" else "auto"), pytest.raises(error, match=message):
        ops.engram_lookback(**a)


@each_implementation
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"lookback": torch.zeros(3, 4)}, TypeError, "lookback must be torch.int32"),
        ({"multipliers": torch.ones(2, 3).long()}, ValueError, r"multipliers must be \[L, 4\]"),
        ({"offsets": torch.zeros(2, 23).long()}, ValueError, r"offsets must be \[2, 24\]"),
    ],
)
def test_hash_errors(
    impl: str, change: dict[str, object], error: type, message: str, seed: int
) -> None:
    a = hashed(torch.Generator().manual_seed(seed), 3) | change
    with use_kernels("ref" if impl == "ref" else "auto"), pytest.raises(error, match=message):
        ops.ngram_hash(**a)
