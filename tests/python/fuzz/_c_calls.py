"""What calls of the C ABI are made of: the library, the structs that all functions share, memory of
which every byte is watched, and arguments that can be made wrong.

What C cannot see is not made wrong: an address that is no memory, a stride or a size that leads
past the memory that is there."""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Callable
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_void_p,
)
from pathlib import Path

import headroom
import numpy
import torch

LIBRARY = ctypes.CDLL(str(next(Path(headroom.get_library_dir()).glob("libheadroom.so.*"))))
LIBRARY.hr_last_error.restype = c_char_p
LIBRARY.hr_status_string.restype = c_char_p
OK, INTERNAL = 0, 6
F32, BF16, F16, U8, I8, I16, F64 = range(7)
DTYPES = {F32: torch.float32, BF16: torch.bfloat16, F16: torch.float16, F64: torch.float64}
FLOATS = (F32, BF16, F16)
LISTS = 16  # entries that the arrays of every list have, however many it says
LARGEST = 320  # elements of a tensor; its memory is large enough for any dtype
GAP = 64  # bytes between tensors, which nobody may write
CPU_ONLY = headroom.build_info()["cuda"] == "none" or not torch.cuda.is_available()


def struct(*members: tuple[str, type], sizes: tuple = ()) -> type[Structure]:
    """A struct; the memory is not enough for larger `sizes`."""
    names = [(name, kind) for names, kind in members for name in names.split()]
    return type("Struct", (Structure,), {"_fields_": names, "SIZES": sizes})


def config(*members: tuple[str, type], sizes: tuple = ()) -> type[Structure]:
    return struct(("size", c_size_t), *members, sizes=sizes)


class TensorList(Structure):
    _fields_ = [
        ("count", c_int64),
        ("data", POINTER(c_void_p)),
        ("numel", POINTER(c_int64)),
        ("dtype", POINTER(c_int32)),
    ]


class Exec(Structure):
    _fields_ = [("device", c_int32), ("stream", c_void_p)]


# ---- Memory --------------------------------------------------------------------------------------

ARENA = numpy.zeros(1 << 20, numpy.uint8)
BASE = ARENA.ctypes.data
Spans = list[tuple[int, int]]  # addresses, and how many bytes begin there


