"""Fuzzes the torch ops: right calls with one to three tensors or options made wrong.

A call is refused with RuntimeError and no byte of any tensor has changed; or it is taken, no byte
outside of what the schema says is written has changed, and no tensor without data was among those
with data.
"""

import math
import random
import sys
from collections.abc import Callable

import headroom.functional  # noqa: F401  (registers the ops)
import torch
from headroom._core.list_ops import LIST_OPS, ListOp
from headroom._core.row_ops import ROW_OPS, RowOp
from tests.python.fuzz._driver import changed_tensor, hostile_tensor, main
from tests.python.helpers.row_calls import FLOATS, arguments_of, is_described, right_call
from tests.python.helpers.row_calls import padded as tensor
from torch import Tensor

SHAPES = ((3, 4), (), (5,), (0,), (64,), (70, 5), (2, 3, 4))
NUMBERS = (0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, math.nan, math.inf, -math.inf)
INTEGERS = (0, 1, 2, 3, 6, 7, -1, 15, 64, 255, 256, 512, 2**31 - 1, 2**62, -(2**63))


class Call:
    def __init__(self, name: str, lists: dict, **options):
        self.op = getattr(torch.ops.headroom, name).default
        self.lists, self.options = lists, options
        self.kinds = {argument.name: argument for argument in self.op._schema.arguments}

    def spoil(self, rng: random.Random) -> None:
        if rng.random() < 0.6:
            self.spoil_list(rng, rng.choice(list(self.lists)))
        else:
            self.spoil_option(rng, rng.choice([n for n in self.kinds if n not in self.lists]))

    def spoil_list(self, rng: random.Random, name: str) -> None:
        value = self.lists[name]
        if not isinstance(value, list):
            self.lists[name] = hostile_tensor(rng) if value is None else other_tensor(rng, value)
            return
        kind = rng.randrange(8)
        if kind == 0 and value:
            value.pop(rng.randrange(len(value)))
        elif kind == 1:
            value.append(hostile_tensor(rng))
        elif kind == 2:
            value.reverse()
        elif kind == 3 and value:
            others = [t for each in self.lists.values() if isinstance(each, list) for t in each]
            value[rng.randrange(len(value))] = rng.choice(others)
        elif value:
            k = rng.randrange(len(value))
            value[k] = other_tensor(rng, value[k])

    def spoil_option(self, rng: random.Random, name: str) -> None:
        kind = str(self.kinds[name].type)
        if kind in ("Tensor", "Optional[Tensor]"):
            given = self.options.get(name)
            scalar = given if given is not None else torch.ones(())
            makes = (lambda: None, lambda: other_tensor(rng, scalar), lambda: hostile_tensor(rng))
            self.options[name] = rng.choice(makes)()
        elif kind == "float":
            self.options[name] = rng.choice(NUMBERS)
        elif kind == "bool":
            self.options[name] = rng.choice([True, False])
        elif kind == "int":
            self.options[name] = rng.choice(INTEGERS)
        else:
            self.options[name] = rng.choice(
                [None, [], [rng.choice(INTEGERS) for _ in range(rng.randrange(9))]]
            )

    def tensors(self) -> list[tuple[str, Tensor]]:
        found = []
        for name, value in (self.lists | self.options).items():
            values = value if isinstance(value, list) else [value]
            found += [(name, each) for each in values if isinstance(each, Tensor)]
        return found

    def run(self) -> None:
        with torch.set_grad_enabled(False):
            self.op(**self.lists, **self.options)


def other_tensor(rng: random.Random, tensor: Tensor) -> Tensor:
    return hostile_tensor(rng) if rng.random() < 0.25 else changed_tensor(rng, tensor)


# ---- Right calls ---------------------------------------------------------------------------------


