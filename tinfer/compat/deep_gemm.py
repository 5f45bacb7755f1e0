"""Adapter for DeepGEMM's fp8 products on Hopper: an explicit opt-in that costs accuracy.

DeepGEMM takes on this hardware only activations with one fp32 scale per 128 columns and weights
with one per 128x128 tile. So the checkpoint's weights are requantized when first used (about 2.7 %
a value, measured and logged for each), and activations are cast again. tinfer's own kernels
compute the stored numbers and need none of this; the adapter is there for comparison.

Nothing is imported until `load()` is called; `TINFER_GEMM=deep_gemm` makes `tinfer.registry` do so.

Source: DeepGEMM 2.x, recipe (1, 128, 128) of its SM90 kernels.
"""

from __future__ import annotations

import importlib
import logging
import re
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tinfer.compat.casts import per_token_cast
from tinfer.compat.checks import require
from tinfer.compat.gemm import check_linear_fp8, dequantize_rows
from tinfer.compat.moe_experts import check_moe_experts, is_fp4
from tinfer.compat.moe_permute import expert_combine, expert_permute
from tinfer.compat.swiglu import swiglu
from tinfer.compat.weight_casts import requantize_fp4, requantize_fp8
from tinfer.formats import Fp4Group32, Fp8Block32, Fp8Block128

log = logging.getLogger("tinfer.kernels")
MINIMUM = (2, 0)
RECIPE = (1, 128, 128)
ALIGNMENT = 128  # rows of one expert start at multiples of it
SYMBOLS = (
    "fp8_gemm_nt",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "get_mn_major_tma_aligned_tensor",
)


def load(module: ModuleType | None = None) -> DeepGemm:
    """Import and check DeepGEMM (or check the given stand-in); ImportError says what is wrong."""
    if module is None:
        try:
            module = importlib.import_module("deep_gemm")
        except ImportError as e:
            raise ImportError(
                f"TINFER_GEMM=deep_gemm: deep_gemm cannot be imported ({e}); "
                "install DeepGEMM or unset TINFER_GEMM",
                name="deep_gemm",
            ) from e
    version = str(getattr(module, "__version__", "unknown"))
    found = re.match(r"v?(\d+)(?:\.(\d+))?", version)
    if found is None or (int(found[1]), int(found[2] or 0)) < MINIMUM:
        wanted = ".".join(map(str, MINIMUM))
        raise ImportError(
            f"deep_gemm: version must be at least {wanted}, got {version}", name="deep_gemm"
        )
    missing = [name for name in SYMBOLS if not callable(getattr(module, name, None))]
    if missing:
        raise ImportError(f"deep_gemm {version} lacks {', '.join(missing)}", name="deep_gemm")
    return DeepGemm(module)


def requantization_error(exact: Fp8Block32 | Fp4Group32, requantized: Fp8Block128) -> float:
    """Relative L2 of the requantized weight to the stored one."""
    want = exact.dequantize(torch.float32)
    error = (requantized.dequantize(torch.float32) - want).norm()
    return float(error / want.norm()) if want.any() else 0.0


