"""Selections: the release's candidate blocks, the tie rule, NaN and -inf, parity."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.data.golden.check_golden import Golden, OpCase
from tests.kernels.parity import check_parity
from tinfer import ops
from tinfer.chunks import row_chunks
from tinfer.kernels._target import Target, use_target
from tinfer.registry import use_kernels
from tinfer.testing.aot import TARGETS, check_family
from tinfer.testing.cases import Case, cases
from tinfer.testing.launches import recorded

CASES = cases(family="topk")
GOLDEN = Golden(Path(__file__).parents[1] / "data" / "golden").ops("select_candidate_blocks")
IMPLEMENTATIONS = ("ref", pytest.param("triton", marks=pytest.mark.interpret))
INF, NAN = float("inf"), float("nan")


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
    check_family("topk", target)


def topk(scores: list[list[float]], lengths: list[int], k: int, device: str) -> list[list[int]]:
    given = torch.tensor(lengths, dtype=torch.int32, device=device)
    out = ops.topk_indices(torch.tensor(scores, device=device), given, k)
    return [[int(i) for i in row] for row in out.tolist()]


# ---------------------------------------------------------------- golden
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c.case)
def test_candidate_blocks_of_the_release(case: OpCase, impl: str, device: str) -> None:
    """The release returns a mask over positions below each row's compressed length."""
    logits = case.inputs["logits"].float().to(device)
    batch, rows, columns = logits.shape
    lengths = case.inputs["compress_lens"].to(device).expand(rows, 1)[:, 0].int()
    size, k = case.params["block_size"], case.params["topk_blocks"]
    with use_kernels(impl):
        masks = [
            block_mask(ops.candidate_blocks(one, lengths, size, k), size, columns) for one in logits
        ]
    visible = torch.arange(columns, device=device) < lengths[:, None]
    want = case.outputs["mask"].to(device)
    assert torch.equal(torch.stack(masks) & visible, want & visible)
    assert batch == len(masks)


def block_mask(blocks: Tensor, size: int, columns: int) -> Tensor:
    """bool [T, columns]: positions inside the blocks."""
    block = torch.arange(columns, device=blocks.device) // size
    return (blocks[:, :, None] == block).any(1)


# ---------------------------------------------------------------- the rules, by example
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_nan_is_never_chosen(impl: str, device: str) -> None:
    """IX-01"""
    row = [1.0, NAN, 3.0, NAN, 2.0]
    with use_kernels(impl):
        assert topk([row], [5], 2, device) == [[2, 4]]
        assert topk([row], [5], 5, device) == [[0, 2, 4, -1, -1]]
        assert topk([[NAN] * 4], [4], 2, device) == [[-1, -1]]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_minus_infinity_comes_before_padding(impl: str, device: str) -> None:
    """IX-02"""
    row = [5.0, -INF, 4.0, -INF, 9.0, 9.0, 9.0, 9.0]
    with use_kernels(impl):
        assert topk([row], [4], 4, device) == [[0, 1, 2, 3]]
        assert topk([row], [4], 3, device) == [[0, 1, 2]]
        assert topk([row], [4], 6, device) == [[0, 1, 2, 3, -1, -1]]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_ties_go_to_the_lowest_index_in_every_batch(impl: str, device: str) -> None:
    """IX-03"""
    row = [1.0, 3.0, 3.0, 2.0, 3.0]
    with use_kernels(impl):
        assert topk([row], [5], 2, device) == [[1, 2]]
        assert topk([row] * 3, [5, 5, 3], 2, device) == [[1, 2]] * 3
        assert topk([[0.0, -0.0, 0.0]], [3], 2, device) == [[0, 1]]
        assert topk([[-0.0, 0.0, -0.0]], [3], 1, device) == [[0]]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("entries", [0, 1, 511, 512, 513])
