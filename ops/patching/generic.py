"""Norms and Linears of any module."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from .._core.rows import autocast_dtype
from ..functional.linear import SLOW_ON_CPU, linear_forward
from .changes import Changes, is_patched
from .norms import NAME, NormRule, is_norm, norm_forward, recognized_norm
from .report import PatchReport

__all__ = ["swap_linears", "swap_norms"]

PLAIN = (int, float, bool, str, tuple, torch.dtype, torch.Size, type(None))
INTERNAL = vars(nn.Module()).keys() - {"training"}


def _obstacle(module: nn.Module) -> str | None:
    """Returns why no forward can be set on a module, or None."""
    if "forward" in vars(module):
        return "something else has replaced its forward"
    if any(p is not None and type(p) is not nn.Parameter for p in module._parameters.values()):
        return "its weights are tensors of another class, such as DTensors"
    return None


def _fingerprint(module: nn.Module) -> Hashable:
    """Returns the class and the attributes of a norm, which decide what it computes, so that
    modules that are alike are tried once; None where an attribute is not a plain value."""
    own: dict[str, Any] = {k: v for k, v in vars(module).items() if k not in INTERNAL}
    if not all(isinstance(value, PLAIN) for value in own.values()):
        return None
    vectors = tuple(
        (name, None if p is None else (p.shape, p.dtype, p.device))
        for name, p in module._parameters.items()
    )
    return type(module), tuple(sorted((k, repr(v)) for k, v in own.items())), vectors


def swap_norms(model: nn.Module, changes: Changes, report: PatchReport) -> None:
    """Swaps the norms of a model that nothing has changed or claimed before.

    Only the ``forward`` of instances is set. Hooks of the modules themselves run as before.
    """
    tried: dict[Hashable, NormRule | str] = {}
    for name, module in model.named_modules():
        if is_patched(module) or report.is_claimed(module):
            continue
        if isinstance(module, torch.jit.ScriptModule):
            if NAME.search(module.original_name):
                report.leave(name, module, "it is compiled by torch.jit")
            continue
        if is_norm(module):
            rule = _obstacle(module) or _tried(module, tried)
            if isinstance(rule, str):
                report.leave(name, module, rule)
            else:
                forward = functools.partial(norm_forward, module, rule)
                changes.set(module, "forward", forward)
                function = "rms_norm" if rule.kind == "RMSNorm" else "layer_norm"
                report.swap(name, module, rule.kind, f"headroom.functional.{function}")


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
            report.leave(name, module, reason)
            continue
        changes.set(module, "forward", functools.partial(linear_forward, module))
        report.swap(name, module, "Linear", "headroom.functional.linear")


def _tried(module: nn.Module, tried: dict[Hashable, NormRule | str]) -> NormRule | str:
    """Returns the result of a trial, after which the attributes of the module are what they were.
    A module that sets some of them when it is called does more than a rule says."""
    before = dict(vars(module))
    rule = _norm_rule(module, tried)
    after = vars(module)
    if after.keys() == before.keys() and all(after[key] is before[key] for key in before):
        return rule
    after.clear()
    after.update(before)
    return "its forward sets attributes of its own"


def _norm_rule(module: nn.Module, tried: dict[Hashable, NormRule | str]) -> NormRule | str:
    key = _fingerprint(module)
    if key is None:
        return recognized_norm(module)
    if key not in tried:
        tried[key] = recognized_norm(module)
    return tried[key]
