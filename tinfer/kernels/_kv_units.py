"""Cache rows in registers, on their way into a cache: load, norm, rotation, group maxima.

A row is cut into units of PARTS * CHUNK channels. A thread holds a unit as a tuple of PARTS
tensors `[units, CHUNK]`, one 16-byte load each, and a unit is a group or part of one: so the
group's largest magnitude, its scale and the packing of its codes take no exchange between
threads. Only the norm's sum and groups wider than a unit cross threads.

`first` is the first channel of each unit. DP is DIM padded to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinfer.kernels._jit import INTERPRET, absmax, round_bf16, to_fp32
from tinfer.kernels._quant import divide, group_scale, round_to
from tinfer.kernels._round import round_bf16_packed


# ---------------------------------------------------------------- units of channels
@triton.jit
def inside(first, DIM: tl.constexpr, CHUNK: tl.constexpr):
    """Which channels of a chunk exist, [units, 1] or [units, CHUNK]."""
    if DIM % CHUNK == 0:
        mask = (first < DIM)[:, None]
    else:
        mask = first[:, None] + tl.arange(0, CHUNK)[None, :] < DIM
    return mask


@triton.jit
def load_parts(
    start, first, live, DIM: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The chunks of every unit as stored, zero beyond DIM; `start` points at a unit's row."""
    parts = ()
    for c in tl.static_range(PARTS):
        channel = first + c * CHUNK
        at = (start + channel)[:, None] + tl.arange(0, CHUNK)[None, :]
        mask = live[:, None]
        if DIM < DP:
            mask = mask & inside(channel, DIM, CHUNK)
        parts = parts + (tl.load(at, mask=mask, other=0.0),)  # noqa: RUF005
    return parts


@triton.jit
def _across(x, UNITS: tl.constexpr):
    """[UNITS * n] -> [n, UNITS]."""
    return tl.reshape(x, [x.shape[0] // UNITS, UNITS])


@triton.jit
def _to_units(x, UNITS: tl.constexpr):
    """[n], a value for each UNITS of the units -> [n * UNITS]."""
    return tl.reshape(tl.broadcast_to(x[:, None], [x.shape[0], UNITS]), [x.shape[0] * UNITS])


# ---------------------------------------------------------------- norm and rotation
@triton.jit
def norm_parts(
    parts, weights, eps, DIM: tl.constexpr, UNITS: tl.constexpr, PARTS: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """RMSNorm of rows of UNITS units with a weight, rounded to bf16."""
    squares = parts[0] * parts[0]
    for c in tl.static_range(1, PARTS):
        squares = tl.fma(parts[c], parts[c], squares)
    mean = tl.sum(_across(tl.sum(squares, axis=1), UNITS), axis=1) / DIM
    one = tl.full(mean.shape, 1.0, tl.float32)
    factor = _to_units(tl.div_rn(one, tl.sqrt_rn(mean + eps)), UNITS)[:, None]
    normed = ()
    for c in tl.static_range(PARTS):
        y = round_bf16_packed(to_fp32(weights[c]) * (parts[c] * factor), NATIVE)
        normed = normed + (y,)  # noqa: RUF005
    return normed


@triton.jit
def _turning(channel, DIM: tl.constexpr, DP: tl.constexpr, ROPE: tl.constexpr, CHUNK: tl.constexpr):
    """Which pairs of a chunk turn, [units, 1] or [units, CHUNK / 2]."""
    channel = channel[:, None]
    if DIM % CHUNK > 0 or ROPE % CHUNK > 0:
        channel = channel + 2 * tl.arange(0, CHUNK // 2)[None, :]
    turns = channel >= DIM - ROPE
    if DIM < DP:
        turns = turns & (channel < DIM)
    return turns


@triton.jit
def load_turns(
    cos_sin_ptr, position, first, live, stride, DIM: tl.constexpr, DP: tl.constexpr,
    ROPE: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """(cos, sin) of every part, fp32 [units, CHUNK / 2]; 1 and 0 where none turns."""
    start = cos_sin_ptr + position * stride
    coss, sins = (), ()
    for c in tl.static_range(PARTS):
        channel = first + c * CHUNK
        pair = (channel - (DIM - ROPE)) // 2
        at = (start + pair)[:, None] + tl.arange(0, CHUNK // 2)[None, :]
        mask = live[:, None] & _turning(channel, DIM, DP, ROPE, CHUNK)
        coss = coss + (tl.load(at, mask=mask, other=1.0),)  # noqa: RUF005
        sins = sins + (tl.load(at + ROPE // 2, mask=mask, other=0.0),)  # noqa: RUF005
    return coss, sins


@triton.jit
def rotate_parts(
    parts, coss, sins, first, DIM: tl.constexpr, DP: tl.constexpr, ROPE: tl.constexpr,
    PARTS: tl.constexpr, CHUNK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Turn the adjacent pairs of the last ROPE channels, rounded to bf16."""
    turned = ()
    for c in tl.static_range(PARTS):
        x = parts[c]
        even, odd = tl.split(tl.reshape(x, [x.shape[0], CHUNK // 2, 2]))
        cos, sin = coss[c], sins[c]
        y = tl.interleave(even * cos - odd * sin, even * sin + odd * cos)
        turns = _turning(first + c * CHUNK, DIM, DP, ROPE, CHUNK)
        if turns.shape[1] > 1:
            turns = tl.interleave(turns, turns)
        turned = turned + (tl.where(turns, round_bf16_packed(y, NATIVE), x),)  # noqa: RUF005
    return turned


# ---------------------------------------------------------------- casts
@triton.jit
def _largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _row_amax(x):
    """max |x| of [n, m] along its rows; a NaN gives NaN."""
    if INTERPRET:  # which takes long for a reduction of our own
        top = absmax(x, 1)
    else:  # an instruction less for each value
        top = tl.reduce(tl.abs(x), 1, _largest)
    return top


@triton.jit
def group_amax(parts, PARTS: tl.constexpr, UNITS: tl.constexpr):
    """max |x| over groups of UNITS units, for every unit; a NaN gives NaN."""
    top = _row_amax(parts[0])
    for c in tl.static_range(1, PARTS):
        top = _largest(top, _row_amax(parts[c]))
    if UNITS > 1:
        top = _to_units(_row_amax(_across(top, UNITS)), UNITS)
    return top


@triton.jit
def first_cast(
    parts, GROUP: tl.constexpr, SCALE: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """The e2m1 quantize-dequantize of `KVLayout.first`, rounded to bf16."""
    amax = group_amax(parts, PARTS, GROUP // (PARTS * CHUNK))
    _, scale, inverse = group_scale(amax, "e2m1", SCALE)
    scale, inverse = scale[:, None], inverse[:, None]
    cast = ()
    for c in tl.static_range(PARTS):
        value = round_to(divide(parts[c], scale, inverse, "e2m1", SCALE), "e2m1", NATIVE)
        cast = cast + (round_bf16(value * scale),)  # noqa: RUF005
    return cast
