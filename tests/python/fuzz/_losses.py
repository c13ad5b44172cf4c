"""Calls of the losses of logits of headroom.h, as _rows.py makes those of the layers."""

from __future__ import annotations

import random
from ctypes import c_double, c_int32, c_int64, c_void_p, sizeof

from tests.python.fuzz._c_calls import F32, FLOATS, Call, Limited, Memory, config, exec_
from tests.python.fuzz._rows import PART, SIZES, Rows, call, matrix, spans, vector

CrossEntropyConfig = config(
    ("dtype grad_dtype target_bytes reduction", c_int32),
    ("ignore_index", c_int64),
    ("label_smoothing softcap z_loss", c_double),
)
DivergenceConfig = config(("dtype grad_dtype", c_int32), ("beta temperature", c_double))


# ---- Divergences ---------------------------------------------------------------------------------


def divergence(rng: random.Random, memory: Memory) -> Call:
    def written(*arguments):
        rows, classes, own = arguments[-4:-1]
        if name == "hr_divergence_backward":
            return spans(arguments[0], rows.value, classes.value, SIZES[own.grad_dtype])
        statistics = spans(arguments[1], 1, 4 * 6 * rows.value, 1)
        return spans(arguments[0], 1, 4 * rows.value, 1) + statistics

    own = DivergenceConfig(sizeof(DivergenceConfig), rng.choice(FLOATS))
    own.grad_dtype = own.dtype if own.dtype != F32 else rng.choice(FLOATS)
    own.beta, own.temperature = rng.choice([0.0, 1.0, 0.5, 1e-6]), rng.choice([1.0, 0.7, 1e6])
    rows, classes = Limited(rng.choice([0, 1, 2, 5])), c_int64(rng.choice([1, 2, 7, 33, 70]))
    student, teacher = (matrix(rng, memory, classes.value, own.dtype) for _ in range(2))
    ignored = c_void_p(memory.take(PART, rng.randbytes(PART)) if rng.random() < 0.5 else None)
    name = f"hr_divergence_{rng.choice(['forward', 'backward'])}"
    last = [rows, classes, own, exec_()]
    if name == "hr_divergence_forward":
        statistics = vector(rng, memory, F32, 0.5)
        return call(
            name, [vector(rng, memory), statistics, student, teacher, ignored, *last], written
        )
    grad = matrix(rng, memory, classes.value, own.grad_dtype)
    if rng.random() < 0.5:
        ratio = 1 if own.grad_dtype == own.dtype else 2
        grad = Rows(student.data, ratio * student.stride)
    dloss, stride = vector(rng, memory), c_int64(rng.choice([0, 1, 3]))
    arguments = [grad, dloss, stride, student, teacher, ignored, vector(rng, memory), *last]
    return call(name, arguments, written)


# ---- Cross entropy -------------------------------------------------------------------------------


def cross_entropy(rng: random.Random, memory: Memory) -> Call:
    def written(*arguments):
        rows, classes, own = arguments[-4:-1]
        n = rows.value
        if name == "hr_cross_entropy_backward":
            return spans(arguments[0], n, classes.value, SIZES[own.grad_dtype])
        if name == "hr_cross_entropy_reduce":
            return spans(arguments[0], 1, 1, 4) + spans(arguments[1], 1, 2, 4)
        lengths = (4 * n, 4 * n, 4 * n, 8 * n)
        return [span for a, size in zip(arguments, lengths) for span in spans(a, 1, size, 1)]

    own = CrossEntropyConfig(sizeof(CrossEntropyConfig), rng.choice(FLOATS))
    own.grad_dtype = own.dtype if own.dtype != F32 else rng.choice(FLOATS)
    own.target_bytes, own.reduction = rng.choice([4, 8]), rng.randrange(3)
    own.ignore_index = rng.choice([-100, -1, 0])
    own.label_smoothing, own.softcap = rng.choice([0.0, 0.1, 1.0]), rng.choice([0.0, 30.0])
    own.z_loss = rng.choice([0.0, 1e-4])
    rows, classes = Limited(rng.choice([0, 1, 2, 5])), c_int64(rng.choice([1, 2, 7, 33, 70]))
    logits = matrix(rng, memory, classes.value, own.dtype)
    numbers = [rng.choice([rng.randrange(classes.value), own.ignore_index]) for _ in range(5)]
    if rng.random() < 0.15:
        numbers[rng.randrange(5)] = rng.choice([-2, classes.value, 2**31 - 1, -(2**31)])
    content = b"".join(n.to_bytes(own.target_bytes, "little", signed=True) for n in numbers)
    target = c_void_p(memory.take(PART, content))
    weight, lse = vector(rng, memory, F32, 0.5), vector(rng, memory)
    last = [target, weight, rows, classes, own, exec_()]
    kind = rng.choice(["forward", "backward", "reduce"])
    name = f"hr_cross_entropy_{kind}"
    if kind == "forward":
        argmax = c_void_p(memory.take(PART) if rng.random() < 0.5 else None)
        low = vector(rng, memory, F32, 0.5)
        return call(name, [vector(rng, memory), lse, low, argmax, logits, *last], written)
    if kind == "reduce":
        result = vector(rng, memory, F32, 0.7)
        factors = vector(rng, memory, F32, 0.7 if result else 1.0)
        loss = vector(rng, memory, F32, 1.0 if result else 0.5)
        if not (result and own.z_loss) and rng.random() < 0.5:
            lse = c_void_p(None)
        return call(name, [result, factors, loss, lse, *last], written)
    grad = matrix(rng, memory, classes.value, own.grad_dtype)
    if rng.random() < 0.5:
        ratio = 1 if own.grad_dtype == own.dtype else 2
        grad = Rows(logits.data, ratio * logits.stride)
    dloss, stride = vector(rng, memory), c_int64(rng.choice([0, 1, 3]))
    factors, low = vector(rng, memory, F32, 0.5), vector(rng, memory, F32, 0.5)
    arguments = [grad, dloss, stride, factors, logits, target, weight, lse, low, *last[2:]]
    return call(name, arguments, written)


CALLS = (cross_entropy, cross_entropy, divergence)
