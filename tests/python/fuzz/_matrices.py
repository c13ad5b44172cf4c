"""Calls of the functions of headroom.h that take matrices of few bits; c_abi.py makes them
wrong."""

from __future__ import annotations

import random
from ctypes import Structure, c_int32, c_int64, c_void_p, sizeof

from tests.python.fuzz._c_calls import FLOATS, Call, Limited, Memory, config, exec_, values
from tests.python.fuzz._rows import Rows, spans

Matrix = config(
    ("format dtype", c_int32),
    ("rows cols stride", c_int64),
    ("data", c_void_p),
    ("block_size reserved", c_int32),
    ("absmax absmax_codes absmax_scales offset", c_void_p),
    sizes=("rows", "cols", "stride"),
)
QuantizeConfig = config(("search reserved", c_int32))
DENSE, INT8, MXFP4 = 0, 3, 4
OF_ANY_COLS = (0, 1, 2, 3)  # formats
MOST, SLACK = 20 * 70, 16  # elements of a matrix, and bytes past each part


def matrix(
    rng: random.Random, memory: Memory, formats: tuple[int, ...] = (*OF_ANY_COLS, MXFP4)
) -> Structure:
    """A matrix, whose memory is enough in every format."""
    rows, cols = rng.choice([0, 1, 2, 5, 20]), rng.choice([1, 2, 7, 33, 64, 70])
    format_, block_size = rng.choice(formats), rng.choice([32, 64, 4096])
    if format_ == MXFP4:
        cols = rng.choice([32, 64])
    m = Matrix(sizeof(Matrix), format_, rng.choice(FLOATS), rows, cols, cols)
    m.data = memory.take(4 * MOST + SLACK, rng.randbytes(4 * MOST))
    if format_ != DENSE:
        m.data += rng.choice([0, 0, 1, 3])
    m.block_size = block_size
    m.absmax = memory.take(4 * MOST // 32 + SLACK, values(rng, 0, MOST // 32))
    if format_ == MXFP4 or format_ not in (DENSE, INT8) and rng.random() < 0.5:
        m.absmax_codes = memory.take(MOST // 32 + SLACK, rng.randbytes(MOST // 32))
        m.absmax_scales = memory.take(4 + SLACK, values(rng, 0, 1))
        m.offset = memory.take(4 + SLACK, values(rng, 0, 1))
    return m


def quantize(rng: random.Random, memory: Memory) -> Call:
    m = matrix(rng, memory, (1, 2, 3))
    x = Rows(memory.take(4 * MOST + SLACK, values(rng, 0, MOST)), m.cols)
    how, where = QuantizeConfig(sizeof(QuantizeConfig), rng.randrange(2)), exec_()
    arguments = [m, x, c_int32(rng.choice(FLOATS)), how, where]
    return Call("hr_quantize_matrix", arguments, structs=[m, x, how, where])


def dequantize(rng: random.Random, memory: Memory) -> Call:
    m = matrix(rng, memory)
    row, col = rng.randrange(m.rows + 1), rng.randrange(m.cols + 1)
    part = [row, rng.randint(0, m.rows - row), col, rng.randint(0, m.cols - col)]
    out = Rows(memory.take(8 * MOST + SLACK), part[3] + rng.choice([0, 0, 3, 8]))
    where = exec_()

    def written(out, m, row, rows, col, cols, where):
        size = 4 if m.dtype == 0 else 2
        return spans(out, rows.value, cols.value, size)

    arguments = [out, m, *map(Limited, part), where]
    return Call("hr_dequantize_matrix", arguments, structs=[out, m, where], written=written)


CALLS = (quantize, dequantize)
