"""Optimizers that take the place of a given one, with its parameter groups and options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..optim import (
    SGD,
    Adafactor,
    Adam,
    Adam8bit,
    AdamW,
    AdamW8bit,
    Lion,
    Lion8bit,
    Muon,
    Muon8bit,
    Optimizer,
    SGD8bit,
)
from ..param_states.memory import state_memory
from ..param_states.paging import planned_paging

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# Options of Muon's groups that its constructor takes for all of them, or finds by names.
_OF_MATRICES = {"use_muon", "transposed", "split", "betas", "amsgrad"}
# The classes of a rule: those of Headroom by kind, and torch's.
_RULES: list[tuple[dict[str, Any], Any]] = [
    ({"headroom": AdamW, "8bit": AdamW8bit, "adafactor": Adafactor}, torch.optim.AdamW),
    ({"headroom": Adam, "8bit": Adam8bit, "adafactor": Adafactor}, torch.optim.Adam),
    ({"headroom": SGD, "8bit": SGD8bit}, torch.optim.SGD),
    ({"headroom": Lion, "8bit": Lion8bit}, None),
    ({"headroom": Muon, "8bit": Muon8bit}, torch.optim.Muon),
]


def optimizer_of(optimizer: Any, model: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer, or what the function makes of the model's parameters, or Muon of the
    model.

    Raises:
        TypeError: it is neither.
        ValueError: it has parameters that the model lacks.
    """
    if not hasattr(optimizer, "param_groups"):
        if not callable(optimizer):
            raise TypeError(
                f"optimizer is {type(optimizer).__name__}, wanted a torch.optim.Optimizer or a "
                "function that makes one from parameters, such as its class"
            )
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError("no parameter of the model requires a gradient: nothing is trained")
        optimizer = made_of(optimizer, model)
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"the function optimizer returned {optimizer!r}, wanted a torch.optim.Optimizer"
            )
    check_parameters(optimizer, model)
    return optimizer


def made_of(make: Callable[[Any], Any], model: nn.Module) -> Any:
    """Returns what a function makes of the parameters of a model that are trained, or Muon of the
    model: parameters alone do not say which are hidden matrices."""
    if getattr(getattr(make, "func", make), "takes_model", False):
        return make(model)
    return make([p for p in model.parameters() if p.requires_grad])


def check_parameters(optimizer: Any, model: nn.Module) -> None:
    """Refuses an optimizer of another model.

    Raises:
        ValueError: it has parameters that the model lacks.
    """
    own = {id(p) for p in model.parameters()}
    foreign = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in own]
    if foreign:
        raise ValueError(
            f"the optimizer has {len(foreign)} parameters that the model does not have, the first "
            f"of shape {list(foreign[0].shape)}: make it from model.parameters()"
        )


def is_headroom(optimizer: Any) -> bool:
    """Returns whether an optimizer is one of Headroom's, and not a wrapper."""
    return isinstance(optimizer, Optimizer)


def can_offload(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the state of an optimizer can lie on the host, and does not yet."""
    if not isinstance(optimizer, Optimizer) or optimizer._refuses_offload or optimizer._paging:
        return False
    try:
        return planned_paging(optimizer, 0).host > 0
    except (ValueError, RuntimeError):  # another device, or a dtype that will be another one
        return False


def counterparts(cls: type) -> dict[str, Any]:
    """Returns the classes of Headroom's optimizers of the same rule as a class, and Adafactor in
    the place of Adam and AdamW: by kind, "headroom", "8bit" and "adafactor".

    Empty for other classes.
    """
    for classes, torchs in _RULES:
        if cls in (classes["headroom"], classes["8bit"], torchs):
            return classes
    return {}


def counterparts_named(name: str) -> dict[str, Any]:
    """Returns the :func:`counterparts` of a class of any library, by its name."""
    for classes, _ in _RULES:
        if name in (classes["headroom"].__name__, classes["8bit"].__name__):
            return classes
    return {}


def obstacle(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns why no other optimizer may take the place of this one, or None."""
    kind = type(optimizer)
    if not counterparts(kind):
        return f"{kind.__name__} has no counterpart: only Adam, AdamW, SGD, Lion and Muon have"
    is_sgd = counterparts(kind)["headroom"] is SGD
    if is_sgd and not any(group["momentum"] for group in optimizer.param_groups):
        return f"{kind.__name__} without momentum has no state"
    if optimizer.state:
        return "the optimizer has state already: training has begun"
    if any("initial_lr" in group for group in optimizer.param_groups) or hasattr(
        optimizer.step, "_wrapped_by_lr_sched"
    ):
        return (
            "a learning-rate scheduler was made for the optimizer, and would not see another: "
            "make it after fit(), from .optimizer"
        )
    if any(getattr(optimizer, name, None) for name in _HOOKS):
        return "the optimizer has hooks on its step"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "the optimizer is differentiable"
    return None


def replacement(
    given: torch.optim.Optimizer, kind: str, master: str | None = None
) -> torch.optim.Optimizer:
    """Returns an optimizer of the same parameters, in the same groups with the same options.

    Args:
        given: one of torch or Headroom that has :func:`counterparts`.
        kind: one of theirs. Adafactor has no ``betas`` and ``eps`` of Adam; its
            ``lr`` bounds the root mean square of a step, which is about what it is in Adam.
        master: how the bits that 16-bit weights lack are kept.
    """
    cls = counterparts(type(given))[kind]
    fixed: dict[str, Any] = {} if master is None else {"master": master}
    if cls is Adafactor:
        fixed |= {"semantics": "hf", "scale_parameter": False, "relative_step": False}
        accepted = {"lr", "weight_decay", "max_grad_norm"}
    else:
        if isinstance(given, (Muon, Muon8bit)):
            fixed |= {**given._whole_arguments, "split": None}  # its groups say their parts
        accepted = inspect.signature(cls).parameters.keys() - fixed.keys()
    source, kept = given.defaults, accepted
    if cls in (Muon, Muon8bit):
        kept = accepted | _OF_MATRICES
    groups = [
        {name: value for name, value in group.items() if name in kept or name not in source}
        for group in given.param_groups
    ]
    for group in groups:
        for name in {"master", "rounding", "seed", "state_dtype", "semantics"} - accepted:
            group.pop(name, None)
    defaults = {name: value for name, value in source.items() if name in accepted}
    made = cls(groups, **defaults, **fixed)
    if isinstance(given, (Muon, Muon8bit)):  # of groups that are added later
        made._split = given._split
    return made


def state_bytes(optimizer: Any, without: Iterable[Tensor] = ()) -> int:
    """Returns the bytes of the state that one of Headroom's optimizers has or will have.

    Args:
        without: the parameters that will get no gradient, and thus no state.
    """
    return sum(sum(row.bytes.values()) for row in state_memory(optimizer, without))
