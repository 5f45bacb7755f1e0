"""Cases of the hyper-connections.

Collapse, write-back, mean and expand equal their references bit for bit. Mixes are compared with
a float64 oracle: the kernel may be off by twice what fp32 torch is off, plus a floor.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from tinfer.compat import hyper_connection as ref
from tinfer.testing.cases import Anchor, Arguments, Case, Compare
from tinfer.testing.cases.norm_rope import FLIPS, randn
from tinfer.testing.compare import FP32_EPS, assert_same_values, assert_ulps

EPS, HC_EPS, ITERS = 1e-20, 1e-6, 20
Sizes = tuple[int, int, int]  # tokens, copies, width


def _uniform(g: Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=g, device=g.device)


def _fp32(g: Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=g, device=g.device)


def _stream(g: Generator, sizes: Sizes, special: bool = False) -> Tensor:
    stream = randn(g, *sizes)
    if special:  # zero, tiny, huge, NaN and infinite rows
        stream[0] = 0.0
        stream[1] *= 1e-12
        stream[2] *= 1e15
        stream[3, 0, 5] = float("nan")
        stream[4, -1, 7] = float("-inf")
    return stream


def _mixing(g: Generator, sizes: Sizes) -> Arguments:
    tokens, copies, width = sizes
    count = ref.mix_rows(copies)
    return {
        "fn": _fp32(g, count, copies * width, scale=(copies * width) ** -0.5),
        "scale": 0.5 + _uniform(g, 3),
        "base": _fp32(g, count, scale=0.5),
        "norm_eps": EPS,
        "hc_eps": HC_EPS,
        # One round where the interpreter would take long.
        "iters": 1 if tokens in (17, 63, 129) else ITERS,
    }


def _mixed(g: Generator, sizes: Sizes) -> Arguments:
    """post and comb of the size a sublayer's mixes have."""
    tokens, copies, _ = sizes
    comb = _uniform(g, tokens, copies, copies)
    return {
        "post": 2 * _uniform(g, tokens, copies),
        "comb": comb / comb.sum(-1, keepdim=True),
    }


def _weight(g: Generator, width: int) -> Tensor:
    return (1 + 0.1 * _fp32(g, width)).to(torch.bfloat16)


def _make_expand(g: Generator, sizes: Sizes, special: bool = False) -> Arguments:
    return {"x": _stream(g, sizes, special)[:, 0], "copies": sizes[1]}


def _make_mean(g: Generator, sizes: Sizes, special: bool = False) -> Arguments:
    return {"stream": _stream(g, sizes, special)}


def _make_collapse(g: Generator, sizes: Sizes, special: bool = False) -> Arguments:
    return {"stream": _stream(g, sizes, special), "pre": _uniform(g, *sizes[:2])}


def _make_collapse_norm(g: Generator, sizes: Sizes, special: bool = False) -> Arguments:
    return _make_collapse(g, sizes, special) | {"weight": _weight(g, sizes[2]), "eps": EPS}


def _make_post(g: Generator, sizes: Sizes, special: bool = False) -> Arguments:
    y = randn(g, sizes[0], sizes[2])
    return {"y": y, "stream": _stream(g, sizes, special)} | _mixed(g, sizes)


def _make_split(g: Generator, sizes: Sizes, special: bool = False) -> Arguments:
    mixing = _mixing(g, (*sizes[:2], 1))
    mixes = _fp32(g, sizes[0], ref.mix_rows(sizes[1]), scale=2.0)
    if special:
        mixes[0] = 0.0
        mixes[1] *= 50
        mixes[2, -1] = float("nan")
    return {"mixes": mixes} | {k: mixing[k] for k in ("scale", "base", "hc_eps", "iters")}


def _make_mix(g: Generator, sizes: Sizes, special: bool = False) -> Arguments:
    return {"stream": _stream(g, sizes, special)} | _mixing(g, sizes)


def _make_pre(g: Generator, sizes: Sizes, special: bool = False) -> Arguments:
    a = _make_collapse(g, sizes, special) | _mixing(g, sizes)
    return a | {"weight": _weight(g, sizes[2])}


def _make_boundary(g: Generator, sizes: Sizes, special: bool = False) -> Arguments:
    return _make_post(g, sizes) | _make_pre(g, sizes, special)


