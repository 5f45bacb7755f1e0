"""What requantizing the weights to 128-wide fp32 scales costs, on layers of the release's sizes.

    python -m benchmarks.requantization [--tokens 64] [--kernels triton]

Weights are normal, stored as the checkpoint stores them (fp4 per 32 columns, or fp8 per 32x32
tile); activations are normal and cast to fp8 per 32. Errors are relative L2 to fp64 on the stored
numbers: of tinfer's product, of torch's bf16 product, and of an exact product with the weight
requantized to e4m3 with one fp32 scale per 128x128 tile.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from tinfer import ops, registry
from tinfer.compat.casts import per_block_cast, per_token_cast
from tinfer.compat.gemm import dequantize_rows
from tinfer.compat.weight_casts import requantize_fp4, requantize_fp8
from tinfer.formats import Fp4Group32, Fp8Block32
from tinfer.testing.compare import errors

LAYERS = [
    ("expert w1", "fp4", 2304, 5120),
    ("expert w2", "fp4", 5120, 2304),
    ("wq_b", "fp8", 32768, 1280),
    ("wo_b", "fp8", 5120, 8192),
]
HEAD = (
    f"{'layer':<12}{'N x K':<14}{'weight':>10}{'requantized':>13}{'torch bf16':>12}{'tinfer':>10}"
)


def _weight(kind: str, n: int, k: int, g: torch.Generator) -> Fp4Group32 | Fp8Block32:
    values = torch.randn(n, k, generator=g, device=g.device) * k**-0.5
    if kind == "fp4":
        return Fp4Group32(*per_token_cast(values, "e2m1", 32, "ue8m0"))
    return Fp8Block32(*per_block_cast(values, (32, 32), "ue8m0"))


def _row(kind: str, n: int, k: int, tokens: int, g: torch.Generator) -> list[float]:
    weight = _weight(kind, n, k, g)
    x = torch.randn(tokens, k, generator=g, device=g.device).bfloat16()
    q, s = per_token_cast(x, "e4m3", 32, "ue8m0")
    rows, stored = dequantize_rows(q, s), weight.dequantize()
    exact = rows.double() @ stored.double().t()
    if isinstance(weight, Fp4Group32):
        changed, op = requantize_fp4(weight, "fp32"), ops.linear_fp4
    else:
        changed, op = requantize_fp8(weight, "fp32"), ops.linear_fp8
    other = changed.dequantize(torch.float32)

    def error(y: Tensor, want: Tensor = exact) -> float:
        return errors(y, want)[0]

    return [
        error(other, stored),
        error(rows.double() @ other.double().t()),
        error(rows.bfloat16() @ stored.t()),
        error(op(q, s, weight.weight, weight.scale)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--kernels", default="auto")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    g = torch.Generator(device=device).manual_seed(20261129)
    print(HEAD)
    for name, kind, n, k in LAYERS:
        with registry.use_kernels(args.kernels):
            w, r, t, ours = _row(kind, n, k, args.tokens, g)
        print(f"{name:<12}{f'{n} x {k}':<14}{w:>10.2e}{r:>13.2e}{t:>12.2e}{ours:>10.2e}")


if __name__ == "__main__":
    main()
