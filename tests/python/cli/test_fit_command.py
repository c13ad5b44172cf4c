"""``headroom fit`` where the model is run: what fitting would do, and the ladder."""

import pytest
import torch
from headroom.cli import main
from headroom.reports import read

MODEL = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        blocks = (torch.nn.Sequential(torch.nn.Linear(40, 90), torch.nn.GELU(),
                                      torch.nn.Linear(90, 40)) for _ in range(3))
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x

def batch():
    return torch.ones(70, 40), torch.zeros(70, 40)
"""
SETUP = ["small_model:Model", "--device", "cpu", "--loss", "mse_loss"]
SHAPES = ["--input", "70x40", "--target", "70x40"]


def test_measure_reports_what_fits(folder, capsys, answer):
    batch = ["--batch", "small_model:batch"]
    assert main(["fit", *SETUP, *batch, "--budget", "1 MiB", "--measure", "--json"]) == 0
    found = answer()
    assert found["format"] == "headroom.fit/1" and found["fits"] is True
    assert found["fitted"]["predicted"]["peak_bytes"] <= 1 << 20
    assert main(["fit", *SETUP, *batch, "--budget", "1 MiB", "--measure"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2 and max(map(len, lines)) <= 80


def test_measure_says_what_does_not_fit(folder, capsys, answer):
    line = ["fit", *SETUP, *SHAPES, "--budget", "40 KiB", "--measure"]
    assert main([*line, "--json"]) == 1
    found = answer()
    assert found["fits"] is False and found["least_bytes"] > 40 << 10
    assert main(line) == 1
    assert "leanest" in capsys.readouterr().out


def test_ladder_is_printed_drawn_and_opened(folder, capsys, answer):
    pytest.importorskip("matplotlib")
    line = ["fit", *SETUP, *SHAPES, "--ladder", "--png", "ladder.png", "--out", "ladder.json"]
    assert main(line) == 0
    printed = capsys.readouterr().out
    (part,) = read(folder / "ladder.json")
    rungs = part.summary["rungs"]
    assert printed.startswith("Model on cpu: ") and "as it is" in printed
    assert rungs[0]["title"] == "as it is" and len(rungs) > 1
    assert min(rung["peak_bytes"] for rung in rungs[1:]) < rungs[0]["peak_bytes"]
    assert (folder / "ladder.png").read_bytes().startswith(b"\x89PNG")
    assert main(["fit", *SETUP, *SHAPES, "--ladder", "--json"]) == 0
    assert answer()["format"] == "headroom.ladder/1"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--ladder", "--measure"], "--ladder has no budget"),
        (["--budget", "1 GiB", "--allow", "8bit"], "--allow goes with"),
        (["--budget", "1 GiB", "--png", "a.png"], "are of --ladder"),
        (["--ladder", "--checkpoint-every", "2"], "--checkpoint-every is what is looked for"),
        (["--ladder", "--save", "L2"], "--save is what is looked for"),
        (["--ladder", "--optimizer", "none"], "--optimizer is none"),
    ],
)
def test_options_that_do_not_go_together(folder, refused, arguments, message):
    assert message in refused(["fit", *SETUP, *SHAPES, *arguments])


def test_a_configuration_cannot_be_run(folder, refused):
    (folder / "config.json").write_text("{}")
    line = ["fit", "config.json", "--tokens", "2x9", "--device", "cpu", "--ladder"]
    assert "wanted module:function" in refused(line)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there(folder, refused):
    line = ["fit", "small_model:Model", *SHAPES, "--loss", "mse_loss", "--ladder"]
    assert "there is no GPU" in refused(line)


def test_a_question_is_missing(folder):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *SETUP, *SHAPES])
    assert stopped.value.code == 2


def test_the_host_holds_what_the_device_has_no_room_for(folder, capsys, answer):
    line = ["fit", *SETUP, *SHAPES, "--json"]
    assert main([*line, "--budget", "40 KiB", "--measure"]) == 1
    budget = str(int(0.95 * answer()["least_bytes"]))
    assert main([*line, "--budget", budget, "--measure"]) == 1
    answer()
    assert main([*line, "--budget", budget, "--measure", "--host-budget", "1 GiB"]) == 0
    found = answer()["fitted"]
    assert found["choice"]["offload"] and found["host_budget_bytes"] == 1 << 30
    assert main([*line, "--ladder", "--host-budget", "1 GiB"]) == 0
    assert any(rung["host_bytes"] for rung in answer()["rungs"])
    with pytest.raises(SystemExit):
        main(["fit", *SETUP, *SHAPES, "--budget", "1 GiB", "--host-budget", "1 GiB"])
    assert "--host-budget goes with --measure or --ladder" in capsys.readouterr().err
