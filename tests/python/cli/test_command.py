"""The command ``headroom``: subcommands, exit codes, JSON."""

import json

import headroom
import pytest
import torch
from headroom.cli import EXIT_CODES, command, main
from headroom.cli.command import COMMANDS
from headroom.memory import Allocation, Timeline

from helpers import report_files

MODEL = """
import torch

def model():
    return torch.nn.Sequential(torch.nn.Linear(60, 250), torch.nn.ReLU(), torch.nn.Linear(250, 7))

def batch():
    return torch.zeros(33, 60), torch.zeros(33, dtype=torch.int64)

def nothing():
    return None

def raises_KeyError(*_):
    return {}["name"]

def raises_AssertionError(*_):
    assert False

def raises_SystemExit(*_):
    raise SystemExit(7)

seven = 7
"""
SETUP = ["small_model:model", "--device", "cpu", "--loss", "cross_entropy"]
BATCH = ["--input", "33x60", "--target", "33:int64"]


def expected():
    model = torch.nn.Sequential(torch.nn.Linear(60, 250), torch.nn.ReLU(), torch.nn.Linear(250, 7))
    batch = torch.zeros(33, 60), torch.zeros(33, dtype=torch.int64)
    loss = torch.nn.functional.cross_entropy
    return headroom.plan(model, headroom.optim.AdamW, batch, loss=loss, device="cpu")


@pytest.mark.parametrize("batch", [BATCH, ["--batch", "small_model:batch"]])
def test_plan_is_that_of_python(folder, capsys, answer, batch):
    assert main(["plan", *SETUP, *batch, "--json", "--out", "plan.json"]) == 0
    found, plan = answer(), expected()
    assert found["format"] == "headroom.plan.summary/1"
    assert found["total_bytes"] == plan.total_bytes
    assert found["peak_by_kind"] == plan.peak_by_kind
    assert type(plan).load("plan.json").peak_bytes == plan.peak_bytes
    assert main(["plan", *SETUP, *batch, "--advice", "1"]) == 0
    assert plan.table().splitlines()[0] in capsys.readouterr().out


def test_plan_of_a_gpu_that_is_named(folder, capsys, answer):
    setup = [*SETUP, *BATCH, "--device", "cuda", "--json"]
    contexts = []
    for capability in ("7.5", "9.0"):
        assert main(["plan", *setup, "--capability", capability]) == 0
        found = answer()
        assert found["options"]["compute capability"] == capability
        contexts.append(found["device_share"]["context"])
    assert contexts[0] < contexts[1]
    with pytest.raises(SystemExit):
        main(["plan", *SETUP, *BATCH, "--capability", "9.0"])
    assert "--capability is of a GPU, and device is 'cpu'" in capsys.readouterr().err


def test_fit_answers_with_its_exit_code(folder, capsys, answer):
    total = expected().total_bytes
    for budget, code in ((total, 0), (total - 1, 1)):
        assert main(["fit", *SETUP, *BATCH, "--budget", str(budget), "--json"]) == code
        found = answer()
        assert found["fits"] is (code == 0) and found["plan"]["total_bytes"] == total
    assert main(["fit", *SETUP, *BATCH, "--budget", "1 KiB"]) == 1
    assert "does not fit, by" in capsys.readouterr().out
    assert main(["fit", *SETUP, *BATCH, "--budget", str(total), "--max-batch", "--json"]) == 0
    most = answer()["max_batch"]
    assert most >= 33