def weights(rng: random.Random, shapes: list) -> tuple[list, dict, list | None]:
    """Residuals, options and the parameters' dtypes of a mode of storing weights."""
    mode = rng.choice([0, 0, 1, 2, 3, 4, 5, 6])
    bf16 = torch.bfloat16
    kinds = {2: bf16, 3: torch.float32, 4: torch.int16, 5: torch.int8, 6: torch.int8}
    residuals = [tensor(rng, shape, kinds[mode]) for shape in shapes] if mode in kinds else []
    options = {"weights_mode": mode}
    if mode in (1, 6):
        options["weight_seeds"] = [rng.getrandbits(62) for _ in shapes]
    if rng.random() < 0.2:
        options["stalled"] = tensor(rng, (), torch.int64)
    return residuals, options, [bf16] * len(shapes) if mode else None


def scalars(rng: random.Random, names: tuple) -> dict:
    values = {"grad_scale": 2.0, "found_inf": 0.0, "clip_coef": 0.5, "lr_tensor": 1e-3}
    return {
        name: tensor(rng, (), torch.float32).fill_(values[name])
        for name in names
        if rng.random() < 0.25
    }


def parts(rng: random.Random) -> tuple:
    """Shapes, parameters, gradients, counters, residuals and options of an optimizer's op."""
    shapes = [rng.choice(SHAPES) for _ in range(rng.randrange(4))]
    residuals, options, dtypes = weights(rng, shapes)
    dtypes = dtypes or [rng.choice(FLOATS) for _ in shapes]
    params = [tensor(rng, shape, dtype) for shape, dtype in zip(shapes, dtypes)]
    grads = [tensor(rng, shape, rng.choice(FLOATS)) for shape in shapes]
    counters = [torch.tensor(3.0, dtype=rng.choice([torch.float32, torch.float64])) for _ in shapes]
    options |= scalars(rng, ("grad_scale", "found_inf", "clip_coef", "lr_tensor"))
    return shapes, params, grads, counters, residuals, options


ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8}
ADAM |= {"maximize": False, "decoupled": True}


def adamw(rng: random.Random) -> Call:
    shapes, params, grads, counters, residuals, options = parts(rng)
    kinds, amsgrad = [rng.choice(FLOATS) for _ in shapes], rng.random() < 0.3
    moments = [[tensor(rng, s, d) for s, d in zip(shapes, kinds)] for _ in range(3)]
    names = ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
    lists = {"params": params, "grads": grads, **dict(zip(names, moments))}
    lists["max_exp_avg_sqs"] = moments[2] if amsgrad else []
    lists |= {"state_steps": counters, "residuals": residuals}
    return Call("adamw_", lists, amsgrad=amsgrad, **ADAM, **options)


