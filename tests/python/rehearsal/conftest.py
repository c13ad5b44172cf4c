"""The software device, which `pytest -p headroom_rehearsal.pytest_plugin` starts before torch."""

import sys

import pytest


@pytest.fixture
def runtime():
    """The runtime of the software device; without it the test is skipped."""
    plugin = sys.modules.get("headroom_rehearsal.pytest_plugin")
    if plugin is None:
        pytest.skip("needs -p headroom_rehearsal.pytest_plugin")
    return plugin.runtime


@pytest.fixture
def late(runtime):
    if not runtime.rehearsal_late():
        pytest.skip('needs HEADROOM_SOFTWARE_DEVICE="late ordered"')
    return runtime


@pytest.fixture
def unordered(runtime):
    """Returns the reports of accesses in no order, and takes them, so that the test passes."""
    if not runtime.rehearsal_ordered():
        pytest.skip('needs HEADROOM_SOFTWARE_DEVICE="late ordered"')
    return lambda: runtime.rehearsal_take_reports().decode()
