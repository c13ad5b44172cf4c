"""Calls of linear layers with adapters; c_abi.py makes them wrong."""

from __future__ import annotations

import random
from ctypes import Structure, byref, c_double, c_int32, c_int64, c_size_t, c_void_p, sizeof

from tests.python.fuzz import _matrices
from tests.python.fuzz._c_calls import LIBRARY, OK, Call, Limited, Memory, config, exec_
from tests.python.fuzz._rows import SIZES, call, matrix, some, spans, vector

Config = config(
    ("rank", c_int64),
    ("scale dropout", c_double),
    ("seed", c_void_p),
    ("adapter_dtype allow_tf32 allow_reduced_precision_reduction deterministic", c_int32),
    sizes=("rank",),
)


def numbers(rng: random.Random, memory: Memory, w: Structure) -> Structure:
    flags = [rng.randrange(2) for _ in range(3)]
    seed = memory.scalar(rng.randrange(2**62), c_int64)
    rank, dtype = rng.choice([1, 2, 5, 16]), rng.choice([0, w.dtype])
    return Config(sizeof(Config), rank, 0.5, rng.choice([0.0, 0.3]), seed, dtype, *flags)


def adapters(rng: random.Random, memory: Memory, w: Structure, own: Structure) -> list[Structure]:
    return [matrix(rng, memory, cols, own.adapter_dtype) for cols in (w.cols, own.rank)]


def workspace(memory: Memory, name: str, *given) -> tuple[c_void_p, c_size_t]:
    size = c_size_t()
    query = getattr(LIBRARY, name)
    assert query(byref(size), *given, byref(exec_())) == OK, LIBRARY.hr_last_error()
    return c_void_p(memory.take(size.value)), size


def forward(rng: random.Random, memory: Memory) -> Call:
    def written(y, t, x, w, a, b, bias, m, own, space, size, where):
        of_y, of_t = (w.rows, SIZES[w.dtype]), (own.rank, SIZES[w.dtype])
        return [
            *spans(y, m.value, *of_y),
            *spans(t, m.value, *of_t),
            *spans(space, 1, size.value, 1),
        ]

    w, m = _matrices.matrix(rng, memory), Limited(rng.choice([0, 1, 5, 17]))
    own = numbers(rng, memory, w)
    y, t, x = (matrix(rng, memory, cols, w.dtype) for cols in (w.rows, own.rank, w.cols))
    space = workspace(memory, "hr_lora_workspace", m, byref(w), 0, byref(own))
    bias = vector(rng, memory, w.dtype, 0.5)
    given = [y, t, x, w, *adapters(rng, memory, w, own), bias, m, own, *space, exec_()]
    return call("hr_lora_forward", given, written)


def backward(rng: random.Random, memory: Memory) -> Call:
    def written(dx, da, db, dy, x, t, w, a, b, m, own, space, size, where):
        adapter = SIZES[own.adapter_dtype]
        return [
            *spans(dx, m.value, w.cols, SIZES[w.dtype]),
            *spans(da, own.rank, w.cols, adapter),
            *spans(db, w.rows, own.rank, adapter),
            *spans(space, 1, size.value, 1),
        ]

    w, m = _matrices.matrix(rng, memory), Limited(rng.choice([0, 1, 5, 17]))
    own = numbers(rng, memory, w)
    dy, x, t = (matrix(rng, memory, cols, w.dtype) for cols in (w.rows, w.cols, own.rank))
    dx = some(rng, matrix, rng, memory, w.cols, w.dtype)
    da, db = (
        some(rng, matrix, rng, memory, cols, own.adapter_dtype) for cols in (w.cols, own.rank)
    )
    space = workspace(memory, "hr_lora_workspace", m, byref(w), 1, byref(own))
    given = [dx, da, db, dy, x, t, w, *adapters(rng, memory, w, own), m, own, *space, exec_()]
    return call("hr_lora_backward", given, written)


def norms(rng: random.Random, memory: Memory) -> Call:
    def written(norms, w, a, b, own, space, size, where):
        return [*spans(norms, 1, w.rows, 4), *spans(space, 1, size.value, 1)]

    w = _matrices.matrix(rng, memory)
    own = numbers(rng, memory, w)
    space = workspace(memory, "hr_lora_norms_workspace", byref(w), byref(own))
    given = [vector(rng, memory), w, *adapters(rng, memory, w, own), own, *space, exec_()]
    return call("hr_lora_norms", given, written)


def query(rng: random.Random, memory: Memory) -> Call:
    w = _matrices.matrix(rng, memory)
    own, bytes_ = numbers(rng, memory, w), memory.struct(c_size_t * 1)
    if rng.random() < 0.5:
        return call("hr_lora_norms_workspace", [bytes_, w, own, exec_()], None)
    sizes = (Limited(rng.choice([0, 1, 5, 70])), w, c_int32(rng.randrange(2)))
    return call("hr_lora_workspace", [bytes_, *sizes, own, exec_()], None)


CALLS = (forward, backward, norms, query)
