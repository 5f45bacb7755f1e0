"""Index logits: relu(q . k) weighted and summed over heads, against paged fp4 or fp8 keys.

Memory: q uint8 [T, Hi, Di/2] and its scales [T, Hi, Di/32]; keys in any `KVLayout`, addressed
through the block table in int64; logits fp32, rows padded to 128 bytes.

A program holds the queries of TOKENS tokens (TOKENS * HEADS columns) and walks over keys in
tiles of KEYS rows. Keys are decoded in registers as the left operand, so heads lie along the
accumulator's columns, where relu, weight and sum stay within a few lanes. Tokens of another
sequence in the same tile take another walk. Keys at and beyond the last visible one are never
read. With candidate blocks every token has keys of its own and walks alone.

FAST is for e2m1 keys of 128 channels with ue8m0 scales (`_index_keys`); other layouts decode to
bf16 first. Few tokens a sequence and candidate blocks have kernels of their own on Hopper
(`_index_hopper`, `_index_blocks_hopper`).
Numerics: operands exact in bf16, fp32 accumulation, relu and weighted sum in fp32.
Source: `tinfer.compat.indexer`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinfer.compat import indexer as ref
from tinfer.kernels._call import scattered, words_of
from tinfer.kernels._index_decode import launch_hopper, takes_hopper
from tinfer.kernels._index_scores import page_of, pages_of, query_operands, score_tile
from tinfer.kernels._target import Target, target
from tinfer.kv_layout import KVLayout

MAX_PROGRAMS = 65535


@triton.jit(do_not_specialize=["tokens", "columns", "capacity", "tiles", "splits", "span"])
def _index_logits_kernel(
    q_ptr,  # uint8 [T, HEADS, DIM / 2], or int32 words if FAST
    q_scale_ptr,  # uint8 [T, HEADS, DIM / 32]
    weights_ptr,  # fp32 [T, HEADS]
    cache_ptr,  # uint8 pages, or bf16 pages for bf16 rows
    words_ptr,  # the same as int32 words if FAST, else None
    table_ptr,  # int32 [S, nblk] as int16 [S, 2 * nblk]
    seq_ptr,  # int64 [T]
    visible_ptr,  # int32 [T]
    blocks_ptr,  # int32 [T, nb] or None
    out_ptr,  # fp32 [T, columns]
    tokens,
    columns,
    capacity,  # keys that a row of the table has pages for
    tiles,
    splits,
    span,  # columns of one program, a multiple of KEYS
    table_stride,
    page_stride,
    blocks_stride,
    out_stride,
    HEADS: tl.constexpr,
    HEADS_P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    DIM: tl.constexpr,
    DP: tl.constexpr,
    VALUE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    PAGE: tl.constexpr,
    DATA_STRIDE: tl.constexpr,
    SCALE_BASE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    FAST: tl.constexpr,
    PACKED: tl.constexpr,
):
    for task in range(tl.program_id(0), tiles * splits, tl.num_programs(0)):
        token = (tiles - 1 - task // splits) * TOKENS  # the longest rows of a prefill first
        begin = task % splits * span
        end = tl.minimum(begin + span, columns)
        lane = tl.arange(0, TOKENS)
        row = (token + lane).to(tl.int64)
        seq = tl.load(seq_ptr + row, mask=row < tokens, other=-1)
        visible = tl.minimum(tl.load(visible_ptr + row, mask=seq >= 0, other=0), capacity)
        out_row = out_ptr + row[None, :] * out_stride
        queries, weight = query_operands(
            q_ptr, q_scale_ptr, weights_ptr, token, tokens,
            HEADS, HEADS_P, TOKENS * HEADS_P, DIM, DP, FAST, PACKED,
        )  # fmt: skip
        start = token * 0
        while start < TOKENS:
            owner = tl.max(tl.where(lane == start, seq, -1), axis=0)
            stop = tl.min(tl.where((lane > start) & (seq != owner), lane, TOKENS), axis=0)
            mine = (lane >= start) & (lane < stop) & (row < tokens)
            most = tl.max(tl.where(mine, visible, 0), axis=0)
            bound = end if blocks_ptr is not None else tl.minimum(most, end)
            bound = tl.where(owner >= 0, bound, begin)
            table = table_ptr + tl.maximum(owner, 0) * table_stride
            for at in tl.range(begin, bound, KEYS, num_stages=STAGES):
                column = at + tl.arange(0, KEYS)
                if blocks_ptr is not None:
                    block_at = blocks_ptr + tl.max(row, axis=0) * blocks_stride
                    inside = column < columns
                    block = tl.load(block_at + column // BLOCK_SIZE, mask=inside, other=-1)
                    key = block * BLOCK_SIZE + column % BLOCK_SIZE
                    seen = (block >= 0) & (key < most)
                    page = page_of(table, key // PAGE, seen)
                else:
                    key = column
                    seen = key < bound
                    page = pages_of(table, at, bound, KEYS, PAGE)
                scores = score_tile(
                    cache_ptr, words_ptr, page_stride, page, key, seen, queries, weight,
                    KEYS, TOKENS, HEADS_P, DIM, DP, VALUE, GROUP, SCALE, PAGE,
                    DATA_STRIDE, SCALE_BASE, SCALE_STRIDE, FAST, PACKED,
                )  # fmt: skip
                shown = seen[:, None] & (key[:, None] < visible[None, :])
                scores = tl.where(shown, scores, float("-inf"))
                mask = mine[None, :] & (column < columns)[:, None]
                tl.store(out_row + column[:, None], scores, mask=mask)
            rest = begin + tl.cdiv(tl.maximum(bound - begin, 0), KEYS) * KEYS
            for at in range(rest, end, KEYS):
                column = at + tl.arange(0, KEYS)
                mask = mine[None, :] & (column < columns)[:, None]
                hidden = tl.full([KEYS, TOKENS], float("-inf"), tl.float32)
                tl.store(out_row + column[:, None], hidden, mask=mask)
            start = stop


# ---------------------------------------------------------------- launching
def _index_tiles(
    tokens: int, sequences: int, heads: int, alone: bool, on: Target
) -> dict[str, int]:
    """TOKENS, KEYS, STAGES, num_warps and, on CUDA, maxnreg.

    Many tokens a sequence share decoded keys. One token: 128 registers let four programs share
    a multiprocessor without spilling.
    """
    most = 1 if alone else max(1, min(tokens // max(sequences, 1), 128 // heads))
    together = 1 << (most.bit_length() - 1)
    if together * heads > 64:  # one tile of keys is a longer time than a load takes
        return {"TOKENS": together, "KEYS": 128, "STAGES": 2, "num_warps": 4}
    tile = {"TOKENS": together, "KEYS": 128, "STAGES": 3, "num_warps": 4}
    if on.backend == "cuda":
        tile["maxnreg"] = 128
    return tile


def _splits(tiles: int, columns: int, keys: int, processors: int) -> tuple[int, int]:
    """(programs per token tile, columns of each): about 16 programs a processor, if that long."""
    key_tiles = triton.cdiv(columns, keys)
    wanted = min(triton.cdiv(16 * processors, tiles), max(1, key_tiles // 4))
    each = triton.cdiv(key_tiles, max(1, wanted))
    return triton.cdiv(key_tiles, each), each * keys


def _is_fast(cache: Tensor, layout: KVLayout) -> bool:
    """Whether keys can be read as 32-bit words of the format that `_index_keys` decodes."""
    words = (*layout.triple, layout.page_bytes, cache.stride(0), cache.storage_offset())
    return (layout.dim, layout.value, layout.group, layout.scale) == (
        128,
        "e2m1",
        32,
        "ue8m0",
    ) and all(n % 4 == 0 for n in words)


def _arguments(
    q: Tensor, cache: Tensor, layout: KVLayout, on: Target
) -> tuple[tuple[Tensor, Tensor, Tensor | None], dict[str, Any]]:
    """(q, cache, cache as words) as the kernel reads them, and the constexprs of the format."""
    fast = _is_fast(cache, layout)
    words, unit = None, 1
    if fast:
        q, words = words_of(q), cache.view(torch.int32)
    elif layout.value == "bf16":
        cache, unit = cache.view(torch.bfloat16), 2
    data_stride, scale_base, scale_stride = layout.triple
    return (q.contiguous(), cache, words), {
        "DIM": layout.dim,
        "DP": triton.next_power_of_2(layout.dim),
        "VALUE": layout.value,
        "GROUP": layout.group,
        "SCALE": layout.scale,
        "PAGE": layout.page_size,
        "DATA_STRIDE": data_stride // unit,
        "SCALE_BASE": scale_base // unit,
        "SCALE_STRIDE": scale_stride // unit,
        "FAST": fast,
        "PACKED": fast and on.backend == "cuda" and int(on.arch) >= 90,
    }  # fmt: skip


def _launch(
    q: Tensor,
    q_s: Tensor,
    weights: Tensor,
    cache: Tensor,
    layout: KVLayout,
    block_table: Tensor,
    seq: Tensor,
    visible: Tensor,
    columns: int,
    blocks: Tensor | None = None,
    block_size: int = 1,
) -> Tensor:
    tokens, heads = q.shape[:2]
    padded = triton.cdiv(columns, 32) * 32
    out = torch.empty(tokens, padded, dtype=torch.float32, device=q.device)[:, :columns]
    if not out.numel():
        return out
    on = target(q.device)
    capacity = block_table.shape[1] * layout.page_size
    if takes_hopper(q, cache, layout, block_table, blocks, on):
        if blocks is None and capacity < columns:
            visible = visible.clamp(max=capacity)
        given = (q, q_s, weights, cache, layout, block_table, seq, visible, out, on)
        launch_hopper(*given, blocks, block_size)
        return out
    heads_p = max(16, triton.next_power_of_2(heads))
    tile = _index_tiles(tokens, len(block_table), heads_p, blocks is not None, on)
    tiles = triton.cdiv(tokens, tile["TOKENS"])
    splits, span = _splits(tiles, columns, tile["KEYS"], on.processors)
    halves = block_table.view(torch.int16)
    (q, pages, words), fixed = _arguments(q, cache, layout, on)
    _index_logits_kernel[(min(tiles * splits, MAX_PROGRAMS),)](
        q,
        q_s.contiguous(),
        weights.contiguous(),
        pages,
        words,
        halves,
        seq.contiguous(),
        visible.contiguous(),
        blocks,
        out,
        tokens,
        columns,
        capacity,
        tiles,
        splits,
        span,
        halves.stride(0),
        pages.stride(0),
        0 if blocks is None else blocks.stride(0),
        out.stride(0),
        HEADS=heads,
        HEADS_P=heads_p,
        BLOCK_SIZE=block_size,
        **fixed,
        **tile,
    )
    return out


def supports_index_logits(
    q: Tensor,
    q_s: Tensor,
    weights: Tensor,
    cache: Tensor,
    layout: KVLayout,
    block_table: Tensor,
    seq: Tensor,
    visible: Tensor,
    max_visible: int,
) -> str | None:
    """Rows of the block table contiguous, at most 256 heads."""
    if block_table.dim() == 2 and block_table.stride(1) != 1:
        return "rows of block_table are not contiguous"
    if q.dim() == 3 and q.shape[1] > 256:
        return "more than 256 heads"
    if layout.value == "bf16" and (cache.stride(0) % 2 or cache.storage_offset() % 2):
        return "bf16 rows at odd byte offsets"
    return None


def index_logits(
    q: Tensor,
    q_s: Tensor,
    weights: Tensor,
    cache: Tensor,
    layout: KVLayout,
    block_table: Tensor,
    seq: Tensor,
    visible: Tensor,
    max_visible: int,
) -> Tensor:
    given = (q, q_s, weights, cache, layout, block_table, seq, visible, max_visible)
    ref.check_index_logits("index_logits", *given)
    return _launch(*given)


def supports_index_logits_blocks(
    q: Tensor,
    q_s: Tensor,
    weights: Tensor,
    cache: Tensor,
    layout: KVLayout,
    block_table: Tensor,
    seq: Tensor,
    blocks: Tensor,
    block_size: int,
    visible: Tensor,
) -> str | None:
    """As index_logits; rows of blocks contiguous."""
    if scattered(blocks):
        return "rows of blocks are not contiguous"
    return supports_index_logits(q, q_s, weights, cache, layout, block_table, seq, visible, 0)


def index_logits_blocks(
    q: Tensor,
    q_s: Tensor,
    weights: Tensor,
    cache: Tensor,
    layout: KVLayout,
    block_table: Tensor,
    seq: Tensor,
    blocks: Tensor,
    block_size: int,
    visible: Tensor,
) -> Tensor:
    op = "index_logits_blocks"
    ref.check_index_logits(op, q, q_s, weights, cache, layout, block_table, seq, visible)
    ref.check_index_logits_blocks(blocks, len(q), block_size)
    columns = blocks.shape[1] * block_size
    given = (q, q_s, weights, cache, layout, block_table, seq, visible, columns)
    return _launch(*given, blocks, block_size)
