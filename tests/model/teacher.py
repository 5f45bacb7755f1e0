"""Golden runs teacher-forced from prefill to the last decode step, and the taps to do it with."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tests.model.golden import GoldenRun, compare
from tinfer import ops

ISOLATED = {
    "attn_in": "block_attn_in",
    "ffn_in": "block_ffn_in",
    "out": "block_out",
    "pre_mix": "block_pre_mix",
    "attn_out": "attn_out",
    "ffn_out": "ffn_out",
    "engram_out": "engram_out",
}


class Injector:
    """A tap that keeps each intermediate and passes the golden one on.

    So every sublayer works on golden inputs, and a wrong one is named at once. Decode steps
    are compared stacked, as the tolerances were measured.
    """

    def __init__(self, golden: GoldenRun) -> None:
        self.golden, self.prefix, self.step = golden, "prefill", 0
        self.kept: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, name: str, value: Tensor) -> Tensor:
        expected = self.golden.expected(f"{self.prefix}.{name}")
        if expected is None or name.endswith(("index_ids", "index_scores")):
            return value
        if self.prefix == "decode":
            expected = expected[self.step]
        if name == "engram_hash":
            expected = expected.movedim(-2, 0).flatten(1, 2)
        expected = expected.reshape(value.shape)
        self.kept.setdefault(f"{self.prefix}.{name}", []).append((value, expected))
        return expected.to(value.dtype)

    def failures(self) -> tuple[int, list[str]]:
        """How many tensors were compared, and what differs."""
        compared, bad = 0, []
        for name, pairs in self.kept.items():
            stage, _, kind = name.rpartition(".")
            tol = self.tolerance(stage, kind)
            if tol is None:
                continue
            actual = torch.stack([a for a, _ in pairs]).cpu()
            expected = torch.stack([e for _, e in pairs]).cpu()
            gap = self.golden.expected(f"{stage}.gate_gap") if kind == "gate_indices" else None
            gap = None if gap is None else gap.reshape(actual.shape[:-1]).cpu()
            ok, message = compare(actual, expected, tol, gap)
            compared += 1
            if not ok:
                bad.append(f"{name}: {message}")
        return compared, bad

    def tolerance(self, stage: str, kind: str) -> dict | None:
        isolated = self.golden.info["isolated"]
        if kind in ("engram_hash", "embed"):
            return {"kind": "exact"}
        if kind == "gate_indices":
            return isolated["gate_indices"]["tol"]
        if kind == "gate_weights":  # follows the chosen ids: compared where they are clear
            return None
        name = ISOLATED.get(kind)
        if ".dspark." in f".{stage}" and kind in ("attn_out", "ffn_out"):
            name = f"dspark_{kind}"
        return isolated[name]["tol"] if name else None


class Selection:
    """A tap that replaces our index selection by the golden one."""

    def __init__(self, golden: GoldenRun) -> None:
        self.golden, self.prefix, self.step, self.replaced = golden, "prefill", 0, 0

    def __call__(self, name: str, value: Tensor) -> Tensor:
        if not name.endswith("index_ids"):
            return value
        ids = self.golden.expected(f"{self.prefix}.{name}")
        if ids is None:
            return value
        # The reference numbers compressed positions behind its window or its prompt.
        offset = self.golden.length
        if self.prefix == "decode":
            ids, offset = ids[self.step], self.golden.model.config.window_size
        ids = ids.reshape(value.shape[0], -1)
        ids = torch.where(ids >= 0, ids - offset, 2**30).sort(-1).values
        self.replaced += 1
        return torch.where(ids < 2**30, ids, -1).int()[:, : value.shape[1]]


def greedy(row: Tensor) -> Tensor:
    return row.argmax(-1)


def run_all(golden: GoldenRun, trace=lambda name, value: value, chunks: list[int] | None = None):
    """Prefill (in chunks), then every decode step teacher-forced: end-to-end tensors by name."""
    model = golden.model
    cache = golden.cache()
    edges = [0, *(chunks or []), golden.length]
    logits, taps = [], []
    for first, last in itertools.pairwise(edges):
        hidden = model.backbone(golden.prefill(first, last, trace), cache)
        rows = model.backbone.logits(hidden.x).view(golden.batch, last - first, -1)
        logits.append(rows)
        if model.dspark is not None:
            batch = golden.prefill(first, last)
            main = model.dspark.seed(hidden.taps, batch.positions, batch.seq, cache)
            taps.append((hidden.taps.view(golden.batch, last - first, -1), main))
    full = torch.cat(logits, 1)
    out = {"prefill.logits": full[:, -1], "prefill.logits_full": full}
    if taps:
        out["prefill.main_hidden"] = torch.cat([t for t, _ in taps], 1)
    steps: dict[str, list[Tensor]] = {}
    for step in range(golden.steps):
        for k, v in decode_step(golden, cache, step, trace).items():
            steps.setdefault(f"decode.{k}", []).append(v)
    out |= {k: torch.stack(v) for k, v in steps.items()}
    kept = golden.expected("decode.dspark.logits")
    if kept is not None:  # light captures keep the first steps only
        out["decode.dspark.logits"] = out["decode.dspark.logits"][: len(kept)]
    out |= {f"cache.final.{k}": v for k, v in cache_state(golden, cache).items()}
    return out


def decode_step(golden: GoldenRun, cache, step: int, trace) -> dict[str, Tensor]:
    model = golden.model
    if isinstance(trace, (Injector, Selection)):
        trace.prefix, trace.step = "decode", step
    batch = golden.decode(step, trace)
    hidden = model.backbone(batch, cache)
    out = {"logits": model.backbone.logits(hidden.x)}
    if model.dspark is None:
        return out
    out["main_hidden"] = hidden.taps[:, None]
    main = model.dspark.seed(hidden.taps, batch.positions, batch.seq, cache)
    out["dspark.main_x"] = main[:, None]
    newest = out["logits"].argmax(-1)
    if step + 1 < golden.steps:
        newest = golden.tokens[step + 1].to(golden.device)
    draft = model.dspark.propose(
        newest, batch.positions, batch.seq, batch.max_position, cache, greedy, trace
    )
    tokens = torch.cat([newest[:, None], draft.tokens], 1)
    return out | {
        "dspark.output_ids": tokens,
        "dspark.logits": draft.logits,
        "dspark.confidence": draft.confidence,
    }


def cache_state(golden: GoldenRun, cache) -> dict[str, Tensor]:
    """Cache contents in the golden files' arrangement: rings by position % window."""
    cfg, out = golden.model.config, {}
    names = [k.removeprefix("cache.final.") for k in golden.info["tensors"] if "cache.final" in k]
    for name in names:
        stage, _, kind = name.rpartition(".")
        if kind.startswith("tail"):
            continue  # ours keeps whole groups; what it pools is compared as compressed KV
        expected = golden.expected(f"cache.final.{name}")
        rows = expected.shape[1]
        if kind == "window_kv":
            layer = int(stage.rpartition("layer")[2] if "layer" in stage else 0)
            if "dspark" in stage:
                layer = cfg.n_layers + int(stage.rpartition("stage")[2])
            out[name] = _ring(golden, cache, layer, rows)
            continue
        layer = int(stage.removeprefix("layer"))
        ids = torch.arange(rows, dtype=torch.int32, device=golden.device).repeat(golden.batch, 1)
        slots = ops.ids_to_slots(
            ids,
            torch.arange(golden.batch, device=golden.device),
            cache.compressed_table[cfg.compress_ratios[layer]],
            cache.page_size,
        )
        which = cache.compressed if kind == "compress_kv" else cache.index_keys
        layout = cache.compressed_layout if kind == "compress_kv" else cache.index_layout
        out[name] = ops.load_kv(which[layer], layout, slots)
    return out


def _ring(golden: GoldenRun, cache, layer: int, window: int) -> Tensor:
    """The newest position of each ring slot, -1 (zeros) where none was written yet."""
    newest = golden.length + golden.steps - 1
    slots = torch.arange(window, device=golden.device)
    positions = newest - (newest - slots) % window
    seq = torch.arange(golden.batch, device=golden.device).repeat_interleave(window)
    where = cache.window_store_slots(positions.clamp(min=0).repeat(golden.batch), seq)
    where = torch.where(positions.repeat(golden.batch) >= 0, where, -1)
    rows = ops.load_kv(cache.windows[layer], cache.window_layout, where)
    return rows.view(golden.batch, window, -1)
