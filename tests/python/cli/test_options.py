"""Each option of the command has its place, its default, and reaches what it is for."""

import argparse
import json
import re
import sys
from functools import partial
from pathlib import Path

import headroom
import pytest
import torch
from headroom.cli import convert, main
from headroom.cli.command import make_parser
from headroom.cli.setups import named, real_setup_of, setup_of, tensor
from headroom.memory import format_bytes

from helpers import report_files
from helpers.conversions import ADAMW, LR, assert_same_entries, parameters, run

MODEL = """
import torch

class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(6, 2)

model = Model
made = torch.nn.Linear(6, 2)

def loss(output, target):
    return (output - target).square().sum()

def batch():
    return torch.full((3, 6), 2.0), torch.zeros(3, 2)

def nothing():
    return 7

class Steps(torch.optim.SGD):
    pass
"""
STEP = (
    "[--tokens BxS] [--input SHAPE[:DTYPE]] [--batch MODULE:FUNCTION] [--target SHAPE[:DTYPE]] "
    "[--loss NAME] [--optimizer NAME] [--option NAME=VALUE] [--device DEVICE] "
    "[--amp {bfloat16,float16}] [--save {L0,L1,L2,L3,L4,L5,L5:8bit}] [--checkpoint-every N] "
    "[--accumulation N] [--release] [--scaler] [--max-grad-norm NORM] "
)
USAGE = {
    "plan": STEP + "[--capability X.Y] [--advice N] [--out FILE] [--top N] [--json] MODEL",
    "fit": STEP + "(--budget SIZE | --ladder) [--max-batch | --measure] "
    "[--allow {8bit,bf16,adafactor,act8,int8,nf4}] [--host-budget SIZE] [--png PNG] [--out FILE] "
    "[--json] MODEL",
    "run": "[options] PROGRAM ARGS...  or  [options] -m MODULE ARGS...",
    "rehearse": "[options] PROGRAM ARGS...  or  [options] -m MODULE ARGS...",
    "verify": "[--json] FILE [FILE ...]",
    "report": "[-o HTML] [--title TITLE] [--terminal] [--top N] [--json] FILE [FILE ...]",
    "diff": "[--at {peak,end}] [--device DEVICE] [--fail-above SIZE] [--top N] [--json] A B",
    "convert": "--to LIBRARY [--from LIBRARY] [--rule {adam,sgd,lion,muon}] [--key KEY] "
    "[--param-dtype {float32,bfloat16,float16}] [--block-size BLOCK_SIZE] "
    "[--min-8bit-size MIN_8BIT_SIZE] [--json] IN OUT",
    "doctor": "[--loader MODULE:FUNCTION] [--json]",
}


