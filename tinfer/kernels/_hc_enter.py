"""One pass over a token's stream: write-back, collapse and norm.

    new[k] = post[k] * y + sum_j comb[j, k] * stream[j]     (with POST; else new = stream)
    x      = rms_norm(bf16(sum_k pre[k] * new[k]), weight)

One program takes one token, block of columns by block; the collapse stays in registers until its
square sum is known, so that everything is read and written once. Compiled without fused
multiply-add: new equals the reference bit for bit.
"""

# ruff: noqa: RUF005  (Triton's language has no unpacking into a tuple)
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tinfer.kernels._call import MAX_PROGRAMS
from tinfer.kernels._jit import to_fp32
from tinfer.kernels._round import pairs_to_bf16, pairs_to_fp32
from tinfer.kernels._target import target

MAX_WIDTH = 16384  # columns of a collapse that one program still holds in registers


@triton.jit
def _read(x, at, mask, NATIVE: tl.constexpr):
    return pairs_to_fp32(tl.load(x + at, mask=mask, other=0.0), NATIVE)


@triton.jit(do_not_specialize=["rows"])
def _hc_enter_kernel(
    y, stream, post, comb, pre, weight, new, x, rows, width, eps,
    C: tl.constexpr, POST: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(i, tl.int64)
        post_k, comb_jk, pre_k = (), (), ()
        for k in tl.static_range(C):
            pre_k = pre_k + (tl.load(pre + row * C + k),)
            if POST:
                post_k = post_k + (tl.load(post + row * C + k),)
                for j in tl.static_range(C):
                    comb_jk = comb_jk + (tl.load(comb + (row * C + k) * C + j),)
        first = row * (C * width)
        squares = tl.zeros((BLOCK,), tl.float32)
        collapse = ()
        for block in tl.static_range(BLOCKS):
            column = block * BLOCK + tl.arange(0, BLOCK)
            inside = column < width
            copies = ()
            for j in tl.static_range(C):
                copies = copies + (_read(stream, first + j * width + column, inside, NATIVE),)
            if POST:
                output = _read(y, row * width + column, inside, NATIVE)
            for k in tl.static_range(C):
                value = copies[k]
                if POST:
                    value = post_k[k] * output
                    for j in tl.static_range(C):
                        value += comb_jk[j * C + k] * copies[j]
                    half = pairs_to_bf16(value, NATIVE)
                    tl.store(new + first + k * width + column, half, mask=inside)
                    value = pairs_to_fp32(half, NATIVE)
                part = pre_k[k] * value if k == 0 else part + pre_k[k] * value  # noqa: F821
            half = pairs_to_bf16(part, NATIVE)
            part = pairs_to_fp32(half, NATIVE)
            squares += part * part
            collapse = collapse + (half,)
        rstd = tl.rsqrt(tl.sum(squares, axis=0) / width + eps)
        for block in tl.static_range(BLOCKS):
            column = block * BLOCK + tl.arange(0, BLOCK)
            value = pairs_to_fp32(collapse[block], NATIVE) * rstd
            if HAS_WEIGHT:
                value = to_fp32(tl.load(weight + column, mask=column < width, other=0.0)) * value
            out = pairs_to_bf16(value, NATIVE)
            tl.store(x + row * width + column, out, mask=column < width)


def _enter_tiles(width: int) -> tuple[int, int]:
    """(columns of a block, warps): 8 columns a thread and copy."""
    block = min(1024, max(32, triton.next_power_of_2(width)))
    return block, max(1, block // 256)


def enter(
    stream: Tensor,
    pre: Tensor,
    weight: Tensor | None,
    eps: float,
    x: Tensor,
    written: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Launch: x is written; `written` is (y, post, comb, new)."""
    rows, copies, width = stream.shape
    y, post, comb, new = written or (stream,) * 4
    block, warps = _enter_tiles(width)
    _hc_enter_kernel[(min(rows, MAX_PROGRAMS),)](
        y, stream, post, comb, pre, stream if weight is None else weight, new, x,
        rows, width, eps, C=copies, POST=written is not None,
        HAS_WEIGHT=weight is not None, BLOCKS=triton.cdiv(width, block), BLOCK=block,
        NATIVE=target(stream.device).native_e4m3, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
