"""Calls of the MLP block of headroom.h, as _rows.py makes those of the other layers."""

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
from tests.python.fuzz._rows import (
    SIZES,
    Rows,
    call,
    matrix,
    part,
    same,
    spans,
    vector,
)

MlpConfig = config(
    ("norm casting activation dtype norm_dtype gated residual", c_int32),
    ("eps offset", c_double),
    ("tile_tokens", c_int64),
    ("allow_tf32 allow_reduced_precision_reduction deterministic reserved", c_int32),
    ("gate_up up down", c_void_p),
)
MlpParams = struct(
    ("norm_weight norm_bias", c_void_p),
    ("gate_up up down", Rows),
    ("gate_up_bias up_bias down_bias", c_void_p),
)
MlpSaved = struct(("mean rstd normed gate_up activated", c_void_p))
MlpNeeds = struct(
    ("mean rstd normed gate_up activated forward_workspace backward_workspace", c_size_t),
    ("tile_tokens", c_int64),
    ("reads_x", c_int32),
)


def mlp_config(rng: random.Random) -> Structure:
    own = MlpConfig(sizeof(MlpConfig), rng.randrange(2))
    own.casting = 0 if own.norm else rng.randrange(3)
    own.activation, own.dtype = rng.randrange(5), rng.choice(FLOATS)
    own.norm_dtype, own.gated = rng.choice(FLOATS), rng.randrange(2)
    own.residual, own.eps, own.offset = rng.randrange(2), 1e-6, rng.choice([0.0, 1.0])
    own.tile_tokens = rng.choice([0, 0, 1, 2, 3, 100])
    return own


def mlp_sizes(rng: random.Random) -> list[Limited]:
    choices = ([0, 1, 2, 5, 9], [1, 3, 8, 17], [1, 2, 8, 11])
    return [Limited(rng.choice(each)) for each in choices]


def mlp_params(rng: random.Random, memory: Memory, own, hidden: int, features: int) -> Structure:
    p = MlpParams()
    p.norm_weight = vector(rng, memory, own.norm_dtype, 0.7)
    p.norm_bias = vector(rng, memory, own.norm_dtype, 0.7 * own.norm)
    p.gate_up, p.down = (matrix(rng, memory, n, own.dtype) for n in (hidden, features))
    p.gate_up_bias, p.down_bias = (vector(rng, memory, own.dtype, 0.5) for _ in range(2))
    if own.gated and rng.random() < 0.5:
        p.up = matrix(rng, memory, hidden, own.dtype)
        p.up_bias = vector(rng, memory, own.dtype, 0.5)
    return p


def mlp_grads(rng: random.Random, memory: Memory, own, hidden: int, features: int, params, dx):
    """Gradients, some of which are not wanted; of the norm only with dx."""
    g = mlp_params(rng, memory, own, hidden, features)
    if not params.up.data:
        g.up, g.up_bias = Rows(), None
    elif not g.up.data and rng.random() < 0.5:
        g.up = matrix(rng, memory, hidden, own.dtype)
    for name in ("gate_up", "down"):
        if rng.random() < 0.4:
            setattr(g, name, Rows())
    if not dx:
        g.norm_weight = g.norm_bias = None
    return g


def few_bits(
    rng: random.Random, memory: Memory, own, params, grads, hidden: int, features: int
) -> list:
    """Puts matrices in place of those of params, or does not."""
    if rng.random() < 0.6:
        return []
    rows = features if params.up.data or not own.gated else 2 * features
    shapes = {"gate_up": (rows, hidden), "up": (features, hidden), "down": (hidden, features)}
    made = []
    for name, (outputs, inputs) in shapes.items():
        if not getattr(params, name).data:
            continue
        m = _matrices.matrix(rng, memory, _matrices.OF_ANY_COLS)
        m.rows, m.cols, m.stride, m.dtype = outputs, inputs, inputs, own.dtype
        setattr(own, name, addressof(m))
        setattr(params, name, Rows())
        setattr(grads, name, Rows())
        made.append(m)
    return made


def mlp_wanted(dx, g: Structure) -> int:
    flags = (dx, g.norm_weight, g.norm_bias, g.gate_up.data or g.up.data)
    flags += (g.gate_up_bias or g.up_bias, g.down.data, g.down_bias)
    return sum(1 << k for k, flag in enumerate(flags) if flag)


def mlp_saved(rng: random.Random, memory: Memory, own, needs: Structure) -> Structure:
    """What is to be kept, and few of these are not."""
    saved = MlpSaved()
    for name, _ in MlpSaved._fields_:
        if getattr(needs, name):
            dtype = F32 if name in ("mean", "rstd") else own.dtype
            setattr(saved, name, part(rng, memory, dtype))
    return saved


