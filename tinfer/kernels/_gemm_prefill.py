"""Projections of many tokens: dequantize to bf16 once, then one large bf16 product.

`_dequantize_kernel` turns e4m3 rows with ue8m0 scales into bf16, exactly and in memory order; it
serves weights (a scale per 32x32 tile) and activations (a scale per row and 32 columns). The
products read bf16 operands and accumulate in fp32:

    out[t, g * N + n] = sum_k x[t, g * K + k] * w[g * N + n, k]        g < G, one group: a linear

`_matmul_kernel` loads through pointers and takes any shape; `_matmul_tma_kernel` is persistent
and loads tiles by descriptors, whose hardware masks the edges.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._gemm_tile import nan_pairs, pairs_e4m3, scaled_words, token_factor
from tinfer.kernels._jit import _dot, e2m1_decode, e4m3_decode, to_bf16, to_fp32, ue8m0_decode

# Orders of dequantized columns: as they are; each eight as 0 4 1 5 2 6 3 7 (fp4 weights streamed);
# each block of 128 or 64 as a fragment of fp4 or fp8 weights wants it (see `_gemm_tile`).
ORDERS = {"natural": 0, "eights": 1, "e2m1": 2, "e4m3": 3}


# ---------------------------------------------------------------- dequantization
@triton.jit
def _natural_pairs(w):
    """uint32 [...] of 4 e4m3 codes -> uint32 [..., 2]: RAW bf16 pairs (0,1) and (2,3)."""
    first = (w & 0xFF) | ((w & 0xFF00) << 8)
    second = ((w >> 16) & 0xFF) | ((w >> 8) & 0xFF0000)
    t = tl.join(first, second)
    return ((t << 8) & 0x80008000) | ((t << 4) & 0x07F007F0)


@triton.jit
def _eights_pairs(words):
    """uint32 [n, 2] of 8 e4m3 codes -> uint32 [n, 4]: RAW bf16 pairs (0,4) (1,5) (2,6) (3,7)."""
    first, second = tl.split(words)
    shift = tl.arange(0, 4)[None, :] * 8
    low, high = (first[:, None] >> shift) & 0xFF, (second[:, None] >> shift) & 0xFF
    t = low | (high << 16)
    return ((t << 8) & 0x80008000) | ((t << 4) & 0x07F007F0)


@triton.jit
def _dequantize_kernel(
    q,  # uint8 [ROWS, K] of e4m3, rows of whole words
    s,  # uint8 [ceil(ROWS/TALL), ceil(K/32)], ue8m0
    out,  # bf16 [ROWS, K], contiguous
    pieces,  # ROWS * K / 8
    K,
    q_stride,  # words of a row
    s_stride,
    TALL: tl.constexpr,  # rows that share a scale
    ORDER: tl.constexpr,  # of the columns in `out`, see `ORDERS`
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    CHAINED: tl.constexpr = False,  # the kernel that reads `out` may start, and waits by itself
):
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
    q = q.to(tl.pointer_type(tl.uint32))
    out = out.to(tl.pointer_type(tl.uint32))
    for block in range(tl.program_id(0), tl.cdiv(pieces, BLOCK), tl.num_programs(0)):
        piece = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        live = piece < pieces
        row = piece // (K // 8)
        part = (piece - row * (K // 8)).to(tl.int32)  # 8 columns
        at = (row * q_stride + part * 2)[:, None] + tl.arange(0, 2)[None, :]
        words = tl.load(q + at, mask=live[:, None], other=0)
        code = tl.load(s + row // TALL * s_stride + part // 4, mask=live, other=127)
        word = tl.arange(0, 4)[None, :]
        at = (piece * 4)[:, None] + word
        if ORDER == 0:
            p = tl.reshape(_natural_pairs(words), (BLOCK, 4))
        elif ORDER == 3:
            p = tl.reshape(pairs_e4m3(words), (BLOCK, 4))
            place = part % 8  # (t, half of i) of the piece; words are (i % 2, j)
            to = (place % 2 * 2)[:, None] * 8 + word // 2 * 8 + word % 2 * 4 + (place // 2)[:, None]
            at = (piece - place)[:, None] * 4 + to
        else:
            p = _eights_pairs(words)
            if ORDER == 2:
                place = part % 16  # (t, i) of the piece; words are j
                at = (
                    (piece - place)[:, None] * 4 + (place % 4 * 16 + place // 4)[:, None] + word * 4
                )
        p = scaled_words(nan_pairs(p), token_factor(code)[:, None], True, PACKED)
        tl.store(out + at, p, mask=live[:, None])


@triton.jit
def _dequantize_ragged_kernel(
    q,  # uint8 [ROWS, K] of e4m3
    s,
    out,  # bf16 [ROWS, K]
    elements,  # ROWS * K
    K,
    q_stride,
    s_stride,
    TALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Any K, one element a lane."""
    for block in range(tl.program_id(0), tl.cdiv(elements, BLOCK), tl.num_programs(0)):
        i = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        live = i < elements
        row, column = i // K, i % K
        value = e4m3_decode(tl.load(q + row * q_stride + column, mask=live, other=0))
        code = tl.load(s + row // TALL * s_stride + column // 32, mask=live, other=127)
        tl.store(out + i, to_bf16(value * ue8m0_decode(code)), mask=live)


@triton.jit
def _dequantize_fp4_kernel(
    w,  # uint8 [ROWS, K/2], packed e2m1
    s,  # uint8 [ROWS, K/32], ue8m0
    out,  # bf16 [ROWS, K]
    elements,  # ROWS * K
    K,
    w_stride,
    s_stride,
    BLOCK: tl.constexpr,
):
    """One element a lane."""
    for block in range(tl.program_id(0), tl.cdiv(elements, BLOCK), tl.num_programs(0)):
        i = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        live = i < elements
        row, column = i // K, (i % K).to(tl.int32)
        byte = tl.load(w + row * w_stride + column // 2, mask=live, other=0)
        value = e2m1_decode((byte >> ((column & 1) * 4).to(tl.uint8)) & 0xF)
        code = tl.load(s + row * s_stride + column // 32, mask=live, other=127)
        tl.store(out + i, to_bf16(value * ue8m0_decode(code)), mask=live)


# ---------------------------------------------------------------- products
@triton.jit
def tile_of(tile, tiles_m, tiles_n, BAND: tl.constexpr):
    """(m, n) of a tile: bands of BAND tile rows, column by column, so that L2 holds both sides."""
    band = tile // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    inside = tile % (BAND * tiles_n)
    return band * BAND + inside % height, inside // height


@triton.jit
def _matmul_kernel(
    x,  # bf16 [T, G*K]
    w,  # bf16 [G*N, K]
    out,  # bf16 or fp32 [T, G*N]
    T,
    N,
    K,
    G,
    x_stride,
    w_stride,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(T, BM), tl.cdiv(N, BN) * G
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        m, n_all = tile_of(tile, tiles_m, tiles_n, BAND)
        group, n = n_all // tl.cdiv(N, BN), n_all % tl.cdiv(N, BN)
        rows, columns = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        # Rows beyond the edge wrap round: their products are not stored.
        x_at = (rows % T).to(tl.int64)[:, None] * x_stride + group * K + k[None, :]
        w_at = (group * N + columns % N).to(tl.int64)[None, :] * w_stride + k[:, None]
        acc = tl.zeros((BM, BN), tl.float32)
        for start in range(0, K, BK):
            if EVEN_K:
                a, b = tl.load(x + x_at + start), tl.load(w + w_at + start)
            else:
                left = K - start
                a = tl.load(x + x_at + start, mask=k[None, :] < left, other=0.0)
                b = tl.load(w + w_at + start, mask=k[:, None] < left, other=0.0)
            acc = _dot(a, b, acc)
        at = rows.to(tl.int64)[:, None] * (G * N) + group * N + columns[None, :]
        result = acc
        if out.dtype.element_ty == tl.bfloat16:
            result = to_bf16(acc)
        tl.store(out + at, result, mask=(rows < T)[:, None] & (columns < N)[None, :])


@triton.jit
def _matmul_tma_kernel(
    x,  # bf16 [T, G*K]
    w,  # bf16 [G*N, K]
    out,  # bf16 or fp32 [T, G*N]
    T,
    N,
    K,
    G,
    x_stride,
    w_stride,
    PROGRAMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
    PARTS: tl.constexpr,  # stores a tile is cut into
):
    """Needs N % BN == 0 unless there is one group, and rows of whole 16-byte units."""
    PART: tl.constexpr = BN // PARTS
    x_tiles = tl.make_tensor_descriptor(x, [T, G * K], [x_stride, 1], [BM, BK])
    w_tiles = tl.make_tensor_descriptor(w, [G * N, K], [w_stride, 1], [BN, BK])
    out_tiles = tl.make_tensor_descriptor(out, [T, G * N], [G * N, 1], [BM, PART])
    tiles_m, tiles_n = tl.cdiv(T, BM), tl.cdiv(N * G, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        m, n = tile_of(tile, tiles_m, tiles_n, BAND)
        first = n * BN // N * K  # column of x where this group's K begins
        acc = tl.zeros((BM, BN), tl.float32)
        for start in range(0, K, BK):
            a = x_tiles.load([m * BM, first + start])
            b = w_tiles.load([n * BN, start])
            acc = _dot(a, tl.trans(b), acc)
        parts = (acc,)
        if PARTS == 2:  # half a tile at a time: the rest of shared memory holds loads in flight
            parts = tl.split(tl.permute(tl.reshape(acc, (BM, 2, PART)), (0, 2, 1)))
        for i in tl.static_range(PARTS):
            part = parts[i]
            if out.dtype.element_ty == tl.bfloat16:
                part = to_bf16(part)
            out_tiles.store([m * BM, n * BN + i * PART], part)


# ---------------------------------------------------------------- fp32 operands
@triton.jit
def _thirds(v):
    """fp32 -> three bf16 that add up to it (24 bits); what is infinite stays in the first."""
    first = to_bf16(v)
    rest = tl.where(tl.abs(to_fp32(first)) < float("inf"), v - to_fp32(first), 0.0)
    second = to_bf16(rest)
    return first, second, to_bf16(rest - to_fp32(second))


@triton.jit(do_not_specialize=["T"])
def _matmul_fp32_kernel(
    x,  # bf16 or fp32 [T, K]
    w,  # bf16 or fp32 [N, K], not both bf16
    out,  # fp32 [T, N]
    T,
    N,
    K,
    x_stride,
    w_stride,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    W: tl.constexpr,  # warps that share a tile and split K
):
    """fp32 accuracy from bf16 products: fp32 operands go in as three bf16 terms."""
    tiles_n = tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), tl.cdiv(T, BM) * tiles_n, tl.num_programs(0)):
        rows = tile // tiles_n * BM + tl.arange(0, BM)
        columns = tile % tiles_n * BN + tl.arange(0, BN)
        k = tl.arange(0, W)[:, None, None] * BK + tl.arange(0, BK)[None, None, :]
        x_at = rows.to(tl.int64)[None, :, None] * x_stride + k
        w_at = columns.to(tl.int64)[None, :, None] * w_stride + k
        x_ok, w_ok = (rows < T)[None, :, None], (columns < N)[None, :, None]
        acc = tl.zeros((W, BM, BN), tl.float32)
        for start in range(0, K, W * BK):
            inside = k + start < K
            a = tl.load(x + x_at + start, mask=x_ok & inside, other=0.0)
            b = tl.load(w + w_at + start, mask=w_ok & inside, other=0.0)
            acc = _add_thirds(acc, a, tl.permute(b, (0, 2, 1)))
        total = tl.sum(acc, axis=0)
        at = rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(out + at, total, mask=(rows < T)[:, None] & (columns < N)[None, :])


@triton.jit
def _add_thirds(acc, a, b):
    """acc + a @ b, the smallest terms first.

    A block's products are summed by themselves: tensor cores truncate what they add to, which
    over a long K costs bits, so the long sum is left to rounded fp32 additions.
    """
    part = tl.zeros(acc.shape, tl.float32)
    if a.dtype == tl.bfloat16:
        b0, b1, b2 = _thirds(b)
        part = _dot(a, b0, _dot(a, b1, _dot(a, b2, part)))
    elif b.dtype == tl.bfloat16:
        a0, a1, a2 = _thirds(a)
        part = _dot(a0, b, _dot(a1, b, _dot(a2, b, part)))
    else:
        a0, a1, a2 = _thirds(a)
        b0, b1, b2 = _thirds(b)
        part = _dot(a1, b1, _dot(a2, b0, _dot(a0, b2, part)))
        part = _dot(a0, b0, _dot(a1, b0, _dot(a0, b1, part)))
    return acc + part
