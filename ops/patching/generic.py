"""Norms and Linears of any module."""

from __future__ import annotations

import functools
from collections.abc import Hashable

import torch
from torch import nn

from .._core.rows import autocast_dtype
from ..functional.linear import SLOW_ON_CPU, linear_forward
from .changes import Changes, is_patched
from .norms import NAME, NormRule, is_norm, norm_forward, recognized_norm
from .report import PatchReport

INTERNAL = vars(nn.Module()).keys() - {"training"}


def _obstacle(module: nn.Module) -> str | None:
    """Returns why no forward can be set on a module, or None."""
    if "forward" in vars(module):
        return "something else has replaced its forward"
    if any(p is not None and type(p) is not nn.Parameter for p in module._parameters.values()):
        return "its weights are tensors of another class, such as DTensors"
    return None


def swap_norms(model: nn.Module, changes: Changes, report: PatchReport) -> None:
    """Swaps the norms of a model that nothing has changed or claimed before.

    Only the ``forward`` of instances is set. Hooks of the modules themselves run as before.
    """
    tried: dict[Hashable, NormRule | str] = {}  # by what decides the result
    for name, module in model.named_modules():
        if is_patched(module) or report._is_claimed(module):
            continue
        if isinstance(module, torch.jit.ScriptModule):
            if NAME.search(module.original_name):
                report._leave(name, module, "it is compiled by torch.jit")
            continue
        if is_norm(module):
            rule = _obstacle(module) or _tried(module, tried)
            if isinstance(rule, str):
                report._leave(name, module, rule)
            else:
                forward = functools.partial(norm_forward, module, rule)
                changes.set(module, "forward", forward)
                function = "rms_norm" if rule.kind == "RMSNorm" else "layer_norm"
                report._swap(name, module, rule.kind, f"headroom.functional.{function}")


def swap_linears(model: nn.Module, changes: Changes, report: PatchReport) -> None:
    """Swaps the Linears on the CPU in dtypes, or under an autocast to one, that torch has no fast
    product for on this processor."""
    lowered = autocast_dtype("cpu")
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or module.weight.device.type != "cpu":
            continue
        if (lowered or module.weight.dtype) not in SLOW_ON_CPU:
            continue
        if (reason := _obstacle(module)) is not None:
            report._leave(name, module, reason)
            continue
        changes.set(module, "forward", functools.partial(linear_forward, module))
        report._swap(name, module, "Linear", "headroom.functional.linear")


def _tried(module: nn.Module, tried: dict[Hashable, NormRule | str]) -> NormRule | str:
    """Returns the result of a trial, after which the attributes of the module are what they were.
    A module that sets some of them when it is called does more than a rule says."""
    attributes = dict(vars(module))
    rule = _norm_rule(module, tried)
    now = vars(module)
    if now.keys() == attributes.keys() and all(now[key] is attributes[key] for key in attributes):
        return rule
    now.clear()
    now.update(attributes)
    return "its forward sets attributes of its own"


def _norm_rule(module: nn.Module, tried: dict[Hashable, NormRule | str]) -> NormRule | str:
    """Returns the result of a trial, or of that of a module with the same class, attributes and
    shapes, which decide what a norm computes."""
    vectors = tuple(
        (name, None if p is None else (p.shape, p.dtype, p.device))
        for name, p in module._parameters.items()
    )
    try:
        own = frozenset(item for item in vars(module).items() if item[0] not in INTERNAL)
    except TypeError:  # an attribute that cannot be compared with others
        return recognized_norm(module)
    key = type(module), own, vectors
    if key not in tried:
        tried[key] = recognized_norm(module)
    return tried[key]
