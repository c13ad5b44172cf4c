"""Fuzzes load_state_dict of the optimizers: their own state dicts, with something changed.

A state dict is refused with ValueError, TypeError or KeyError, and the optimizer and the state dict
are the same afterwards; or it is taken, and then the optimizer steps, makes a state dict and gives
finite weights if the numbers that it took are of ordinary size.
"""

import copy
import random
import sys

import headroom
import torch
from tests.python.fuzz._driver import main, mutated, snapshot
from torch import Tensor

SHAPES = ((12, 8), (70,), (), (0, 3), (3, 4, 5))
BF16, F32 = torch.bfloat16, torch.float32
OPTIM = headroom.optim
KINDS = [
    (OPTIM.AdamW, {}, F32),
    (OPTIM.AdamW, {"amsgrad": True, "state_dtype": BF16}, F32),
    (OPTIM.Adam, {"maximize": True}, BF16),
    (OPTIM.AdamW, {"master": "remainder16"}, BF16),
    (OPTIM.AdamW, {"master": "remainder8", "rounding": "stochastic"}, BF16),
    (OPTIM.AdamW, {"master": "f32"}, BF16),
    (OPTIM.AdamW, {"rounding": "stochastic"}, BF16),
    (OPTIM.AdamW8bit, {"min_8bit_size": 16}, F32),
    (OPTIM.AdamW8bit, {"min_8bit_size": 16, "block_size": 64, "code_rounding": "stochastic"}, F32),
    (OPTIM.Adam8bit, {"min_8bit_size": 16, "master": "remainder8"}, BF16),
    (OPTIM.Adafactor, {}, F32),
    (OPTIM.Adafactor, {"semantics": "hf", "beta1": 0.9}, F32),
    (OPTIM.Adafactor, {"master": "remainder16"}, BF16),
]
ORDINARY = 1e6
OURS = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_absmax", "exp_avg_sq_absmax"}
OURS |= {"row_var", "col_var", "variance", "exp_avg_sq_row", "exp_avg_sq_col"}
OURS |= {"master", "remainder", "compensation"}


def grads(params: list[Tensor]) -> None:
    for param in params:
        param.grad = torch.empty_like(param).uniform_(-1, 1)


def trained(kind: int):
    make, options, dtype = KINDS[kind]
    params = [torch.nn.Parameter(torch.empty(s).uniform_(0.5, 1.5).to(dtype)) for s in SHAPES]
    groups = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.2}]
    optimizer = make(groups, **options)
    for _ in range(2):
        grads(params)
        optimizer.step()
    return params, optimizer


def case(rng: random.Random) -> str:
    params, optimizer = trained(rng.randrange(len(KINDS)))
    state = copy.deepcopy(optimizer.state_dict())
    changed = mutated(rng, state, rng.choice([1, 1, 1, 2, 3]))
    before, given = everything(optimizer, params), snapshot(changed)
    try:
        optimizer.load_state_dict(changed)
    except (ValueError, TypeError, KeyError) as error:
        assert str(error), "the error says nothing"
        assert everything(optimizer, params) == before, f"the optimizer has changed: {error!r}"
        outcome = "refused"
    else:
        outcome = "accepted"
        check_taken(optimizer)
    assert snapshot(changed) == given, "the state dict has changed"
    ordinary = is_ordinary(optimizer)
    grads(params)
    optimizer.step()
    copy.deepcopy(optimizer.state_dict())
    repr(optimizer)
    if ordinary:
        assert all(param.isfinite().all() for param in params), "weights are not finite"
    return outcome


def everything(optimizer: torch.optim.Optimizer, params: list[Tensor]):
    state = [optimizer.state.get(param) for param in params]
    return snapshot(list(params)), snapshot(state), snapshot(optimizer.param_groups)


def check_taken(optimizer: torch.optim.Optimizer) -> None:
    """No number that can only be garbled: second moments are not negative (a NaN is what torch's
    optimizers load and show), and scales are finite as well."""
    params = {param for group in optimizer.param_groups for param in group["params"]}
    for entry in (entry for param, entry in optimizer.state.items() if param in params):
        for name, value in entry.items():
            if not isinstance(value, Tensor) or name not in OURS:
                continue
            assert not value.is_meta and value.layout == torch.strided, f"'{name}' has no data"
            freed = value.numel() > 0 and value.untyped_storage().nbytes() == 0
            assert not freed, f"'{name}' was taken without memory"
            if value.dtype == torch.uint8:
                continue
            if "absmax" in name or "_sq" in name or name in ("row_var", "col_var", "variance"):
                assert not (value < 0).any(), f"'{name}' was taken with negative numbers"
            if "absmax" in name:
                assert value.isfinite().all(), f"'{name}' was taken with infinity"


def entries(optimizer: torch.optim.Optimizer) -> list[dict]:
    """What is kept for parameters and for anyone else."""
    return [entry for entry in optimizer.state.values() if isinstance(entry, dict)]


def has_data(value: Tensor) -> bool:
    if value.is_meta or value.layout != torch.strided:
        return False
    return value.numel() == 0 or value.untyped_storage().nbytes() > 0


def is_ordinary(optimizer: torch.optim.Optimizer) -> bool:
    def ordinary(value) -> bool:
        if isinstance(value, (list, tuple)):
            return all(map(ordinary, value))
        if isinstance(value, Tensor) and value.is_floating_point() and has_data(value):
            return bool((value.double().abs() < ORDINARY).all())
        return not isinstance(value, (int, float)) or abs(value) < ORDINARY

    options = [
        value
        for group in optimizer.param_groups
        for name, value in group.items()
        if name not in ("params", "seed")
    ]
    held = [value for entry in entries(optimizer) for value in entry.values()]
    return ordinary(options) and ordinary(held)


if __name__ == "__main__":
    sys.exit(main(case))
