"""Passes the learning rate to the optimizer ops, and checks arguments of functions and of fakes.

A fake refuses while an op is traced what the op would refuse when it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from .registration import require

COUNTERS = (torch.float32, torch.float64)  # of step counts and learning rates


def check_number(name: str, value: Any, wanted: str = "a number") -> None:
    """Refuses an option of an optimizer that is not a number, before it is compared with one."""
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be {wanted}, got {value!r}")


def check_module(model: Any) -> None:
    """Refuses a model that is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {model!r}, wanted an instance of nn.Module")


def list_of_names(argument: str, names: Any) -> list[str]:
    """Returns the names of an argument, and refuses one that is a string or holds none."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"{argument} is {names!r}, wanted a list of names")
    return [*names]


def check_flags(**flags: Any) -> None:
    """Refuses options that are neither True nor False, which would be taken for one of them."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}, wanted True or False")


def check_choice(name: str, value: Any, choices: Iterable[str], owner: str = "") -> None:
    """Refuses an option that is none of ``choices``. ``owner`` begins the message."""
    if value not in [*choices]:  # of which a list does not ask for a hash
        raise ValueError(f"{owner}{name} is {value!r}, wanted one of {', '.join(choices)}")


def check_count(name: str, value: Any, least: int | None = None) -> None:
    """Refuses an option that is not an integer, of ``least`` or more if that is given."""
    if isinstance(value, bool) or not isinstance(value, (Integral, torch.SymInt)):
        raise TypeError(f"{name} is {value!r}, wanted an integer")
    if least is not None and value < least:
        raise ValueError(f"{name} is {value}, wanted {least} or more")


def check_pair(name: str, value: Any) -> None:
    """Refuses an option of an optimizer that is not a sequence of two."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise ValueError(f"{name} must be two numbers, got {value!r}")


def lr_arguments(lr: float | Tensor, device: torch.device) -> dict[str, Any]:
    """Returns the arguments of an op for a learning rate that is a number or a tensor."""
    if torch.compiler.is_compiling() and not isinstance(lr, Tensor):
        # A float in the call of an op is a constant of the graph, and a schedule would compile anew
        # every step. A product with a tensor lets torch.compile make it an input.
        lr = torch.ones((), dtype=torch.float64, device=device) * lr
    return {"lr": 0.0, "lr_tensor": lr} if isinstance(lr, Tensor) else {"lr": lr}


def check_list(
    name: str,
    tensors: Sequence[Tensor],
    params: Sequence[Tensor],
    dtypes: tuple[torch.dtype, ...],
    numels: Sequence[int] | None = None,
    leader: str = "params",
) -> None:
    """Requires one tensor per parameter, on the device of the first parameter, with the parameter's
    shape or, if ``numels`` is given, with that many elements. ``leader`` is what the parameters are
    called."""
    require(len(tensors) == len(params), f"{name} has {len(tensors)} tensors, wanted {len(params)}")
    for k, (tensor, param) in enumerate(zip(tensors, params)):
        one, device = f"{name}[{k}]", params[0].device
        require(tensor.device == device, f"{one} is on {tensor.device}, {leader}[0] on {device}")
        if numels is None:
            require(tensor.shape == param.shape, f"{one} has another shape than {leader}[{k}]")
        else:
            count = tensor.numel()
            require(count == numels[k], f"{one} has {count} elements, wanted {numels[k]}")
        require(tensor.dtype in dtypes, f"{one} is {tensor.dtype}, not among {dtypes}")


def check_scalars(options: dict[str, Any], params: Sequence[Tensor]) -> None:
    """Requires scalars on the device where the op reads them. A scalar on the meta device sends a
    call with real tensors to the fake, which would otherwise do nothing and raise nothing."""
    for name in ("lr_tensor", "grad_scale", "found_inf", "clip_coef"):
        if (tensor := options.get(name)) is None:
            continue
        dtypes = COUNTERS if name == "lr_tensor" else (torch.float32,)
        require(
            tensor.numel() == 1 and tensor.dtype in dtypes,
            f"{name} must be a tensor of one element with a dtype among {dtypes}",
        )
        where = {tensor.device for tensor in params[:1]}
        if name == "lr_tensor":
            where.add(torch.device("cpu"))
        require(
            not params or tensor.device in where,
            f"{name} is on {tensor.device}, wanted {' or '.join(map(str, where))}, of params[0]",
        )
