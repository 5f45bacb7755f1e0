"""Failures that users of other engines met, on whole models (`tests/data/cases/cases.json`)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.model.golden import ROOT, GoldenRun, golden_runs, load_model
from tinfer import ops, registry
from tinfer.cache import Cache, CacheSize
from tinfer.kv_layout import KVLayout
from tinfer.model.batch import Batch

MODELS = ["text_plain", "six_types", "hd128", "long"]


@pytest.fixture(autouse=True)
def _reference():
    with registry.use_kernels("ref"), torch.inference_mode():
        yield


def fresh(model, chunk: int = 64) -> Cache:
    """A cache whose every byte is poison: 0xFF is NaN as an fp8 code and as a scale."""
    cache = Cache(model.config, CacheSize(2, 128, chunk, 16), "cpu")
    for pages in (*cache.windows, *cache.compressed.values(), *cache.index_keys.values()):
        pages.fill_(0xFF)
    for state in cache.pool_state.values():
        state.fill_(float("nan"))
    cache.engram_history.fill_(7)
    return cache


@pytest.mark.parametrize("name", MODELS)
def test_eg07_first_forward_with_one_token(name: str) -> None:
    model = load_model(ROOT / "models" / name)
    hidden = model.backbone(Batch.of([(0, 0, [5])], "cpu"), fresh(model))
    assert torch.isfinite(model.backbone.logits(hidden.x)).all()


def test_qz14_bytes_of_a_token() -> None:
    """V4.1's rows take 528 and 288 bytes (V4's 584), and the allocator's pages hold just those."""
    for layout, row in ((KVLayout.window_fp8, 512 + 16), (KVLayout.compressed_fp4, 256 + 32)):
        for page in (16, 64, 256):
            given = layout(512, page)
            assert (given.row_bytes, given.page_bytes) == (row, page * row)
            assert given.allocate(3).shape == (3, page * row)
    model = load_model(ROOT / "models" / "text_plain")
    cache = Cache(model.config, CacheSize(2, 128, 64, 16), "cpu")
    for pages in cache.windows:
        assert pages.shape[1] == 16 * KVLayout.window_fp8(model.config.head_dim, 16).row_bytes
    for pages in cache.compressed.values():
        assert pages.shape[1] == 16 * KVLayout.compressed_fp4(model.config.head_dim, 16).row_bytes


@pytest.mark.parametrize("name", MODELS)
def test_kv01_kv06_short_prompts_read_only_what_they_wrote(name: str) -> None:
    """Prompts around group boundaries and below the window, on caches full of NaN."""
    model = load_model(ROOT / "models" / name)
    for length in (1, 2, 3, 4, 5, 31):
        prompt = [(7 * i) % 200 + 3 for i in range(length)]
        cache = fresh(model)
        hidden = model.backbone(Batch.of([(1, 0, prompt)], "cpu"), cache)
        assert torch.isfinite(model.backbone.logits(hidden.x)).all(), length
        for layer, pages in cache.compressed.items():
            ratio = model.config.compress_ratios[layer]
            entries = length // ratio
            ids = torch.arange(8, dtype=torch.int32)[None]
            slots = ops.ids_to_slots(
                ids, torch.tensor([1]), cache.compressed_table[ratio], cache.page_size
            )
            rows = ops.load_kv(pages, cache.compressed_layout, slots)[0]
            written = torch.isfinite(rows.float()).all(-1)
            assert written.tolist() == [i < entries for i in range(8)], (length, layer)


@pytest.mark.parametrize("name", MODELS)
def test_kv02_kv07_decode_equals_prefill(name: str) -> None:
    """Also at the odd positions where the reference's decode reads another layer's index keys."""
    model = load_model(ROOT / "models" / name)
    run = next(r for r in golden_runs() if r.model["name"] == name)
    tol = run.tol("decode.logits")
    prompt = [(11 * i) % 200 + 3 for i in range(33)]
    chosen: dict[str, torch.Tensor] = {}

    def keep(tap: str, value: torch.Tensor) -> torch.Tensor:
        if tap.endswith("index_ids"):
            chosen[tap] = value[-1]
        return value

    same = total = 0
    for n in (2, 3, 16, 17, 32, 33):
        cache = fresh(model)
        whole = model.backbone(Batch.of([(0, 0, prompt[:n])], "cpu", keep), cache).x[-1:]
        want, chosen = chosen, {}
        cache = fresh(model)
        model.backbone(Batch.of([(0, 0, prompt[: n - 1])], "cpu"), cache)
        step = model.backbone(Batch.of([(0, n - 1, [prompt[n - 1]])], "cpu", keep), cache).x
        a, b = (model.backbone.logits(x).double() for x in (step, whole))
        assert (a - b).norm() <= tol["rel_l2"] * b.norm(), n
        for tap, ids in want.items():
            total += 1
            same += torch.equal(ids, chosen[tap])
        chosen = {}
    assert same == total, f"{same} of {total} selections agree"


def _poison_window(cache: Cache, positions: range, live: range) -> None:
    """Fill the window rows of sequence 0's positions with NaN where no live position lies."""
    seq = torch.zeros(max(len(positions), len(live)), dtype=torch.int64)

    def slots(span: range) -> set[int]:
        return set(cache.window_store_slots(torch.tensor(span), seq[: len(span)]).tolist())

    layout = cache.window_layout
    data_stride, scale_base, scale_stride = layout.triple
    for slot in slots(positions) - slots(live) if positions else ():
        page, row = divmod(slot, cache.page_size)
        data, scale = row * data_stride, scale_base + row * scale_stride
        for pages in cache.windows:
            pages[page, data : data + layout.data_bytes] = 0xFF
            pages[page, scale : scale + layout.scale_bytes] = 0xFF


