"""What is said when the binaries are loaded."""

import importlib
import os
import subprocess
import sys
import warnings

import pytest
from headroom._core import binaries


@pytest.mark.parametrize("level, said", [("AVX2", 1), ("baseline", 0)])
def test_a_level_that_does_not_exist_is_said_once(level, said):
    code = "import headroom, headroom.optim; print(headroom.build_info()['cpu'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HEADROOM_CPU_LEVEL": level},
    )
    assert done.stderr.count("HEADROOM_CPU_LEVEL=") == said
    assert said or done.stdout.strip() == level


@pytest.mark.parametrize("level", [None, ""])
def test_nothing_is_said_where_no_level_is_asked_for(level, monkeypatch):
    monkeypatch.delenv("HEADROOM_CPU_LEVEL", raising=False)
    if level is not None:
        monkeypatch.setenv("HEADROOM_CPU_LEVEL", level)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.reload(binaries)
