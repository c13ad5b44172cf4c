"""One binary for every torch >= 2.11: the installed one under the oldest torch."""

import os
import subprocess
import sys
from pathlib import Path

import headroom
import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = Path(headroom.__file__).resolve().parent
OLDEST = "2.11.0"
ENVIRONMENT = ROOT / f".venv-{OLDEST.rpartition('.')[0]}"  # kept for the next run

pytestmark = pytest.mark.slow


def run(*command, **options):
    command = [str(part) for part in command]
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def oldest(tmp_path_factory):
    """Runs Python with the oldest torch and, from this environment, nothing but our packages."""
    if sys.version_info >= (3, 15):
        pytest.skip(f"torch {OLDEST} has no wheel for this Python")
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", ENVIRONMENT)
    requirements = [f"torch=={OLDEST}", "setuptools<82", "numpy", "pytest", "tqdm"]
    run(python, "-m", "pip", "install", "--quiet", *requirements)
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
