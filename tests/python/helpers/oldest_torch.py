"""An environment with the oldest torch that the binaries are for, kept for the next run."""

import subprocess
import sys
from pathlib import Path

import pytest

OLDEST = "2.11.0"
ENVIRONMENT = Path(__file__).resolve().parents[3] / f".venv-{OLDEST.rpartition('.')[0]}"


def run(*command, **options):
    """Standard output of a command; a failure shows all that it said."""
    command = [str(part) for part in command]
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def oldest_python():
    """The Python of that environment, which has no headroom."""
    if sys.version_info >= (3, 15):
        pytest.skip(f"torch {OLDEST} has no wheel for this Python")
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", ENVIRONMENT)
    requirements = [f"torch=={OLDEST}", "setuptools<82", "numpy", "pytest", "tqdm"]
    run(python, "-m", "pip", "install", "--quiet", *requirements)
    return python
