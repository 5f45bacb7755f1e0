"""References of the checks around sampling: rows that cannot go on, tokens that end a request."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tinfer.compat.checks import require, require_dtype, require_shape
from tinfer.compat.masses import NO_TOKEN, NOT_FINITE, OK


def check_match_stop(tokens: Tensor, stop_ids: Tensor) -> None:
    op = "match_stop"
    require_dtype(op, "tokens", tokens, torch.int64)
    require_dtype(op, "stop_ids", stop_ids, torch.int64)
    require_shape(op, "tokens", tokens, ["R"])
    require_shape(op, "stop_ids", stop_ids, [tokens.shape[0], "M"])


def match_stop(tokens: Tensor, stop_ids: Tensor) -> Tensor:
    """Whether each row's token is one of its stop ids.

    tokens    int64 [R]
    stop_ids  int64 [R, M], -1: fill

    Returns: bool [R].
    Raises: TypeError, ValueError for dtypes, shapes.
    Numerics: exact.
    """
    check_match_stop(tokens, stop_ids)
    return ((stop_ids == tokens[:, None]) & (stop_ids >= 0)).any(-1)


def check_detect_outlier_and_abort(x: Tensor, limit: float) -> None:
    op = "detect_outlier_and_abort"
    require_dtype(op, "x", x, torch.float32, torch.bfloat16)
    require_shape(op, "x", x, ["R", "N"])
    require(limit >= 0, op, "limit", "at least 0", limit)


def detect_outlier_and_abort(x: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Count what should not be in each row, and say which rows cannot go on.

    x      fp32 or bf16 [R, N], say logits
    limit  magnitudes above it are counted

    Returns: counts int32 [R, 3] of NaN, of +-inf, and of finite |x| > limit; status int32 [R] for
    the engine to end that row's request alone: 1 a NaN or +inf, 2 all -inf, else 0 (as
    `sample` gives; `tinfer.compat.masses.status_text` names it).
    Raises: TypeError, ValueError for dtypes, shapes, a negative or NaN limit.
    Numerics: exact.
    """
    check_detect_outlier_and_abort(x, limit)
    f = x.float()
    nan, infinite = f.isnan(), f.isinf()
    beyond = (f.abs() > limit) & ~infinite
    counts = torch.stack([nan.sum(-1), infinite.sum(-1), beyond.sum(-1)], dim=-1).int()
    status = torch.where((f == -math.inf).all(-1), NO_TOKEN, OK)
    status = torch.where((nan | (f == math.inf)).any(-1), NOT_FINITE, status)
    return counts, status.int()