def test_usage_and_help(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "2000")
    commands = next(
        action
        for action in make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    assert list(commands.choices) == list(USAGE)
    for name, command in commands.choices.items():
        usage = "" if name in ("run", "rehearse") else "[-h] "
        assert command.format_usage() == f"usage: headroom {name} {usage}{USAGE[name]}\n"
        text = command.format_help()
        for action in command._actions:
            assert action.help is None or action.help.split("%")[0] in text
        silent = {one.option_strings[-1] for one in command._actions if one.help is None}
        assert silent <= {"--checkpoint-every", "--max-grad-norm", "--min-8bit-size"}
        if name in ("plan", "fit"):
            assert "(default: AdamW)" in text and "the batch: one of these" in text
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: headroom [-h] [--version] COMMAND ...\n\nRoom for a PyTorch")
    assert "    plan      predict the memory of a training step\n" in text
    assert "\n\nexit codes:\n  0    done; for a question" in text
    assert make_parser("other").format_usage().startswith("usage: other ")


def read(*words):
    return make_parser().parse_args(list(words))


def test_defaults():
    step = {
        "tokens": None, "input": None, "batch": None, "target": None, "loss": None,
        "optimizer": "AdamW", "option": [], "device": "cuda", "amp": None, "save": None,
        "checkpoint_every": None, "accumulation": 1, "release": False, "scaler": False,
        "max_grad_norm": None, "model": "m",
    }  # fmt: skip
    a, b = Path("a"), Path("b")
    expected = {
        ("plan", "m"): step | {"capability": None, "advice": 0, "out": None, "top": 8},
        ("fit", "m", "--ladder"): step
        | {"budget": None, "ladder": True, "max_batch": False, "measure": False}
        | {"allow": [], "host_budget": None, "png": None, "out": None},
        ("run", "a"): {"register": False, "budget": None, "host_budget": None, "allow": []}
        | {"snapshot_on_oom": None, "profile": None, "is_module": False, "program": ["a"]},
        ("rehearse", "a"): {"gpu": None, "memory": None, "capability": None, "gpus": False}
        | {"on_gpu": False}
        | {"host_memory": None, "devices": None, "no_weights": False, "advise": False}
        | {"steps": 3, "loss": None, "nonzero": None, "fail_above": None}
        | {"snapshot": None, "report": None}
        | {"compare": None, "certificate": None, "is_module": False, "program": ["a"]},
        ("verify", "a"): {"files": [a]},
        ("report", "a"): {"files": [a], "out": None, "title": None}
        | {"terminal": False, "top": 10},
        ("diff", "a", "b"): {"a": a, "b": b, "at": "peak", "device": None}
        | {"fail_above": None, "top": 10},
        ("convert", "a", "b", "--to", "torch"): {"source": a, "target": b, "to": "torch"}
        | {"from_": None, "rule": None, "key": None, "param_dtype": None, "block_size": None}
        | {"min_8bit_size": 4096},
        ("doctor",): {"loader": None},
    }
    for words, wanted in expected.items():
        found = vars(read(*words))
        json = (
            "" if words[0] in ("run", "rehearse") else "--json"
        )  # what a program prints is its own
        assert found.pop("options").get("json", "") == json and callable(found.pop("run"))
        assert found == wanted | {"version": False, "command": words[0], "json": False}


STEP_OPTIONS = [
    *(
        "--device",
        "cpu",
        "--loss",
        "small_model:loss",
        "--optimizer",
        "torch.optim.SGD",
        "--option",
        "lr=0.5",
    ),
    *("--option", "momentum=1", "--amp", "bfloat16", "--max-grad-norm", "0.5", "--scaler"),
]


def test_options_of_a_step_reach_the_plan(folder, monkeypatch):
    more = ["--save", "L3", "--checkpoint-every", "2", "--accumulation", "4", "--release"]
    words = ["small_model:model", "--input", "3x6", "--target", "3x2:bfloat16", *STEP_OPTIONS]
    (model, optimizer, batch), keywords = setup_of(read("plan", *words, *more))
    assert keywords.pop("loss")(torch.ones(2), torch.zeros(2)) == 2
    assert keywords == {
        "device": "cpu", "amp": torch.bfloat16, "save": "L3", "checkpoint_every": 2,
        "accumulation": 4, "release": True, "scaler": True, "max_grad_norm": 0.5,
    }  # fmt: skip
    assert model == "small_model:model"
    assert (optimizer.func, optimizer.keywords) == (torch.optim.SGD, {"lr": 0.5, "momentum": 1})
    assert [(x.shape, x.dtype, x.is_meta) for x in batch] == [
        ((3, 6), torch.float32, True),
        ((3, 2), torch.bfloat16, True),
    ]
    plain = ["plan", "small_model:model", "--device", "cuda:1"]
    (_, optimizer, batch), keywords = setup_of(read(*plain, "--tokens", "2x5"))
    assert optimizer is headroom.optim.AdamW and list(batch) == ["input_ids", "labels"]
    assert batch["input_ids"] is not batch["labels"]
    assert all(x.dtype == torch.int64 and x.shape == (2, 5) for x in batch.values())
    assert keywords == {
        "loss": None, "device": "cuda:1", "amp": None, "save": None, "checkpoint_every": None,
        "accumulation": 1, "release": False, "scaler": False, "max_grad_norm": None,
    }  # fmt: skip
    own = [*plain, "--batch", "small_model:batch", "--optimizer", "small_model:Steps"]
    (_, optimizer, batch), _ = setup_of(read(*own, "--option", "lr=3", "--loss", "mse_loss"))
    assert optimizer.func.__name__ == "Steps" and optimizer.keywords == {"lr": 3}
    assert torch.equal(batch[0], torch.full((3, 6), 2.0))
    assert str(folder) not in sys.path


def test_options_of_a_step_reach_what_is_run(folder):
    words = ["fit", "small_model:model", *STEP_OPTIONS, "--ladder"]
    shapes = ["--input", "3x6", "--input", "3x2:int64", "--target", "3x2:float16"]
    (model, batch), keywords = real_setup_of(read(*words, *shapes))
    assert type(model).__name__ == "Model" and isinstance(keywords.pop("scaler"), torch.GradScaler)
    assert [(x.shape, x.dtype, x.device.type) for x in batch] == [
        ((3, 6), torch.float32, "cpu"),
        ((3, 2), torch.int64, "cpu"),
        ((3, 2), torch.float16, "cpu"),
    ]
    assert 0.3 < batch[0].std() < 2 and not batch[1].any() and batch[2].any()
    assert keywords.pop("loss")(torch.ones(2), torch.zeros(2)) == 2
    assert isinstance(keywords.pop("optimizer"), partial)
    assert keywords == {"device": "cpu", "amp": torch.bfloat16, "max_grad_norm": 0.5}
    own = ["fit", "small_model:made", "--device", "cpu", "--batch", "small_model:batch", "--ladder"]
    (model, batch), keywords = real_setup_of(read(*own))
    assert type(model) is torch.nn.Linear and keywords["scaler"] is None
    assert torch.equal(batch[0], torch.full((3, 6), 2.0))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--release"], "--release is what is looked for: leave it out"),
        (["--accumulation", "2"], "--accumulation is what is looked for: leave it out"),
        (["--max-grad-norm", "0"], "--max-grad-norm is 0.0, wanted a positive number"),
        (["--optimizer", "torch.nn.AdamW"], "wanted a name of headroom.optim or torch.optim"),
        (["--optimizer", "torch.optim.Muon9"], "and torch.optim has none of this name"),
        (["--optimizer", "plan"], "and headroom.optim has none of this name"),
        (["--option", "2=3"], "--option is '2=3', wanted NAME=VALUE"),
        (["--loss", "Tensor"], "--loss is 'Tensor', wanted one of torch.nn.functional"),
        (["--device", "cuda:x"], "--device is 'cuda:x', wanted cpu, cuda or cuda:1"),
        (["--tokens", "3x4"], "the batch is given 2 times, wanted once"),
    ],
)
def test_what_a_step_refuses(folder, refused, arguments, message):
    shapes = ["--input", "3x6", "--target", "3x2"]
    base = ["--device", "cpu", "--loss", "mse_loss"]
    assert message in refused(["fit", "small_model:model", *shapes, *base, *arguments, "--ladder"])


