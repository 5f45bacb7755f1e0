"""The DeepGEMM adapter against a recording stand-in, and against the library where there is one."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.data.golden.check_golden import Golden, OpCase
from tinfer import ops, registry
from tinfer.compat import deep_gemm
from tinfer.compat.casts import per_block_cast, per_token_cast
from tinfer.formats import Fp4Group32, Fp8Block32, as_bytes, decode_e4m3
from tinfer.testing.cases import Arguments, cases
from tinfer.testing.cases.moe_experts import experts_call
from tinfer.testing.compare import errors

# One requantization of the weight (2.7 %) and one of the activation, of e4m3's 2^-4 steps.
REQUANTIZED = 6e-2
COSTLY = 1e-2  # any fp8 re-rounding shows at least this


def _dequantize(operand: tuple[Tensor, Tensor]) -> Tensor:
    q, s = operand
    rows = q.shape[-2]
    tall = 1 if s.shape[-2] == rows else 128
    scale = s.repeat_interleave(tall, -2)[..., :rows, :].repeat_interleave(128, -1)
    return decode_e4m3(as_bytes(q)) * scale[..., : q.shape[-1]]


class StandIn(ModuleType):
    """What the adapter needs of the library, computed by torch, every call checked and recorded."""

    __version__ = "2.6.1+local"

    def __init__(self) -> None:
        super().__init__("deep_gemm")
        self.calls: list[str] = []

    def _check(self, name: str, a: Any, b: Any, options: dict[str, Any]) -> None:
        self.calls.append(name)
        assert options == {"recipe": (1, 128, 128), "disable_ue8m0_cast": True}
        for q, s in (a, b):
            assert q.dtype == torch.float8_e4m3fn
            assert s.dtype == torch.float32
        assert a[1].shape == (*a[0].shape[:-1], -(-a[0].shape[-1] // 128))
        assert b[1].shape[-2:] == tuple(-(-n // 128) for n in b[0].shape[-2:])

    def get_mn_major_tma_aligned_tensor(self, s: Tensor) -> Tensor:
        return s.transpose(-1, -2).contiguous().transpose(-1, -2)

    def fp8_gemm_nt(self, a: Any, b: Any, out: Tensor, **options: Any) -> None:
        self._check("dense", a, b, options)
        out.copy_(_dequantize(a) @ _dequantize(b).t())

    def m_grouped_fp8_gemm_nt_contiguous(
        self, a: Any, b: Any, out: Tensor, expert: Tensor, **options: Any
    ) -> None:
        self._check("contiguous", a, b, options)
        assert expert.dtype == torch.int32
        out.fill_(float("nan"))  # rows of padding are undefined
        x, w = _dequantize(a), _dequantize(b)
        for first in range(0, len(expert), 128):
            group = set(expert[first : first + 128].tolist()) - {-1}
            assert len(group) <= 1, "a tile of 128 rows belongs to one expert"
        for e in set(expert.tolist()) - {-1}:
            out[expert == e] = (x[expert == e] @ w[e].t()).to(out.dtype)

    def m_grouped_fp8_gemm_nt_masked(
        self, a: Any, b: Any, out: Tensor, rows: Tensor, expected: int, **options: Any
    ) -> None:
        self._check("masked", a, b, options)
        assert expected >= 1
        x, w = _dequantize(a), _dequantize(b)
        for e, count in enumerate(rows.tolist()):
            out[e, :count] = (x[e, :count] @ w[e].t()).to(out.dtype)


def _linear(seed: int) -> Arguments:
    """A call on weights and activations of normal distribution, cast as the checkpoint's are."""
    g = torch.Generator().manual_seed(seed)
    q, s = per_token_cast(torch.randn(17, 256, generator=g).bfloat16(), "e4m3", 32, "ue8m0")
    weight, scale = per_block_cast(torch.randn(96, 256, generator=g), (32, 32), "ue8m0")
    return {"q": q, "s": s, "weight": weight, "scale": scale}


def _experts(seed: int) -> Arguments:
    """A call on fp4 experts of normal distribution."""
    g = torch.Generator().manual_seed(seed)
    a = experts_call(g, tokens=40, topk=2, experts=3, dim=128, inner=128)
    for name, k in (("w13", 128), ("w2", 128)):
        values = torch.randn(3, a[name].shape[1], k, generator=g) * k**-0.5
        a[name], a[name + "_s"] = per_token_cast(values, "e2m1", 32, "ue8m0")
    return a


GOLDEN_128 = [
    c
    for op in ("fp8_gemm", "fp4_gemm")
    for c in Golden("tests/data/golden").ops(op)
    if c.inputs["a_s"].dtype == torch.float32
]


@pytest.mark.parametrize("case", GOLDEN_128, ids=lambda c: f"{c.op}-{c.case}")
def test_vectors_of_128_wide_scales(case: OpCase) -> None:
    """The release's reference on the library's own format, as the stand-in reads it."""
    a, b = ((case.inputs[n], case.inputs[f"{n}_s"]) for n in ("a", "b"))
    out = torch.empty(len(a[0]), len(b[0]))
    if case.op == "fp8_gemm":
        StandIn().fp8_gemm_nt(a, b, out, recipe=(1, 128, 128), disable_ue8m0_cast=True)
    else:
        weight = Fp4Group32(as_bytes(b[0]), as_bytes(b[1])).dequantize(torch.float32)
        torch.mm(_dequantize(a), weight.t(), out=out)
    case.check({"c_f32": out, "c_bf16": out.bfloat16()})


