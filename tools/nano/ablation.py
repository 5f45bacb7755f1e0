"""The model with one mechanism taken away: what an evaluation loses shows what it is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tinfer.model.build import Model
from tinfer.model.transformer import Block

Edit = Callable[[Block], Block]


def _without_engram(block: Block) -> Block:
    return replace(block, engram=None)


def _without_compressed(block: Block) -> Block:
    attn = replace(block.attn, kv_source=None, compressor=None, indexer=None)
    return replace(block, attn=attn)


def _shuffled_router(block: Block) -> Block:
    """Every expert answers to another one's score."""
    weight, bias = block.ffn.gate.weight, block.ffn.gate.bias
    gate = replace(block.ffn.gate, weight=weight.roll(1, 0), bias=bias.roll(1, 0))
    return replace(block, ffn=replace(block.ffn, gate=gate))


def _first_positions(block: Block) -> Block:
    """The indexer's head weights are zero: all scores tie, and the oldest positions win."""
    indexer = block.attn.indexer
    if indexer is None:
        return block
    blind = replace(indexer, weights_proj=torch.zeros_like(indexer.weights_proj))
    return replace(block, attn=replace(block.attn, indexer=blind))


def _one_copy(block: Block) -> Block:
    """Hyper-connections with fixed mixes: nothing depends on the token."""
    parts = {}
    for name in ("attn_hc", "ffn_hc"):
        hc = getattr(block, name)
        parts[name] = replace(hc, fn=torch.zeros_like(hc.fn))
    return replace(block, **parts)


ABLATIONS: dict[str, Edit] = {
    "without Engram": _without_engram,
    "without compressed attention": _without_compressed,
    "indexer blind": _first_positions,
    "router shuffled": _shuffled_router,
    "hyper-connections fixed": _one_copy,
}


def ablate(model: Model, edit: Edit) -> Model:
    blocks = [edit(b) for b in model.backbone.blocks]
    return replace(model, backbone=replace(model.backbone, blocks=blocks))
