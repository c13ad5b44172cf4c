"""What the tests of the command share."""

import json
import sys

import pytest
from headroom.cli import main
from headroom.cli.command import COMMANDS


@pytest.fixture
def folder(request, tmp_path, monkeypatch):
    """A folder to work in, where `small_model` is a module with the test file's MODEL."""
    (tmp_path / "small_model.py").write_text(request.module.MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "small_model", raising=False)
    return tmp_path


@pytest.fixture
def answer(capsys):
    """Reads the JSON that the command has printed."""
    return lambda: json.loads(capsys.readouterr().out)


@pytest.fixture
def refused(capsys):
    """Runs the command with wrong arguments, and returns what it says as text and as JSON."""

    def run(arguments):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--json"])
        said = capsys.readouterr()
        found = json.loads(said.out)
        assert ended.value.code == 2 and found["format"] == "headroom.error/1"
        name = next((f"headroom {word}" for word in arguments if word in COMMANDS), "headroom")
        assert said.err == f"{name}: {found['error']}\n"
        return found["error"]

    return run
