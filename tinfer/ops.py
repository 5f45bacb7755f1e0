"""The op table: everything the model computes with, one line per op.

The reference in `tinfer.compat` is the contract (its docstring gives shapes, dtypes, numerics);
the registry decides at each call whether the Triton kernel of the same name runs instead.
"""

from tinfer.compat.casts import cast_back as _cast_back
from tinfer.compat.casts import fake_quant_ as _fake_quant_
from tinfer.compat.casts import per_block_cast as _per_block_cast
from tinfer.compat.casts import per_token_cast as _per_token_cast
from tinfer.compat.compressor import compress_pool as _compress_pool
from tinfer.compat.engram import engram_gate as _engram_gate
from tinfer.compat.engram import engram_gather as _engram_gather
from tinfer.compat.engram_hash import engram_lookback as _engram_lookback
from tinfer.compat.engram_hash import ngram_hash as _ngram_hash
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
from tinfer.compat.hyper_connection import hc_pre as _hc_pre
from tinfer.compat.hyper_connection import hc_split as _hc_split
from tinfer.compat.indexer import index_logits as _index_logits
from tinfer.compat.indexer import index_logits_blocks as _index_logits_blocks
from tinfer.compat.indices import ids_to_slots as _ids_to_slots
from tinfer.compat.indices import range_slots as _range_slots
from tinfer.compat.kv_cache import load_kv as _load_kv
from tinfer.compat.kv_cache import store_kv as _store_kv
from tinfer.compat.kv_cache import store_kv_rope as _store_kv_rope
from tinfer.compat.logit_processing import add_logit_bias_ as _add_logit_bias_
from tinfer.compat.logit_processing import apply_penalties_ as _apply_penalties_
from tinfer.compat.logit_processing import ban_sequences_ as _ban_sequences_
from tinfer.compat.logit_processing import ban_tokens_ as _ban_tokens_
from tinfer.compat.logit_processing import count_tokens_ as _count_tokens_
from tinfer.compat.logprobs import map_lookup as _map_lookup
from tinfer.compat.logprobs import sum_smaller_probs as _sum_smaller_probs
from tinfer.compat.logprobs import token_logprobs as _token_logprobs
from tinfer.compat.masses import status_text
from tinfer.compat.moe_experts import moe_experts as _moe_experts
from tinfer.compat.moe_gate import moe_gate as _moe_gate
from tinfer.compat.moe_permute import expert_combine as _expert_combine
from tinfer.compat.moe_permute import expert_permute as _expert_permute
from tinfer.compat.norm_rope import apply_rotary_ as _apply_rotary_
from tinfer.compat.norm_rope import rms_norm as _rms_norm
from tinfer.compat.norm_rope import rms_norm_cast as _rms_norm_cast
from tinfer.compat.norm_rope import rms_norm_codes as _rms_norm_codes
from tinfer.compat.philox import philox_words as _philox_words
from tinfer.compat.row_checks import detect_outlier_and_abort as _detect_outlier_and_abort
from tinfer.compat.row_checks import match_stop as _match_stop
from tinfer.compat.sampling import sample as _sample
from tinfer.compat.sampling import token_masses as _token_masses
from tinfer.compat.sampling_seeds import sample_seeds_compat as _sample_seeds_compat
from tinfer.compat.sampling_seeds import seeds_compat_draw as _seeds_compat_draw
from tinfer.compat.sparse_mla import sparse_mla as _sparse_mla
from tinfer.compat.swiglu import swiglu as _swiglu
from tinfer.compat.swiglu import swiglu_cast as _swiglu_cast
from tinfer.compat.topk import candidate_blocks as _candidate_blocks
from tinfer.compat.topk import candidate_lengths as _candidate_lengths
from tinfer.compat.topk import restore_candidates as _restore_candidates
from tinfer.compat.topk import topk_indices as _topk_indices
from tinfer.compat.verify import get_accept_result as _get_accept_result
from tinfer.compat.verify import verify_drafts as _verify_drafts
from tinfer.compat.weight_casts import dequantize_weight as _dequantize_weight
from tinfer.compat.weight_casts import fp4_to_fp8 as _fp4_to_fp8
from tinfer.compat.weight_casts import requantize_fp4 as _requantize_fp4
from tinfer.compat.weight_casts import requantize_fp8 as _requantize_fp8
from tinfer.compat.weight_casts import transpose_weight_scales as _transpose_weight_scales
from tinfer.registry import Op

