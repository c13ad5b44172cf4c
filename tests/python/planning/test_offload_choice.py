"""The table of docs/offloading-internals.md that says which use of the host wins when is what its
script prints."""

from pathlib import Path

import pytest
from benchmarks._offload_choice import SETTINGS, WAYS, rate_of_host, row

PAGE = Path(__file__).resolve().parents[3] / "docs" / "offloading-internals.md"
FAST = [(SETTINGS[0], way) for way in WAYS[2:]]
SLOW = [(SETTINGS[0], way) for way in WAYS[:2]]
SLOWER = [(setting, way) for setting in SETTINGS[1:] for way in WAYS]


@pytest.mark.parametrize(
    "setting, way",
    [
        *FAST,
        *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW),
        *(pytest.param(*one, marks=[pytest.mark.slow, pytest.mark.release]) for one in SLOWER),
    ],
)
def test_a_row_is_what_is_planned_and_simulated(setting, way):
    pytest.importorskip("transformers")
    assert row(setting, way) in PAGE.read_text().splitlines()


def test_the_rate_of_the_host_is_what_the_page_says():
    assert f"steps {rate_of_host() / 1e9:.1f}\nbillion" in PAGE.read_text()
