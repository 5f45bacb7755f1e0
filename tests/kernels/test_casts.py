"""Quantizing casts: golden vectors, parity, edges, cases from the field, compilation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.data.golden.check_golden import Golden, OpCase
from tests.kernels.capture import check_capture
from tests.kernels.parity import check_parity
from tinfer import ops, registry
from tinfer.compat.casts import unpack_ue8m0
from tinfer.formats import E4M3_MAX, decode_e2m1, decode_e4m3, decode_ue8m0, unpack_e2m1
from tinfer.registry import use_kernels
from tinfer.testing.aot import TARGETS, check_family
from tinfer.testing.cases import Case, cases
from tinfer.testing.cases.casts import FORMATS, mixed
from tinfer.testing.launches import MAX_PROGRAMS, launches_of

GOLDEN = Golden(Path(__file__).parents[1] / "data" / "golden")
CASES = cases(family="casts")
IMPLEMENTATIONS = ("ref", pytest.param("triton", marks=pytest.mark.interpret))
BF16, FP32 = torch.bfloat16, torch.float32


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
    check_family("casts", target)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.real and ("16x5120" in c.name or "16x512" in c.name)],
    ids=lambda c: c.id,
)
def test_replays_in_a_graph(case: Case, seed: int) -> None:
    check_capture(case, seed)


# ---------------------------------------------------------------- golden vectors
def _golden_format(case: OpCase) -> tuple[str, int, str]:
    p = case.params
    if case.op == "act_quant":
        scale = "ue8m0" if p["scale_dtype"] == "float8_e8m0fnu" else "fp32"
        pow2 = scale == "fp32" and p["scale_fmt"] == "ue8m0"
        return "e4m3", p["block_size"], "fp32_pow2" if pow2 else scale
    return "e2m1", p["block_size"], "ue8m0" if p["scale_dtype"] == "float8_e8m0fnu" else "e4m3"


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "case",
    [*GOLDEN.ops("act_quant"), *GOLDEN.ops("fp4_act_quant")],
    ids=lambda c: f"{c.op}-{c.case}",
)
def test_golden(case: OpCase, impl: str, device: str) -> None:
    how, x = _golden_format(case), case.inputs["x"].to(device, copy=True)
    with use_kernels(impl):
        q, s = ops.per_token_cast(x, *how)
        back = ops.cast_back(q, s, *how, BF16)
        ops.fake_quant_(x, *how)
    q = q.view(torch.float8_e4m3fn) if how[0] == "e4m3" else q
    case.check({"q": q, "s": s.view(case.outputs["s"].dtype), "y": x})
    case.check({"y": back})


# ---------------------------------------------------------------- what the bytes mean
def _random(seed: int, device: str, *shape: int) -> Tensor:
    g = torch.Generator(device=device).manual_seed(seed)
    return mixed(g, *shape).to(BF16)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("how", FORMATS, ids=lambda h: "_".join(map(str, h)))
def test_values_are_the_nearest_codes(
    how: tuple[str, int, str], impl: str, seed: int, device: str
) -> None:
    """Against the definition in fp64: no code is nearer to x / scale than the one chosen."""
    fmt, group, scale_fmt = how
    x = _random(seed, device, 9, 256)
    with use_kernels(impl):
        q, s = ops.per_token_cast(x, *how)
    if scale_fmt == "ue8m0_packed":
        s = unpack_ue8m0(s, 256 // group)
    if scale_fmt != "e4m3":
        scale = decode_ue8m0(s) if s.dtype == torch.uint8 else s
    else:
        scale = decode_e4m3(s)
    value = decode_e4m3(q) if fmt == "e4m3" else decode_e2m1(unpack_e2m1(q))
    codes = torch.arange(127 if fmt == "e4m3" else 8, device=device)
    grid = (decode_e4m3(codes) if fmt == "e4m3" else decode_e2m1(codes)).double()
    want = (x.double().unflatten(1, (-1, group)) / scale.double()[..., None]).flatten(1).abs()
    distance = (want[..., None] - grid).abs().amin(-1)
    # The quotient is rounded to fp32 before it is rounded to a code.
    assert bool(((value.double().abs() - want).abs() <= distance + want * 2.0**-23).all())
    assert torch.equal(value.signbit(), x.signbit())


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_column_major_scales_are_tma_aligned(rows: int, impl: str, seed: int, device: str) -> None:
    x = _random(seed, device, rows, 640)
    for scale_fmt, align in (("fp32", 4), ("ue8m0_packed", 4), ("ue8m0", 16)):
        with use_kernels(impl):
            q, s = ops.per_token_cast(x, "e4m3", 128, scale_fmt, True)
            q_row, s_row = ops.per_token_cast(x, "e4m3", 128, scale_fmt)
        assert torch.equal(q, q_row)
        assert torch.equal(s, s_row)
        assert s.stride() == (1, -(-rows // align) * align)
        padding = s.as_strided((s.stride(1), s.shape[1]), s.stride())[rows:]
        assert not padding.any()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_bad_value_makes_its_group_nan_and_no_other(impl: str, device: str) -> None:
    x = torch.ones(3, 64, device=device)
    x[0, 5], x[1, 40], x[2, 33] = float("nan"), float("inf"), float("-inf")
    bad = torch.tensor([[True, False], [False, True], [False, True]], device=device)
    for scale_fmt in ("ue8m0", "fp32_pow2", "fp32"):
        with use_kernels(impl):
            q, s = ops.per_token_cast(x, "e4m3", 32, scale_fmt)
            y = ops.cast_back(q, s, "e4m3", 32, scale_fmt, FP32)
        assert torch.equal(y.unflatten(1, (2, 32)).isnan().all(-1), bad)
        assert torch.equal(y.unflatten(1, (2, 32)).isnan().any(-1), bad)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_infinity_saturates_under_an_e4m3_scale(fmt: str, impl: str, device: str) -> None:
    x = torch.ones(1, 64, device=device)
    x[0, 5], x[0, 6], x[0, 40] = float("inf"), float("-inf"), float("nan")
    top = 448.0 * (448.0 if fmt == "e4m3" else 6.0)
    with use_kernels(impl):
        q, s = ops.per_token_cast(x, fmt, 16, "e4m3")
        y = ops.cast_back(q, s, fmt, 16, "e4m3", FP32)
    assert s.tolist()[0][::2] == [0x7E, 0x7F]
    assert y[0, 5:7].tolist() == [top, -top]
    assert y[0, :32].isfinite().all()
    assert y[0, 32:48].isnan().all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_zero_rows_keep_signs_and_the_floor_scale(impl: str, device: str) -> None:
    x = torch.tensor([0.0, -0.0], device=device, dtype=BF16).repeat(16)[None]
    with use_kernels(impl):
        q, s = ops.per_token_cast(x, "e4m3", 32, "ue8m0")
        p, t = ops.per_token_cast(x, "e2m1", 32, "ue8m0")
    assert q.tolist() == [[0x00, 0x80] * 16]
    assert s.tolist() == [[127 - 22]]  # 1e-4 / 448 lies between 2^-23 and 2^-22
    assert p.tolist() == [[0x80] * 16]
    assert t.tolist() == [[1]]  # 2^-126


# ---------------------------------------------------------------- errors
X = torch.zeros(4, 64, dtype=BF16)
Q, S = torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("op", "args", "error", "message"),
    [
        ("per_token_cast", (X.half(), "e4m3", 32, "ue8m0"), TypeError, "x must be bfloat16"),
        ("per_token_cast", (X, "e5m2", 32, "ue8m0"), ValueError, "fmt must be one of"),
        ("per_token_cast", (X, "e4m3", 48, "ue8m0"), ValueError, "group must be one of"),
        ("per_token_cast", (X, "e4m3", 32, "e8"), ValueError, "scale_fmt must be one of"),
        ("per_token_cast", (X, "e4m3", 128, "ue8m0"), ValueError, "a multiple of 128 columns"),
        ("per_token_cast", (X[None], "e4m3", 32, "fp32", True), ValueError, "x must be 2-D"),
        ("per_token_cast", (X[0, 0], "e4m3", 32, "ue8m0"), ValueError, "x must have at least one"),
        ("fake_quant_", (X[0, 0], "e4m3", 32, "ue8m0"), ValueError, "x must have at least one"),
        ("cast_back", (Q[0, 0], S, "e4m3", 32, "ue8m0", BF16), ValueError, "q must have at least"),
        ("fake_quant_", (X.int(), "e4m3", 32, "ue8m0"), TypeError, "x must be bfloat16"),
        ("cast_back", (Q.int(), S, "e4m3", 32, "ue8m0", BF16), TypeError, "q must be uint8"),
        ("cast_back", (Q, S, "e4m3", 32, "fp32", BF16), TypeError, "s must be torch.float32"),
        ("cast_back", (Q, S, "e2m1", 32, "ue8m0", BF16), ValueError, r"shape \(4, 4\), got"),
        ("cast_back", (Q, S, "e4m3", 32, "ue8m0", torch.half), TypeError, "dtype must be"),
        ("per_block_cast", (X, (32, 64), "fp32"), ValueError, "block sides must be one of"),
        ("per_block_cast", (X, (32, 32), "e4m3"), ValueError, "scale_fmt must be one of"),
        ("per_block_cast", (X[0], (32, 32), "fp32"), ValueError, "x must be 2-D"),
    ],
)
def test_errors(
    op: str, args: tuple[Any, ...], error: type[Exception], message: str, impl: str
) -> None:
    found = registry.get(op)
    call = found.ref if impl == "ref" else found.kernel
    with pytest.raises(error, match=f"{op}: .*{message}"):
        call(*args)


# ---------------------------------------------------------------- cases from the field
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_qz_01_packed_scales_hold_exponents_only(impl: str, device: str) -> None:
    """QZ-01: mantissa bits must not leak into the packed word."""
    x = torch.full((1, 128), 0.006975 * E4M3_MAX, device=device)
    with use_kernels(impl):
        _, s = ops.per_token_cast(x, "e4m3", 32, "ue8m0_packed")
    assert s.tolist() == [[0x78787878]]  # 0.006975 lies between 2^-8 and 2^-7: rounded up


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_qz_05_codes_use_the_scale_that_is_stored(impl: str, device: str) -> None:
    x = torch.tensor([[7.0, 3.5, 1.75, -7.0] + [0.0] * 28], device=device)
    with use_kernels(impl):
        q, s = ops.per_token_cast(x, "e2m1", 32, "ue8m0")
        y = ops.cast_back(q, s, "e2m1", 32, "ue8m0", FP32)
    assert y[0, :4].tolist() == [8.0, 4.0, 2.0, -8.0]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_qz_12_amax_is_taken_from_what_is_given(impl: str, device: str) -> None:
    for amax, dtype, code in ((448.0, FP32, 127), (448.5, FP32, 128), (450.0, BF16, 128)):
        x = torch.tensor([[amax, 1.0, -2.0, 0.0] + [0.0] * 28], device=device, dtype=dtype)
        with use_kernels(impl):
            q, s = ops.per_token_cast(x, "e4m3", 32, "ue8m0")
            y = ops.cast_back(q, s, "e4m3", 32, "ue8m0", FP32)
        assert s.tolist() == [[code]]
        assert y[0, :4].tolist() == [448.0, 1.0, -2.0, 0.0]


@pytest.mark.interpret
@pytest.mark.parametrize("rows", [65_535, 65_536, 70_000])
def test_sa_18_tp_01_grids_stay_below_the_limit(rows: int) -> None:
    """SA-18, TP-01: one axis, at most 65,535 programs, whatever the number of rows."""

    def x(_: torch.Generator) -> Tensor:
        return torch.empty(rows, 512, dtype=BF16)

    for op, rest in (
        ("per_token_cast", {"fmt": "e4m3", "group": 32, "scale_fmt": "ue8m0"}),
        ("per_token_cast", {"fmt": "e4m3", "group": 128, "scale_fmt": "fp32", "col_major": True}),
        ("fake_quant_", {"fmt": "e2m1", "group": 16, "scale_fmt": "e4m3"}),
        ("per_block_cast", {"block": (32, 32), "scale_fmt": "ue8m0"}),
    ):
        case = Case(op, "rows", lambda g, rest=rest: {"x": x(g), **rest}, real=True)  # type: ignore[misc]
        (launch,) = launches_of(case)
        assert len(launch.grid) == 1
        assert launch.programs <= MAX_PROGRAMS


@pytest.mark.interpret
@pytest.mark.parametrize("col_major", [False, True])
def test_sa_18_striding_programs_reach_every_row(
    col_major: bool, seed: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes when a few programs must walk over all tiles."""
    from tinfer.kernels import _group_walk

    x = _random(seed, device, 163, 512)
    want = ops.per_token_cast.ref(x, "e4m3", 32, "fp32", col_major)
    monkeypatch.setattr(_group_walk, "MAX_PROGRAMS", 3)
    with use_kernels("triton"):
        q, s = ops.per_token_cast(x, "e4m3", 32, "fp32", col_major)
    assert torch.equal(q, want[0])
    assert torch.equal(s, want[1])
