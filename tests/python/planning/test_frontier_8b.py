"""README's picture of an 8B: its bytes are planned, near what was rehearsed, and its seconds are
those of the FLOPs that are counted by hand."""

import json

import pytest
from benchmarks._certificates import file_of, taken
from benchmarks._frontier_8b import LEVELS, RESULTS, WHERE, draw, point
from headroom_rehearsal.certificate import verify

POINTS = {(one["where"], one["level"]): one for one in json.loads(RESULTS.read_text())}


def test_every_point_is_there():
    assert [*POINTS] == [(where, level) for where in WHERE for level in LEVELS]


@pytest.mark.parametrize(
    "where, way",
    [("states on the host", "full states"), ("weights and steps on the host", "full streamed")],
)
def test_the_bytes_are_near_those_that_were_rehearsed(where, way):
    rehearsed = taken(verify(file_of(way)).report)
    assert POINTS[where, "L5"]["bytes"] == pytest.approx(rehearsed, rel=0.05)


def test_the_seconds_are_those_of_the_flops():
    """Of 8.03 billion parameters, of which the table of embeddings multiplies nothing."""
    params, tokens, rate = 8_030_261_248, 2048, 120e12
    products = 6 * (params - 128256 * 4096) * tokens + 3 * 32 * 2 * tokens**2 * 4096
    step = params * (2 + 2 * (2 + 2.03)) / 1e12
    found = POINTS["all on the GPU", "L1"]["seconds"]
    assert found == pytest.approx(products / rate + step, rel=1e-3)


def test_less_memory_takes_longer():
    for where in WHERE:
        points = [POINTS[where, level] for level in LEVELS]
        assert [p["seconds"] for p in points] == sorted(p["seconds"] for p in points)
    bytes_ = [POINTS[where, "L5"]["bytes"] for where in WHERE]
    assert bytes_[0] > bytes_[1] and bytes_[2] > bytes_[3]


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers")
    draw([*POINTS.values()], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_point_again():
    pytest.importorskip("transformers")
    found = point("states on the host", "L5")
    assert found["bytes"] == pytest.approx(POINTS["states on the host", "L5"]["bytes"], rel=1e-3)
