"""Calls of the experts of headroom.h, as _rows.py makes those of the other layers."""

from __future__ import annotations

import random
from ctypes import (
    Structure,
    byref,
    c_double,
    c_int32,
    c_int64,
    c_size_t,
    c_void_p,
    sizeof,
)

from tests.python.fuzz._c_calls import (
    F32,
    FLOATS,
    LIBRARY,
    OK,
    Call,
    Memory,
    config,
    exec_,
    struct,
)
from tests.python.fuzz._matrices import Matrix
from tests.python.fuzz._rows import PART, SIZES, call, matrix, part, spans, vector

Config = config(
    ("activation dtype weight_dtype gated transposed interleaved", c_int32),
    ("alpha limit", c_double),
    ("tile_rows", c_int64),
    ("allow_tf32 allow_reduced_precision_reduction deterministic reserved", c_int32),
)
SHAPE = ("tokens", "slots", "experts", "hidden", "features")
Sizes = struct((" ".join(SHAPE), c_int64), sizes=SHAPE)
PITCHES = ("gate_up_pitch", "down_pitch")
Adapter = struct(
    ("rank", c_int64),
    ("scale", c_double),
    ("dtype", c_int32),
    ("a b", c_void_p),
    sizes=("rank",),
)
Params = struct(
    ("gate_up down", Matrix),
    (" ".join(PITCHES), c_int64),
    ("gate_up_bias down_bias", c_void_p),
    ("gate_up_adapter down_adapter", Adapter),
    sizes=PITCHES,
)
STACKS = ("gate_up", "down", "gate_up_bias", "down_bias")
STACKS += ("gate_up_a", "gate_up_b", "down_a", "down_b")
BITS = (4, 16, 8, 32, 64, 128, 256, 512)  # of their gradients
Grads = struct((" ".join(STACKS), c_void_p))
Saved = struct(("gate_up activated", c_void_p))
Needs = struct(
    ("gate_up activated forward_workspace backward_workspace", c_size_t),
    ("tile_rows", c_int64),
    ("reads_x", c_int32),
)


