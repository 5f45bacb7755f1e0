"""The command line: what it prints, what it writes, and one clear line for every mistake."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.model.golden import ROOT, Golden
from tinfer import generate, registry

MODEL = ROOT / "models" / "six_types"
TEXT = ROOT / "models" / "text_plain"


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    arguments = [str(a) for a in args]
    if "--kernels" not in arguments:
        arguments += ["--kernels", "ref"]
    try:
        code = generate.main(arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    out = capsys.readouterr()
    return code, out.out, out.err


def objects(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


# ---------------------------------------------------------------- what it computes
@pytest.mark.parametrize("name", ["text_plain", "six_types"])
def test_forced_ids_give_the_golden_logits(name, capsys, tmp_path) -> None:
    golden = next(r for r in Golden(ROOT).runs(name) if r.info["dense_index"])
    prompt, forced = golden["input_ids"][0].tolist(), golden["decode.tokens"][:, 0].tolist()
    out = tmp_path / "logits.safetensors"
    args = ["--model", ROOT / "models" / name, "--ids", ",".join(map(str, prompt))]
    args += ["--force-ids", ",".join(map(str, forced)), "--temperature", "0"]
    args += ["--logits-out", out, "--prompt-logits", "--output", "json", "--quiet"]
    code, text, _ = run(capsys, *args)
    assert code == 0
    [record] = objects(text)
    assert record["ids"] == [*forced, int(golden["final_token"][0])]
    saved = load_file(out)
    assert saved["logits"].dtype == torch.float32
    golden.check({"prefill.logits": saved["logits"][:1]})
    golden.check({"decode.logits": saved["logits"][1:, None]})
    if "prefill.logits_full" in golden.keys():  # noqa: SIM118
        golden.check({"prefill.logits_full": saved["prompt_logits"][None]})


def test_json_record(capsys) -> None:
    args = ["--model", MODEL, "--ids", "5,6,7", "--ids", "9", "--max-new-tokens", "4"]
    code, text, _ = run(capsys, *args, "--temperature", "0", "--output", "json", "--logprobs", "3")
    assert code == 0
    first, second = objects(text)
    assert first["prompt_ids"] == [5, 6, 7]
    assert second["prompt_ids"] == [9]
    for record in (first, second):
        assert len(record["ids"]) == len(record["logprobs"]) == len(record["top_logprobs"]) == 4
        assert record["finish_reason"] == "length"
        prompt = len(record["prompt_ids"])
        assert record["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": 4,
            "total_tokens": prompt + 4,
        }
        assert record["timing"]["first_token_s"] > 0
        assert record["text"]


def test_logprobs_are_real(capsys, tmp_path) -> None:
    out = tmp_path / "logits.safetensors"
    args = ["--model", MODEL, "--ids", "5,6,7", "--max-new-tokens", "6", "--output", "json"]
    _, text, _ = run(capsys, *args, "--logprobs", "5", "--logits-out", out, "--seed", "3")
    [record] = objects(text)
    expected = torch.log_softmax(load_file(out)["logits"].double(), -1)
    for step, token in enumerate(record["ids"]):
        assert record["logprobs"][step] == pytest.approx(float(expected[step, token]), abs=1e-5)
        assert record["logprobs"][step] < 0
        top = record["top_logprobs"][step]
        assert len(top) == 5
        mass = sum(torch.tensor(v, dtype=torch.float64).exp().item() for v in top.values())
        assert mass < 1
        values, ids = expected[step].topk(5)
        assert [int(i) for i in top] == ids.tolist()
        assert list(top.values()) == pytest.approx(values.tolist(), abs=1e-5)


def test_same_seed_same_tokens_alone_or_together(capsys) -> None:
    base = ["--model", MODEL, "--max-new-tokens", "5", "--output", "json", "--seed", "11"]
    _, together, _ = run(capsys, *base, "--ids", "5,6,7,8", "--ids", "9", "--ids", "20,21")
    alone = [run(capsys, *base, "--ids", ids)[1] for ids in ("5,6,7,8", "9", "20,21")]
    assert [r["ids"] for r in objects(together)] == [objects(t)[0]["ids"] for t in alone]
    _, other, _ = run(capsys, *base[:-1], "12", "--ids", "5,6,7,8")
    assert objects(other)[0]["ids"] != objects(together)[0]["ids"]


def test_chunked_prefill_gives_the_same_tokens(capsys) -> None:
    ids = ",".join(str(3 + 5 * i % 200) for i in range(30))
    base = ["--model", TEXT, "--ids", ids, "--max-new-tokens", "4", "--temperature", "0"]
    whole = run(capsys, *base, "--output", "json")[1]
    parts = run(capsys, *base, "--output", "json", "--chunk", "7")[1]
    assert objects(whole)[0]["ids"] == objects(parts)[0]["ids"]


def test_no_new_tokens_gives_the_prompts_logits(capsys, tmp_path) -> None:
    out = tmp_path / "logits.safetensors"
    args = ["--model", MODEL, "--ids", "5,6,7", "--max-new-tokens", "0", "--output", "json"]
    code, text, _ = run(capsys, *args, "--logits-out", out, "--prompt-logits")
    assert code == 0
    assert objects(text)[0]["ids"] == []
    saved = load_file(out)
    assert saved["prompt_logits"].shape == (3, 256)
    torch.testing.assert_close(saved["logits"][0], saved["prompt_logits"][-1])


def test_text_streams_whole(capsys) -> None:
    args = ["--model", MODEL, "--raw", "--prompt", "w5", "--max-new-tokens", "3"]
    code, text, err = run(capsys, *args, "--temperature", "0")
    record = objects(run(capsys, *args, "--temperature", "0", "--output", "json")[1])[0]
    assert code == 0
    assert text == record["text"] + "\n"
    assert "tokens/s" in err


def test_stop_string(capsys) -> None:
    args = ["--model", MODEL, "--ids", "5,6,7", "--max-new-tokens", "6", "--temperature", "0"]
    free = objects(run(capsys, *args, "--output", "json")[1])[0]
    word = free["text"][6:9]
    cut = objects(run(capsys, *args, "--output", "json", "--stop", word)[1])[0]
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == free["text"][: free["text"].index(word)]
    assert len(cut["ids"]) < len(free["ids"])


def test_prompt_file_keeps_the_order(capsys, tmp_path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("w5\n\n W6w7\n")
    args = ["--model", MODEL, "--raw", "--prompt-file", path, "--max-new-tokens", "1"]
    code, text, _ = run(capsys, *args, "--output", "json")
    assert code == 0
    assert [r["prompt_ids"] for r in objects(text)] == [[10], [13, 14]]


def test_dump(capsys, tmp_path) -> None:
    args = ["--model", MODEL, "--ids", "5,6,7", "--max-new-tokens", "2", "--dump", tmp_path]
    code, _, _ = run(capsys, *args)
    assert code == 0
    layer = load_file(tmp_path / "pass0000" / "layer1.safetensors")
    for name in ("in", "engram_out", "attn_in", "attn_out", "ffn_in", "ffn_out", "out", "pre_mix"):
        assert layer[name].shape[0] == 3, name
    assert {"gate_indices", "gate_weights", "index_ids", "index_scores"} <= set(layer)
    assert load_file(tmp_path / "pass0001" / "model.safetensors")["engram_hash"].shape[:2] == (2, 1)


def test_report_names_what_ran(capsys) -> None:
    registry.reset_counts()
    args = ["--model", MODEL, "--ids", "5,6,7", "--max-new-tokens", "1", "--report-kernels"]
    _, _, err = run(capsys, *args)
    rows = {line.split()[0]: line.split()[1:3] for line in err.splitlines() if line.split()}
    assert rows["moe_gate"] == ["0", "6"]
    assert rows["sample"] == ["0", "1"]


# ---------------------------------------------------------------- mistakes
MISTAKES = {
    "no such directory": (["--model", "/no/such/dir", "--ids", "5"], "no such directory"),
    "no source": (["--model", MODEL], "exactly one of"),
    "two sources": (["--model", MODEL, "--ids", "5", "--prompt", "x"], "exactly one of"),
    "id out of vocabulary": (["--model", MODEL, "--ids", "5,256"], "[0, 256), got 256"),
    "negative id": (["--model", MODEL, "--ids", "5,-1"], "[0, 256), got -1"),
    "id is no number": (["--model", MODEL, "--ids", "5,x"], "integers"),
    "empty prompt": (["--model", MODEL, "--ids", ","], "at least one token"),
    "empty text": (["--model", MODEL, "--raw", "--prompt", ""], "at least one token"),
    "long prompt": (["--model", MODEL, "--ids", ",".join(["5"] * 129)], "context of 128"),
    "top-p 0": (["--model", MODEL, "--ids", "5", "--top-p", "0"], "top_p must be in (0, 1]"),
    "top-p 1.5": (["--model", MODEL, "--ids", "5", "--top-p", "1.5"], "got 1.5"),
    "cold": (["--model", MODEL, "--ids", "5", "--temperature", "-1"], "temperature must be"),
    "kernel": (["--model", MODEL, "--ids", "5", "--kernels", "fast"], "auto|triton|ref"),
    "op": (["--model", MODEL, "--ids", "5", "--kernels", "ref,nope=ref"], "unknown op 'nope'"),
    "device": (["--model", MODEL, "--ids", "5", "--device", "abacus"], "usable torch device"),
    "flag": (["--model", MODEL, "--ids", "5", "--no-such-flag"], "unrecognized arguments"),
    "batch": (["--model", MODEL, "--ids", "5", "--max-batch", "0"], "--max-batch"),
    "no markers": (["--model", MODEL, "--prompt", "w5"], "cannot carry a conversation"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name, capsys) -> None:
    args, message = MISTAKES[name]
    code, out, err = run(capsys, *args)
    assert code == 2
    assert out == ""
    lines = [line for line in err.splitlines() if line]
    assert len(lines) == 1
    assert message in lines[0]


def _copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TEXT, tmp_path / "model"))


def test_not_a_checkpoint(capsys, tmp_path) -> None:
    code, _, err = run(capsys, "--model", tmp_path, "--ids", "5")
    assert code == 2
    assert "not a checkpoint" in err


def test_truncated_shard(capsys, tmp_path) -> None:
    path = _copy(tmp_path) / "model.safetensors"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-4096])
    code, out, err = run(capsys, "--model", path.parent, "--ids", "5")
    assert (code, out) == (2, "")
    assert "model.safetensors" in err


def test_missing_tensor(capsys, tmp_path) -> None:
    from safetensors.torch import save_file

    path = _copy(tmp_path) / "model.safetensors"
    path.chmod(0o644)
    tensors = load_file(path)
    del tensors["layers.1.attn.wq_a.scale"]
    save_file(tensors, path)
    code, out, err = run(capsys, "--model", path.parent, "--ids", "5")
    assert (code, out) == (2, "")
    assert "layers.1.attn.wq_a.scale" in err


def test_interactive(capsys, monkeypatch) -> None:
    """Without the conversation's markers in the tokenizer it says so before it loads."""
    code, _, err = run(capsys, "--model", MODEL, "--interactive")
    assert code == 2
    assert "cannot carry a conversation" in err


def test_logits_cannot_be_written(capsys, tmp_path) -> None:
    args = ["--model", MODEL, "--ids", "5", "--max-new-tokens", "1", "--quiet"]
    code, _, err = run(capsys, *args, "--logits-out", tmp_path / "none" / "l.safetensors")
    assert code == 2
    assert "cannot be written" in err
