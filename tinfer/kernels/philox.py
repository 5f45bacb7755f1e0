"""Words of Philox streams, one thread each: Triton's own block function, addressed as cuRAND does.

Source: kernels of the contract in `tinfer.compat.philox`; `tl.philox` of Triton's library.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.compat.philox import check_philox_words
from tinfer.kernels._call import MAX_PROGRAMS, contiguous_reason, device_reason

BLOCK = 256


@triton.jit
def stream_word(seed, subsequence, draw):
    """uint32 word number `draw` of streams (seed, subsequence); all int64."""
    low = (draw >> 2).to(tl.uint32)
    high = ((draw >> 34) & 0x3FFFFFFF).to(tl.uint32)
    stream_low, stream_high = subsequence.to(tl.uint32), (subsequence >> 32).to(tl.uint32)
    x, y, z, w = tl.philox(seed, low, high, stream_low, stream_high)
    place = draw & 3
    return tl.where(place == 0, x, tl.where(place == 1, y, tl.where(place == 2, z, w)))


@triton.jit(do_not_specialize=["count", "total"])
def _philox_words_kernel(
    seeds,  # int64 [N]
    subsequences,  # int64 [N]
    offsets,  # int64 [N]
    words,  # int64 [N, COUNT]
    count,
    total,
    BLOCK: tl.constexpr,
):
    for block in range(tl.program_id(0), tl.cdiv(total, BLOCK), tl.num_programs(0)):
        item = (tl.full([BLOCK], 0, tl.int64) + block) * BLOCK + tl.arange(0, BLOCK)
        live = item < total
        row = item // count
        seed = tl.load(seeds + row, mask=live, other=0)
        subsequence = tl.load(subsequences + row, mask=live, other=0)
        draw = tl.load(offsets + row, mask=live, other=0) + item % count
        word = stream_word(seed, subsequence, draw)
        tl.store(words + item, word.to(tl.int64) & 0xFFFFFFFF, mask=live)


def supports_philox_words(
    seeds: Tensor, subsequences: Tensor, offsets: Tensor, count: int
) -> str | None:
    """Contiguous tensors on one device."""
    tensors = {"seeds": seeds, "subsequences": subsequences, "offsets": offsets}
    return device_reason(**tensors) or contiguous_reason(**tensors)


def philox_words(seeds: Tensor, subsequences: Tensor, offsets: Tensor, count: int) -> Tensor:
    check_philox_words(seeds, subsequences, offsets, count)
    words = torch.empty(seeds.shape[0], count, dtype=torch.int64, device=seeds.device)
    total = words.numel()
    if total:
        grid = (min(triton.cdiv(total, BLOCK), MAX_PROGRAMS),)
        _philox_words_kernel[grid](
            seeds, subsequences, offsets, words, count, total, BLOCK=BLOCK, num_warps=4
        )
    return words
