"""Mixes of the hyper-connections: projection, Sinkhorn, and the fused pass between sublayers.

    m = (x . fn^T) * rsqrt(mean(x^2) + eps)        x: the token's C*D stream values
    pre, post, comb = sigmoid(m), 2*sigmoid(m), sinkhorn(m), each scaled and biased

Ranges of columns are summed apart, into one row of partial results per token and range:

    partial fp32 [T, splits, W]: (2+C)*C dots, square sum of x, square sum of the collapse, zeros

and a last kernel adds the ranges in fixed order and makes the mixes.

* Few tokens: one kernel takes a tile of tokens and a range of the D columns, reads the stream
  (for the boundary: writes back the sublayer's output and stores the new stream), collapses it
  and accumulates the partial results; the last kernel also normalizes the collapse. For the
  fewest, `_hc_few` does the same on NVIDIA's GPUs.
* Many: `_hc_enter` writes back, collapses and normalizes with one program a token, and the dots
  are a matrix product over the stream it wrote.

What bounds many, at 4096 tokens on an H200 (cold, us): the boundary takes 179, of which 116 are
`_hc_enter` (its bytes copy in 99) and the parts of fn, and about 60 the product, which reads the
stream once more and, with fn's parts for every tile of tokens, 262 MB from the L2 cache at 4.8
TB/s. Tried:

* The product took as long with its square sums made in `_hc_enter` (which then took 144: more
  registers), with two parts or all of fn as one operand, and with sums kept in the tensor cores.
* Chunks of 512 to 2048 tokens, whose product reads from the L2 cache while the next chunk is
  written: 209 to 232.
* One pass over the stream with fn's parts resident in shared memory and every operand in
  registers, each program walking over tokens within a range of columns: 170 in the best of its
  forms (next operands prefetched to registers, by asynchronous copies, or to the L2 cache; 64 or
  128 bytes of a row at a time; 8 to 16 warps a processor), and the collapse, whose norm needs all
  ranges, is then still to be normalized.
* Write-back and product as programs of one launch, where the product follows within the L2
  cache's reach: 198 to 217.

fp32 quality on tensor cores: fn is split exactly into three bf16 parts, whose products with the
bf16 stream are exact, and every column block is summed on its own before it is added in fp32.

Source: written for this project; the contract is `tinfer.compat.hyper_connection`. Splitting
fp32 into bf16 parts: arXiv 1904.06376.
"""

# ruff: noqa: RUF005  (Triton's language has no unpacking into a tuple)
from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._jit import _dot, round_bf16, to_bf16, to_fp32
from tinfer.kernels._mixes import store_mixes


