"""Few tokens on NVIDIA's GPUs: write-back, collapse and dots without leaving registers.

A program takes 16 tokens and 32 of the D columns, one warp a copy of the stream. Its values are
loaded in the order in which the tensor cores' instructions want them, so that nothing moves
between threads but the collapse and the sums over warps. For that, the product is transposed
(fn is the left operand) and the 32 columns are multiplied in another order than they lie in
memory: a thread's 8 neighbours are split over both 16-column steps of both operands.

fn's rows, as bf16 parts high, middle and low of each (`tinfer.kernels._hc_mix`), fill five left
operands of 16 rows: rows 0 to 15 low, middle and high; rows 16 to 23 low above zeros, and high
above middle, whose two halves of the product are added.
"""

# ruff: noqa: RUF005  (Triton's language has no unpacking into a tuple)
from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

COPIES = gl.constexpr(4)
TOKENS = gl.constexpr(16)
COLUMNS = gl.constexpr(32)
WIDTH = gl.constexpr(32)  # of a row of partial results


@gluon.jit
def _top(x):
    """fp32 with all but the first 8 significant bits cut off: a bf16 value."""
    return (x.to(gl.uint32, bitcast=True) & 0xFFFF0000).to(gl.float32, bitcast=True)


@gluon.jit
def _to_bf16(x):
    """Pairs by one instruction, which the compiler cannot split and convert twice."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _to_fp32(x):
    bits = gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=r,r", [x],
        dtype=gl.int32, is_pure=True, pack=2,
    )  # fmt: skip
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _left(f, A: gl.constexpr):
    """[C, 512] as loaded -> the left operand [C, 16, K]; moves nothing."""
    f = f.to(gl.bfloat16).reshape([COPIES, 2, 8, 4, 2, 2, 2]).permute((0, 5, 2, 1, 4, 3, 6))
    return gl.convert_layout(f.reshape([COPIES, 16, COLUMNS]), A)


@gluon.jit
def _right(x, B: gl.constexpr):
    """[C, T, K] as loaded -> the right operand [C, K, T]; moves nothing."""
    x = x.reshape([COPIES, TOKENS, 4, 2, 2, 2]).permute((0, 3, 4, 2, 5, 1))
    return gl.convert_layout(x.reshape([COPIES, COLUMNS, TOKENS]), B)


@gluon.jit
def _fragments(fn, first, width: gl.constexpr, F: gl.constexpr):
    """fp32 [C, 512] twice: rows 0 to 15, and 16 to 23 with their copy; and where that copy is."""
    copy = gl.arange(0, COPIES, gl.SliceLayout(1, F))[:, None]
    at = gl.arange(0, 512, gl.SliceLayout(0, F))[None, :]
    # bits of `at`, low first: column 0, row 3, column 1, columns 3 and 4, rows 0 to 2, column 2
    column = at % 2 + at // 4 % 2 * 2 + at // 256 * 4 + at // 8 % 4 * 8
    row = at // 32 % 8
    second = at // 2 % 2
    at = fn + row * (COPIES * width) + copy * width + first + column
    rows = gl.load(at + second * (8 * COPIES * width))
    return rows, gl.load(at + 16 * COPIES * width), second == 1


@gluon.jit
def _dots(fn, value, first, width: gl.constexpr, F: gl.constexpr, M: gl.constexpr):
    """value [C, T, K] . fn^T: [C, 16, T] of fn's first rows and [C, 8, T] of the others."""
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    right = _right(value, gl.DotOperandLayout(1, M, 2))
    f, g, second = _fragments(fn, first, width, F)
    zero = gl.zeros((COPIES, 16, TOKENS), gl.float32, M)
    high = _top(f)
    middle = _top(f - high)
    dots = mma_v2(_left(f - high - middle, A), right, zero)
    dots = mma_v2(_left(middle, A), right, dots)
    dots = mma_v2(_left(high, A), right, dots)
    high = _top(g)
    middle = _top(g - high)
    others = mma_v2(_left(gl.where(second, 0.0, g - high - middle), A), right, zero)
    others = mma_v2(_left(gl.where(second, middle, high), A), right, others)
    return dots, gl.sum(others.reshape([COPIES, 2, 8, TOKENS]), axis=1)


@gluon.jit
def _store_sums(partial, values, stride: gl.constexpr, ROW: gl.constexpr, ROWS: gl.constexpr):
    """Sums over the copies of [C, ROWS, T] to rows of partial results, from column ROW on."""
    total = gl.sum(values, axis=0)
    L: gl.constexpr = total.type.layout
    row = gl.arange(0, ROWS, gl.SliceLayout(1, L))[:, None]
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, L))[None, :]
    gl.store(partial + token * stride + ROW + row, total)


