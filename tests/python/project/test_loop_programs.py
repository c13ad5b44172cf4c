"""One line of Headroom in loops of other people: a program of ``tests/loops`` for each, with the
real packages, in the releases that it names."""

import os
import subprocess
from pathlib import Path

import headroom
import pytest

from helpers.loop_programs import LOOPS, python_of

PROGRAMS = sorted(LOOPS.glob("with_*.py"))
# The first compiles an extension of its own; the others have one call, or the loop of another.
BEFORE_A_RELEASE = {
    f"with_{name}"
    for name in ("deepspeed", "compile", "dcp", "export", "onnx", "torchtitan", "torchtune")
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(one, id=one.stem, marks=[pytest.mark.release] * (one.stem in BEFORE_A_RELEASE))
        for one in PROGRAMS
    ],
)
def test_a_loop_trains_with_one_line(program, tmp_path):
    python, versions = python_of(program)
    package = Path(headroom.__file__).parent
    (tmp_path / "path").mkdir()
    (tmp_path / "path/headroom").symlink_to(package)  # alone, so that nothing else comes first
    env = os.environ | {"PYTHONPATH": str(tmp_path / "path"), "OMP_NUM_THREADS": "1"}
    command = [str(python), str(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    said = f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == 0, f"broke with {versions}\n{said}"
