"""Rehearses a program from Python."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import package

__all__ = ["Report", "rehearsed", "run"]

_SHOWN = 60  # lines of the program's output in a failure


class Report(dict[str, Any]):
    """Holds what ``headroom rehearse --report`` writes, and ``output``, what the program printed.
    Its keys are attributes too: ``report.fits``, ``report.peak_allocated``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"a report has no {name}; it has {', '.join(self)}") from None

    def assert_fits(self, limit: int | str | None = None) -> None:
        """Fails, and shows what the rehearsal printed, unless the program fits the device.

        Args:
            limit: the most that tensors may take at once, such as ``"22 GiB"``.

        Raises:
            AssertionError: memory ran out, the program failed, it has never used the device, or
                its tensors take more.
            ValueError: the limit is no size.
        """
        __tracebackhide__ = True
        sizes = package.module("_core/sizes.py")
        most = None if limit is None else sizes.parse_bytes(limit, "limit")
        peak = self["peak_allocated"]
        if self["fits"] is not True:
            why = "it does not fit" if self["fits"] is False else "unknown whether it fits"
        elif most is not None and peak > most:
            why = f"tensors took {sizes.format_bytes(peak)}, more than {sizes.format_bytes(most)}"
        else:
            return
        shown = "\n".join(self["output"].splitlines()[-_SHOWN:])
        raise AssertionError(f"{why}; the rehearsal printed:\n{shown}")


def run(program: Sequence[str], **options: Any) -> Report:
    """Rehearses a program in a process of its own, and returns the report.

    Example::

        report = headroom_rehearsal.run(["train.py", "--batch", "8"], gpu="RTX 4090", steps=2)
        report.assert_fits("20 GiB")

    Args:
        program: what follows the options of ``headroom rehearse``: a script, a command, or ``-m``
            and a module, and its arguments.
        options: those of ``headroom rehearse``, with underscores: ``gpu="H100"``,
            ``memory="12 GiB"``, ``capability=8.6``, ``steps=3``, ``loss=2.0``,
            ``snapshot="run.pickle"``, ``no_weights=True``.

    Raises:
        RuntimeError: there was no rehearsal; the message says why.
    """
    return rehearsed(program, options)


def rehearsed(
    program: Sequence[str],
    options: Mapping[str, Any],
    env: Mapping[str, str] | None = None,
    folder: str | None = None,
) -> Report:
    """Returns what :func:`run` does, of a process with an environment and in a folder."""
    with tempfile.TemporaryDirectory() as made:
        file = Path(made) / "report.json"
        words = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
            for name, value in options.items()
            if value is not None and value is not False
        ]
        command = [sys.executable, "-m", __package__, *words, f"--report={file}", *program]
        ended = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env=env,
            cwd=folder,
        )
        if not file.exists():
            raise RuntimeError(f"there was no rehearsal: {ended.stdout.strip()}")
        return Report(json.loads(file.read_text()), output=ended.stdout)