def test_few_entries(impl: str, entries: int, device: str, seed: int) -> None:
    """IX-04: all of them in order, then -1; at 513 exactly the worst one is dropped."""
    g = torch.Generator(device).manual_seed(seed)
    scores = torch.randn(1, 600, generator=g, device=device)
    length = torch.tensor([entries], dtype=torch.int32, device=device)
    with use_kernels(impl):
        got = ops.topk_indices(scores, length, 512)[0].tolist()
    kept = list(range(entries))
    if entries == 513:
        kept.remove(int(scores[0, :513].argmin()))
    assert got == kept + [-1] * (512 - len(kept))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("k", [512, 1024])
def test_k_is_not_a_constant(impl: str, k: int, device: str, seed: int) -> None:
    """IX-05"""
    scores = torch.randn(
        1, 1500, generator=torch.Generator(device).manual_seed(seed), device=device
    )
    length = torch.tensor([1500], dtype=torch.int32, device=device)
    with use_kernels(impl):
        got = ops.topk_indices(scores, length, k)
    assert got.unique().numel() == k
    assert int(got.min()) >= 0


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_batch_shape_does_not_matter(impl: str, device: str, seed: int) -> None:
    g = torch.Generator(device).manual_seed(seed)
    scores = torch.randint(0, 20, (6, 300), generator=g, device=device).float()
    lengths = torch.randint(0, 301, (6,), generator=g, device=device).int()
    with use_kernels(impl):
        whole = ops.topk_indices(scores, lengths, 40)
        for size in (1, 4):
            for rows in (slice(i, i + size) for i in range(0, 6, size)):
                assert torch.equal(ops.topk_indices(scores[rows], lengths[rows], 40), whole[rows])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_writes_into_a_view(impl: str, device: str) -> None:
    """Columns 3.. of a wider buffer, and its transpose; the rest stays untouched."""
    scores = torch.tensor([[1.0, 9.0, 5.0], [2.0, 1.0, 3.0]], device=device)
    lengths = torch.tensor([3, 2], dtype=torch.int32, device=device)
    offset = torch.tensor([100, 200], dtype=torch.int32, device=device)
    for transposed in (False, True):
        buffer = torch.full((2, 7), 77, dtype=torch.int32, device=device)
        buffer = buffer.T.contiguous().T if transposed else buffer
        with use_kernels(impl):
            out = ops.topk_indices(scores, lengths, 3, offset, buffer[:, 3:6])
        assert out.data_ptr() == buffer[:, 3:].data_ptr()
        assert buffer.tolist() == [
            [77, 77, 77, 100, 101, 102, 77],
            [77, 77, 77, 200, 201, -1, 77],
        ]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_restoring_in_place(impl: str, device: str) -> None:
    ids = torch.tensor([[0, 9, 17, -1, 99]], dtype=torch.int32, device=device)
    blocks = torch.tensor([[2, 5, -1]], dtype=torch.int32, device=device)
    with use_kernels(impl):
        out = ops.restore_candidates(ids, blocks, 8, ids)
    assert out.data_ptr() == ids.data_ptr()
    assert ids.tolist() == [[16, 41, -1, -1, -1]]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_candidates_then_compact_selection(impl: str, device: str, seed: int) -> None:
    """Selecting among candidates' columns equals masking everything else."""
    g = torch.Generator(device).manual_seed(seed)
    scores = torch.randn(5, 90, generator=g, device=device)
    lengths = torch.tensor([0, 3, 50, 89, 90], dtype=torch.int32, device=device)
    with use_kernels(impl):
        blocks = ops.candidate_blocks(scores, lengths, 8, 4)
        inside = torch.arange(8, device=device)
        columns = (blocks.long()[:, :, None] * 8 + inside).flatten(1)
        valid = (columns >= 0) & (columns < lengths[:, None])
        picked = scores.gather(1, columns.clamp(0, 89))
        compact = torch.where(valid, picked, -INF)
        compact_lengths = ops.candidate_lengths(lengths, 8, 4)
        assert torch.equal(valid.sum(1).int(), compact_lengths)
        ids = ops.restore_candidates(ops.topk_indices(compact, compact_lengths, 6), blocks, 8)
        masked = torch.where(block_mask(blocks, 8, 90), scores, NAN)
        assert torch.equal(ids, ops.topk_indices(masked, lengths, 6))


