"""Dense projections: golden vectors, parity with fp64, edges, portability."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Generator

from tests.data.golden.check_golden import Golden, OpCase
from tests.kernels.parity import check_parity
from tinfer import ops, registry
from tinfer.compat.gemm import dequantize_rows
from tinfer.formats import Fp8Block32, as_bytes
from tinfer.kernels import _gemm_few
from tinfer.kernels._gemm_decode import _add_parts_kernel
from tinfer.kernels._target import TRITON, Target, use_target
from tinfer.registry import use_kernels
from tinfer.testing.aot import TARGETS, check_family
from tinfer.testing.cases import Case, cases
from tinfer.testing.launches import launches_of

CASES = cases(family="gemm")
GOLDEN = Golden("tests/data/golden")
IMPLEMENTATIONS = ("ref", pytest.param("triton", marks=pytest.mark.interpret))
DTYPES = {"c_bf16": torch.bfloat16, "c_f32": torch.float32}


@pytest.mark.interpret
@pytest.mark.parametrize("case", [c for c in CASES if not c.real], ids=lambda c: c.id)
def test_parity(case: Case, seed: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_parity(case, seed, device, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in CASES if c.real], ids=lambda c: c.id)
def test_parity_real(case: Case, seed: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_parity(case, seed, device, monkeypatch)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_compiles(target: str) -> None:
    check_family("gemm", target)


# ---------------------------------------------------------------- golden vectors
def _golden(op: str) -> list[OpCase]:
    """Those of the release's scales; test_deep_gemm has those with one fp32 scale per 128."""
    return [
        c
        for c in GOLDEN.ops(op)
        if all(v.dtype != torch.float32 for n, v in c.inputs.items() if n.endswith("_s"))
    ]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", _golden("fp8_gemm") + _golden("fp4_gemm"), ids=lambda c: c.case)
def test_golden_gemm(case: OpCase, impl: str, device: str) -> None:
    op = ops.linear_fp8 if case.op == "fp8_gemm" else ops.linear_fp4
    a = [as_bytes(case.inputs[n]).to(device) for n in ("a", "a_s", "b", "b_s")]
    with use_kernels(impl):
        case.check({n: op(*a, out_dtype=DTYPES[n]) for n in case.outputs})


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", GOLDEN.ops("linear"), ids=lambda c: c.case)
def test_golden_linear(case: OpCase, impl: str, device: str) -> None:
    x, weight = case.inputs["x"].to(device), case.inputs["weight"].to(device)
    rows = x.flatten(0, -2)
    with use_kernels(impl):
        if case.params["weight"] == "bf16":
            y = ops.linear_bf16(rows, weight)
        elif case.params["weight"].startswith("f32"):
            y = ops.linear_fp32(rows, weight)
        else:
            op = ops.linear_fp8 if case.params["weight"] == "fp8" else ops.linear_fp4
            q, s = ops.per_token_cast(rows, "e4m3", 32, "ue8m0")
            y = op(q, s, as_bytes(weight), as_bytes(case.inputs["scale"]).to(device))
        case.check({"y": y.view(*x.shape[:-1], -1)})


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_golden_wo_a(impl: str, device: str) -> None:
    """The weight that a product sees is the dequantized one: identity rows read it back."""
    (case,) = GOLDEN.ops("wo_a_dequant")
    weight, scale = (as_bytes(case.inputs[n]).to(device) for n in ("weight", "scale"))
    eye = torch.eye(weight.shape[1], dtype=torch.bfloat16, device=device)[:, None]
    with use_kernels(impl):
        case.check({"weight_bf16": ops.linear_grouped(eye, weight, scale)[:, 0].t().contiguous()})


