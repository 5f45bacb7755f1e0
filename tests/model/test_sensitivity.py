"""The record of how far golden runs move under noise is one of this code."""

from __future__ import annotations

import pytest
import torch

from tests.model.golden import GoldenRun, errors, golden_runs
from tests.model.sensitivity import SPARE, noisy_references, recorded
from tests.model.teacher import run_all
from tinfer import ops, registry

RUN = next(r for r in golden_runs() if str(r.name) == "hd128/run0")


def test_noise_is_about_one_unit_in_the_last_place() -> None:
    x = torch.randn(256, 512).bfloat16()
    weight = torch.randn(512, 512).bfloat16()
    calm = ops.linear_bf16.ref(x, weight)
    with noisy_references(0):
        moved = ops.linear_bf16.ref(x, weight)
    assert torch.equal(ops.linear_bf16.ref(x, weight), calm)
    steps = (moved.view(torch.int16).int() - calm.view(torch.int16).int()).abs()
    assert steps.max() == 1
    assert 0 < (steps > 0).float().mean() < 2.0**-12


@pytest.mark.slow
def test_recorded_widths_are_reached_and_not_passed() -> None:
    """A flip of one FP4 code is a third of the files' largest value: some seed must show it."""
    golden, widths = GoldenRun(RUN), recorded()[str(RUN.name)]["own"]
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
