"""Cases of RMSNorm, its cast and rotary embedding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Generator, Tensor

from tinfer.testing.cases import Anchor, Arguments, Case, Compare
from tinfer.testing.compare import assert_same_values, assert_ulps

# fp32 results of the kernel and the reference differ by the order of one sum and by rsqrt: less
# than 2^-21 relative, so at most 2^-21 / 2^-9 of the rounded values.
FLIPS = 2.0**-12
EPS = 1e-20


def randn(g: Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal values of unit variance."""
    return torch.randn(*shape, generator=g, device=g.device).to(dtype)


def _rows(g: Generator, rows: int, width: int) -> Tensor:
    return randn(g, rows, width)


def _strided(g: Generator, rows: int, width: int) -> Tensor:
    return randn(g, rows, 2 * width)[:, width:]


def _fp32(g: Generator, rows: int, width: int) -> Tensor:
    return randn(g, rows, width, dtype=torch.float32)


def _three_dims(g: Generator, rows: int, width: int) -> Tensor:
    return randn(g, rows, 3, width)


def _special(g: Generator, rows: int, width: int) -> Tensor:
    """Zero, tiny, huge, subnormal, NaN and infinite rows among ordinary ones."""
    x = randn(g, rows, width)
    x[0] = 0.0
    x[1] *= 1e-12
    x[2] *= 1e17
    x[3] = 1e-40
    x[4, width // 2] = float("nan")
    x[5, 3] = float("-inf")
    return x


def _norm(
    g: Generator,
    rows: int,
    width: int,
    make: Callable[[Generator, int, int], Tensor],
    weight: torch.dtype | None,
    eps: float,
) -> Arguments:
    w = None if weight is None else (1 + 0.1 * randn(g, width, dtype=torch.float32)).to(weight)
    return {"x": make(g, rows, width), "weight": w, "eps": eps}


def _norm_bytes(op: str, a: Arguments) -> int:
    count = a["x"].numel()
    written = {"rms_norm": 2.0, "rms_norm_cast": 3 + 1 / 32, "rms_norm_codes": 1 + 1 / 32}[op]
    return int(count * (2 + written)) + 2 * a["x"].shape[-1]


# Rows are independent programs: many of them prove no more, and the interpreter is slow.
_SMALL = [
    ("1x96", 1, 96, _rows, torch.bfloat16, EPS),
    ("0x96", 0, 96, _rows, torch.bfloat16, EPS),
    ("9x160_fp32_weight", 9, 160, _rows, torch.float32, 1e-6),
    ("17x64_no_weight", 17, 64, _rows, None, EPS),
    ("5x1280_strided", 5, 1280, _strided, torch.bfloat16, EPS),
    ("7x512_fp32", 7, 512, _fp32, torch.bfloat16, EPS),
    ("2x3x128", 2, 128, _three_dims, torch.bfloat16, EPS),
    ("7x96_special", 7, 96, _special, torch.bfloat16, EPS),
]
_PEERS = {
    ("rms_norm_codes", 4096, 5120): Anchor("tile_kernels norm_forward_and_per_token_cast", 26.1),
    ("rms_norm_codes", 16, 5120): Anchor("tile_kernels norm_forward_and_per_token_cast", 5.6),
}
_OPS = ("rms_norm", "rms_norm_cast", "rms_norm_codes")


def _norm_cases() -> list[Case]:
    small = [
        Case(op, name, partial(_norm, rows=r, width=h, make=make, weight=w, eps=eps))
        for op in _OPS
        for name, r, h, make, w, eps in _SMALL
    ]
    real = [
        Case(
            op,
            f"{rows}x{width}",
            partial(_norm, rows=rows, width=width, make=_rows, weight=torch.bfloat16, eps=EPS),
            real=True,
            bench=(rows, width) in ((4096, 5120), (16, 5120), (4096, 1280), (16, 1280)),
            bytes=partial(_norm_bytes, op),
            anchor=_PEERS.get((op, rows, width)),
        )
        for op in _OPS
        for rows, width in ((4096, 5120), (16, 5120), (4096, 1280), (16, 1280), (70000, 512))
    ]
    return small + real


def _rotary(
    g: Generator, tokens: int, heads: int, width: int, rope: int, inverse: bool = False
) -> Arguments:
    length = 2 * tokens + 8
    angle = 1000 * torch.rand(length, rope // 2, generator=g, device=g.device)
    return {
        "x": randn(g, tokens, heads, width),
        "cos_sin": torch.cat([angle.cos(), angle.sin()], dim=-1),
        "positions": torch.randint(length, (tokens,), generator=g, device=g.device),
        "inverse": inverse,
    }


def _rotary_slice(g: Generator) -> Arguments:
    """Heads cut out of a wider row."""
    a = _rotary(g, 9, 6, 64, 16)
    return a | {"x": a["x"][:, 1:4]}


def _rotary_bytes(a: Arguments) -> int:
    tokens, heads, _ = a["x"].shape
    return tokens * (heads * a["cos_sin"].shape[1] * 4 + a["cos_sin"].shape[1] * 4 + 8)


_ROTARY_PEERS = {
    (4096, 64): Anchor("tile_kernels rope", 24.0),
    (16, 64): Anchor("tile_kernels rope", 5.0),
}


def _rotary_cases() -> list[Case]:
    small = [
        Case("apply_rotary_", name, make, mutates=("x",))
        for name, make in (
            ("1x4x64", partial(_rotary, tokens=1, heads=4, width=64, rope=16)),
            ("0x4x64", partial(_rotary, tokens=0, heads=4, width=64, rope=16)),
            ("63x3x128", partial(_rotary, tokens=63, heads=3, width=128, rope=32)),
            ("129x1x96_whole", partial(_rotary, tokens=129, heads=1, width=96, rope=96)),
            (
                "5x2x512_inverse",
                partial(_rotary, tokens=5, heads=2, width=512, rope=64, inverse=True),
            ),
            ("9x3x64_slice", _rotary_slice),
        )
    ]
    real = [
        Case(
            "apply_rotary_",
            f"{tokens}x{heads}x{width}" + ("_inverse" if inverse else ""),
            partial(_rotary, tokens=tokens, heads=heads, width=width, rope=64, inverse=inverse),
            real=True,
            bench=tokens in (16, 4096),
            mutates=("x",),
            bytes=_rotary_bytes,
            anchor=None if inverse else _ROTARY_PEERS.get((tokens, heads)),
        )
        for tokens, heads, width, inverse in (
            (4096, 64, 512, False),
            (4096, 64, 512, True),
            (16, 64, 512, False),
            (4096, 32, 128, False),
            (65536, 1, 128, False),
        )
    ]
    return small + real


def _compare_norm(actual: Tensor, expected: Tensor, arguments: Arguments) -> None:
    assert_ulps(actual, expected, FLIPS, name="y")


def compare_codes(
    actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], flips: float
) -> None:
    """Codes and scales of values of which a share `flips` is one bf16 step off.

    A scale moves only where such a step crosses a power of two, and takes its group with it.
    Elsewhere a step crosses a code's boundary or does not: the code is at most one off.
    """
    (q, s), (want_q, want_s) = actual, expected
    assert q.shape == want_q.shape
    assert s.shape == want_s.shape
    moved = s != want_s
    assert int(moved.sum()) <= 32 * flips * moved.numel() + 1, f"{int(moved.sum())} scales differ"
    apart = (q.int() - want_q.int()).abs().unflatten(-1, (-1, 32)) if q.numel() else q.int()
    # NaN carries no sign.
    same = (q & 0x7F == 0x7F) & (want_q & 0x7F == 0x7F)
    apart = (
        apart.masked_fill(same.view_as(apart) | moved.view(*s.shape, 1), 0) if q.numel() else apart
    )
    assert int(apart.max() if apart.numel() else 0) <= 1, "codes more than one apart"
    mean = flips * apart.numel()
    count = int((apart > 0).sum())
    assert count <= mean + 4 * mean**0.5 + 1, f"{count} of {apart.numel()} codes differ"


def _compare_norm_cast(
    actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], arguments: Arguments
) -> None:
    from tinfer.compat.casts import per_token_cast

    y, q, s = actual
    assert_ulps(y, expected[0], FLIPS, name="y")
    want_q, want_s = per_token_cast(y, "e4m3", 32, "ue8m0")
    assert_same_values(s, want_s, "s")
    compare_codes((q, s), (want_q, want_s), 0.0)


def _compare_norm_codes(
    actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], arguments: Arguments
) -> None:
    compare_codes(actual, expected, FLIPS)


CASES: list[Case] = _norm_cases() + _rotary_cases()
COMPARE: dict[str, Compare] = {
    "rms_norm": _compare_norm,
    "rms_norm_cast": _compare_norm_cast,
    "rms_norm_codes": _compare_norm_codes,
}
