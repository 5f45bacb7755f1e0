"""The shared device functions against `tinfer.formats`, over all bf16, random fp32 and ties."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.jit_probe import all_bf16, dot, pack, probe, random_fp32, same, ties
from tinfer import formats

pytestmark = pytest.mark.interpret
KERNELS = Path(__file__).parents[2] / "tinfer" / "kernels"
U8, BF16, FP32 = torch.uint8, torch.bfloat16, torch.float32


def _native(device: str) -> list[bool]:
    """The ways of the device: integer arithmetic, and its own conversion where it has one."""
    from tinfer.kernels._target import target

    return [False, True] if target(torch.device(device)).native_e4m3 else [False]


@pytest.fixture(scope="module")
def values(device: str) -> Tensor:
    return torch.cat([all_bf16(device), ties(device), random_fp32(1_000_000, 7, device)])


def test_value_set_is_large_enough(values: Tensor) -> None:
    assert len(ties("cpu").unique()) > 20_000
    assert values.numel() > (1 << 16) + 1_000_000 + 20_000


def test_e4m3_encode_equals_the_format(values: Tensor, device: str) -> None:
    for native in _native(device):
        assert same(probe("e4m3_encode", values, U8, native), formats.encode_e4m3(values)) == 0


def test_e4m3_round_is_decode_of_encode(values: Tensor, device: str) -> None:
    want = formats.decode_e4m3(formats.encode_e4m3(values))
    for native in _native(device):
        assert same(probe("e4m3_round", values, FP32, native), want) == 0


def test_e2m1_encode_equals_the_format(values: Tensor) -> None:
    assert same(probe("e2m1_encode", values, U8), formats.encode_e2m1(values)) == 0


def test_e2m1_round_is_decode_of_encode(values: Tensor) -> None:
    want = formats.decode_e2m1(formats.encode_e2m1(values))
    assert same(probe("e2m1_round", values, FP32), want) == 0


def test_ue8m0_encode_equals_the_format(values: Tensor) -> None:
    assert same(probe("ue8m0_encode", values.abs(), U8), formats.encode_ue8m0(values.abs())) == 0


def test_to_bf16_rounds_like_torch(values: Tensor) -> None:
    assert same(probe("to_bf16", values, BF16), values.to(BF16)) == 0
    assert same(probe("round_bf16", values, FP32), values.to(BF16).float()) == 0


def test_to_fp32_is_exact(device: str) -> None:
    x = all_bf16(device)
    assert same(probe("to_fp32", x.to(BF16), FP32), x) == 0


def test_decoders_over_all_codes(device: str) -> None:
    codes = torch.arange(256, dtype=U8, device=device)
    for native in _native(device):
        want = formats.decode_e4m3(codes)
        assert same(probe("e4m3_decode", codes, FP32, native), want) == 0
    assert same(probe("e2m1_decode", codes[:16], FP32), formats.decode_e2m1(codes[:16])) == 0
    assert same(probe("ue8m0_decode", codes, FP32), formats.decode_ue8m0(codes)) == 0


def test_fast_decoders_to_bf16_over_all_codes(device: str) -> None:
    codes = torch.arange(256, dtype=U8, device=device)
    finite = codes[(codes & 127) != 127]
    want = formats.decode_e4m3(finite).to(BF16)
    assert same(probe("e4m3_to_bf16", finite, BF16), want) == 0
    want = formats.decode_e2m1(codes[:16]).to(BF16)
    assert same(probe("e2m1_to_bf16", codes[:16], BF16), want) == 0
    want = formats.decode_ue8m0(codes[1:255]).to(BF16)
    assert same(probe("ue8m0_to_bf16", codes[1:255], BF16), want) == 0


def test_reciprocals_of_scales_are_exact(device: str) -> None:
    codes = torch.arange(255, dtype=U8, device=device)
    product = probe("ue8m0_reciprocal", codes, FP32).double() * formats.decode_ue8m0(codes).double()
    assert bool((product == 1.0).all())
    assert probe("ue8m0_reciprocal", torch.full_like(codes, 255), FP32).isnan().all()


def test_nibbles_pack_low_first_and_unpack(device: str, seed: int) -> None:
    g = torch.Generator(device=device).manual_seed(seed)
    codes = torch.randint(0, 16, (64, 64), generator=g, device=device).to(U8)
    assert torch.equal(pack(codes), formats.pack_e2m1(codes))
    assert torch.equal(probe("nibbles", codes, U8), codes)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_dot_accumulates_in_fp32(dtype: torch.dtype, device: str, seed: int) -> None:
    g = torch.Generator(device=device).manual_seed(seed)
    a, b = (torch.randn(64, 64, generator=g, device=device).to(dtype) for _ in range(2))
    want = 1.0 + a.double() @ b.double()
    # 64 products, each rounded once when added: 65 roundings of at most the sum of magnitudes.
    bound = (1.0 + a.double().abs() @ b.double().abs()) * 65 * 2.0**-24
    assert bool(((dot(a, b).double() - want).abs() <= bound).all())


# ---------------------------------------------------------------- cases from the field
def test_tp_05_fp32_dot_is_ieee_by_default(device: str, seed: int) -> None:
    """TP-05: TF32, the device's default, errs by 2e-2 where IEEE fp32 errs by 1e-6."""
    g = torch.Generator(device=device).manual_seed(seed)
    a, b = (torch.randn(64, 64, generator=g, device=device) for _ in range(2))
    assert (dot(a, b).double() - 1.0 - a.double() @ b.double()).abs().max() < 2e-5


