"""Checks the arguments of ``headroom.fit`` and ``headroom.ladder``, and makes of them the step that
is trained, and the bytes that it may take."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from .._core.available import available
from .._core.checks import check_number
from .._core.sizes import parse_bytes
from ..host import default_arena
from ..memory.track import device_of
from ..step.checks import check_described
from ..step.description import Step
from ..step.optimizers import optimizer_of
from ..step.pytree import tensors_in
from ..techniques.technique import allowable, searched

MARGINS = {"cpu": 0.002, "cuda": 0.02}
"""The share of a budget that is left free: by which plans were wrong at the most where they were
compared with measured peaks."""

LEAST = 1024
"""Bytes. A number below it is not meant as bytes."""

UNSEEN = 16 << 10
UNSEEN_OF_BLOCK = 5056
"""Bytes that plans do not see: tables of the optimizer, and the state of the CPU's random numbers
that a block which is computed again keeps."""

FREE = {"cpu": 0.2, "cuda": 0.05}
"""The share of the free memory of a device that ``target="speed"`` leaves to everything else."""


def checked(step: Step) -> Step:
    """Returns a step of a user's arguments with its device and its optimizer.

    Raises:
        TypeError, ValueError: an argument does not fit; says which one, and what was wanted.
    """
    check_described(step)
    model, scaler = step.model, step.scaler
    device = device_of(model, step.device)
    for x in tensors_in(step.batch):
        if x.device != device:
            raise ValueError(
                f"sample_batch has a tensor on {x.device}, but the model is on {device}"
            )
    optimizer = torch.optim.AdamW if step.optimizer is None else step.optimizer
    return step.but(
        device=device,
        optimizer=optimizer_of(optimizer, model),
        scaler=scaler if scaler and scaler.is_enabled() else False,
    )


def allowed_of(allow: Any, needed: Collection[str] = ()) -> tuple[str, ...]:
    """Returns what may change the mathematics, and is allowed or needed.

    Raises:
        TypeError, ValueError: a name is unknown.
    """
    if not isinstance(allow, (str, list, tuple, set, frozenset)):
        raise TypeError(f'allow is {allow!r}, wanted names such as ("8bit", "bf16")')
    found = (allow,) if isinstance(allow, str) else tuple(allow)
    if wrong := [name for name in found if name not in allowable()]:
        raise ValueError(f"allow has {wrong[0]!r}, wanted some of {', '.join(allowable())}")
    return tuple(dict.fromkeys((*found, *needed)))


def check_margin(margin: Any) -> None:
    """Checks the share of a budget that is left free.

    Raises:
        TypeError, ValueError: it is none.
    """
    if margin is None:
        return
    check_number("margin", margin, "a share of the budget, such as 0.02")
    if not 0 <= margin < 1:
        raise ValueError(f"margin is {margin}, wanted a share of the budget from 0 to below 1")


def check_only(only: Any) -> None:
    """Checks the values that fields of a choice may have.

    Raises:
        TypeError: it is no dict of collections, or a value is of another type than the field.
        ValueError: a field is unknown, has no values, or has a number below 1.
    """
    wanted = 'wanted a dict of values for fields of a Choice, such as {"micro_batches": (2, 4)}'
    if only is not None and not isinstance(only, Mapping):
        raise TypeError(f"only is {only!r}, {wanted}")
    known = {technique.field: technique for technique in searched()}
    for name, values in (only or {}).items():
        if name not in known:
            raise ValueError(f"only has {name!r}, wanted some of {', '.join(sorted(known))}")
        if isinstance(values, str) or not isinstance(values, Collection):
            raise TypeError(f"only has {name}={values!r}, {wanted}")
        if not values:
            raise ValueError(
                f"only has {name}={values!r}, wanted one value or more; leave {name} out of it for "
                "any"
            )
        kind, least = type(known[name].default), known[name].least
        for value in values:
            if type(value) is not kind:  # True is no number of micro-batches
                raise TypeError(
                    f"only has {value!r} for {name}, wanted values of type {kind.__name__}"
                )
            if kind is int and value < least:
                raise ValueError(
                    f"only has {value} for {name}, wanted whole numbers from {least} on"
                )


def budget_of(
    budget: int | float | str | None, target: str | None, device: torch.device, held: int = 0
) -> int:
    """Returns the budget in bytes; ``held`` as in :func:`headroom._core.available.available`.

    Raises:
        ValueError: both or neither were given, ``target`` is unknown, or the budget is no size that
            can be meant.
    """
    if (budget is None) == (target is None):
        raise ValueError(
            f"budget is {budget!r} and target {target!r}, wanted one of them: a budget such as "
            '"6 GiB", or target="speed" for what the device has'
        )
    if budget is not None:
        size = parse_bytes(budget, "budget")
        if size < LEAST:
            raise ValueError(
                f'budget is {budget!r}, which is {size} bytes; write the unit, such as "6 GiB"'
            )
        return size
    if target != "speed":
        raise ValueError(f'target is {target!r}, wanted "speed"')
    return int((1 - FREE[device.type]) * available(device, held))


def host_room(host_budget: int | str | None) -> int | None:
    """Returns how many bytes may be on the host: the budget, or what the arena may have if that is
    less; None where there is no budget.

    Raises:
        TypeError, ValueError: it is no size.
    """
    if host_budget is None:
        return None
    size, arena = parse_bytes(host_budget, "host_budget"), default_arena()
    return min(size, arena.limit()[0] - arena.bytes)


def within(budget: int, margin: float | None, device: torch.device, blocks: int) -> int:
    """Returns what a plan may take: the budget without its margin, and without what plans do not
    see.

    Args:
        margin: the share that is left free, or None for that of the device.
        blocks: how many there are.
    """
    share = MARGINS[device.type] if margin is None else margin
    return max(0, int(budget * (1 - share)) - UNSEEN - UNSEEN_OF_BLOCK * blocks)
