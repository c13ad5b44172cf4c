"""Calls of the functions of headroom.h that work on rows: right ones, with all that their contracts
allow of strides, aliases and what may be NULL. c_abi.py makes them wrong and checks what comes of
them."""

from __future__ import annotations

import itertools
import random
from ctypes import Structure, byref, c_double, c_int32, c_int64, c_size_t, c_void_p, sizeof

from tests.python.fuzz._c_calls import (
    BF16,
    F16,
    F32,
    FLOATS,
    LIBRARY,
    OK,
    Call,
    Limited,
    Memory,
    Spans,
    config,
    exec_,
    struct,
    values,
)
from tests.python.fuzz._header import RowFunction, row_functions

SIZES = {F32: 4, BF16: 2, F16: 2}
PART = 1 << 13  # bytes of a matrix: enough for any dtype and for sizes that change places


Rows = struct(("data", c_void_p), ("stride", c_int64), sizes=("stride",))
STRIDES = ("batch_stride", "token_stride", "head_stride")
Heads = struct(("data", c_void_p), (" ".join(STRIDES), c_int64), sizes=STRIDES)
GemmConfig = config(
    ("dtype out_dtype transpose_a transpose_b", c_int32),
    ("alpha beta", c_double),
    ("batch batch_stride_a batch_stride_b batch_stride_c", c_int64),
    ("epilogue allow_tf32 allow_reduced_precision_reduction deterministic", c_int32),
    ("aux", Rows),
    ("bias_gradient", c_void_p),
    ("addend", Rows),
    sizes=("batch", "batch_stride_a", "batch_stride_b", "batch_stride_c"),
)
NormConfig = config(("kind casting dtype weight_dtype", c_int32), ("eps offset", c_double))
SHAPE = ("batch", "tokens", "q_heads", "k_heads", "head_dim", "table_rows")
RopeShape = struct((" ".join(SHAPE), c_int64), sizes=SHAPE)
RopeConfig = config(
    ("dtype table_dtype interleaved inverse", c_int32), ("rotary_dim offset batch_step", c_int64)
)

# ---- Memory --------------------------------------------------------------------------------------


