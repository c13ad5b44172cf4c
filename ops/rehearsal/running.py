"""Rehearses a program from Python."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["run"]


def run(program: Sequence[str], **options: Any) -> dict[str, Any]:
    """Rehearses a program in a process of its own, and returns the report.

    Example::

        report = headroom_rehearsal.run(["train.py", "--batch", "8"], gpu="RTX 4090", steps=2)
        assert report["fits"] and report["peak_allocated"] < 20 << 30

    Args:
        program: what follows the options of ``headroom rehearse``: a script, a command, or ``-m``
            and a module, and its arguments.
        options: those of ``headroom rehearse``, with underscores: ``gpu="H100"``,
            ``memory="12 GiB"``, ``capability=8.6``, ``steps=3``, ``loss=2.0``,
            ``snapshot="run.pickle"``.

    Returns:
        What ``headroom rehearse --report`` writes; ``output`` is what the program printed.

    Raises:
        RuntimeError: there was no rehearsal; the message says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        command = [sys.executable, "-m", __package__, *words, f"--report={file}", *program]
        ended = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if not file.exists():
            raise RuntimeError(f"there was no rehearsal: {ended.stdout.strip()}")
        return json.loads(file.read_text()) | {"output": ended.stdout}