def test_what_a_model_returns(folder, refused):
    line = ["--device", "cpu", "--input", "3x6", "--ladder"]
    error = refused(["fit", "small_model:nothing", *line])
    assert error == "MODEL is 'small_model:nothing', which returned a int"
    error = refused(["plan", "small_model:model", "--tokens", "3x2", "--target", "3x2"])
    assert error == "--target needs a --loss, which compares the output with it"
    words = ["--tokens", "3x2", "--target", "3x2", "--loss", "mse_loss"]
    assert refused(["plan", "small_model:model", *words]) == "--target goes with --input"


@pytest.mark.parametrize(
    "text, value",
    [
        ("true", True), ("False", False), ("none", None), ("bfloat16", torch.bfloat16), ("3", 3),
        ("1e-3", 1e-3), ("kahan", "kahan"),
    ],
)  # fmt: skip
def test_values_of_options_of_an_optimizer(folder, text, value):
    words = ["plan", "small_model:model", "--device", "cpu", "--tokens", "1x1"]
    (_, optimizer, _), _ = setup_of(
        read(*words, "--optimizer", "small_model:Steps", "--option", f"x={text}")
    )
    assert optimizer.keywords == {"x": value} and type(optimizer.keywords["x"]) is type(value)


def test_shapes():
    assert tensor("7", "--input").shape == (7,)
    assert tensor("2x3x1:uint8", "--input").dtype == torch.uint8
    for text in ("", "0", "-1", "2x", "x2", "2 x3", "1" * 13, "02"):
        with pytest.raises(ValueError, match="wanted sizes with x between them, such as 4x2048"):
            tensor(text, "--input")
    with pytest.raises(ValueError, match="--tokens is '2x3x4', wanted BxS, such as 4x2048"):
        tensor("2x3x4:int64", "--tokens", dimensions=2)
    with pytest.raises(ValueError, match="--input has the dtype '', wanted one of float32, bfl"):
        tensor("2x3:", "--input")


