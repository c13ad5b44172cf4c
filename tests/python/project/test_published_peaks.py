"""Peaks that others have published: what is kept of their rehearsals is what the page says, and one
is rehearsed again."""

import json
import sys
from pathlib import Path

import pytest

from helpers.software_device import CAN_REHEARSE

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT))

from benchmarks._published import FILE, ROWS, rehearse, row_of_table  # noqa: E402

KEPT = {one["program"]: one for one in json.loads(FILE.read_text())}


def test_the_table_has_every_row():
    page = (ROOT / "docs" / "rehearse.md").read_text().splitlines()
    assert {" ".join(row.words) for row in ROWS} == set(KEPT)
    for row in ROWS:
        one = KEPT[" ".join(row.words)]
        assert one["published"] == row.published and row_of_table(row, one) in page


@pytest.mark.slow
@pytest.mark.skipif(not CAN_REHEARSE, reason="needs a torch for CUDA and no GPU")
def test_a_row_again():
    pytest.importorskip("transformers")
    row = next(row for row in ROWS if row.words == ("logits",))
    again = rehearse(row)
    assert again["rehearsed"] == KEPT["logits"]["rehearsed"]
    assert again["ratio"] == pytest.approx(1, abs=1e-3)
