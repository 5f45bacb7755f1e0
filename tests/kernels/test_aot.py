"""Recording launches and judging what they compile to, without a device."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tinfer.kernels._target import INTERPRETER, Target, target, use_target
from tinfer.testing.aot import SHARED_KIB, TARGETS, Compiled, check_family, specialize
from tinfer.testing.launches import MAX_PROGRAMS, recorded

pytestmark = pytest.mark.interpret


@triton.jit(do_not_specialize=["varying"])
def _add_kernel(x_ptr, y_ptr, n, varying, scale, N: tl.constexpr, OFFSET: tl.constexpr = 2):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(y_ptr + i, x * scale + OFFSET + varying, mask=i < n)


def _launch(n: int = 8) -> torch.Tensor:
    x, y = torch.zeros(n), torch.zeros(n)
    _add_kernel[lambda meta: (meta["N"] // 4, 3)](x, y, n, 1, scale=0.5, N=16, num_warps=2)
    return y


def test_recorded_launches_do_not_run() -> None:
    with recorded() as launches:
        y = _launch()
    assert not y.any()
    (launch,) = launches
    assert launch.name == "_add_kernel"
    assert launch.grid == (4, 3)
    assert launch.programs == 12
    assert launch.options == {"num_warps": 2}
    assert launch.arguments["OFFSET"] == 2
    assert launch.arguments["n"] == 8


def test_recording_ends_with_the_block() -> None:
    with pytest.raises(KeyError), recorded():
        raise KeyError
    with recorded() as launches:
        pass
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y = torch.ones(8, device=device), torch.zeros(8, device=device)
    _add_kernel[(1,)](x, y, 8, 1, 0.5, N=16)
    assert not launches
    assert y.tolist() == [3.5] * 8


@pytest.mark.skipif(bool(triton.knobs.runtime.interpret), reason="interpreted kernels lack types")
def test_specialization_is_that_of_a_launch() -> None:
    with recorded() as launches:
        _launch(16)
        _launch(1)
    signature, constants, attributes = specialize(launches[0])
    assert signature["x_ptr"] == "*fp32"
    assert [signature[k] for k in ("n", "varying", "scale")] == ["i32", "i32", "fp32"]
    assert constants == {(5,): 16, (6,): 2}
    assert set(attributes) == {(0,), (1,), (2,)}
    assert specialize(launches[1])[0]["n"] == "constexpr"


@pytest.mark.parametrize(
    ("shared", "name"),
    [(66560, "hip:gfx942"), (98304, "hip:gfx942"), (108672, "cuda:89"), (131072, "hip:gfx942")],
)
def test_tp_03_shared_memory_beyond_the_limit_is_a_problem(shared: int, name: str) -> None:
    """TP-03: programs that compiled and could not be launched."""
    result = Compiled("op", "case", "_kernel", name, programs=1, shared=shared)
    limit = SHARED_KIB[name] * 1024
    assert result.problem().endswith(f"{shared} bytes of shared memory, limit {limit}")
    result.shared = limit
    assert not result.problem()


def test_tp_01_the_product_of_a_grid_is_bounded() -> None:
    """TP-01: 8192 x 8 and 64 x 32 x 32 programs are one too many."""
    for programs in (8192 * 8, 64 * 32 * 32):
        result = Compiled("op", "case", "_kernel", "cuda:90", programs=programs)
        assert "grid of 65536 programs, limit 65535" in result.problem()
    assert not Compiled("op", "case", "_kernel", "cuda:90", programs=MAX_PROGRAMS).problem()


def test_launchers_choose_for_the_target_in_force() -> None:
    wanted = Target("hip", "gfx942", 64)
    with use_target(wanted):
        assert target(torch.device("cpu")) is wanted
        assert wanted.warp_size == 64
    assert target(torch.device("cpu")) is INTERPRETER
    assert set(TARGETS) == set(SHARED_KIB)


@pytest.mark.aot
def test_a_family_without_kernels_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no kernels"):
        check_family("no_such_family", "cuda:90")
