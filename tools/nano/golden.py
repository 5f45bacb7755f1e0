"""Golden outputs of the embedded checkpoint: ids and logits of its reference path.

`python -m tools.nano.golden` writes tests/assets/golden.safetensors anew.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from tinfer import registry
from tinfer.cache import CacheSize
from tinfer.engine import Engine
from tinfer.model.build import Model
from tinfer.request import Request, SamplingParams
from tinfer.runtime import NANO, Loaded, load_model, open_model
from tools.nano.questions import prompt_ids

FILE = Path(__file__).resolve().parents[2] / "tests/assets/golden.safetensors"
PROMPTS = (
    "中国的首都是哪里？",
    "法国的首都是哪里？",
    "What is the capital of Japan?",
    "What is 47 plus 85?",
    "38+57=?",
    "你是谁？",
)


def run(model: Model, loaded: Loaded, prompts: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    """Greedy ids and the logits behind each of them, one entry a prompt."""
    params = SamplingParams(temperature=0.0, max_new_tokens=32, stop_ids=loaded.eos_ids())
    longest = max(map(len, prompts))
    engine = Engine(model, CacheSize(len(prompts), longest + 32, longest))
    ids: list[list[int]] = [[] for _ in prompts]
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in engine.generate([Request(p, params) for p in prompts]):
        assert step.token is not None
        ids[step.request].append(step.token)
        logits[step.request].append(step.logits.float().cpu().clone())
    return [
        {"prompt": torch.tensor(p), "ids": torch.tensor(i), "logits": torch.stack(x)}
        for p, i, x in zip(prompts, ids, logits, strict=True)
    ]


def main() -> None:
    loaded = open_model(NANO, torch.device("cpu"))
    assert loaded.tokenizer is not None
    prompts = [prompt_ids(loaded.tokenizer, p) for p in PROMPTS]
    with registry.use_kernels("ref"):
        model, _ = load_model(loaded, 256, quiet=True)
        found = run(model, loaded, prompts)
    tensors = {f"{i}/{name}": x for i, entry in enumerate(found) for name, x in entry.items()}
    save_file(tensors, str(FILE))
    print(f"{FILE}: {sum(x.numel() for x in tensors.values())} numbers")


if __name__ == "__main__":
    main()
