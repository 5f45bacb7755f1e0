"""Cases of the dense projections."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from tinfer.compat.gemm import ceil_div, dequantize_rows
from tinfer.formats import GROUP, Fp4Group32, Fp8Block32
from tinfer.testing.cases import Anchor, Arguments, Case
from tinfer.testing.compare import assert_product


# ---------------------------------------------------------------- operands
def codes(g: Generator, *shape: int) -> Tensor:
    """Random e4m3 codes without NaN: magnitudes spread over the whole format."""
    q = torch.randint(0, 256, shape, generator=g, dtype=torch.uint8, device=g.device)
    return torch.where((q & 127) == 127, q & 0xFE, q)


def scales(g: Generator, *shape: int, low: int = 115, high: int = 125) -> Tensor:
    """Random ue8m0 codes."""
    return torch.randint(low, high, shape, generator=g, dtype=torch.uint8, device=g.device)


def randn(g: Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal values of unit variance."""
    return torch.randn(*shape, generator=g, device=g.device).to(dtype)


def fp8_weight(g: Generator, n: int, k: int) -> tuple[Tensor, Tensor]:
    """A weight of e4m3 codes and its 32x32 tiles' scales."""
    return codes(g, n, k), scales(g, ceil_div(n, GROUP), ceil_div(k, GROUP), low=110, high=118)


def _fp8(g: Generator, t: int, n: int, k: int, **change: Any) -> Arguments:
    weight, scale = fp8_weight(g, n, k)
    q, s = codes(g, t, k), scales(g, t, ceil_div(k, GROUP))
    return {"q": q, "s": s, "weight": weight, "scale": scale} | change