def _bytes(streams: int, rows: int, mixes: int, a: Arguments) -> int:
    """`streams` passes over [T, C, D], `rows` over [T, D], `mixes` fp32 coefficients a token."""
    like = a["stream"] if "stream" in a else a["x"][:, None].expand(-1, a["copies"], -1)
    tokens, copies, width = like.shape
    fixed = sum(a[k].numel() * 4 for k in ("fn",) if k in a)
    return 2 * tokens * width * (streams * copies + rows) + 4 * tokens * mixes + fixed


def _flops(a: Arguments) -> float:
    return 2.0 * a["stream"].shape[0] * a["fn"].numel()


_TILE, _GEMM = "tile_kernels", "DeepGEMM tf32_hc_prenorm_gemm"
# (maker, bytes, peer at 4096 tokens, peer at 16 tokens)
_OPS: dict[str, tuple[Any, Any, Anchor | None, Anchor | None]] = {
    "hc_expand": (
        _make_expand, partial(_bytes, 1, 1, 0),
        Anchor(f"{_TILE} mhc expand", 61.7), Anchor(f"{_TILE} mhc expand", 4.7),
    ),
    "hc_mean": (_make_mean, partial(_bytes, 1, 1, 0), None, None),
    "hc_collapse": (
        _make_collapse, partial(_bytes, 1, 1, 4),
        Anchor(f"{_TILE} mhc_pre_apply_mix", 55.6), Anchor(f"{_TILE} mhc_pre_apply_mix", 5.0),
    ),
    "hc_collapse_norm": (_make_collapse_norm, partial(_bytes, 1, 1, 4), None, None),
    "hc_post": (
        _make_post, partial(_bytes, 2, 1, 20),
        Anchor(f"{_TILE} mhc_post", 96.3), Anchor("FlagGems mhc_post", 5.4),
    ),
    "hc_split": (
        _make_split, None,
        Anchor(f"{_TILE} mhc_sinkhorn", 7.5), Anchor(f"{_TILE} mhc_sinkhorn", 6.7),
    ),
    "hc_mix": (
        _make_mix, partial(_bytes, 1, 0, 24),
        Anchor(f"{_GEMM} + {_TILE} mhc_sinkhorn", 72.9),
        Anchor(f"{_GEMM} + {_TILE} mhc_sinkhorn", 17.6),
    ),
    "hc_pre": (
        _make_pre, partial(_bytes, 1, 1, 28),
        Anchor(f"{_GEMM} + {_TILE} mhc_pre_big_fuse", 125.4),
        Anchor(f"{_GEMM} + {_TILE} mhc_pre_big_fuse", 19.9),
    ),
    "hc_boundary": (
        _make_boundary, partial(_bytes, 2, 2, 48),
        Anchor(f"{_TILE} mhc_post + {_GEMM} + {_TILE} mhc_pre_big_fuse", 221.7),
        Anchor(f"FlagGems mhc_post + {_GEMM} + {_TILE} mhc_pre_big_fuse", 25.3),
    ),
}  # fmt: skip
_SMALL = [
    ("1x4x96", (1, 4, 96), False),
    ("0x4x96", (0, 4, 96), False),
    ("3x4x96", (3, 4, 96), False),
    ("5x2x160", (5, 2, 160), False),
    ("5x4x96_special", (5, 4, 96), True),
]
# Kernels with several tokens to a tile: tiles that end early.
_TAILS = {
    "hc_split": [("63x4x96", (63, 4, 96), False), ("129x4x96", (129, 4, 96), False)],
    "hc_mix": [("63x4x32", (63, 4, 32), False), ("129x4x32", (129, 4, 32), False)],
    "hc_pre": [("17x4x32", (17, 4, 32), False)],
    "hc_boundary": [("17x4x32", (17, 4, 32), False)],
}


