"""Index logits of packed keys and queries whose groups differ widely in scale; NaN; sharing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tinfer import ops
from tinfer.compat.casts import per_token_cast
from tinfer.kv_layout import KVLayout
from tinfer.registry import use_kernels

IMPLEMENTATIONS = ("ref", pytest.param("triton", marks=pytest.mark.interpret))
KEYS = 200  # a pair of tiles of 64, a tile and a part of one
ROWS = ("q", "q_s", "weights", "seq", "visible")


def _groups(g: torch.Generator, rows: int, count: int, spread: int) -> Tensor:
    """fp32 [rows, count, 128]; groups of 32 differ by up to 2^spread, some are zero."""
    x = torch.randn(rows, count, 4, 32, generator=g)
    x = torch.ldexp(x, -torch.randint(spread + 1, (rows, count, 4, 1), generator=g))
    x[torch.rand(rows, count, 4, generator=g) < 0.05] = 0
    return x.view(rows, count, 128)


def _arguments(
    q: Tensor, keys: Tensor, weights: Tensor, seq: list[int], visible: list[int], device: str
) -> dict[str, Any]:
    """q [T, H, 128] against keys [S, KEYS, 128] in pages of 64."""
    layout = KVLayout.index_fp4(128, 64)
    pages = layout.pages(KEYS)
    table = torch.arange(len(keys) * pages, device=device).flip(0).int().view(len(keys), pages)
    cache = layout.allocate(table.numel(), device)
    cache.fill_(255)
    at = torch.arange(KEYS, device=device)
    for row, own in zip(table.long(), keys.to(device, torch.bfloat16), strict=True):
        ops.store_kv(own, row[at // 64] * 64 + at % 64, cache, layout)
    packed, scales = per_token_cast(q.to(device, torch.bfloat16), "e2m1", 32, "ue8m0")
    return {
        "q": packed,
        "q_s": scales,
        "weights": weights.to(device),
        "cache": cache,
        "layout": layout,
        "block_table": table,
        "seq": torch.tensor(seq, device=device),
        "visible": torch.tensor(visible, dtype=torch.int32, device=device),
        "max_visible": KEYS,
    }


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("spread", [0, 6, 20, 60])
@pytest.mark.parametrize("key_spread", [0, 4, 40])
def test_scales_apart(spread: int, key_spread: int, impl: str, device: str, seed: int) -> None:
    """Errors stay within an fp32 rounding of the sum of magnitudes of the key itself."""
    g = torch.Generator().manual_seed(seed)
    q, keys = _groups(g, 2, 12, spread), _groups(g, 2, KEYS, key_spread)
    weights = torch.randn(2, 12, generator=g)
    given = _arguments(q, keys, weights, [1, 0], [KEYS, 130], device)
    sizes = _arguments(q.abs(), keys.abs(), weights.abs(), [1, 0], [KEYS, 130], device)
    with use_kernels("ref"):
        want, size = ops.index_logits(**given), ops.index_logits(**sizes)
    with use_kernels(impl):
        got = ops.index_logits(**given)
    assert torch.equal(got.isinf(), want.isinf())
    seen = want.isfinite()
    assert int(seen.sum()) == KEYS + 130
    assert ((got - want).abs() <= 2e-6 * size)[seen].all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_nan_reaches_its_own_scores_only(impl: str, device: str, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    q, keys = _groups(g, 3, 12, 1), _groups(g, 1, KEYS, 1)
    weights = torch.randn(3, 12, generator=g)
    broken = keys.clone()
    broken[0, [5, 140, 195], [3, 40, 127]] = float("nan")
    seq, visible = [0, 0, 0], [KEYS, 100, 196]
    with use_kernels(impl):
        plain = ops.index_logits(**_arguments(q, keys, weights, seq, visible, device))
        arguments = _arguments(q, broken, weights, seq, visible, device)
        arguments["q_s"][1, 7, 2] = 255
        got = ops.index_logits(**arguments)
    expected = plain.clone()
    expected[0, [5, 140, 195]] = expected[2, [5, 140, 195]] = float("nan")
    expected[1, :100] = float("nan")
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0))


@pytest.mark.interpret
@pytest.mark.parametrize("seq", [[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1], [1, 1, -1, -1, 0, 0]])
def test_a_token_scores_as_it_does_alone(seq: list[int], device: str, seed: int) -> None:
    """The same bits, whichever tokens share a program; but for numpy's products, by shape."""
    g = torch.Generator().manual_seed(seed)
    q, keys = _groups(g, 6, 32, 2), _groups(g, 2, KEYS, 2)
    q[4] = _groups(g, 1, 32, 24)[0]
    weights = torch.randn(6, 32, generator=g)
    arguments = _arguments(q, keys, weights, seq, [128, 129, 130, 198, 199, KEYS], device)
    slack = 1e-5 if device == "cpu" else 0
    with use_kernels("triton"):
        whole = ops.index_logits(**arguments)
        for t in range(6):
            alone = {k: v[t : t + 1] if k in ROWS else v for k, v in arguments.items()}
            torch.testing.assert_close(
                ops.index_logits(**alone)[0], whole[t], rtol=slack, atol=slack
            )
