"""The op table: everything the model computes with, one line per op.

The reference in `tinfer.compat` is the contract (its docstring gives shapes, dtypes, numerics);
the registry decides at each call whether the Triton kernel of the same name runs instead.
"""

from tinfer.compat.gemm import linear_bf16 as _linear_bf16
from tinfer.compat.gemm import linear_fp4 as _linear_fp4
from tinfer.compat.gemm import linear_fp8 as _linear_fp8
from tinfer.compat.gemm import linear_fp32 as _linear_fp32
from tinfer.compat.gemm import linear_grouped as _linear_grouped
from tinfer.compat.hyper_connection import hc_boundary as _hc_boundary
from tinfer.compat.hyper_connection import hc_collapse as _hc_collapse
from tinfer.compat.hyper_connection import hc_collapse_norm as _hc_collapse_norm
from tinfer.compat.hyper_connection import hc_expand as _hc_expand
from tinfer.compat.hyper_connection import hc_mean as _hc_mean
from tinfer.compat.hyper_connection import hc_mix as _hc_mix
from tinfer.compat.hyper_connection import hc_post as _hc_post
from tinfer.compat.hyper_connection import hc_split as _hc_split
from tinfer.compat.moe_experts import moe_experts as _moe_experts
from tinfer.compat.norm_rope import apply_rotary_ as _apply_rotary_
from tinfer.compat.norm_rope import rms_norm as _rms_norm
from tinfer.compat.norm_rope import rms_norm_cast as _rms_norm_cast
from tinfer.compat.sparse_mla import sparse_mla as _sparse_mla
from tinfer.compat.swiglu import swiglu as _swiglu
from tinfer.compat.swiglu import swiglu_cast as _swiglu_cast
from tinfer.registry import Op

__all__ = ["Op"]
apply_rotary_ = Op(_apply_rotary_, kernel=False)
rms_norm = Op(_rms_norm, kernel=False)
rms_norm_cast = Op(_rms_norm_cast, kernel=False)
swiglu = Op(_swiglu, kernel=False)
swiglu_cast = Op(_swiglu_cast, kernel=False)
hc_boundary = Op(_hc_boundary, kernel=False)
hc_collapse = Op(_hc_collapse, kernel=False)
hc_collapse_norm = Op(_hc_collapse_norm, kernel=False)
hc_expand = Op(_hc_expand, kernel=False)
hc_mean = Op(_hc_mean, kernel=False)
hc_mix = Op(_hc_mix, kernel=False)
hc_post = Op(_hc_post, kernel=False)
hc_split = Op(_hc_split, kernel=False)
linear_bf16 = Op(_linear_bf16, kernel=False)
linear_fp4 = Op(_linear_fp4, kernel=False)
linear_fp8 = Op(_linear_fp8, kernel=False)
linear_fp32 = Op(_linear_fp32, kernel=False)
linear_grouped = Op(_linear_grouped, kernel=False)
moe_experts = Op(_moe_experts, kernel=False)
sparse_mla = Op(_sparse_mla, kernel=False)