# ---------------------------------------------------------------- rows in chunks
def test_row_chunks() -> None:
    """IX-11: 8192 rows of a million columns never need more than 512 MiB of fp32 scores."""
    chunks = list(row_chunks(8192, 1 << 20))
    assert {c.stop - c.start for c in chunks} == {128}
    assert [c.start for c in chunks] == list(range(0, 8192, 128))
    assert list(row_chunks(3, 1 << 40)) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert list(row_chunks(0, 5)) == []


@pytest.mark.parametrize("rows", [2, 4096])
def test_ix16_no_kernel_needs_what_only_hopper_has(rows: int) -> None:
    """The same kernels for compute capability 8.0 as for 9.0: no clusters, no chained launches."""
    names = {}
    for arch, shared in ((80, 163), (90, 227)):
        with use_target(Target("cuda", arch, shared)), recorded() as launches:
            scores, lengths = torch.empty(rows, 70000), torch.zeros(rows, dtype=torch.int32)
            ops.topk_indices.kernel(scores, lengths, 512)
        names[arch] = [launch.name for launch in launches]
        for launch in launches:
            assert set(launch.options) <= {"num_warps", "maxnreg"}
    assert names[80] == names[90]


@pytest.mark.gpu
def test_more_rows_than_a_grid_holds(device: str, seed: int) -> None:
    """SA-18 and TP-01: 70,000 rows; every row equals the same row alone."""
    g = torch.Generator(device).manual_seed(seed)
    scores = torch.randn(70000, 64, generator=g, device=device)
    lengths = torch.full((70000,), 64, dtype=torch.int32, device=device)
    whole = ops.topk_indices(scores, lengths, 8)
    tail = ops.topk_indices(scores[65530:], lengths[65530:], 8)
    assert torch.equal(whole[65530:], tail)


@pytest.mark.gpu
def test_capture(device: str, seed: int) -> None:
    g = torch.Generator(device).manual_seed(seed)
    scores = torch.randn(4, 40000, generator=g, device=device)
    lengths = torch.tensor([40000, 17, 0, 30000], dtype=torch.int32, device=device)
    ops.candidate_blocks(scores, lengths, 8, 2048)
    ops.topk_indices(scores, lengths, 512)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = ops.topk_indices(scores, lengths, 512)
        blocks = ops.candidate_blocks(scores, lengths, 8, 2048)
    scores.copy_(torch.randn(4, 40000, generator=g, device=device))
    lengths.copy_(lengths.flip(0))
    graph.replay()
    with use_kernels("ref"):
        assert torch.equal(ids, ops.topk_indices(scores, lengths, 512))
        assert torch.equal(blocks, ops.candidate_blocks(scores, lengths, 8, 2048))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_wrong_arguments(impl: str, device: str) -> None:
    scores = torch.zeros(2, 4, device=device)
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    with use_kernels(impl):
        with pytest.raises(TypeError, match="topk_indices: scores must be float32"):
            ops.topk_indices(scores.bfloat16(), lengths, 2)
        with pytest.raises(ValueError, match="topk_indices: k must be positive, got 0"):
            ops.topk_indices(scores, lengths, 0)
        with pytest.raises(ValueError, match="topk_indices: out must be"):
            ops.topk_indices(scores, lengths, 2, None, lengths[:, None])
        with pytest.raises(TypeError, match="candidate_blocks: lengths must be int32"):
            ops.candidate_blocks(scores, lengths.long(), 2, 2)
        with pytest.raises(ValueError, match="candidate_lengths: block_size and k must be"):
            ops.candidate_lengths(lengths, 0, 2)
        with pytest.raises(ValueError, match="restore_candidates: blocks must be"):
            ops.restore_candidates(lengths[:, None], lengths[:1, None], 8)
        with pytest.raises(ValueError, match=r"restore_candidates: ids must be \[T, n\], got \[\]"):
            ops.restore_candidates(lengths[0], lengths[:, None], 8)