def adamw8bit(rng: random.Random) -> Call:
    shapes, params, grads, counters, residuals, options = parts(rng)
    size = rng.choice([64, 128, 256, 512])
    lists = {"params": params, "grads": grads}
    for name in ("exp_avg", "exp_avg_sq"):
        lists[f"{name}s"] = [tensor(rng, shape, torch.uint8) for shape in shapes]
        lists[f"{name}_absmaxs"] = [
            tensor(rng, (-(-math.prod(shape) // size),), torch.float32) for shape in shapes
        ]
    lists |= {"state_steps": counters, "residuals": residuals}
    return Call("adamw8bit_", lists, block_size=size, **ADAM, **options)


MOMENTUM = {"lr": 1e-3, "dampening": 0.0, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
MOMENTUM |= {"nesterov": False, "maximize": False}


def momentum(rng: random.Random) -> Call:
    shapes, params, grads, counters, residuals, options = parts(rng)
    size, kind = rng.choice([64, 128, 256, 512]), rng.choice(["none", "numbers", "codes"])
    given = [] if kind == "none" else shapes
    dtypes = [torch.uint8 if kind == "codes" else rng.choice(FLOATS) for _ in given]
    scales = [(-(-math.prod(shape) // size),) for shape in given if kind == "codes"]
    lists = {
        "params": params,
        "grads": grads,
        "moments": [tensor(rng, shape, dtype) for shape, dtype in zip(given, dtypes)],
        "absmaxs": [tensor(rng, shape, torch.float32) for shape in scales],
        "state_steps": counters if rng.random() < 0.8 else [],
        "residuals": residuals,
    }
    rule = {"rule": 0, "momentum": 0.0} if kind == "none" else {"rule": 1, "momentum": 0.0}
    if kind != "none" and rng.random() < 0.5:
        rule = {"rule": 0, "momentum": 0.9}
    return Call("momentum_", lists, block_size=size, **rule, **MOMENTUM, **options)


def adafactor(rng: random.Random) -> Call:
    shapes, params, grads, counters, residuals, options = parts(rng)
    f32 = torch.float32
    factored = [len(shape) > 1 for shape in shapes]
    momentum, with_rms = rng.random() < 0.5, rng.random() < 0.5
    lists = {"params": params, "grads": grads}
    lists["row_vars"] = [
        tensor(rng, shape[:-1] if f else (0,), f32) for shape, f in zip(shapes, factored)
    ]
    lists["col_vars"] = [
        tensor(rng, (*shape[:-2], shape[-1]) if f else (0,), f32)
        for shape, f in zip(shapes, factored)
    ]
    lists["variances"] = [
        tensor(rng, (0,) if f else shape, f32) for shape, f in zip(shapes, factored)
    ]
    lists["exp_avgs"] = [tensor(rng, shape, f32) for shape in shapes] if momentum else []
    lists["rms_values"] = [tensor(rng, (), f32) for _ in shapes] if with_rms else []
    lists |= {"state_steps": counters, "residuals": residuals}
    rule = {"hf": rng.random() < 0.5, "lr": 1e-2, "beta2_decay": -0.8, "eps1": 1e-30, "eps2": 1e-3}
    rule |= {"clip_threshold": 1.0, "weight_decay": 0.0, "beta1": 0.9 if momentum else 0.0}
    rule |= {"scale_parameter": True, "relative_step": True, "warmup_init": False}
    return Call("adafactor_", lists, **rule, **options)


def muon_places(rng: random.Random, shapes: list) -> list[Tensor]:
    """Updates whose rows or columns are dense."""
    dtypes = [rng.choice(FLOATS) for _ in shapes]
    turned = [rng.random() < 0.5 for _ in shapes]
    return [
        tensor(rng, shape[::-1], dtype).T if turn else tensor(rng, shape, dtype)
        for shape, dtype, turn in zip(shapes, dtypes, turned)
    ]


MATRICES = ((3, 4), (1, 5), (0, 3), (70, 5), (40, 300))


def muon_momentum(rng: random.Random) -> Call:
    shapes = [rng.choice(MATRICES) for _ in range(rng.randrange(4))]
    size, in_codes = rng.choice([64, 128, 256, 512]), rng.random() < 0.5
    scales = [(-(-math.prod(shape) // size),) for shape in shapes if in_codes]
    lists = {
        "grads": [tensor(rng, shape, rng.choice(FLOATS)) for shape in shapes],
        "moments": [
            tensor(rng, shape, torch.uint8 if in_codes else rng.choice(FLOATS)) for shape in shapes
        ],
        "absmaxs": [tensor(rng, shape, torch.float32) for shape in scales],
        "updates": muon_places(rng, shapes),
        "squares": tensor(rng, (len(shapes),), torch.float32),
    }
    rule = {"momentum": 0.95, "nesterov": rng.random() < 0.5, "maximize": False}
    options = scalars(rng, ("grad_scale", "found_inf", "clip_coef"))
    return Call("muon_momentum_", lists, block_size=size, **rule, **options)


def muon_update(rng: random.Random) -> Call:
    shapes = [rng.choice(MATRICES) for _ in range(rng.randrange(4))]
    residuals, options, dtypes = weights(rng, shapes)
    dtypes = dtypes or [rng.choice(FLOATS) for _ in shapes]
    rows = [shape[:1] for shape in shapes] if rng.random() < 0.5 else []
    counted = shapes if rng.random() < 0.8 else []
    lists = {
        "params": [tensor(rng, shape, dtype) for shape, dtype in zip(shapes, dtypes)],
        "updates": muon_places(rng, shapes),
        "row_vars": [tensor(rng, shape, torch.float32) for shape in rows],
        "state_steps": [torch.tensor(3.0) for _ in counted],
        "residuals": residuals,
    }
    rule = {"lr": 1e-3, "weight_decay": 0.1, "beta2": 0.95, "scales": [1.0] * len(shapes)}
    options |= scalars(rng, ("found_inf", "lr_tensor"))
    return Call("muon_update_", lists, **rule, **options)


def newton_schulz(rng: random.Random) -> Call:
    batch, m, n = rng.choice([(3, 4, 9), (1, 5, 5), (0, 2, 3), (2, 1, 70)])
    tensors = {
        "x": torch.ones(batch, m, n, dtype=rng.choice(FLOATS)),
        "squares": tensor(rng, (batch,), torch.float32),
        "workspace": torch.zeros(1 << 13, dtype=torch.uint8),
    }
    rule = {"coefficients": [3.4445, -4.775, 2.0315] * rng.randrange(1, 6), "eps": 1e-7}
    return Call("newton_schulz_", tensors, gram=rng.random() < 0.5, precision=0, **rule)


def unscale_norm(rng: random.Random) -> Call:
    grads = [tensor(rng, rng.choice(SHAPES), rng.choice(FLOATS)) for _ in range(rng.randrange(4))]
    options = scalars(rng, ("grad_scale", "clip_coef"))
    kinds = {"norm": (), "norms": (len(grads),), "found_inf": (), "culprit": (), "clip": ()}
    for name, shape in kinds.items():
        if rng.random() < 0.5:
            dtype = torch.int64 if name == "culprit" else torch.float32
            options[name] = tensor(rng, shape, dtype)
    name = rng.choice(["unscale_norm_", "grad_norm"])
    return Call(name, {"grads": grads}, p=rng.choice([1.0, 2.0, math.inf]), **options)


def update_scale(rng: random.Random) -> Call:
    kinds = (torch.float32, torch.int32, torch.int32, torch.float32)
    names = ("scale", "growth_tracker", "hysteresis_tracker", "found_inf")
    return Call("update_scale_", {n: tensor(rng, (), kind) for n, kind in zip(names, kinds)})


def of_lists(op: ListOp) -> Callable[[random.Random], Call]:
    """Calls of an element-wise op, from what it says of its lists, and from its schema."""

    def make(rng: random.Random) -> Call:
        shapes = [rng.choice(SHAPES) for _ in range(rng.randrange(4))]
        lists = {
            name: []
            if name in op.may_be_empty and rng.random() < 0.5
            else [tensor(rng, shape, rng.choice(dtypes)) for shape in shapes]
            for name, dtypes in op.lists.items()
        }
        call = Call(op.name, lists)
        for name, argument in call.kinds.items():
            if str(argument.type) == "bool":
                call.options[name] = rng.random() < 0.5
            elif name in op.scalars and rng.random() < 0.3:
                call.options[name] = tensor(rng, (), torch.float32)
        return call

    return make


def join_weights(rng: random.Random) -> Call:
    shapes = [rng.choice(SHAPES) for _ in range(rng.randrange(4))]
    residuals, options, dtypes = weights(rng, shapes)
    params = [tensor(rng, shape, torch.bfloat16) for shape in shapes]
    values = [tensor(rng, shape, torch.float32) for shape in shapes]
    mode = options["weights_mode"]
    if rng.random() < 0.5:
        lists = {"values": values, "params": params, "residuals": residuals}
        return Call("join_weights_", lists, weights_mode=mode)
    lists = {"params": params, "residuals": residuals, "values": values}
    return Call("split_weights_", lists, weights_mode=mode)


def gemm_into(rng: random.Random) -> Call:
    dtype, (m, n, k) = rng.choice(FLOATS), (rng.choice([0, 1, 5, 33]) for _ in range(3))
    out = rng.choice([dtype, torch.float32])
    transpose_a, transpose_b = (rng.random() < 0.5 for _ in range(2))
    lists = {
        "c": tensor(rng, (m, n), out),
        "a": tensor(rng, (k, m) if transpose_a else (m, k), dtype),
        "b": tensor(rng, (n, k) if transpose_b else (k, n), dtype),
        "bias": tensor(rng, (n,), out) if rng.random() < 0.5 else None,
    }
    rule = {"transpose_a": transpose_a, "transpose_b": transpose_b, "precision": 0}
    rule |= {"alpha": rng.choice([1.0, -2.0]), "beta": rng.choice([0.0, 1.0])}
    return Call("gemm_", lists, **rule)


def of_rows(op: RowOp, name: str) -> Callable[[random.Random], Call]:
    """Calls of an op on rows, or of one of its gradient, from what it says of its tensors."""

    def make(rng: random.Random) -> Call:
        given = right_call(rng, op, name)
        kinds = {argument.name: str(argument.type) for argument in arguments_of(name)}
        if "grad" in given and rng.random() < 0.3:  # over the first tensor
            given["grad"] = given[next(iter(op.kinds))]
        tensors = {key: value for key, value in given.items() if "Tensor" in kinds[key]}
        return Call(name, tensors, **{k: v for k, v in given.items() if k not in tensors})

    return make


CALLS = (adamw, adamw, adamw8bit, adamw8bit, momentum, momentum, adafactor, adafactor)
CALLS += (muon_momentum, muon_update, newton_schulz, unscale_norm, update_scale)
CALLS = (
    *CALLS,
    join_weights,
    gemm_into,
    *map(of_lists, LIST_OPS.values()),
    *(of_rows(op, name) for op in ROW_OPS.values() for name in op.ops if is_described(op, name)),
)

# ---- One case ------------------------------------------------------------------------------------


def has_data(tensor: Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.is_meta:
        return False
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0  # not freed


def memory(tensor: Tensor) -> bytes:
    """All bytes of its storage, its own and those of others."""
    storage = tensor.untyped_storage()
    return bytes(torch.empty(0, dtype=torch.uint8).set_(storage).tolist())


def case(rng: random.Random) -> str:
    call = rng.choice(CALLS)(rng)
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        call.spoil(rng)
    given = call.tensors()
    real = [(name, each) for name, each in given if has_data(each)]
    before = {each.untyped_storage()._cdata: memory(each) for _, each in real}
    where = {each.untyped_storage()._cdata: each for _, each in real}
    try:
        call.run()
    except RuntimeError as error:
        for key, each in where.items():
            assert memory(each) == before[key], f"{call.op} failed and wrote: {error}"
        assert str(error), f"{call.op} failed without a word"
        return "refused"
    without = [name for name, each in given if not has_data(each)]
    if any(each.numel() for name, each in real if name.split("[")[0] in call.lists):
        assert not without, f"{call.op} took {without}, which have no data"
    written = [each for name, each in real if call.kinds[name].is_write]
    allowed = {key: bytearray(len(content)) for key, content in before.items()}
    for each in written:
        mark(each, allowed[each.untyped_storage()._cdata])
    for key, each in where.items():
        for now, then, may in zip(memory(each), before[key], allowed[key]):
            assert now == then or may, f"{call.op} wrote outside of what its schema says"
    return "accepted"


def mark(tensor: Tensor, allowed: bytearray) -> None:
    """Marks the bytes of a tensor's elements in its storage."""
    positions = torch.arange(len(allowed) // tensor.element_size())
    own = positions.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    for position in own.flatten().tolist():
        start = position * tensor.element_size()
        allowed[start : start + tensor.element_size()] = b"\1" * tensor.element_size()


if __name__ == "__main__":
    sys.exit(main(case))
