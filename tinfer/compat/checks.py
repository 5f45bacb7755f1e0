"""Argument checks shared by all references: one wording for every op.

A message reads `{op}: {arg} must be {rule}, got {value}`. Wrong shapes and values raise
ValueError, wrong dtypes TypeError.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# A dimension: an exact size, or a name for any size.
Dim = int | str


def require_dtype(op: str, arg: str, x: Tensor, *dtypes: torch.dtype) -> None:
    """TypeError unless `x` has one of `dtypes`."""
    if x.dtype not in dtypes:
        rule = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{op}: {arg} must be {rule}, got {str(x.dtype).removeprefix('torch.')}")


def require_shape(op: str, arg: str, x: Tensor, shape: Sequence[Dim]) -> None:
    """ValueError unless `x` has `shape`; a string in it names a free dimension."""
    got = x.shape
    fits = len(got) == len(shape) and all(
        isinstance(want, str) or n == want for n, want in zip(got, shape, strict=True)
    )
    if not fits:
        rule = ", ".join(str(d) for d in shape)
        raise ValueError(f"{op}: {arg} must be of shape [{rule}], got {list(got)}")


def require(ok: bool, op: str, arg: str, rule: str, value: object) -> None:
    """ValueError with the common wording unless `ok`."""
    if not ok:
        raise ValueError(f"{op}: {arg} must be {rule}, got {value}")
