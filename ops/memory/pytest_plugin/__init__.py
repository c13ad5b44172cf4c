"""The marker ``peak_memory`` and the fixture ``rehearse`` of pytest.

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


@pytest.fixture(scope="session")
def rehearse():
    """Runs a program for a GPU that this machine does not have, in a process of its own, and
    returns the report: ``rehearse(["train.py"], gpu="RTX 4090").assert_fits("22 GiB")``. Arguments
    are those of headroom_rehearsal.run. Skips the test on a machine with a GPU."""
    from headroom_rehearsal import run
    from headroom_rehearsal.command import refuse_gpus

    try:
        refuse_gpus()
    except RuntimeError as error:
        pytest.skip(str(error))
    return run