def test_qz_02_ue8m0_of_0_and_255(device: str) -> None:
    codes = torch.tensor([0, 1, 127, 254, 255], dtype=U8, device=device)
    for value in (probe("ue8m0_decode", codes, FP32), formats.decode_ue8m0(codes)):
        assert value.view(torch.int32)[0] == 0x00400000
        assert value[1:4].tolist() == [2.0**-126, 1.0, 2.0**127]
        assert value[4].isnan()


def test_qz_06_e2m1_rounds_ties_to_even_codes(device: str) -> None:
    x = torch.tensor([0.25, 0.25000006, 0.75, 2.5, 3.5, 5.0, 5.0001, 7.0], device=device)
    for code in (probe("e2m1_encode", x, U8), formats.encode_e2m1(x)):
        assert formats.decode_e2m1(code).tolist() == [0.0, 0.5, 1.0, 2.0, 4.0, 4.0, 6.0, 6.0]
    codes = torch.arange(16, dtype=U8, device=device)
    assert torch.equal(probe("e2m1_encode", probe("e2m1_decode", codes, FP32), U8), codes)


def test_qz_08_ue8m0_bias(device: str) -> None:
    codes = torch.tensor([127, 130], dtype=U8, device=device)
    assert probe("ue8m0_decode", codes, FP32).tolist() == [1.0, 8.0]
    assert formats.decode_ue8m0(codes).tolist() == [1.0, 8.0]


def test_qz_09_bytes_are_fn_on_every_target(device: str) -> None:
    """QZ-09: no conversion of the device's own format on fnuz hardware, so nothing to rescale."""
    from tinfer.kernels._target import Target

    codes = torch.tensor([0x38, 0x7E, 0x7F, 0x80, 0x01], dtype=U8, device=device)
    for value in (probe("e4m3_decode", codes, FP32), formats.decode_e4m3(codes)):
        assert value[[0, 1, 4]].tolist() == [1.0, 448.0, 2.0**-9]
        assert value[2].isnan()
        assert value.view(torch.int32)[3] == -(2**31)
    assert not Target("hip", "gfx942", 64).native_e4m3
    assert not Target("cuda", 80, 163).native_e4m3
    assert Target("cuda", 89, 99).native_e4m3


def test_qz_11_e4m3_saturates(device: str) -> None:
    x = torch.tensor([448.0, 464.0, 465.0, 480.0, 500.0, -1e9, float("inf")], device=device)
    want = [448.0] * 5 + [-448.0, 448.0]
    codes = [probe("e4m3_encode", x, U8, native) for native in _native(device)]
    for code in [*codes, formats.encode_e4m3(x)]:
        assert formats.decode_e4m3(code).tolist() == want


def test_tp_04_kernels_do_not_gather() -> None:
    """TP-04: tl.gather is missing or slow on some versions; kernels gather through pointers."""
    files = sorted(KERNELS.glob("*.py"))
    assert len(files) > 3
    assert not [f.name for f in files if "tl.gather" in f.read_text()]
