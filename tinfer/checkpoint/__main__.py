"""`python -m tinfer.checkpoint inspect DIR`: verify a checkpoint and print its memory plan."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from tinfer.checkpoint.expected import Table, expected_tensors
from tinfer.checkpoint.host import host_memory_limit
from tinfer.checkpoint.plan import (
    GIB,
    PLACEMENTS,
    Demand,
    Memory,
    Plan,
    make_plan,
    needs,
    shortfalls,
)
from tinfer.checkpoint.reader import VISION, open_checkpoint
from tinfer.config import ModelConfig

CONTEXTS = (8192, 131072, 1048576)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tinfer.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="verify headers, print the memory plan")
    inspect.add_argument(
        "path", type=Path, help="checkpoint directory; a config file alone gives the plan alone"
    )
    inspect.add_argument("--ranks", type=int, default=1, help="tensor and expert parallel ranks")
    inspect.add_argument(
        "--device-memory", type=float, metavar="GIB", help="memory of one device; says what fits"
    )
    inspect.add_argument("--context", type=int, default=8192, help="tokens of each sequence")
    inspect.add_argument("--sequences", type=int, default=1, help="sequences at once")
    inspect.add_argument("--vision", action="store_true", help="count the vision tower in")
    inspect.add_argument("--output", choices=("text", "json"), default="text")
    return parser


def _stored(path: Path, config: ModelConfig, vision: bool) -> tuple[Table, list[str]]:
    """The specifications to plan with, and what is known about the files."""
    if path.is_file():
        table = expected_tensors(config)
        if not vision:
            table = {n: s for n, s in table.items() if not n.startswith(VISION)}
        return table, ["config only: no files were read"]
    checkpoint = open_checkpoint(path, config, vision)
    lines = [f"{checkpoint.files.describe()}; {len(checkpoint.names())} tensors, all as expected"]
    lines += [f"skipped {len(n)} tensors ({rule})" for rule, n in checkpoint.skipped.items()]
    return {n: checkpoint.spec(n) for n in checkpoint.names()}, lines


def _size(value: float) -> str:
    for unit, scale in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= scale:
            return f"{value / scale:,.2f} {unit}"
    return f"{value:.0f} B"


def _table(plan: Plan) -> list[str]:
    rows = [(c.name, c.total, c.rank) for c in plan.components]
    rows.append(("all weights", plan.total, plan.rank_weights + plan.rank_tables))
    if plan.total_tables:
        rows.append(("without engram tables", plan.total - plan.total_tables, plan.rank_weights))
    ranks = f"each of {plan.ranks} ranks" if plan.ranks > 1 else "one rank"
    lines = [f"{'weights':<24}{'checkpoint':>16}{ranks:>20}"]
    return lines + [f"{n:<24}{_size(t):>16}{_size(r):>20}" for n, t, r in rows]


def _caches(plan: Plan, config: ModelConfig) -> list[str]:
    lines = [
        "caches (the same on every rank)",
        f"  {plan.cache_per_token} B per token of context (compressed KV, index keys)",
        f"  {_size(plan.cache_per_sequence)} per sequence (window rings, partial groups, history)",
    ]
    contexts = [c for c in CONTEXTS if c < config.max_seq_len] + [config.max_seq_len]
    lines += [f"  {_size(plan.caches(c, 1))} for a sequence of {c:,} tokens" for c in contexts]
    return lines


def _fit(plan: Plan, memory: Memory, args: argparse.Namespace) -> list[str]:
    if memory.device is None:
        return [f"host memory limit: {_size(memory.host)}"] if memory.host else []
    host = f", host limit {_size(memory.host)}" if memory.host else ""
    lines = [
        f"fit: {args.sequences} sequence(s) of {args.context:,} tokens on devices of "
        f"{_size(memory.device)}{host}"
    ]
    for place in PLACEMENTS if plan.total_tables else ("device",):
        demand = Demand(args.context, args.sequences, place)
        lacking = shortfalls(plan, demand, memory)
        left = memory.device - needs(plan, demand, on_host=False)["device"]
        verdict = "DOES NOT FIT: " + "; ".join(lacking) if lacking else f"fits, {_size(left)} left"
        name = f"engram tables on {place}" if plan.total_tables else "weights on the device"
        lines.append(f"  {name:<24} {verdict}")
    return lines


def _as_json(plan: Plan, memory: Memory, args: argparse.Namespace) -> str:
    lacking = {
        place: shortfalls(plan, Demand(args.context, args.sequences, place), memory)
        for place in PLACEMENTS
    }
    return json.dumps(asdict(plan) | {"memory": asdict(memory), "does_not_fit": lacking}, indent=1)


def _inspect(args: argparse.Namespace) -> str:
    if args.context < 1 or args.sequences < 1:
        raise ValueError("inspect: --context and --sequences must be positive")
    config = ModelConfig.load(args.path)
    table, facts = _stored(args.path, config, args.vision)
    plan = make_plan(config, table, args.ranks)
    device = round(args.device_memory * GIB) if args.device_memory is not None else None
    memory = Memory(device, host_memory_limit())
    if args.output == "json":
        return _as_json(plan, memory, args)
    title = f"{args.path}: {config.n_layers} layers, {config.n_mtp_layers} draft stages"
    parts = [
        [title, *facts],
        _table(plan),
        _caches(plan, config),
        _fit(plan, memory, args),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        sys.stdout.write(_inspect(args) + "\n")
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
