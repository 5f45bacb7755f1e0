"""A training step as one replayable unit: rounding, forward, backward; and the optimizer's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.nano import draft as drafts
from tools.nano.draft import Draft
from tools.nano.model import Backbone, Pass
from tools.nano.params import Parameters

BALANCE = 0.002  # step of the routing bias against an uneven load
INDEX_WEIGHT = 0.5
CLIP = 1.0
MIX_RATE = 0.3  # of the learning rate, for the mixes of hyper-connections


POOL: list[Any] = []
GRAPHS = [True]  # off: every step is launched anew, to look for mistakes


class Recorded:
    """A function of static tensors, replayed as a CUDA graph where there is one."""

    def __init__(self, function: Callable[[], None], device: torch.device) -> None:
        self.function, self.graph = function, None
        if device.type == "cuda" and GRAPHS[0]:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                function()
                function()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            # Nothing inside a graph outlives its replay, so all graphs share their memory.
            if not POOL:
                POOL.append(torch.cuda.graph_pool_handle())
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=POOL[0]):
                function()

    def __call__(self) -> None:
        if self.graph is None:
            self.function()
        else:
            self.graph.replay()


class Optimizer:
    """Adam on every parameter, with clipping and the routing bias's own rule."""

    def __init__(self, params: Parameters, rate: float) -> None:
        device = params.tiles.device
        self.params = params
        self.rates = [torch.tensor(rate, device=device) for _ in range(2)]
        slow = [p for n, p in params.named_parameters() if "/hc_" in n]
        bias = [p for n, p in params.named_parameters() if n.endswith("gate/bias")]
        apart = {id(p) for p in (*slow, *bias)}
        rest = [p for p in params.parameters() if id(p) not in apart]
        for p in bias:
            p.requires_grad_(False)
        self.trained = [*rest, *slow]
        for p in self.trained:
            p.grad = torch.zeros_like(p)
        graphed = device.type == "cuda"
        groups = [
            {"params": part, "lr": tensor if graphed else rate}
            for part, tensor in zip((rest, slow), self.rates, strict=True)
        ]
        self.inner = torch.optim.Adam(
            groups,
            betas=(0.9, 0.98),
            eps=1e-10,
            fused=graphed,
            capturable=graphed,
        )
        self.loads = {
            n.replace("/", ".")[len("plain.") : -len(".gate.bias")]: torch.zeros_like(p)
            for n, p in params.named_parameters()
            if n.endswith("gate/bias")
        }
        self.norm = torch.zeros((), device=device)
        self.step = Recorded(self._step, device)

    def set_rate(self, rate: float) -> None:
        for group, tensor, share in zip(
            self.inner.param_groups, self.rates, (1.0, MIX_RATE), strict=True
        ):
            tensor.fill_(rate * share)
            if tensor.device.type != "cuda":
                group["lr"] = rate * share

    def zero(self) -> None:
        for p in self.trained:
            assert p.grad is not None
            p.grad.zero_()

    def take(self, loads: dict[str, Tensor]) -> None:
        for name, load in loads.items():
            self.loads[name].copy_(load)

    def _step(self) -> None:
        grads = [p.grad for p in self.trained if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        self.norm.copy_(norm)
        torch._foreach_mul_(grads, (CLIP / (norm + 1e-6)).clamp(max=1.0))
        self.inner.step()
        with torch.no_grad():
            for name, load in self.loads.items():
                bias = self.params.fp32(f"{name}.gate.bias")
                bias += BALANCE * torch.sign(load.mean() - load)


@dataclass
class Meters:
    """What a step leaves to look at."""

    loss: Tensor
    index: Tensor
    right: Tensor  # share of decisive tokens guessed


class BackboneStep:
    """Rows of one length, dense or with the indexer's selection."""

    def __init__(
        self, model: Backbone, optimizer: Optimizer, rows: int, length: int, sparse: bool
    ) -> None:
        device = model.params.tiles.device
        self.model, self.optimizer, self.sparse = model, optimizer, sparse
        self.shape = model.shape(rows, length)
        self.ids = torch.full((rows, length + 1), 50, device=device)
        self.weights = torch.ones(rows, length + 1, device=device)
        self.meters = Meters(*(torch.zeros((), device=device) for _ in range(3)))
        self.run = Recorded(self._run, device)

    def _run(self) -> None:
        model, length = self.model, self.shape.length
        self.optimizer.zero()
        model.params.refresh()
        run = Pass(self.shape, self.sparse, min(128, length))
        x = model(self.ids[:, :length], run)
        logits = model.logits(x)
        target, weight = self.ids[:, 1:].flatten(), self.weights[:, 1:].flatten()
        entropy = F.cross_entropy(logits, target, reduction="none")
        loss = (entropy * weight).sum() / weight.sum().clamp(min=1.0)
        answers = self.weights[:, 1:][:, length - run.tail :]
        share = 0.05 + (answers >= 1).float()
        index = sum(((i * share).sum() / share.sum() for i in run.index_losses), loss.new_zeros(()))
        (loss + INDEX_WEIGHT * index).backward()
        self.optimizer.take(run.loads)
        model.params.release()
        with torch.no_grad():
            self.meters.loss.copy_(loss)
            self.meters.index.copy_(index)
            heavy = weight > 1
            hit = ((logits.argmax(-1) == target) & heavy).sum()
            self.meters.right.copy_(hit / heavy.sum().clamp(min=1))


class DraftStep:
    """Draft blocks behind a backbone that stays as it is."""

    def __init__(
        self,
        model: Backbone,
        draft: Draft,
        optimizer: Optimizer,
        rows: int,
        length: int,
        blocks: int,
    ) -> None:
        device = model.params.tiles.device
        self.model, self.draft, self.optimizer = model, draft, optimizer
        self.shape = model.shape(rows, length)
        self.ids = torch.full((rows, length + 1), 50, device=device)
        self.weights = torch.ones(rows, length + 1, device=device)
        self.main = torch.zeros(rows, blocks, dtype=torch.int64, device=device)
        self.loss, self.sure = torch.zeros((), device=device), torch.zeros((), device=device)
        self.run = Recorded(self._run, device)

    def _run(self) -> None:
        length = self.shape.length
        ids = self.ids[:, :length]
        self.optimizer.zero()
        with torch.no_grad():
            self.model.params.refresh()
            run = Pass(self.shape, sparse=True)
            self.model(ids, run)
            taps = torch.cat(run.taps, dim=-1)
        self.draft.params.refresh()
        drafted = self.draft(taps, ids, self.main, self.model.params)
        loss, sure = drafts.losses(drafted, ids, self.weights[:, :length], self.main)
        (loss + 0.1 * sure).backward()
        self.optimizer.take(self.draft.loads())
        self.draft.params.release()
        self.model.params.release()
        with torch.no_grad():
            self.loss.copy_(loss)
            self.sure.copy_(sure)


def rate_at(progress: float, peak: float, warmup: float = 0.03) -> float:
    """Linear warm-up, a plateau, and a cosine down to 1 % of the peak."""
    if progress < warmup:
        return peak * max(progress / warmup, 0.02)
    if progress < 0.3:
        return peak
    done = min((progress - 0.3) / 0.7, 1.0)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))
