"""References of the hyper-connections: mixes, collapse, write-back and the fused boundary.

The residual stream holds C copies of a token's hidden state, bf16 [T, C, D]. One row of mixes is
`[pre C | post C | comb C*C]`; `comb[j, k]` weighs source copy j in destination copy k.

Source: DeepSeek-V4.1-Flash `inference/model.py` (Block.hc_*) and `kernel.py` (hc_split_sinkhorn),
as described by the golden vectors `hc_*`; arXiv 2512.24880 (manifold-constrained connections).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinfer.compat.checks import require, require_dtype, require_shape
from tinfer.compat.norm_rope import check_rms_norm, rms_norm

Mixes = tuple[Tensor, Tensor, Tensor]


def mix_rows(copies: int) -> int:
    """Length of one row of mixes."""
    return (2 + copies) * copies


def _copies(op: str, mixes: Tensor) -> int:
    rows = mixes.shape[-1]
    copies = next((c for c in range(1, 17) if mix_rows(c) >= rows), 0)
    require(mix_rows(copies) == rows, op, "mixes", "[T, (2+C)*C]", list(mixes.shape))
    return copies


def _check_split(op: str, scale: Tensor, base: Tensor, copies: int, iters: int) -> None:
    for name, value, size in (("scale", scale, 3), ("base", base, mix_rows(copies))):
        require_dtype(op, name, value, torch.float32)
        require_shape(op, name, value, (size,))
    require(iters >= 1, op, "iters", ">= 1", iters)


def check_hc_split(mixes: Tensor, scale: Tensor, base: Tensor, hc_eps: float, iters: int) -> None:
    """Raise unless the arguments fit `hc_split`."""
    require_dtype("hc_split", "mixes", mixes, torch.float32)
    require_shape("hc_split", "mixes", mixes, ("T", "(2+C)*C"))
    _check_split("hc_split", scale, base, _copies("hc_split", mixes), iters)


def hc_split(mixes: Tensor, scale: Tensor, base: Tensor, hc_eps: float, iters: int) -> Mixes:
    """Split rows of mixes into pre, post and the doubly normalized comb (Sinkhorn).

    Args:
        mixes: fp32 [T, (2+C)*C].
        scale: fp32 [3], for pre, post and comb.
        base: fp32 [(2+C)*C].
        hc_eps: added to pre, to comb's softmax and to every Sinkhorn divisor.
        iters: Sinkhorn rounds; the first is softmax over rows, then columns.

    Returns:
        pre fp32 [T, C] = sigmoid + eps; post fp32 [T, C] = 2 * sigmoid; comb fp32 [T, C, C].

    Raises:
        TypeError, ValueError: wrong dtype, shape or iters < 1.

    Numerics: fp32 throughout, true divisions; rows = last dimension of comb.
    """
    check_hc_split(mixes, scale, base, hc_eps, iters)
    copies = _copies("hc_split", mixes)
    pre, post, comb = torch.split(mixes, [copies, copies, copies * copies], dim=-1)
    b_pre, b_post, b_comb = torch.split(base, [copies, copies, copies * copies])
    pre = torch.sigmoid(pre * scale[0] + b_pre) + hc_eps
    post = 2.0 * torch.sigmoid(post * scale[1] + b_post)
    comb = (comb * scale[2] + b_comb).reshape(len(mixes), copies, copies).softmax(-1) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    return pre, post, comb


def _check_stream(op: str, stream: Tensor) -> tuple[int, int, int]:
    require_dtype(op, "stream", stream, torch.bfloat16)
    require_shape(op, "stream", stream, ("T", "C", "D"))
    tokens, copies, dim = stream.shape
    return tokens, copies, dim


def check_hc_mix(
    stream: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    op: str = "hc_mix",
) -> None:
    """Raise unless the arguments fit `hc_mix`."""
    _, copies, dim = _check_stream(op, stream)
    require_dtype(op, "fn", fn, torch.float32)
    require_shape(op, "fn", fn, (mix_rows(copies), copies * dim))
    _check_split(op, scale, base, copies, iters)


def hc_mix(
    stream: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> Mixes:
    """Mixes of a sublayer from the stream before it.

    `m = (x . fn^T) * rsqrt(mean(x^2) + norm_eps)` with x the flattened C*D row, then `hc_split`.

    Args:
        stream: bf16 [T, C, D].
        fn: fp32 [(2+C)*C, C*D].
        scale, base, hc_eps, iters: as for `hc_split`.
        norm_eps: added to the mean square.

    Returns:
        pre fp32 [T, C], post fp32 [T, C], comb fp32 [T, C, C].

    Raises:
        TypeError, ValueError: wrong dtype or shape.

    Numerics: IEEE fp32 (never TF32); the reciprocal root is applied after the projection.
    """
    check_hc_mix(stream, fn, scale, base, norm_eps, hc_eps, iters)
    x = stream.flatten(1).float()
    mixes = torch.nn.functional.linear(x, fn) * torch.rsqrt(
        x.square().mean(-1, keepdim=True) + norm_eps
    )
    return hc_split(mixes, scale, base, hc_eps, iters)


def check_hc_collapse(stream: Tensor, pre: Tensor, op: str = "hc_collapse") -> None:
    """Raise unless the arguments fit `hc_collapse`."""
    tokens, copies, _ = _check_stream(op, stream)
    require_dtype(op, "pre", pre, torch.float32)
    require_shape(op, "pre", pre, (tokens, copies))


def hc_collapse(stream: Tensor, pre: Tensor) -> Tensor:
    """`sum_c pre[c] * stream[c]`: the sublayer's input before its norm.

    Args:
        stream: bf16 [T, C, D].
        pre: fp32 [T, C].

    Returns:
        bf16 [T, D].

    Raises:
        TypeError, ValueError: wrong dtype or shape.

    Numerics: fp32 products summed over ascending c, each rounded, one rounding to bf16.
    """
    check_hc_collapse(stream, pre)
    total = pre[:, :1] * stream[:, 0].float()
    for c in range(1, stream.shape[1]):
        total = total + pre[:, c, None] * stream[:, c].float()
    return total.to(torch.bfloat16)


def check_hc_collapse_norm(stream: Tensor, pre: Tensor, weight: Tensor | None, eps: float) -> None:
    """Raise unless the arguments fit `hc_collapse_norm`."""
    check_hc_collapse(stream, pre, "hc_collapse_norm")
    check_rms_norm(stream, weight, eps, "hc_collapse_norm")


def hc_collapse_norm(stream: Tensor, pre: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`rms_norm(hc_collapse(stream, pre), weight, eps)`.

    Args:
        stream: bf16 [T, C, D]. pre: fp32 [T, C]. weight: bf16 or fp32 [D] or None. eps: see
            `rms_norm`.

    Returns:
        bf16 [T, D].

    Raises:
        TypeError, ValueError: wrong dtype or shape.

    Numerics: the collapse is rounded to bf16 before the norm.
    """
    check_hc_collapse_norm(stream, pre, weight, eps)
    return rms_norm(hc_collapse(stream, pre), weight, eps)