def test_names_are_found_in_the_folder_of_the_shell(folder):
    before = list(sys.path)
    assert named("small_model:batch", "--batch")()[0].shape == (3, 6)
    with pytest.raises(ValueError, match="--batch is 'no_module:x', wanted module:function: No mo"):
        named("no_module:x", "--batch")
    assert sys.path == before


def test_answers_in_words(folder, capsys):
    words = ["fit", "small_model:model", "--input", "3x6", "--target", "3x2", "--device", "cpu"]
    words += ["--loss", "mse_loss", "--budget"]
    model, batch = torch.nn.Linear(6, 2), (torch.ones(3, 6), torch.ones(3, 2))
    total = headroom.plan(
        model, headroom.optim.AdamW, batch, loss=torch.nn.functional.mse_loss, device="cpu"
    ).total_bytes
    for budget, code, verdict in (
        (total + 5, 0, "fits, with 5 B to spare"),
        (total, 0, "fits, with 0 B to spare"),
        (total - 5, 1, "does not fit, by 5 B"),
    ):
        assert main([*words, str(budget)]) == code
        sizes = f"{format_bytes(total)} of {format_bytes(budget)}"
        assert capsys.readouterr().out == f"{sizes}: {verdict}\n"
    assert main([*words, "1 KiB", "--max-batch"]) == 0
    most = int(capsys.readouterr().out.removeprefix("largest batch in 1.00 KiB: "))
    assert most >= 1
    assert main([*words, "100", "--max-batch"]) == 1
    assert capsys.readouterr().out == "largest batch in 100 B: 0\n"
    assert main([*words, "100", "--max-batch", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "format": "headroom.fit/1", "budget_bytes": 100, "fits": False, "max_batch": 0,
    }  # fmt: skip


def test_what_a_plan_prints(folder, capsys):
    words = ["plan", "small_model:model", "--input", "3x6", "--target", "3x2", "--device", "cpu"]
    words += ["--loss", "mse_loss"]
    model, batch = torch.nn.Linear(6, 2), (torch.ones(3, 6), torch.ones(3, 2))
    loss = torch.nn.functional.mse_loss
    plan = headroom.plan(model, headroom.optim.AdamW, batch, loss=loss, device="cpu")
    plan.model = "Model"
    assert main([*words, "--top", "2", "--advice", "1"]) == 0
    advice = [str(one) for one in plan.advice(1)]
    assert capsys.readouterr().out == "\n".join([plan.table(2), *advice]) + "\n"
    assert main([*words, "--advice", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.pop("device_share") == vars(plan.device_share)
    assert found.pop("options").keys() == plan.options.keys()
    assert found == {
        "format": "headroom.plan.summary/1", "model": "Model", "device": "cpu",
        "total_bytes": plan.total_bytes, "peak_bytes": plan.peak_bytes,
        "reserved_bytes": plan.reserved_bytes, "first_step_bytes": plan.first_step,
        "steady_bytes": plan.steady, "peak_by_kind": plan.peak_by_kind,
        "peaks_by_phase": plan.timeline.peaks_by_phase(), "notes": plan.timeline.notes,
        "advice": advice,
    }  # fmt: skip


def test_what_is_measured_is_asked_for(folder, monkeypatch, capsys):
    asked = []

    class Fitted:
        def to_json(self):
            return {"rung": "L2"}

    monkeypatch.setattr(headroom, "fit", lambda *_, **how: asked.append(how) or Fitted())
    words = ["fit", "small_model:model", "--batch", "small_model:batch", "--loss", "mse_loss"]
    words += ["--device", "cpu", "--budget", "1 MiB", "--measure", "--allow", "8bit"]
    assert main([*words, "--allow", "bf16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "format": "headroom.fit/1", "budget_bytes": 1 << 20, "fits": True,
        "fitted": {"rung": "L2"},
    }  # fmt: skip
    (how,) = asked
    assert (how["budget"], how["allow"], how["dry_run"]) == (1 << 20, ("8bit", "bf16"), True)
    assert (how["device"], how["optimizer"]) == ("cpu", headroom.optim.AdamW)
    assert how["loss"] is torch.nn.functional.mse_loss


def test_what_a_ladder_is_asked_for(folder, monkeypatch, capsys):
    asked = []

    class Ladder:
        def save(self, path):
            path.write_text("{}")

        def __str__(self):
            return "all trades"

    monkeypatch.setattr(headroom, "ladder", lambda *_, **how: asked.append(how) or Ladder())
    words = ["fit", "small_model:model", "--batch", "small_model:batch", "--loss", "mse_loss"]
    words += ["--device", "cpu", "--ladder", "--allow", "adafactor"]
    assert main([*words, "--png", "a.png", "--out", "a.json"]) == 0
    said = capsys.readouterr()
    assert said.out == "all trades\n" and said.err == "wrote a.png\nwrote a.json\n"
    assert asked[0]["allow"] == ("adafactor",) and asked[0]["path"] == Path("a.png")
    assert (folder / "a.json").read_text() == "{}"
    assert main(words) == 0 and capsys.readouterr().err == "" and asked[1]["path"] is None


def test_a_conversion_takes_its_options(folder, capsys):
    _, optimizer = run(ps := parameters(), ADAMW(ps, lr=LR))
    torch.save(optimizer.state_dict(), "in.pt")
    words = ["--from", "headroom", "--param-dtype", "bfloat16", "--block-size", "64"]
    words += ["--min-8bit-size", "0", "--to", "headroom-8bit", "--json"]
    assert main(["convert", "in.pt", "out.pt", *words]) == 0
    how = {"from_": "headroom", "param_dtype": torch.bfloat16, "block_size": 64}
    state, report = headroom.state.convert_state(
        optimizer.state_dict(), "headroom-8bit", min_8bit_size=0, **how
    )
    assert_same_entries(torch.load("out.pt", weights_only=True), state)
    assert json.loads(capsys.readouterr().out) == json.loads(
        json.dumps(
            {
                "format": "headroom.convert/1",
                "source": "headroom",
                "target": "headroom-8bit",
                "is_lossless": False,
                "losses": [vars(one) | {"relative": one.relative} for one in report.losses],
                "notes": report.notes,
            },
            default=str,
        )
    )
    assert set(convert.DTYPES) == {"float32", "bfloat16", "float16"}


def test_pages(folder, capsys):
    report_files.plan(5).save("plan.json")
    assert main(["report", "plan.json", "-o", "a.html", "--title", "Mine"]) == 0
    assert capsys.readouterr().out == "wrote a.html\n"
    assert "<title>Mine</title>" in (folder / "a.html").read_text()
    assert main(["report", "plan.json", "--terminal", "--top", "2"]) == 0
    shown = capsys.readouterr().out
    assert len(re.findall(r" 1\n", shown)) == 2 and "wrote" not in shown
    assert not (folder / "plan.json.html").exists()


def test_rows_and_moments_of_a_diff(folder, capsys):
    report_files.timeline(40).save("a.json")
    report_files.timeline(44).save("b.json")
    for words, top, at in ((["--top", "1"], 1, "peak"), (["--at", "end"], 10, "end")):
        found = headroom.reports.diff(report_files.timeline(40), report_files.timeline(44), at=at)
        found.names = "a.json", "b.json"
        assert main(["diff", "a.json", "b.json", *words]) == 0
        assert capsys.readouterr().out == f"{found.table(top)}\n"
    assert main(["diff", "a.json", "b.json", "--at", "end", "--fail-above", "1 KiB"]) == 1
    grown = f"grew by {format_bytes(found.growth)}, more than 1.00 KiB"
    assert capsys.readouterr().err == f"headroom diff: {grown}\n"


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("hit"),)


def test_a_conversion_runs_no_code_of_the_file(folder, capsys):
    torch.save({"state": {}, "param_groups": [], "more": Bomb()}, "bomb.pt")
    assert main(["convert", "bomb.pt", "out.pt", "--to", "torch"]) == 1
    assert "bomb.pt cannot be loaded" in capsys.readouterr().err
    assert not (folder / "hit").exists() and not (folder / "out.pt").exists()
