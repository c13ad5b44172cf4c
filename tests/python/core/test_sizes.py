"""Sizes in bytes, from text and as text."""

import math

import pytest
from headroom._core.sizes import format_bytes, parse_bytes

PARSED = {
    0: 0,
    7: 7,
    2.9: 2,
    "0": 0,
    "12": 12,
    "12b": 12,
    " 12 B ": 12,
    "3 KiB": 3 << 10,
    "3 kb": 3000,
    "300 MB": 300_000_000,
    "2MiB": 2 << 20,
    "1.5GiB": 3 << 29,
    ".5 gb": 500_000_000,
    "1. GB": 10**9,
    "2 TiB": 2 << 40,
    "2 tb": 2 * 10**12,
    "1 PiB": 1 << 50,
    "9007199254740993": 9007199254740993,  # which no float is
}


@pytest.mark.parametrize("size", PARSED, ids=repr)
def test_what_is_read(size):
    got = parse_bytes(size)
    assert got == PARSED[size] and type(got) is int


@pytest.mark.parametrize("size", [True, None, b"1", [1]])
def test_what_is_no_size(size):
    with pytest.raises(TypeError) as caught:
        parse_bytes(size, "budget")
    assert str(caught.value) == (
        f'budget is {size!r}, wanted a number of bytes or text such as "2 GiB"'
    )


@pytest.mark.parametrize("size", ["", "GiB", "2 GiBs", "2 XB", "1.2.3", "-1", "1 2", "."])
def test_text_that_is_no_size(size):
    with pytest.raises(ValueError) as caught:
        parse_bytes(size)
    assert str(caught.value).startswith(f"size is {size!r}, wanted a number of bytes or text")
    assert str(caught.value).endswith("; units are B, KiB, MiB, GiB, TiB")


@pytest.mark.parametrize("size", [-1, -0.5, math.inf, math.nan])
def test_numbers_that_are_no_size(size):
    with pytest.raises(ValueError, match='"2 GiB", not negative$'):
        parse_bytes(size)


WRITTEN = {
    0: "0 B",
    999: "999 B",
    -999: "-999 B",
    1000: "0.98 KiB",
    1024: "1.00 KiB",
    -1536: "-1.50 KiB",
    10234: "9.99 KiB",
    10235: "10.0 KiB",
    102348: "99.9 KiB",
    102349: "100 KiB",
    734 << 20: "734 MiB",
    1023487: "999 KiB",
    1023488: "0.98 MiB",
    3 << 29: "1.50 GiB",
    5 << 40: "5.00 TiB",
    5 << 50: "5.00 PiB",
    5 << 60: "5120 PiB",
}


@pytest.mark.parametrize("size", WRITTEN)
def test_what_is_written(size):
    assert format_bytes(size) == WRITTEN[size]


def test_a_sign_of_what_is_more():
    assert format_bytes(1 << 20, "+") == "+1.00 MiB" and format_bytes(-5, "+") == "-5 B"
    assert format_bytes(0, "+") == "0 B"
