"""Integer probabilities: from logits to masses that sum to exactly 2^31, and one draw from them.

Nothing that decides a token depends on the order of a float reduction. A logit becomes a weight
by one subtraction and one multiplication, both IEEE fp32 and uncontracted, and an integer exp2;
every sum after that is of integers. The kernels repeat these definitions in 32- and 64-bit
arithmetic of their own.

All functions work on rows [..., V] over the whole vocabulary, in id order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tinfer.compat.philox import philox_block

LOG2E = 1.4426950408889634
GREEDY_BELOW = 1e-5  # a temperature below this means argmax
ONE = 1 << 31  # the mass of certainty
SAMPLE, ACCEPT, DRAFT = 0, 1, 2  # purposes: the subsequence of a draw

OK, NOT_FINITE, NO_TOKEN, BAD_PARAMETER = 0, 1, 2, 3
_STATUS = {
    OK: "ok",
    NOT_FINITE: "the logits hold NaN or +inf",
    NO_TOKEN: "no valid token: every logit is -inf",
    BAD_PARAMETER: "a sampling parameter is NaN, infinite or negative",
}

# 2^f in Q32 by Horner's rule in f, highest power last.
_EXP2 = (
    0x100000000,
    0xB1721816,
    0x3D7F7986,
    0x0E35981A,
    0x027608DC,
    0x005802C2,
    0x00095F92,
    0x00016B1B,
)


def status_text(status: int) -> str:
    """A row's status word as a phrase; ValueError for a word that no op gives."""
    if status not in _STATUS:
        raise ValueError(f"status must be one of {sorted(_STATUS)}, got {status}")
    return _STATUS[status]


@dataclass(frozen=True)
class Filters:
    """Per-row parameters of the cuts, each of shape [B]; see `sample` for their meaning."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @property
    def greedy(self) -> Tensor:
        return self.temperature < GREEDY_BELOW

    def cuts(self, columns: int) -> Tensor:
        """bool [B]: top-k or top-p is on in rows of so many columns."""
        by_p = torch.floor(self.top_p.float().clamp(max=1.0) * 2.0**24) < 2.0**24
        return by_p | ((self.top_k > 0) & (self.top_k < columns))

    def bad(self) -> Tensor:
        """bool [B]: a parameter that means nothing (`top_k` always means something)."""
        t = self.temperature
        fine = (t >= 0) & (t != math.inf) & (self.top_p >= 0) & (self.min_p >= 0)
        return ~fine


def row_status(logits: Tensor, filters: Filters) -> Tensor:
    """int32 [B]: what is wrong with each row, or 0."""
    strange = (logits.isnan() | (logits == math.inf)).any(-1)
    empty = (logits == -math.inf).all(-1)
    status = torch.where(filters.bad(), BAD_PARAMETER, OK)
    status = torch.where(empty, NO_TOKEN, status)
    return torch.where(strange, NOT_FINITE, status).int()


def exp2_q31(y: Tensor) -> Tensor:
    """fp32 y <= 0 -> int64 floor(2^31 * 2^y) up to the polynomial's error; 0 below -32 and NaN."""
    alive = y >= -32.0
    q = torch.floor(torch.where(alive, y, -32.0) * 2.0**24).long()
    shift, fraction = -(q >> 24), q & 0xFFFFFF
    acc = torch.full_like(q, _EXP2[7])
    for c in _EXP2[6::-1]:
        acc = ((acc * fraction) >> 24) + c
    return torch.where(alive, (acc >> 1) >> shift, 0)


def weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """int64 [B, V]: Q31 weights relative to each row's maximum, whose weight is 2^31."""
    x = logits.float()
    slope = torch.tensor(LOG2E, dtype=torch.float32, device=x.device) / temperature.float()
    return exp2_q31((x - x.amax(-1, keepdim=True)) * slope[:, None])


def top_p_threshold(total: Tensor, top_p: Tensor) -> Tensor:
    """floor(total * floor(top_p * 2^24) / 2^24) without overflow, for totals below 2^48."""
    p = torch.floor(top_p.float().clamp(max=1.0) * 2.0**24).long()
    return (total >> 24) * p + (((total & 0xFFFFFF) * p) >> 24)


def min_p_threshold(min_p: Tensor) -> Tensor:
    """The least weight that min-p keeps: ceil(min_p * 2^31)."""
    return torch.ceil(min_p.float().clamp(max=1.0).double() * 2.0**31).long()


def kept(logits: Tensor, weight: Tensor, filters: Filters) -> Tensor:
    """bool [B, V]: what top-k, top-p and min-p leave, over (logit descending, id ascending).

    The three rules look at the whole row, so their order does not matter; they always leave the
    first candidate.
    """
    order = logits.float().sort(dim=-1, descending=True, stable=True)[1]
    by_rank = weight.gather(-1, order)
    before = by_rank.cumsum(-1) - by_rank
    position = torch.arange(logits.shape[-1], device=logits.device)
    k = torch.where(filters.top_k <= 0, logits.shape[-1], filters.top_k).long()
    keep = position < k[:, None]
    keep &= before <= top_p_threshold(weight.sum(-1), filters.top_p)[:, None]
    keep &= by_rank >= min_p_threshold(filters.min_p)[:, None]
    return torch.zeros_like(keep).scatter_(-1, order, keep)


def normalize(weight: Tensor, first: Tensor | None = None) -> Tensor:
    """int64 weights [B, V], some positive in every row -> masses that sum to exactly 2^31.

    What the divisions lose goes to column `first` [B], by default the first maximal weight.
    """
    mass = (weight << 31) // weight.sum(-1, keepdim=True).clamp(min=1)
    at = weight.argmax(-1) if first is None else first
    return mass.scatter_add_(-1, at[:, None], ONE - mass.sum(-1, keepdim=True))


def masses(logits: Tensor, filters: Filters) -> Tensor:
    """int64 [B, V] summing to 2^31: what `sample` draws from. Rows with a status are undefined.

    A greedy row has all its mass on the lowest index among the maxima. Elsewhere what the
    divisions lose goes to that index too: it is the first candidate of the order above.
    """
    x = logits.float()
    first = x.argmax(-1)
    temperature = torch.where(filters.greedy, 1.0, filters.temperature)
    weight = weights(x, temperature)
    weight = torch.where(kept(x, weight, filters), weight, 0)
    one_hot = torch.zeros_like(weight).scatter_(-1, first[:, None], ONE)
    return torch.where(filters.greedy[:, None], one_hot, normalize(weight, first))


def first_word(seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """int64 [B]: word 0 of curand_init(seed, purpose, 4 * position)."""
    stream = torch.full_like(seeds, purpose)
    return philox_block(seeds, stream, positions)[..., 0]


def draw(mass: Tensor, word: Tensor) -> Tensor:
    """int64 [B]: the first index whose inclusive cumulative mass exceeds word % 2^31."""
    target = (word & (ONE - 1))[:, None]
    return (mass.cumsum(-1) <= target).sum(-1)
