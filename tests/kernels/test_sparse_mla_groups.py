"""Sparse latent attention rounds probabilities against the maximum of whole groups of keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tinfer import ops
from tinfer.compat import sparse_mla as reference
from tinfer.kernels._target import target, use_target
from tinfer.kv_layout import KVLayout
from tinfer.registry import use_kernels
from tinfer.testing.cases.sparse_mla import call
from tinfer.testing.launches import recorded

BF16, FP8, FP4 = KVLayout.rows_bf16, KVLayout.window_fp8, KVLayout.compressed_fp4
# Share of elements that differ. Logits are exact here, so two results from the same rounded
# probabilities differ only where a device's exponential tips a rounding: noise of 3e-6 in p gives
# 0.7 % at most; rounding against other groups gives 3 % at least.
SAME = 0.015
LISTS = {
    "window of 24, 40 selected: one group": (24, 40),
    "16 and 112: two groups, the first straddles": (16, 112),
    "100 and 28: the second straddles": (100, 28),
    "64 and 64": (64, 64),
    "128 alone": (128, 0),
    "100 alone": (100, 0),
}


def quarters(x: Tensor) -> Tensor:
    """Rounded to multiples of 1/4: dot products are then exact in any order."""
    return ((x.float() * 4).round() / 4).to(torch.bfloat16)


def share(a: Tensor, b: Tensor) -> float:
    return (a != b).float().mean().item()


def arguments_of(width: int, selected: int, packed: bool, device: str) -> dict[str, Any]:
    g = torch.Generator(device=device).manual_seed(width)
    window, second = (FP8(64, 16), FP4(64, 16)) if packed else (BF16(64), BF16(64))
    compressed = second if selected else None
    out = call(6, 16, window, width, compressed, selected, rows=90)(g)
    if not packed:
        for name in ("window_cache", "compressed_cache") if selected else ("window_cache",):
            out[name] = quarters(out[name].view(torch.bfloat16)).view(torch.uint8)
    # The maximum moves by more than a binade from group to group.
    return out | {"q": quarters(out["q"]), "scale": 0.4}


@pytest.mark.interpret
@pytest.mark.parametrize("small", [False, True], ids=["whole groups", "tiles below a group"])
@pytest.mark.parametrize("packed", [False, True], ids=["bf16", "packed"])
@pytest.mark.parametrize("lists", LISTS.values(), ids=LISTS.keys())
def test_rounded_as_the_reference_rounds(
    lists: tuple[int, int], packed: bool, small: bool, device: str
) -> None:
    arguments = arguments_of(*lists, packed, device)
    on = target(arguments["q"].device)
    with use_target(replace(on, shared_kib=99) if small else on), use_kernels("triton"):
        with recorded() as launches:
            ops.sparse_mla(**arguments)
        assert (launches[0].arguments["BLOCK_N"] < reference.BLOCK) == small
        assert launches[0].arguments["splits"] == 1
        out, _, _ = ops.sparse_mla(**arguments)
    assert share(out, ops.sparse_mla.ref(**arguments)[0]) <= SAME


@pytest.mark.parametrize("block", [32, 128])
def test_the_limit_tells_other_groups_apart(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = arguments_of(100, 28, True, "cpu")
    want, _, _ = ops.sparse_mla.ref(**arguments)
    monkeypatch.setattr(reference, "BLOCK", block)
    other, _, _ = ops.sparse_mla.ref(**arguments)
    assert share(other, want) > 2 * SAME


@pytest.mark.parametrize("keys", [1, 128, 129])
def test_lists_of_two_groups_are_not_split(keys: int) -> None:
    from tinfer.kernels._sparse_mla_plan import packed_split, splits_of

    groups = -(-keys // reference.BLOCK)
    assert (splits_of(1, groups, 132) > 1) == (keys > 128)
    assert (packed_split(1, 64, groups, 132)[1] > 1) == (keys > 128)
