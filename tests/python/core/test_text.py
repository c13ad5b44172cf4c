"""Texts that are cut to the width of a table or a page."""

import pytest
from headroom._core.text import shortened
from headroom.reports import text


@pytest.mark.parametrize(
    "keep, wanted", [("end", "..ghij"), ("beginning", "abcd.."), ("both", "ab..ij")]
)
def test_what_is_kept(keep, wanted):
    assert shortened("abcdefghij", 6, keep=keep) == wanted
    assert shortened("abcdef", 6, keep=keep) == "abcdef"
    for width in range(2, 10):
        assert len(shortened("abcdefghij", width, keep=keep)) == width


def test_texts_of_files_lose_what_no_font_has():
    assert text.shortened("a\nb\x00c") == "a b c"
    assert text.shortened("x" * 1000 + "end", 20).startswith("xxxxxxxxx..")
    assert len(text.shortened("x" * 1000)) == text.LONGEST
