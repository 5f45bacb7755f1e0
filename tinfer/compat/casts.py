"""Quantizing casts of activations: per group along the last dimension, per 2-D block, and back.

Values are e4m3 (one byte) or e2m1 (two a byte, even column in the low nibble). A group's scale is
derived from its largest magnitude `a`, never below a floor that keeps all-zero groups finite, with
`top` = 448 for e4m3 and 6 for e2m1:

    scale_fmt        stored as                 scale                         floor of a
    "ue8m0"          uint8                     2^ceil(log2(a*fp32(1/top)))   1e-4 or 6*2^-126
    "ue8m0_packed"   int32, 4 bytes, low first the same                      the same
    "fp32_pow2"      fp32                      the same                      the same
    "fp32"           fp32                      a * fp32(1/top)               the same
    "e4m3"           uint8                     e4m3(a / top), true division  top * 2^-9

ceil(log2) works on the exponent bits, so an exact power of two is not bumped. Values are
`encode(x / scale)` with the scale as stored, by true division, to nearest with ties to even codes,
saturating; zero keeps its sign. A NaN in a group makes the whole group NaN: its scale and, in
e4m3, all its codes (e2m1 has no NaN: its codes become +6). So does an infinity, but under an e4m3
scale, which saturates at 448 like the values.

Packed scales follow the last dimension; missing bytes of the last word are zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinfer.formats import (
    E2M1_AMAX_FLOOR,
    E2M1_AMAX_FLOOR_E4M3,
    E2M1_MAX,
    E4M3_AMAX_FLOOR,
    E4M3_MAX,
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    encode_e2m1,
    encode_e4m3,
    encode_ue8m0,
    pack_e2m1,
    unpack_e2m1,
)

FORMATS = ("e4m3", "e2m1")
SCALE_FORMATS = ("ue8m0", "ue8m0_packed", "fp32_pow2", "fp32", "e4m3")
GROUPS = (16, 32, 64, 128)
BLOCKS = (32, 128)
TMA_ALIGNMENT = 16  # bytes between the columns of a column-major scale tensor


# ---------------------------------------------------------------- argument checks
def _check_one_of(op: str, name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{op}: {name} must be one of {allowed}, got {value!r}")


def _check_float(op: str, name: str, x: Tensor) -> None:
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"{op}: {name} must be bfloat16 or float32, got {x.dtype}")


def _columns(op: str, name: str, x: Tensor) -> int:
    if x.dim() == 0:
        raise ValueError(
            f"{op}: {name} must have at least one dimension, got a 0-dimensional tensor"
        )
    return x.shape[-1]


def check_group_formats(op: str, fmt: str, group: int, scale_fmt: str, columns: int) -> None:
    _check_one_of(op, "fmt", fmt, FORMATS)
    _check_one_of(op, "group", group, GROUPS)
    _check_one_of(op, "scale_fmt", scale_fmt, SCALE_FORMATS)
    if columns % group:
        raise ValueError(f"{op}: x must have a multiple of {group} columns, got {columns}")


def check_per_token_cast(x: Tensor, fmt: str, group: int, scale_fmt: str, col_major: bool) -> None:
    op = "per_token_cast"
    _check_float(op, "x", x)
    check_group_formats(op, fmt, group, scale_fmt, _columns(op, "x", x))
    if col_major and x.dim() != 2:
        raise ValueError(f"{op}: x must be 2-D for column-major scales, got {tuple(x.shape)}")


def check_fake_quant_(x: Tensor, fmt: str, group: int, scale_fmt: str) -> None:
    _check_float("fake_quant_", "x", x)
    columns = _columns("fake_quant_", "x", x)
    check_group_formats("fake_quant_", fmt, group, scale_fmt, columns)


def scale_dtype(scale_fmt: str) -> torch.dtype:
    """The dtype that scales of this format are stored in."""
    if scale_fmt == "ue8m0_packed":
        return torch.int32
    return torch.float32 if scale_fmt.startswith("fp32") else torch.uint8


def scale_columns(groups: int, scale_fmt: str) -> int:
    """Stored columns for `groups` scales: four a word when packed."""
    return -(-groups // 4) if scale_fmt == "ue8m0_packed" else groups


def check_cast_back(
    q: Tensor, s: Tensor, fmt: str, group: int, scale_fmt: str, dtype: torch.dtype
) -> None:
    op = "cast_back"
    _check_one_of(op, "fmt", fmt, FORMATS)
    if q.dtype != torch.uint8:
        raise TypeError(f"{op}: q must be uint8, got {q.dtype}")
    columns = _columns(op, "q", q) * (2 if fmt == "e2m1" else 1)
    check_group_formats(op, fmt, group, scale_fmt, columns)
    if s.dtype != scale_dtype(scale_fmt):
        raise TypeError(f"{op}: s must be {scale_dtype(scale_fmt)} for {scale_fmt}, got {s.dtype}")
    want = (*q.shape[:-1], scale_columns(columns // group, scale_fmt))
    if s.shape != want:
        raise ValueError(f"{op}: s must have shape {want}, got {tuple(s.shape)}")
    if dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"{op}: dtype must be bfloat16 or float32, got {dtype}")


def check_per_block_cast(x: Tensor, block: tuple[int, int], scale_fmt: str) -> None:
    op = "per_block_cast"
    _check_float(op, "x", x)
    if x.dim() != 2:
        raise ValueError(f"{op}: x must be 2-D, got {tuple(x.shape)}")
    for side in block:
        _check_one_of(op, "block sides", side, BLOCKS)
    _check_one_of(op, "scale_fmt", scale_fmt, ("ue8m0", "ue8m0_packed", "fp32_pow2", "fp32"))


# ---------------------------------------------------------------- scales
def amax_floor(fmt: str, scale_fmt: str) -> float:
    """The smallest amax that a scale is derived from."""
    if fmt == "e4m3":
        return E4M3_MAX * 2.0**-9 if scale_fmt == "e4m3" else E4M3_AMAX_FLOOR
    return E2M1_AMAX_FLOOR_E4M3 if scale_fmt == "e4m3" else E2M1_AMAX_FLOOR


def _scale(amax: Tensor, fmt: str, scale_fmt: str) -> tuple[Tensor, Tensor]:
    """Scales as stored (unpacked) and their values in fp32, from fp32 amax."""
    top = E4M3_MAX if fmt == "e4m3" else E2M1_MAX
    amax = amax.clamp(min=amax_floor(fmt, scale_fmt))
    if scale_fmt == "e4m3":
        # By a tensor: on some devices torch divides by a number through its reciprocal.
        code = encode_e4m3(amax / torch.full_like(amax, top))
        return code, decode_e4m3(code)
    amax = amax.masked_fill(amax.isinf(), float("nan"))
    scale = amax * torch.tensor(1.0 / top, dtype=torch.float32, device=amax.device)
    if scale_fmt == "fp32":
        return scale, scale
    code = encode_ue8m0(scale)
    value = decode_ue8m0(code)
    return (value, value) if scale_fmt == "fp32_pow2" else (code, value)


def pack_ue8m0(code: Tensor) -> Tensor:
    """bytes [..., n] -> int32 [..., ceil(n/4)], the first byte lowest; missing bytes are zero."""
    padded = torch.nn.functional.pad(code, (0, -code.shape[-1] % 4))
    return padded.contiguous().view(torch.int32)


def unpack_ue8m0(packed: Tensor, count: int) -> Tensor:
    """int32 [..., n] -> bytes [..., count]."""
    return packed.contiguous().view(torch.uint8)[..., :count]


def _column_major(s: Tensor) -> Tensor:
    """A copy of [T, n] whose columns are contiguous and start TMA-aligned, padding zero."""
    rows, columns = s.shape
    aligned = -(-rows // (unit := TMA_ALIGNMENT // s.element_size())) * unit
    storage = s.new_zeros(columns, aligned)
    storage[:, :rows] = s.T
    return storage.as_strided((rows, columns), (1, aligned))


# ---------------------------------------------------------------- the casts
def per_token_cast(
    x: Tensor, fmt: str, group: int, scale_fmt: str, col_major: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantize groups of `group` columns, each with its own scale.

    Args:
        x: bf16 or fp32 [..., K], K a multiple of `group`.
        fmt: "e4m3" or "e2m1".
        group: 16, 32, 64 or 128.
        scale_fmt: see the module's table.
        col_major: 2-D x only; the scales are stored column after column, each column padded to
            16 bytes with zeros (stride (1, align(T))).
    Returns:
        q uint8 [..., K] (e4m3) or [..., K/2] (e2m1, packed); s [..., K/group], or int32
        [..., ceil(K/group/4)] when packed.
    Raises:
        ValueError for a shape or format, TypeError for a dtype.
    Numerics:
        Exact: module docstring. The release's activation cast is ("e4m3", 32, "ue8m0"), its index
        queries and keys ("e2m1", 32, "ue8m0"), its compressed KV ("e2m1", 16, "e4m3").
    Source: the release's act_quant and fp4_act_quant (golden vectors).
    """
    check_per_token_cast(x, fmt, group, scale_fmt, col_major)
    q, s = _quantize(x, fmt, group, scale_fmt)
    if scale_fmt == "ue8m0_packed":
        s = pack_ue8m0(s)
    return q, _column_major(s) if col_major else s


