"""The record of how far golden runs move under noise is one of this code."""

from __future__ import annotations

import pytest
import torch

from tests.model.golden import GoldenRun, errors, golden_runs
from tests.model.sensitivity import SPARE, noisy_references, outside, recorded
from tests.model.teacher import run_all
from tinfer import ops, registry

RUN = next(r for r in golden_runs() if str(r.name) == "hd128/run0")


def test_noise_is_about_one_unit_in_the_last_place() -> None:
    x, weight = torch.randn(256, 512).bfloat16(), torch.randn(64, 512)
    calm = ops.linear_fp32.ref(x, weight)
    with noisy_references(0):
        moved = ops.linear_fp32.ref(x, weight)
    assert torch.equal(ops.linear_fp32.ref(x, weight), calm)
    error = (moved.double() / calm.double() - 1) * 2.0**23
    assert 0.9 < error.std() < 1.1


def test_all_but_what_the_noise_did_keeps_the_files_tolerances() -> None:
    """A GPU's result is failed where no noise passed a tolerance, or where it passes the noise."""
    golden = GoldenRun(RUN)
    with registry.use_kernels("ref"), torch.inference_mode():
        actual = run_all(golden)
    widths = recorded()[str(RUN.name)]
    other = "cache.final.layer5.window_kv"
    assert other not in widths
    assert outside(golden, actual, widths) == {}
    for name in (other, *widths):
        off = torch.randn(actual[name].shape) * actual[name].abs().max()
        assert set(outside(golden, actual | {name: actual[name] + off}, widths)) == {name}


@pytest.mark.slow
def test_recorded_widths_are_reached_and_not_passed() -> None:
    """A flip of one FP4 code is a third of the files' largest value: some seed must show it."""
    golden, widths = GoldenRun(RUN), recorded()[str(RUN.name)]
    passed: set[str] = set()
    for seed in range(6):
        with registry.use_kernels("ref"), torch.inference_mode(), noisy_references(seed):
            actual = run_all(golden)
        passed |= {k for k, (ok, _) in golden.report(actual).items() if not ok}
        for name, width in widths.items():
            found = errors(actual[name], golden.expected(name))
            assert all(x <= SPARE * w for x, w in zip(found, width, strict=True)), name
    assert passed
    assert passed <= widths.keys()
