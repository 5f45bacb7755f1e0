"""From a checkpoint directory to something that runs: config, tokenizer, model, engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from tinfer.cache import CacheSize
from tinfer.chat import Tokenizer
from tinfer.checkpoint import Checkpoint, open_checkpoint
from tinfer.checkpoint.host import host_memory_limit
from tinfer.checkpoint.plan import Demand, Memory, make_plan, require_fit
from tinfer.config import ModelConfig
from tinfer.engine import Engine
from tinfer.model.batch import Trace, no_trace
from tinfer.model.build import Model, build_model
from tinfer.model.engram_hash import compressed_token_map
from tinfer.request import Request

EOS = "<｜end▁of▁sentence｜>"
UNLIMITED = 1 << 20  # positions, where the config names no context length
NANO = Path(__file__).parent / "assets/nano"  # the checkpoint inside the package


@dataclass(frozen=True)
class Loaded:
    """A checkpoint, verified and opened; its weights are not in memory yet."""

    config: ModelConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None  # None: ids only
    device: torch.device

    @property
    def context(self) -> int:
        """Most positions of a sequence."""
        return self.config.max_seq_len or UNLIMITED

    def eos_ids(self) -> tuple[int, ...]:
        """The end-of-sentence token, where the tokenizer has one."""
        if self.tokenizer is None or EOS not in self.tokenizer.added:
            return ()
        return (self.tokenizer.control_id(EOS),)


def pick_device(name: str | None) -> torch.device:
    """The named device, else the accelerator torch sees, else the CPU."""
    if name is None:
        accelerator = torch.accelerator.current_accelerator()
        return accelerator if accelerator is not None else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"--device must name a usable torch device, got {name!r}: {reason}"
        ) from error
    return device


def open_model(directory: Path, device: torch.device) -> Loaded:
    """Verify config, checkpoint and tokenizer of a directory. Reads no weights."""
    if not directory.is_dir():
        raise ValueError(f"no such directory: {directory}")
    config = ModelConfig.load(directory)
    checkpoint = open_checkpoint(directory, config)
    has_tokenizer = (directory / "tokenizer.json").is_file()
    tokenizer = Tokenizer.load(directory) if has_tokenizer else None
    return Loaded(config, checkpoint, tokenizer, device)


def load_model(loaded: Loaded, length: int, quiet: bool) -> tuple[Model, float]:
    """Read the weights to the device, with a progress bar -> model and seconds."""
    config, start = loaded.config, time.perf_counter()
    token_map = None
    if config.engram_layer_ids:
        if loaded.tokenizer is None:
            raise ValueError("tokenizer.json is missing; a model with engram layers needs it")
        size = config.engram_compressed_vocab_size
        token_map = compressed_token_map(loaded.tokenizer.inner, size)
    bar = tqdm(
        total=loaded.checkpoint.nbytes, unit="B", unit_scale=True, desc="loading", disable=quiet
    )
    with bar:
        model = build_model(
            config, loaded.checkpoint, loaded.device, length, token_map, lambda n: bar.update(n)
        )
    return model, time.perf_counter() - start


def make_engine(
    loaded: Loaded,
    requests: Sequence[Request],
    *,
    max_batch: int,
    chunk: int,
    quiet: bool,
    trace: Trace = no_trace,
    drafts: bool = False,
) -> tuple[Engine, float]:
    """Check the requests and the memory, load the model, size the caches -> engine, seconds."""
    if drafts and loaded.config.n_mtp_layers * loaded.config.dspark_block_size == 0:
        raise ValueError("--drafts: this checkpoint has no draft stages")
    longest = max(len(r.prompt_ids) for r in requests)
    wanted = max(len(r.prompt_ids) + r.params.max_new_tokens for r in requests)
    context = loaded.context
    for request in requests:
        check_request(request, loaded.config.vocab_size, context)
    length = min(context, wanted)
    sequences = min(len(requests), max_batch)
    check_memory(loaded, length, sequences)
    model, seconds = load_model(loaded, length + loaded.config.dspark_block_size + 1, quiet)
    size = CacheSize(sequences, length, min(longest, chunk))
    return Engine(model, size, trace, drafts), seconds


def check_request(request: Request, vocab_size: int, context: int) -> None:
    """ValueError for a prompt that this model cannot take."""
    prompt = request.prompt_ids
    if not len(prompt):
        raise ValueError("prompt must have at least one token, got none")
    bad = next((i for i in (*prompt, *request.force_ids) if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise ValueError(f"token ids must be in [0, {vocab_size}), got {bad}")
    if len(prompt) > context:
        raise ValueError(f"prompt must fit the context of {context} tokens, got {len(prompt)}")


def check_memory(loaded: Loaded, length: int, sequences: int) -> None:
    """CheckpointError with the whole sum where the run would not fit; nothing is loaded yet."""
    checkpoint = loaded.checkpoint
    table = {name: checkpoint.spec(name) for name in checkpoint.names()}
    plan = make_plan(loaded.config, table)
    device = None
    if loaded.device.type == "cuda":
        device = torch.cuda.mem_get_info(loaded.device)[0]
    require_fit(plan, Demand(length, sequences, "device"), Memory(device, host_memory_limit()))