class Memory:
    """Hands out parts of the arena, filled with numbers, and knows which bytes are anyone's."""

    def __init__(self, rng: random.Random):
        self.rng, self.used, self.parts = rng, GAP - BASE % GAP, []

    def take(self, size: int, values: bytes = b"") -> int:
        start = self.used
        ARENA[start - GAP : start + size + 2 * GAP] = 0xA5
        self.used += -(-size // GAP) * GAP + GAP
        assert self.used < ARENA.size
        self.parts.append((start, size))
        ARENA[start : start + size] = 0
        ARENA[start : start + len(values)] = numpy.frombuffer(values, numpy.uint8)
        return BASE + start

    def struct(self, kind):
        """A struct, or an array of a ctypes kind, in memory that is watched."""
        return kind.from_address(self.take(ctypes.sizeof(kind)))

    def scalar(self, value, kind=c_float) -> int:
        return self.take(8, bytes(kind(value)))

    def all(self) -> bytes:
        return ARENA[: self.used].tobytes()

    def spans(self) -> Spans:
        return [(BASE + start, size) for start, size in self.parts]


def without(content: bytes, spans: Spans) -> bytearray:
    """What the arena held, with zeros for these bytes."""
    content = bytearray(content)
    for address, size in spans:
        content[address - BASE : address - BASE + size] = bytes(size)
    return content


def values(rng: random.Random, dtype: int, numel: int) -> bytes:
    if numel == 0:
        return b""
    if dtype in (U8, I8, I16):
        return rng.randbytes(numel * (2 if dtype == I16 else 1))
    numbers = torch.empty(numel).uniform_(0.5, 1.5)
    return numbers.to(DTYPES[dtype]).view(torch.uint8).numpy().tobytes()


class List:
    """A tensor list whose arrays have LISTS entries."""

    def __init__(self, memory: Memory, dtypes: list[int], numels: list[int], fill=values):
        self.memory = memory
        self.data = (c_void_p * LISTS)()
        self.numel, self.dtype = (c_int64 * LISTS)(), (c_int32 * LISTS)()
        for k, (dtype, numel) in enumerate(zip(dtypes, numels)):
            where = memory.take(8 * LARGEST, fill(memory.rng, dtype, numel))
            self.data[k], self.numel[k], self.dtype[k] = where, numel, dtype
        self.c = TensorList(len(numels), self.data, self.numel, self.dtype)

    def spoil(self, rng: random.Random) -> None:
        k = rng.randrange(max(1, self.c.count if 0 < self.c.count <= LISTS else 1))
        kind = rng.randrange(6)
        if kind == 0:
            self.c.count = rng.choice([-1, 0, 1, self.c.count + 1, LISTS, -(2**63)])
        elif kind == 1:
            name, array = rng.choice([("data", c_void_p), ("numel", c_int64), ("dtype", c_int32)])
            setattr(self.c, name, POINTER(array)())
        elif kind == 2:
            where = self.data[k]
            self.data[k] = where and rng.choice([None, where + rng.choice([1, 2, 4, 8])])
        elif kind == 3:
            self.numel[k] = rng.choice(
                [-1, 0, 1, self.numel[k] + 1, -(2**63), 2**59, 2**60, 2**63 - 1]
            )
        elif kind == 4:
            self.dtype[k] = rng.choice([*range(7), -1, 7, 2**31 - 1, -(2**31)])
        else:
            self.data[k] = self.data[0]


# ---- Calls ---------------------------------------------------------------------------------------


class Call:
    """One call: the lists and structs that it gets, to be spoiled, and its arguments. `written`
    gives, from these, the bytes that it may write; without it, all parts of the memory are."""

    def __init__(
        self,
        name: str,
        arguments: list,
        lists=(),
        structs=(),
        arrays=(),
        written: Callable[..., Spans] | None = None,
    ):
        self.name, self.arguments, self.written = name, arguments, written
        self.lists, self.structs, self.arrays = list(lists), list(structs), list(arrays)

    def spoil(self, rng: random.Random) -> None:
        kinds = [self.spoil_argument]
        kinds += [lambda r: r.choice(self.lists).spoil(r)] * 3 if self.lists else []
        kinds += [lambda r: spoil_struct(r, r.choice(self.structs))] * 3 if self.structs else []
        kinds += [lambda r: spoil_array(r, r.choice(self.arrays))] if self.arrays else []
        rng.choice(kinds)(rng)

    def spoil_argument(self, rng: random.Random) -> None:
        k = rng.randrange(len(self.arguments))
        value = self.arguments[k]
        if isinstance(value, c_size_t):
            value.value = rng.choice([0, 1, value.value // 2, max(0, value.value - 1)])
        elif isinstance(value, c_void_p):
            value.value = value.value and rng.choice([None, value.value + rng.choice([1, 2, 4])])
        elif isinstance(value, c_int64):
            value.value = rng.choice(less_than(value.value, isinstance(value, Limited)))
        elif isinstance(value, c_int32):
            value.value = rng.choice([-1, 0, 1, 2, 7, -(2**31), 2**31 - 1])
        else:
            self.arguments[k] = None

    def run(self) -> int:
        arguments = [each.c if isinstance(each, List) else each for each in self.arguments]
        passed = [
            byref(each) if isinstance(each, (Structure, ctypes.Array)) else each
            for each in arguments
        ]
        return getattr(LIBRARY, self.name)(*passed)


DOUBLES = (0.0, 1.0, -1.0, 0.5, 2.0, 1e-300, 5e-324, 1e300, math.nan, math.inf, -math.inf)
INTEGERS = (0, 1, 2, -1, 3, 15, 16, 64, 255, 256, 2**31 - 1, -(2**31))


class Limited(c_int64):
    """A size of which C sees that it is too large for any memory."""


def less_than(value: int, with_too_large: bool) -> list[int]:
    """Sizes for which the memory is large enough, or that are none."""
    too_large = [2**60, 2**63 - 1] if with_too_large else []
    return [-1, 0, value - 1, -(2**63), *too_large]


def spoil_struct(rng: random.Random, struct: Structure) -> None:
    name, kind = rng.choice(struct._fields_)[:2]
    value = getattr(struct, name)
    if name == "size":
        struct.size = rng.choice([0, 1, 8, struct.size - 8, struct.size + 8, 2**63])
    elif name == "device":
        struct.device = rng.choice([-2, -(2**31), 10**6, *([0, 1] if CPU_ONLY else [])])
    elif name == "stream":
        struct.stream = rng.choice([None, 8])
    elif kind is c_double:
        setattr(struct, name, rng.choice(DOUBLES))
    elif kind is c_int32:
        setattr(struct, name, rng.choice(INTEGERS))
    elif name in getattr(struct, "SIZES", ()):  # of memory
        setattr(struct, name, rng.choice(less_than(value, True)))
    elif kind is c_int64:
        setattr(struct, name, rng.choice([*INTEGERS, 2**40, 2**63 - 1, -(2**63)]))
    elif kind is c_void_p:
        setattr(struct, name, value and rng.choice([None, value + rng.choice([1, 2, 4])]))
    elif not isinstance(value, Structure):  # a pointer to a struct or an array
        setattr(struct, name, kind())


def spoil_array(rng: random.Random, array: ctypes.Array) -> None:
    spoil_struct(rng, array[rng.randrange(3)])


def exec_() -> Exec:
    return Exec(-1, None)