class Made:
    """The config, the sizes and the stacks of a call."""

    def __init__(self, rng: random.Random, memory: Memory):
        own = self.config = Config(sizeof(Config), rng.choice([0, 2, 4, 5]), rng.choice(FLOATS))
        own.weight_dtype = rng.choice([F32, own.dtype])
        own.gated, own.transposed = rng.randrange(2), rng.randrange(2)
        own.interleaved = own.gated * rng.randrange(2)
        own.alpha, own.limit = rng.choice([1.0, 1.702]), rng.choice([0.0, 1.0, 7.0])
        own.tile_rows = rng.choice([0, 0, 1, 2, 100])
        shape = ([0, 1, 2, 5], [1, 2, 3], [1, 3], [1, 3, 8, 11], [1, 2, 8])
        s = self.sizes = Sizes(*(rng.choice(each) for each in shape))
        self.width = s.features * (1 + own.gated)
        p = Params()
        lengths = {"gate_up": (self.width, s.hidden), "down": (s.hidden, s.features)}
        for name, (outputs, inputs) in lengths.items():
            dtype = rng.choice([F32, own.dtype])
            rows, cols = (inputs, outputs) if own.transposed else (outputs, inputs)
            stride = cols + rng.choice([0, 0, 2])
            m = Matrix(sizeof(Matrix), rng.choice([0, 0, 1, 2, 3]), dtype, rows, cols, stride)
            m.data, m.block_size = part(rng, memory, dtype), rng.choice([32, 64])
            if m.format:
                m.rows *= s.experts
                m.data += rng.choice([0, 1])
                m.absmax = part(rng, memory, F32)
            if m.format in (1, 2) and rng.random() < 0.5:
                m.absmax_codes = part(rng, memory, F32)
                m.absmax_scales, m.offset = part(rng, memory, F32), part(rng, memory, F32)
            setattr(p, name, m)
            setattr(p, f"{name}_pitch", rows * stride + rng.choice([0, 1]))
            adapter = Adapter(rng.choice([0, 1, 3]), rng.choice([0.0, 0.5, -2.0]))
            adapter.dtype = rng.choice([F32, own.dtype])
            adapter.a, adapter.b = (part(rng, memory, adapter.dtype) for _ in range(2))
            setattr(p, f"{name}_adapter", adapter)
        for name in ("gate_up_bias", "down_bias"):
            setattr(p, name, vector(rng, memory, own.dtype, 0.5).value)
        self.params = p

    def has_gradient(self, name: str) -> bool:
        """Whether a stack is dense, and whether an adapter is there."""
        stack, _, factor = name.rpartition("_")
        if factor in ("a", "b"):
            return getattr(self.params, f"{stack}_adapter").rank > 0
        return factor == "bias" or getattr(self.params, name).format == 0

    def wanted(self, rng: random.Random) -> int:
        refused = sum(bit for bit, name in zip(BITS, STACKS) if not self.has_gradient(name))
        return rng.randrange(1024) & ~refused

    @property
    def members(self) -> tuple[Structure, ...]:
        p = self.params
        return p.gate_up, p.down, p.gate_up_adapter, p.down_adapter

    @property
    def rows(self) -> int:
        return self.sizes.tokens * self.sizes.slots

    def routing(self, rng: random.Random, memory: Memory) -> tuple[c_void_p, c_void_p]:
        """Where order and offsets are, which hr_route() wrote."""
        index = [rng.randrange(-1, self.sizes.experts + 1) for _ in range(self.rows)]
        content = b"".join(e.to_bytes(8, "little", signed=True) for e in index)
        order = c_void_p(memory.take(4 * self.rows + 4))
        offsets = c_void_p(memory.take(4 * self.sizes.experts + 4))
        given, where = c_void_p(memory.take(8 * self.rows + 8, content)), exec_()
        status = LIBRARY.hr_route(
            *(offsets, order, given, 8, c_int64(self.rows), c_int64(self.sizes.experts)),
            byref(where),
        )
        assert status == OK, LIBRARY.hr_last_error()
        return order, offsets

    def needs(self, save: int, wanted: int) -> Structure:
        needs, where = Needs(), exec_()
        status = LIBRARY.hr_experts_query(
            *(byref(needs), byref(self.sizes), save, wanted, byref(self.params)),
            *(byref(self.config), byref(where)),
        )
        assert status == OK, LIBRARY.hr_last_error()
        return needs

    def kept(self, memory: Memory, needs: Structure) -> Structure:
        """What is to be kept, in memory that is enough for any dtype."""
        saved = Saved()
        for name in ("gate_up", "activated"):
            if getattr(needs, name):
                setattr(saved, name, memory.take(PART))
        return saved

    def bytes_of(self, name: str) -> int:
        """Of a gradient, with the dtypes that the arguments have now."""
        cols = self.width if name.startswith("gate_up") else self.sizes.hidden
        if name.endswith("bias"):
            return self.sizes.experts * cols * SIZES[self.config.dtype]
        if name[-2:] in ("_a", "_b"):
            adapter = getattr(self.params, f"{name[:-2]}_adapter")
            inputs = self.sizes.hidden if name.startswith("gate_up") else self.sizes.features
            each = adapter.rank * (inputs if name.endswith("a") else cols)
            return self.sizes.experts * each * SIZES[adapter.dtype]
        m = getattr(self.params, name)
        return self.sizes.experts * m.rows * m.cols * SIZES[m.dtype]

    def call(self, name: str, arguments: list, written) -> Call:
        """Sizes stay: with others the order would be that of no hr_route()."""
        made = call(name, arguments, written, self.members)
        made.structs = [each for each in made.structs if each is not self.sizes]
        return made


def route(rng: random.Random, memory: Memory) -> Call:
    def written(offsets, order, index, index_bytes, rows, experts, where):
        return spans(offsets, 1, experts.value + 1, 4) + spans(order, 1, rows.value, 4)

    rows, experts = rng.choice([0, 1, 7, 40]), rng.choice([1, 3, 9])
    size = rng.choice([2, 4, 8])
    content = b"".join(
        rng.randrange(-1, experts + 1).to_bytes(size, "little", signed=True) for _ in range(rows)
    )
    arguments = [
        c_void_p(memory.take(4 * experts + 4)),
        c_void_p(memory.take(4 * rows + 4)),
        c_void_p(memory.take(size * rows + 8, content)),
        c_int32(size),
    ]
    return call("hr_route", [*arguments, c_int64(rows), c_int64(experts), exec_()], written)