def _cases() -> list[Case]:
    found = []
    for op, (make, count, peer, peer_small) in _OPS.items():
        flops = _flops if op in ("hc_mix", "hc_pre", "hc_boundary") else None
        for name, sizes, special in _SMALL + _TAILS.get(op, []):
            found.append(Case(op, name, partial(make, sizes=sizes, special=special)))
        for tokens in (4096, 16, 1, 200, 70000):
            if tokens == 70000 and op not in ("hc_collapse_norm", "hc_split", "hc_expand"):
                continue
            width = 512 if tokens == 70000 else 5120
            found.append(
                Case(
                    op,
                    f"{tokens}x4x{width}",
                    partial(make, sizes=(tokens, 4, width)),
                    real=True,
                    bench=tokens in (4096, 16),
                    bytes=count,
                    flops=flops,
                    anchor={4096: peer, 16: peer_small}.get(tokens),
                )
            )
    return found


# ---------------------------------------------------------------- comparisons
def _oracle(stream: Tensor, a: Arguments) -> tuple[Tensor, ...]:
    """The mixes of a stream in float64."""
    x = stream.flatten(1).double()
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + a["norm_eps"])
    return _oracle_split((x @ a["fn"].double().T) * rstd, a)


def _oracle_split(mixes: Tensor, a: Arguments) -> tuple[Tensor, ...]:
    copies = round((1 + mixes.shape[1]) ** 0.5) - 1
    scale, base, eps = a["scale"].double(), a["base"].double(), a["hc_eps"]
    at = [copies, copies, copies * copies]
    parts = torch.split(mixes, at, dim=-1)
    bias = torch.split(base, at)
    pre, post, comb = (p * scale[i] + b for i, (p, b) in enumerate(zip(parts, bias, strict=True)))
    comb = comb.reshape(len(mixes), copies, copies).softmax(-1) + eps
    for i in range(a["iters"]):
        if i:
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return pre.sigmoid() + eps, 2 * post.sigmoid(), comb


def _assert_mixes(
    actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], oracle: tuple[Tensor, ...]
) -> None:
    """Errors against the oracle: at most twice the reference's plus 16 roundings of the largest.

    Outputs are at most about 2, and 20 Sinkhorn rounds contract earlier errors.
    """
    for name, mine, theirs, truth in zip(
        ("pre", "post", "comb"), actual, expected, oracle, strict=True
    ):
        assert mine.shape == theirs.shape, f"{name}: {mine.shape}, want {theirs.shape}"
        assert mine.dtype == torch.float32, f"{name}: {mine.dtype}"
        nan = theirs.isnan()
        assert torch.equal(mine.isnan(), nan), f"{name}: NaN elsewhere"
        if mine.numel():
            error = (mine.double() - truth).masked_fill(nan, 0).abs().max().item()
            usual = (theirs.double() - truth).masked_fill(nan, 0).abs().max().item()
            bound = 2 * usual + 16 * 2 * FP32_EPS
            assert error <= bound, f"{name}: error {error:.2e}, allowed {bound:.2e}"


def _compare_values(actual: Tensor, expected: Tensor, arguments: Arguments) -> None:
    assert_same_values(actual, expected)


def _compare_norm(actual: Tensor, expected: Tensor, arguments: Arguments) -> None:
    assert_ulps(actual, expected, FLIPS, name="x")


def _compare_split(actual: Any, expected: Any, arguments: Arguments) -> None:
    _assert_mixes(actual, expected, _oracle_split(arguments["mixes"].double(), arguments))


def _compare_mix(actual: Any, expected: Any, arguments: Arguments) -> None:
    _assert_mixes(actual, expected, _oracle(arguments["stream"], arguments))


def _compare_pre(actual: Any, expected: Any, arguments: Arguments) -> None:
    assert_ulps(actual[0], expected[0], FLIPS, name="x")
    _assert_mixes(actual[1:], expected[1:], _oracle(arguments["stream"], arguments))


def _compare_boundary(actual: Any, expected: Any, arguments: Arguments) -> None:
    assert_same_values(actual[0], expected[0], "new")
    assert_ulps(actual[1], expected[1], FLIPS, name="x")
    _assert_mixes(actual[2:], expected[2:], _oracle(expected[0], arguments))


CASES: list[Case] = _cases()
COMPARE: dict[str, Compare] = {
    "hc_expand": _compare_values,
    "hc_mean": _compare_values,
    "hc_collapse": _compare_values,
    "hc_collapse_norm": _compare_norm,
    "hc_post": _compare_values,
    "hc_split": _compare_split,
    "hc_mix": _compare_mix,
    "hc_pre": _compare_pre,
    "hc_boundary": _compare_boundary,
}