def test_tokens_and_options_of_the_optimizer(folder, answer):
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
                "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 101,
            }
        )
    )  # fmt: skip
    pytest.importorskip("transformers")
    run = ["plan", "config.json", "--tokens", "2x17", "--device", "cpu", "--json"]
    sizes = {}
    for optimizer in ("none", "AdamW", "torch.optim.SGD"):
        assert main([*run, "--optimizer", optimizer]) == 0
        sizes[optimizer] = answer()["peak_by_kind"]["optimizer_state"]
    assert sizes["none"] == sizes["torch.optim.SGD"] == 0 < sizes["AdamW"]
    assert main([*run, "--optimizer", "torch.optim.SGD", "--option", "momentum=0.9"]) == 0
    assert answer()["peak_by_kind"]["optimizer_state"] > 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (SETUP, "the batch is given 0 times, wanted once"),
        ([*SETUP, *BATCH, "--tokens", "2x3"], "the batch is given 2 times"),
        ([*SETUP, "--input", "33xx60"], "--input is '33xx60', wanted sizes with x between them"),
        ([*SETUP, "--input", "3:float7"], "--input has the dtype 'float7', wanted one of float32"),
        ([*SETUP, "--tokens", "7"], "--tokens is '7', wanted BxS"),
        ([*SETUP[:3], *BATCH], "--target needs a --loss"),
        ([*SETUP[:4], "nothing", *BATCH], "--loss is 'nothing'"),
        ([*SETUP, *BATCH, "--optimizer", "Adagrad9"], "--optimizer is 'Adagrad9'"),
        ([*SETUP, *BATCH, "--optimizer", "os.path"], "--optimizer is 'os.path'"),
        ([*SETUP, *BATCH, "--option", "lr"], "--option is 'lr', wanted NAME=VALUE"),
        ([*SETUP, "--batch", "small_model:missing"], "--batch is 'small_model:missing'"),
        ([*SETUP, *BATCH, "--option", "bogus=1"], "--option is refused by AdamW"),
        (
            [*SETUP, *BATCH, "--optimizer", "small_model:seven"],
            "--optimizer is 'small_model:seven'",
        ),
        (["no_such_file.json", *SETUP[1:], *BATCH], "MODEL is 'no_such_file.json'"),
        (
            ["small_model:seven", *SETUP[1:], *BATCH],
            "MODEL is 'small_model:seven', a value of type int",
        ),
        ([*SETUP, "--batch", "small_model:nothing"], "which returned None"),
        ([SETUP[0], *SETUP[3:], *BATCH, "--device", "gpu"], "--device is 'gpu', wanted cpu"),
        ([SETUP[0], *SETUP[3:], *BATCH, "--device", "mps"], "--device is 'mps', wanted cpu"),
        ([*SETUP, *BATCH, "--max-grad-norm", "nan"], "--max-grad-norm is nan"),
        ([*SETUP, *BATCH, "--accumulation", "0"], "--accumulation: got '0'"),
        ([*SETUP, *BATCH, "--save", "L9"], "--save: invalid choice"),
        ([*SETUP, *BATCH, "--top", "-1"], "--top: got '-1', wanted a whole number from 0 on"),
        ([*SETUP, *BATCH, "--bogus"], "there is no argument '--bogus'"),
        ([*SETUP, "--input", "9x99999999999x99999999999"], "--input is '9x"),
    ],
)
def test_arguments_that_plan_refuses(folder, refused, arguments, message):
    assert message in refused(["plan", *arguments])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "a command is missing"),
        (["bogus"], "invalid choice: 'bogus'"),
        (["fit", *SETUP, *BATCH, "--budget", "many"], "--budget: the size is 'many'"),
        (["fit", *SETUP, *BATCH, "--budget", "-1"], "--budget: the size is '-1'"),
        (["fit", *SETUP, "--budget", "1 GiB"], "the batch is given 0 times"),
        (["diff", "a.json", "a.json", "--fail-above", "many"], "--fail-above: the size is 'many'"),
        (["diff", "a.json", "a.json", "--device", "cuda:9"], "--device is 'cuda:9', and "),
        (["diff", "a.json", "a.json", "--top", "-1"], "--top: got '-1'"),
        (["report", "a.json", "--top", "x"], "--top: got 'x'"),
        (["report", "a.json", "-o", "a.json"], "would be replaced"),
        (["report", "a.json", "-o", "b", "--terminal"], "--terminal writes no page"),
        (["convert", "state.pt", "b", "--to", "torch", "--key", "x"], "--key is 'x'"),
        (
            ["convert", "state.pt", "b", "--to", "headroom-8bit", "--block-size", "3"],
            "--block-size",
        ),
        (["convert", "state.pt", "b", "--to", "torch", "--min-8bit-size", "-1"], "--min-8bit-size"),
        (["doctor", "x"], "there is no argument 'x'"),
    ],
)
def test_wrong_arguments_of_each_command(folder, refused, arguments, message):
    report_files.timeline(40).save("a.json")
    param = torch.nn.Parameter(torch.ones(7))
    torch.save(torch.optim.AdamW([param]).state_dict(), "state.pt")
    before = sorted(folder.iterdir())
    assert message in refused(arguments)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("place", ["model", "batch", "loss"])
