"""Cases of the sparse latent attention: layouts, list shapes, edges, and the model's own sizes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tinfer.compat.kv_cache import load_kv, write_rows
from tinfer.kv_layout import KVLayout
from tinfer.testing.cases import Anchor, Arguments, Case
from tinfer.testing.compare import BF16_EPS, FP32_EPS, errors

Make = Callable[[torch.Generator], Arguments]
ORACLE_ROWS = 48  # rows that the fp64 oracle checks element by element


# ---------------------------------------------------------------- arguments
def filled(layout: KVLayout, rows: int, g: torch.Generator) -> Tensor:
    """A cache whose first `rows` rows hold normal deviates; what is beyond them is not zero."""
    pages = layout.pages(rows)
    cache = layout.allocate(pages, g.device).random_(generator=g)
    x = torch.randn(rows, layout.dim, generator=g, device=g.device).to(torch.bfloat16)
    write_rows(x, torch.arange(rows, device=g.device), cache, layout)
    return cache


def slots(g: torch.Generator, tokens: int, width: int, rows: int, holes: bool) -> Tensor:
    """int32 [tokens, width]; with `holes` about every fifth is -1, anywhere in the row."""
    low = -(rows // 4) if holes else 0
    chosen = torch.randint(low, rows, (tokens, width), generator=g, device=g.device)
    return chosen.clamp(min=-1).to(torch.int32)


def call(
    tokens: int,
    heads: int,
    window: KVLayout,
    width: int,
    compressed: KVLayout | None = None,
    selected: int = 0,
    *,
    rows: int = 40,
    pool: int | None = None,
    value_dim: int | None = None,
    sink: bool = True,
    holes: bool = True,
) -> Make:
    """A call on random rows; the caches have `rows` and `pool` rows."""

    def make(g: torch.Generator) -> Arguments:
        q = torch.randn(tokens, heads, window.dim, generator=g, device=g.device)
        second = pool or rows
        return {
            "q": q.to(torch.bfloat16),
            "window_cache": filled(window, rows, g),
            "window_layout": window,
            "window_slots": slots(g, tokens, width, rows, holes),
            "compressed_cache": None if compressed is None else filled(compressed, second, g),
            "compressed_layout": compressed,
            "compressed_slots": None
            if compressed is None
            else slots(g, tokens, selected, second, holes),
            "sink": torch.randn(heads, generator=g, device=g.device) if sink else None,
            "scale": window.dim**-0.5,
            "window_lengths": None,
            "compressed_lengths": None,
            "value_dim": value_dim,
        }

    return make


def changed(make: Make, change: Callable[[Arguments, torch.Generator], Arguments]) -> Make:
    """The same call with some arguments replaced."""

    def again(g: torch.Generator) -> Arguments:
        arguments = make(g)
        return arguments | change(arguments, g)

    return again


def _lengths(a: Arguments, g: torch.Generator) -> Arguments:
    tokens, width = a["window_slots"].shape
    selected = a["compressed_slots"].shape[1]
    count = torch.arange(tokens, device=g.device, dtype=torch.int32)
    return {
        "window_lengths": (count * 7) % (width + 2),
        "compressed_lengths": (count * 13) % (selected + 2) - 1,
    }


def _no_keys(a: Arguments, g: torch.Generator) -> Arguments:
    given = a["window_slots"].clone()
    given[1:] = -1
    return {"window_slots": given}


def _strided(a: Arguments, g: torch.Generator) -> Arguments:
    """Queries out of a wider projection, lists out of wider ones, caches of one layer of three."""
    q = a["q"]
    wide = torch.zeros(len(q), q.shape[1] + 1, q.shape[2] + 16, dtype=q.dtype, device=q.device)
    wide[:, 1:, 16:] = q
    out: Arguments = {"q": wide[:, 1:, 16:]}
    for name in ("window", "compressed"):
        cache, listed = a[f"{name}_cache"], a[f"{name}_slots"]
        pool = torch.full((len(cache), 3, cache.shape[1]), 255, dtype=torch.uint8, device=q.device)
        pool[:, 1] = cache
        out[f"{name}_cache"] = pool[:, 1]
        out[f"{name}_slots"] = torch.cat([listed + 1, listed], 1)[:, listed.shape[1] :]
    return out


def _poisoned(a: Arguments, g: torch.Generator) -> Arguments:
    """Slot 0 and everything unlisted hold NaN; the lists never name slot 0."""
    out: Arguments = {}
    for name in ("window", "compressed"):
        cache, layout, listed = (a[f"{name}_{k}"] for k in ("cache", "layout", "slots"))
        listed = torch.where(listed == 0, 1, listed)
        data = cache.clone().fill_(255)
        used = torch.unique(listed[listed > 0].long())
        write_rows(load_kv(cache, layout, used), used, data, layout)
        out |= {f"{name}_cache": data, f"{name}_slots": listed}
    return out


# ---------------------------------------------------------------- comparison
def oracle(a: Arguments, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """fp64 (out, bound of its error, max_logit, lse) of some rows of a call.

    The bound adds what the declared numerics may cost, relative to the attention over |v|:
    probabilities rounded to bf16 and a result rounded to bf16, one half ulp each; a logit's fp32
    dot product over D channels is off by at most D half ulps of scale * sum |q k|, which moves
    its probability by as much; sums over K probabilities by K half ulps.
    """
    keys, listed = [], []
    for name in ("window", "compressed"):
        cache, layout, chosen = (a[f"{name}_{k}"] for k in ("cache", "layout", "slots"))
        if cache is None:
            continue
        chosen, limit = chosen[rows], a[f"{name}_lengths"]
        valid = (chosen >= 0) & (chosen < cache.shape[0] * layout.page_size)
        if limit is not None:
            valid &= torch.arange(chosen.shape[1], device=chosen.device) < limit[rows, None]
        kept = torch.where(valid, chosen, -1)
        keys.append(load_kv(cache, layout, kept).double())
        listed.append(valid)
    kv, valid = torch.cat(keys, 1), torch.cat(listed, 1)[:, None, :]
    q, scale = a["q"][rows].double(), a["scale"]
    logits = (torch.einsum("thd,tkd->thk", q, kv) * scale).masked_fill(~valid, -torch.inf)
    spread = torch.einsum("thd,tkd->thk", q.abs(), kv.abs()) * abs(scale)
    floor = logits.new_full((*logits.shape[:2], 1), -torch.inf)
    top = torch.cat([logits, floor], -1).amax(-1)
    shift = torch.where(top.isneginf(), 0.0, top)[..., None]
    p = torch.exp(logits - shift)
    total = p.sum(-1, keepdim=True)
    lse = (torch.log2(total) + shift / math.log(2.0))[..., 0]
    if a["sink"] is not None:
        total = total + torch.exp(a["sink"].double()[:, None] - shift)
    weight = torch.where(total == 0, 0.0, p / total)
    value = kv[..., : a["value_dim"] or kv.shape[-1]]
    out = torch.einsum("thk,tkd->thd", weight, value)
    dots = q.shape[-1] + kv.shape[1] + 8
    slack = weight * (BF16_EPS + FP32_EPS * dots * (1 + spread))
    bound = torch.einsum("thk,tkd->thd", slack, value.abs()) + BF16_EPS * out.abs()
    return out, bound * 1.01 + 1e-37, top, lse


def compare(actual: object, expected: object, a: Arguments) -> None:
    """Shapes as the reference's; sampled rows within the oracle's bound; the rest in norm."""
    assert isinstance(actual, tuple)
    assert isinstance(expected, tuple)
    for name, x, e in zip(("out", "max_logit", "lse"), actual, expected, strict=True):
        assert (x.shape, x.dtype) == (e.shape, e.dtype), f"{name}: {x.shape} {x.dtype}"
    tokens = len(expected[0])
    if not tokens:
        return
    # Two results that each took a rounding of p and of the output, and fp32 logits.
    for name, limit, x, e in zip(
        ("out", "max", "lse"), (2 * BF16_EPS, 1e-5, 1e-5), actual, expected, strict=True
    ):
        l2, _ = errors(x, e)
        assert l2 <= limit, f"{name}: rel_l2 {l2:.2e} (<= {limit:.2e})"
    step = -(-tokens // ORACLE_ROWS)
    rows = torch.arange(0, tokens, step, device=expected[0].device)
    want, bound, top, lse = oracle(a, rows)
    worst = ((actual[0][rows].double() - want).abs() / bound).amax().item()
    assert worst <= 1, f"out: {worst:.2f} times the bound"
    for name, x, e in (("max_logit", actual[1], top), ("lse", actual[2], lse)):
        l2, highest = errors(x[rows], e)
        assert max(l2, highest) <= 1e-5, f"{name}: {l2:.2e}, {highest:.2e}"


# ---------------------------------------------------------------- the list
def _flops(a: Arguments) -> float:
    tokens, heads, dim = a["q"].shape
    width = a["window_slots"].shape[1]
    if a["compressed_slots"] is not None:
        width += a["compressed_slots"].shape[1]
    return 2.0 * tokens * heads * width * (dim + (a["value_dim"] or dim))


def _bytes(a: Arguments) -> int:
    tokens, heads, dim = a["q"].shape
    total = tokens * heads * (2 * dim + 2 * (a["value_dim"] or dim) + 8)
    for name in ("window", "compressed"):
        cache, layout, listed = (a[f"{name}_{k}"] for k in ("cache", "layout", "slots"))
        if cache is not None:
            rows = min(listed.numel(), cache.shape[0] * layout.page_size)
            total += rows * layout.row_bytes + 4 * listed.numel()
    return total


def _small() -> dict[str, Make]:
    bf16, fp8, fp4 = KVLayout.rows_bf16, KVLayout.window_fp8, KVLayout.compressed_fp4
    packed = call(3, 4, fp8(64, 16), 20, fp4(64, 16), 30)
    split = KVLayout(64, "e4m3", 32, "ue8m0", 5, interleaved=False, page_align=512)
    return {
        "bf16-64": call(2, 4, bf16(64), 20),
        "bf16-96-pages": call(2, 5, bf16(96, 4), 9, bf16(96), 70, sink=False),
        "packed-64": packed,
        "packed-128-page3": call(1, 3, fp8(128, 3), 12, fp4(128, 5), 20),
        "block-split": call(2, 4, split, 20, KVLayout.compressed_fp8(64, 16), 8),
        "mixed": call(2, 4, bf16(64, 8), 20, fp4(64, 256), 8, rows=300),
        "dim576-value512": call(1, 3, bf16(576), 12, value_dim=512),
        "packed-192-value128": call(1, 3, fp8(192, 16), 12, fp4(192, 16), 9, value_dim=128),
        "heads70": call(1, 70, bf16(64), 5),
        "splits": call(1, 4, fp8(64, 16), 128, fp4(64, 16), 70),
        "splits-empty": changed(call(1, 4, bf16(64), 130, bf16(64), 70), _first_only),
        "lengths": changed(call(5, 4, fp8(64, 16), 20, fp4(64, 16), 30), _lengths),
        "no-keys": changed(call(3, 4, bf16(64), 8), _no_keys),
        "strided": changed(packed, _strided),
        "poisoned": changed(packed, _poisoned),
        "huge-logits": changed(call(2, 4, bf16(64), 20), lambda a, g: {"scale": 30.0}),
        "no-tokens": call(0, 4, fp8(64, 16), 20, fp4(64, 16), 30),
        "no-width": call(2, 4, bf16(64), 0, bf16(64), 0),
    }


def _first_only(a: Arguments, g: torch.Generator) -> Arguments:
    """Only the first entries name a slot, so later splits hold none."""
    given = a["window_slots"].clone()
    given[:, 6:] = -1
    return {"window_slots": given, "compressed_slots": a["compressed_slots"] * 0 - 1}


def _real() -> dict[str, tuple[Make, Anchor | None]]:
    bf16 = KVLayout.rows_bf16(512)
    fp8, fp4 = KVLayout.window_fp8(512, 128), KVLayout.compressed_fp4(512, 64)
    flash = "FlashMLA sm90"
    out: dict[str, tuple[Make, Anchor | None]] = {
        f"prefill-bf16-{width}": (
            call(4096, 64, bf16, width, rows=16384, holes=False),
            Anchor(flash, us),
        )
        for width, us in ((640, 635.2), (2048, 1847.4))
    }
    out["prefill-packed-640"] = (
        call(4096, 64, fp8, 128, fp4, 512, rows=8192, pool=16384, holes=False),
        None,
    )
    # A pool that is large beside the call: rows are decoded as they are gathered.
    out["prefill-packed-pool"] = (
        call(160, 64, fp8, 128, fp4, 512, rows=8192, pool=16384, holes=False),
        None,
    )
    for batch, us in ((1, 16.6), (16, 22.3), (64, 49.0), (128, 53.2)):
        make = call(batch, 64, fp8, 128, fp4, 512, rows=128 * batch, pool=65536, holes=False)
        out[f"decode-packed-{batch}"] = make, Anchor(f"{flash} (fp8 V4 cache)", us)
    return out


CASES: list[Case] = [Case("sparse_mla", name, make) for name, make in _small().items()] + [
    Case(
        "sparse_mla",
        name,
        make,
        real=True,
        bench=name != "prefill-packed-pool",
        bytes=_bytes,
        flops=_flops,
        anchor=anchor,
    )
    for name, (make, anchor) in _real().items()
]
COMPARE = {"sparse_mla": compare}
