"""Engram's values: golden embeddings and gates, shards, far rows, tables wherever they live."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.data.golden.check_golden import Golden, OpCase
from tests.kernels.parity import check_parity
from tinfer import ops
from tinfer.compat.engram import engram_gate, engram_gather
from tinfer.formats import Fp8Block32, decode_e4m3, decode_ue8m0, encode_e4m3, encode_ue8m0
from tinfer.registry import use_kernels
from tinfer.testing.aot import TARGETS, check_family
from tinfer.testing.cases import Case, cases
from tinfer.testing.cases.engram import compare_gate, gated, gathered
from tinfer.testing.compare import assert_exact

CASES = cases(family="engram")
IMPLEMENTATIONS = ("ref", pytest.param("triton", marks=pytest.mark.interpret))
GOLDEN = Golden("tests/data/golden")
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
    check_family("engram", target)


def generator(seed: int, device: str) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


# ---------------------------------------------------------------- golden
@each_implementation
@pytest.mark.parametrize("case", GOLDEN.ops("engram_embedding"), ids=lambda c: c.case)
def test_golden_embedding(case: OpCase, impl: str, device: str) -> None:
    table, scale, ids = (case.inputs[n] for n in ("weight", "scale", "indices"))
    table, scale = table.view(torch.uint8).to(device), scale.view(torch.uint8).to(device)
    rows = ids.flatten(0, 1).to(device)
    with use_kernels(impl):
        values = ops.engram_gather(table, scale, rows, case.params["vocab_start"])
    case.check({"values": values.view(*ids.shape, -1)})


@each_implementation
@pytest.mark.parametrize("case", GOLDEN.ops("engram"), ids=lambda c: c.case)
def test_golden_engram(case: OpCase, impl: str, device: str) -> None:
    """Gather, projection of the values that the fp8 cast stands for, gate."""
    i = {k: v.to(device) for k, v in case.inputs.items()}
    tokens, copies = i["x"].shape[:2].numel(), case.params["hc_mult"]
    with use_kernels(impl):
        rows = ops.engram_gather(
            i["table"].view(torch.uint8), i["table_scale"].view(torch.uint8),
            i["hash_ids"].flatten(0, 1), 0,
        )  # fmt: skip
    weight = Fp8Block32(i["wkv"].view(torch.uint8), i["wkv_scale"].view(torch.uint8))
    kv = _through_fp8(rows) @ weight.dequantize(torch.float32).T
    kv = kv.bfloat16().view(tokens, copies + 1, -1)
    stream, w = i["x"].flatten(0, 1), i["q_weight"].float() * i["k_weight"].float()
    dead = ~i["token_mask"].flatten()
    with use_kernels(impl):
        y = ops.engram_gate(stream, kv, w, None, 1e-20, case.params["clamp"])
        masked = ops.engram_gate(stream, kv, w, dead, 1e-20, case.params["clamp"])
    assert torch.equal(masked[dead].view(torch.int16), stream[dead].view(torch.int16))
    case.check({"y": y.view_as(i["x"]), "y_masked": masked.view_as(i["x"])})


def _through_fp8(x: Tensor) -> Tensor:
    """fp32 values after the activation cast in groups of 32."""
    groups = x.float().unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scale = decode_ue8m0(encode_ue8m0(amax * torch.tensor(1 / 448)))
    return (decode_e4m3(encode_e4m3(groups / scale)) * scale).flatten(-2)


# ---------------------------------------------------------------- gather
@each_implementation
def test_every_byte(impl: str, device: str) -> None:
    """All e4m3 codes times all ue8m0 codes, NaN, -0 and subnormal products included."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    table, scale = codes.repeat(1, 256, 1).view(32, 2048), codes.repeat_interleave(8).view(32, 64)
    with use_kernels(impl):
        got = ops.engram_gather(table, scale, torch.arange(32, device=device)[:, None], 0)
    want = decode_e4m3(table).double() * decode_ue8m0(scale).double().repeat_interleave(32, 1)
    want = want.float().bfloat16()  # products have 4 bits: the first step is exact
    assert torch.equal(got.isnan(), want.isnan())
    zero = torch.zeros_like(want)
    assert_exact(got.where(~want.isnan(), zero), want.where(~want.isnan(), zero))


