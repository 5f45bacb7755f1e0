"""The training forward pass is the release's: same roundings, same layers, same selections."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tinfer import registry
from tinfer.cache import Cache, CacheSize
from tinfer.checkpoint import open_checkpoint
from tinfer.compat.casts import cast_back, per_block_cast, per_token_cast
from tinfer.compat.hyper_connection import hc_split
from tinfer.config import ModelConfig
from tinfer.formats import Fp8Block32
from tinfer.model.batch import Batch
from tinfer.model.build import build_model
from tinfer.model.engram_hash import compressed_token_map
from tinfer.runtime import NANO
from tools.nano import index, mixes, params, quant, stored, text
from tools.nano.config import VOCAB, config_dict
from tools.nano.export import export
from tools.nano.model import Backbone, Pass
from tools.nano.rows import Pieces, encode_turn

LENGTH = 40


# ---------------------------------------------------------------- roundings
@pytest.mark.parametrize("scale", [1.0, 1e-3, 100.0, 0.0])
@pytest.mark.parametrize(
    ("rounding", "fmt", "group", "scale_fmt"),
    [
        (quant.fp8, "e4m3", 32, "ue8m0"),
        (quant.fp4, "e2m1", 32, "ue8m0"),
        (quant.fp4_kv, "e2m1", 16, "e4m3"),
    ],
)
def test_roundings_are_the_casts(rounding, fmt, group, scale_fmt, scale) -> None:
    torch.manual_seed(0)
    x = (torch.randn(50, 128) * scale).bfloat16()
    q, s = per_token_cast(x, fmt, group, scale_fmt)
    assert torch.equal(rounding(x), cast_back(q, s, fmt, group, scale_fmt, torch.bfloat16))


def test_rounding_passes_the_gradient() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    grad = torch.randn(4, 64)
    (out,) = torch.autograd.grad(quant.fp4(x), x, grad.bfloat16())
    assert torch.equal(out, grad.bfloat16().float())


def test_tiles_are_block_casts() -> None:
    torch.manual_seed(0)
    w = torch.randn(64, 96)
    want = Fp8Block32(*per_block_cast(w, (32, 32), "ue8m0")).dequantize()
    assert torch.equal(params.from_tiles(quant.fp8_tiles(params.to_tiles(w)), 64, 96), want)


def test_gradient_of_the_sinkhorn_limit() -> None:
    """Against autograd through all the rounds."""
    torch.manual_seed(0)
    raw = torch.randn(30, 24, requires_grad=True)
    scale, base = torch.tensor([0.5, 0.7, 1.2]), torch.randn(24)
    weight = [torch.randn(30, 4), torch.randn(30, 4), torch.randn(30, 4, 4)]

    def gradient(outs) -> torch.Tensor:
        total = sum((o * w).sum() for o, w in zip(outs, weight, strict=True))
        return torch.autograd.grad(total, raw)[0]

    want = gradient(hc_split(raw, scale, base, 1e-6, 20))
    got = gradient(mixes._Split.apply(raw, scale, base, 1e-6, 20))
    assert (got - want).norm() < 0.01 * want.norm()


# ---------------------------------------------------------------- selection
def test_candidates_and_selection_follow_the_indexer() -> None:
    from tinfer.compat.topk import candidate_blocks, topk_indices

    torch.manual_seed(0)
    scores = torch.randn(1, 64, 64)
    visible = torch.arange(1, 65)
    scores = scores.masked_fill(torch.arange(64) >= visible[:, None], float("-inf"))
    kept = index.candidate_mask(scores, 4, 8)
    assert kept is not None
    blocks = candidate_blocks(scores[0], visible.int(), 8, 4)
    for t in range(64):
        want = {b * 8 + i for b in blocks[t].tolist() if b >= 0 for i in range(8)}
        got = set(kept[0, t].nonzero()[:, 0].tolist())
        # Rows with fewer visible blocks than places may list invisible ones here.
        assert {g for g in got if g <= t} == {w for w in want if w <= t}
    config = ModelConfig.from_dict(config_dict(text.make_tokenizer(VOCAB)))
    wide = torch.randn(1, 5, 200)
    selected, _ = index.select(wide, 2, config, None)
    ids = topk_indices(wide[0], torch.full((5,), 200, dtype=torch.int32), config.index_topk)
    for t in range(5):
        assert selected[0, t].nonzero()[:, 0].tolist() == sorted(ids[t].tolist())


# ---------------------------------------------------------------- forward
@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Backbone]:
    tokenizer = text.make_tokenizer(VOCAB)
    raw = config_dict(tokenizer)
    config = ModelConfig.from_dict(raw)
    backbone = params.Parameters(config, 0, draft=False)
    draft = params.Parameters(config, 0, draft=True)
    path = tmp_path_factory.mktemp("untrained")
    export(path, raw, tokenizer, backbone, draft)
    return path, Backbone(config, backbone, compressed_token_map(tokenizer))


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


@torch.no_grad()
def test_forward_equals_the_reference_layer_by_layer(untrained, monkeypatch) -> None:
    """Each sublayer gets the reference's input and passes the reference's output on.

    So hyper-connections and engrams may differ by single bf16 roundings, and a sublayer by the
    fp8 codes that a different order of summation flips (golden README: 0.01 to 0.02).
    """
    path, model = untrained
    config, device = ModelConfig.load(path), torch.device("cpu")
    torch.manual_seed(0)
    ids = torch.randint(30, VOCAB, (1, LENGTH))
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, value: torch.Tensor) -> torch.Tensor:
        found[name] = value.clone()
        return value

    reference = build_model(
        config, open_checkpoint(path, config), device, 64, model.token_map.int()
    )
    with registry.use_kernels("ref"):
        cache = Cache(config, CacheSize(1, LENGTH, LENGTH), device)
        batch = Batch.of([(0, 0, ids[0].tolist())], device, keep)
        hidden = reference.backbone(batch, cache)
    assert hidden.taps is not None
    attention, feed_forward = Backbone.attention, Backbone.feed_forward
    entered: list[float] = []
    left: dict[str, float] = {}

    def watched_attention(self, x, layer, run):
        name = f"layer{layer}.attn"
        entered.append(error(x, found[f"{name}_in"]))
        left[name] = error(attention(self, found[f"{name}_in"], layer, run), found[f"{name}_out"])
        return found[f"{name}_out"]

    def watched_feed_forward(self, x, prefix, *sizes):
        name = f"layer{prefix.split('.')[1]}.ffn"
        entered.append(error(x, found[f"{name}_in"]))
        y = feed_forward(self, found[f"{name}_in"], prefix, *sizes)
        left[name] = error(y, found[f"{name}_out"])
        return found[f"{name}_out"]

    monkeypatch.setattr(Backbone, "attention", watched_attention)
    monkeypatch.setattr(Backbone, "feed_forward", watched_feed_forward)
    model.params.refresh()
    run = Pass(model.shape(1, LENGTH), sparse=True)
    got = model(ids, run)
    assert len(entered) == 2 * config.n_layers
    assert entered[0] == 0
    assert max(entered) <= 0.005, entered
    assert max(left.values()) <= 0.02, left
    assert error(got, hidden.x) <= 0.005
    assert error(torch.cat(run.taps, -1), hidden.taps) <= 0.005


# ---------------------------------------------------------------- data
def test_rows_are_what_the_chat_encoding_gives() -> None:
    from tinfer.chat import Tokenizer, render

    tokenizer = text.make_tokenizer(VOCAB)
    pieces = Pieces.make(tokenizer, torch.device("cpu"))
    chat = Tokenizer(tokenizer)
    turns = [text.dialogues()[0], text.capitals()[3], text.addition(23, 45)[2]]
    messages = []
    for turn in turns:
        messages.append({"role": "user", "content": turn.question})
        messages.append({"role": "assistant", "content": turn.answer})
    want = render(messages).encode(chat)
    got = chat.encode("<｜begin▁of▁sentence｜>")
    for turn in turns:
        got += encode_turn(tokenizer, turn)[0]
    assert got == want
    torch.manual_seed(0)
    ids, weights = pieces.compose(pieces.needles(3, 256), 256)
    for row, weight in zip(ids.tolist(), weights, strict=True):
        words = chat.decode(row)
        assert words.count("暗号") + words.count("code word") == 5
        assert (weight > 1).sum() == 2
        decided = [tokenizer.decode([row[i]]).strip() for i in (weight > 1).nonzero()[:, 0]]
        assert decided[0] == decided[1]
        assert words.index(decided[0]) < words.rindex("<｜Assistant｜>")


def test_held_out_sums_are_not_taught() -> None:
    taught = {t.question for t in text.additions(False)}
    kept = {t.question for t in text.additions(True)}
    assert not taught & kept
    assert 0.15 < len(kept) / (len(kept) + len(taught)) < 0.25


@torch.no_grad()
def test_training_goes_on_from_what_a_checkpoint_stores() -> None:
    """Rounding a restored weight again changes nothing, so the first step sees the file's model."""
    config = ModelConfig.load(NANO)
    checkpoint = open_checkpoint(NANO, config)
    restored = params.Parameters(config, seed=3, draft=True)
    stored.restore(checkpoint, restored)
    restored.refresh()
    assert len(restored.shapes) > 40
    for name in restored.shapes:
        want = stored.value(checkpoint, name)
        assert torch.equal(restored.value(name), want), name
        if name.endswith(("wq_a.weight", "wo_b.weight")):
            assert torch.equal(restored[name].float(), want), name
    w13, _ = restored.experts("mtp.0.ffn", config.dspark_n_routed_experts)
    w1 = stored.value(checkpoint, "mtp.0.ffn.experts.2.w1.weight")
    assert torch.equal(w13[2, : len(w1)].float(), w1)
