"""Cases of the index logits: dense and candidate blocks, prefill, decode, verification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tinfer.compat.casts import per_token_cast
from tinfer.compat.kv_cache import write_rows
from tinfer.kv_layout import KVLayout
from tinfer.testing.cases import Anchor, Arguments, Case
from tinfer.testing.cases.indices import block_table
from tinfer.testing.compare import errors

Make = Callable[[torch.Generator], Arguments]
Build = Callable[[int, int], KVLayout]
# One sequence's rows in a call: (row of the block table or -1 for padding, first position, rows).
Chunk = tuple[int, int, int]


def cast_queries(
    g: torch.Generator, tokens: int, heads: int, dim: int, spread: int = 3
) -> tuple[Tensor, Tensor]:
    """Random packed queries whose groups differ in scale, by up to 2^(2 spread)."""
    q = torch.randn(tokens, heads, dim, generator=g, device=g.device)
    groups = tokens, heads, dim // 32
    power = torch.randint(-spread, spread + 1, groups, generator=g, device=g.device)
    q = torch.ldexp(q, power.repeat_interleave(32, -1)).to(torch.bfloat16)
    return per_token_cast(q, "e2m1", 32, "ue8m0")


def key_cache(g: torch.Generator, layout: KVLayout, table: Tensor, lengths: list[int]) -> Tensor:
    """Random keys 0..length-1 of every sequence, and 0xFF (NaN scales) everywhere else."""
    cache = layout.allocate(table.numel(), g.device)
    cache.fill_(255)
    for pages, length in zip(table, lengths, strict=True):
        at = torch.arange(length, device=g.device)
        size = layout.page_size
        slots = pages[at // size].long() * size + at % size
        keys = torch.randn(length, layout.dim, generator=g, device=g.device) * 1.5
        write_rows(keys.to(torch.bfloat16), slots, cache, layout)
    return cache


def _dense(
    chunks: list[Chunk],
    ratio: int,
    heads: int,
    layout: KVLayout,
    extra: int = 0,
    causal: bool = True,
    spread: int = 3,
) -> Make:
    """Rows at the given positions see (position + 1) // ratio keys; `extra` columns see none.

    Without `causal` every row sees as many keys as the last one.
    """

    def make(g: torch.Generator) -> Arguments:
        positions = [first + i for _, first, n in chunks for i in range(n)]
        seq = [s for s, _, n in chunks for _ in range(n)]
        sequences = max((s for s, _, _ in chunks), default=0) + 1
        lengths = [0] * sequences
        for s, first, n in chunks:
            if s >= 0:
                lengths[s] = max(lengths[s], (first + n) // ratio)
        longest = max(lengths)
        table = block_table(g, sequences, max(1, layout.pages(longest)))
        q, q_s = cast_queries(g, len(seq), heads, layout.dim, spread)
        weights = torch.randn(len(seq), heads, generator=g, device=g.device) / heads
        visible = (torch.tensor(positions, device=g.device) + 1) // ratio
        if not causal:
            visible = torch.full_like(visible, longest)
        return {
            "q": q,
            "q_s": q_s,
            "weights": weights,
            "cache": key_cache(g, layout, table, lengths),
            "layout": layout,
            "block_table": table,
            "seq": torch.tensor(seq, dtype=torch.int64, device=g.device),
            "visible": visible.int(),
            "max_visible": longest + extra,
        }

    return make


def _blocks(chunks: list[Chunk], heads: int, layout: KVLayout, count: int, size: int) -> Make:
    """Random ascending blocks, the newest one among them, some of them fill."""

    def make(g: torch.Generator) -> Arguments:
        arguments = _dense(chunks, 1, heads, layout)(g)
        visible = arguments["visible"]
        rows, most = len(visible), int(-(-arguments.pop("max_visible") // size))
        draw = torch.rand(rows, max(most, count), generator=g, device=g.device)
        blocks = draw.argsort(1)[:, :count].sort(1)[0]
        blocks = torch.where(blocks * size < visible[:, None], blocks, -1)
        newest = (visible.long() + size - 1) // size - 1
        blocks[:, -1:] = newest[:, None]
        return arguments | {"blocks": blocks.int(), "block_size": size}

    return make


def _flops(arguments: Arguments) -> float:
    """Products of every visible key with every head: 2 * keys * heads * channels."""
    heads, dim = arguments["q"].shape[1], arguments["layout"].dim
    if "blocks" in arguments:
        keys = int((arguments["blocks"] >= 0).sum()) * arguments["block_size"]
    else:
        keys = int(arguments["visible"].sum())
    return 2.0 * keys * heads * dim


def _bytes(arguments: Arguments) -> int:
    """Keys once per sequence (blocks: once per row), queries, and the logits of the keys."""
    layout: KVLayout = arguments["layout"]
    q, visible, seq = arguments["q"], arguments["visible"], arguments["seq"]
    if "blocks" in arguments:
        read = written = int((arguments["blocks"] >= 0).sum()) * arguments["block_size"]
    else:
        most = torch.zeros(len(arguments["block_table"]), dtype=torch.int64, device=seq.device)
        most.scatter_reduce_(0, seq.clamp(min=0), visible.long(), "amax")
        read, written = int(most.sum()), int(visible.sum())
    return int(read * layout.row_bytes + 4 * written + q.numel() + arguments["weights"].numel() * 5)


FP4, FP8, MX = KVLayout.index_fp4, KVLayout.index_fp8, KVLayout.index_mxfp8


def _free(dim: int, page: int) -> KVLayout:
    return KVLayout.index_fp8(dim, page, scale="fp32")


def _interleaved(dim: int, page: int) -> KVLayout:
    return KVLayout(dim, "e2m1", 32, "ue8m0", page, interleaved=True, page_align=256)


def _case(op: str, name: str, make: Make, **kw: Any) -> Case:
    return Case(op, name, make, bytes=_bytes, flops=_flops, **kw)


_MIXED: list[Chunk] = [(2, 3, 5), (-1, 0, 2), (0, 140, 3), (1, 0, 4)]
# One token a sequence with lengths round whole tiles and pairs of tiles of 64 keys.
_FEW: list[Chunk] = [(s, n - 1, 1) for s, n in enumerate((1, 63, 64, 65, 128, 129, 257, 400))]
_VERIFY: list[Chunk] = [(1, 250, 6), (-1, 0, 2), (0, 60, 5), (2, 511, 1)]
# As many tokens for every sequence.
_STEPS: list[Chunk] = [(s, n, 4) for s, n in enumerate((3, 61, 125, 126, 300, 511))]
CASES = [
    _case("index_logits", "no-rows", _dense([], 1, 4, FP4(64, 16))),
    _case("index_logits", "no-columns", _dense([(0, 0, 1)], 2, 4, FP4(64, 16))),
    _case("index_logits", "one", _dense([(0, 6, 1)], 1, 32, FP4(128, 16))),
    _case("index_logits", "prefill", _dense([(0, 0, 9)], 2, 32, FP4(128, 16))),
    _case("index_logits", "mixed", _dense(_MIXED, 1, 32, FP4(128, 16))),
    _case("index_logits", "padded", _dense([(0, 20, 2), (1, 3, 1)], 1, 8, FP4(128, 64), 140)),
    _case("index_logits", "small-heads", _dense(_MIXED, 2, 4, FP4(64, 16))),
    _case("index_logits", "dim32", _dense([(0, 4, 6)], 1, 2, FP4(32, 16))),
    _case("index_logits", "dim96", _dense([(0, 4, 6)], 1, 3, FP4(96, 8))),
    _case("index_logits", "page3", _dense([(0, 10, 3)], 1, 4, FP4(128, 3))),
    _case("index_logits", "few", _dense(_FEW, 1, 32, FP4(128, 64), 40)),
    _case("index_logits", "few-verify", _dense(_VERIFY, 1, 32, FP4(128, 128))),
    _case("index_logits", "few-heads", _dense(_VERIFY, 2, 12, FP4(128, 64))),
    _case("index_logits", "few-steps", _dense(_STEPS, 1, 32, FP4(128, 64), 30)),
    _case("index_logits", "few-wide", _dense(_FEW, 1, 32, FP4(128, 64), spread=12)),
    _case("index_logits", "fp8", _dense(_MIXED, 1, 4, FP8(128, 16))),
    _case("index_logits", "fp8-free", _dense([(0, 10, 3)], 1, 4, _free(64, 16))),
    _case("index_logits", "mxfp8", _dense([(0, 10, 3)], 1, 4, MX(128, 16))),
    _case("index_logits", "interleaved", _dense([(0, 10, 3)], 1, 4, _interleaved(128, 16))),
    _case("index_logits", "bf16", _dense([(0, 10, 3)], 1, 4, KVLayout.rows_bf16(64, 4))),
    _case("index_logits", "prefill-4096x16384",
          _dense([(0, 16384 - 4096, 4096)], 1, 32, FP4(128, 64), causal=False), real=True,
          bench=True, anchor=Anchor("DeepGEMM fp8_mqa_logits (CUDA)", 593.2)),
    _case("index_logits", "prefill-4096-ratio2",
          _dense([(0, 0, 4096)], 2, 32, FP4(128, 64)), real=True, bench=True),
    _case("index_logits", "decode-64x32768",
          _dense([(s, 32767, 1) for s in range(64)], 1, 32, FP4(128, 64)), real=True, bench=True,
          anchor=Anchor("DeepGEMM fp8_paged_mqa_logits (CUDA)", 80.3)),
    _case("index_logits", "decode-1x131072",
          _dense([(0, 131071, 1)], 1, 32, FP4(128, 64)), real=True, bench=True),
    _case("index_logits", "verify-16x6x32768",
          _dense([(s, 32762, 6) for s in range(16)], 1, 32, FP4(128, 64)), real=True, bench=True),
    _case("index_logits_blocks", "no-rows", _blocks([], 4, FP4(64, 16), 3, 8)),
    _case("index_logits_blocks", "mixed", _blocks(_MIXED, 32, FP4(128, 16), 3, 8)),
    _case("index_logits_blocks", "tiles",
          _blocks([(0, 300, 3), (-1, 0, 2), (1, 900, 2), (2, 5, 1)], 32, FP4(128, 64), 40, 8)),
    _case("index_logits_blocks", "small", _blocks([(0, 60, 3)], 4, FP4(64, 16), 4, 4)),
    _case("index_logits_blocks", "size5", _blocks([(0, 60, 2)], 4, MX(128, 16), 4, 5)),
    _case("index_logits_blocks", "decode-64x131072",
          _blocks([(s, 131071, 1) for s in range(64)], 32, FP4(128, 64), 2048, 8),
          real=True, bench=True),
    _case("index_logits_blocks", "prefill-1024x65536",
          _blocks([(0, 65536 - 1024, 1024)], 32, FP4(128, 64), 2048, 8), real=True),
]  # fmt: skip


def compare_logits(actual: Any, expected: Any, arguments: Arguments) -> None:
    """fp32 sums of exact products in another order: errors stay within a few fp32 ulp of the
    largest partial sum. 128 products and 32 heads: 2^-24 * 12 additions deep, with margin for
    cancellation between heads of opposite weight.
    """
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype == torch.float32
    l2, top = errors(actual, expected)
    assert l2 <= 2e-6, f"relative L2 {l2:.1e}"
    assert top <= 4e-6, f"largest error {top:.1e} of the largest score"


COMPARE = {"index_logits": compare_logits, "index_logits_blocks": compare_logits}
