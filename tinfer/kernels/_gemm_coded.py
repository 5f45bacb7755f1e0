"""Few tokens, fp8 activations, fp8 weight: both operands as fp16, scales on the sums.

Every e4m3 value is an fp16 number, and one instruction of the devices that know fp8 converts two.
A group of 32 columns shares one scale per token and one per 32 weight rows, so its products are
summed by themselves (exact in fp32 but for the sum's own rounding), scaled by a power of two and
added to the total in fp32. The weight goes from memory straight into tensor-core fragments: a
thread reads 8 consecutive bytes of a row, a quarter of a group (see `_gemm_tile`).

A step of a warp covers GR groups; the warps of a program split K among themselves, step by step,
and add up at the end in a fixed order: no atomics, no workspace.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._jit import INTERPRET, _dot, to_bf16, ue8m0_decode

SIGNS = tl.constexpr(0x80008000)


@triton.jit
def _halves_portable(w):
    """uint32 [...] of 4 e4m3 codes -> fp16 [..., 2, 2], exact; NaN codes give NaN."""
    first = (w & 0xFF) | ((w & 0xFF00) << 8)
    second = ((w >> 16) & 0xFF) | ((w >> 8) & 0xFF0000)
    t = tl.join(first, second)
    p = ((t << 8) & SIGNS) | ((t << 7) & 0x3F803F80)  # value * 2^-8
    nan = ((p & 0x3F803F80) + 0x00800080) >> 14
    p = p | ((nan & 0x00010001) * 0x7E00)
    return _fp16_pairs(p) * 256.0


@triton.jit
def _fp16_pairs(p):
    """uint32 [...] -> fp16 [..., 2], low half first."""
    low = (p & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = (p >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def fp16_of_e4m3(w, NATIVE: tl.constexpr):
    """uint32 [...] of 4 e4m3 codes -> fp16 [..., 2, 2], exact; NaN codes give NaN."""
    if NATIVE and not INTERPRET:
        first, second = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; "
            "cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r",
            [w],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
        v = _fp16_pairs(tl.join(first, second))
    else:
        v = _halves_portable(w)
    return v


@triton.jit
def _tile(words, ROWS: tl.constexpr, W: tl.constexpr, GR: tl.constexpr, NATIVE: tl.constexpr):
    """uint32 [GR*R*W*32, 2] -> fp16 [GR*W, ROWS, 32], columns in a fragment's order."""
    v = fp16_of_e4m3(words, NATIVE)
    v = tl.reshape(v, (GR, ROWS // 8, W, 8, 4, 2, 2, 2))  # group r warp g t word pair half
    v = tl.permute(v, (0, 2, 1, 3, 5, 4, 6, 7))
    return tl.reshape(v, (GR * W, ROWS, 32))


@triton.jit
def _index(ROWS: tl.constexpr, W: tl.constexpr, GR: tl.constexpr):
    """(row, first column within a step) of each piece of 8 bytes, int32 [GR*R*W*32]."""
    n = tl.arange(0, GR * ROWS * W * 4)
    row = (n // (32 * W)) % (ROWS // 8) * 8 + ((n >> 2) & 7)
    group = (n >> 5) % W * GR + n // (4 * W * ROWS)
    return row, group * 32 + (n & 3) * 8


@triton.jit
def _scales(code, GR: tl.constexpr):
    """Codes of each warp's GR groups, [W, N] -> fp32 [GR*W, N]."""
    if GR == 2:
        codes = tl.permute(tl.join(code & 0xFF, code >> 8), (2, 0, 1))
        code = tl.reshape(codes, (GR * code.shape[0], code.shape[1]))
    return ue8m0_decode(code)


@triton.jit(do_not_specialize=["T"])
def _few_coded_kernel(
    x,  # uint8 e4m3 [T, K], rows of whole 8-byte pieces
    x_s,  # uint8 [T, K/32], ue8m0
    w,  # uint8 e4m3 [N, K], rows of whole 8-byte pieces
    w_s,  # uint8 [ceil(N/32), K/32], ue8m0
    out,  # bf16 or fp32 [T, N]
    T,
    N,
    K,  # divisible by 32 * GR
    x_stride,
    xs_stride,
    w_stride,
    ws_stride,
    ROWS: tl.constexpr,  # at most 32
    W: tl.constexpr,
    GR: tl.constexpr,  # 1 or 2
    TOKENS: tl.constexpr,
    EVEN: tl.constexpr,  # every row exists, and every warp has whole steps
    NATIVE: tl.constexpr,
):
    STEP: tl.constexpr = 32 * GR * W
    first = tl.program_id(0) * ROWS
    row, column = _index(ROWS, W, GR)
    live = first + row < N
    pair = tl.arange(0, 2)[None, :]
    w_words = w.to(tl.pointer_type(tl.uint32)) + first.to(tl.int64) * (w_stride // 4)
    w_words += (row * (w_stride // 4) + column // 4)[:, None] + pair
    token, x_column = _index(TOKENS, W, GR)
    x_live = token < T
    x_words = (
        x.to(tl.pointer_type(tl.uint32)) + (token * (x_stride // 4) + x_column // 4)[:, None] + pair
    )
    codes = tl.uint8 if GR == 1 else tl.uint16  # the codes of one warp's step
    warp, t = tl.arange(0, W)[:, None], tl.arange(0, TOKENS)[None, :]
    x_codes = (x_s + t * xs_stride).to(tl.pointer_type(codes)) + warp
    w_codes = (w_s + first // 32 * ws_stride).to(tl.pointer_type(codes)) + warp
    s_column = warp * (32 * GR)

    a_next = _pieces(w_words, live, column, 0, K, EVEN)
    b_next = _pieces(x_words, x_live, x_column, 0, K, False)
    as_next = tl.load(w_codes, mask=s_column < K, other=0)
    bs_next = tl.load(x_codes, mask=(s_column < K) & (t < T), other=0)
    acc = tl.zeros((W, ROWS, TOKENS), tl.float32)
    for k in tl.range(0, K, STEP, num_stages=1):
        a_words, b_words = a_next, b_next
        w_words += STEP // 4
        x_words += STEP // 4
        a_next = _pieces(w_words, live, column, k + STEP, K, EVEN)
        b_next = _pieces(x_words, x_live, x_column, k + STEP, K, False)
        scale = _scales(as_next, GR) * _scales(bs_next, GR)
        inside = s_column + k + STEP < K
        x_codes += W
        w_codes += W
        as_next = tl.load(w_codes, mask=inside, other=0)
        bs_next = tl.load(x_codes, mask=inside & (t < T), other=0)
        a = _tile(a_words, ROWS, W, GR, NATIVE)
        b = _tile(b_words, TOKENS, W, GR, NATIVE)
        part = _dot(a, tl.permute(b, (0, 2, 1)), tl.zeros((GR * W, ROWS, TOKENS), tl.float32))
        part = tl.reshape(part * scale[:, None, :], (GR, W, ROWS, TOKENS))
        acc += tl.sum(part, axis=0)
    total = tl.sum(acc, axis=0)
    n = first + tl.arange(0, ROWS)[:, None]
    if out.dtype.element_ty == tl.bfloat16:
        total = to_bf16(total)
    tl.store(out + t.to(tl.int64) * N + n, total, mask=(n < N) & (t < T))


@triton.jit
def _pieces(pointers, live, column, k, K, EVEN: tl.constexpr):
    """Words [n, 2] of the step that starts at column k; 0 where there are none."""
    ok = column * 0 + k < K if EVEN else live & (column + k < K)
    return tl.load(pointers, mask=ok[:, None], other=0)
