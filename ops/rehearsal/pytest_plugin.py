"""Runs tests on the software device: ``pytest -p headroom_rehearsal.pytest_plugin -m cuda``.

``HEADROOM_SOFTWARE_DEVICE`` says which, in words: the name of a GPU with underscores, ``late``,
``ordered``, ``devices=2``, ``memory=2147483648``, ``capability=86``. Kernels of Headroom come from
``build/cmake-*/tests/rehearsal``, where the target headroom_on_software_device puts them; after
``ptx``, what runs is what nvcc made of them, of the target headroom_ptx_on_software_device.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from . import note, start

_words = os.environ.get("HEADROOM_SOFTWARE_DEVICE", "").split()
_flags = {word: True for word in _words if word in ("late", "ordered")}
_numbers = {name: int(n) for name, _, n in (w.partition("=") for w in _words) if n}
_names = [w.replace("_", " ") for w in _words if w not in (*_flags, "ptx") and "=" not in w]
_target, _folder = "headroom_on_software_device", "build/cmake-*/tests/rehearsal"
if "ptx" in _words:
    _target, _folder = "headroom_ptx_on_software_device", f"{_folder}/ptx"
_kernels = sorted(Path.cwd().glob(f"{_folder}/libheadroom.so.*"))
if not _kernels:
    raise pytest.UsageError(
        f"found no {_folder}/libheadroom.so; build it: "
        f"cmake --build build/cmake-* --target {_target}"
    )
_numbers.setdefault("memory", 8 << 30)
runtime = start(*_names, **_numbers, **_flags, headroom=_kernels[-1])

import headroom  # noqa: E402, F401  (registers its ops)

note("headroom")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """Fails a test whose accesses nothing puts in order."""
    runtime.rehearsal_take_reports()
    result = yield
    reports = runtime.rehearsal_take_reports().decode()
    if reports:
        pytest.fail(f"accesses in no order on the software device:\n{reports}", pytrace=False)
    return result


def pytest_terminal_summary(terminalreporter) -> None:
    """Lists the calls that were made and are not there."""
    if missing := runtime.rehearsal_missing().decode().split("\n")[:-1]:
        terminalreporter.write_line(f"software device: not implemented: {', '.join(missing)}")
