"""Cases of Engram's gather and gate, and the gate's error bound."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from tinfer.compat.engram import engram_gate
from tinfer.testing.cases import Anchor, Arguments, Case, Compare
from tinfer.testing.compare import BF16_EPS, FP32_EPS, assert_exact

SGLANG_GATHER = "sglang Triton engram_gather"
SGLANG_GATE = "sglang Triton fused_engram_gate"
SAMPLE = 256  # rows whose error is measured in fp64


# ---------------------------------------------------------------- gather
def codes(g: Generator, *shape: int) -> Tensor:
    """Random e4m3 bytes without NaN: signed zeros and subnormals included."""
    x = torch.randint(0, 256, shape, generator=g, device=g.device, dtype=torch.uint8)
    return torch.where((x & 127) == 127, x - 1, x)


def gathered(
    g: Generator,
    tokens: int,
    columns: int,
    width: int,
    rows: int,
    row_start: int = 0,
    total: int | None = None,
    scales: tuple[int, int] = (0, 256),
) -> Arguments:
    """Ids over `total` global rows and -1; scales over all bytes but NaN."""
    scale = torch.randint(
        *scales, (rows, width // 32), generator=g, device=g.device, dtype=torch.uint8
    )
    ids = torch.randint(-1, total or rows, (tokens, columns), generator=g, device=g.device)
    return {
        "table": codes(g, rows, width),
        "scale": scale.clamp(max=254),
        "ids": ids,
        "row_start": row_start,
    }


def _strided(g: Generator) -> Arguments:
    """Rows of 256 codes and 8 scales side by side, as some files keep them."""
    a = gathered(g, 9, 5, 256, 61)
    both = torch.cat([a["table"], a["scale"]], 1)
    return a | {"table": both[:, :256], "scale": both[:, 256:]}


def _gather_bytes(a: Arguments) -> int:
    width = a["table"].shape[1]
    return int(a["ids"].numel() * (8 + width + width // 32 + 2 * width))


def _release(tokens: int, us: float | None) -> Case:
    rows = 8 << 20  # 2 GiB, as the peer's figure

    def make(g: Generator) -> Arguments:
        return gathered(g, tokens, 24, 256, rows, 7, rows + 7, scales=(100, 140))

    anchor = None if us is None else Anchor(SGLANG_GATHER, us)
    return Case(
        "engram_gather",
        f"{tokens}",
        make,
        real=True,
        bench=True,
        bytes=_gather_bytes,
        anchor=anchor,
    )


GATHER = [
    Case("engram_gather", "empty", lambda g: gathered(g, 0, 24, 256, 7)),
    Case("engram_gather", "empty_table", lambda g: gathered(g, 3, 4, 64, 0, total=9)),
    Case("engram_gather", "one", lambda g: gathered(g, 1, 24, 256, 300)),
    Case("engram_gather", "shard", lambda g: gathered(g, 29, 6, 256, 50, 31, 130)),
    Case("engram_gather", "narrow", lambda g: gathered(g, 63, 3, 32, 101)),
    Case("engram_gather", "odd_width", lambda g: gathered(g, 17, 5, 96, 101)),
    Case("engram_gather", "many_rows", lambda g: gathered(g, 129, 12, 64, 999)),
    Case("engram_gather", "strided", _strided),
    Case("engram_gather", "far", lambda g: gathered(g, 700, 24, 256, 9 << 20), real=True),
    _release(4096, 65.1),
    _release(512, None),
    _release(16, 5.5),
]


# ---------------------------------------------------------------- gate
def gated(
    g: Generator,
    tokens: int,
    copies: int = 4,
    dim: int = 5120,
    dead: float | None = 0.2,
    size: float = 1.0,
) -> Arguments:
    """Normal rows; row 0 of the stream and the key of row 1 are zero where there are so many."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=g.device)

    stream = (normal(tokens, copies, dim) * size).bfloat16()
    kv = (normal(tokens, copies + 1, dim) * size).bfloat16()
    stream[:1], kv[1:2, :-1] = 0.0, 0.0
    flags = torch.rand(tokens, generator=g, device=g.device)
    return {
        "stream": stream,
        "kv": kv,
        "weight": normal(copies, dim),
        "dead": None if dead is None else flags < dead,
        "eps": 1e-20,
        "clamp": 1e-6,
    }


def _special(g: Generator) -> Arguments:
    """Rows with NaN and infinities, subnormal rows, and a dead row among them."""
    a = gated(g, 8, 4, 96, None)
    a["stream"][2, 1, 3], a["kv"][3, 0, 0], a["kv"][4, 4, 5] = (
        float("nan"),
        float("inf"),
        float("nan"),
    )
    a["stream"][5], a["kv"][5, :4] = 1e-39, -1e-39
    a["dead"] = torch.arange(8, device=g.device) == 3
    return a


