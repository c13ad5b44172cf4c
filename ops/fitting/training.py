"""What a training step works on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ..grad.accumulate import GradAccumulator

__all__ = ["Training", "training_of", "unwrapped"]


@dataclasses.dataclass(frozen=True)
class Training:
    """What a training step changes.

    Attributes:
        undo: whether optimizers that write before they have allocated everything are copied.
        copies_on_host: whether these copies are in the memory of the host from the start.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    scaler: GradScaler | None = None
    accumulator: GradAccumulator | None = None
    undo: bool = True
    copies_on_host: bool = False

    def modules(self) -> list[nn.Module]:
        """Returns the modules, each once. Every step asks for them, and ``model.modules()`` takes
        as long again at each level of the tree."""
        found, rest = {id(self.model): self.model}, [self.model]
        while rest:
            for module in rest.pop()._modules.values():
                if module is not None and id(module) not in found:
                    found[id(module)] = module
                    rest.append(module)
        return list(found.values())

    def params(self, modules: Sequence[nn.Module]) -> list[Tensor]:
        """Returns the parameters, each once.

        Args:
            modules: what :meth:`modules` returned.
        """
        # By id: a tensor takes longer to be hashed.
        found: dict[int, Tensor] = {
            id(param): param
            for module in modules
            for param in module._parameters.values()
            if param is not None
        }
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                found |= {id(param): param for param in group["params"]}
        return list(found.values())


def training_of(
    model: Any, optimizer: Any, scaler: Any, accumulator: Any, undo: bool = True
) -> Training:
    """Returns what a step works on.

    Raises:
        TypeError: an argument is of another class.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"retry_on_oom: model is {model!r}, wanted an nn.Module")
    given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    optimizers = tuple(unwrapped(one) for one in given)
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise TypeError(f"retry_on_oom: optimizer is {one!r}, wanted a torch.optim.Optimizer")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"retry_on_oom: scaler is {scaler!r}, wanted a torch.amp.GradScaler")
    if accumulator is not None and not isinstance(accumulator, GradAccumulator):
        raise TypeError(
            f"retry_on_oom: accumulator is {accumulator!r}, wanted a headroom.GradAccumulator"
        )
    return Training(model, optimizers, scaler, accumulator, undo)


def unwrapped(optimizer: Any) -> Any:
    """Returns the optimizer in wrappers such as accelerate's, which is an Optimizer too."""
    while hasattr(optimizer, "optimizer"):
        inner = optimizer.optimizer
        if isinstance(optimizer, Optimizer) and not isinstance(inner, Optimizer):
            break
        optimizer = inner
    return optimizer
