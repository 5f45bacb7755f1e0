"""Weight conversions: golden vectors, exactness, the types of scales, parity, compilation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.golden.check_golden import Golden, OpCase
from tests.kernels.capture import check_capture
from tests.kernels.parity import check_parity
from tinfer import ops
from tinfer.compat.casts import per_block_cast
from tinfer.formats import Fp4Group32, Fp8Block32, Fp8Block128, decode_e4m3, decode_ue8m0
from tinfer.registry import use_kernels
from tinfer.testing.aot import TARGETS, check_family
from tinfer.testing.cases import Case, cases
from tinfer.testing.cases.weight_casts import fp4, fp8

GOLDEN = Golden(Path(__file__).parents[1] / "data" / "golden")
CASES = cases(family="weight_casts")
IMPLEMENTATIONS = ("ref", pytest.param("triton", marks=pytest.mark.interpret))
U8, BF16, FP32 = torch.uint8, torch.bfloat16, torch.float32


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
    check_family("weight_casts", target)


@pytest.mark.gpu
def test_dequantization_replays_in_a_graph(seed: int) -> None:
    """Two passes per call: a weight is dequantized, then multiplied, inside captured steps."""
    case = next(c for c in CASES if c.id == "dequantize_weight-fp8-32768x1280")
    check_capture(case, seed)


# ---------------------------------------------------------------- golden vectors
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", GOLDEN.ops("fp4_to_fp8"), ids=lambda c: c.case)
def test_golden_fp4_to_fp8(case: OpCase, impl: str, device: str) -> None:
    weight = Fp4Group32(*(case.inputs[n].view(U8).to(device) for n in ("weight", "scale")))
    block = case.params["fp8_block"]
    with use_kernels(impl):
        if not case.params["lossless"]:
            with pytest.raises(ValueError, match=r"exact e4m3 values.* in tile \(0, 0\)"):
                ops.fp4_to_fp8(weight, block)
            return
        q, s = ops.fp4_to_fp8(weight, block)
    case.check({"weight_fp8": q.view(torch.float8_e4m3fn), "scale_fp8": s})


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", GOLDEN.ops("wo_a_dequant"), ids=lambda c: c.case)
def test_golden_wo_a_dequant(case: OpCase, impl: str, device: str) -> None:
    weight = Fp8Block32(*(case.inputs[n].view(U8).to(device) for n in ("weight", "scale")))
    with use_kernels(impl):
        case.check({"weight_bf16": ops.dequantize_weight(weight, BF16)})


# ---------------------------------------------------------------- exactness
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("spread", [1, 12, 13, 14])
def test_fp4_to_fp8_keeps_every_value(
    spread: int, block: int, impl: str, seed: int, device: str
) -> None:
    weight = fp4(torch.Generator(device=device).manual_seed(seed), 128, 256, spread=spread)
    with use_kernels(impl):
        q, s = ops.fp4_to_fp8(weight, block)
    scale = decode_ue8m0(s).repeat_interleave(block, 0).repeat_interleave(block, 1)
    assert torch.equal(decode_e4m3(q) * scale, weight.dequantize(FP32))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_fp4_to_fp8_names_the_tile_that_cannot_be_exact(impl: str, device: str) -> None:
    """16 below the tile's largest scale, 1/2 is lost but 0 and 2^3 * 1/2 are not."""
    codes = torch.zeros(2, 64, 48, dtype=U8, device=device)
    scale = torch.full((2, 64, 3), 110, dtype=U8, device=device)
    scale[1, 40, 2] = 126
    weight = Fp4Group32(codes, scale)
    with use_kernels(impl):
        ops.fp4_to_fp8(weight, 32)  # all zeros: nothing to lose
        codes[1, 50, 2 * 16] = 0x06  # 4.0
        ops.fp4_to_fp8(weight, 32)
        codes[1, 50, 2 * 16] = 0x01
        with pytest.raises(ValueError, match=r"fp4_to_fp8: .* in tile \(1, 1, 2\); use"):
            ops.fp4_to_fp8(weight, 32)
        codes.zero_()
        scale[0, 3, 1] = 255
        with pytest.raises(ValueError, match=r"a NaN in tile \(0, 0, 1\)"):
            ops.fp4_to_fp8(weight, 32)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_requantization_reads_scales_by_type(impl: str, seed: int, device: str) -> None:
    """FP4 scales belong to rows, FP8 scales to tiles: the values must be those of the type."""
    g = torch.Generator(device=device).manual_seed(seed)
    expert, dense = fp4(g, 1, 96, 160), fp8(g, 96, 160)
    with use_kernels(impl):
        e, d = ops.requantize_fp4(expert, "fp32"), ops.requantize_fp8(dense, "fp32")
    assert isinstance(e, Fp8Block128)
    for result, values in ((e, expert.dequantize(FP32)[0]), (d, dense.dequantize(FP32))):
        q, s = per_block_cast(values, (128, 128), "fp32")
        assert torch.equal(result.weight.view(q.shape), q)
        assert torch.equal(result.scale.view(s.shape), s)
        got = result.dequantize(FP32).view(values.shape)
        assert (got - values).norm() / values.norm() < 0.04  # half a step of 3 mantissa bits


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_transposed_scales_word_by_word(impl: str, device: str) -> None:
    scale = torch.arange(1, 33, dtype=U8, device=device).view(4, 8)
    with use_kernels(impl):
        ((rows, columns),) = ops.transpose_weight_scales([scale], 32)
    assert rows.shape == (128, 2)
    assert columns.shape == (256, 1)
    assert rows[0].tolist() == [0x04030201, 0x08070605]
    assert torch.equal(rows[::32], rows[31::32])
    assert rows[32, 0] == 0x0C0B0A09
    assert columns[0, 0] == 0x19110901
    assert columns[32, 0] == 0x1A120A02


