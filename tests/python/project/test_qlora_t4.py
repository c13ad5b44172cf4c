"""The 7B on a T4: what it takes is what the page says, and a small model of a folder learns."""

import json
import subprocess
import sys
from pathlib import Path

import headroom
import pytest
import torch

from helpers.software_device import CAN_REHEARSE

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "examples" / "qlora_t4.py"
WORDS = "a small model of seven words learns".split()
transformers = pytest.importorskip("transformers")

import qlora_t4  # noqa: E402


@pytest.fixture
def folder(tmp_path):
    """A model with its tokenizer, as a download has them: in bfloat16."""
    tokenizers = pytest.importorskip("tokenizers")
    known = {word: number for number, word in enumerate(["<unk>", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    tokenizer.save_pretrained(tmp_path / "model")
    config = transformers.MistralConfig(
        vocab_size=len(known), hidden_size=64, intermediate_size=160, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=None,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def first_loss(folder, ids):
    """Of the weights that 4 bits stand for, by transformers in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    headroom.quantize(model)
    headroom.dequantize(model)
    return model.float()(input_ids=ids, labels=ids).loss.item()


@pytest.mark.slow
def test_a_folder_is_fine_tuned(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(WORDS * 20))
    out = tmp_path / "adapters"
    options = ["--tokens", "48", "--steps", "40", "--out", str(out), "--device", "cpu"]
    qlora_t4.main([str(folder), str(text), *options])
    first, last = (float(word) for word in capsys.readouterr().out.split() if "." in word)
    ids = qlora_t4.rows_of(folder, text, 48)[:1]
    assert first == pytest.approx(first_loss(folder, ids), abs=5e-3)
    assert last < 0.9 * first
    assert json.loads((out / "adapter_config.json").read_text())["r"] == qlora_t4.RANK
    with pytest.raises(SystemExit, match="tokens, wanted 4096 at least: give --tokens"):
        qlora_t4.rows_of(folder, text, 4096)


@pytest.mark.slow
@pytest.mark.skipif(not CAN_REHEARSE, reason="needs a torch for CUDA and no GPU")
def test_a_row_of_the_page(tmp_path):
    kept = tmp_path / "report.json"
    device = ["--gpu", "T4", "--host-memory", "12 GiB", "--report", str(kept)]
    program = [str(PROGRAM), "--steps", "2", "--out", str(tmp_path / "adapters")]
    done = subprocess.run(
        [sys.executable, "-m", "headroom", "rehearse", *device, *program],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(kept.read_text())
    taken = (report["peak_reserved"] + report["device"]["context"]) / 2**30
    assert f"| 2,048 | {taken:.1f} GiB |" in (ROOT / "docs" / "lora.md").read_text().splitlines()
