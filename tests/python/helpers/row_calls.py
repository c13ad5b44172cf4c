"""Right calls of ops on rows, from what each says of its tensors (headroom._core.row_ops)."""

from __future__ import annotations

import random
from math import prod

import torch
from headroom._core.row_ops import MATRIX, Kind, RowOp
from torch import Tensor

ROWS = ((3,), (), (0,), (2, 3))
COLS = (1, 6, 70)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PAD = 8  # elements on both sides of a tensor, which nobody may write
NUMBERS = {"float": (0.5, 1.0), "bool": (False, True)}  # which every op takes; others: 0 and 1


def arguments_of(name: str) -> list:
    return getattr(torch.ops.headroom, name).default._schema.arguments


def is_described(op: RowOp, name: str) -> bool:
    """Whether the op says what each tensor is that a call of `name`, one of its ops, needs."""
    return all(op.kind_of(a.name) for a in arguments_of(name) if str(a.type) == "Tensor")


def padded(rng: random.Random, shape: tuple, dtype: torch.dtype, most: int = 100) -> Tensor:
    """A tensor in the middle of its memory; integers are less than `most`."""
    numel = prod(shape)
    if dtype.is_floating_point:
        memory = torch.empty(numel + 2 * PAD).uniform_(0.5, 1.5).to(dtype)
    else:
        memory = torch.randint(0, most, (numel + 2 * PAD,)).to(dtype)
    return memory[PAD : PAD + numel].view(shape)


def right_call(rng: random.Random, op: RowOp, name: str, rows: tuple = ROWS) -> dict:
    """Arguments of `name`, which is the op or one of its gradient, by name."""
    arguments = arguments_of(name)
    given = {
        a.name: rng.choice(NUMBERS.get(str(a.type), (0, 1)))
        for a in arguments
        if "Tensor" not in str(a.type)
    }
    first = next(iter(op.kinds))
    if first not in {a.name for a in arguments}:
        first = next(a.name for a in arguments if op.kind_of(a.name) == MATRIX)
    shape, cols, dtype = rng.choice(rows), rng.choice(COLS), rng.choice(FLOATS)
    given[first] = padded(rng, (*shape, cols), dtype)
    sizes = {"rows": shape, "count": (prod(shape),), "cols": (cols,)}
    for argument in arguments:
        described = op.kind_of(argument.name)
        if argument.name in given:
            continue
        given[argument.name] = None
        is_optional = "Optional" in str(argument.type)
        if described is None or (is_optional and rng.random() < 0.4):
            continue
        own = _own_sizes(op, given)
        wanted = _shape(rng, described, sizes, own)
        types = described.dtypes or (dtype,)
        given[argument.name] = padded(rng, wanted, rng.choice(types), most=cols)
    return {argument.name: given[argument.name] for argument in arguments}


def _own_sizes(op: RowOp, given: dict) -> dict:
    try:
        own = {} if op.sizes is None else op.sizes(**given)
    except (TypeError, RuntimeError, AttributeError):  # of what is not there yet, or is wrong
        return {}
    return {name: size if isinstance(size, tuple) else (size,) for name, size in own.items()}


def _shape(rng: random.Random, described: Kind, sizes: dict, own: dict) -> tuple:
    found: tuple = ()
    for word in rng.choice(described.shapes).split():
        if word.isdigit():
            found += (int(word),)
        else:
            known = own.get(word) or sizes.setdefault(word, (rng.choice(COLS),))
            found += known
    return found
