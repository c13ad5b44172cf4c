"""Calls of the linear cross entropy of headroom.h, as _rows.py makes those of the other layers."""

from __future__ import annotations

import random
from ctypes import (
    Structure,
    addressof,
    byref,
    c_double,
    c_int32,
    c_int64,
    c_size_t,
    c_void_p,
    sizeof,
)

from tests.python.fuzz import _matrices
from tests.python.fuzz._c_calls import (
    BF16,
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
from tests.python.fuzz._rows import PART, SIZES, Rows, call, matrix, spans, vector

Config = config(
    ("dtype grad_dtype target_bytes reduction mode add_to_weight_grads", c_int32),
    ("allow_tf32 allow_reduced_precision_reduction deterministic", c_int32),
    ("ignore_index", c_int64),
    ("label_smoothing softcap z_loss logit_scale", c_double),
    ("sequence", c_int64),
    ("workspace_limit", c_size_t),
    ("check_target capability", c_int32),
    ("matrix entropy dentropy", c_void_p),
    ("dentropy_stride", c_int64),
)
Inputs = struct(
    ("hidden weight", Rows), ("bias target class_weight token_weight denominator", c_void_p)
)
Results = struct(
    ("loss lse lse_low target_logit largest entropy argmax rank", c_void_p),
    ("mean_logit log_sum_sq_probs", c_void_p),
)
Grads = struct(("hidden weight", Rows), ("bias", c_void_p))
Needs = struct(("workspace", c_size_t), ("rows classes", c_int64), ("mode", c_int32))


def layer_config(rng: random.Random, rows: int) -> Structure:
    own = Config(sizeof(Config), rng.choice(FLOATS))
    own.grad_dtype = BF16 if own.dtype == BF16 and rng.random() < 0.7 else F32
    own.target_bytes, own.reduction = rng.choice([4, 8]), rng.randrange(3)
    own.mode, own.ignore_index = rng.randrange(3), rng.choice([-100, -1, 0])
    own.add_to_weight_grads = rng.randrange(2)
    own.label_smoothing, own.softcap = rng.choice([0.0, 0.1, 1.0]), rng.choice([0.0, 30.0])
    own.z_loss, own.logit_scale = rng.choice([0.0, 1e-4]), rng.choice([1.0, -0.5])
    own.sequence, own.check_target = rng.choice([0, rows]), rng.randrange(2)
    own.workspace_limit = rng.choice([0, 1, 300])
    return own


def sizes_of(rng: random.Random) -> list[Limited]:
    return [Limited(rng.choice(each)) for each in ([0, 1, 2, 5], [1, 3, 8], [1, 2, 7, 70])]


def inputs_of(rng: random.Random, memory: Memory, own, features: int, classes: int) -> Structure:
    numbers = [rng.choice([rng.randrange(classes), own.ignore_index]) for _ in range(5)]
    if rng.random() < 0.15:
        numbers[rng.randrange(5)] = rng.choice([-2, classes, 2**31 - 1, -(2**31)])
    content = b"".join(n.to_bytes(own.target_bytes, "little", signed=True) for n in numbers)
    x, w = (matrix(rng, memory, features, own.dtype) for _ in range(2))
    bias = vector(rng, memory, own.dtype, 0.5)
    factors = (vector(rng, memory, F32, 0.5) for _ in range(3))
    return Inputs(x, w, bias, memory.take(PART, content), *factors)


def grads_of(rng: random.Random, memory: Memory, own, features: int) -> Structure:
    wanted = [rng.random() < 0.6 for _ in range(3)]
    matrices = (
        matrix(rng, memory, features, own.grad_dtype) if each else Rows() for each in wanted[:2]
    )
    return Grads(*matrices, vector(rng, memory, own.grad_dtype, wanted[2]))


def of_few_bits(
    rng: random.Random, memory: Memory, own, grads, features: int, classes: int
) -> list:
    """Puts a matrix in place of the weight, or does not."""
    if rng.random() < 0.6:
        return []
    m = _matrices.matrix(rng, memory, _matrices.OF_ANY_COLS)
    m.rows, m.cols, m.stride, m.dtype = classes, features, features, own.dtype
    own.matrix = addressof(m)
    if m.format != _matrices.DENSE:
        grads.weight = Rows()
    return [m]


def query(sizes: list[Limited], grads: Structure, own: Structure) -> int:
    needs, where = Needs(), exec_()
    wanted = sum(
        1 << k
        for k, given in enumerate((grads.hidden.data, grads.weight.data, grads.bias))
        if given
    )
    status = LIBRARY.hr_linear_cross_entropy_query(
        byref(needs), *sizes, wanted, byref(own), byref(where)
    )
    assert status == OK, LIBRARY.hr_last_error()
    return needs.workspace


def _of_rows(out, rows) -> list:
    numbers = []
    for name, _ in Results._fields_ if out is not None else ():
        size = 8 if name in ("argmax", "rank") else 4
        numbers += spans(c_void_p(getattr(out, name)), 1, rows.value, size)
    return numbers


def _of_grads(grads, rows, features, classes, own, workspace, size) -> list:
    element = SIZES[own.grad_dtype]
    outputs = [(workspace, 1, size.value, 1)]
    if grads is not None:
        outputs += [
            (grads.hidden, rows.value, features.value, element),
            (grads.weight, classes.value, features.value, element),
            (c_void_p(grads.bias), 1, classes.value, element),
        ]
    return [span for each in outputs for span in spans(*each)]


def forward(rng: random.Random, memory: Memory) -> Call:
    def written(result, factors, scale, out, grads, inputs, *rest):
        numbers = spans(result, 1, 1, 4) + spans(factors, 1, 2, 4) + spans(scale, 1, 1, 4)
        return numbers + _of_rows(out, rest[0]) + _of_grads(grads, *rest[:-1])

    sizes = sizes_of(rng)
    rows, features, classes = (each.value for each in sizes)
    own = layer_config(rng, rows)
    inputs = inputs_of(rng, memory, own, features, classes)
    grads, out = grads_of(rng, memory, own, features), Results()
    matrices = of_few_bits(rng, memory, own, grads, features, classes)
    for name, _ in Results._fields_:
        if rng.random() < 0.5 and (name != "rank" or own.mode == 1):
            setattr(out, name, memory.take(PART))
    size = c_size_t(query(sizes, grads, own))
    workspace = c_void_p(memory.take(size.value + 16) + rng.choice([0, 16]))
    numbers = (vector(rng, memory, F32, 0.7) for _ in range(3))
    arguments = [*numbers, out, grads, inputs, *sizes, own, workspace, size, exec_()]
    more = (inputs.hidden, inputs.weight, grads.hidden, grads.weight, *matrices)
    return call("hr_linear_cross_entropy", arguments, written, more)


def backward(rng: random.Random, memory: Memory) -> Call:
    def written(grads, dloss, stride, factors, lse, low, inputs, *rest):
        return _of_grads(grads, *rest[:-1])

    sizes = sizes_of(rng)
    rows, features, classes = (each.value for each in sizes)
    own = layer_config(rng, rows)
    inputs = inputs_of(rng, memory, own, features, classes)
    grads = grads_of(rng, memory, own, features)
    matrices = of_few_bits(rng, memory, own, grads, features, classes)
    size = c_size_t(query(sizes, grads, own))
    workspace = c_void_p(memory.take(size.value + 16) + rng.choice([0, 16]))
    dloss, stride = vector(rng, memory), c_int64(rng.choice([0, 1, 3]))
    factors, lse, low = (vector(rng, memory, F32, chance) for chance in (0.5, 1.0, 0.5))
    own.entropy, own.dentropy = vector(rng, memory), vector(rng, memory, F32, 0.5)
    own.dentropy_stride = rng.choice([0, 1, 3])
    arguments = [grads, dloss, stride, factors, lse, low, inputs, *sizes, own, workspace, size]
    more = (inputs.hidden, inputs.weight, grads.hidden, grads.weight, *matrices)
    return call("hr_linear_cross_entropy_backward", [*arguments, exec_()], written, more)


def asked(rng: random.Random, memory: Memory) -> Call:
    sizes = sizes_of(rng)
    own, wanted = layer_config(rng, sizes[0].value), c_int32(rng.randrange(8))
    arguments = [memory.struct(Needs), *sizes, wanted, own, exec_()]
    made = call("hr_linear_cross_entropy_query", arguments, None)
    made.structs.pop(0)
    return made


CALLS = (forward, forward, backward, asked)
