"""Tests on the GPU that is made of software, and what it cannot show."""

import sys

import pytest

IS_HERE = "headroom_rehearsal.pytest_plugin" in sys.modules


def cannot_run(reason):
    """Skips a test on the software device, which `reason` says does not show what the test does."""
    return pytest.mark.skipif(IS_HERE, reason=f"the software device cannot show it: {reason}")