@pytest.mark.parametrize("error", ["KeyError", "AssertionError", "SystemExit"])
def test_functions_that_raise(folder, capsys, answer, place, error):
    functions = {"model": "small_model:model", "batch": "small_model:batch", "loss": "mse_loss"}
    functions[place] = f"small_model:raises_{error}"
    model, *rest = functions.values()
    arguments = [model, "--device", "cpu", "--batch", rest[0], "--loss", rest[1], "--json"]
    assert main(["plan", *arguments]) == 1
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["format"] == "headroom.error/1" and found["error"] in said.err
    text = {"KeyError": "KeyError: 'name'", "SystemExit": "SystemExit: 7"}.get(error, error)
    if place != "loss":
        assert found["error"].startswith(f"{text}, in ") and found["type"] == error
        assert f"raises_{error} (" in found["error"] and "small_model.py:" in found["error"]


def test_errors_name_options_instead_of_arguments_of_python(folder, capsys):
    assert main(["plan", SETUP[0], "--input", "33x60", "--device", "cpu"]) == 1
    assert "give --loss, a function" in capsys.readouterr().err


def test_exit_codes(capsys, monkeypatch):
    assert set(EXIT_CODES) == {0, 1, 2, 130}
    for arguments in ([], ["bogus"], ["fit", "x:y"], ["report"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert all(meaning[:20] in capsys.readouterr().out for meaning in [EXIT_CODES[0]])
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"headroom {headroom.__version__}\n"

    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.import_module("headroom.cli.doctor"), "run", interrupted)
    assert main(["doctor"]) == 130


def test_every_command_has_json_and_help(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        # What a program prints that is run is its own.
        assert ("--json" in capsys.readouterr().out) == (name not in ("run", "rehearse")), name


def test_report(folder, capsys, answer):
    report_files.plan().save("plan.json")
    report_files.write_snapshot(folder / "run.pickle", report_files.snapshot(500))
    assert main(["report", "plan.json", "run.pickle", "--json"]) == 0
    found = answer()
    assert found["format"] == "headroom.report/1"
    assert found["written"] == ["plan.json.html"]
    plan = report_files.plan()
    assert found["parts"][0]["peak_bytes"] == plan.peak_bytes
    assert found["parts"][0]["total_bytes"] == plan.total_bytes
    assert found["parts"][1]["segments"]["segments"] > 0
    before = sorted(folder.iterdir())
    assert main(["report", "plan.json", "--terminal"]) == 0
    assert "peak of tensors" in capsys.readouterr().out
    assert sorted(folder.iterdir()) == before


def test_diff_fails_above_a_limit(folder, capsys, answer):
    first, second = report_files.timeline(40), report_files.timeline(40)
    second.allocations.append(Allocation(40, 3 << 20, kind="buffers", stack=("new.py:3 leak",)))
    Timeline(first.allocations, first.spans, "cuda").save("a.json")
    Timeline(second.allocations, second.spans, "cuda").save("b.json")
    run = ["diff", "a.json", "b.json"]
    assert main(run) == 0
    assert "new.py:3 leak" in capsys.readouterr().out
    for limit, code in (("3 MiB", 0), ("3145727", 1)):
        assert main([*run, "--fail-above", limit, "--json"]) == code
        found = answer()
        assert found["growth"] == 3 << 20 and found["fails"] is (code == 1)
        assert found["names"] == ["a.json", "b.json"] and found["rows"][0]["change"] == "new"
    assert main(["diff", "b.json", "a.json", "--fail-above", "0"]) == 0
    (folder / "ladder.json").write_text(json.dumps(report_files.ladder()))
    assert main(["diff", "a.json", "ladder.json"]) == 1
    assert "ladder.json has no memory over time" in capsys.readouterr().err
    report_files.plan(40).save("plan.json")
    assert main(["diff", "a.json", "plan.json", "--at", "end", "--json"]) == 0
    assert answer()["growth"] == 0


def test_python_m_headroom():
    from headroom.__main__ import main as run

    assert run is main
