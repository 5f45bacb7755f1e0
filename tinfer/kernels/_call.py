"""What launchers share on the host: reasons against a call, and the portable size of a grid."""

from __future__ import annotations

import torch
from torch import Tensor

from tinfer.kernels._jit import INTERPRET

# Portable limit on the product of a grid's axes; beyond it programs loop over their work.
MAX_PROGRAMS = 65535


def device_reason(**tensors: Tensor | None) -> str | None:
    """Why these tensors cannot be read by one kernel, or None. Strides are not looked at."""
    first: tuple[str, Tensor] | None = None
    for name, x in tensors.items():
        if x is None:
            continue
        if not (INTERPRET.value or x.is_cuda):
            return f"{name} is in host memory"
        if first is None:
            first = (name, x)
        elif x.device != first[1].device:
            return f"{name} is on {x.device} and {first[0]} on {first[1].device}"
    return None


def scattered(x: Tensor) -> bool:
    """Whether neighbours in the last dimension lie apart; where there are none, none do."""
    return x.numel() > 0 and x.dim() > 0 and x.shape[-1] > 1 and x.stride(-1) != 1


def words_of(x: Tensor) -> Tensor:
    """The bytes of x as int32 words; copied where they do not lie in whole words."""
    x = x.contiguous()
    return (x.clone() if x.storage_offset() % 4 else x).view(torch.int32)


def stride_reason(**tensors: Tensor | None) -> str | None:
    """The first tensor whose last dimension is not contiguous, as a reason, or None."""
    for name, x in tensors.items():
        if x is not None and scattered(x):
            return f"{name} has stride {x.stride(-1)} in its last dimension"
    return None


def contiguous_reason(**tensors: Tensor | None) -> str | None:
    """The first tensor that is not contiguous, as a reason, or None."""
    for name, x in tensors.items():
        if x is not None and not x.is_contiguous():
            return f"{name} is not contiguous"
    return None
