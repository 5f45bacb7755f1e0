"""Arguments that are views: rows that start at any byte, and tensors without elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.parity import clone
from tinfer import ops
from tinfer.registry import use_kernels
from tinfer.testing.cases import Case, cases, comparisons
from tinfer.testing.launches import recorded

ROWS = {  # small cases of few and of many tokens, and the arguments whose rows may be cut out
    "linear_fp8-3x40x64": ("q", "s", "weight", "scale"),
    "linear_fp8-129x72x96": ("q", "s", "weight", "scale"),
    "linear_fp4-17x129x160": ("q", "s", "weight", "scale"),
    "linear_bf16-1x130x96": ("x", "weight"),
    "linear_bf16-65x40x72": ("x", "weight"),
    "linear_fp32-3x130x96": ("x", "weight"),
    "linear_fp32-70x48x64": ("x", "weight"),
    "moe_experts-9x3of8": ("q", "s", "shared"),
    "moe_experts-70x2of3_two_products": ("q", "s", "shared"),
    "moe_experts-9x3of8_fp8": ("q", "s", "shared"),
}
WORDS = {  # kernels that read whole words or copies: the bytes an address must be a multiple of
    "_few_tokens_kernel": {"x": 4, "w": 4},
    "_dequantize_kernel": {"q": 4},
    "_matmul_tma_kernel": {"x": 16, "w": 16},
}


def cut_out(x: Tensor, before: int, after: int) -> Tensor:
    """The same rows as a view into wider ones."""
    wide = torch.zeros(len(x), before + x.shape[1] + after, dtype=x.dtype, device=x.device)
    part = wide[:, before : before + x.shape[1]]
    part.copy_(x)
    return part


def case_of(name: str) -> Case:
    (case,) = [c for c in cases() if c.id == name]
    return case


@pytest.mark.interpret
@pytest.mark.parametrize(("before", "after"), [(5, 2), (1, 31), (8, 24)])
@pytest.mark.parametrize("name", ROWS)
def test_rows_start_at_any_byte(name: str, before: int, after: int, device: str, seed: int) -> None:
    case = case_of(name)
    op, a = getattr(ops, case.op), case.arguments(seed, device)
    views = a | {n: cut_out(a[n], before, after) for n in ROWS[name]}
    with use_kernels("triton"):
        comparisons()[case.op](op(**views), op.ref(**a), a)
        with recorded() as launches:
            op(**views)
    for launch in launches:
        for argument, unit in WORDS.get(launch.name, {}).items():
            assert launch.arguments[argument].data_ptr() % unit == 0, (launch.name, argument)


@pytest.mark.interpret
def test_index_queries_in_a_buffer_of_bytes(device: str, seed: int) -> None:
    """Queries are read as words, wherever their bytes lie."""
    a = case_of("index_logits-padded").arguments(seed, device)
    buffer = torch.zeros(a["q"].numel() + 3, dtype=torch.uint8, device=device)
    askew = buffer[3:].view(a["q"].shape).copy_(a["q"])
    with use_kernels("triton"):
        want, got = ops.index_logits(**a), ops.index_logits(**a | {"q": askew})
    assert torch.equal(got, want)


@pytest.mark.interpret
def test_experts_in_a_buffer_of_bytes(device: str, seed: int) -> None:
    """Weights within a word of memory are refused, not read askew."""
    a = case_of("moe_experts-9x3of8").arguments(seed, device)
    op = ops.moe_experts
    for name in ("w13", "w2"):
        buffer = torch.zeros(a[name].numel() + 3, dtype=torch.uint8, device=device)
        askew = buffer[3:].view(a[name].shape)
        assert op.why_not_triton(**a | {name: askew}) == f"{name} starts within a word of memory"


# ---------------------------------------------------------------- nothing
def _empty(case: Case) -> bool:
    values = case.arguments(0).values() if not case.real else ()
    return any(isinstance(v, Tensor) and not v.numel() for v in values)


FAMILIES = (
    "compressor",
    "gemm",
    "indexer",
    "indices",
    "kv_cache",
    "moe_experts",
    "sparse_mla",
    "topk",
)


@pytest.mark.interpret
@pytest.mark.parametrize(
    "case", [c for f in FAMILIES for c in cases(family=f) if _empty(c)], ids=lambda c: c.id
)
def test_strides_of_nothing_do_not_matter(case: Case, device: str, seed: int) -> None:
    """A tensor without elements may have any strides: those of NumPy are 0."""
    op, a = getattr(ops, case.op), case.arguments(seed, device)

    def flat(x: Any) -> Any:
        if isinstance(x, Tensor) and not x.numel():
            return x.as_strided(x.shape, (0,) * x.dim())
        return x

    before = op.calls["triton"]
    with use_kernels("triton"):
        actual = op(**{n: flat(clone(v)) for n, v in a.items()})
    assert op.calls["triton"] == before + 1
    expected = op.ref(**a)
    if expected is None:  # in place: nothing to write
        assert actual is None
        return
    for mine, theirs in zip(
        *((x if isinstance(x, tuple) else (x,)) for x in (actual, expected)), strict=True
    ):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        assert torch.equal(mine, theirs)
