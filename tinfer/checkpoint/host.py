"""How much memory this machine lets the process use."""

from __future__ import annotations

import re
from pathlib import Path


def host_memory_limit(proc: Path = Path("/proc"), sys: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The smallest of the machine's memory and the limits of the control groups above us.

    A container is killed at its control group's limit, whatever the machine has. Returns None
    where neither can be read.
    """
    limits = [_machine(proc), *_groups(proc, sys)]
    return min((x for x in limits if x is not None), default=None)


def _machine(proc: Path) -> int | None:
    found = re.search(r"^MemTotal:\s+(\d+) kB", _text(proc / "meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _groups(proc: Path, sys: Path) -> list[int | None]:
    """Limits of our own group and every group above it, version 2 and version 1."""
    limits: list[int | None] = []
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, file = sys, "memory.max"
        elif "memory" in controllers.split(","):
            root, file = sys / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for place in (group, *group.parents):
            limits.append(_number(place / file))
            if place == root:
                break
    return limits


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
