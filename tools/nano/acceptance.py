"""How many tokens a speculative step yields: drafts against the backbone's own greedy answer."""

from __future__ import annotations

import torch
from torch import Tensor

from tinfer.cache import Cache, CacheSize
from tinfer.model.batch import Batch
from tinfer.model.build import Model


def _greedy(row: Tensor) -> Tensor:
    return row.argmax(-1)


@torch.inference_mode()
def accepted_tokens(model: Model, prompt: list[int], answer: list[int]) -> list[int]:
    """Tokens of each step after the first one, which prefill gives.

    A step drafts a block behind the newest token and verifies it in one forward pass; `answer`
    is what greedy decoding says, so a draft is accepted while it agrees, and the token after the
    accepted ones comes from the verification itself.
    """
    assert model.dspark is not None
    cfg, device = model.config, model.device
    size = CacheSize(1, len(prompt) + len(answer) + cfg.dspark_block_size + 1, len(prompt))
    cache = Cache(cfg, size, device)
    seq = torch.zeros(1, dtype=torch.int64, device=device)

    def feed(tokens: list[int], first: int) -> None:
        batch = Batch.of([(0, first, tokens)], device)
        hidden = model.backbone(batch, cache)
        assert model.dspark is not None
        assert hidden.taps is not None
        model.dspark.seed(hidden.taps, batch.positions, batch.seq, cache)

    feed(prompt, 0)
    steps, done = [], 1  # `done` tokens of the answer are known
    while done < len(answer):
        main = len(prompt) + done - 2
        newest = torch.tensor([answer[done - 1]], device=device)
        at = torch.tensor([main], device=device)
        draft = model.dspark.propose(newest, at, seq, main, cache, _greedy)
        right = 0
        for token in draft.tokens[0].tolist():
            if done + right >= len(answer) or token != answer[done + right]:
                break
            right += 1
        gained = min(right + 1, len(answer) - done)
        feed(answer[done - 1 : done - 1 + gained], main + 1)
        steps.append(gained)
        done += gained
    return steps