__all__ = ["Op", "status_text"]
cast_back = Op(_cast_back)
fake_quant_ = Op(_fake_quant_)
per_block_cast = Op(_per_block_cast)
per_token_cast = Op(_per_token_cast)
dequantize_weight = Op(_dequantize_weight)
fp4_to_fp8 = Op(_fp4_to_fp8)
requantize_fp4 = Op(_requantize_fp4)
requantize_fp8 = Op(_requantize_fp8)
transpose_weight_scales = Op(_transpose_weight_scales)
apply_rotary_ = Op(_apply_rotary_)
rms_norm = Op(_rms_norm)
rms_norm_cast = Op(_rms_norm_cast)
rms_norm_codes = Op(_rms_norm_codes)
swiglu = Op(_swiglu)
swiglu_cast = Op(_swiglu_cast)
hc_boundary = Op(_hc_boundary)
hc_collapse = Op(_hc_collapse)
hc_collapse_norm = Op(_hc_collapse_norm)
hc_expand = Op(_hc_expand)
hc_mean = Op(_hc_mean)
hc_mix = Op(_hc_mix)
hc_post = Op(_hc_post)
hc_pre = Op(_hc_pre)
hc_split = Op(_hc_split)
linear_bf16 = Op(_linear_bf16)
linear_fp4 = Op(_linear_fp4)
linear_fp8 = Op(_linear_fp8)
linear_fp32 = Op(_linear_fp32)
linear_grouped = Op(_linear_grouped)
moe_experts = Op(_moe_experts)
sparse_mla = Op(_sparse_mla)
engram_gate = Op(_engram_gate)
engram_gather = Op(_engram_gather)
engram_lookback = Op(_engram_lookback)
ngram_hash = Op(_ngram_hash)
moe_gate = Op(_moe_gate)
expert_combine = Op(_expert_combine)
expert_permute = Op(_expert_permute)
store_kv = Op(_store_kv)
load_kv = Op(_load_kv)
store_kv_rope = Op(_store_kv_rope)
compress_pool = Op(_compress_pool)
range_slots = Op(_range_slots)
ids_to_slots = Op(_ids_to_slots)
index_logits = Op(_index_logits)
index_logits_blocks = Op(_index_logits_blocks)
topk_indices = Op(_topk_indices)
candidate_blocks = Op(_candidate_blocks)
candidate_lengths = Op(_candidate_lengths)
restore_candidates = Op(_restore_candidates)
philox_words = Op(_philox_words)
sample = Op(_sample)
token_masses = Op(_token_masses)
token_logprobs = Op(_token_logprobs)
sum_smaller_probs = Op(_sum_smaller_probs)
map_lookup = Op(_map_lookup)
add_logit_bias_ = Op(_add_logit_bias_)
apply_penalties_ = Op(_apply_penalties_)
ban_sequences_ = Op(_ban_sequences_)
ban_tokens_ = Op(_ban_tokens_)
count_tokens_ = Op(_count_tokens_)
detect_outlier_and_abort = Op(_detect_outlier_and_abort)
match_stop = Op(_match_stop)
sample_seeds_compat = Op(_sample_seeds_compat)
seeds_compat_draw = Op(_seeds_compat_draw)
get_accept_result = Op(_get_accept_result)
verify_drafts = Op(_verify_drafts)
