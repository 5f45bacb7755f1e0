"""Device time of one call: cold (L2 flushed, by events) and inside a replayed graph.

Cold time is what one call costs among others: before each call a buffer larger than any L2 is
overwritten, and a spin kernel keeps the device busy while the host enqueues the call, so that
no host time falls between the two events. Graph time is one call's share of a captured sequence
of calls: caches are warm, and launching costs the host nothing.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

FLUSH_BYTES = 256 << 20
SPIN_CYCLES_PER_US = 2000  # of a 2 GHz clock; a slower one spins longer, which does no harm


@dataclass(frozen=True)
class Timing:
    """Microseconds of device time: the 20th, 50th and 80th percentile of the calls made."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, us: list[float]) -> Timing:
        ordered = sorted(us)
        p20, p50, p80 = (ordered[round(q * (len(us) - 1))] for q in (0.2, 0.5, 0.8))
        return cls(p20, p50, p80)


@dataclass(frozen=True)
class Ceilings:
    """What this device does at best, measured in the same run as the ops."""

    copy_gbs: float
    bf16_tflops: float
    launch_us: float
    launch_graph_us: float


@functools.cache
def _flush_buffer(device: int) -> Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=f"cuda:{device}")


def flush_l2() -> None:
    """Enqueue the overwriting of a buffer larger than the L2 cache."""
    _flush_buffer(torch.cuda.current_device()).zero_()


def _spin(us: float) -> None:
    torch.cuda._sleep(int(us * SPIN_CYCLES_PER_US))  # type: ignore[no-untyped-call]


def _host_and_device_us(call: Callable[[], object]) -> tuple[float, float]:
    """Time to enqueue a warm call and time until it is done."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    queued = time.perf_counter()
    torch.cuda.synchronize()
    return (queued - begin) * 1e6, (time.perf_counter() - begin) * 1e6


def _events(prepare: Callable[[], None], call: Callable[[], object], count: int) -> list[float]:
    """Microseconds between an event before and one after each of `count` calls."""
    pairs = []
    for _ in range(count):
        prepare()
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]


def _count(us: float, budget_ms: float, least: int, most: int) -> int:
    return max(least, min(most, int(budget_ms * 1e3 / max(us, 1.0))))


def cold(call: Callable[[], object], budget_ms: float = 100.0) -> Timing:
    """Device time of `call` with a cold L2, over 7 to 100 calls within about `budget_ms`."""
    for _ in range(2):
        call()
    host_us, total_us = min(_host_and_device_us(call) for _ in range(3))
    spin_us = 1.5 * host_us + 20

    def prepare() -> None:
        flush_l2()
        _spin(spin_us)

    return Timing.of(_events(prepare, call, _count(total_us + spin_us + 100, budget_ms, 7, 100)))


def graph(call: Callable[[], object], budget_ms: float = 50.0) -> Timing:
    """Device time of `call` as one of 2 to 40 calls in a replayed CUDA graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
        total_us = min(_host_and_device_us(call) for _ in range(3))[1]
    torch.cuda.current_stream().wait_stream(stream)
    calls = _count(total_us, 1.0, 2, 40)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(calls):
            call()
    captured.replay()
    replays = _count(total_us * calls, budget_ms, 5, 25)
    return Timing.of([us / calls for us in _events(lambda: _spin(50), captured.replay, replays)])


def copy_gbs(nbytes: int, budget_ms: float = 30.0) -> float:
    """Rate in GB/s of a copy that reads and writes `nbytes` bytes together, L2 cold."""
    source = torch.empty(max(nbytes // 2, 1), dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / cold(lambda: target.copy_(source), budget_ms).p50 / 1e3


def ceilings() -> Ceilings:
    """Copy rate of 2 GiB, bf16 matmul rate at 8192^3, cost of one smallest launch."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul_us = cold(lambda: a @ b).p50
    one = torch.ones(1, device="cuda")
    return Ceilings(
        copy_gbs=copy_gbs(2 << 30),
        bf16_tflops=2 * size**3 / matmul_us / 1e6,
        launch_us=cold(one.zero_).p50,
        launch_graph_us=graph(one.zero_).p50,
    )