def part(rng: random.Random, memory: Memory, dtype: int) -> int:
    """The address of numbers; some of them are any bits, and few addresses are multiples of 16."""
    size = SIZES[dtype]
    if rng.random() < 0.1:
        content = rng.randbytes(PART)
    else:
        content = values(rng, dtype, PART // size)
    return memory.take(PART, content) + size * rng.choice([0, 0, 1, 3])


def vector(rng: random.Random, memory: Memory, dtype: int = F32, chance: float = 1.0) -> c_void_p:
    """Which is NULL where chance has it."""
    return c_void_p(part(rng, memory, dtype) if rng.random() < chance else None)


def matrix(rng: random.Random, memory: Memory, cols: int, dtype: int) -> Structure:
    return Rows(part(rng, memory, dtype), cols + rng.choice([0, 0, 1, 3]))


def same(rows: Structure) -> Structure:
    """The struct of an argument in the place of another."""
    return type(rows).from_buffer_copy(rows)


def spans(what: Structure | c_void_p | None, rows: int, cols: int, size: int) -> Spans:
    """The bytes of a matrix or, with one row, of a vector; none of what is NULL."""
    address, stride = what, 0
    if isinstance(what, Structure):
        address, stride = what.data, what.stride
    elif what is not None:
        address = what.value
    if not address or cols == 0:
        return []
    return [(address + row * stride * size, cols * size) for row in range(rows)]


def some(rng: random.Random, make, *arguments, chance: float = 0.5):
    return make(*arguments) if rng.random() < chance else None


def call(name: str, arguments: list, written, more: tuple = ()) -> Call:
    structs = [each for each in arguments if isinstance(each, Structure)]
    return Call(name, arguments, structs=[*structs, *more], written=written)


def workspace_of(name: str, *arguments) -> c_size_t:
    needed = c_size_t()
    assert getattr(LIBRARY, name)(byref(needed), *arguments) == OK
    return needed


# ---- Norms ---------------------------------------------------------------------------------------


def norm_config(rng: random.Random) -> Structure:
    kind = rng.randrange(2)
    casting = 0 if kind else rng.randrange(3)
    eps, offset = rng.choice([1e-6, 0.0]), rng.choice([0.0, 1.0])
    dtypes = rng.choice(FLOATS), rng.choice(FLOATS)
    return NormConfig(sizeof(NormConfig), kind, casting, *dtypes, eps, offset)


def norm_sizes(rng: random.Random) -> tuple[Limited, c_int64]:
    return Limited(rng.choice([0, 1, 2, 5, 20])), c_int64(rng.choice([1, 2, 7, 16, 33, 64, 70]))


def norm_forward(rng: random.Random, memory: Memory) -> Call:
    def written(y, sum_, mean, rstd, x, residual, weight, bias, rows, cols, own, where):
        n, m, size = rows.value, cols.value, SIZES[own.dtype]
        outputs = [(y, n, m, size), (sum_, n, m, size), (mean, 1, n, 4), (rstd, 1, n, 4)]
        return [span for each in outputs for span in spans(*each)]

    own, (rows, cols) = norm_config(rng), norm_sizes(rng)
    row = (rng, memory, cols.value, own.dtype)
    x, residual = matrix(*row), some(rng, matrix, *row)
    y = rng.choice([matrix(*row), same(x)])
    sum_ = residual and rng.choice([matrix(*row), same(residual), same(x)])
    if sum_ and sum_.data == y.data:
        y = matrix(*row)
    weight = vector(rng, memory, own.weight_dtype, 0.7)
    bias = vector(rng, memory, own.weight_dtype, 0.7 * own.kind)
    mean, rstd = vector(rng, memory, F32, 0.7 * own.kind), vector(rng, memory, F32, 0.7)
    arguments = [y, sum_, mean, rstd, x, residual, weight, bias, rows, cols, own, exec_()]
    return call("hr_norm_forward", arguments, written)


def norm_backward(rng: random.Random, memory: Memory) -> Call:
    def written(dx, dweight, dbias, y, *others):
        *_, rows, cols, own, workspace, size, _ = others
        n, m, element, narrow = rows.value, cols.value, SIZES[own.dtype], SIZES[own.weight_dtype]
        outputs = [(dx, n, m, element), (y, n, m, element), (dweight, 1, m, narrow)]
        outputs += [(dbias, 1, m, narrow), (workspace, 1, size.value, 1)]
        return [span for each in outputs for span in spans(*each)]

    own, (rows, cols) = norm_config(rng), norm_sizes(rng)
    row = (rng, memory, cols.value, own.dtype)
    dy, dsum, x = matrix(*row), some(rng, matrix, *row), matrix(*row)
    dx = rng.choice([None, matrix(*row), same(dy), same(dsum or dy)])
    y = some(rng, matrix, *row)
    dweight = vector(rng, memory, own.weight_dtype, 0.6 if dx or y else 1.0)
    dbias = vector(rng, memory, own.weight_dtype, 0.6 * own.kind)
    if not (dx or dweight or dbias) and rng.random() < 0.5:
        dy = None
    weight = vector(rng, memory, own.weight_dtype, 0.7)
    bias = vector(rng, memory, own.weight_dtype, 0.7 * own.kind)
    mean, rstd = vector(rng, memory, F32, own.kind), vector(rng, memory)
    needed = workspace_of("hr_norm_workspace", rows, cols, byref(own))
    workspace = c_void_p(memory.take(max(needed.value, 8)))
    arguments = [dx, dweight, dbias, y, dy, dsum, x, weight, bias, mean, rstd, rows, cols, own]
    return call("hr_norm_backward", [*arguments, workspace, needed, exec_()], written)


# ---- Functions of matrices of one dtype ----------------------------------------------------------


def of_rows(function: RowFunction):
    """Calls of a function that headroom.h alone describes. What may be NULL of the gradients is
    NULL where what they are the gradients of is."""

    def make(rng: random.Random, memory: Memory) -> Call:
        def written(*arguments):
            rows, cols, own = arguments[-4:-1]
            outputs = arguments[: len(function.outputs)]
            return [s for m in outputs for s in spans(m, rows.value, cols.value, SIZES[own.dtype])]

        own = function.config(sizeof(function.config))
        for member, count in function.enums.items():
            setattr(own, member, rng.randrange(count))
        rows, cols = Limited(rng.choice([0, 1, 2, 5])), c_int64(rng.choice([1, 2, 7, 16, 33, 70]))
        row = (rng, memory, cols.value, own.dtype)
        given: dict[str, Structure | None] = {
            name: None if name in function.may_be_null and rng.random() < 0.5 else matrix(*row)
            for name in function.inputs
        }
        read = [each for each in given.values() if each]
        if len(read) > 1 and rng.random() < 0.4:  # side by side
            read[0].stride = read[1].stride = 2 * cols.value
            read[1].data = read[0].data + cols.value * SIZES[own.dtype]
        places = [*map(same, read), *(matrix(*row) for _ in function.outputs)]
        outputs = dict(zip(function.outputs, rng.sample(places, len(function.outputs))))
        for name in function.may_be_null & {*outputs}:
            if name.removeprefix("d") in given:
                outputs[name] = given[name.removeprefix("d")] and outputs[name]
            elif rng.random() < 0.5:
                outputs[name] = None
        arguments = [*outputs.values(), *given.values(), rows, cols, own, exec_()]
        return call(function.name, arguments, written)

    return make


# ---- Rotary embeddings ---------------------------------------------------------------------------


def heads(rng: random.Random, memory: Memory, counts: tuple, dim: int, dtype: int) -> Structure:
    """Vectors of [batch, tokens, heads] in any order, with gaps or without."""
    strides, step = [0, 0, 0], dim
    for k in rng.sample(range(3), 3):
        strides[k] = step + rng.choice([0, 0, 1, 2])
        step = strides[k] * max(1, counts[k])
    return Heads(part(rng, memory, dtype), *strides)


def head_spans(what: Structure | None, batch: int, tokens: int, count: int, dim: int, size: int):
    if what is None:
        return []
    return [
        (what.data + size * (b * what.batch_stride + t * what.token_stride + h * what.head_stride),)
        + (size * dim,)
        for b, t, h in itertools.product(range(batch), range(tokens), range(count))
    ]


def rope(rng: random.Random, memory: Memory) -> Call:
    def written(q_out, k_out, q, k, cos, sin, positions, shape, own, where):
        outer, dim, size = (shape.batch, shape.tokens), shape.head_dim, SIZES[own.dtype]
        if 0 in outer:  # the other sizes may be larger than a loop
            return []
        q_spans = head_spans(q_out, *outer, shape.q_heads, dim, size)
        return q_spans + head_spans(k_out, *outer, shape.k_heads, dim, size)

    batch, tokens, dim = rng.randrange(4), rng.randrange(5), rng.choice([2, 3, 8, 10])
    dtype, table_dtype = rng.choice(FLOATS), rng.choice(FLOATS)
    interleaved, inverse = rng.randrange(2), rng.randrange(2)
    own = RopeConfig(sizeof(RopeConfig), dtype, table_dtype, interleaved, inverse)
    own.rotary_dim = rng.choice([0, 2, dim]) // 2 * 2 if dim % 2 == 0 else 2
    own.offset, own.batch_step = rng.randrange(3), rng.choice([0, 0, 1, tokens])
    table_rows = own.offset + max(0, batch - 1) * own.batch_step + tokens + rng.randrange(2)
    counts = [rng.randrange(4), rng.randrange(3)]
    given = rng.random() < 0.7
    shape = RopeShape(batch, tokens, counts[0], counts[1] if given else 0, dim, table_rows)
    q, k = (heads(rng, memory, (batch, tokens, n), dim, dtype) for n in counts)
    q_out, k_out = (
        rng.choice([same(each), heads(rng, memory, (batch, tokens, n), dim, dtype)])
        for each, n in ((q, counts[0]), (k, counts[1]))
    )
    cos, sin = (matrix(rng, memory, dim // 2, table_dtype) for _ in range(2))
    positions = None
    if rng.random() < 0.5 and table_rows:
        stride = rng.choice([0, tokens, tokens + 2])
        wrong = [-1, table_rows, 2**63 - 1, -(2**63)] if rng.random() < 0.2 else []
        numbers = [rng.randrange(table_rows) for _ in range(64)]
        numbers[rng.randrange(64)] = rng.choice([0, *wrong])
        content = b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)
        positions = Rows(memory.take(PART, content), stride)
    arguments = [q_out, k_out if given else None, q, k if given else None]
    return call("hr_rope", [*arguments, cos, sin, positions, shape, own, exec_()], written)


# ---- Products ------------------------------------------------------------------------------------


def gemm_config(rng: random.Random) -> Structure:
    own = GemmConfig(sizeof(GemmConfig), rng.choice(FLOATS))
    own.out_dtype = rng.choice([F32, own.dtype])
    own.transpose_a, own.transpose_b = rng.randrange(2), rng.randrange(2)
    own.alpha, own.beta = rng.choice([1.0, 1.0, 0.5, 0.0]), rng.choice([0.0, 1.0, -0.5])
    own.batch, own.epilogue = 1, rng.choice([0, 0, 0, 0, 1, 2, 3, 4])
    if own.epilogue == 0:
        own.batch = rng.choice([0, 1, 1, 1, 2])
    return own


def gemm(rng: random.Random, memory: Memory) -> Call:
    def written(c, a, b, bias, m, n, k, own, workspace, size, where):
        rows, cols, size = m.value, n.value, SIZES[own.out_dtype]
        found = []
        for index in range(own.batch if rows and cols else 0):
            data = c.data and c.data + index * own.batch_stride_c * size
            found += spans(Rows(data, c.stride), rows, cols, size)
        if own.epilogue == 1:
            found += spans(own.aux, rows, cols, size)
        length = {2: cols, 3: rows, 4: cols}.get(own.epilogue, 0)
        return found + spans(c_void_p(own.bias_gradient), 1, length, size)

    own = gemm_config(rng)
    sums = own.epilogue in (3, 4)
    m, n, k = (rng.choice([*([] if sums else [0]), 1, 2, 5, 8, 17, 24]) for _ in range(3))
    if sums:
        own.alpha, k = own.alpha or 1.0, rng.choice([0, k])
    c = matrix(rng, memory, n, own.out_dtype)
    a_rows, a_cols = (k, m) if own.transpose_a else (m, k)
    b_rows, b_cols = (n, k) if own.transpose_b else (k, n)
    a, b = matrix(rng, memory, a_cols, own.dtype), matrix(rng, memory, b_cols, own.dtype)
    own.batch_stride_a = rng.choice([0, a_rows * a.stride])
    own.batch_stride_b = rng.choice([0, b_rows * b.stride])
    own.batch_stride_c = max(n, m * c.stride) + rng.choice([0, 0, 5])
    bias = vector(rng, memory, own.out_dtype, 0.5 if own.epilogue < 2 else 0.0)
    if own.epilogue == 2 or (own.epilogue == 1 and rng.random() < 0.5):
        own.aux = matrix(rng, memory, n, own.out_dtype)
    if sums or (own.epilogue == 2 and rng.random() < 0.7):
        own.bias_gradient = part(rng, memory, own.out_dtype)
    if own.batch == 1 and rng.random() < 0.3:
        own.addend = rng.choice([c, matrix(rng, memory, n, own.out_dtype)])
    arguments = [c, a, b, bias, Limited(m), c_int64(n), Limited(k), own]
    arguments += [c_void_p(None), c_size_t(0), exec_()]
    return call("hr_gemm", arguments, written, (own.aux, own.addend))


# ---- What to allocate ----------------------------------------------------------------------------


def workspaces(rng: random.Random, memory: Memory) -> Call:
    sizes = [Limited(rng.choice([0, 1, 5, 70])) for _ in range(3)]
    bytes_ = memory.struct(c_size_t * 1)
    if rng.random() < 0.5:
        arguments = [bytes_, *sizes, gemm_config(rng), exec_()]
        return call("hr_gemm_workspace", arguments, None)
    return call("hr_norm_workspace", [bytes_, *norm_sizes(rng), norm_config(rng)], None)


CALLS = (norm_forward, norm_backward, *map(of_rows, row_functions()), rope, gemm, gemm, workspaces)
