"""Device functions that turn rows of mixes into pre, post and the doubly normalized comb.

A row of mixes is a tuple of (2+C)*C values, scalars or vectors over tokens: every Sinkhorn round
then stays within one thread. Its 39 dependent steps bound it, so the matrix itself is left alone:
with comb[j, k] = a[j, k] * r[j] * c[k], dividing every row by its sum plus eps means

    1 / r[j]  <-  sum_k a[j, k] * c[k] + eps / r[j]

and the same for columns: four sums and four reciprocals a step.
"""

# ruff: noqa: RUF005  (Triton's language has no unpacking into a tuple)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _reciprocals(x, C: tl.constexpr, NATIVE: tl.constexpr):
    """NATIVE: PTX, off by one unit in the last place at most; elsewhere a division."""
    out = ()
    for j in tl.static_range(C):
        if NATIVE:
            inverse = tl.inline_asm_elementwise(
                "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x[j]], tl.float32, is_pure=True, pack=1
            )
        else:
            inverse = 1.0 / x[j]
        out = out + (inverse,)
    return out


@triton.jit
def _sums(cells, factor, last, eps, C: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr):
    """For every j: eps * last[j] + sum_k cells[j * OUTER + k * INNER] * factor[k]."""
    out = ()
    for j in tl.static_range(C):
        total = eps * last[j]
        for k in tl.static_range(C):
            total = tl.fma(cells[j * OUTER + k * INNER], factor[k], total)
        out = out + (total,)
    return out


@triton.jit
def _softmax(cells, eps, C: tl.constexpr):
    """Softmax of every row, plus eps."""
    out = ()
    for j in tl.static_range(C):
        top = cells[j * C]
        for k in tl.static_range(1, C):
            top = tl.maximum(top, cells[j * C + k])
        row = ()
        total = 0.0
        for k in tl.static_range(C):
            row = row + (tl.exp(cells[j * C + k] - top),)
            total = total + row[k]
        inverse = 1.0 / total
        for k in tl.static_range(C):
            out = out + (row[k] * inverse + eps,)
    return out


@triton.jit
def sinkhorn(cells, eps, iters, C: tl.constexpr, NATIVE: tl.constexpr):
    """Softmax of rows, then columns and rows normalized in turn; columns `iters` times."""
    cells = _softmax(cells, eps, C)
    rows = ()  # 1 / r and 1 / c
    for _ in tl.static_range(C):
        rows = rows + (cells[0] * 0.0 + 1.0,)
    r = rows
    columns = _sums(cells, r, rows, eps, C, 1, C)
    c = _reciprocals(columns, C, NATIVE)
    for _ in range(1, iters):
        rows = _sums(cells, c, rows, eps, C, C, 1)
        r = _reciprocals(rows, C, NATIVE)
        columns = _sums(cells, r, columns, eps, C, 1, C)
        c = _reciprocals(columns, C, NATIVE)
    out = ()
    for j in tl.static_range(C):
        for k in tl.static_range(C):
            out = out + (cells[j * C + k] * r[j] * c[k],)
    return out


@triton.jit
def store_mixes(
    mixes, token, live, scale, base, pre, post, comb, eps, iters,
    C: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The mixes of tokens (a scalar or a vector) -> the three outputs, where live."""
    for k in tl.static_range(C):
        gate = mixes[k] * tl.load(scale) + tl.load(base + k)
        tl.store(pre + token * C + k, 1.0 / (1.0 + tl.exp(-gate)) + eps, mask=live)
        gate = mixes[C + k] * tl.load(scale + 1) + tl.load(base + C + k)
        tl.store(post + token * C + k, 2.0 / (1.0 + tl.exp(-gate)), mask=live)
    cells = ()
    for n in tl.static_range(C * C):
        value = mixes[2 * C + n] * tl.load(scale + 2) + tl.load(base + 2 * C + n)
        cells = cells + (value,)
    cells = sinkhorn(cells, eps, iters, C, NATIVE)
    for n in tl.static_range(C * C):
        tl.store(comb + token * (C * C) + n, cells[n], mask=live)