def workspace_of(rng: random.Random, memory: Memory, size: int) -> tuple[c_void_p, c_size_t]:
    return c_void_p(memory.take(size + 16) + rng.choice([0, 16])), c_size_t(size)


def experts_forward(rng: random.Random, memory: Memory) -> Call:
    made = Made(rng, memory)
    own, s = made.config, made.sizes

    def written(y, saved, x, weight, order, offsets, params, sizes, own, workspace, size, where):
        element, rows = SIZES[own.dtype], made.rows
        outputs = [(y, s.tokens * s.hidden * element), (workspace, size.value)]
        if saved is not None:
            outputs += [(c_void_p(saved.gate_up), rows * made.width * element)]
            outputs += [(c_void_p(saved.activated), rows * s.features * element)]
        return [span for what, length in outputs for span in spans(what, 1, length, 1)]

    order, offsets = made.routing(rng, memory)
    needs = made.needs(rng.randrange(3), rng.choice([0, made.wanted(rng)]))
    saved = made.kept(memory, needs)
    workspace, size = workspace_of(rng, memory, needs.forward_workspace)
    arguments = [
        vector(rng, memory, own.dtype),
        saved,
        matrix(rng, memory, s.hidden, own.dtype),
        vector(rng, memory, own.weight_dtype),
        *(order, offsets, made.params, s, own, workspace, size, exec_()),
    ]
    return made.call("hr_experts_forward", arguments, written)


def experts_backward(rng: random.Random, memory: Memory) -> Call:
    made = Made(rng, memory)
    own, s = made.config, made.sizes

    def written(dx, dweight, grads, *rest):
        workspace, size, _ = rest[-3:]
        outputs = [(dx, s.tokens * s.hidden * SIZES[own.dtype])]
        outputs += [(dweight, made.rows * SIZES[own.weight_dtype]), (workspace, size.value)]
        if grads is not None:
            given = ((n, getattr(grads, n)) for n in STACKS)
            outputs += [(c_void_p(grad), made.bytes_of(n)) for n, grad in given if grad]
        return [span for what, length in outputs for span in spans(what, 1, length, 1)]

    order, offsets = made.routing(rng, memory)
    dx = vector(rng, memory, own.dtype, 0.7)
    dweight = vector(rng, memory, own.weight_dtype, 0.7)
    grads = Grads()
    for name in STACKS:
        if rng.random() < 0.6 and made.has_gradient(name):
            setattr(grads, name, memory.take(PART))
    wanted = sum(bit for bit, name in zip(BITS, STACKS) if getattr(grads, name))
    needs = made.needs(rng.randrange(3), wanted + bool(dx) + 2 * bool(dweight))
    saved = made.kept(memory, needs)
    workspace, size = workspace_of(rng, memory, needs.backward_workspace)
    x = matrix(rng, memory, s.hidden, own.dtype)
    arguments = [
        *(dx, dweight, grads, matrix(rng, memory, s.hidden, own.dtype)),
        x if needs.reads_x or rng.random() < 0.5 else None,
        vector(rng, memory, own.weight_dtype),
        *(order, offsets, saved, made.params, s, own, workspace, size, exec_()),
    ]
    return made.call("hr_experts_backward", arguments, written)


def experts_query(rng: random.Random, memory: Memory) -> Call:
    made = Made(rng, memory)
    save, wanted = c_int32(rng.randrange(3)), c_int32(made.wanted(rng))
    arguments = [memory.struct(Needs), made.sizes, save, wanted, made.params, made.config, exec_()]
    found = call("hr_experts_query", arguments, None, made.members)
    found.structs.pop(0)
    return found


CALLS = (route, experts_forward, experts_backward, experts_backward, experts_query)
