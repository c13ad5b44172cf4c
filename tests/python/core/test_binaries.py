"""What is said when the binaries are loaded."""

import importlib
import os
import subprocess
import sys
import warnings
from pathlib import Path

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


TORCH = """
class ops:
    def load_library(path):
        raise OSError(f"Could not load this library: {path}") from OSError("no version GLIBC_2.99")
"""


@pytest.mark.parametrize(
    "torchs, built, said",
    [
        (None, True, "headroom needs torch >= 2.11, and {python} has none: pip install torch"),
        ("2.10.0+cu128", True, "needs torch >= 2.11, and this is 2.10.0+cu128: pip install 'torch"),
        ("2.9.1", True, "this is 2.9.1"),
        ("2.15.0", True, "no version GLIBC_2.99. If it was built for another system"),
        ("2.15.0", False, "is not built, it has no {folder}/lib/libheadroom_torch.so: in a clone"),
        ("2.9.1", False, "is not built"),
    ],
)
def test_why_the_package_cannot_be_imported(torchs, built, said, tmp_path):
    """Without the torch here, and without the rest of the package, which must not be reached."""
    package, folder = Path(binaries.__file__).parents[1], tmp_path / "headroom"
    for name in ("__init__.py", "_core/__init__.py", "_core/binaries.py", "_core/lazy.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((package / name).read_bytes())
    (folder / "lib").mkdir()
    if built:
        (folder / "lib" / "libheadroom_torch.so").touch()
    if torchs:
        (tmp_path / "torch.py").write_text(f"__version__ = {torchs!r}\n{TORCH}")
    command = [sys.executable, "-S", "-c", "import headroom"]
    env = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    last = done.stderr.splitlines()[-1]
    assert said.format(python=sys.executable, folder=folder) in last
