"""TP-01 and SA-18 for caches, indices and selections: any number of rows fits a portable grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tinfer import ops, registry
from tinfer.kv_layout import KVLayout
from tinfer.registry import use_kernels
from tinfer.testing.launches import MAX_PROGRAMS, recorded

ROWS = (65535, 65536, 70000)


def _arguments(op: str, t: int) -> dict[str, Any]:
    """Arguments of one op for t rows, small in every other dimension."""
    rows = torch.zeros(t, dtype=torch.int64)
    lengths = rows.int()
    table = torch.zeros(1, 4, dtype=torch.int32)
    window, index = KVLayout.window_fp8(64, 64), KVLayout.index_fp4(128, 64)
    x = torch.zeros(t, 64, dtype=torch.bfloat16)
    scores = torch.zeros(t, 64)
    query = {
        "q": torch.zeros(t, 4, 64, dtype=torch.uint8),
        "q_s": torch.zeros(t, 4, 4, dtype=torch.uint8),
        "weights": torch.zeros(t, 4),
        "cache": index.allocate(4, torch.get_default_device()),
        "layout": index,
        "block_table": table,
        "seq": rows,
        "visible": lengths,
    }
    cache = window.allocate(4, torch.get_default_device())
    return {
        "store_kv": {"x": x, "slots": rows, "cache": cache, "layout": window},
        "store_kv_rope": {
            "x": x,
            "weight": None,
            "eps": 0.0,
            "cos_sin": torch.zeros(4, 16),
            "positions": rows,
            "slots": rows,
            "cache": cache,
            "layout": window,
        },
        "load_kv": {"cache": cache, "layout": window, "slots": rows},
        "compress_pool": {
            "kv": scores,
            "score": scores,
            "positions": rows,
            "seq": rows,
            "state": torch.zeros(1, 4, 2, 64),
            "ratio": 2,
        },
        "range_slots": {
            "first": rows,
            "last": rows,
            "seq": rows,
            "block_table": table,
            "page_size": 64,
            "ring": 256,
            "width": 2048,
        },
        "ids_to_slots": {
            "ids": torch.zeros(t, 2048, dtype=torch.int32),
            "seq": rows,
            "block_table": table,
            "page_size": 64,
        },
        "index_logits": query | {"max_visible": 256},
        "index_logits_blocks": query
        | {"blocks": torch.zeros(t, 8, dtype=torch.int32), "block_size": 8},
        "topk_indices": {"scores": torch.zeros(t, 20000), "lengths": lengths, "k": 512},
        "candidate_blocks": {
            "scores": torch.zeros(t, 20000),
            "lengths": lengths,
            "block_size": 8,
            "k": 2048,
        },
        "candidate_lengths": {"lengths": lengths, "block_size": 8, "k": 2048},
        "restore_candidates": {
            "ids": torch.zeros(t, 512, dtype=torch.int32),
            "blocks": torch.zeros(t, 8, dtype=torch.int32),
            "block_size": 8,
        },
    }[op]


FAMILIES = ("kv_cache", "compressor", "indices", "indexer", "topk")
OPS = [name for name, op in registry.OPS.items() if op.family in FAMILIES]


@pytest.mark.interpret
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", OPS)
def test_grid(name: str, rows: int, device: str) -> None:
    on = torch.device(device)
    with on, FakeTensorMode(), recorded() as launches, use_kernels("triton"):
        getattr(ops, name)(**_arguments(name, rows))
    assert launches
    for launch in launches:
        assert launch.programs <= MAX_PROGRAMS, launch.name