def _quantize(x: Tensor, fmt: str, group: int, scale_fmt: str) -> tuple[Tensor, Tensor]:
    groups = x.float().unflatten(-1, (x.shape[-1] // group, group))
    stored, scale = _scale(groups.abs().amax(-1), fmt, scale_fmt)
    scaled = (groups / scale[..., None]).flatten(-2)
    return (encode_e4m3(scaled) if fmt == "e4m3" else pack_e2m1(encode_e2m1(scaled))), stored


def _decode_scale(s: Tensor, scale_fmt: str, groups: int) -> Tensor:
    if scale_fmt.startswith("fp32"):
        return s
    if scale_fmt == "e4m3":
        return decode_e4m3(s)
    return decode_ue8m0(unpack_ue8m0(s, groups) if scale_fmt == "ue8m0_packed" else s)


def cast_back(
    q: Tensor, s: Tensor, fmt: str, group: int, scale_fmt: str, dtype: torch.dtype
) -> Tensor:
    """The values that `per_token_cast` stored: value * scale.

    Args:
        q: uint8 [..., K] or [..., K/2] packed.
        s: the scales, row- or column-major, in the dtype of `scale_fmt`.
        fmt, group, scale_fmt: as in `per_token_cast`.
        dtype: torch.bfloat16 or torch.float32.
    Returns:
        [..., K] in `dtype`.
    Numerics:
        One fp32 product, rounded once to bf16; exact except for "fp32" scales. A ue8m0 code of 0
        is 2^-127.
    """
    check_cast_back(q, s, fmt, group, scale_fmt, dtype)
    value = decode_e4m3(q) if fmt == "e4m3" else decode_e2m1(unpack_e2m1(q))
    groups = value.shape[-1] // group
    scale = _decode_scale(s, scale_fmt, groups)
    out: Tensor = (value.unflatten(-1, (groups, group)) * scale[..., None]).flatten(-2).to(dtype)
    return out


def fake_quant_(x: Tensor, fmt: str, group: int, scale_fmt: str) -> None:
    """Round x in place to what `per_token_cast` and `cast_back` make of it.

    Args:
        x: bf16 or fp32 [..., K], any strides; the other arguments as in `per_token_cast`.
    Numerics:
        x <- round(value * scale), exact in bf16 for every scale format but "fp32".
    Source: the release's in-place act_quant and fp4_act_quant (golden vectors).
    """
    check_fake_quant_(x, fmt, group, scale_fmt)
    q, s = _quantize(x, fmt, group, scale_fmt)
    if scale_fmt == "ue8m0_packed":
        s = pack_ue8m0(s)
    x.copy_(cast_back(q, s, fmt, group, scale_fmt, x.dtype))


def per_block_cast(x: Tensor, block: tuple[int, int], scale_fmt: str) -> tuple[Tensor, Tensor]:
    """Quantize a matrix to e4m3 with one scale per block.

    Args:
        x: bf16 or fp32 [M, K]; blocks at the lower and right edge may be partial.
        block: rows and columns of a block, each 32 or 128.
        scale_fmt: "ue8m0", "ue8m0_packed" (along K), "fp32_pow2" or "fp32".
    Returns:
        q uint8 [M, K]; s [ceil(M/rows), ceil(K/columns)], a quarter of the columns when packed.
    Numerics:
        As `per_token_cast`, the maximum taken over a block.
    """
    check_per_block_cast(x, block, scale_fmt)
    (m, k), (bm, bk) = x.shape, block
    padded = torch.nn.functional.pad(x.float(), (0, -k % bk, 0, -m % bm))
    tiles = padded.unflatten(1, (-1, bk)).unflatten(0, (-1, bm))  # [M/bm, bm, K/bk, bk]
    stored, scale = _scale(tiles.abs().amax((1, 3)), "e4m3", scale_fmt)
    q = encode_e4m3((tiles / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:m, :k])
    return q, pack_ue8m0(stored) if scale_fmt == "ue8m0_packed" else stored
