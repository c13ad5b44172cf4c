"""What every test file shares: the devices to run on, processes that talk through gloo, seeds, and
torch's settings put back."""

import gc
import os
import tempfile
from pathlib import Path

import pytest
import torch

from helpers.ranks import Ranks
from helpers.sampling import sample, sample_slow


def pytest_addoption(parser):
    parser.addoption(
        "--sample",
        type=int,
        metavar="WAYS",
        help="of each test, run cases until every combination of the values of so many parameters "
        "occurred once: 1, every value; 2, every pair",
    )
    parser.addoption(
        "--slow-cases",
        type=int,
        metavar="MOST",
        help="of each test, run so many of the cases that are marked slow",
    )


@pytest.hookimpl(trylast=True)  # after -m and -k, so that what they leave is sampled
def pytest_collection_modifyitems(config, items):
    if ways := config.getoption("--sample"):
        items[:], left_out = sample(items, ways)
        config.hook.pytest_deselected(items=left_out)
    if most := config.getoption("--slow-cases"):
        items[:], left_out = sample_slow(items, most)
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish():
    """Leaves what is imported by now out of garbage collections, which steps that are repeated ask
    for: they would take half a second each. Tests that freeze more leave it frozen."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()


def _devices():
    yield pytest.param("cpu")
    if torch.cuda.is_available():
        yield pytest.param("cuda", marks=pytest.mark.cuda)


@pytest.fixture(params=list(_devices()))
def device(request):
    """Runs the test once per kind of device. `-m cuda` selects exactly the runs on a GPU."""
    return request.param


@pytest.fixture(scope="session")
def ranks():
    """Runs a function on every rank of two processes: ``ranks(function, *arguments)``. Starting
    them takes seconds, so all files share them."""
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture(autouse=True)
def _clean_slate():
    """Every test starts from the same seed and on one thread (on a busy machine, threads that wait
    for each other cost more than they bring), and leaves torch's settings as they were."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    deterministic = torch.utils.deterministic
    fill = deterministic.fill_uninitialized_memory
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    deterministic.fill_uninitialized_memory = fill


@pytest.fixture
def fresh_dynamo():
    """Nothing is compiled yet, and graphs are counted from 0."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def memory_path(tmp_path):
    """A folder in memory where there is one: for many files that need no disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)
