"""One table of the weights modes: Python's, the C library's and the one in headroom.h agree."""

import ctypes
import re
from pathlib import Path

import headroom
import pytest
import torch
from headroom._core.weight_modes import HALVES, MODES, WeightsMode

HEADER = (Path(headroom.get_include()) / "headroom.h").read_text()
LIBRARY = next(Path(headroom.get_library_dir()).glob("libheadroom.so.*"))
ENUM = re.search(r"typedef enum hr_weights_mode \{(.*?)\}", HEADER, re.DOTALL)[1]
NUMBERS = {name: int(number) for name, number in re.findall(r"(HR_WEIGHTS_\w+) = (\d+)", ENUM)}
DTYPES = {  # hr_dtype
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 4,
    torch.int16: 5,
}
WORDS = {"any": (torch.float32, *HALVES), "bf16": HALVES[:1], "f16": HALVES[1:]}
RESIDUALS = {"f32": torch.float32, "i16": torch.int16, "i8": torch.int8}


class Info(ctypes.Structure):
    """hr_weights_mode_info."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("params", ctypes.c_uint32),
        ("has_residuals", ctypes.c_int32),
        ("residual_is_like", ctypes.c_int32),
        ("residual", ctypes.c_int),
        ("is_random", ctypes.c_int32),
        ("nearest", ctypes.c_int),
    ]


def info_of(number: int):
    function = ctypes.CDLL(str(LIBRARY)).hr_get_weights_mode_info
    function.restype = ctypes.POINTER(Info)
    pointer = function(number)
    return pointer[0] if pointer else None


def test_numbers_are_those_of_the_header():
    assert sorted(mode.number for mode in MODES.values()) == sorted(NUMBERS.values())
    assert sorted(NUMBERS.values()) == list(range(len(NUMBERS)))
    assert [info_of(number) for number in (-1, len(NUMBERS), 2**31 - 1)] == [None] * 3


@pytest.mark.parametrize("name, number", NUMBERS.items())
def test_the_tables_agree(name, number):
    info, mode = info_of(number), by_number(number)
    assert info.name.decode() == name
    assert {dtype for dtype, bit in DTYPES.items() if info.params >> bit & 1} == set(mode.params)
    assert info.params.bit_count() == len(mode.params)
    assert (info.has_residuals, info.is_random) == (mode.residual is not None, mode.is_random)
    assert info.residual_is_like == (mode.residual is not None and mode.dtype is None)
    if mode.dtype is not None:
        assert info.residual == DTYPES[mode.dtype]
    nearest = by_number(info.nearest)
    assert not nearest.is_random
    assert (nearest.residual, nearest.dtype) == (mode.residual, mode.dtype)
    assert mode.is_random or nearest == mode


@pytest.mark.parametrize("name, number", NUMBERS.items())
def test_the_table_in_the_header_agrees(name, number):
    """Its columns are the mode, the types of params and the type of residuals."""
    row = re.search(rf"^ \*     {name}  +(.+?)  +(.+?)  ", HEADER, re.MULTILINE)
    mode = by_number(number)
    assert sum((WORDS[word] for word in row[1].split(", ")), ()) == tuple(
        sorted(mode.params, key=DTYPES.get)
    )
    wanted = {"none": (False, None), "as param": (True, None)}
    residual = wanted.get(row[2]) or (True, RESIDUALS[row[2]])
    assert residual == (mode.residual is not None, mode.dtype)


def by_number(number: int) -> WeightsMode:
    return next(mode for mode in MODES.values() if mode.number == number)
