"""One line of Headroom in loops of other people: a program of ``tests/loops`` for each, with the
real packages, in the releases that it names."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import headroom
import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = sorted((ROOT / "tests/loops").glob("with_*.py"))
# The first compiles an extension of its own; the others have one call, or the loop of another.
BEFORE_A_RELEASE = {
    f"with_{name}"
    for name in ("deepspeed", "compile", "dcp", "export", "onnx", "torchtitan", "torchtune")
}
NEWEST = os.environ.get("HEADROOM_LOOPS") == "newest"  # as .ci/newest asks for
VERSIONS = (
    "import importlib.metadata, json\n"
    "found = list(importlib.metadata.distributions())[::-1]\n"  # of two, the first on the path
    "print(json.dumps({each.name.lower().replace('_', '-'): each.version for each in found}))"
)


def told(program, key):
    """What the metadata of a script (https://packaging.python.org, "Inline script metadata") has
    for a key: a list of texts."""
    block = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", program.read_text(), re.MULTILINE)[1]
    text = re.sub(r"^# ?", "", block, flags=re.MULTILINE)
    found = re.search(rf"^{key} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    return re.findall(r'"(.+?)"', found[1]) if found else []


def needed(program):
    """The requirements of a program: those releases, or any."""
    pinned = told(program, "dependencies")
    return [re.split("==", each)[0] for each in pinned] if NEWEST else pinned


def environment_of(program):
    """The name of the environment that a program runs in: rows whose requirements contradict each
    other have different ones."""
    return (told(program, "environment") or ["common"])[0]


@cache
def environment(name):
    """Makes an environment on top of this one, with what its programs need, and returns its Python,
    the versions in it, and what pip said where it failed."""
    folder = ROOT / "build" / "loops" / (name + "-newest" * NEWEST)
    python = folder / "bin" / "python"
    if not python.exists():
        run = [sys.executable, "-m", "venv", folder]
        subprocess.run(list(map(str, run)), check=True)
        site = next(folder.glob("lib/python*/site-packages"))
        (site / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")
    programs = [each for each in PROGRAMS if environment_of(each) == name]
    options = ["--upgrade", "--upgrade-strategy=eager"] if NEWEST else []
    wanted = sorted({each for program in programs for each in needed(program)})
    pip = [str(python), "-m", "pip", "install", "--quiet", *options, *wanted]
    done = subprocess.run(pip, capture_output=True, text=True)
    said = done.stderr.strip().splitlines()[-1] if done.returncode else ""
    listed = subprocess.run([str(python), "-c", VERSIONS], capture_output=True, text=True)
    return python, json.loads(listed.stdout), said


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(one, id=one.stem, marks=[pytest.mark.release] * (one.stem in BEFORE_A_RELEASE))
        for one in PROGRAMS
    ],
)
def test_a_loop_trains_with_one_line(program, tmp_path):
    python, versions, said = environment(environment_of(program))
    names = {
        each: re.match(r"[\w.-]+", each)[0].lower().replace("_", "-") for each in needed(program)
    }
    wrong = [e for e, name in names.items() if name not in versions or not_of(e, versions[name])]
    if wrong:
        reason = f"pip install {' '.join(wrong)} ({said})"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    package = Path(headroom.__file__).parent
    (tmp_path / "path").mkdir()
    (tmp_path / "path/headroom").symlink_to(package)  # alone, so that nothing else comes first
    env = os.environ | {"PYTHONPATH": str(tmp_path / "path"), "OMP_NUM_THREADS": "1"}
    command = [str(python), str(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    had = ", ".join(f"{name} {versions[name]}" for name in names.values())
    assert done.returncode == 0, f"broke with {had}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def not_of(requirement, version):
    """Whether a version is another than the one that a requirement pins."""
    pinned = requirement.partition("==")[2].partition(";")[0].strip()
    return bool(pinned) and version.partition("+")[0] != pinned