@pytest.mark.parametrize("name", MODELS)
def test_kv09_going_on_behind_any_prefix_needs_the_window_alone(name: str) -> None:
    """The query at position H sees H-W+1 .. H; window rows before that are poison."""
    model = load_model(ROOT / "models" / name)
    window = model.config.window_size
    prompt = [(13 * i) % 200 + 3 for i in range(2 * window + 2)]
    for hit in (window - 1, window, window + 1, 2 * window - 1, 2 * window, 2 * window + 1):
        answers = []
        for poison in (False, True):
            cache = fresh(model, chunk=2 * window + 2)
            model.backbone(Batch.of([(0, 0, prompt[:hit])], "cpu"), cache)
            if poison:
                first = hit - window + 1
                _poison_window(cache, range(first), range(first, hit + 1))
            step = model.backbone(Batch.of([(0, hit, [prompt[hit]])], "cpu"), cache)
            answers.append(model.backbone.logits(step.x))
        cold = model.backbone(Batch.of([(0, 0, prompt[: hit + 1])], "cpu"), fresh(model, 96))
        assert torch.equal(*answers), hit
        assert answers[1].argmax() == model.backbone.logits(cold.x[-1:]).argmax(), hit


def test_mo08_image_rows_take_bias_vl_and_no_memory_rows() -> None:
    """In an image span the router uses bias_vl, and engram passes the stream through."""
    run = next(r for r in golden_runs("full") if r.info["images"])
    golden = GoldenRun(run)
    seen: dict[str, torch.Tensor] = {}

    def keep(tap: str, value: torch.Tensor) -> torch.Tensor:
        seen[tap] = value
        return value

    batch = golden.prefill(0, golden.length, keep)
    golden.model.backbone(batch, golden.cache())
    image = batch.image
    layer = golden.model.config.engram_layer_ids[0]
    before, after = seen[f"layer{layer}.in"], seen[f"layer{layer}.engram_out"]
    assert torch.equal(before[image], after[image])
    assert not torch.equal(before[~image], after[~image])
    block = golden.model.backbone.blocks[0]
    x = seen["layer0.ffn_in"]
    ids, _ = block.ffn.gate(x, None)
    assert torch.equal(ids[~image], seen["layer0.gate_indices"][~image])
    assert not torch.equal(ids[image], seen["layer0.gate_indices"][image])


def test_qz15_router_tells_what_bf16_cannot() -> None:
    """Router logits 1.000 and 1.003 are one number in bf16; the larger one must win."""
    x = torch.ones(1, 32, dtype=torch.bfloat16)
    weight = torch.zeros(2, 32, dtype=torch.bfloat16)
    weight[:, 0] = 1.0
    weight[1, 1] = 0.003
    logits = ops.linear_fp32(x, weight)
    ids, _ = ops.moe_gate(logits, torch.zeros(2), None, None, 1, 1.0, "sqrtsoftplus", True)
    assert ids.item() == 1


BLOCKED = """
import sys
for name in ("deep_gemm", "deep_ep", "flash_mla", "flash_attn", "sgl_kernel", "vllm"):
    sys.modules[name] = None
from tinfer import generate
sys.exit(generate.main(["--model", sys.argv[1], "--ids", "5,6,7", "--max-new-tokens", "2",
                        "--kernels", "ref", "--quiet"]))
"""


def test_im02_no_optional_library_is_needed() -> None:
    command = [sys.executable, "-c", BLOCKED, str(ROOT / "models" / "six_types")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_fp8_experts_of_a_converted_checkpoint(tmp_path) -> None:
    """Experts folded losslessly into fp8 tiles: loaded by type, and the same logits bit for bit."""
    import json

    from safetensors.torch import load_file, save_file

    from tests.model.golden import token_map
    from tinfer.checkpoint import open_checkpoint
    from tinfer.config import ModelConfig
    from tinfer.formats import Fp4Group32, Fp8Block32
    from tinfer.model.build import build_model

    source = ROOT / "models" / "six_types"
    raw = json.loads((source / "config.json").read_text()) | {"expert_dtype": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = load_file(source / "model.safetensors")
    for name in [n for n in tensors if ".experts." in n and n.endswith(".weight")]:
        scale = name.replace(".weight", ".scale")
        weight = Fp4Group32(tensors[name].view(torch.uint8), tensors[scale].view(torch.uint8))
        codes, tiles = ops.fp4_to_fp8(weight, 32)
        tensors[name] = codes.view(torch.float8_e4m3fn)
        tensors[scale] = tiles.view(torch.float8_e8m0fnu)
    save_file(tensors, tmp_path / "model.safetensors")
    config = ModelConfig.load(tmp_path)
    checkpoint = open_checkpoint(tmp_path, config)
    folded = build_model(config, checkpoint, "cpu", 256, token_map(source, config))
    packed = load_model(source)
    assert isinstance(folded.backbone.blocks[0].ffn.w13, Fp8Block32)
    batch = Batch.of([(0, 0, [5, 6, 7, 90, 91, 92, 13])], "cpu")
    mine, theirs = (m.backbone(batch, fresh(m)).x for m in (folded, packed))
    assert torch.equal(mine, theirs)
