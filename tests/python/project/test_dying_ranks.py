"""What a test hears of the processes that run its functions."""

import os

import pytest

from helpers.ranks import Ranks

pytestmark = pytest.mark.gloo


def aborts(rank):
    if rank == 1:
        os.abort()


def test_a_rank_that_dies_says_where_it_was():
    """Though the other one fails as well, because it waits for it."""
    with pytest.raises(AssertionError) as failed:
        Ranks()(aborts)
    text = str(failed.value)
    assert text.startswith("rank 1 failed in aborts:\nthe process died of SIGABRT, in call 1\n")
    assert "Fatal Python error: Aborted" in text and "in aborts" in text