def _gate_strided(g: Generator) -> Arguments:
    a = gated(g, 7, 2, 160)
    wide = torch.cat([a["kv"], a["kv"]], 1)
    wider = torch.cat([a["stream"], a["stream"]], 0)
    return a | {"kv": wide[:, :3], "stream": wider[::2]}


def _gate_bytes(a: Arguments) -> int:
    return 2 * (2 * a["stream"].numel() + a["kv"].numel()) + 4 * a["weight"].numel()


def _gate(name: str, make: Any, real: bool = False, us: float | None = None) -> Case:
    anchor = None if us is None else Anchor(SGLANG_GATE, us)
    return Case(
        "engram_gate", name, make, real=real, bench=us is not None, bytes=_gate_bytes, anchor=anchor
    )


GATE = [
    _gate("empty", lambda g: gated(g, 0, 4, 64)),
    _gate("one", lambda g: gated(g, 1, 4, 64)),
    _gate("model", lambda g: gated(g, 17, 4, 96)),
    _gate("no_dead", lambda g: gated(g, 9, 2, 160, None)),
    _gate("all_dead", lambda g: gated(g, 5, 4, 64, 1.0)),
    _gate("large", lambda g: gated(g, 9, 4, 64, size=1e15)),
    _gate("small", lambda g: gated(g, 9, 4, 64, size=1e-9)),
    _gate("wide", lambda g: gated(g, 3, 4, 5120)),
    _gate("special", _special),
    _gate("strided", _gate_strided),
    _gate("odd", lambda g: gated(g, 129, 3, 5120), real=True),
    _gate("4096", lambda g: gated(g, 4096, dead=None), real=True, us=141.1),
    _gate("16", lambda g: gated(g, 16, dead=None), real=True, us=7.3),
]


def gate_oracle(a: Arguments) -> tuple[Tensor, Tensor]:
    """fp64 result of an `engram_gate` call, and the error an fp32 evaluation may make.

    An fp32 sum of n products, taken as lanes and a tree, errs by at most (log2 n + n/1024 + 4)
    units of the sum of magnitudes; the gate passes an error of g on with slope s(1-s)/(2 root),
    or may take either sign of the root where g's own sign is in doubt.
    """
    h, k, v = a["stream"].double(), a["kv"][:, :-1].double(), a["kv"][:, -1:].double()
    n = h.shape[-1]
    product = h * a["weight"].double() * k
    scale = torch.rsqrt(h.square().mean(-1) + a["eps"]) * torch.rsqrt(
        k.square().mean(-1) + a["eps"]
    )
    g = product.sum(-1) * scale * n**-0.5
    steps = max(n, 2).bit_length() + n / 1024 + 8
    g_error = FP32_EPS * steps * product.abs().sum(-1) + n * 2.0**-149  # rounding, underflow
    g_error = g_error * scale * n**-0.5
    root = g.abs().clamp(min=a["clamp"]).sqrt()
    gate = torch.sigmoid(torch.copysign(root, g))
    slope = gate * (1 - gate) / (2 * root)
    gate_error = slope * g_error + 8 * FP32_EPS
    gate_error = torch.where(g.abs() <= g_error, gate_error + root / 2, gate_error)
    out = h + gate[..., None] * v
    bound = gate_error[..., None] * v.abs() + 2 * FP32_EPS * (h.abs() + v.abs())
    return out, out.abs() * BF16_EPS + bound * (1 + BF16_EPS) + 2.0**-133


def compare_gate(actual: Tensor, expected: Tensor, a: Arguments) -> None:
    """Dead rows bit for bit; finite rows within the bound of fp64; the others like `expected`."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    if a["dead"] is not None:
        assert_exact(actual[a["dead"]], a["stream"][a["dead"]], "dead rows")
    step = max(1, len(actual) // SAMPLE)
    rows = slice(None, None, step)
    some = {k: v[rows] if k in ("stream", "kv") else v for k, v in a.items()}
    want, bound = gate_oracle(some)
    dead = torch.zeros(len(want), dtype=torch.bool, device=want.device)
    if a["dead"] is not None:
        dead = a["dead"][rows]
    got, theirs = actual[rows].double(), expected[rows].double()
    for name, value in (("kernel", got), ("reference", theirs)):
        finite = torch.isfinite(want) & torch.isfinite(bound) & ~dead[:, None, None]
        over = ((value - want).abs() > bound) & finite
        assert not over.any(), f"engram_gate: {name}: {int(over.sum())} values out of bounds"
        assert torch.equal(
            value.isnan() & ~dead[:, None, None], want.isnan() & ~dead[:, None, None]
        )
    difference = (actual.double() - expected.double()).nan_to_num(0.0, 0.0, 0.0)
    unit = expected.double().nan_to_num(0.0, 0.0, 0.0).norm().item()
    assert difference.norm().item() <= BF16_EPS / 4 * unit + 1e-30, "engram_gate: rows differ"


CASES = GATHER + GATE
COMPARE: dict[str, Compare] = {engram_gate.__name__: compare_gate}