@gluon.jit
def _store_row(partial, values, stride: gl.constexpr, ROW: gl.constexpr):
    gl.store(partial + gl.arange(0, TOKENS, values.type.layout) * stride + ROW, values)


@gluon.jit
def _collapse(value, pre, x, first_token, rows, first, width: gl.constexpr):
    """Store the collapse of [C, T, K], not yet normalized; its square sums [T]."""
    L: gl.constexpr = gl.BlockedLayout([4, 1, 4], [1, 4, 8], [1, 4, 1], [2, 1, 0])
    copy = gl.arange(0, COPIES, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None]
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :]
    weight = gl.load(pre + gl.minimum(token, rows - 1) * COPIES + copy)[:, :, None]
    product = _to_fp32(gl.convert_layout(value, L)) * weight
    even, odd = product.reshape([2, 2, TOKENS, COLUMNS]).permute((2, 3, 0, 1)).split()
    p0, p2 = even.split()
    p1, p3 = odd.split()
    total = _to_bf16(p0 + p1 + p2 + p3)
    S: gl.constexpr = total.type.layout
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(1, S))[:, None]
    column = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, S))[None, :]
    gl.store(x + token.to(gl.int64) * width + column, total, mask=token < rows)
    total = _to_fp32(total)
    return gl.sum(total * total, axis=1)


@gluon.jit(do_not_specialize=["rows"])
def _hc_few_kernel(
    y, stream, post, comb, pre, fn, new, x, partial, rows, width: gl.constexpr,
    POST: gl.constexpr, COLLAPSE: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    LANES: gl.constexpr = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 8, 0]], LANES, [[1, 0, 0], [2, 0, 0]], [],
        [COPIES, TOKENS, COLUMNS],
    )  # fmt: skip
    F: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 256]], [[0, 8], [0, 16], [0, 32], [0, 64], [0, 128]],
        [[1, 0], [2, 0]], [], [COPIES, 512],
    )  # fmt: skip
    M: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8]
    )
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    ranges: gl.constexpr = width // COLUMNS
    split = gl.program_id(0) % ranges
    tile = gl.program_id(0) // ranges
    first, first_token = split * COLUMNS, tile * TOKENS
    copy = gl.arange(0, COPIES, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None]
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :]
    inside = (token < rows)[:, :, None]
    token = gl.minimum(token, rows - 1)
    column = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(0, L)))[None, :]
    at = (token.to(gl.int64) * (COPIES * width) + copy * width)[:, :, None] + column[None, :, :]
    if POST:
        line = first_token + gl.arange(0, TOKENS, gl.SliceLayout(1, gl.SliceLayout(0, L)))
        line = gl.minimum(line, rows - 1).to(gl.int64)[:, None]
        output = gl.load(y + line * width + column)
        copies = ()
        for j in gl.static_range(COPIES):
            copies = copies + (gl.load(stream + (line * COPIES + j) * width + column),)
        total = gl.load(post + token * COPIES + copy)[:, :, None] * _to_fp32(output)[None, :, :]
        for j in gl.static_range(COPIES):
            mix = gl.load(comb + (token * COPIES + j) * COPIES + copy)[:, :, None]
            total += mix * _to_fp32(copies[j])[None, :, :]
        value = _to_bf16(total)
        gl.store(new + at, value, mask=inside)
    else:
        value = gl.load(stream + at)
    wide = _to_fp32(value)
    squares = gl.sum((wide * wide).reshape([COPIES, TOKENS, 4, 8]), axis=3)
    dots, others = _dots(fn, value, first, width, F, M)
    partial += first_token.to(gl.int64) * (ranges * WIDTH) + split * WIDTH
    _store_sums(partial, dots, ranges * WIDTH, 0, 16)
    _store_sums(partial, others, ranges * WIDTH, 16, 8)
    _store_row(partial, gl.sum(gl.sum(squares, axis=2), axis=0), ranges * WIDTH, 24)
    if COLLAPSE:
        square_x = _collapse(value, pre, x, first_token, rows, first, width)
        _store_row(partial, square_x, ranges * WIDTH, 25)


def few(
    stream: Tensor,
    fn: Tensor,
    partial: Tensor,
    written: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    collapsed: tuple[Tensor, Tensor] | None,
    chained: bool,
) -> None:
    """Launch: partial [T, D / 32, 32] is written, T up to a multiple of 16; new and x."""
    rows, _, width = stream.shape
    y, post, comb, new = written or (stream,) * 4
    pre, x = collapsed or (stream, stream)
    options = {"launch_pdl": True} if chained else {}
    _hc_few_kernel[((rows + 15) // 16 * (width // 32),)](
        y, stream, post, comb, pre, fn, new, x, partial, rows, width,
        POST=written is not None, COLLAPSE=collapsed is not None, CHAINED=chained,
        num_warps=4, enable_fp_fusion=False, **options,
    )  # fmt: skip
