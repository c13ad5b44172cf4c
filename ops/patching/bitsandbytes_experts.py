"""Experts whose stacks bitsandbytes has put into 4 bits (``replace_parameter_4bit``): their codes
are read where they are, and no stack is decoded as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from .._core.surroundings import takes_ops
from ..nn.bitsandbytes import matrix_of
from ..nn.experts import ExpertsRule, QuantizedExperts, experts_forward
from ..nn.fused import known


def _stacks(module: Any) -> dict[str, tuple[Tensor, Any]] | None:
    """Returns the codes of each parametrized stack and what bitsandbytes knows of them, by name;
    None where something else has parametrized one of them."""
    found = {}
    for name, steps in module.parametrizations.items():
        kinds = [type(step).__name__ for step in steps]
        if kinds != ["Bnb4bitParametrization"]:
            return None
        found[name] = steps.original, steps[0].quant_state
    return found


def without_parametrizations(module: Any) -> Any:
    """Returns a module like one whose parameters bitsandbytes has parametrized, with parameters of
    their shapes and without values in their places; None where something else has parametrized
    one, and the module itself where nothing has."""
    if not is_parametrized(module):
        return module
    stacks = _stacks(module)
    if stacks is None:
        return None
    empty = {
        name: nn.Parameter(torch.empty(state.shape, dtype=state.dtype, device="meta"), False)
        for name, (_, state) in stacks.items()
    }
    children = {k: v for k, v in module._modules.items() if k != "parametrizations"}
    kind = type_before_parametrizations(module)
    return _with_parameters(module, kind, empty | module._parameters, children)


def _with_parameters(
    module: nn.Module, kind: type[nn.Module], parameters: dict[str, Any], children: dict[str, Any]
) -> Any:
    made: Any = kind.__new__(kind)
    vars(made).update(vars(module))
    vars(made)["_parameters"], vars(made)["_modules"] = parameters, children
    return made


class HeldExperts:
    """Holds the experts of a module between calls as :class:`QuantizedExperts`, whose codes are the
    module's, and so are scales, unless these are quantized, which bitsandbytes keeps in several
    tensors. All are Parameters, which no save level drops or moves. A copy holds nothing, and looks
    for the stacks of its own module when that is called.

    Attributes:
        rule: what the module computes, and what it keeps.
        found: the experts, or None.
    """

    def __init__(self, rule: ExpertsRule) -> None:
        self.rule = rule
        self.found: QuantizedExperts | None = None
        self._source: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return HeldExperts, (self.rule,)

    def faked(self, fake: Callable[[Tensor], Tensor]) -> HeldExperts:
        """Returns what holds the experts for a copy of the module, with fakes of its tensors, whose
        values nobody can read.

        Args:
            fake: returns the fake of a tensor.
        """
        found, own = HeldExperts(self.rule), self.found
        if own is not None:
            fakes = {name: fake(p) for name, p in own._parameters.items() if p is not None}
            found.found = _with_parameters(own, QuantizedExperts, fakes, own._modules)
        return found

    @property
    def scales(self) -> list[Tensor]:
        """Returns the scales of the stacks."""
        return [] if self.found is None else [q.scales for q in self.found.stacks()]

    def hold(self, module: Any) -> QuantizedExperts:
        """Returns the experts.

        Raises:
            ValueError: the stacks cannot be read.
        """
        is_fake = self.found is not None and not self._source  # made of one moment
        if self.found is None or not (is_fake or self._is_of(module)):
            own = _stacks(module) or {}
            matrices = []
            for name in self.rule.stacks:
                codes, state = own[name]
                entries = {"weight": codes.detach()}
                entries |= {f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}
                matrices.append(matrix_of(entries, tuple(state.shape), torch.float16))
            dense = without_parametrizations(module)
            self.found = QuantizedExperts.take(dense, self.rule, matrices)
            self._source = self._sources(module)
        for name in self.rule.parameters[2:]:
            self.found._parameters[name] = module._parameters[name]
        return self.found

    def _is_of(self, module: Any) -> bool:
        """Returns whether the module still has the tensors that are held."""
        return self._source == self._sources(module)

    def _sources(self, module: Any) -> list[Any]:
        return [
            part
            for codes, state in (_stacks(module) or {}).values()
            for part in (codes.untyped_storage()._cdata, id(state.absmax))
        ]


def bitsandbytes_experts_forward(module: Any, held: HeldExperts, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of the forward of experts whose stacks bitsandbytes has parametrized."""
    rows = (dict(zip(held.rule.names, args)) | kwargs).get(held.rule.names[0])
    if not takes_ops(rows, (2,)) or _stacks(module) is None:  # PEFT is adding to a stack
        return type(module).forward(module, *args, **kwargs)
    return experts_forward(held.hold(module), held.rule, *args, **kwargs)


known.add(bitsandbytes_experts_forward)
