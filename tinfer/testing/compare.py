"""Comparisons with bounds that are derived, not tuned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BF16_EPS = 2.0**-8  # half an ulp, relative: the largest error of one rounding to bf16
FP32_EPS = 2.0**-24


def errors(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """(relative L2, max error over max magnitude); infinities and NaN must sit alike."""
    a, e = actual.double(), expected.double()
    finite = torch.isfinite(e)
    same = torch.equal(torch.isfinite(a), finite) and torch.equal(
        a[~finite].nan_to_num(0.5), e[~finite].nan_to_num(0.5)
    )
    if not same:
        return float("inf"), float("inf")
    a, e = a[finite], e[finite]
    if not e.numel():
        return 0.0, 0.0
    difference, norm, top = (a - e), e.norm().item(), e.abs().max().item()
    if norm == 0.0:
        exact = not bool(difference.any())
        return (0.0, 0.0) if exact else (float("inf"), float("inf"))
    return difference.norm().item() / norm, difference.abs().max().item() / top


def assert_exact(actual: Tensor, expected: Tensor, name: str = "output") -> None:
    """Same shape, dtype and bits (NaN payloads included); the message gives the first mismatch."""
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, want {expected.shape}"
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, want {expected.dtype}"
    if actual.is_floating_point():
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64, 1: torch.uint8}
        view = bits[actual.element_size()]
        a, e = actual.contiguous().view(view), expected.contiguous().view(view)
    else:
        a, e = actual, expected
    if torch.equal(a, e):
        return
    where = (a != e).nonzero()
    at = tuple(int(i) for i in where[0])
    raise AssertionError(
        f"{name}: {len(where)} of {a.numel()} elements differ, first at {at}: "
        f"{actual[at].item()!r}, want {expected[at].item()!r}"
    )


def assert_close(
    actual: Tensor, expected: Tensor, rel_l2: float, max_rel: float, name: str = "output"
) -> None:
    """Relative L2 and max error within the given bounds; shapes and dtypes equal."""
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, want {expected.shape}"
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, want {expected.dtype}"
    l2, top = errors(actual, expected)
    found = f"{name}: rel_l2 {l2:.2e} (<= {rel_l2:.2e}), max_rel {top:.2e} (<= {max_rel:.2e})"
    assert l2 <= rel_l2, found
    assert top <= max_rel, found


def assert_equal_tree(actual: Any, expected: Any, name: str = "output") -> None:
    """`assert_exact` over tensors, None, numbers and nested tuples or lists of them."""
    if isinstance(expected, Tensor):
        assert_exact(actual, expected, name)
    elif isinstance(expected, (tuple, list)):
        assert len(actual) == len(expected), f"{name}: {len(actual)} outputs, want {len(expected)}"
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_equal_tree(a, e, f"{name}[{i}]")
    else:
        assert actual == expected, f"{name}: {actual!r}, want {expected!r}"


def _ordered(x: Tensor) -> Tensor:
    """bf16 -> integers in the order of the values, neighbours one apart, both zeros 0."""
    bits = x.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def assert_ulps(
    actual: Tensor, expected: Tensor, share: float, ulps: int = 1, name: str = "output"
) -> None:
    """bf16 values at most `ulps` steps apart, NaN alike, at most about `share` of them unequal.

    An fp32 result off by a relative d rounds to another bf16 where a rounding boundary lies
    between, which happens to at most d / 2^-9 of the values. Small samples get the slack of four
    standard deviations of the count, and one.
    """
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, want {expected.shape}"
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, want {expected.dtype}"
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan), f"{name}: NaN elsewhere"
    apart = (_ordered(actual) - _ordered(expected)).abs().masked_fill(nan, 0)
    most = int(apart.max()) if apart.numel() else 0
    assert most <= ulps, f"{name}: {most} bf16 steps apart (<= {ulps})"
    mean = share * apart.numel()
    count, allowed = int((apart > 0).sum()), mean + 4 * mean**0.5 + 1
    assert count <= allowed, f"{name}: {count} of {apart.numel()} differ (<= {allowed:.0f})"


def assert_same_values(actual: Tensor, expected: Tensor, name: str = "output") -> None:
    """`assert_exact`, but any NaN equals any other."""
    if actual.is_floating_point() and actual.shape == expected.shape:
        nan = actual.isnan() & expected.isnan()
        actual, expected = actual.masked_fill(nan, 0), expected.masked_fill(nan, 0)
    assert_exact(actual, expected, name)


def _plain_product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """torch's own product of the operands: bf16 ones with fp32 accumulation, fp32 ones as such."""
    if a.dtype == b.dtype == torch.bfloat16:
        if out_dtype == torch.bfloat16:
            return a @ b.t()
        if a.is_cuda:
            return torch.mm(a, b.t(), out_dtype=out_dtype)  # type: ignore[call-overload, no-any-return]
    return (a.float() @ b.float().t()).to(out_dtype)


def assert_product(actual: Tensor, a: Tensor, b: Tensor, name: str = "product") -> None:
    """`actual` is a @ b.T: relative L2 to fp64 at most twice that of torch's own product.

    The operands are exact (bf16, or fp32 where the op takes fp32). The floor of 4 * 2^-24 only
    matters where torch's product is nearly exact, as for one or two columns.
    """
    exact = a.double() @ b.double().t()
    assert actual.shape == exact.shape, f"{name}: shape {actual.shape}, want {exact.shape}"
    plain = errors(_plain_product(a, b, actual.dtype), exact)[0]
    got, bound = errors(actual, exact)[0], 2 * plain + 4 * FP32_EPS
    assert got <= bound, f"{name}: rel_l2 to fp64 {got:.2e}, bound {bound:.2e}, torch {plain:.2e}"
