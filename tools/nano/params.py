"""Nano's parameters: trained in fp32, seen by the forward pass as the file will store them.

All fp8 weights are one tensor of 32x32 tiles and all expert weights one of 32-wide groups, so a
step rounds everything in two passes. The rest are parameters of their own.
"""

from __future__ import annotations

import math
import re
import zlib

import torch
from torch import Tensor, nn

from tinfer.checkpoint import TensorSpec, expected_tensors
from tinfer.config import ModelConfig
from tinfer.formats import GROUP
from tools.nano import quant

# Sublayers start small, so that the embedding is still there at the head.
_GAINS = (
    (r"\.wo_b\.", 0.3),
    (r"\.w2\.", 0.5),
    (r"\.engram\.wkv\.", 0.5),
    (r"\.confidence_head\.", 0.1),
    (r"\.gate\.weight", 0.5),
    (r"markov_head\.head", 0.1),
    (r"^head\.weight", 0.5),
)


class Parameters(nn.Module):
    """By name, in the shapes of `tinfer.checkpoint.expected_tensors` before quantization."""

    def __init__(self, config: ModelConfig, seed: int, draft: bool) -> None:
        """Parameters of the backbone, or with `draft` those of the draft stages."""
        super().__init__()
        self.config, self.seed = config, seed
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._tiles: dict[str, tuple[int, int]] = {}
        self._groups: dict[str, tuple[int, int]] = {}
        tiles, groups = [], []
        self.plain = nn.ParameterDict()
        for name, spec in expected_tensors(config).items():
            if name.endswith(".scale") or name.startswith("mtp.") != draft:
                continue
            shape = self.shapes[name] = logical_shape(spec)
            value = self._initial(name, shape)
            if spec.dtype == "I8":  # in the order w1, w3, w2 of each expert
                start = sum(len(g) for g in groups)
                groups.append(value.view(-1, GROUP))
                self._groups[name] = (start, len(groups[-1]))
            elif spec.dtype == "F8_E4M3" and ".engram.embed." not in name:
                start = sum(len(t) for t in tiles)
                tiles.append(to_tiles(value))
                self._tiles[name] = (start, len(tiles[-1]))
            else:
                self.plain[name.replace(".", "/")] = nn.Parameter(value)
        self.tiles, self.groups = nn.Parameter(torch.cat(tiles)), nn.Parameter(torch.cat(groups))
        self._seen: dict[str, Tensor] = {}
        self._rounded_groups = self.groups.detach()

    # ------------------------------------------------------------ initial values
    def _initial(self, name: str, shape: tuple[int, ...]) -> Tensor:
        seeded = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}/{name}".encode()))
        noise = torch.randn(*shape, generator=seeded)
        if ".hc_" in name:
            return self._mixes(name, noise)
        if "norm" in name or name.endswith(("q_weight", "k_weight")):
            return torch.ones(shape)
        if len(shape) == 1:  # sinks, routing bias
            return torch.zeros(shape)
        if name == "embed.weight":
            return noise
        if ".engram.embed." in name:
            return 0.5 * noise
        gain = next((g for pattern, g in _GAINS if re.search(pattern, name)), 1.0)
        return noise * gain / math.sqrt(shape[-1])

    def _mixes(self, name: str, noise: Tensor) -> Tensor:
        """Copies that are kept apart, read and written with different strength."""
        copies = self.config.hc_mult
        if name.endswith("_scale"):
            return torch.full_like(noise, 0.2)
        if name.endswith("_fn"):
            return 0.02 * noise
        base = 0.5 * noise
        base[2 * copies :] += 3 * torch.eye(copies).flatten()
        return base

    # ------------------------------------------------------------ what the forward pass sees
    def refresh(self) -> None:
        """Round the flat weights; once before every forward pass."""
        self.release()
        tiles, groups = quant.fp8_tiles(self.tiles), quant.fp4(self.groups)
        for name, (start, count) in self._tiles.items():
            n, k = self.shapes[name]
            self._seen[name] = from_tiles(tiles[start : start + count], n, k)
        self._rounded_groups = groups

    def release(self) -> None:
        """Let go of the newest forward pass's weights, and of the graph behind them."""
        self._seen, self._rounded_groups = {}, self.groups.detach()

    def fp32(self, name: str) -> Tensor:
        return self.plain[name.replace(".", "/")]

    def __getitem__(self, name: str) -> Tensor:
        """bf16, rounded as stored."""
        if name in self._seen:
            return self._seen[name]
        value = self.fp32(name)
        if ".engram.embed." in name:
            return quant.fp8(value)
        return value.to(torch.bfloat16)

    def experts(self, prefix: str, count: int) -> tuple[Tensor, Tensor]:
        """bf16 (w1 over w3 `[E, 2I, D]`, w2 `[E, D, I]`): neighbours in `groups`."""
        dim, inter = self.config.dim, self.config.moe_inter_dim
        start, _ = self._groups[f"{prefix}.experts.0.w1.weight"]
        slab = self._rounded_groups[start : start + count * 3 * inter * dim // GROUP]
        slab = slab.reshape(count, 3 * inter * dim)
        w13, w2 = slab.split([2 * inter * dim, inter * dim], dim=1)
        return w13.reshape(count, 2 * inter, dim), w2.reshape(count, dim, inter)

    def value(self, name: str) -> Tensor:
        """fp32 before rounding, on the CPU, in the logical shape: for export."""
        shape = self.shapes[name]
        if name in self._tiles:
            start, count = self._tiles[name]
            return from_tiles(self.tiles[start : start + count], *shape).detach().float().cpu()
        if name in self._groups:
            start, count = self._groups[name]
            return self.groups[start : start + count].view(shape).detach().float().cpu()
        value = self.fp32(name).detach().float().cpu()
        # The forward pass sees mixing projections in bf16; the file keeps them in fp32.
        return value.bfloat16().float() if name.endswith("_fn") else value

    def set(self, name: str, value: Tensor) -> None:
        """Take a value in the logical shape."""
        if name in self._tiles:
            start, count = self._tiles[name]
            self.tiles[start : start + count] = to_tiles(value)
        elif name in self._groups:
            start, count = self._groups[name]
            self.groups[start : start + count] = value.view(-1, GROUP)
        else:
            self.fp32(name).copy_(value)


def logical_shape(spec: TensorSpec) -> tuple[int, ...]:
    """The shape before packing."""
    return (spec.shape[0], 2 * spec.shape[1]) if spec.dtype == "I8" else tuple(spec.shape)


def to_tiles(weight: Tensor) -> Tensor:
    """[N, K] -> [n, 1024], tile after tile."""
    n, k = weight.shape
    return weight.view(n // GROUP, GROUP, k // GROUP, GROUP).transpose(1, 2).reshape(-1, GROUP**2)


def from_tiles(tiles: Tensor, n: int, k: int) -> Tensor:
    tiles = tiles.view(n // GROUP, k // GROUP, GROUP, GROUP)
    return tiles.transpose(1, 2).reshape(n, k)
