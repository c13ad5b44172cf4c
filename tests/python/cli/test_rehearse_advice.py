"""``headroom rehearse --advise``: what is tried, in which order, when it ends, and what is told.
The rehearsals themselves are other tests'; one program is rehearsed for real in full runs."""

import argparse
import json
import subprocess
import sys

import pytest
from headroom_rehearsal import advice, command

from helpers.software_device import CAN_REHEARSE

MiB = 1 << 20
FOUND = {
    "device": {"memory": 1000 * MiB, "context": 400 * MiB},
    "refused": [{"asked": 100 * MiB, "allocated": 550 * MiB}],
    "host": {"limit": None, "peak": 0, "refused": []},
}


@pytest.fixture
def advised(monkeypatch, capsys):
    """Returns what makes a rehearsal of each way by ``report(program, env)``, and returns what was
    tried, the words of each rehearsal, and what was told."""

    def run(report, found, *words):
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        options = parser.parse_args(["--gpu=T4", "--no-weights", *words])
        calls = []

        def rehearsed(program, given, env, folder):
            calls.append((program, given))
            fits, error = report(program, env)
            found = dict(fits=fits, peak_allocated=500 * MiB, peak_reserved=0)
            return found | dict(error=error, message=error and f"{error} says why")

        monkeypatch.setattr(advice, "rehearsed", rehearsed)
        tried = advice.advise(options, FOUND | found, advice.Place({"A": "b"}, "/nowhere"))
        return tried, calls, capsys.readouterr().err

    return run


def test_the_first_that_changes_no_result_ends_it(advised):
    tried, calls, told = advised(lambda *_: (True, None), {}, "-m", "train", "a b")
    assert [one["with"] for one in tried] == ["--budget '1000 MiB'"] and len(calls) == 1
    program, given = calls[0]
    assert program == ["-m", "headroom", "run", "--budget", "1000 MiB", "-m", "train", "a b"]
    assert given["gpu"] == "T4" and given["no_weights"] is True and given["steps"] == 3
    assert told.endswith("\nheadroom run --budget '1000 MiB' -m train 'a b'\n")
    assert "--budget '1000 MiB': fits, 500 MiB" in told and "changes" not in told


def test_what_changes_results_is_tried_last_and_all_of_it(advised):
    def report(program, env):
        return ("bf16" in program, None if "bf16" in program else "DoesNotFit")

    host = {"limit": 64 << 30, "peak": 4 << 30, "refused": []}
    tried, _, told = advised(report, {"host": host}, "train.py")
    left = f"{int(0.9 * 60 * 1024)} MiB"
    names = [one["with"].removeprefix("--budget '1000 MiB'").strip() for one in tried]
    assert names[:2] == ["", f"--host-budget '{left}'"]
    assert names[2:] == [
        f"--allow {n}" for n in ("8bit", "bf16", "adafactor", "act8", "int8", "nf4")
    ]
    assert [one["changes"] != "" for one in tried] == [False] * 2 + [True] * 6
    assert "--allow 8bit: does not fit\n    DoesNotFit: DoesNotFit says why\n" in told
    assert "changes results: weights are bfloat16" in told
    assert told.endswith("\nheadroom run --budget '1000 MiB' --allow bf16 train.py\n")


def test_pieces_of_memory(advised):
    def grown(program, env):
        return "PYTORCH_ALLOC_CONF" in env, "OutOfMemoryError"

    refused = [{"asked": 100 * MiB, "allocated": 450 * MiB}]
    tried, calls, told = advised(grown, {"refused": refused}, "sort", "-r")
    assert len(tried) == 1 and calls[0][0] == ["sort", "-r"]
    assert told.endswith("\nPYTORCH_ALLOC_CONF=expandable_segments:True sort -r\n")

    def less(program, env):  # a plan fits, and torch's allocator has more in pieces
        return "958 MiB" in program, None if "958 MiB" in program else "OutOfMemoryError"

    tried, calls, _ = advised(less, {}, "train.py")
    assert len(calls) == 2 and tried[0]["with"] == "--budget '958 MiB'" and tried[0]["fits"]


def test_where_nothing_helps(advised):
    tried, calls, told = advised(lambda *_: (None, "UnknownLoop"), {}, "train.py")
    assert tried == [] and len(calls) == 1 and "headroom.fit" in told
    _, calls, told = advised(lambda *_: (False, "DoesNotFit"), {}, "train.py")
    assert len(calls) == 7 and told.endswith("  it fits in none of these\n")


def test_where_only_the_hosts_memory_ran_out(advised):
    found = {"refused": [], "host": {"limit": MiB, "peak": 0, "refused": [{}]}}
    tried, calls, told = advised(lambda *_: (True, None), found, "train.py")
    assert tried == [] and calls == [] and "only the host's memory ran out" in told


TRAINER = """
import torch, transformers

config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=4,
    num_attention_heads=2, num_key_value_heads=2, use_cache=False,
)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (256, 128))]
args = transformers.TrainingArguments(
    "made", max_steps=4, per_device_train_batch_size=64, report_to="none", save_strategy="no"
)
transformers.Trainer(transformers.LlamaForCausalLM(config), args, train_dataset=rows).train()
"""


@pytest.mark.slow
@pytest.mark.skipif(not CAN_REHEARSE, reason="needs a torch for CUDA and no GPU")
def test_trainer(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "train.py").write_text(TRAINER)
    words = ["--memory=600 MiB", "--capability=8.9", "--advise", "--report=r.json", "train.py"]
    command = [sys.executable, "-m", "headroom", "rehearse", *words]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    report = json.loads((tmp_path / "r.json").read_text())
    assert ended.returncode == 1 and report["fits"] is False
    (one,) = report["advice"]
    assert one["fits"] and one["peak_allocated"] < 600 * MiB - report["device"]["context"]
    assert one["command"] in ended.stderr.splitlines()
