"""The marker ``peak_memory`` of pytest.

It is installed as ``headroom_pytest``, a package of its own, because pytest imports it whenever it
runs, and ``headroom`` would load torch then.
"""

import pytest


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "peak_memory(limit, **options): fails if more bytes than the limit, such as '2 GiB', are "
        "live at once in the test; arguments are those of headroom.memory.assert_peak_below",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item):
    marker = item.get_closest_marker("peak_memory")
    if marker is None:
        return (yield)
    __tracebackhide__ = True
    from headroom.memory import assert_peak_below

    with assert_peak_below(*marker.args, **marker.kwargs):
        return (yield)
