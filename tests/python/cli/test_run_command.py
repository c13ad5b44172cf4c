"""``headroom run``: a program of someone else's in the process, with what it is given."""

import json
import signal
import subprocess
import sys

import headroom
import pytest
from headroom.cli import main

LOOP = """
import sys
import torch

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
frozen = torch.nn.Linear(8, 8).requires_grad_(False)
for step in range(int(sys.argv[1])):
    model(frozen(torch.ones(4, 8))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step + 1 == int(sys.argv[2]):
        torch.empty(1 << 60, dtype=torch.uint8)
print("trained", sys.argv, __name__)
"""
TRAINER = """
import sys
import torch
import transformers

parser = transformers.HfArgumentParser(transformers.TrainingArguments)
(args,) = parser.parse_args_into_dataclasses()
config = transformers.GPT2Config(
    vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (16, 16))]
trainer = transformers.Trainer(transformers.GPT2LMHeadModel(config), args, train_dataset=rows)
trainer.train()
print("made", type(trainer.optimizer.optimizer).__qualname__, trainer.state.global_step)
"""
QUIET = "--max_steps 4 --use_cpu true --report_to none --save_strategy no --disable_tqdm true"


def python(*arguments, **options):
    """Runs Python, and returns what is left of it."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Writes a program into a folder, in which the test then is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["headroom"])
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text, name="train.py"):
        (tmp_path / name).write_text(text)
        return name

    return write


def test_a_script_has_its_arguments_its_name_and_its_exit_code(program, tmp_path, capsys):
    program("value = 7", "beside.py")
    text = "import sys, beside; print(sys.argv, __name__, __file__); sys.exit(beside.value)"
    path = str(tmp_path / program(text))
    with pytest.raises(SystemExit) as ended:
        main(["run", "--profile", "made", "train.py", "--json", "-m", "--profile", "x"])
    assert ended.value.code == 7
    said = capsys.readouterr()
    assert said.out == f"{[path, '--json', '-m', '--profile', 'x']} __main__ {path}\n"
    assert (
        said.err == "headroom run: --profile wrote nothing: no model was trained in this process\n"
    )


def test_a_module_is_run_as_by_python(program, tmp_path, capsys):
    (tmp_path / "parts").mkdir()
    program("", "parts/__init__.py")
    program("import sys; print(sys.argv[1:], __name__, __spec__.name)", "parts/tool.py")
    assert main(["run", "--profile", "made", "-m", "parts.tool", "-x", "1"]) == 0
    assert capsys.readouterr().out == "['-x', '1'] __main__ parts.tool\n"


def test_a_folder_is_run_as_by_python(program, tmp_path, capsys):
    (tmp_path / "tool").mkdir()
    program("import sys, beside; print(sys.argv[1:], sys.path[0])", "tool/__main__.py")
    program("", "tool/beside.py")
    assert main(["run", "--register", "tool", "x"]) == 0
    assert capsys.readouterr().out == f"['x'] {tmp_path / 'tool'}\n"
    assert str(tmp_path) not in sys.path


def test_a_command_of_the_path_is_found(program, tmp_path, monkeypatch, capsys):
    for name, head in (("tool", f"#!{sys.executable}"), ("shell", "#!/bin/sh")):
        (tmp_path / name).write_text(f"{head}\nprint('ran')\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir("/")
    folder = str(tmp_path / "made")
    assert main(["run", "--profile", folder, "tool"]) == 0
    assert capsys.readouterr().out == "ran\n"
    with pytest.raises(SystemExit, match="2"):
        main(["run", "--profile", folder, "shell"])
    assert "shell is no program in Python" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, reason",
    [
        (["--register"], "PROGRAM is missing: a script, a command, or -m and a module"),
        (["train.py"], "there is nothing to do: give --register, --budget"),
        (["--register", "nowhere.py"], "PROGRAM is 'nowhere.py', and there is no such script"),
        (["--allow", "8bit", "--register", "train.py"], "--allow goes with --budget"),
        (["--host-budget", "1 GiB", "--register", "x"], "--host-budget goes with --budget"),
        (["--budget", "much", "train.py"], "argument --budget: the size is 'much'"),
        (["--register", "torchrun", "x.py"], "torchrun ... -m headroom run [options] PROGRAM"),
        (["--register", "-m", "torch.distributed.run", "x"], "other processes, where Headroom"),
        (["--profile", "a", "--snapshot-on-oom", "b", "x"], "not allowed with argument"),
    ],
)
def test_what_cannot_be_run_is_refused(words, reason, program, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", *words])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert said.err.startswith("headroom run: ") and reason in said.err


HOOK = "lambda *what: print('hook', *what[:2], file=sys.stderr)"


@pytest.mark.parametrize(
    "text",
    [
        "def inner():\n    raise KeyError('gone')\ninner()\n",
        f"import sys\nsys.excepthook = {HOOK}\n1 / 0\n",
        "syntax error\n",
    ],
    ids=["raises", "hook", "syntax"],
)
def test_an_error_is_shown_as_by_python(text, program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    path = program(text)
    assert main(["run", "--snapshot-on-oom", "made", path]) == 1
    assert capsys.readouterr().err == python(path).stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_signals_end_the_program_as_they_would(number, program):
    path = program(f"import os\nos.kill(os.getpid(), {int(number)})\nprint('on')\n")

    def ended(*arguments):
        # Jobs of a shell that runs a script ignore some signals, and what they start does too.
        return python(*arguments, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))

    done = ended("-m", "headroom", "run", "--register", path)
    assert done.returncode == ended(path).returncode == -number and done.stdout == ""


def test_a_profile_of_a_loop_that_knows_nothing_of_it(program, tmp_path, capsys):
    path = program(LOOP)
    assert main(["run", "--profile", "made", path, "8", "0"]) == 0
    said = capsys.readouterr()
    assert said.out == f"trained {[str(tmp_path / path), '8', '0']} __main__\n"
    trace, about = "rank0.0.pt.trace.json.gz", "rank0.0.profile.json"
    assert said.err.splitlines() == [f"headroom run: wrote made/{name}" for name in (trace, about)]
    result = json.loads((tmp_path / "made" / about).read_text())
    assert len(result["steps"]) == 3 and result["complete"]
    assert all(step["phases_us"]["optimizer"] > 0 for step in result["steps"])
    assert main(["run", "--profile", "other", path, "1", "0"]) == 0
    assert "--profile wrote nothing: the program made too few steps" in capsys.readouterr().err


def test_a_snapshot_is_written_when_memory_runs_out(program, tmp_path, capsys):
    path = program(LOOP)
    assert main(["run", "--snapshot-on-oom", "made", path, "8", "2"]) == 1
    said = capsys.readouterr()
    assert "DefaultCPUAllocator: can't allocate memory" in said.err
    assert "Memory ran out on cpu: 1024 PiB" in said.err and "headroom/cli" not in said.err
    assert "headroom run: wrote made/rank0.pickle" in said.err
    found = headroom.memory.load_snapshot("made/rank0.pickle")
    assert found.has_kinds and "parameters" in {a.kind for a in found.at_end()}
    # None without such an error, and on the CPU none of later steps.
    for steps in (["8", "0"], ["8", "6"]):
        assert main(["run", "--snapshot-on-oom", "others", path, *steps]) == (steps[1] != "0")
    assert list((tmp_path / "others").iterdir()) == []


@pytest.mark.slow
def test_a_budget_is_refused_where_nothing_can_keep_it(program):
    path = program(LOOP)
    done = python("-m", "headroom", "run", "--budget", "1 GiB", path, 2, 0)
    assert done.returncode == 1 and "SGD steps in a loop that belongs neither to" in done.stderr
    assert "call headroom.fit in the program" in done.stderr
    done = python("-m", "headroom", "run", "--budget", "1 GiB", path, 0, 0)
    assert done.returncode == 0 and "--budget had no effect: no Trainer" in done.stderr


@pytest.mark.slow
def test_a_trainer_gets_names_and_a_budget(program):
    pytest.importorskip("transformers")
    path = program(TRAINER)
    words = [path, "--output_dir", "out", *QUIET.split(), "--optim", "headroom_adamw_8bit"]
    done = python("-m", "headroom", "run", "--register", "--budget", "1 GiB", *words)
    assert done.returncode == 0, done.stderr
    assert "made AdamW8bit 4" in done.stdout
    assert "GPT2LMHeadModel in 1.00 GiB" in done.stdout and "measured peak" in done.stdout


@pytest.mark.slow
def test_a_trainer_of_lightning_gets_a_budget(program):
    pytest.importorskip("lightning")
    path = program(
        "import lightning, torch\n"
        "class Module(lightning.LightningModule):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.model = torch.nn.Linear(64, 64)\n"
        "    def training_step(self, batch, _):\n"
        "        return self.model(batch).square().mean()\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.parameters(), lr=0.1)\n"
        "trainer = lightning.Trainer(max_steps=4, accelerator='cpu', logger=False)\n"
        "trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(32, 64), batch_size=8))\n"
        "print([type(each).__name__ for each in trainer.callbacks])\n"
    )
    done = python("-m", "headroom", "run", "--budget", "1 GiB", path)
    assert done.returncode == 0, done.stderr
    assert "FitCallback" in done.stdout and "measured peak" in done.stdout
