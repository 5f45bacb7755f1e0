"""What the sparse attention's launchers decide on the host: pure functions of sizes and target."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tinfer.compat.sparse_mla import BLOCK
from tinfer.kernels._sparse_mla_tile import Key, layout_key
from tinfer.kernels._target import TRITON, Target
from tinfer.kv_layout import KVLayout

SLOT_LIMIT = 2**31 - 1  # slots are int32
MAX_SPLITS = 32
UNPACK_ROWS = 64  # cache rows a token up to which unpacking them all pays
HOPPER_WIDTH = 2048  # lists up to this width share one compiled Hopper kernel


@dataclass(frozen=True)
class Source:
    """One cache as the kernels take it."""

    cache: Tensor  # bf16 elements for bf16 rows, else bytes
    key: Key
    slots: Tensor
    lengths: Tensor | None

    @classmethod
    def of(cls, cache: Tensor, layout: KVLayout, slots: Tensor, lengths: Tensor | None) -> Source:
        key = layout_key(layout, cache)
        slots = slots if slots.stride(1) == 1 else slots.contiguous()
        lengths = lengths if lengths is None else lengths.contiguous()
        elements = cache.view(torch.bfloat16) if layout.value == "bf16" else cache
        return cls(elements, key, slots, lengths)

    @property
    def width(self) -> int:
        return self.slots.shape[1]

    @property
    def packed(self) -> bool:
        return self.key[0] != "bf16"

    def rows(self, part: slice) -> Source:
        """The same cache for a part of the queries."""
        lengths = None if self.lengths is None else self.lengths[part]
        return replace(self, slots=self.slots[part], lengths=lengths)

    def unpacked(self, layout: KVLayout) -> Source:
        """The whole cache dequantized to bf16 rows once (exact), under the same slots."""
        from tinfer.kernels.kv_cache import load_kv

        rows = torch.arange(self.cache.shape[0] * layout.page_size, device=self.cache.device)
        flat = load_kv(self.cache, layout, rows).view(torch.uint8)
        return Source.of(flat, KVLayout.rows_bf16(layout.dim), self.slots, self.lengths)

    def scalars(self) -> tuple[int, int, int, int]:
        """(width, rows, page stride, slots stride)."""
        rows = min(self.cache.shape[0] * self.key[3], SLOT_LIMIT)
        return self.width, rows, self.cache.stride(0), self.slots.stride(0)

    def copies_by_16_bytes(self) -> bool:
        """Every row, and every row's scales, start where 16 codes or scales can be loaded."""
        cache = self.cache
        starts = [self.key[4], cache.stride(0) * cache.element_size()]
        starts.append(cache.storage_offset() * cache.element_size())
        return not any(s % 16 for s in starts)


def pow2(n: int) -> int:
    """The smallest power of two that holds n and that a dot takes."""
    return int(triton.next_power_of_2(max(n, 16)))


class Tile(NamedTuple):
    """What one program of the portable kernel handles at a time, and how it is compiled."""

    heads: int
    keys: int
    warps: int
    stages: int


def portable_tile(heads: int, packed: bool, on: Target) -> Tile:
    """The portable kernel's tile for a target class.

    Shared memory holds the queries, the keys of `stages` blocks in bf16 (packed rows: one block
    in bf16 and the raw rows) and the probabilities. H200: 64 keys, 8 warps and 2 stages beat 32
    keys by 1.2 (decode) to 1.5 (prefill).
    """
    block_h = min(64, pow2(heads))
    if on.shared_kib >= 227:
        if not packed and int(on.arch) >= 100:  # its dots keep one operand more in shared memory
            return Tile(block_h, 32, 8, 2)
        return Tile(block_h, 64, 8, 2)
    if on.backend == "hip":
        return Tile(min(block_h, 16), 32, 4, 1)
    if packed:  # decoding keeps a tile in registers: more heads would spill
        return Tile(min(block_h, 16), 32, 4, 1)
    return Tile(block_h, 32, 8, 2) if on.shared_kib >= 160 else Tile(min(block_h, 32), 16, 4, 2)


def groups_of(sources: list[Source]) -> int:
    """Groups of keys, each with one running maximum, in the lists taken as one."""
    return int(triton.cdiv(sum(s.width for s in sources), BLOCK))


def straddles(sources: list[Source]) -> bool:
    """Whether a group holds entries of both lists."""
    return len(sources) > 1 and sources[0].width % BLOCK != 0


def splits_of(programs: int, blocks: int, processors: int) -> int:
    """Splits of each row's blocks that fill the processors, all but the last equally long.

    In a split the running maximum starts anew, so probabilities are rounded relative to another
    one than the reference's; lists of two blocks are not worth that.
    """
    if blocks < 3:
        return 1
    wanted = min(max(processors // max(programs, 1), 1), blocks, MAX_SPLITS)
    return int(triton.cdiv(blocks, triton.cdiv(blocks, wanted)))


def _unpacks(sources: list[Source], tokens: int) -> bool:
    """Whether to dequantize packed caches as a whole before attending.

    It costs 0.8 ns a row of the caches (H200), and bf16 rows save 140 ns a token at 640 keys; the
    limit keeps the rows as small as the queries.
    """
    return sum(s.cache.shape[0] * s.key[3] for s in sources) <= UNPACK_ROWS * tokens


def _fits_hopper(q: Tensor, sources: list[Source], value_dim: int, on: Target) -> bool:
    """Whether the Hopper kernels can take the call: aligned rows of 512 channels, either all
    bf16 or all packed, and no block of keys that straddles both lists."""
    if on.backend != "cuda" or on.arch != 90 or TRITON < (3, 6):
        return False
    if q.shape[2] != 512 or value_dim != 512 or q.shape[1] < 16:
        return False
    if any(s % 8 for s in (*q.stride()[:2], q.storage_offset())):
        return False
    if len({s.packed for s in sources}) > 1 or straddles(sources):
        return False
    grouped = all(not s.packed or s.key[1] in (16, 32) for s in sources)
    return grouped and all(s.copies_by_16_bytes() for s in sources)


def form_of(q: Tensor, sources: list[Source], value_dim: int, on: Target) -> str:
    """The kernel for a call: "portable"; on Hopper "packed", "hopper" for bf16 rows and tokens
    enough for all processors (one block after another takes it longer), or "unpack" before it."""
    if not _fits_hopper(q, sources, value_dim, on):
        return "portable"
    fills = len(q) * triton.cdiv(q.shape[1], 64) >= on.processors
    if not sources[0].packed:
        return "hopper" if fills else "portable"
    return "unpack" if fills and _unpacks(sources, len(q)) else "packed"


def packed_split(tokens: int, heads: int, blocks: int, processors: int) -> tuple[int, int]:
    """(heads a program takes, splits) of the packed kernel: splits first, then fewer heads.

    H200, graph times: 16 tokens over 10 blocks take 16.6 us in 8 splits and 16.9 in 5; one token
    9.2 us in programs of 8 heads, 9.5 of 16 and 10.3 of 32.
    """
    programs = tokens * int(triton.cdiv(heads, 64))
    splits = min(max(processors // max(programs, 1), 1), blocks, MAX_SPLITS) if blocks > 2 else 1
    each = 64
    while each > 8 and 2 * tokens * triton.cdiv(heads, each) * splits <= processors:
        each //= 2
    return each, splits