def query(tokens, hidden, features, save: int, wanted: int, own: Structure) -> Structure:
    needs, where = MlpNeeds(), exec_()
    status = LIBRARY.hr_mlp_query(
        byref(needs), tokens, hidden, features, save, wanted, byref(own), byref(where)
    )
    assert status == OK, LIBRARY.hr_last_error()
    return needs


def mlp_forward(rng: random.Random, memory: Memory) -> Call:
    def written(y, saved, x, params, tokens, hidden, features, own, workspace, size, where):
        n, h, f, element = tokens.value, hidden.value, features.value, SIZES[own.dtype]
        outputs = [(y, n, h, element), (workspace, 1, size.value, 1)]
        if saved is not None:
            width = f * (1 + own.gated)
            lengths = {"normed": h, "gate_up": width, "activated": f}
            sizes = {name: length * element for name, length in lengths.items()}
            for name, bytes_ in {"mean": 4, "rstd": 4, **sizes}.items():
                outputs.append((c_void_p(getattr(saved, name)), 1, n * bytes_, 1))
        return [span for each in outputs for span in spans(*each)]

    own, sizes = mlp_config(rng), mlp_sizes(rng)
    _, hidden, features = (each.value for each in sizes)
    params = mlp_params(rng, memory, own, hidden, features)
    matrices = few_bits(rng, memory, own, params, MlpParams(), hidden, features)
    needs = query(*sizes, rng.randrange(3), rng.choice([0, rng.randrange(128)]), own)
    saved = mlp_saved(rng, memory, own, needs)
    x = matrix(rng, memory, hidden, own.dtype)
    keeps = any(getattr(saved, name) for name, _ in MlpSaved._fields_)
    y = matrix(rng, memory, hidden, own.dtype) if keeps or rng.random() < 0.5 else same(x)
    size = c_size_t(needs.forward_workspace)
    workspace = c_void_p(memory.take(size.value + 16) + rng.choice([0, 16]))
    arguments = [y, saved if keeps or rng.random() < 0.5 else None, x, params, *sizes, own]
    more = (params.gate_up, params.up, params.down, *matrices)
    return call("hr_mlp_forward", [*arguments, workspace, size, exec_()], written, more)


def mlp_backward(rng: random.Random, memory: Memory) -> Call:
    def written(dx, g, dy, x, params, saved, tokens, hidden, features, own, workspace, size, _):
        n, h, f, element = tokens.value, hidden.value, features.value, SIZES[own.dtype]
        rows = f if params.up.data or own.up or not own.gated else 2 * f
        outputs = [(dx, n, h, element), (workspace, 1, size.value, 1)]
        outputs += [(g.gate_up, rows, h, element), (g.up, f, h, element), (g.down, h, f, element)]
        vectors = [(g.gate_up_bias, rows), (g.up_bias, f), (g.down_bias, h)]
        outputs += [(c_void_p(data), 1, length, element) for data, length in vectors]
        narrow = SIZES[own.norm_dtype]
        outputs += [(c_void_p(data), 1, h, narrow) for data in (g.norm_weight, g.norm_bias)]
        return [span for each in outputs for span in spans(*each)]

    own, sizes = mlp_config(rng), mlp_sizes(rng)
    _, hidden, features = (each.value for each in sizes)
    row = (rng, memory, hidden, own.dtype)
    dy, x = matrix(*row), matrix(*row)
    dx = rng.choice([None, matrix(*row), matrix(*row) if own.residual else same(dy)])
    params = mlp_params(rng, memory, own, hidden, features)
    grads = mlp_grads(rng, memory, own, hidden, features, params, dx)
    matrices = few_bits(rng, memory, own, params, grads, hidden, features)
    wanted = mlp_wanted(dx, grads)
    needs = query(*sizes, rng.randrange(3), wanted, own)
    saved = mlp_saved(rng, memory, own, needs)
    size = c_size_t(needs.backward_workspace)
    workspace = c_void_p(memory.take(size.value + 16) + rng.choice([0, 16]))
    x = x if needs.reads_x or rng.random() < 0.5 else None
    arguments = [dx, grads, dy, x, params, saved, *sizes, own, workspace, size, exec_()]
    more = (params.gate_up, params.up, params.down, grads.gate_up, grads.up, grads.down)
    more += tuple(matrices)
    return call("hr_mlp_backward", arguments, written, more)


def mlp_query(rng: random.Random, memory: Memory) -> Call:
    save, wanted = c_int32(rng.randrange(3)), c_int32(rng.randrange(128))
    arguments = [memory.struct(MlpNeeds), *mlp_sizes(rng), save, wanted, mlp_config(rng), exec_()]
    made = call("hr_mlp_query", arguments, None)
    made.structs.pop(0)
    return made


CALLS = (mlp_forward, mlp_backward, mlp_backward, mlp_query)
