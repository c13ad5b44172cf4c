"""Calls of the functions of headroom.h that take matrices of few bits, as _rows.py makes those of
layers."""

from __future__ import annotations

import random
from ctypes import Structure, byref, c_int32, c_int64, c_size_t, c_void_p, sizeof

from tests.python.fuzz._c_calls import (
    F32,
    FLOATS,
    LIBRARY,
    OK,
    Call,
    Limited,
    Memory,
    config,
    exec_,
    struct,
)
from tests.python.fuzz._rows import PART, SIZES, call, matrix, part, spans, vector

Matrix = config(
    ("format dtype", c_int32),
    ("rows cols stride", c_int64),
    ("data", c_void_p),
    ("block_size reserved", c_int32),
    ("absmax absmax_codes absmax_scales offset", c_void_p),
    sizes=("rows", "cols", "stride"),
)
LinearConfig = config(
    ("allow_tf32 allow_reduced_precision_reduction deterministic reserved", c_int32)
)
Needs = struct(("best least whole", c_size_t))
DENSE, INT8_ROWS = 0, 3


def few_bits(rng: random.Random, memory: Memory) -> Structure:
    """A matrix of any format, which is read."""
    own = Matrix(sizeof(Matrix), rng.randrange(4), rng.choice(FLOATS))
    own.rows, own.cols = rng.choice([0, 1, 2, 9]), rng.choice([1, 2, 31, 64, 70])
    own.stride = own.cols + rng.choice([0, 3]) if own.format == DENSE else 0
    own.block_size = rng.choice([32, 64, 128, 4096])
    dense = own.format == DENSE
    own.data = part(rng, memory, own.dtype) if dense else memory.take(PART, rng.randbytes(PART))
    if not dense and rng.random() < 0.3:
        own.data += rng.choice([1, 3])
    if own.format != INT8_ROWS and not dense and rng.random() < 0.5:
        own.absmax_codes = memory.take(PART, rng.randbytes(PART))
        own.absmax_scales, own.offset = part(rng, memory, F32), part(rng, memory, F32)
    elif not dense:
        own.absmax = part(rng, memory, F32)
    return own


def linear(rng: random.Random, memory: Memory) -> Call:
    backward = rng.randrange(2)

    def written(out, given, *others):
        *_, m, own, workspace, size, where = others
        cols = w.cols if backward else w.rows
        return [*spans(out, m.value, cols, SIZES[w.dtype]), *spans(workspace, 1, size.value, 1)]

    w, m, needs = few_bits(rng, memory), Limited(rng.choice([0, 1, 5, 16, 17])), Needs()
    own = LinearConfig(sizeof(LinearConfig), *(rng.randrange(2) for _ in range(3)))
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
    sizes = Limited(rng.choice([0, 1, 5, 70])), few_bits(rng, memory), c_int32(rng.randrange(2))
    made = call("hr_linear_query", [memory.struct(Needs), *sizes, own, exec_()], None)
    made.structs.pop(0)
    return made


CALLS = (linear, linear, linear_query)