# ---------------------------------------------------------------- few tokens
@triton.jit
def _top(x):
    """fp32 with all but the first 8 significant bits cut off: a bf16 value."""
    return (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _add_dots(
    values, fn, column, k, width, part,
    C: tl.constexpr, MIXES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """part [T, W] + values bf16 [T, B] @ fn[:, copy k, columns B]^T, exact products."""
    row = tl.arange(0, WIDTH)[:, None]
    at = fn + row * (C * width) + k * width + column[None, :]
    f = tl.load(at, mask=(row < MIXES) & (column < width)[None, :], other=0.0)  # [W, B]
    high = _top(f)
    middle = _top(f - high)
    part = _dot(values, tl.trans(to_bf16(f - high - middle)), part)
    part = _dot(values, tl.trans(to_bf16(middle)), part)
    return _dot(values, tl.trans(to_bf16(high)), part)


@triton.jit
def _read(x, at, mask):
    return to_fp32(tl.load(x + at, mask=mask, other=0.0))


@triton.jit(do_not_specialize=["rows", "splits"])
def _hc_partial_kernel(
    y, stream, post, comb, pre, fn, new, x, partial, rows, width, splits,
    C: tl.constexpr, MIXES: tl.constexpr, WIDTH: tl.constexpr,
    POST: tl.constexpr, COLLAPSE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Each of the splits takes a range of column blocks; outputs as the module describes.

    Values are [T, 1, D] so that the sum over the middle axis, which moves nothing, stands between
    them and the dot: the compiler would otherwise compute them once more for the dot's layout.
    """
    split = tl.program_id(0) % splits
    token = (tl.program_id(0) // splits).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # [T]
    live = token < rows
    post_k, comb_jk, pre_k = (), (), ()  # loaded as [T]: one register a token
    for k in tl.static_range(C):
        if POST:
            mix = tl.load(post + token * C + k, mask=live, other=0.0)
            post_k = post_k + (mix[:, None, None],)
            for j in tl.static_range(C):
                mix = tl.load(comb + (token * C + k) * C + j, mask=live, other=0.0)
                comb_jk = comb_jk + (mix[:, None, None],)
        if COLLAPSE:
            mix = tl.load(pre + token * C + k, mask=live, other=0.0)
            pre_k = pre_k + (mix[:, None, None],)
    token_3d, live_3d = token[:, None, None], live[:, None, None]
    dots = tl.zeros((BLOCK_T, WIDTH), tl.float32)
    square = tl.zeros((BLOCK_T, 1, BLOCK_D), tl.float32)
    square_x = tl.zeros((BLOCK_T, 1, BLOCK_D), tl.float32)
    blocks = tl.cdiv(width, BLOCK_D)
    first, last = split * blocks // splits, (split + 1) * blocks // splits
    for block in tl.range(first, last, num_stages=STAGES):
        column = block * BLOCK_D + tl.arange(0, BLOCK_D)
        column_3d = column[None, None, :]
        inside = live_3d & (column_3d < width)
        base = token_3d * (C * width) + column_3d
        copies = ()
        for k in tl.static_range(C):
            copies = copies + (_read(stream, base + k * width, inside),)
        if POST:
            output = _read(y, token_3d * width + column_3d, inside)
        collapsed = copies[0]
        part = tl.zeros((BLOCK_T, WIDTH), tl.float32)
        for k in tl.static_range(C):
            value = copies[k]
            if POST:
                value = post_k[k] * output
                for j in tl.static_range(C):
                    value += comb_jk[j * C + k] * copies[j]
                tl.store(new + base + k * width, to_bf16(value), mask=inside)
                value = round_bf16(value)
            square += value * value
            if COLLAPSE:
                collapsed = pre_k[k] * value if k == 0 else collapsed + pre_k[k] * value
            flat = to_bf16(tl.sum(value, axis=1))
            part = _add_dots(flat, fn, column, k, width, part, C, MIXES, WIDTH)
        dots += part
        if COLLAPSE:
            rounded = to_bf16(collapsed)
            tl.store(x + token_3d * width + column_3d, rounded, mask=inside)
            square_x += to_fp32(rounded) * to_fp32(rounded)
    at = tl.arange(0, WIDTH)[None, :]
    dots = tl.where(at == MIXES, tl.sum(tl.sum(square, axis=2), axis=1)[:, None], dots)
    dots = tl.where(at == MIXES + 1, tl.sum(tl.sum(square_x, axis=2), axis=1)[:, None], dots)
    to = partial + (token * splits + split)[:, None] * WIDTH + at
    tl.store(to, dots, mask=live[:, None])


# ---------------------------------------------------------------- many tokens
@triton.jit
def _hc_parts_kernel(fn, parts, count, BLOCK: tl.constexpr):
    """fp32 fn [N] -> its three bf16 parts [3, N], high first."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    f = tl.load(fn + at, mask=inside, other=0.0)
    high = _top(f)
    middle = _top(f - high)
    tl.store(parts + at, to_bf16(high), mask=inside)
    tl.store(parts + count + at, to_bf16(middle), mask=inside)
    tl.store(parts + 2 * count + at, to_bf16(f - high - middle), mask=inside)


@triton.jit(do_not_specialize=["rows", "splits"])
def _hc_dots_kernel(
    stream, parts, partial, rows, depth, splits,
    MIXES: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Partial results of stream [T, depth] without the collapse's column."""
    split = tl.program_id(0) % splits
    token = (tl.program_id(0) // splits).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # [T]
    live, row = token < rows, tl.arange(0, WIDTH)[:, None]
    dots = tl.zeros((BLOCK_T, WIDTH), tl.float32)
    square = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    blocks = tl.cdiv(depth, BLOCK_K)
    first, last = split * blocks // splits, (split + 1) * blocks // splits
    for block in tl.range(first, last, num_stages=STAGES):
        column = (block * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
        at = stream + token[:, None] * depth + column
        value = tl.load(at, mask=live[:, None] & (column < depth), other=0.0)  # [T, K]
        part = tl.zeros((BLOCK_T, WIDTH), tl.float32)
        for p in tl.static_range(2, -1, -1):
            at = parts + (p * MIXES + row) * depth + column
            f = tl.load(at, mask=(row < MIXES) & (column < depth), other=0.0)  # [W, K]
            part = _dot(value, tl.trans(f), part)
        dots += part
        square += to_fp32(value) * to_fp32(value)
    at = tl.arange(0, WIDTH)[None, :]
    dots = tl.where(at == MIXES, tl.sum(square, axis=1)[:, None], dots)
    to = partial + (token * splits + split)[:, None] * WIDTH + at
    tl.store(to, dots, mask=live[:, None])


# ---------------------------------------------------------------- last kernel
@triton.jit
def _norm_part(x, weight, column, width, rstd, HAS_WEIGHT: tl.constexpr):
    inside = column < width
    value = to_fp32(tl.load(x + column, mask=inside, other=0.0)) * rstd
    if HAS_WEIGHT:
        value *= to_fp32(tl.load(weight + column, mask=inside, other=0.0))
    tl.store(x + column, to_bf16(value), mask=inside)


@triton.jit
def _mix_tokens(
    partial, sums, scale, base, pre, post, comb, first, rows, width, splits,
    norm_eps, hc_eps, iters,
    C: tl.constexpr, MIXES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Adds the ranges of BLOCK tokens; their sums go through memory to one thread a token."""
    token = tl.cast(first, tl.int64) + tl.arange(0, BLOCK)
    split, column = tl.arange(0, BLOCK_S)[None, :, None], tl.arange(0, WIDTH)
    at = partial + (token[:, None, None] * splits + split) * WIDTH + column[None, None, :]
    inside = (token < rows)[:, None, None] & (split < splits)
    total = tl.sum(tl.load(at, mask=inside, other=0.0), axis=1)  # [B, W]
    live = token < rows
    sums += token * WIDTH
    tl.store(sums[:, None] + column[None, :], total, mask=live[:, None])
    tl.debug_barrier()
    square = tl.load(sums + MIXES, mask=live, other=0.0)
    rstd = tl.rsqrt(square / (C * width) + norm_eps)
    mixes = ()
    for n in tl.static_range(MIXES):
        mixes = mixes + (tl.load(sums + n, mask=live, other=0.0) * rstd,)
    store_mixes(mixes, token, live, scale, base, pre, post, comb, hc_eps, iters, C, NATIVE)


@triton.jit(do_not_specialize=["rows", "splits"])
def _hc_finish_kernel(
    partial, sums, scale, base, weight, x, pre, post, comb, rows, width, splits,
    norm_eps, hc_eps, iters,
    C: tl.constexpr, MIXES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr, NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    MAIN: tl.constexpr, REST: tl.constexpr, NATIVE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """A task makes the mixes of BLOCK tokens; with NORM others normalize a row of x in place."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    mixing = tl.cdiv(rows, BLOCK)
    tasks = mixing + rows if NORM else mixing
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        if task < mixing:
            _mix_tokens(
                partial, sums, scale, base, pre, post, comb, task * BLOCK, rows, width, splits,
                norm_eps, hc_eps, iters, C, MIXES, WIDTH, BLOCK, BLOCK_S, NATIVE,
            )  # fmt: skip
        else:
            row = tl.cast(task - mixing, tl.int64)
            split = tl.arange(0, BLOCK_S)
            at = partial + (row * splits + split) * WIDTH + MIXES + 1
            square = tl.sum(tl.load(at, mask=split < splits, other=0.0), axis=0)
            rstd = tl.rsqrt(square / width + norm_eps)
            _norm_part(x + row * width, weight, tl.arange(0, MAIN), width, rstd, HAS_WEIGHT)
            if REST:
                rest = MAIN + tl.arange(0, REST)
                _norm_part(x + row * width, weight, rest, width, rstd, HAS_WEIGHT)


@triton.jit(do_not_specialize=["rows"])
def _hc_split_kernel(
    mixes, scale, base, pre, post, comb, rows, hc_eps, iters,
    C: tl.constexpr, MIXES: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK), tl.num_programs(0)):
        token = tl.cast(tile, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        live = token < rows
        row = ()
        for n in tl.static_range(MIXES):
            row = row + (tl.load(mixes + token * MIXES + n, mask=live, other=0.0),)
        store_mixes(row, token, live, scale, base, pre, post, comb, hc_eps, iters, C, NATIVE)
