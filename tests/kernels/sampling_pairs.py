"""Compare sampler kernels with the reference on the CPU over many (logits, parameters) pairs.

    python -m tests.kernels.sampling_pairs [--device cuda] [--pairs 10000] [--seed N]
                                          [--columns 4096]

Logits are drawn on the CPU and copied; the reference runs there. A pair is one row: its masses,
status and token are compared bit for bit.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tinfer import ops, registry
from tinfer.compat.masses import OK, SAMPLE, draw, first_word
from tinfer.testing.cases.sampling import logits_of, mixed_parameters, random_bits

KINDS = ("normal", "ties", "flat", "constant", "peaked", "masked", "huge", "subnormal", "zeros")
VOCAB = 129280
# Columns, rows of one batch, share of the pairs.
SHAPES = ((129280, 16, 0.05), (4096, 256, 0.35), (1000, 256, 0.35), (63, 256, 0.25))


@dataclass
class Outcome:
    pairs: int = 0
    vocabulary_rows: int = 0
    different: int = 0
    first: str = ""


def _batches(pairs: int, seed: int, only: int | None) -> Iterator[tuple[str, dict[str, Tensor]]]:
    g = torch.Generator().manual_seed(seed)
    for columns, rows, share in SHAPES:
        if only not in (None, columns):
            continue
        for batch in range(max(1, round(pairs * share / rows))):
            kind = KINDS[(seed + batch) % len(KINDS)]
            dtype = torch.bfloat16 if batch % 5 == 4 else torch.float32
            arguments = {
                "logits": logits_of(kind, g, rows, columns).to(dtype),
                **mixed_parameters(g, rows),
            }
            yield f"{kind} {rows}x{columns} {dtype}", arguments


def _reference(arguments: dict[str, Tensor], keys: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """(masses, status, token, status); `sample` is one draw from the masses, computed once."""
    mass, status = ops.token_masses.ref(**arguments)
    word = first_word(keys["seeds"], keys["positions"], SAMPLE)
    token = torch.where(status == OK, draw(mass, word), 0)
    return mass, status, token, status


def _differing(mine: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> Tensor:
    """bool [B]: rows where any output differs."""
    rows = theirs[0].shape[0]
    wrong = torch.zeros(rows, dtype=torch.bool)
    for a, b in zip(mine, theirs, strict=True):
        wrong |= (a.cpu() != b).reshape(rows, -1).any(-1)
    return wrong


def compare_pairs(device: str, pairs: int, seed: int, only: int | None = None) -> Outcome:
    """Run `pairs` rows or more, or those with `only` so many columns, through both."""
    outcome, g = Outcome(), torch.Generator().manual_seed(seed + 1)
    for name, arguments in _batches(pairs, seed, only):
        rows = len(arguments["logits"])
        positions = torch.randint(0, 2**33, (rows,), generator=g)
        keys = {"seeds": random_bits(g, rows), "positions": positions}
        there = {k: v.to(device) for k, v in {**arguments, **keys}.items()}
        shared = {k: there[k] for k in arguments}
        with registry.use_kernels("triton"):
            mine = (*ops.token_masses(**shared), *ops.sample(**there))
        theirs = _reference(arguments, keys)
        wrong = _differing(mine, theirs)
        outcome.pairs += rows
        outcome.vocabulary_rows += rows * (arguments["logits"].shape[1] == VOCAB)
        outcome.different += int(wrong.sum())
        if wrong.any() and not outcome.first:
            row = int(wrong.nonzero()[0])
            values = {k: v[row].item() for k, v in arguments.items() if k != "logits"}
            outcome.first = f"{name} row {row} {values}"
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pairs", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--columns", type=int, choices=[s[0] for s in SHAPES], help="only these")
    args = parser.parse_args()
    outcome = compare_pairs(args.device, args.pairs, args.seed, args.columns)
    counts = Counter({o: registry.OPS[o].calls["triton"] for o in ("sample", "token_masses")})
    sys.stdout.write(f"{outcome} kernel calls {dict(counts)}\n")
    sys.exit(outcome.different > 0)


if __name__ == "__main__":
    main()
