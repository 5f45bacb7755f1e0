"""Reference of the random words: Philox4x32 addressed as cuRAND addresses it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinfer.compat.checks import require, require_dtype, require_shape

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def low32(x: Tensor) -> Tensor:
    """The low half of int64 bits, as int64 in 0..2^32-1."""
    return x & _LOW


def high32(x: Tensor) -> Tensor:
    """The high half of int64 bits, as int64 in 0..2^32-1."""
    return (x >> 32) & _LOW


def _mul_hi_lo(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Both halves of a 32x32-bit product whose operands are held in int64."""
    a, b = constant >> 16, constant & 0xFFFF
    low = b * x  # below 2^48
    high = a * x + (low >> 16)  # below 2^49
    return high >> 16, ((high << 16) | (low & 0xFFFF)) & _LOW


def philox4x32(
    counter: Sequence[Tensor], key: Sequence[Tensor], rounds: int = ROUNDS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The block function: four counter words and two key words -> four words.

    All are int64 tensors that hold 32-bit values and broadcast against each other.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _mul_hi_lo(_MULTIPLIERS[0], c0)
        high1, low1 = _mul_hi_lo(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = low32(k0 + _KEY_STEPS[0]), low32(k1 + _KEY_STEPS[1])
    return c0, c1, c2, c3


def philox_block(seeds: Tensor, subsequences: Tensor, blocks: Tensor) -> Tensor:
    """int64 [..., 4]: the words of block `blocks` of each stream (seed, subsequence)."""
    counter = (low32(blocks), high32(blocks), low32(subsequences), high32(subsequences))
    words = philox4x32(counter, (low32(seeds), high32(seeds)))
    return torch.stack(torch.broadcast_tensors(*words), dim=-1)


def check_philox_words(seeds: Tensor, subsequences: Tensor, offsets: Tensor, count: int) -> None:
    op = "philox_words"
    tensors = {"seeds": seeds, "subsequences": subsequences, "offsets": offsets}
    for name, x in tensors.items():
        require_dtype(op, name, x, torch.int64)
    require_shape(op, "seeds", seeds, ["N"])
    for name, x in tensors.items():
        require_shape(op, name, x, seeds.shape)
    require(count >= 0, op, "count", "at least 0", count)


def philox_words(seeds: Tensor, subsequences: Tensor, offsets: Tensor, count: int) -> Tensor:
    """The words that cuRAND's `curand()` returns after `curand_init(seed, subsequence, offset)`.

    seeds         int64 [N], the 64 bits of an unsigned seed
    subsequences  int64 [N], likewise
    offsets       int64 [N], likewise; offset and offset + count - 1 stay below 2^64
    count         words per stream

    Returns: int64 [N, count], values in 0..2^32-1. Draw d of a stream is word d % 4 of the block
    with counter (d // 4, subsequence) and key seed, each split into 32-bit halves, low first.
    Raises: TypeError, ValueError for dtypes, shapes, a negative count.
    Numerics: exact.
    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (Random123).
    """
    check_philox_words(seeds, subsequences, offsets, count)
    draws = offsets[:, None] + torch.arange(count, device=seeds.device)
    blocks = (draws >> 2) & ((1 << 62) - 1)  # an unsigned shift
    words = philox_block(seeds[:, None], subsequences[:, None], blocks)
    return words.gather(-1, (draws & 3)[..., None])[..., 0]
