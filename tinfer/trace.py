"""Taps on a forward pass: dump every intermediate to files, named by layer."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


class Dump:
    """Writes what each forward pass computes to `DIR/pass0000/layer3.safetensors` and so on.

    Tensors keep the names of the model's taps (`in`, `engram_out`, `attn_in`, `attn_out`,
    `ffn_in`, `ffn_out`, `gate_indices`, `gate_weights`, `index_scores`, `index_ids`, `latent`,
    `out`, `pre_mix`); what belongs to no layer (`embed`, `engram_hash`, `final_hidden`,
    `main_hidden`) is in `model.safetensors`. A pass ends with `final_hidden`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.passes = directory, 0
        self._files: dict[str, dict[str, Tensor]] = defaultdict(dict)

    def __call__(self, name: str, value: Tensor) -> Tensor:
        stage, _, kind = name.rpartition(".")
        self._files[stage or "model"][kind] = value.detach().to("cpu", copy=True).contiguous()
        if name == "final_hidden":
            self.flush()
        return value

    def flush(self) -> None:
        """Write the files of the pass that has just ended."""
        folder = self.directory / f"pass{self.passes:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        for stage, tensors in self._files.items():
            save_file(tensors, str(folder / f"{stage}.safetensors"))
        self._files.clear()
        self.passes += 1