def test_linear_fp8_is_requantized_and_says_so(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    library, a = StandIn(), _linear(seed)
    adapter, weight = deep_gemm.load(library), Fp8Block32(a["weight"], a["scale"])
    with caplog.at_level(logging.WARNING, logger="tinfer.kernels"):
        adapter.linear_fp8(**a)
        got = adapter.linear_fp8(**a)
    assert COSTLY < errors(got, ops.linear_fp8.ref(**a))[0] < REQUANTIZED
    assert library.calls == ["dense", "dense"]
    cost = deep_gemm.requantization_error(weight, adapter.requantized(weight))
    assert cost == pytest.approx(2.7e-2, rel=0.1)
    said = f"deep_gemm: weight [96, 256] requantized, relative error {cost:.2e}"
    assert [r.getMessage() for r in caplog.records] == [said]  # once a weight


def test_moe_experts_through_contiguous_groups(seed: int) -> None:
    library, a = StandIn(), _experts(seed) | {"shared": None}
    got = deep_gemm.load(library).moe_experts(**a)
    # Three requantized products in all: two meet in SwiGLU, the third follows.
    assert COSTLY < errors(got, ops.moe_experts.ref(**a))[0] < 3**0.5 * REQUANTIZED
    assert library.calls == ["contiguous", "contiguous"]


def test_no_tokens_and_narrow_weights(seed: int) -> None:
    """MO-06: a rank without tokens calls nothing; K must be a multiple of the library's 128."""
    library, a = StandIn(), _experts(seed)
    adapter = deep_gemm.load(library)
    none = {n: a[n][:0] for n in ("q", "s", "ids", "weights", "shared")}
    assert adapter.moe_experts(**a | none).shape == (0, 128)
    narrow = _linear(seed)
    narrow = {n: x[:, :96] if n in ("q", "weight") else x[:, :3] for n, x in narrow.items()}
    with pytest.raises(ValueError, match="deep_gemm: weight must be of 128s of columns, got 96"):
        adapter.linear_fp8(**narrow)
    zero = Fp8Block32(torch.zeros(32, 128, dtype=torch.uint8), torch.full((1, 4), 127).byte())
    assert deep_gemm.requantization_error(zero, adapter.requantized(zero)) == 0.0
    assert library.calls == []


def test_masked_groups(seed: int) -> None:
    library, a = StandIn(), _experts(seed)
    adapter, weight = deep_gemm.load(library), Fp4Group32(a["w13"], a["w13_s"])
    x = torch.randn(3, 5, 128).bfloat16()
    rows = torch.tensor([5, 0, 2], dtype=torch.int32)
    got = adapter.grouped_masked(x, adapter.requantized(weight), rows, 2)
    want = torch.einsum("emk,enk->emn", x.float(), weight.dequantize(torch.float32))
    for e, count in enumerate(rows.tolist()):
        if count:
            assert COSTLY < errors(got[e, :count], want[e, :count])[0] < REQUANTIZED
    assert library.calls == ["masked"]


def test_the_registry_routes_to_it_only_when_asked(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, a = StandIn(), _linear(seed)
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    exact = ops.linear_fp8(**a)
    with registry.use_gemm():
        assert torch.equal(ops.linear_fp8(**a), exact)
    monkeypatch.setenv("TINFER_GEMM", "deep_gemm")
    with registry.use_gemm():
        assert not torch.equal(ops.linear_fp8(**a), exact)
        with registry.use_kernels("ref"):
            assert torch.equal(ops.linear_fp8(**a), ops.linear_fp8.ref(**a))
        assert "1 by deep_gemm" in registry.report()
    assert torch.equal(ops.linear_fp8(**a), exact)
    assert library.calls == ["dense"]
    monkeypatch.setenv("TINFER_GEMM", "cutlass")
    with pytest.raises(ValueError, match="must be triton or deep_gemm, got 'cutlass'"):
        registry.use_gemm().__enter__()


def test_errors_name_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    library = StandIn()
    library.__version__ = "1.9.0"
    with pytest.raises(ImportError, match=r"version must be at least 2\.0, got 1\.9\.0"):
        deep_gemm.load(library)
    for version in ("2", "2.5a1", "v2.1.0+local", "10.0"):
        library.__version__ = version
        deep_gemm.load(library)
    library.__version__ = "2.6.1"
    monkeypatch.setattr(StandIn, "fp8_gemm_nt", None)
    with pytest.raises(ImportError, match=r"deep_gemm 2\.6\.1 lacks fp8_gemm_nt"):
        deep_gemm.load(library)
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(ImportError, match=r"cannot be imported.*install DeepGEMM or unset"):
        deep_gemm.load()


def test_importing_tinfer_never_looks_for_it() -> None:
    """IM-02: an import hook that raises for the library's name."""
    code = (
        "import sys\n"
        "class Hook:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        assert name.split('.')[0] not in ('deep_gemm', 'deep_ep', 'flash_mla'), name\n"
        "sys.meta_path.insert(0, Hook())\n"
        "import tinfer.ops, tinfer.engine, tinfer.compat.deep_gemm\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("deep_gemm") is None, reason="needs deep_gemm")
def test_with_the_library(seed: int) -> None:
    adapter = deep_gemm.load()
    (case,) = [c for c in cases() if c.id == "linear_fp8-256x4608x5120"]
    a = case.arguments(seed, "cuda")
    assert COSTLY < errors(adapter.linear_fp8(**a), ops.linear_fp8.ref(**a))[0] < REQUANTIZED
