"""Fuzzes the C ABI through ctypes: right calls with one to three arguments made wrong.

A call that fails returns a status that is known, leaves a message that begins with the function's
name, and changes no byte. One that succeeds writes inside of its tensors alone. What C cannot see
is left out: addresses that are no memory, and arrays or tensors that are shorter than all that
describes them says.
"""

import ctypes
import math
import random
import sys
from collections.abc import Callable
from ctypes import (
    byref,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
)

from tests.python.fuzz import (
    _experts,
    _linear,
    _linear_cross_entropy,
    _lora,
    _losses,
    _matrices,
    _mlp,
    _rows,
)
from tests.python.fuzz._c_calls import (
    BF16,
    F32,
    F64,
    FLOATS,
    I8,
    I16,
    INTERNAL,
    LIBRARY,
    LISTS,
    OK,
    U8,
    Call,
    Limited,
    List,
    Memory,
    exec_,
    without,
)
from tests.python.fuzz._configs import (
    Adafactor,
    AdamW,
    AdamW8bit,
    Momentum,
    MuonMatrix,
    MuonMomentum,
    MuonUpdate,
    NewtonSchulz,
    NormResult,
    Place,
    Quantize,
    Shape,
    Step,
    UnscaleNorm,
    UpdateScale,
    Weights,
)
from tests.python.fuzz._driver import main
from tests.python.fuzz._header import ListFunction, list_functions


def sizes(rng: random.Random) -> list[int]:
    return [rng.choice([0, 1, 5, 64, 65, 256, 300]) for _ in range(rng.randrange(4))]


def scalars(rng: random.Random, memory: Memory, step: Step) -> None:
    step.lr, step.t, step.lr_dtype = 1e-3, 1, F32
    if rng.random() < 0.3:
        step.lr_dtype = rng.choice([F32, F64])
        step.lr_ptr = memory.scalar(1e-3, c_float if step.lr_dtype == F32 else c_double)
    for name, value in (("grad_scale", 2.0), ("found_inf", 0.0), ("clip_coef", 0.5)):
        if rng.random() < 0.3:
            setattr(step, name, memory.scalar(rng.choice([value, value, 0.0, math.nan, -1.0])))


def weights(rng: random.Random, memory: Memory, numels: list[int], dtypes: list[int]):
    """A struct of weights of some mode, its list of residuals, and the dtypes that it wants."""
    mode = rng.randrange(7)
    dtypes = list(dtypes) if mode == 0 else [BF16] * len(numels)
    residual = {2: BF16, 3: F32, 4: I16, 5: I8, 6: I8}.get(mode)
    w = Weights(ctypes.sizeof(Weights), mode, None, None, None, None)
    residuals, places = None, None
    if residual is not None:
        residuals = List(memory, [residual] * len(numels), numels)
        w.residuals = ctypes.pointer(residuals.c)
    if mode in (1, 6):
        w.seeds = (c_uint64 * LISTS)(*(rng.getrandbits(64) for _ in range(LISTS)))
    if rng.random() < 0.3:
        places = (Place * LISTS)(*(Place(3, 4, 9) for _ in range(LISTS)))
        w.places = places
    if rng.random() < 0.3:
        w.stalled = memory.scalar(0, c_int64)
    return w, residuals, places, dtypes


def steps(rng: random.Random, memory: Memory, count: int):
    def counter(rng, dtype, numel):
        number = rng.choice([0.0, 3.0, 3.0, 3.0, -1.0, math.nan, math.inf, 2.0**24, 2.0**53])
        return bytes((c_float if dtype == F32 else c_double)(number))

    if rng.random() < 0.5:
        return None
    return List(memory, [rng.choice([F32, F64]) for _ in range(count)], [1] * count, counter)


def adam_parts(rng: random.Random, memory: Memory, config: AdamW):
    config.size = ctypes.sizeof(AdamW)
    config.beta1, config.beta2, config.eps = 0.9, 0.999, 1e-8
    config.weight_decay, config.decoupled = 0.01, 1
    return step_parts(rng, memory, config)


def step_parts(rng: random.Random, memory: Memory, config: AdamW | Momentum):
    numels = sizes(rng)
    dtypes = [rng.choice(FLOATS) for _ in numels]
    scalars(rng, memory, config.step)
    structs, lists, arrays = [config, config.step], [], []
    if rng.random() < 0.5:
        w, residuals, places, dtypes = weights(rng, memory, numels, dtypes)
        config.step.weights = ctypes.pointer(w)
        structs.append(w)
        lists += [residuals] if residuals else []
        arrays += [places] if places else []
        config._keep = w
    params = List(memory, dtypes, numels)
    grads = List(memory, [rng.choice(FLOATS) for _ in numels], numels)
    counters = steps(rng, memory, len(numels))
    lists += [params, grads, *([counters] if counters else [])]
    return numels, params, grads, counters, structs, lists, arrays


