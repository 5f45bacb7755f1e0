"""Choose, for every op call, between its Triton kernel and its torch reference.

    TINFER_KERNELS=auto|triton|ref[,<op>=triton|ref]...   default: auto
    TINFER_STRICT=1    an implicit fallback raises instead of warning

`auto` runs the kernel wherever the kernel's `supports_<op>` accepts the call, otherwise the
reference, and logs each reason once. `triton` never falls back. `ref` never loads triton.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
log = logging.getLogger("tinfer.kernels")
OPS: dict[str, Op[Any, Any]] = {}


class UnsupportedError(NotImplementedError):
    """The call is valid, but no Triton kernel covers it."""


@dataclass(frozen=True)
class Policy:
    """Which implementation an op call may use."""

    default: str = "auto"
    overrides: dict[str, str] = field(default_factory=dict)
    strict: bool = False

    @property
    def spec(self) -> str:
        """The text that parses to this policy, strictness aside."""
        return ",".join([self.default, *(f"{op}={impl}" for op, impl in self.overrides.items())])

    @classmethod
    def parse(cls, spec: str, strict: bool = False) -> Policy:
        """Read `auto|triton|ref[,op=triton|ref]...`; ValueError names the wrong item."""
        default, overrides = "auto", {}
        for item in filter(None, (part.strip() for part in spec.split(","))):
            op, sep, impl = item.rpartition("=")
            allowed = ("triton", "ref") if sep else ("auto", "triton", "ref")
            if impl not in allowed:
                raise ValueError(f"kernels: {item!r} must name one of {'|'.join(allowed)}")
            if sep and op not in OPS:
                raise ValueError(f"kernels: unknown op {op!r}; known: {', '.join(sorted(OPS))}")
            if sep:
                overrides[op] = impl
            else:
                default = impl
        return cls(default, overrides, strict)


# Reasons that hold for every op of a process: said once, not once per op.
_EVERY_OP = ("triton is not installed", "in host memory")
_said_for_all: set[str] = set()


def _announce(op: str, reason: str) -> None:
    """Say once that an op falls back, or that all of them do."""
    common = next((text for text in _EVERY_OP if reason.endswith(text)), None)
    if common is None:
        log.warning("%s -> ref: %s", op, reason)
    elif common not in _said_for_all:
        _said_for_all.add(common)
        log.warning("%s -> ref: %s; so for every op that meets this", op, reason)


_policy: ContextVar[Policy | None] = ContextVar("tinfer_policy", default=None)


@functools.cache
def _policy_from_env() -> Policy:
    env = os.environ
    return Policy.parse(env.get("TINFER_KERNELS", ""), strict=env.get("TINFER_STRICT") == "1")


def current_policy() -> Policy:
    """The policy in force here: the innermost `use_kernels`, else the environment's."""
    return _policy.get() or _policy_from_env()


@contextmanager
def use_kernels(spec: str, strict: bool = False) -> Iterator[None]:
    """Scope a policy: `with use_kernels("ref"): ...`."""
    token = _policy.set(Policy.parse(spec, strict))
    try:
        yield
    finally:
        _policy.reset(token)


def _on_host(arguments: tuple[Any, ...]) -> str | None:
    """Why no kernel can run: all tensors are in host memory, and nothing is interpreted."""
    devices = [x.device.type for x in arguments if hasattr(x, "data_ptr")]
    if not devices or any(d != "cpu" for d in devices):
        return None
    interpreted = importlib.import_module("tinfer.kernels._jit").INTERPRET.value
    return None if interpreted else "its tensors are in host memory"


