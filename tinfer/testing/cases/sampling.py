"""Cases of the sampler: cuts, temperatures, ties, dead rows, the release's vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tinfer.testing.cases import Anchor, Arguments, Case

VOCAB = 129280
OFF = (1.0, 0, 1.0, 0.0)  # temperature, top_k, top_p, min_p


def random_bits(g: torch.Generator, n: int) -> Tensor:
    """int64 [n] of 63 random bits."""
    return torch.randint(-(2**62), 2**62, (n,), generator=g, device=g.device)


def parameters(rows: int, device: torch.device, *values: float) -> dict[str, Tensor]:
    """The four per-row parameters, the same in every row."""
    names = ("temperature", "top_k", "top_p", "min_p")
    types = (torch.float32, torch.int32, torch.float32, torch.float32)
    return {
        name: torch.full((rows,), value, dtype=dtype, device=device)
        for name, value, dtype in zip(names, values, types, strict=True)
    }


def mixed_parameters(g: torch.Generator, rows: int) -> dict[str, Tensor]:
    """Every row draws its own parameters from the lists below."""
    lists: dict[str, list[float]] = {
        "temperature": [1.0, 0.6, 1.5, 0.01, 5.0, 0.3, 0.0, 1e-5],
        "top_k": [0, 0, 1, 20, 128, 4096, -1],
        "top_p": [1.0, 0.99, 0.9, 0.5, 0.0, 2.0],
        "min_p": [0.0, 0.0, 0.0, 0.05, 0.5, 1.0],
    }
    out = {}
    for name, values in lists.items():
        dtype = torch.int32 if name == "top_k" else torch.float32
        pick = torch.randint(len(values), (rows,), generator=g, device=g.device)
        out[name] = torch.tensor(values, dtype=dtype, device=g.device)[pick]
    return out


def logits_of(kind: str, g: torch.Generator, rows: int, columns: int) -> Tensor:
    """Logits of a named shape."""
    x = torch.randn(rows, columns, generator=g, device=g.device) * 3
    if kind == "ties":
        return torch.round(x * 2) / 2
    if kind == "flat":
        return x * 1e-3
    if kind == "constant":
        return torch.full_like(x, -2.5)
    if kind == "peaked":
        x[:, columns // 2] = 40.0
        return x
    if kind == "masked":
        dead = torch.rand(rows, columns, generator=g, device=g.device) < 0.8
        dead[:, columns - 1] = False
        return x.masked_fill(dead, -math.inf)
    if kind == "huge":
        return x * 1e30
    if kind == "subnormal":
        return x * 1e-41
    if kind == "zeros":  # of both signs
        return torch.where(x > 0, 0.0, -0.0)
    return x


def dead_rows(g: torch.Generator, columns: int) -> Tensor:
    """A fine row, then NaN, +inf, all -inf, one survivor."""
    x = torch.randn(5, columns, generator=g, device=g.device)
    x[1, columns // 2] = math.nan
    x[2, columns - 1] = math.inf
    x[3:] = -math.inf
    x[4, columns // 3] = -1.0
    return x


def _keys(g: torch.Generator, rows: int) -> dict[str, Tensor]:
    positions = torch.randint(0, 2**33, (rows,), generator=g, device=g.device)
    return {"seeds": random_bits(g, rows), "positions": positions}


def _mixed(
    kind: str, rows: int, columns: int, dtype: torch.dtype = torch.float32
) -> Callable[[torch.Generator], Arguments]:
    def make(g: torch.Generator) -> Arguments:
        x = dead_rows(g, columns) if kind == "dead" else logits_of(kind, g, rows, columns)
        return {"logits": x.to(dtype), **mixed_parameters(g, len(x))}

    return make


def _fixed(
    kind: str, rows: int, columns: int, *values: float
) -> Callable[[torch.Generator], Arguments]:
    def make(g: torch.Generator) -> Arguments:
        x = logits_of(kind, g, rows, columns)
        return {"logits": x, **parameters(rows, g.device, *values)}

    return make


def _strided(g: torch.Generator) -> Arguments:
    x = logits_of("normal", g, 3, 400)[:, :300]
    return {"logits": x, **mixed_parameters(g, 3)}


def _with_keys(
    make: Callable[[torch.Generator], Arguments], may_cut: bool = True
) -> Callable[..., Arguments]:
    def wrapped(g: torch.Generator) -> Arguments:
        arguments = make(g)
        keys = _keys(g, len(arguments["logits"]))
        return {**arguments, **keys, "purpose": 0, "may_cut": may_cut}

    return wrapped


_SHAPES: list[tuple[str, int, int]] = [
    ("normal", 2, 5000),
    ("normal", 1, 129),
    ("ties", 3, 300),
    ("flat", 2, 300),
    ("constant", 2, 129),
    ("peaked", 2, 129),
    ("masked", 2, 300),
    ("huge", 2, 63),
    ("subnormal", 2, 63),
    ("zeros", 2, 63),
    ("dead", 5, 63),
    ("normal", 2, 1),
    ("normal", 0, 63),
]

_SMALL = [(f"{kind}-{b}x{v}", _mixed(kind, b, v)) for kind, b, v in _SHAPES]
_SMALL += [("bf16-2x300", _mixed("normal", 2, 300, torch.bfloat16)), ("strided-3x300", _strided)]
_KINDS = sorted({kind for kind, _, _ in _SHAPES if kind != "dead"})
_SMALL += [
    ("top_k_200-1x600", _fixed("normal", 1, 600, 1.5, 200, 1.0, 0.0)),
    ("uncut_flat-3x600", _fixed("flat", 3, 600, 0.5, 0, 1.0, 0.0)),
    ("far_cut-1x9000", _fixed("flat", 1, 9000, 6e-3, 0, 0.97, 0.0)),
]
_REAL = [(f"{kind}-8x{VOCAB}", _mixed(kind, 8, VOCAB)) for kind in _KINDS]
_REAL += [(f"bf16-8x{VOCAB}", _mixed("normal", 8, VOCAB, torch.bfloat16))]


def _bytes(a: Arguments) -> int:
    return a["logits"].numel() * a["logits"].element_size()


_TIMED = [
    ("off", OFF, "flashinfer sampling_from_logits", 50.1),
    ("top-p-0.99", (1.0, 0, 0.99, 0.0), "flashinfer softmax + top_p_sampling_from_probs", 101.0),
    (
        "top-k-50-top-p-0.99",
        (1.0, 50, 0.99, 0.0),
        "flashinfer softmax + top_k_top_p_sampling_from_probs",
        192.6,
    ),
    ("min-p-0.05", (1.0, 0, 1.0, 0.05), None, 0.0),
    ("greedy", (0.0, 0, 1.0, 0.0), None, 0.0),
]

CASES = [Case("token_masses", name, make) for name, make in _SMALL]
CASES += [Case("token_masses", name, make, real=True) for name, make in _REAL]
CASES += [Case("sample", name, _with_keys(make)) for name, make in _SMALL]
CASES += [
    Case("sample", f"no_cut-{kind}-3x300", _with_keys(_mixed(kind, 3, 300), may_cut=False))
    for kind in ("normal", "dead")
]
CASES += [Case("sample", name, _with_keys(make), real=True) for name, make in _REAL]
CASES += [
    Case(
        "sample",
        f"{name}-{rows}x{VOCAB}",
        _with_keys(_fixed("normal", rows, VOCAB, *values), may_cut=values[1] > 0 or values[2] < 1),
        real=True,
        bench=True,
        bytes=_bytes,
        anchor=Anchor(peer, us) if peer and rows == 64 else None,
    )
    for name, values, peer, us in _TIMED
    for rows in (1, 64)
]
