"""Nano's sizes, as the `config.json` of the release's shape."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from tinfer.model.engram_hash import compressed_token_map, table_rows
from tinfer.testing.synthetic import nested_config
from tools.nano.text import NOISE

VOCAB = 1280
CONTEXT = 8192


def config_dict(tokenizer: Tokenizer) -> dict[str, Any]:
    """Every mechanism of the release at a size that a CPU answers with in seconds."""
    orders, heads, start = 2, 4, 2039
    raw = nested_config(tokenizer)
    raw["text_config"] |= {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "head_dim": 128,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 128,
        "o_lora_rank": 32,
        "o_groups": 4,
        "max_position_embeddings": CONTEXT,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 2048,
        },
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
        "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 0],
        "kv_source_layer_ids": [2, 3, 4],
        "index_source_layer_ids": [2, 3, 4, 6],
        "index_n_heads": 4,
        "index_head_dim": 64,
        "index_topk": 64,
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 48,
        "candidate_block_size": 8,
        "engram_layer_ids": [1, 4],
        "engram_num_embeddings": table_rows(2, orders, heads, start),
        "engram_max_ngram_size": orders + 1,
        "engram_vocab_size": start,
        "engram_n_heads": heads,
        "engram_head_dim": 32,
        "engram_compressed_vocab_size": int(compressed_token_map(tokenizer).max()) + 1,
        "num_nextn_predict_layers": 2,
        "dspark_block_size": 5,
        "dspark_noise_token_id": tokenizer.token_to_id(NOISE),
        "dspark_target_layer_ids": [5, 6, 7],
        "dspark_markov_rank": 64,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    }
    return raw