# ---------------------------------------------------------------- properties
FINITE = torch.tensor([c if c & 127 != 127 else 0 for c in range(256)], dtype=torch.uint8)
ONE = 0x38  # 1.0 in e4m3


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("width", "dtype"), [(32, torch.float32), (256, torch.bfloat16)])
def test_every_code_and_scale_is_exact(
    impl: str, width: int, dtype: torch.dtype, device: str
) -> None:
    """One column at a time: a product is value times scale, whatever the codes."""
    one = torch.zeros(1, width, dtype=torch.uint8, device=device)
    one[:, 0] = ONE
    weight = torch.zeros(256, width, dtype=torch.uint8, device=device)
    weight[:, 0] = FINITE
    unit = torch.full((1, width // 32), 127, dtype=torch.uint8, device=device)
    for code in (67, 100, 127, 140, 187):
        scale = torch.full((8, width // 32), code, dtype=torch.uint8, device=device)
        with use_kernels("ref"):
            want = ops.linear_fp8(one, unit, weight, scale, dtype)
        with use_kernels(impl):
            got = ops.linear_fp8(one, unit, weight, scale, dtype)
        assert torch.equal(got, want)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [3, 16, 40])
def test_every_activation_is_exact(impl: str, tokens: int, device: str, seed: int) -> None:
    """A weight of 2^60 times one gives activations back: every code in every column's place, and
    scales down to the smallest."""
    g = Generator(device).manual_seed(seed)
    q = torch.stack([FINITE.roll(7 * t) for t in range(tokens)]).to(device)
    s = torch.randint(40, 120, (tokens, 8), generator=g, device=device, dtype=torch.uint8)
    s[1], q[1] = 0, torch.where(q[1] & 0x40 > 0, q[1], 0)  # of 2^-127 only what bf16 holds
    s[2, 3] = 255
    weight = torch.eye(256, dtype=torch.uint8, device=device) * ONE
    scale = torch.full((8, 8), 187, dtype=torch.uint8, device=device)
    want = (dequantize_rows(q, s).double() * 2.0**60).to(torch.bfloat16)
    want[2] = float("nan")
    with use_kernels(impl):
        got = ops.linear_fp8(q, s, weight, scale)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def _codes(shape: tuple[int, int], g: Generator) -> torch.Tensor:
    """Random finite e4m3."""
    code = torch.randint(0, 0x7F, shape, generator=g, device=g.device)
    sign = torch.randint(0, 2, shape, generator=g, device=g.device)
    return (code + sign * 128).to(torch.uint8)


@pytest.mark.interpret
@pytest.mark.parametrize("tokens", [7, 64, 96])
def test_sums_keep_the_bits_that_rounding_needs(tokens: int, device: str, seed: int) -> None:
    """bf16 results are those of exact sums but for rare ties: what adds 32 products with 13 bits
    (fp8 tensor cores) stays within any error bound and yet rounds one element in 20 elsewhere."""
    g = Generator(device).manual_seed(seed)
    q = _codes((tokens, 256), g)
    weight = _codes((96, 256), g)
    s = torch.randint(120, 134, (tokens, 8), generator=g, device=device, dtype=torch.uint8)
    scale = torch.randint(120, 134, (3, 8), generator=g, device=device, dtype=torch.uint8)
    exact = dequantize_rows(q, s).double() @ Fp8Block32(weight, scale).dequantize(torch.float64).T
    with use_kernels("triton"):
        out = ops.linear_fp8(q, s, weight, scale)
    assert (out != exact.to(torch.bfloat16)).float().mean() < 5e-3


@pytest.mark.interpret
def test_same_bits_on_every_run(device: str, seed: int) -> None:
    """SP-04, TP-07: no atomics, no tuning at run time."""
    for name in ("63x96x256", "129x72x96"):
        (case,) = [c for c in CASES if c.id == f"linear_fp8-{name}"]
        with use_kernels("triton"):
            first, second = (ops.linear_fp8(**case.arguments(seed, device)) for _ in range(2))
        assert torch.equal(first, second)


def _covered(tiles: _gemm_few.HopperTiles, count: int, steps: int) -> dict[int, list[int]]:
    """Programs of each tile, in the order of K, as `_gemm_hopper` deals steps out."""
    owners: dict[int, list[int]] = {}
    for program in range(tiles.programs):
        first = program * tiles.units
        last = min(first + tiles.units, count * steps) - 1
        for tile in range(first // steps, last // steps + 1):
            owners.setdefault(tile, []).append(program)
    return owners


@pytest.mark.parametrize("plan", [_gemm_few.hopper_tiles, _gemm_few.linear_tiles])
@pytest.mark.parametrize("tokens", [1, 7, 16, 33, 64])
def test_hopper_tiles_deal_out_every_step(
    plan: Callable[[int, int, int, int], _gemm_few.HopperTiles], tokens: int, seed: int
) -> None:
    """Every tile has its programs, each share a place of its own, and `sharers` is enough."""
    draw = random.Random(seed)
    sizes = [(32768, 1280), (5120, 8192), (25600, 6144), (4608, 5120), (64, 128), (65, 8192)]
    sizes += [(draw.randrange(1, 9000), 128 * draw.randrange(1, 70)) for _ in range(50)]
    for n, k in sizes:
        tiles = plan(tokens, n, k, 132)
        count, steps = -(-n // tiles.rows), k // 128
        owners = _covered(tiles, count, steps)
        assert sorted(owners) == list(range(count))
        assert (
            sum(len(p) for p in owners.values())
            >= tiles.programs
            == len({p for programs in owners.values() for p in programs})
        )
        places = [tile + p for tile, programs in owners.items() for p in programs]
        assert len(set(places)) == len(places)
        assert max(places) < tiles.programs + count
        most = max(len(programs) for programs in owners.values())
        assert most == 1 if tiles.whole else most <= tiles.sharers(steps) <= 18


@pytest.mark.skipif(TRITON < (3, 6), reason="Hopper's own kernels need Triton 3.6")
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_few_tokens_on_hopper_are_one_launch_or_chained_ones(tokens: int) -> None:
    (case,) = [c for c in CASES if c.id == f"linear_fp8-{tokens}x4608x5120"]
    with use_target(Target("cuda", 90, 227)):
        names = [launch.name for launch in launches_of(case)]
    if tokens <= 16:
        assert names == ["_codes_hopper_kernel"]
    else:
        assert names == ["_dequantize_kernel", "_linear_hopper_kernel", "_add_parts_kernel"]


@pytest.mark.parametrize("tokens", [1, 8, 9, 16])
def test_coded_tiles_divide_weights_and_fit(tokens: int) -> None:
    for n, k in [(32768, 1280), (5120, 8192), (25600, 6144), (4608, 5120), (64, 384), (64, 768)]:
        tiles = _gemm_few.codes_tiles(tokens, n, k, 132)
        assert n % tiles.rows == 0
        assert tiles.rows == 16 or tiles.rows % 32 == 0  # tiles of scales
        assert k % (128 * tiles.deep) == 0
        assert tiles.rows * tiles.deep >= 64  # 16 rows a warp
        assert tiles.tokens >= tokens
        step = tiles.deep * 128 * (tiles.rows + tiles.tokens)
        together = min(3, -(-n // tiles.rows // 132))  # programs a processor
        assert tiles.stages * step * together < 220 << 10


@pytest.mark.interpret
def test_shares_of_a_tile_add_up_in_the_order_of_k(device: str, seed: int) -> None:
    rows, tokens, steps, units, n = 64, 16, 10, 4, 150
    count, programs = -(-n // rows), -(-3 * steps // units)
    tiles = _gemm_few.HopperTiles(rows, tokens, units, programs, False)
    generator = torch.Generator(device).manual_seed(seed)
    parts = torch.randn(count + programs, tokens // 8, rows, 8, generator=generator, device=device)
    want = torch.zeros(tokens, count * rows, device=device)
    for tile, owners in _covered(tiles, count, steps).items():
        for program in owners:
            share = parts[tile + program].transpose(1, 2).reshape(tokens, rows)
            want[:, tile * rows : (tile + 1) * rows] += share
    out = torch.full((13, n), float("nan"), dtype=torch.bfloat16, device=device)
    _add_parts_kernel[(count * tokens // 8,)](
        parts, out, 13, n, steps, units, ROWS=rows, TOKENS=tokens, MOST=tiles.sharers(steps),
        EARLY=False,        num_warps=2,
    )  # fmt: skip
    assert torch.equal(out, want[:13, :n].to(torch.bfloat16))


@pytest.mark.gpu
def test_graph_replay_equals_a_call(seed: int) -> None:
    for case_id in ("linear_fp8-16x4608x5120", "linear_fp8-256x4608x5120"):
        (case,) = [c for c in CASES if c.id == case_id]
        a = case.arguments(seed, "cuda")
        with use_kernels("triton"):
            want = ops.linear_fp8(**a)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = ops.linear_fp8(**a)
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, want)


# ---------------------------------------------------------------- errors
def _fp8_arguments() -> dict[str, torch.Tensor]:
    zeros = lambda *shape: torch.zeros(*shape, dtype=torch.uint8)  # noqa: E731
    return {"q": zeros(3, 64), "s": zeros(3, 2), "weight": zeros(40, 64), "scale": zeros(2, 2)}


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"scale": torch.zeros(1, 2, dtype=torch.uint8)},
            ValueError,
            r"scale must be of shape \[2, 2\]",
        ),
        ({"s": torch.zeros(3, 3, dtype=torch.uint8)}, ValueError, r"s must be of shape \[3, 2\]"),
        ({"q": torch.zeros(3, 64)}, TypeError, "q must be uint8, got float32"),
        ({"weight": torch.zeros(40, 32, dtype=torch.uint8)}, ValueError, "weight must be of shape"),
        ({"out_dtype": torch.float16}, ValueError, "out_dtype must be bfloat16 or float32"),
    ],
)
def test_errors(impl: str, change: dict, error: type[Exception], message: str) -> None:
    """LD-05: the tile grid is rounded up, and anything else is refused by name."""
    with use_kernels(impl), pytest.raises(error, match=f"linear_fp8: {message}"):
        registry.get("linear_fp8").ref(**_fp8_arguments() | change) if impl == "ref" else (
            registry.get("linear_fp8").kernel(**_fp8_arguments() | change)
        )