# ---------------------------------------------------------------- errors
W4 = Fp4Group32(torch.zeros(64, 32, dtype=U8), torch.zeros(64, 2, dtype=U8))
W8 = Fp8Block32(torch.zeros(64, 64, dtype=U8), torch.zeros(2, 2, dtype=U8))
WRONG4 = Fp4Group32(W4.weight, torch.zeros(2, 2, dtype=U8))
WRONG8 = Fp8Block32(W8.weight, torch.zeros(64, 2, dtype=U8))
HALF8 = Fp8Block128(W8.weight, torch.zeros(1, 1, dtype=torch.half))


def _on(device: str, value: Any) -> Any:
    """A copy of an argument on the device."""
    if isinstance(value, (Fp4Group32, Fp8Block32, Fp8Block128)):
        return type(value)(value.weight.to(device), value.scale.to(device))
    if isinstance(value, list):
        return [_on(device, v) for v in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("op", "args", "error", "message"),
    [
        ("fp4_to_fp8", (W4, 64), ValueError, "block must be one of"),
        ("fp4_to_fp8", (W4, 128), ValueError, "multiples of 128"),
        ("fp4_to_fp8", (WRONG4, 32), ValueError, r"scale must have shape \(64, 2\)"),
        ("requantize_fp4", (WRONG4, "fp32"), ValueError, r"scale must have shape \(64, 2\)"),
        ("requantize_fp4", (W4, "ue8m0"), ValueError, "scale_fmt must be fp32"),
        ("requantize_fp8", (WRONG8, "fp32"), ValueError, r"scale must have shape \(2, 2\)"),
        ("dequantize_weight", (W4.weight, BF16), TypeError, "weight must be a quantized weight"),
        ("dequantize_weight", (W8, torch.half), TypeError, "dtype must be"),
        ("dequantize_weight", (HALF8, BF16), TypeError, "scale must be float32"),
        ("transpose_weight_scales", ([W8.scale], 32), ValueError, "multiples of 128"),
        ("transpose_weight_scales", ([W8.scale.int()], 128), TypeError, r"scales\[0\] must be"),
    ],
)
def test_errors(
    op: str, args: tuple[Any, ...], error: type[Exception], message: str, impl: str, device: str
) -> None:
    mine = [_on(device, a) for a in args]
    with use_kernels(impl), pytest.raises(error, match=f"{op}: .*{message}"):
        getattr(ops, op)(*mine)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_qz_01_scales_with_mantissa_bits_are_refused(impl: str, device: str) -> None:
    """QZ-01: packing four scales of 0.006975 must not leak their mantissas into the word."""
    scale = torch.full((1, 4), 0.006975, device=device)
    with use_kernels(impl):
        with pytest.raises(ValueError, match=r"scales\[0\] must be powers of two"):
            ops.transpose_weight_scales([scale], 128)
        exact = (scale.view(torch.int32) & 0x7F800000).view(FP32)
        ((rows, _),) = ops.transpose_weight_scales([exact], 128)
    assert bool((rows == 0x77777777).all())