def check_hc_pre(
    stream: Tensor,
    pre: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    weight: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> None:
    """Raise unless the arguments fit `hc_pre`."""
    check_hc_collapse(stream, pre, "hc_pre")
    check_rms_norm(stream, weight, norm_eps, "hc_pre")
    check_hc_mix(stream, fn, scale, base, norm_eps, hc_eps, iters, "hc_pre")


def hc_pre(
    stream: Tensor,
    pre: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    weight: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Enter a sublayer: its normed input and its mixes from one read of the stream.

    `x = hc_collapse_norm(stream, pre, weight, norm_eps)`,
    `pre', post', comb' = hc_mix(stream, fn, scale, base, norm_eps, hc_eps, iters)`.

    Args:
        stream: bf16 [T, C, D]. pre: fp32 [T, C], carried from the sublayer before.
        fn, scale, base, norm_eps, hc_eps, iters: as for `hc_mix`.
        weight: bf16 or fp32 [D] or None, the sublayer's input norm.

    Returns:
        x bf16 [T, D]; pre', post' fp32 [T, C]; comb' fp32 [T, C, C].

    Raises:
        TypeError, ValueError: wrong dtype or shape.

    Numerics: as the parts.
    """
    check_hc_pre(stream, pre, fn, scale, base, weight, norm_eps, hc_eps, iters)
    x = hc_collapse_norm(stream, pre, weight, norm_eps)
    return x, *hc_mix(stream, fn, scale, base, norm_eps, hc_eps, iters)


def check_hc_post(
    y: Tensor, stream: Tensor, post: Tensor, comb: Tensor, op: str = "hc_post"
) -> None:
    """Raise unless the arguments fit `hc_post`."""
    tokens, copies, dim = _check_stream(op, stream)
    require_dtype(op, "y", y, torch.bfloat16)
    require_shape(op, "y", y, (tokens, dim))
    for name, value, shape in (
        ("post", post, (tokens, copies)),
        ("comb", comb, (tokens, copies, copies)),
    ):
        require_dtype(op, name, value, torch.float32)
        require_shape(op, name, value, shape)


def hc_post(y: Tensor, stream: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Write a sublayer's output back: `new[k] = post[k]*y + sum_j comb[j,k]*stream[j]`.

    Args:
        y: bf16 [T, D]. stream: bf16 [T, C, D]. post: fp32 [T, C]. comb: fp32 [T, C, C].

    Returns:
        bf16 [T, C, D], a new tensor.

    Raises:
        TypeError, ValueError: wrong dtype or shape.

    Numerics: fp32, `post*y` first, then the sources in ascending order, every product and sum
        rounded (no fused multiply-add), one rounding to bf16.
    """
    check_hc_post(y, stream, post, comb)
    total = post[:, :, None] * y.float()[:, None]
    for j in range(stream.shape[1]):
        total = total + comb[:, j, :, None] * stream[:, j, None].float()
    return total.to(torch.bfloat16)


def check_hc_boundary(
    y: Tensor,
    stream: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    weight: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> None:
    """Raise unless the arguments fit `hc_boundary`."""
    op = "hc_boundary"
    check_hc_post(y, stream, post, comb, op)
    check_hc_collapse(stream, pre, op)
    check_rms_norm(stream, weight, norm_eps, op)
    check_hc_mix(stream, fn, scale, base, norm_eps, hc_eps, iters, op)


def hc_boundary(
    y: Tensor,
    stream: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    weight: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Everything between two sublayers: write-back, next input, next mixes.

    `new = hc_post(y, stream, post, comb)`, `x = hc_collapse_norm(new, pre, weight, norm_eps)`,
    `pre', post', comb' = hc_mix(new, fn, scale, base, norm_eps, hc_eps, iters)`.

    Args:
        y: bf16 [T, D], output of the sublayer that ends. stream: bf16 [T, C, D], before it.
        post, comb: fp32 [T, C] and [T, C, C], that sublayer's own mixes.
        pre: fp32 [T, C], produced by that sublayer's mixes, used for the next one's input.
        fn, scale, base: the next sublayer's parameters, as for `hc_mix`.
        weight: bf16 or fp32 [D], the next sublayer's input norm.
        norm_eps, hc_eps, iters: as for `hc_mix` and `rms_norm`.

    Returns:
        new bf16 [T, C, D]; x bf16 [T, D]; pre', post' fp32 [T, C]; comb' fp32 [T, C, C].

    Raises:
        TypeError, ValueError: wrong dtype or shape.

    Numerics: as the parts; norm, collapse and projection read the bf16-rounded `new`.
    """
    check_hc_boundary(y, stream, post, comb, pre, fn, scale, base, weight, norm_eps, hc_eps, iters)
    new = hc_post(y, stream, post, comb)
    x = hc_collapse_norm(new, pre, weight, norm_eps)
    return new, x, *hc_mix(new, fn, scale, base, norm_eps, hc_eps, iters)


def check_hc_expand(x: Tensor, copies: int) -> None:
    """Raise unless the arguments fit `hc_expand`."""
    require_dtype("hc_expand", "x", x, torch.bfloat16)
    require_shape("hc_expand", "x", x, ("T", "D"))
    require(copies >= 1, "hc_expand", "copies", ">= 1", copies)


def hc_expand(x: Tensor, copies: int) -> Tensor:
    """Start a stream: every copy is x.

    Args:
        x: bf16 [T, D]. copies: C.

    Returns:
        bf16 [T, C, D], contiguous.

    Raises:
        TypeError, ValueError: wrong dtype or shape, copies < 1.
    """
    check_hc_expand(x, copies)
    return x[:, None].expand(-1, copies, -1).contiguous()


def check_hc_mean(stream: Tensor) -> None:
    """Raise unless the argument fits `hc_mean`."""
    _check_stream("hc_mean", stream)


def hc_mean(stream: Tensor) -> Tensor:
    """Mean over the copies: the draft heads' tap of a layer's input.

    Args:
        stream: bf16 [T, C, D].

    Returns:
        bf16 [T, D].

    Raises:
        TypeError, ValueError: wrong dtype or shape.

    Numerics: fp32 sum over ascending c, divided by C, one rounding to bf16.
    """
    check_hc_mean(stream)
    total = stream[:, 0].float()
    for c in range(1, stream.shape[1]):
        total = total + stream[:, c].float()
    return (total / stream.shape[1]).to(torch.bfloat16)
