"""Calls of linear layers of matrices of few bits; c_abi.py makes them wrong."""

from __future__ import annotations

import random
from ctypes import byref, c_double, c_int32, c_size_t, c_void_p, sizeof

from tests.python.fuzz import _matrices
from tests.python.fuzz._c_calls import (
    LIBRARY,
    OK,
    Call,
    Limited,
    Memory,
    config,
    exec_,
    struct,
)
from tests.python.fuzz._rows import SIZES, Rows, call, matrix, spans, vector

LinearConfig = config(
    ("allow_tf32 allow_reduced_precision_reduction deterministic reserved", c_int32),
    ("beta", c_double),
    ("addend", Rows),
)
Needs = struct(("best least whole", c_size_t))


def linear(rng: random.Random, memory: Memory) -> Call:
    backward = rng.randrange(2)

    def written(out, given, *others):
        *_, m, own, workspace, size, where = others
        cols = w.cols if backward else w.rows
        return [*spans(out, m.value, cols, SIZES[w.dtype]), *spans(workspace, 1, size.value, 1)]

    w, m, needs = _matrices.matrix(rng, memory), Limited(rng.choice([0, 1, 5, 16, 17])), Needs()
    own = LinearConfig(sizeof(LinearConfig), *(rng.randrange(2) for _ in range(3)))
    own.beta = rng.choice([0.0, 0.0, 0.5])
    assert (
        LIBRARY.hr_linear_query(byref(needs), m, byref(w), backward, byref(own), byref(exec_()))
        == OK
    ), LIBRARY.hr_last_error()
    sides = (w.cols, w.rows) if backward else (w.rows, w.cols)
    out, given = (matrix(rng, memory, cols, w.dtype) for cols in sides)
    size = c_size_t(rng.choice([needs.least, needs.best, needs.whole]))
    workspace = c_void_p(memory.take(size.value))
    bias = [] if backward else [vector(rng, memory, w.dtype, 0.5)]
    name = "hr_linear_backward" if backward else "hr_linear_forward"
    return call(name, [out, given, w, *bias, m, own, workspace, size, exec_()], written)


def linear_query(rng: random.Random, memory: Memory) -> Call:
    own = LinearConfig(sizeof(LinearConfig), *(rng.randrange(2) for _ in range(3)))
    sizes = (
        Limited(rng.choice([0, 1, 5, 70])),
        _matrices.matrix(rng, memory),
        c_int32(rng.randrange(2)),
    )
    made = call("hr_linear_query", [memory.struct(Needs), *sizes, own, exec_()], None)
    made.structs.pop(0)
    return made


CALLS = (linear, linear, linear_query)