def adamw(rng: random.Random, memory: Memory) -> Call:
    config = AdamW()
    numels, params, grads, counters, structs, lists, arrays = adam_parts(rng, memory, config)
    kinds = [rng.choice(FLOATS) for _ in numels]
    config.amsgrad = rng.randrange(2)
    moments = [List(memory, kinds, numels) for _ in range(2 + config.amsgrad)]
    maxima = moments[2] if config.amsgrad else None
    where = exec_()
    arguments = [params, *moments[:2], maxima, counters, grads, config, where]
    return Call("hr_adamw", arguments, [*lists, *moments], [*structs, where], arrays)


def adamw8bit(rng: random.Random, memory: Memory) -> Call:
    config = AdamW8bit(ctypes.sizeof(AdamW8bit))
    numels, params, grads, counters, structs, lists, arrays = adam_parts(rng, memory, config.adamw)
    config.block_size = rng.choice([64, 128, 256, 512])
    if rng.random() < 0.3:
        config.seeds = (c_uint64 * LISTS)(*range(LISTS))
    elif rng.random() < 0.2:
        config.bnb_exact = 1
    blocks = [-(-n // config.block_size) for n in numels]
    moments = [
        List(memory, [dtype] * len(numels), count)
        for _ in range(2)
        for dtype, count in ((U8, numels), (F32, blocks))
    ]
    where = exec_()
    arguments = [params, *moments, counters, grads, config, where]
    structs = [*structs, config, where]
    return Call("hr_adamw8bit", arguments, [*lists, *moments], structs, arrays)


def momentum(rng: random.Random, memory: Memory) -> Call:
    config = Momentum(ctypes.sizeof(Momentum))
    config.rule, config.momentum = rng.choice([(0, 0.0), (0, 0.9), (1, 0.0)])
    config.beta1, config.beta2, config.weight_decay = 0.9, 0.99, 0.01
    config.block_size = rng.choice([64, 128, 256, 512])
    numels, params, grads, counters, structs, lists, arrays = step_parts(rng, memory, config)
    moments = absmaxs = None
    if config.rule or config.momentum:
        in_codes = rng.random() < 0.5
        kinds = [U8 if in_codes else rng.choice(FLOATS) for _ in numels]
        moments = List(memory, kinds, numels)
        lists.append(moments)
        if in_codes:
            blocks = [-(-n // config.block_size) for n in numels]
            absmaxs = List(memory, [F32] * len(numels), blocks)
            lists.append(absmaxs)
    where = exec_()
    arguments = [params, moments, absmaxs, counters, grads, config, where]
    return Call("hr_momentum", arguments, lists, [*structs, where], arrays)


def adafactor(rng: random.Random, memory: Memory) -> Call:
    count = rng.randrange(4)
    shapes = (Shape * LISTS)()
    for k in range(LISTS):
        batch, rows, cols = rng.choice([(1, 1, 7), (1, 8, 9), (2, 3, 4), (1, 70, 4), (1, 0, 5)])
        factored = int(rows != 1 and rng.random() < 0.8)
        if not factored:
            batch, rows, cols = 1, 1, batch * rows * cols
        shapes[k] = Shape(batch, rows, cols, factored, 0, 0, 0)
    used = shapes[:count]
    numels = [s.batch * s.rows * s.cols for s in used]
    config = Adafactor(ctypes.sizeof(Adafactor))
    config.semantics, config.phases, config.scale_parameter = rng.randrange(2), 15, 1
    config.beta2_decay, config.eps1, config.eps2, config.clip_threshold = -0.8, 1e-30, 1e-3, 1.0
    config.relative_step = rng.randrange(2)
    scalars(rng, memory, config.step)
    structs, lists, arrays = [config, config.step], [], [shapes]
    dtypes = [rng.choice(FLOATS) for _ in numels]
    if rng.random() < 0.4:
        w, residuals, places, dtypes = weights(rng, memory, numels, dtypes)
        config.step.weights = ctypes.pointer(w)
        config._keep = w
        structs.append(w)
        lists += [residuals] if residuals else []
        arrays += [places] if places else []
    f32 = [F32] * count
    params = List(memory, dtypes, numels)
    rows = List(memory, f32, [s.batch * s.rows * s.factored for s in used])
    cols = List(memory, f32, [s.batch * s.cols * s.factored for s in used])
    variances = List(memory, f32, [n * (1 - s.factored) for n, s in zip(numels, used)])
    averages = List(memory, f32, numels) if rng.random() < 0.5 else None
    roots = List(memory, f32, [1] * count) if rng.random() < 0.5 else None
    counters = steps(rng, memory, count)
    grads = List(memory, [rng.choice(FLOATS) for _ in numels], numels)
    needed = c_size_t()
    assert LIBRARY.hr_adafactor_workspace(byref(needed), byref(shapes), c_int64(count)) == OK
    workspace = c_void_p(memory.take(max(needed.value, 8)))
    where = exec_()
    optional = [each for each in (averages, roots, counters) if each]
    arguments = [
        *(params, rows, cols, variances, averages, roots, counters, grads, shapes, config),
        *(workspace, needed, where),
    ]
    lists += [params, rows, cols, variances, grads, *optional]
    return Call("hr_adafactor", arguments, lists, [*structs, where], arrays)


def muon_parts(rng: random.Random, memory: Memory):
    """Matrices, their updates, and workspace for both passes."""
    count = rng.randrange(4)
    matrices = (MuonMatrix * LISTS)()
    for k in range(LISTS):
        rows, cols = rng.choice([(8, 9), (1, 7), (0, 5), (20, 13), (16, 16)])
        stride = max(rows, cols) + rng.choice([0, 0, 3])
        matrices[k] = MuonMatrix(rows, cols, stride, rng.randrange(2))
    numels = [m.rows * m.cols for m in matrices[:count]]
    updates = List(memory, [rng.choice(FLOATS) for _ in numels], numels)
    needed = c_size_t()
    assert LIBRARY.hr_muon_workspace(byref(needed), byref(matrices), c_int64(count)) == OK
    return matrices, numels, updates, c_void_p(memory.take(max(needed.value, 8))), needed


def muon_momentum(rng: random.Random, memory: Memory) -> Call:
    matrices, numels, updates, workspace, needed = muon_parts(rng, memory)
    config = MuonMomentum(ctypes.sizeof(MuonMomentum))
    config.momentum, config.nesterov = 0.95, rng.randrange(2)
    config.block_size = rng.choice([64, 128, 256, 512])
    scalars(rng, memory, config.step)
    in_codes = rng.random() < 0.5
    kinds = [U8 if in_codes else rng.choice(FLOATS) for _ in numels]
    moments = List(memory, kinds, numels)
    grads = List(memory, [rng.choice(FLOATS) for _ in numels], numels)
    blocks = [-(-n // config.block_size) for n in numels]
    absmaxs = List(memory, [F32] * len(numels), blocks) if in_codes else None
    squares, where = c_void_p(memory.take(4 * LISTS)), exec_()
    arguments = [updates, squares, moments, absmaxs, grads, matrices, config]
    lists = [updates, moments, grads, *([absmaxs] if absmaxs else [])]
    structs = [config, config.step, where]
    return Call(
        "hr_muon_momentum", [*arguments, workspace, needed, where], lists, structs, [matrices]
    )


def muon_update(rng: random.Random, memory: Memory) -> Call:
    matrices, numels, updates, workspace, needed = muon_parts(rng, memory)
    config = MuonUpdate(ctypes.sizeof(MuonUpdate))
    config.weight_decay, config.beta2 = 0.1, 0.95
    scalars(rng, memory, config.step)
    structs, lists, arrays = [config, config.step], [updates], [matrices]
    dtypes = [rng.choice(FLOATS) for _ in numels]
    if rng.random() < 0.5:
        w, residuals, places, dtypes = weights(rng, memory, numels, dtypes)
        config.step.weights = ctypes.pointer(w)
        config._keep = w
        structs.append(w)
        lists += [residuals] if residuals else []
        arrays += [places] if places else []
    params = List(memory, dtypes, numels)
    rows = [m.rows for m in matrices[: len(numels)]]
    row_vars = List(memory, [F32] * len(rows), rows) if rng.random() < 0.5 else None
    counters = steps(rng, memory, len(numels))
    scales = (c_double * LISTS)(*[1.0] * LISTS) if rng.random() < 0.5 else None
    lists += [params, *(each for each in (row_vars, counters) if each)]
    where = exec_()
    arguments = [params, row_vars, counters, updates, matrices, scales, config]
    arguments += [workspace, needed, where]
    return Call("hr_muon_update", arguments, lists, [*structs, where], arrays)


def newton_schulz(rng: random.Random, memory: Memory) -> Call:
    numbers = (c_double * 15)(*[3.4445, -4.775, 2.0315] * 5)
    batch, m, n = rng.choice([(1, 3, 5), (3, 4, 4), (2, 1, 9), (0, 3, 5)])
    config = NewtonSchulz(ctypes.sizeof(NewtonSchulz))
    config.dtype, config.variant = rng.choice(FLOATS), rng.randrange(2)
    config.steps, config.eps = rng.randrange(1, 6), 1e-7
    if rng.random() < 0.5:
        config.coefficients = numbers
    where, needed = exec_(), c_size_t()
    sizes = [Limited(batch), c_int64(m), Limited(n)]
    query = LIBRARY.hr_newton_schulz_workspace
    assert query(byref(needed), *sizes, byref(config), byref(where)) == OK
    x, squares = (c_void_p(memory.take(4 * size + 4)) for size in (batch * m * n, batch))
    workspace = c_void_p(memory.take(max(needed.value, 64)))
    arguments = [x, squares, *sizes, config, workspace, needed, where]
    return Call("hr_newton_schulz", arguments, structs=[config, where])


def newton_schulz_workspace(rng: random.Random, memory: Memory) -> Call:
    config = NewtonSchulz(ctypes.sizeof(NewtonSchulz), F32, 0, None, 5, 1e-7)
    where, sizes = exec_(), [c_int64(each) for each in (2, 3, 5)]
    arguments = [memory.struct(c_size_t * 1), *sizes, config, where]
    return Call("hr_newton_schulz_workspace", arguments, structs=[config, where])


def muon_workspace(rng: random.Random, memory: Memory) -> Call:
    matrices = (MuonMatrix * LISTS)(*(MuonMatrix(8, 9, 9, 0) for _ in range(LISTS)))
    arguments = [memory.struct(c_size_t * 1), matrices, c_int64(3)]
    return Call("hr_muon_workspace", arguments, arrays=[matrices])


def unscale_norm(rng: random.Random, memory: Memory) -> Call:
    numels = sizes(rng)
    grads = List(memory, [rng.choice(FLOATS) for _ in numels], numels)
    config = UnscaleNorm(ctypes.sizeof(UnscaleNorm), rng.choice([1.0, 2.0, 3.0, math.inf]), 1.0)
    config.write = rng.randrange(2)
    for name in ("grad_scale", "clip_coef"):
        if rng.random() < 0.3:
            setattr(config, name, memory.scalar(rng.choice([2.0, 2.0, 0.0, math.nan])))
    result = NormResult()
    for name, _ in NormResult._fields_:
        if rng.random() < 0.6:
            setattr(result, name, memory.take(8 * LISTS))
    needed = c_size_t()
    assert LIBRARY.hr_unscale_norm_workspace(byref(needed), byref(grads.c)) == OK
    workspace, where = c_void_p(memory.take(max(needed.value, 8))), exec_()
    arguments = [grads, result, config, workspace, needed, where]
    return Call("hr_unscale_norm", arguments, [grads], [config, result, where])


def update_scale(rng: random.Random, memory: Memory) -> Call:
    config = UpdateScale(ctypes.sizeof(UpdateScale), 2.0, 0.5, 0.0, 1e300, 2000, 1)
    pointers = [
        c_void_p(memory.scalar(value, kind))
        for value, kind in ((65536.0, c_float), (5, c_int32), (1, c_int32), (1.0, c_float))
    ]
    where = exec_()
    return Call("hr_update_scale", [*pointers, config, where], structs=[config, where])


def quantize_blocks(rng: random.Random, memory: Memory) -> Call:
    size = rng.choice([64, 128, 256])
    config, where = Quantize(ctypes.sizeof(Quantize), rng.randrange(2), size), exec_()
    numels = sizes(rng)
    codes = List(memory, [U8] * len(numels), numels)
    absmaxs = List(memory, [F32] * len(numels), [-(-numel // size) for numel in numels])
    values = List(memory, [rng.choice(FLOATS) for _ in numels], numels)
    name, lists = rng.choice(
        [
            ("hr_quantize_blocks", [codes, absmaxs, values]),
            ("hr_dequantize_blocks", [values, codes, absmaxs]),
        ]
    )
    return Call(name, [*lists, config, where], lists, [config, where])


def of_lists(function: ListFunction) -> Callable[[random.Random, Memory], Call]:
    """Calls of a function that headroom.h alone describes."""

    def make(rng: random.Random, memory: Memory) -> Call:
        numels = sizes(rng)
        lists = {
            name: List(memory, [rng.choice(types) for _ in numels], numels)
            for name, types in function.lists.items()
        }
        given = [
            None if name in function.may_be_null and rng.random() < 0.5 else each
            for name, each in lists.items()
        ]
        config, where = function.config(size=ctypes.sizeof(function.config)), exec_()
        for name, kind in function.config._fields_[1:]:
            if kind is c_void_p and rng.random() < 0.3:
                setattr(config, name, memory.scalar(rng.choice([0.5, math.nan])))
            elif kind is c_int32 and function.defaults[name] in (0, 1):
                setattr(config, name, rng.randrange(2))
            elif kind is not c_void_p:
                default = function.defaults[name]
                setattr(config, name, default if kind is c_double else int(default))
        structs = [config, where]
        return Call(function.name, [*given, *structs], [each for each in given if each], structs)

    return make


def join_weights(rng: random.Random, memory: Memory) -> Call:
    numels = sizes(rng)
    w, residuals, places, dtypes = weights(rng, memory, numels, [BF16] * len(numels))
    wide, params = List(memory, [F32] * len(numels), numels), List(memory, dtypes, numels)
    name, pair = rng.choice(
        [("hr_join_weights", [wide, params]), ("hr_split_weights", [params, wide])]
    )
    where = exec_()
    lists = [wide, params, *([residuals] if residuals else [])]
    arrays = [places] if places else []
    return Call(name, [*pair, w, where], lists, [w, where], arrays)


def workspace(rng: random.Random, memory: Memory) -> Call:
    grads = List(memory, [F32, BF16], [5, 300])
    return Call("hr_unscale_norm_workspace", [memory.struct(c_size_t * 1), grads], [grads])


def adafactor_workspace(rng: random.Random, memory: Memory) -> Call:
    shapes = (Shape * LISTS)(*(Shape(1, 8, 9, 1) for _ in range(LISTS)))
    arguments = [memory.struct(c_size_t * 1), shapes, c_int64(3)]
    return Call("hr_adafactor_workspace", arguments, arrays=[shapes])


def dynamic_map(rng: random.Random, memory: Memory) -> Call:
    return Call("hr_dynamic_map", [c_void_p(memory.take(1024 + 16)), c_int32(rng.randrange(2))])


CALLS = (adamw, adamw, adamw8bit, adamw8bit, momentum, momentum, adafactor, adafactor)
CALLS += (muon_momentum, muon_update, muon_workspace, newton_schulz, newton_schulz_workspace)
CALLS += (unscale_norm, update_scale)
CALLS = (*CALLS, quantize_blocks, join_weights, workspace, adafactor_workspace, dynamic_map)
WRITTEN = {"hr_quantize_blocks", "hr_dequantize_blocks"}  # whose lists differ in size
DERIVED = [of_lists(f) for name, f in list_functions().items() if name not in WRITTEN]
CALLS = (*CALLS, *DERIVED, *_rows.CALLS, *_matrices.CALLS, *_linear.CALLS, *_losses.CALLS)
CALLS = (*CALLS, *_mlp.CALLS, *_experts.CALLS, *_linear_cross_entropy.CALLS, *_lora.CALLS)


def case(rng: random.Random) -> str:
    memory = Memory(rng)
    call = rng.choice(CALLS)(rng, memory)
    spoiled = rng.randrange(4)
    for _ in range(spoiled):
        call.spoil(rng)
    before = memory.all()
    status = call.run()
    name = LIBRARY.hr_status_string(status).decode()
    assert 0 <= status < INTERNAL, f"{call.name} returned {status} ({name})"
    if status == OK:
        written = call.written(*call.arguments) if call.written else memory.spans()
        same = without(before, written) == without(memory.all(), written)
        assert same, f"{call.name} wrote outside of its tensors"
        return "accepted"
    message = LIBRARY.hr_last_error().decode()
    named = (f"{call.name}: ", "exec->device is ")  # the latter where no driver answers
    assert message.startswith(named), f"{call.name} said {message!r}"
    assert memory.all() == before, f"{call.name} failed and wrote: {message}"
    return "refused"


if __name__ == "__main__":
    sys.exit(main(case))
