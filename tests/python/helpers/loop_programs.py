"""The programs of ``tests/loops``, and environments with the releases that they name."""

import fcntl
import json
import os
import re
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LOOPS = ROOT / "tests/loops"
NEWEST = os.environ.get("HEADROOM_LOOPS") == "newest"  # as .ci/newest asks for
VERSIONS = (
    "import importlib.metadata, json\n"
    "found = list(importlib.metadata.distributions())[::-1]\n"  # of two, the first on the path
    "print(json.dumps({each.name.lower().replace('_', '-'): each.version for each in found}))"
)


def python_of(program):
    """Returns the Python of the environment that a program runs in, and a line with the versions
    that it has there. Skips the test where they cannot be had; in CI it fails."""
    python, versions, said = _environment(environment_of(program))
    names = {
        each: re.match(r"[\w.-]+", each)[0].lower().replace("_", "-") for each in _needed(program)
    }
    wrong = [e for e, name in names.items() if name not in versions or _differs(e, versions[name])]
    if wrong:
        reason = f"pip install {' '.join(wrong)} ({said})"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return python, ", ".join(f"{name} {versions[name]}" for name in names.values())


def environment_of(program):
    """Returns the name of the environment that a program runs in: those whose requirements
    contradict each other have different ones."""
    return (_told(program, "environment") or ["common"])[0]


def _told(program, key):
    """Returns what the metadata of a script (https://packaging.python.org, "Inline script
    metadata") has for a key: a list of texts."""
    block = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", program.read_text(), re.MULTILINE)[1]
    text = re.sub(r"^# ?", "", block, flags=re.MULTILINE)
    found = re.search(rf"^{key} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    return re.findall(r'"(.+?)"', found[1]) if found else []


def _needed(program):
    """Returns the requirements of a program: those releases, or any."""
    pinned = _told(program, "dependencies")
    return [re.split("==", each)[0] for each in pinned] if NEWEST else pinned


@cache
def _environment(name):
    """Makes an environment on top of this one, with what its programs need, and returns its Python,
    the versions in it, and what pip said where it failed."""
    folder = ROOT / "build" / "loops" / (name + "-newest" * NEWEST)
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Another process may want the same one.
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not python.exists():
            run = [sys.executable, "-m", "venv", folder]
            subprocess.run(list(map(str, run)), check=True)
            site = next(folder.glob("lib/python*/site-packages"))
            (site / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")
        programs = sorted(LOOPS.glob("[!_]*.py"))
        options = ["--upgrade", "--upgrade-strategy=eager"] if NEWEST else []
        own = [each for each in programs if environment_of(each) == name]
        wanted = sorted({each for program in own for each in _needed(program)})
        pip = [str(python), "-m", "pip", "install", "--quiet", *options, *wanted]
        done = subprocess.run(pip, capture_output=True, text=True)
    said = done.stderr.strip().splitlines()[-1] if done.returncode else ""
    listed = subprocess.run([str(python), "-c", VERSIONS], capture_output=True, text=True)
    return python, json.loads(listed.stdout), said


def _differs(requirement, version):
    """Returns whether a version is another than the one that a requirement pins."""
    pinned = requirement.partition("==")[2].partition(";")[0].strip()
    return bool(pinned) and version.partition("+")[0] != pinned
