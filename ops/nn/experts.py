"""The experts of a mixture as a module of transformers holds them, computed by one op."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from .._core.registration import FLOATS
from .._core.rows import autocast_dtype
from .._core.surroundings import is_plain, takes_ops
from ..functional.experts import experts
from .fused import is_untouched


@dataclasses.dataclass(frozen=True)
class ExpertsRule:
    """Says what a module of experts computes, and what it keeps.

    Attributes:
        names: of the arguments of its forward: rows, indices and weights.
        stacks: the names of its parameters: the matrices in front of the activation and behind it.
        has_bias: whether there are biases, whose names end in ``_bias``.
        options: of :func:`headroom.functional.experts`.
    """

    names: tuple[str, ...]
    stacks: tuple[str, str]
    has_bias: bool
    options: dict[str, Any]

    @property
    def parameters(self) -> tuple[str, ...]:
        biases = [f"{name}_bias" for name in self.stacks] if self.has_bias else []
        return *self.stacks, *biases

    def at(self, save: str) -> ExpertsRule:
        return dataclasses.replace(self, options=self.options | {"save": save})


def experts_forward(module: Any, rule: ExpertsRule, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of the forward of a module of experts."""
    given = dict(zip(rule.names, args)) | kwargs
    if len(args) > 3 or given.keys() != {*rule.names} or not _takes(module, rule, given):
        return type(module).forward(module, *args, **kwargs)
    x, index, weight = (given[name] for name in rule.names)
    gate_up, down, *biases = (getattr(module, name) for name in rule.parameters)
    given = dict(zip(("gate_up_bias", "down_bias"), biases)) | rule.options
    rows = x
    if autocast_dtype(x.device.type) is None:
        # As transformers does: in the dtype of the stacks, and the result in that of the rows.
        rows = x.to(gate_up.dtype)
        weight = weight if weight.dtype == rows.dtype else weight.float()
    return experts(rows, index, weight, gate_up, down, **given).to(x.dtype)


def _takes(module: nn.Module, rule: ExpertsRule, given: dict[str, Any]) -> bool:
    """Returns whether the op takes the arguments and the stacks of a call."""
    x, index, weight = (given[name] for name in rule.names)
    if not (takes_ops(x, (2,)) and takes_ops(weight, (2,)) and is_plain(index)):
        return False
    if not all(map(is_untouched, module.children())):
        return False  # its activation has got hooks since
    stacks = [module._parameters.get(name) for name in rule.parameters]
    plain = [p for p in stacks if p is not None and is_plain(p)]
    return (
        len(plain) == len(stacks)
        and index.dtype == torch.int64
        and {p.dtype for p in plain} <= {plain[0].dtype}.intersection(FLOATS)
        and {p.device for p in plain} == {x.device}
    )
