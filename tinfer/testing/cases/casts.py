"""Cases of the quantizing casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from tinfer.compat.casts import per_token_cast
from tinfer.testing.cases import Anchor, Arguments, Case
from tinfer.testing.compare import assert_equal_tree

Make = Callable[[Generator], Tensor]
Format = tuple[str, int, str]

MODEL: list[Format] = [("e4m3", 32, "ue8m0"), ("e2m1", 32, "ue8m0"), ("e2m1", 16, "e4m3")]
FORMATS: list[Format] = [
    *MODEL,
    ("e4m3", 128, "fp32"),
    ("e4m3", 32, "fp32"),
    ("e4m3", 128, "fp32_pow2"),
    ("e4m3", 32, "ue8m0_packed"),
    ("e4m3", 128, "ue8m0_packed"),
    ("e4m3", 64, "e4m3"),
    ("e2m1", 32, "fp32"),
    ("e2m1", 16, "ue8m0_packed"),
]


# ---------------------------------------------------------------- values
def normal(g: Generator, *shape: int) -> Tensor:
    """bf16, standard normal."""
    return torch.randn(*shape, generator=g, device=g.device).to(torch.bfloat16)


def mixed(g: Generator, *shape: int) -> Tensor:
    """fp32 rows of very different magnitude, some zero, with ties and signed zeros among them."""
    x = torch.randn(*shape, generator=g, device=g.device)
    power = torch.randint(-30, 30, (*shape[:-1], 1), generator=g, device=g.device)
    x = torch.ldexp(torch.where(x.abs() < 0.7, (x * 8).round() / 4, x), power)
    return torch.where(power % 7 == 0, x * 0.0, x)


def extreme(g: Generator, rows: int, columns: int) -> Tensor:
    """fp32 rows, huge, subnormal, at the formats' tops, and rows that hold NaN or an infinity."""
    x = torch.randn(rows, columns, generator=g, device=g.device)
    scale = torch.tensor([3e37, 1e-40, 1e-38, 448.0, 6.0, 1.0, 1.0, 1.0], device=g.device)
    x = x * scale.repeat(-(-rows // 8))[:rows, None]
    x[5::8, 1], x[6::8, 2], x[7::8, 3] = float("nan"), float("inf"), float("-inf")
    return x


def _bf16(make: Callable[..., Tensor], *shape: int) -> Make:
    return lambda g: make(g, *shape).to(torch.bfloat16)


def _fp32(make: Callable[..., Tensor], *shape: int) -> Make:
    return lambda g: make(g, *shape)


def _tail(rows: int, columns: int) -> Make:
    """The last columns of wider rows."""
    return lambda g: mixed(g, rows, columns + 64).to(torch.bfloat16)[:, 64:]


SMALL: dict[str, Make] = {
    "empty": _bf16(mixed, 0, 256),
    "one": _bf16(mixed, 1, 128),
    "tail": _bf16(mixed, 63, 384),
    "batched": _bf16(mixed, 2, 3, 128),
    "strided": _tail(37, 256),
    "fp32": _fp32(mixed, 129, 128),
    "extreme": _fp32(extreme, 24, 256),
    "extreme_bf16": _bf16(extreme, 24, 256),
}


# ---------------------------------------------------------------- arguments
def _group(make: Make, how: Format, col_major: bool = False) -> Callable[[Generator], Arguments]:
    def arguments(g: Generator) -> Arguments:
        fmt, group, scale_fmt = how
        args: Arguments = {"x": make(g), "fmt": fmt, "group": group, "scale_fmt": scale_fmt}
        return args | ({"col_major": True} if col_major else {})

    return arguments


def _back(
    make: Make, how: Format, dtype: torch.dtype = torch.bfloat16, col_major: bool = False
) -> Callable[[Generator], Arguments]:
    def arguments(g: Generator) -> Arguments:
        fmt, group, scale_fmt = how
        q, s = per_token_cast(make(g), fmt, group, scale_fmt, col_major)
        return {"q": q, "s": s, "fmt": fmt, "group": group, "scale_fmt": scale_fmt, "dtype": dtype}

    return arguments


def _block(make: Make, block: tuple[int, int], fmt: str) -> Callable[[Generator], Arguments]:
    return lambda g: {"x": make(g), "block": block, "scale_fmt": fmt}


def _name(how: Format) -> str:
    return "_".join(map(str, how))


# ---------------------------------------------------------------- bytes
def _bits(how: Format) -> tuple[float, float]:
    """(bytes of a code, bytes of a group's scale)."""
    fmt, _, scale_fmt = how
    return (1.0 if fmt == "e4m3" else 0.5), (4 if scale_fmt.startswith("fp32") else 1)


def _cast_bytes(a: Arguments) -> int:
    x, group = a["x"], a["group"]
    code, scale = _bits((a["fmt"], group, a["scale_fmt"]))
    return int(x.numel() * (x.element_size() + code + scale / group))


def _back_bytes(a: Arguments) -> int:
    values = a["q"].numel() * (2 if a["fmt"] == "e2m1" else 1)
    return int(
        a["q"].numel() + a["s"].numel() * a["s"].element_size() + values * a["dtype"].itemsize
    )


def _block_bytes(a: Arguments) -> int:
    return int(a["x"].numel() * (a["x"].element_size() + 1))


# ---------------------------------------------------------------- cases
def _small() -> list[Case]:
    out = []
    for how in FORMATS:
        for name, make in SMALL.items() if how in MODEL else [("tail", SMALL["tail"])]:
            case = f"{_name(how)}-{name}"
            out.append(Case("per_token_cast", case, _group(make, how)))
            if name in ("tail", "strided", "extreme", "extreme_bf16"):
                out.append(Case("fake_quant_", case, _group(make, how), mutates=("x",)))
        if how[1] >= 32:
            make = _bf16(mixed, 37, 640)
            case = f"{_name(how)}-col_major"
            out.append(Case("per_token_cast", case, _group(make, how, True)))
            out.append(Case("cast_back", case, _back(make, how, col_major=True)))
        for dtype in (torch.bfloat16, torch.float32):
            case = f"{_name(how)}-{str(dtype).removeprefix('torch.')}"
            out.append(Case("cast_back", case, _back(_bf16(mixed, 33, 384), how, dtype)))
    for name in ("extreme", "empty"):
        how = ("e4m3", 128, "fp32")
        out.append(Case("per_token_cast", f"{_name(how)}-{name}", _group(SMALL[name], how)))
        out.append(Case("cast_back", f"{_name(MODEL[0])}-{name}", _back(SMALL[name], MODEL[0])))
    for block in [(32, 32), (128, 128), (32, 128), (128, 32)]:
        for fmt in ("ue8m0", "ue8m0_packed", "fp32_pow2", "fp32"):
            case = f"{block[0]}x{block[1]}_{fmt}"
            out.append(Case("per_block_cast", case, _block(_bf16(mixed, 160, 416), block, fmt)))
    out.append(Case("per_block_cast", "extreme", _block(SMALL["extreme"], (32, 32), "ue8m0")))
    out.append(Case("per_block_cast", "empty", _block(SMALL["empty"], (32, 32), "ue8m0")))
    return out


# tile-kernels 2.1.0, microseconds at 4096 and 16 tokens of 5120; its per-32 scales are fp32.
PEER: dict[Format, dict[int, float]] = {
    ("e4m3", 32, "ue8m0"): {4096: 21.5, 16: 5.0},
    ("e4m3", 128, "fp32"): {4096: 21.9, 16: 5.1},
    ("e4m3", 32, "fp32"): {4096: 21.5, 16: 5.0},
    ("e4m3", 32, "ue8m0_packed"): {4096: 21.2, 16: 4.8},
}


def _real() -> list[Case]:
    out = []
    for tokens in (16, 4096):
        for how in [*MODEL, *list(PEER)[1:]]:
            us = PEER.get(how, {}).get(tokens)
            anchor = Anchor("tile-kernels 2.1.0", us) if us else None
            make, case = _group(_bf16(normal, tokens, 5120), how), f"{_name(how)}-{tokens}x5120"
            bench = how[1] != 16 and (tokens == 4096 or how in (MODEL[0], ("e4m3", 128, "fp32")))
            out.append(
                Case("per_token_cast", case, make, True, bench, bytes=_cast_bytes, anchor=anchor)
            )
        make = _group(_bf16(normal, tokens, 5120), ("e4m3", 128, "fp32"), True)
        case = f"e4m3_128_fp32_col_major-{tokens}x5120"
        out.append(Case("per_token_cast", case, make, True, tokens == 4096, bytes=_cast_bytes))
        for how in (MODEL[0], MODEL[2]):
            x = _bf16(normal, tokens, 512)
            case, size = f"{_name(how)}-{tokens}x512", lambda a: 2 * a["x"].nbytes
            out.append(Case("fake_quant_", case, _group(x, how), True, True, ("x",), size))
    x = _bf16(normal, 4096, 5120)
    for how in (MODEL[0], MODEL[1], ("e4m3", 128, "fp32")):
        case = f"{_name(how)}-4096x5120"
        out.append(Case("cast_back", case, _back(x, how), True, True, bytes=_back_bytes))
    for side, fmt in ((32, "ue8m0"), (128, "fp32")):
        make = _block(_bf16(normal, 2304, 5120), (side, side), fmt)
        case = f"{side}_{fmt}-2304x5120"
        out.append(Case("per_block_cast", case, make, True, True, bytes=_block_bytes))
    # More groups than one program each may take.
    x = _bf16(normal, 70000, 2304)
    out.append(Case("per_token_cast", "e4m3_32_ue8m0-70000x2304", _group(x, MODEL[0]), True))
    return out


CASES = _small() + _real()


def _one_nan(value: Tensor) -> Tensor:
    return value.masked_fill(value.isnan(), float("nan")) if value.is_floating_point() else value


def same_bits(actual: Any, expected: Any, _: Arguments) -> None:
    """Bit for bit, except for the sign and payload of NaN, which devices choose."""
    if isinstance(expected, Tensor):
        actual, expected = _one_nan(actual), _one_nan(expected)
    elif isinstance(expected, tuple):
        actual = tuple(map(_one_nan, actual))
        expected = tuple(map(_one_nan, expected))
    assert_equal_tree(actual, expected)


COMPARE = dict.fromkeys(("per_token_cast", "cast_back", "fake_quant_", "per_block_cast"), same_bits)
