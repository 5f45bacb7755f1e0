"""Expert choice: golden gates, underflow, ties, the two biases, and rows that are not numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.data.golden.check_golden import Golden, OpCase
from tests.kernels.parity import check_parity
from tinfer import ops
from tinfer.compat.moe_gate import moe_gate
from tinfer.registry import use_kernels
from tinfer.testing.aot import TARGETS, check_family
from tinfer.testing.cases import Case, cases
from tinfer.testing.cases.moe_gate import clear_rows, compare, routed

CASES = cases(family="moe_gate")
IMPLEMENTATIONS = ("ref", pytest.param("triton", marks=pytest.mark.interpret))
GOLDEN = Golden("tests/data/golden").ops("gate")
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
    check_family("moe_gate", target)


def choose(
    logits: Tensor,
    bias: Tensor,
    topk: int,
    device: str,
    scale: float = 1.0,
    func: str = "sqrtsoftplus",
) -> tuple[Tensor, Tensor]:
    """Text rows, normalized."""
    ids, weights = ops.moe_gate(
        logits.to(device), bias.to(device), None, None, topk, scale, func, True
    )
    return ids.cpu(), weights.cpu()


# ---------------------------------------------------------------- golden
@each_implementation
@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c.case)
def test_golden(case: OpCase, impl: str, device: str) -> None:
    i, p = {k: v.to(device) for k, v in case.inputs.items()}, case.params
    logits = i["x"].float() @ i["weight"].float().T / p["gate_temp"]
    out = {}
    for kind, image in (("text", None), ("vl", i["image_mask"])):
        with use_kernels(impl):
            ids, weights = ops.moe_gate(
                logits,
                i["bias"],
                i["bias_vl"],
                image,
                p["topk"],
                p["route_scale"],
                p["score_func"],
                p["norm_topk_prob"],
            )
        out |= {f"{kind}.indices": ids.long(), f"{kind}.weights": weights}
    case.check(out)


# ---------------------------------------------------------------- known failures
@each_implementation
def test_mo01_softplus_does_not_underflow(impl: str, device: str) -> None:
    x = torch.tensor([[-16.64, -20.0, -104.0, 88.8, 200.0]])
    with use_kernels(impl):
        ids, weights = ops.moe_gate(
            x.to(device), torch.zeros(5, device=device), None, None, 5, 1.0, "sqrtsoftplus", False
        )
        low_ids, low = choose(torch.full((1, 8), -104.0), torch.zeros(8), 6, device)
    want = torch.tensor([2.43596e-4, 4.53999e-5, 2.6103e-23, 88.8**0.5, 200**0.5])
    assert ids.tolist() == [[4, 3, 0, 1, 2]]
    assert torch.allclose(weights.cpu()[0], want[ids.cpu()[0].long()], rtol=1e-5, atol=0.0)
    assert low_ids.tolist() == [[0, 1, 2, 3, 4, 5]]
    # 2.6e-23 over (6 * 2.6e-23 + 1e-20): the release's epsilon dominates
    assert torch.allclose(low, torch.full((1, 6), 2.6103e-23 / (6 * 2.6103e-23 + 1e-20)), rtol=1e-4)


@each_implementation
def test_mo02_bias_selects_and_does_not_weigh(impl: str, device: str) -> None:
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.6]])
    with use_kernels(impl):
        ids, weights = choose(
            torch.logit(scores), torch.tensor([-1.0, 0.0, 0.0, 0.5]), 2, device, 1.5, "sigmoid"
        )
    assert ids.tolist() == [[3, 1]]
    assert torch.allclose(weights, torch.tensor([[0.642857, 0.857143]]), atol=1e-6)


@each_implementation
def test_mo08_image_rows_take_the_image_bias(impl: str, device: str, seed: int) -> None:
    a = routed(torch.Generator(device=device).manual_seed(seed), 16, 48, 4)
    a["image"] = torch.arange(16, device=device) % 3 == 0
    with use_kernels(impl):
        both = ops.moe_gate(**a)
        text = ops.moe_gate(**(a | {"image": None, "bias_vl": None}))
        vision = ops.moe_gate(**(a | {"image": None, "bias_vl": None, "bias": a["bias_vl"]}))
    for got, t, v in zip(both, text, vision, strict=True):
        assert torch.equal(got, torch.where(a["image"][:, None], v, t))
    assert not torch.equal(text[0], vision[0])


@each_implementation
def test_ties_go_to_the_lower_id(impl: str, device: str) -> None:
    rows = torch.tensor([[0.5] * 8, [0, 1, 0, 1, 0, 1, 0, 1], [1, 1, 1, 0, 2, 2, 0, 2]])
    with use_kernels(impl):
        ids, weights = choose(rows, torch.zeros(8), 5, device)
    assert ids.tolist() == [[0, 1, 2, 3, 4], [1, 3, 5, 7, 0], [4, 5, 7, 0, 1]]
    assert torch.equal(weights[0], torch.full((5,), float(weights[0, 0])))


@each_implementation
def test_one_choice_is_not_normalized(impl: str, device: str) -> None:
    with use_kernels(impl):
        _, weights = choose(torch.zeros(1, 4), torch.zeros(4), 1, device, 2.0)
    assert weights.item() == pytest.approx(2 * 0.6931471805599453**0.5, rel=1e-6)


@each_implementation
def test_ids_are_distinct_whatever_the_logits(impl: str, device: str) -> None:
    """Nothing downstream may be indexed out of range by a NaN."""
    inf, nan = float("inf"), float("nan")
    rows = torch.tensor(
        [[nan] * 6, [nan, 1, nan, 2, nan, nan], [-inf] * 6, [inf, nan, inf, 0, 0, 0]]
    )
    with use_kernels(impl):
        ids, weights = choose(rows, torch.zeros(6), 3, device)
    assert ids.tolist() == [[0, 1, 2], [3, 1, 0], [0, 1, 2], [0, 2, 3]]
    assert weights[0].isnan().all()
    assert not weights[2].any()


# ---------------------------------------------------------------- the comparison itself
def test_most_random_rows_are_clear(seed: int) -> None:
    a = routed(torch.Generator().manual_seed(seed), 4096)
    assert clear_rows(a, 6)[1].float().mean() > 0.99


@pytest.mark.parametrize("fault", ["swapped", "next", "weights"])
def test_comparison_sees(fault: str, seed: int) -> None:
    a = routed(torch.Generator().manual_seed(seed), 33)
    good = moe_gate(**a)
    ids, weights = (x.clone() for x in good)
    if fault == "swapped":
        ids[5, [0, 1]] = ids[5, [1, 0]]
    elif fault == "next":
        ids[7, 5] = moe_gate(**(a | {"topk": 7}))[0][7, 6]
    else:
        weights[9, 2] *= 1 + 5e-6
    compare(good, good, a)
    with pytest.raises(AssertionError):
        compare((ids, weights), good, a)


# ---------------------------------------------------------------- edges
@pytest.mark.interpret
def test_more_blocks_than_programs(monkeypatch: pytest.MonkeyPatch, device: str, seed: int) -> None:
    """SA-18, TP-01: beyond the portable grid programs loop."""
    monkeypatch.setattr("tinfer.kernels.moe_gate.MAX_PROGRAMS", 2)
    a = routed(torch.Generator(device=device).manual_seed(seed), 9, 24, 4)
    with use_kernels("triton"):
        compare(ops.moe_gate(**a), moe_gate(**a), a)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [65535, 65536, 70000])
def test_many_rows(tokens: int, device: str, seed: int) -> None:
    """SA-18."""
    a = routed(torch.Generator(device=device).manual_seed(seed), tokens, 48, 4)
    with use_kernels("triton"):
        compare(ops.moe_gate(**a), moe_gate(**a), a)


@pytest.mark.gpu
def test_graph_replay(device: str, seed: int) -> None:
    g = torch.Generator(device=device).manual_seed(seed)
    calls = [routed(g, 16) for _ in range(3)]
    a = {k: v.clone() if isinstance(v, Tensor) else v for k, v in calls[0].items()}
    with use_kernels("triton"):
        ops.moe_gate(**a)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ops.moe_gate(**a)
    for now in calls[1:]:
        for name in ("logits", "bias", "bias_vl", "image"):
            a[name].copy_(now[name])
        graph.replay()
        compare(out, moe_gate(**now), now)


@each_implementation
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": torch.zeros(8)}, ValueError, r"logits must be \[T, E\], got \(8,\)"),
        ({"logits": torch.zeros(2, 8).double()}, TypeError, "logits must be torch.float32"),
        ({"bias": torch.zeros(7)}, ValueError, r"bias must be \[8\], got \(7,\)"),
        ({"bias_vl": None}, ValueError, "bias_vl must be given with image, got None"),
        ({"topk": 9}, ValueError, r"topk must be in 1\.\.8, got 9"),
        ({"score_func": "relu"}, ValueError, "score_func must be one of"),
    ],
)
def test_errors(impl: str, change: dict[str, object], error: type, message: str, seed: int) -> None:
    a = routed(torch.Generator().manual_seed(seed), 2, 8, 3) | change
    with use_kernels("ref" if impl == "ref" else "auto"), pytest.raises(error, match=message):
        ops.moe_gate(**a)