@each_implementation
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_eg09_shards_sum_to_the_table(world: int, impl: str, device: str, seed: int) -> None:
    """Integer sums keep -0 and subnormals: the same bits however the rows are spread."""
    a = gathered(generator(seed, device), 2, 9, 64, 37)
    whole = engram_gather(**a)
    assert (whole.view(torch.int16) == -(2**15)).any()  # a -0 that a float sum would lose
    step = -(-37 // world)
    total = torch.zeros_like(whole).view(torch.int32)
    with use_kernels(impl):
        for low in range(0, 37, step):
            table, scale = a["table"][low : low + step], a["scale"][low : low + step]
            total += ops.engram_gather(table, scale, a["ids"], low).view(torch.int32)
    assert_exact(total.view(torch.bfloat16), whole)


@each_implementation
def test_ids_out_of_range_are_zero(impl: str, device: str, seed: int) -> None:
    a = gathered(generator(seed, device), 1, 1, 64, 5)
    ids = torch.tensor([[-1, 9, 10, 14, 15, 2**40, -(2**62)]], device=device)
    with use_kernels(impl):
        out = ops.engram_gather(a["table"], a["scale"], ids, 10).view(7, 64)
    want = engram_gather(a["table"], a["scale"], torch.tensor([[0, 4]], device=device), 0)
    assert torch.equal(out[2:4].view(torch.int16), want.view(2, 64).view(torch.int16))
    assert not out[[0, 1, 4, 5, 6]].view(torch.int16).any()


@each_implementation
def test_rows_beyond_2_gib(impl: str, device: str, seed: int) -> None:
    """Row 8,388,608 of 256 bytes starts at 2^31; only the rows that are read are ever touched."""
    rows, far = 9 << 20, torch.tensor([8388607, 8388608, 9437183])
    table = torch.empty(rows, 256, dtype=torch.uint8, device=device)
    scale = torch.empty(rows, 8, dtype=torch.uint8, device=device)
    small = gathered(generator(seed, device), 1, 1, 256, 3)
    table[far], scale[far] = small["table"], small["scale"]
    with use_kernels(impl):
        got = ops.engram_gather(table, scale, far.to(device)[None] + 375000000, 375000000)
    want = engram_gather(small["table"], small["scale"], torch.arange(3, device=device)[None], 0)
    assert_exact(got, want)


@each_implementation
def test_int64_strides(impl: str, device: str, seed: int) -> None:
    """Rows that alias each other at a stride whose product with the row passes 2^31."""
    stride, rows = 3 << 29, 2
    base = torch.empty(stride + 256, dtype=torch.uint8, device=device)
    table = base.as_strided((rows, 256), (stride, 1))
    small = gathered(generator(seed, device), 1, 1, 256, rows)
    table.copy_(small["table"])
    ids = torch.tensor([[1, 0]], device=device)
    with use_kernels(impl):
        got = ops.engram_gather(table, small["scale"], ids, 0)
    assert_exact(got, engram_gather(small["table"], small["scale"], ids, 0))


# ---------------------------------------------------------------- gate
@each_implementation
def test_zero_dot_takes_its_sign(impl: str, device: str) -> None:
    """A dot of -2^-149 times 32^-0.5 is g = -0: sigmoid(-sqrt(clamp)), and +0 the other."""
    stream = torch.ones(1, 2, 32, dtype=torch.bfloat16, device=device)
    kv = torch.ones(1, 3, 32, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(2, 32, device=device)
    weight[0, 0], weight[1, 0] = -(2.0**-149), 2.0**-149
    with use_kernels(impl):
        out = ops.engram_gate(stream, kv, weight, None, 1e-20, 0.25)
    want = 1 + torch.sigmoid(torch.tensor([-0.5, 0.5]))
    assert out[0, :, 0].tolist() == want.bfloat16().tolist()


@each_implementation
def test_bound_is_not_loose(impl: str, device: str, seed: int) -> None:
    """The comparison sees one wrong copy, a missing weight, and one wrong bf16 unit."""
    a = gated(generator(seed, device), 5, 4, 96, 0.3)
    with use_kernels(impl):
        good = ops.engram_gate(**a)
    compare_gate(good, engram_gate(**a), a)
    bad = [good.flip(1), engram_gate(**(a | {"weight": torch.ones_like(a["weight"])}))]
    bad.append((good.view(torch.int16) + 2).view(torch.bfloat16))
    for wrong in bad:
        with pytest.raises(AssertionError):
            compare_gate(wrong, engram_gate(**a), a)


# ---------------------------------------------------------------- edges
@pytest.mark.interpret
def test_more_blocks_than_programs(monkeypatch: pytest.MonkeyPatch, device: str, seed: int) -> None:
    """SA-18, TP-01: beyond the portable grid programs loop."""
    monkeypatch.setattr("tinfer.kernels.engram.MAX_PROGRAMS", 2)
    g = generator(seed, device)
    a, b = gathered(g, 29, 6, 256, 50), gated(g, 5, 2, 64)
    with use_kernels("triton"):
        assert_exact(ops.engram_gather(**a), engram_gather(**a))
        compare_gate(ops.engram_gate(**b), engram_gate(**b), b)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [65535, 65536, 70000])
def test_many_rows(tokens: int, device: str, seed: int) -> None:
    """SA-18."""
    g = generator(seed, device)
    a, b = gathered(g, tokens, 24, 32, 999), gated(g, tokens, 4, 64)
    with use_kernels("triton"):
        assert_exact(ops.engram_gather(**a), engram_gather(**a))
        compare_gate(ops.engram_gate(**b), engram_gate(**b), b)


@pytest.mark.gpu
def test_pinned_host_table(device: str, seed: int) -> None:
    """The kernel reads page-locked host memory; pageable memory is refused, not copied."""
    a = gathered(generator(seed, "cpu"), 33, 24, 256, 5000)
    want, ids = engram_gather(**a), a["ids"].to(device)
    table, scale = a["table"].pin_memory(), a["scale"].pin_memory()
    with use_kernels("triton"):
        assert_exact(ops.engram_gather(table, scale, ids, 0).cpu(), want)
    assert "pageable" in str(ops.engram_gather.why_not_triton(a["table"], a["scale"], ids, 0))
    assert_exact(engram_gather(a["table"], a["scale"], ids, 0).cpu(), want)


@pytest.mark.gpu
def test_graph_replay(device: str, seed: int) -> None:
    g = generator(seed, device)
    a, calls = gathered(g, 16, 24, 256, 5000), [gated(g, 16, 4, 512) for _ in range(2)]
    ids = [torch.randint(0, 5000, (16, 24), generator=g, device=device) for _ in range(2)]
    b = {k: v.clone() if isinstance(v, Tensor) else v for k, v in calls[0].items()}

    def run() -> tuple[Tensor, Tensor]:
        return ops.engram_gather(**a), ops.engram_gate(**b)

    with use_kernels("triton"):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows, out = run()
    for some, now in zip(ids, calls, strict=True):
        a["ids"].copy_(some)
        for name in ("stream", "kv", "weight", "dead"):
            b[name].copy_(now[name])
        graph.replay()
        assert_exact(rows, engram_gather(**a))
        compare_gate(out, engram_gate(**now), now)


@each_implementation
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"table": torch.zeros(5, 48).byte()}, ValueError, r"table must be \[rows, E % 32 == 0\]"),
        ({"scale": torch.zeros(5, 3).byte()}, ValueError, r"scale must be \(5, 2\), got \(5, 3\)"),
        ({"ids": torch.zeros(2, 3).int()}, TypeError, "ids must be torch.int64, got torch.int32"),
        ({"row_start": -1}, ValueError, "row_start must be >= 0, got -1"),
    ],
)
def test_gather_errors(
    impl: str, change: dict[str, object], error: type, message: str, seed: int
) -> None:
    a = gathered(generator(seed, "cpu"), 2, 3, 64, 5) | change
    with use_kernels("ref" if impl == "ref" else "auto"), pytest.raises(error, match=message):
        ops.engram_gather(**a)


@each_implementation
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"stream": torch.zeros(2, 64).bfloat16()}, ValueError, r"stream must be \[T, C, D\]"),
        ({"kv": torch.zeros(2, 4, 64).bfloat16()}, ValueError, r"kv must be \[2, 5, 64\]"),
        ({"weight": torch.zeros(4, 64).half()}, TypeError, "weight must be torch.float32"),
        ({"dead": torch.zeros(3).bool()}, ValueError, r"dead must be \[2\], got \(3,\)"),
        ({"eps": -1.0}, ValueError, "eps and clamp must be >= 0"),
    ],
)
def test_gate_errors(
    impl: str, change: dict[str, object], error: type, message: str, seed: int
) -> None:
    a = gated(generator(seed, "cpu"), 2, 4, 64) | change
    with use_kernels("ref" if impl == "ref" else "auto"), pytest.raises(error, match=message):
        ops.engram_gate(**a)