class Op(Generic[P, R]):
    """One op: a torch reference that defines it, and the Triton kernel that replaces it.

    The reference lives in `tinfer.compat.<family>`, the kernel under the same function name in
    `tinfer.kernels.<family>`, beside `supports_<op>` with the same parameters, which returns
    None or the reason why this valid call has no kernel. `kernel=False` declares that no kernel
    is written yet.
    """

    def __init__(self, ref: Callable[P, R], kernel: bool = True) -> None:
        self.name, self.ref, self.has_kernel = ref.__name__, ref, kernel
        self.family = ref.__module__.rpartition(".")[2]
        self.calls: Counter[str] = Counter()
        self.adapter: Callable[P, R] | None = None  # a library asked for by name, see `use_gemm`
        self.reasons: dict[str, None] = {}
        functools.update_wrapper(self, ref)
        if self.name in OPS:
            raise ValueError(f"op {self.name!r} is registered twice")
        OPS[self.name] = self

    @functools.cached_property
    def _loaded(self) -> tuple[Callable[P, R], Callable[P, str | None]]:
        module = importlib.import_module(f"tinfer.kernels.{self.family}")
        kernel, supports = getattr(module, self.name), getattr(module, f"supports_{self.name}")
        want = inspect.signature(self.ref, eval_str=True)
        got = inspect.signature(kernel, eval_str=True)
        if want != got:
            raise TypeError(f"{self.name}: kernel signature must be {want}, got {got}")
        return kernel, supports

    @property
    def kernel(self) -> Callable[P, R]:
        """The Triton launcher, loaded on first use."""
        return self._loaded[0]

    def why_not_triton(self, *args: P.args, **kwargs: P.kwargs) -> str | None:
        """None if the kernel takes this call, otherwise the reason as a phrase."""
        if not self.has_kernel:
            return "no Triton kernel is written for this op"
        try:
            supports = self._loaded[1]
        except ModuleNotFoundError as e:
            if e.name != "triton":
                raise
            return "triton is not installed"
        return _on_host((*args, *kwargs.values())) or supports(*args, **kwargs)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        policy = current_policy()
        impl = policy.overrides.get(self.name, policy.default)
        if self.adapter is not None and impl != "ref":
            self.calls["adapter"] += 1
            return self.adapter(*args, **kwargs)
        if impl != "ref":
            reason = self.why_not_triton(*args, **kwargs)
            if reason is None:
                self.calls["triton"] += 1
                return self._loaded[0](*args, **kwargs)
            if impl == "triton" or policy.strict:
                raise UnsupportedError(f"{self.name}: no Triton kernel for this call: {reason}")
            if reason not in self.reasons:
                self.reasons[reason] = None
                _announce(self.name, reason)
        self.calls["ref"] += 1
        return self.ref(*args, **kwargs)


@contextmanager
def use_gemm(name: str | None = None) -> Iterator[None]:
    """Scope what computes the fp8 products: "triton", or "deep_gemm" through its adapter.

    None reads TINFER_GEMM; unset means triton. ImportError if the library is not usable.
    """
    name = os.environ.get("TINFER_GEMM", "triton") if name is None else name
    if name not in ("triton", "deep_gemm"):
        raise ValueError(f"TINFER_GEMM: must be triton or deep_gemm, got {name!r}")
    ops = [OPS[op] for op in ("linear_fp8", "moe_experts")] if name == "deep_gemm" else []
    library = importlib.import_module("tinfer.compat.deep_gemm").load() if ops else None
    for op in ops:
        op.adapter = getattr(library, op.name)
    try:
        yield
    finally:
        for op in ops:
            op.adapter = None


def reset_counts() -> None:
    """Forget which implementations ran."""
    for op in OPS.values():
        op.calls.clear()
        op.reasons.clear()
    _said_for_all.clear()


def report() -> str:
    """One line per op that ran: how often each implementation ran, and why the reference did."""
    rows = [f"{'op':<26}{'triton':>8}{'ref':>8}  why ref"]
    for name, op in sorted(OPS.items()):
        if op.calls:
            why = "; ".join(op.reasons)
            if op.calls["adapter"]:
                why = f"{op.calls['adapter']} by deep_gemm; {why}".rstrip("; ")
            rows.append(f"{name:<26}{op.calls['triton']:>8}{op.calls['ref']:>8}  {why}".rstrip())
    return "\n".join(rows)


def get(name: str) -> Op[Any, Any]:
    """The op registered under `name`; ValueError lists the known ones."""
    if name not in OPS:
        raise ValueError(f"unknown op {name!r}; known: {', '.join(sorted(OPS))}")
    return OPS[name]
