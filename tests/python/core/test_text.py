"""Texts that are cut to the width of a table or a page."""

import pytest
from headroom._core.text import LONGEST, quoted, shortened


@pytest.mark.parametrize(
    "keep, wanted", [("end", "..ghij"), ("beginning", "abcd.."), ("both", "ab..ij")]
)
def test_what_is_kept(keep, wanted):
    assert shortened("abcdefghij", 6, keep=keep) == wanted
    assert shortened("abcdef", 6, keep=keep) == "abcdef"
    for width in range(2, 10):
        assert len(shortened("abcdefghij", width, keep=keep)) == width


def test_what_is_quoted_loses_its_middle_and_what_no_font_has():
    assert quoted("a\nb\x00c\x1b[31m") == "a b c [31m"
    assert quoted("x" * 1000 + "end", 20).startswith("xxxxxxxxx..")
    assert len(quoted("x" * 1000)) == LONGEST
    assert quoted(KeyError(3)) == "3" and quoted((1, 2)) == "(1, 2)"
