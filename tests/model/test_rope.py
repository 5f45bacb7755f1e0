"""The table of rotary angles: golden vectors, the release's two kinds of layer, errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.data.golden.check_golden import Golden, OpCase
from tinfer.model.rope import rope_table

GOLDEN = Golden(Path(__file__).parents[1] / "data" / "golden")


@pytest.mark.parametrize("case", GOLDEN.ops("precompute_freqs_cis"), ids=lambda c: c.case)
def test_golden(case: OpCase) -> None:
    p = case.params
    table = rope_table(
        p["dim"], p["seqlen"], p["base"], p["original_seq_len"], p["factor"],
        p["beta_fast"], p["beta_slow"],
    )  # fmt: skip
    turned = torch.stack(table.chunk(2, dim=-1), dim=-1)
    if "rows" in case.inputs:
        turned = turned[case.inputs["rows"]]
    case.check({"freqs": turned})
    # Tighter than the vectors ask: the angle is formed in fp32 as in the release, which decides
    # the values at large positions.
    torch.testing.assert_close(turned, case.outputs["freqs"], rtol=0, atol=2.0**-22)


@pytest.mark.parametrize(
    ("theta", "angles"),
    [(10000, (100.0, 74.989421, 1.0, 0.013335)), (160000, (100.0, 68.765602, 0.25, 0.000909))],
)
def test_rn_01_one_table_per_theta(theta: float, angles: tuple[float, ...]) -> None:
    row = rope_table(64, 101, theta)[100]
    pairs = [0, 1, 16, 31]
    want = torch.tensor(angles)
    assert torch.allclose(row[pairs], want.cos(), atol=2e-6)
    assert torch.allclose(row[[32 + i for i in pairs]], want.sin(), atol=2e-6)


def test_rn_01_yarn_slows_the_slow_pairs_alone() -> None:
    """The release's compressed layers: pairs up to 15 kept, from 25 on divided by 16."""
    plain, yarn = rope_table(64, 2, 160000), rope_table(64, 2, 160000, 65536, 16)
    angle = [torch.atan2(t[1, 32:], t[1, :32]).double() for t in (plain, yarn)]
    ratio = angle[0] / angle[1]
    assert torch.equal(angle[0][:16], angle[1][:16])
    assert torch.allclose(ratio[25:], torch.full((7,), 16.0).double(), rtol=1e-4)
    assert bool(((ratio[16:25] > 1.01) & (ratio[16:25] < 15.99)).all())
    assert not torch.equal(rope_table(64, 2, 10000), plain)


def test_empty_and_wrong() -> None:
    assert rope_table(16, 0, 10000.0).shape == (0, 16)
    with pytest.raises(ValueError, match="rope_dim must be even and positive, got 15"):
        rope_table(15, 4, 10000.0)
    with pytest.raises(ValueError, match="length must be >= 0, got -1"):
        rope_table(16, -1, 10000.0)