class DeepGemm:
    """The library's calls behind the contracts of `linear_fp8` and `moe_experts`.

    Shapes, dtypes and errors are those of the ops; the results differ by the requantization.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._requantized: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def requantized(self, weight: Fp8Block32 | Fp4Group32) -> Fp8Block128:
        """The weight in the library's format, converted once per weight tensor."""
        found: Fp8Block128 | None = self._requantized.get(weight.weight)
        if found is None:
            columns = weight.weight.shape[-1] * (2 if isinstance(weight, Fp4Group32) else 1)
            require(columns % 128 == 0, "deep_gemm", "weight", "of 128s of columns", columns)
            if isinstance(weight, Fp4Group32):
                found = requantize_fp4(weight, "fp32")
            else:
                found = requantize_fp8(weight, "fp32")
            error = requantization_error(weight, found)
            shape = list(found.weight.shape)
            log.warning("deep_gemm: weight %s requantized, relative error %.2e", shape, error)
            self._requantized[weight.weight] = found
        return found

    def _operands(self, x: Tensor, weight: Fp8Block128) -> tuple[Any, Any]:
        q, s = per_token_cast(x.flatten(0, -2), "e4m3", 128, "fp32")
        q, s = q.view(x.shape), s.view(*x.shape[:-1], -1)
        scale = self._module.get_mn_major_tma_aligned_tensor(s)
        return (_e4m3(q), scale), (_e4m3(weight.weight), weight.scale)

    def product(self, x: Tensor, weight: Fp8Block128, out: Tensor) -> None:
        """out [T, N] = x bf16 [T, K] @ weight.T."""
        a, b = self._operands(x, weight)
        self._module.fp8_gemm_nt(a, b, out, recipe=RECIPE, disable_ue8m0_cast=True)

    def grouped_contiguous(self, x: Tensor, weight: Fp8Block128, expert: Tensor) -> Tensor:
        """bf16 [M, N]: row i of x times expert[i]'s matrix.

        `expert` int32 [M]; each expert's rows are contiguous and start at a multiple of 128.
        Rows of expert -1 are padding, their results undefined.
        """
        out = x.new_empty(x.shape[0], weight.weight.shape[1])
        a, b = self._operands(x, weight)
        call = self._module.m_grouped_fp8_gemm_nt_contiguous
        call(a, b, out, expert, recipe=RECIPE, disable_ue8m0_cast=True)
        return out

    def grouped_masked(self, x: Tensor, weight: Fp8Block128, rows: Tensor, expected: int) -> Tensor:
        """bf16 [E, M, N]: the first rows[e] rows of x[e] times expert e's matrix.

        `rows` int32 [E] on the device; `expected` is a guess of its mean. Other rows: undefined.
        """
        out = x.new_empty(*x.shape[:2], weight.weight.shape[1])
        a, b = self._operands(x, weight)
        call = self._module.m_grouped_fp8_gemm_nt_masked
        call(a, b, out, rows, expected, recipe=RECIPE, disable_ue8m0_cast=True)
        return out

    def linear_fp8(
        self,
        q: Tensor,
        s: Tensor,
        weight: Tensor,
        scale: Tensor,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        """`linear_fp8` with the weight requantized."""
        check_linear_fp8(q, s, weight, scale, out_dtype)
        out = torch.empty(len(q), len(weight), dtype=out_dtype, device=q.device)
        if out.numel():
            x = dequantize_rows(q, s).to(torch.bfloat16)
            self.product(x, self.requantized(Fp8Block32(weight, scale)), out)
        return out

    def moe_experts(
        self,
        q: Tensor,
        s: Tensor,
        ids: Tensor,
        weights: Tensor,
        w13: Tensor,
        w13_s: Tensor,
        w2: Tensor,
        w2_s: Tensor,
        limit: float,
        shared: Tensor | None,
    ) -> Tensor:
        """`moe_experts` with the weights requantized; fp4 experts only."""
        check_moe_experts(q, s, ids, weights, w13, w13_s, w2, w2_s, limit, shared)
        if not is_fp4(w13, q.shape[1]):
            raise NotImplementedError("deep_gemm: moe_experts takes fp4 experts only")
        if not ids.numel():
            return torch.zeros_like(q, dtype=torch.bfloat16) if shared is None else shared.clone()
        token, slot, back, start, end = expert_permute(ids, len(w13), ALIGNMENT)
        row = torch.arange(len(token), dtype=torch.int32, device=q.device)[:, None]
        inside = (row >= start) & (row < end)
        expert = torch.where(inside.any(1), inside.int().argmax(1), -1).int()
        x = dequantize_rows(q, s).to(torch.bfloat16)[token.clamp(min=0).long()]
        up = self.grouped_contiguous(x, self.requantized(Fp4Group32(w13, w13_s)), expert)
        weight = weights[token.clamp(min=0).long(), slot.clamp(min=0).long()]
        hidden = swiglu(torch.where(expert[:, None] >= 0, up, 0.0), limit, weight)
        y = self.grouped_contiguous(hidden, self.requantized(Fp4Group32(w2, w2_s)), expert)
        return expert_combine(y, back, shared)


def _e4m3(q: Tensor) -> Tensor:
    return q.view(torch.float8_e4m3fn)
