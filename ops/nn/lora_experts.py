"""Modules of experts with low-rank adapters beside their frozen stacks of matrices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .experts import (
    ExpertsRule,
    LowRankStack,
    QuantizedExperts,
    experts_computed,
    experts_forward,
    stack_shape,
)
from .fused import is_untouched
from .lora import Adapter, joined
from .switched import Switched


class LoRAExperts(Switched):
    """The experts of a mixture with adapters: the matrix of expert e in a stack is ``W[e] + sum of
    scale * B[e] A[e]``, ``[out, in]``, which is never made: :func:`headroom.functional.experts`
    multiplies with A and with B.

    Names of parameters are ``lora_A.default.gate_up_proj`` ``[experts, rank, in]`` and
    ``lora_B.default.gate_up_proj`` ``[experts, out, rank]``, and those of the base in
    ``base_layer``; ``in`` and ``out`` are what an expert reads and gives, however its stack lies in
    memory. A call that the op does not take, such as one in float64, is one of the base with whole
    stacks of sums.

    Args:
        base_layer: the module of experts, which stays as it is. What :func:`headroom.patch` has
            made of it decides what is kept for the backward pass; without it, it is "L1".
        rule: what the module computes.

    Attributes:
        adapters: the :class:`Adapter` of each stack, by the name of the stack, of each name.
        active: names of the adapters that are added up.
        enabled: whether any is.
    """

    def __init__(self, base_layer: nn.Module, rule: ExpertsRule) -> None:
        super().__init__()
        self.base_layer, self._given = base_layer, rule
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        self.adapters: dict[str, Mapping[str, Adapter]] = {}
        self.train(base_layer.training)

    @property
    def rule(self) -> ExpertsRule:
        """Returns what the base computes now, which may be put into few bits, and be decoded."""
        base: Any = self.base_layer
        if isinstance(base, QuantizedExperts):
            return base.rule
        options = self._given.options | {"transposed": base.is_transposed}
        return dataclasses.replace(self._given, options=options)

    @property
    def names(self) -> list[str]:
        return [*self.adapters]

    def matrices(self, name: str, stack: str) -> tuple[nn.Parameter, nn.Parameter]:
        """Returns A and B of the adapter of a stack."""
        held_a: Any = self.lora_A[name]
        held_b: Any = self.lora_B[name]
        return held_a[stack], held_b[stack]

    def trained(self, name: str) -> list[nn.Parameter]:
        return [one for stack in self.adapters[name] for one in self.matrices(name, stack)]

    def add_adapter(
        self,
        name: str,
        adapters: Mapping[str, Adapter],
        dtype: torch.dtype | None = torch.float32,
    ) -> None:
        """Adds an adapter of some stacks, whose products are zero, and which is not active yet.

        Raises:
            ValueError: there is one of this name; or an adapter has dropout or DoRA.
        """
        if name in self.adapters:
            raise ValueError(f"there is an adapter {name!r} already")
        for adapter in adapters.values():
            check_adapter(adapter)
        held_a, held_b = nn.ParameterDict(), nn.ParameterDict()
        for stack, adapter in adapters.items():
            count, rows, cols = stack_shape(self.base_layer, self.rule, stack)
            options: dict[str, Any] = {
                "device": getattr(self.base_layer, stack).device,
                "dtype": dtype,
            }
            a = torch.empty((count, adapter.rank, cols), **options)
            # As nn.Linear initializes the weight of each expert.
            nn.init.kaiming_uniform_(a.view(-1, cols), a=math.sqrt(5))
            held_a[stack] = nn.Parameter(a)
            held_b[stack] = nn.Parameter(torch.zeros((count, rows, adapter.rank), **options))
        self.lora_A[name], self.lora_B[name] = held_a, held_b
        self.adapters[name] = dict(adapters)

    def delete_adapter(self, name: str) -> None:
        """Removes an adapter of this name, if there is one."""
        super().delete_adapter(name)
        if self.adapters.pop(name, None) is not None:
            del self.lora_A[name], self.lora_B[name]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        adapters = self.added_stacks()
        if not adapters:
            return self.base_layer(*args, **kwargs)
        if is_untouched(self.base_layer):
            y = experts_computed(self.base_layer, self._rule(), args, kwargs, adapters)
            if y is not None:
                return y
        if isinstance(self.base_layer, QuantizedExperts):
            raise RuntimeError(
                "experts in few bits with adapters are computed without a call of their module, "
                "which has hooks or another forward, or does not take these arguments"
            )
        return functional_call(self.base_layer, self._sums(adapters), args, kwargs)

    def added_stacks(self) -> dict[str, LowRankStack]:
        """Returns A, B and the scale of the sum of the ``added`` adapters, of each stack that some
        of them have."""
        found = {}
        for stack in self.rule.stacks:
            parts = [
                (*self.matrices(name, stack), self.adapters[name][stack].scale)
                for name in self.added
                if stack in self.adapters[name]
            ]
            if parts:
                found[stack] = joined(parts)
        return found

    def _rule(self) -> ExpertsRule:
        """Returns the rule with the level at which :func:`headroom.patch` has put the base."""
        own: Any = vars(self.base_layer).get("forward")
        if getattr(own, "func", None) is not experts_forward:
            return self.rule
        return self.rule.at(own.args[1].options["save"])

    def _sums(self, adapters: Mapping[str, LowRankStack]) -> dict[str, Tensor]:
        """Returns whole stacks, with what adapters add to them."""
        found = {}
        for stack, (a, b, scale) in adapters.items():
            weight: Any = getattr(self.base_layer, stack)
            with torch.autocast(weight.device.type, enabled=False):
                delta = b.to(weight.dtype) @ a.to(weight.dtype) * scale
                found[stack] = weight + (delta.mT if self.rule.options["transposed"] else delta)
        return found

    def extra_repr(self) -> str:
        ranks = (
            f"{name}: {', '.join(f'{stack} rank={one.rank}' for stack, one in adapters.items())}"
            for name, adapters in self.adapters.items()
        )
        return f"{'; '.join(ranks)}, active={[*self.active]}"


def check_adapter(adapter: Adapter) -> None:
    """Raises where an adapter has what one of experts cannot have.

    Raises:
        ValueError: it has dropout or DoRA.
    """
    if adapter.dropout:
        raise ValueError(
            f"dropout is {adapter.dropout}, wanted 0 where experts have adapters, of which nothing "
            "is dropped, as in PEFT"
        )
    if adapter.dora:
        raise ValueError(
            "dora is True, wanted False where experts have adapters: DoRA of stacks of matrices is "
            "not supported, as in PEFT"
        )
