"""How one configuration value is described, found in a file, converted and checked."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from tinfer.config_checks import ConfigError

REQUIRED: Any = object()


@dataclass(frozen=True)
class Rule:
    """What a value must satisfy, in words and as a test."""

    words: str
    test: Callable[[Any], bool]


def one_of(*values: str) -> Rule:
    return Rule(" or ".join(map(repr, values)), lambda v: v in values)


ANY = Rule("", lambda _v: True)
POSITIVE = Rule("positive", lambda v: v > 0)
NATURAL = Rule("not negative", lambda v: v >= 0)
EVEN = Rule("even and positive", lambda v: v > 0 and v % 2 == 0)
LAYERS = Rule(
    "ascending layer numbers", lambda v: list(v) == sorted(set(v)) and all(x >= 0 for x in v)
)
NATURALS = Rule("a list of integers that are not negative", lambda v: all(x >= 0 for x in v))


@dataclass(frozen=True)
class Key:
    """Where a field is found in the nested file, its rule, and its default if it may be absent."""

    hf: str | None
    rule: Rule = POSITIVE
    default: Any = REQUIRED


def read_json(path: Path) -> Mapping[str, Any]:
    if path.is_dir():
        found = [p for p in (path / "config.json", path / "inference/config.json") if p.is_file()]
        if not found:
            raise ConfigError(f"config: {path} is not a checkpoint: it has no config.json")
        path = found[0]
    if not path.is_file():
        raise ConfigError(f"config: no such file or directory: {path}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"config: {path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"config: {path} must hold a JSON object, got {type(raw).__name__}")
    return raw


def flatten(raw: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def typed(name: str, value: Any, hint: Any, rule: Rule) -> Any:
    """`value` as the field's type, or a ConfigError that names the key."""
    words, converted = _convert(value, hint)
    if converted is not None or (value is None and type(None) in get_args(hint)):
        if converted is None or rule.test(converted):
            return converted
        words = rule.words
    raise ConfigError(f"config: {name} must be {words}, got {value!r}")


def _convert(value: Any, hint: Any) -> tuple[str, Any]:
    number = type(value) in (int, float) and math.isfinite(value)
    if hint is bool:
        return "true or false", value if isinstance(value, bool) else None
    if hint is int:
        return "an integer", int(value) if number and value == int(value) else None
    if hint is str:
        return "a string", value if isinstance(value, str) else None
    if get_origin(hint) is tuple:
        whole = isinstance(value, (list, tuple)) and all(type(v) is int for v in value)
        return "a list of integers", tuple(value) if whole else None
    return "a number", float(value) if number else None
