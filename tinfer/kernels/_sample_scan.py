"""The kernel that collects the candidates around a row's cut, and sums up what lies before them.

The weights of each slice before the candidates are estimates, for the draw in `_sample_cut`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._masses import octaves_q24, slope_of, wants_cut
from tinfer.kernels._sample_slices import (
    HIGHEST,
    LOWEST,
    MASS,
    MEMBER_COUNT,
    MEMBERS,
    MISSED,
    MODE,
    SAMPLED,
    WHERE,
    await_previous,
    load_tile,
)


@triton.jit
def _append(x, column, q, highest, lowest, members):
    """`_collect` in PTX, by each thread for the columns it holds alone."""
    x_out, id_out, counter = members
    tl.inline_asm_elementwise(
        """{
        .reg .pred out;
        .reg .b32 at;
        .reg .b64 place;
        mov.b32 $0, 0;
        setp.gt.s32 out, $3, $4;
        setp.lt.or.s32 out, $3, $5, out;
        @out bra DONE;
        atom.relaxed.gpu.global.add.u32 at, [$8], 1;
        setp.ge.u32 out, at, $9;
        @out bra DONE;
        mad.wide.u32 place, at, 4, $6;
        st.global.b32 [place], $1;
        mad.wide.u32 place, at, 4, $7;
        st.global.b32 [place], $2;
        DONE:
        }""",
        "=r,r,r,r,r,r,l,l,l,r",
        [
            x.to(tl.int32, bitcast=True),
            column,
            q,
            highest,
            lowest,
            x_out.to(tl.int64),
            id_out.to(tl.int64),
            counter.to(tl.int64),
            MEMBERS,
        ],
        tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _collect(x, column, q, highest, lowest, members):
    """Append a slice's candidates of lowest..highest, in any order."""
    x_out, id_out, counter = members
    hit = (q <= highest) & (q >= lowest)
    at = tl.atomic_add(counter + tl.zeros_like(column), 1, mask=hit, sem="relaxed")
    hit = hit & (at < MEMBERS)
    tl.store(x_out + at, x, mask=hit)
    tl.store(id_out + at, column, mask=hit)


@triton.jit
def _scan_slice(x, column, top, slope, highest, lowest, members, DIRECT: tl.constexpr):
    """(estimated weight, count) of a slice's candidates above highest; those of lowest..highest
    are collected. DIRECT: no two threads hold the same column."""
    q = octaves_q24(x, top, slope)
    if DIRECT:
        _append(x, column, q, highest, lowest, members)
    else:
        _collect(x, column, q, highest, lowest, members)
    before = q > highest
    estimate = tl.sum(tl.where(before, tl.exp2((x - top) * slope), 0.0))
    return estimate, tl.sum(before.to(tl.int32))


@triton.jit
def _sample_scan_kernel(
    logits,  # fp32 | bf16 [B, V]
    temperature,  # fp32 [B]
    top_k,  # int32 [B]
    top_p,  # fp32 [B]
    part32,  # int32 [B, 3, SLICES]
    counters,  # int32 [B, 2]
    place32,  # int32 [B, 5]
    member_x,  # fp32 [B, MEMBERS]
    member_id,  # int32 [B, MEMBERS]
    estimates,  # fp32 [B, SLICES]
    record32,  # int32 [B, 6]
    record_x,  # fp32 [B, 2]
    stride,
    V,
    GROUPS: tl.constexpr,  # programs of a row
    DIRECT: tl.constexpr,
    CHAINED: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    await_previous(CHAINED)
    row = (tl.program_id(0) // GROUPS).to(tl.int64)
    is_cut = wants_cut(tl.load(top_k + row), tl.load(top_p + row), V)
    if is_cut & (tl.load(record32 + row * 6 + MODE) == SAMPLED):
        place = place32 + row * 5
        if tl.load(place + WHERE) != MISSED:
            highest, lowest = tl.load(place + HIGHEST), tl.load(place + LOWEST)
            source, top = logits + row * stride, tl.load(record_x + row * 2)
            slope = slope_of(tl.load(temperature + row))
            counter = counters + row * 2 + MEMBER_COUNT
            members = member_x + row * MEMBERS, member_id + row * MEMBERS, counter
            for s in range(tl.program_id(0) % GROUPS, SLICES, GROUPS):
                column = s * BLOCK + tl.arange(0, BLOCK)
                x = load_tile(source, column, V)
                estimate, count = _scan_slice(
                    x, column, top, slope, highest, lowest, members, DIRECT
                )
                tl.store(estimates + row * SLICES + s, estimate)
                tl.store(part32 + (row * 3 + MASS) * SLICES + s, count)
