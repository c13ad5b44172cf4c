"""One binary for every torch >= 2.11: the installed one under the oldest torch."""

import os
from pathlib import Path

import headroom
import pytest

from helpers.oldest_torch import OLDEST, oldest_python, run

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = Path(headroom.__file__).resolve().parent

pytestmark = [pytest.mark.slow, pytest.mark.release]


@pytest.fixture(scope="module")
def oldest(tmp_path_factory):
    """Runs Python with the oldest torch and, from this environment, nothing but our packages."""
    python = oldest_python()
    path = tmp_path_factory.mktemp("path")
    # pytest loads the second by an entry point, which the build leaves in the root as well.
    for package in ("headroom", "headroom_pytest"):
        (path / package).symlink_to(PACKAGE.parent / package)
    env = {**os.environ, "PYTHONPATH": str(path)}
    return lambda *arguments: run(python, *arguments, cwd=ROOT, env=env)


def test_the_same_binary_is_loaded(oldest):
    code = (
        "import os, torch, headroom; print(torch.__version__); "
        "print(os.path.realpath(headroom.get_library_dir()))"
    )
    version, folder = oldest("-c", code).split()
    assert version.startswith(OLDEST)
    assert folder == str(PACKAGE / "lib")


def test_the_op_tests_pass(oldest):
    loops = [path for path in ROOT.glob("kernels/*/*_cpu.c") if path.parent.name != "core"]
    ops = sorted(path.stem.removesuffix("_cpu") for path in loops)
    tests = {path.stem: str(path) for path in ROOT.glob("tests/python/*/test_*.py")}
    files = [tests[f"test_{op}"] for op in ops]
    assert files
    options = ["-q", "-m", "not slow and not gloo", "-p", "no:cacheprovider"]
    output = oldest("-m", "pytest", *options, *files)
    assert " passed" in output
