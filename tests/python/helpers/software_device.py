"""Tests on the GPU that is made of software, and what it cannot show."""

import platform
import sys
from pathlib import Path

import pytest
import torch

IS_HERE = "headroom_rehearsal.pytest_plugin" in sys.modules
# A rehearsal, in a process of its own.
CAN_REHEARSE = (
    torch.version.cuda is not None
    and platform.machine() == "x86_64"
    and not Path("/dev/nvidiactl").exists()
)


def cannot_run(reason):
    """Skips a test on the software device, which `reason` says does not show what the test does."""
    return pytest.mark.skipif(IS_HERE, reason=f"the software device cannot show it: {reason}")


def command_there(program, *arguments, **options):
    """Returns the command that runs a program on the software device, with these options of
    ``headroom_rehearsal.start``."""
    start = (
        "import runpy, sys, headroom_rehearsal; "
        f"sys.argv, sys.path[0] = sys.argv[1:], {str(Path(__file__).parents[1])!r}; "
        f"headroom_rehearsal.start(**{options!r}); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    return [sys.executable, "-c", start, str(program), *map(str, arguments)]