def _fp8_strided(g: Generator, t: int, n: int, k: int) -> Arguments:
    """Rows cut out of wider ones."""
    a = _fp8(g, 2 * t, n, 2 * k)
    part = {"q": a["q"][::2, k:], "s": a["s"][::2, k // GROUP :]}
    return part | {"weight": a["weight"][:, :k], "scale": a["scale"][:, : k // GROUP]}


def _fp8_special(g: Generator, t: int, n: int, k: int) -> Arguments:
    """Rows of zeros, NaN codes, a NaN scale and scales at both ends; tiles of large scale."""
    a = _fp8(g, t, n, k)
    a["q"][0] = 0
    a["q"][1, k // 2] = 0x7F
    a["s"][2, 0] = 255
    a["s"][3] = 185  # 2^58: a row of 1e20
    a["s"][4] = 105  # the smallest scale of a cast
    a["q"][5] = 0x80  # -0
    a["scale"][0, 0] = 150
    a["scale"][-1, -1] = 80
    return a


def _fp4(g: Generator, t: int, n: int, k: int, **change: Any) -> Arguments:
    weight = torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8, device=g.device)
    operands = {"weight": weight, "scale": scales(g, n, k // GROUP, low=112, high=122)}
    return {"q": codes(g, t, k), "s": scales(g, t, k // GROUP)} | operands | change


def _bf16(g: Generator, t: int, n: int, k: int) -> Arguments:
    return {"x": randn(g, t, k), "weight": randn(g, n, k)}


def _bf16_strided(g: Generator, t: int, n: int, k: int) -> Arguments:
    return {"x": randn(g, t, 2 * k)[:, k:], "weight": randn(g, n, 3 * k)[:, k : 2 * k]}


def _mixed(g: Generator, t: int, n: int, k: int, x: torch.dtype, w: torch.dtype) -> Arguments:
    return {"x": randn(g, t, k, dtype=x), "weight": randn(g, n, k, dtype=w)}


def _grouped(g: Generator, t: int, groups: int, n: int, k: int, coded: bool = True) -> Arguments:
    weight, scale = fp8_weight(g, groups * n, k) if coded else (randn(g, groups * n, k), None)
    return {"x": randn(g, t, groups, k), "weight": weight, "scale": scale}


# ---------------------------------------------------------------- comparisons
def _rows(a: Arguments) -> Tensor:
    return dequantize_rows(a["q"], a["s"]).to(torch.bfloat16)


def compare_fp8(actual: Tensor, _expected: Tensor, a: Arguments) -> None:
    """Against fp64 on the dequantized operands."""
    assert_product(actual, _rows(a), Fp8Block32(a["weight"], a["scale"]).dequantize())


def compare_fp4(actual: Tensor, _expected: Tensor, a: Arguments) -> None:
    """Against fp64 on the dequantized operands."""
    assert_product(actual, _rows(a), Fp4Group32(a["weight"], a["scale"]).dequantize())


def compare_plain(actual: Tensor, _expected: Tensor, a: Arguments) -> None:
    """Against fp64 on the operands."""
    assert_product(actual, a["x"], a["weight"])


def compare_grouped(actual: Tensor, _expected: Tensor, a: Arguments) -> None:
    """Group by group against fp64."""
    weight = a["weight"]
    if a["scale"] is not None:
        weight = Fp8Block32(weight, a["scale"]).dequantize()
    for i, part in enumerate(weight.chunk(a["x"].shape[1])):
        assert_product(actual[:, i], a["x"][:, i], part, f"group {i}")


COMPARE = {
    "linear_fp8": compare_fp8,
    "linear_fp4": compare_fp4,
    "linear_bf16": compare_plain,
    "linear_fp32": compare_plain,
    "linear_grouped": compare_grouped,
}


# ---------------------------------------------------------------- rooflines
def _read(a: Arguments) -> int:
    tensors = [v for v in a.values() if isinstance(v, Tensor)]
    return sum(v.numel() * v.element_size() for v in tensors)


def _sizes(a: Arguments) -> tuple[int, int, int]:
    """T, N, K of a call (of all groups together)."""
    x: Tensor = a["q"] if "q" in a else a["x"]
    return int(x.shape[0]), int(a["weight"].shape[0]), int(x.shape[-1])


def _bytes(a: Arguments, out_size: int = 2) -> int:
    t, n, _ = _sizes(a)
    return _read(a) + t * n * out_size


def _flops(a: Arguments) -> float:
    t, n, k = _sizes(a)
    return 2.0 * t * n * k


# ---------------------------------------------------------------- the lists
_SMALL_FP8: list[tuple[str, Callable[..., Arguments], tuple[int, int, int]]] = [
    ("0x64x64", _fp8, (0, 64, 64)),
    ("1x32x32", _fp8, (1, 32, 32)),
    ("3x40x64", _fp8, (3, 40, 64)),
    ("17x129x160_ragged", _fp8, (17, 129, 160)),
    ("63x96x256", _fp8, (63, 96, 256)),
    ("129x72x96", _fp8, (129, 72, 96)),
    ("65x48x130_ragged", _fp8, (65, 48, 130)),
    ("5x33x40_ragged", _fp8, (5, 33, 40)),
    ("7x64x128_strided", _fp8_strided, (7, 64, 128)),
    ("9x64x256_special", _fp8_special, (9, 64, 256)),
    ("70x64x128_special", _fp8_special, (70, 64, 128)),
    # Whole steps of 128 columns, tiles that several programs share, ragged rows.
    ("2x65x128", _fp8, (2, 65, 128)),
    ("17x200x384", _fp8, (17, 200, 384)),
    ("33x129x1024", _fp8, (33, 129, 1024)),
    ("64x40x2048_special", _fp8_special, (64, 40, 2048)),
    ("11x70x256_strided", _fp8_strided, (11, 70, 256)),
]
_PEERS = {
    (16, 5120, 5120): Anchor("sglang w8a8_block_fp8_matmul, 128-blocks", 21.8),
    (16, 4608, 5120): Anchor("sglang w8a8_block_fp8_matmul, 128-blocks", 21.3),
    (16, 32768, 1280): Anchor("sglang w8a8_block_fp8_matmul, 128-blocks", 20.6),
    (16, 25600, 6144): Anchor("sglang w8a8_block_fp8_matmul, 32-blocks", 86.1),
    (4096, 5120, 5120): Anchor("sglang w8a8_block_fp8_matmul, 32-blocks", 1747.0),
    (4096, 4608, 5120): Anchor("sglang w8a8_block_fp8_matmul, 32-blocks", 1571.0),
    (4096, 32768, 1280): Anchor("sglang w8a8_block_fp8_matmul, 32-blocks", 2416.0),
    (4096, 25600, 6144): Anchor("sglang w8a8_block_fp8_matmul, 32-blocks", 10192.0),
}
_REAL_FP8 = [(32768, 1280), (5120, 8192), (25600, 6144), (4608, 5120), (5120, 5120)]
_TOKENS = (1, 16, 64, 256, 4096)


def _fp8_cases() -> list[Case]:
    small = [
        Case("linear_fp8", name, partial(make, t=t, n=n, k=k))
        for name, make, (t, n, k) in _SMALL_FP8
    ]
    fp32 = partial(_fp8, t=9, n=40, k=96, out_dtype=torch.float32)
    real = [
        Case(
            "linear_fp8",
            f"{t}x{n}x{k}",
            partial(_fp8, t=t, n=n, k=k),
            real=True,
            bench=t != 256 and (n, k) != (5120, 5120),
            bytes=_bytes,
            flops=_flops,
            anchor=_PEERS.get((t, n, k)),
        )
        for n, k in _REAL_FP8
        for t in _TOKENS
    ]
    return [*small, Case("linear_fp8", "9x40x96_fp32", fp32), *real]


def _other_cases() -> list[Case]:
    fp32, bf16 = torch.float32, torch.bfloat16
    list_of = [
        ("linear_fp4", "3x40x64", partial(_fp4, t=3, n=40, k=64)),
        ("linear_fp4", "0x32x32", partial(_fp4, t=0, n=32, k=32)),
        ("linear_fp4", "17x129x160", partial(_fp4, t=17, n=129, k=160)),
        ("linear_fp4", "9x32x96_fp32", partial(_fp4, t=9, n=32, k=96, out_dtype=fp32)),
        ("linear_bf16", "1x130x96", partial(_bf16, t=1, n=130, k=96)),
        ("linear_bf16", "0x32x64", partial(_bf16, t=0, n=32, k=64)),
        ("linear_bf16", "65x40x72", partial(_bf16, t=65, n=40, k=72)),
        ("linear_bf16", "5x7x37_ragged", partial(_bf16, t=5, n=7, k=37)),
        ("linear_bf16", "9x48x64_strided", partial(_bf16_strided, t=9, n=48, k=64)),
        ("linear_fp32", "3x130x96", partial(_bf16, t=3, n=130, k=96)),
        ("linear_fp32", "70x48x64", partial(_bf16, t=70, n=48, k=64)),
        ("linear_fp32", "5x24x160_w", partial(_mixed, t=5, n=24, k=160, x=bf16, w=fp32)),
        ("linear_fp32", "17x33x96_x", partial(_mixed, t=17, n=33, k=96, x=fp32, w=bf16)),
        ("linear_fp32", "9x40x130_both", partial(_mixed, t=9, n=40, k=130, x=fp32, w=fp32)),
        ("linear_grouped", "3x2x32x64", partial(_grouped, t=3, groups=2, n=32, k=64)),
        ("linear_grouped", "0x2x32x64", partial(_grouped, t=0, groups=2, n=32, k=64)),
        ("linear_grouped", "66x2x40x96", partial(_grouped, t=66, groups=2, n=40, k=96)),
        ("linear_grouped", "9x4x16x64", partial(_grouped, t=9, groups=4, n=16, k=64)),
        ("linear_grouped", "7x2x64x384", partial(_grouped, t=7, groups=2, n=64, k=384)),
        ("linear_grouped", "33x3x64x128", partial(_grouped, t=33, groups=3, n=64, k=128)),
        (
            "linear_grouped",
            "7x2x48x64_bf16",
            partial(_grouped, t=7, groups=2, n=48, k=64, coded=False),
        ),
    ]
    return [Case(op, name, make) for op, name, make in list_of]


def _real_cases() -> list[Case]:
    makes: list[tuple[str, str, Callable[[Generator], Arguments]]] = []
    for t in (16, 64, 4096):
        makes += [
            ("linear_grouped", f"{t}_wo_a", partial(_grouped, t=t, groups=8, n=1024, k=4096)),
            ("linear_fp32", f"{t}_gate", partial(_bf16, t=t, n=384, k=5120)),
            ("linear_bf16", f"{t}_compressor", partial(_bf16, t=t, n=512, k=5120)),
        ]
    for t in (1, 16, 64, 300):
        makes.append(("linear_fp32", f"{t}_head", partial(_bf16, t=t, n=129280, k=5120)))
    mixed = partial(_mixed, n=512, k=5120, x=torch.bfloat16, w=torch.float32)
    makes += [("linear_fp32", f"{t}_compressor", partial(mixed, t=t)) for t in (16, 4096)]
    makes += [("linear_fp4", f"{t}_expert", partial(_fp4, t=t, n=4608, k=5120)) for t in (8, 300)]
    return [
        Case(
            op,
            name,
            make,
            real=True,
            bench=name in ("16_wo_a", "4096_wo_a", "16_head", "16_gate", "4096_gate"),
            bytes=partial(_bytes, out_size=4 if op == "linear_fp32" else 2),
            flops=_flops,
        )
        for op, name, make in makes
    ]


CASES = _fp8_cases() + _other_cases() + _real_cases()
