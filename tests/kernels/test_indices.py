"""Index builders: the release's window and draft indices, ring edges, parity."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.data.golden.check_golden import Golden, OpCase
from tests.kernels.parity import check_parity
from tinfer import ops
from tinfer.registry import use_kernels
from tinfer.testing.aot import TARGETS, check_family
from tinfer.testing.cases import Case, cases

CASES = cases(family="indices")
GOLDEN = Golden(Path(__file__).parents[1] / "data" / "golden")
IMPLEMENTATIONS = ("ref", pytest.param("triton", marks=pytest.mark.interpret))


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
    check_family("indices", target)


def identity(page: int, rows: int, device: str) -> Tensor:
    """A block table of one sequence whose slots equal its row numbers."""
    return torch.arange(-(-rows // page), dtype=torch.int32, device=device)[None]


def ring_slots(first: Tensor, last: Tensor, ring: int, width: int, page: int) -> Tensor:
    seq = torch.zeros_like(first)
    table = identity(page, ring, str(first.device))
    return ops.range_slots(first, last, seq, table, page, ring, width)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", GOLDEN.ops("window_topk_idxs"), ids=lambda c: c.case)
def test_window_of_the_release(case: OpCase, impl: str, device: str) -> None:
    """Prefill indexes the prompt's rows, decode a ring of `window_size` slots."""
    p, expected = case.params, case.outputs["idxs"]
    rows, start, window = expected.shape[1], p["start_pos"], p["window_size"]
    last = torch.arange(start, start + rows, device=device)
    first = last - window + 1  # the release leaves room in front while decoding a short prompt
    first, ring = (first, window) if start else (first.clamp(min=0), rows)
    with use_kernels(impl):
        got = ring_slots(first, last, ring, expected.shape[2], page=8)
    case.check({"idxs": got.expand(p["bsz"], -1, -1).contiguous()})


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", GOLDEN.ops("dspark_topk_idxs"), ids=lambda c: c.case)
def test_draft_block_of_the_release(case: OpCase, impl: str, device: str) -> None:
    """Every draft row sees the window up to the main position and the whole draft block."""
    p, window = case.params, case.params["window_size"]
    seen = case.outputs["idxs"].shape[2] - p["block_size"]
    last = torch.tensor([p["start_pos"]], device=device)
    with use_kernels(impl):
        ring = ring_slots((last - window + 1).clamp(min=0), last, window, seen, page=window)
        drafts = ring_slots(last * 0, last * 0 + p["block_size"] - 1, 64, p["block_size"], 64)
    row = torch.cat([ring, torch.where(drafts < 0, -1, drafts + window)], 1)
    got, want = row.expand_as(case.outputs["idxs"]).cpu(), case.outputs["idxs"]
    # The release lists the ring in slot order here; a softmax does not depend on the order.
    assert torch.equal(got.sort(-1)[0], want.sort(-1)[0])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_ring_of_128(impl: str, device: str) -> None:
    """KV-05: slots, visible counts and entries at the edges of the ring."""
    last = torch.tensor([0, 126, 127, 128, 255, 256], device=device)
    with use_kernels(impl):
        slots = ring_slots((last - 127).clamp(min=0), last, 128, 128, page=16)
        newest = ring_slots(last, last, 128, 1, page=16)
    assert newest[:, 0].tolist() == [0, 126, 127, 0, 127, 0]
    assert (slots >= 0).sum(1).tolist() == [1, 127, 128, 128, 128, 128]
    assert slots[3].tolist() == [*range(1, 128), 0]
    assert ((last + 1) // 2).tolist() == [0, 63, 64, 64, 128, 128]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_wrong_arguments(impl: str, device: str) -> None:
    one = torch.zeros(1, dtype=torch.int64, device=device)
    table = identity(4, 8, device)
    with use_kernels(impl):
        with pytest.raises(TypeError, match="range_slots: first must be int64"):
            ops.range_slots(one.int(), one, one, table, 4, 8, 2)
        with pytest.raises(ValueError, match="range_slots: block_table must cover the ring of 9"):
            ops.range_slots(one, one, one, table, 4, 9, 2)
        with pytest.raises(TypeError, match="ids_to_slots: ids must be int32"):
            ops.ids_to_slots(one[None], one, table, 4)
        with pytest.raises(ValueError, match="ids_to_slots: seq must be"):
            ops.ids_to_slots(one.int()[None], one.repeat(2), table, 4)
