"""Modules that use a matrix in their own way, such as routers, with low-rank adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .lora import LoRALayer


class LoRAWeight(LoRALayer):
    """A module that is called with the sum of its ``weight`` ``[out, in]`` and of ``scale * B A``.

    The sum is made in each call, in the dtype of the weight: this is for small matrices, such as
    those of routers, to which PEFT gives adapters by ``target_parameters`` and by its "all-linear".

    Args:
        base_layer: the module, which stays as it is.

    Attributes:
        adapters, active, enabled: as of :class:`LoRALinear`.
    """

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def matrices(self, name: str) -> tuple[Tensor, Tensor]:
        return self.lora_A[name], self.lora_B[name]

    def own_matrices(self, name: str) -> list[nn.Parameter]:
        return [self.lora_A[name], self.lora_B[name]]

    def base_matrix(self) -> Tensor:
        raise ValueError("DoRA is for linear layers and embeddings")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        weight = self.weight
        for name in self.added:
            a, b = (each.to(weight.dtype) for each in self.matrices(name))
            with torch.autocast(weight.device.type, enabled=False):
                weight = weight + self.adapters[name].scale * (b @ a)
        return functional_call(self.base_layer, {"weight": weight}, args, kwargs)

    def _add_matrices(self, name: str, rank: int, options: dict[str, Any]) -> None:
        a = torch.empty((rank, self.in_features), **options)
        self.lora_A[name] = nn.Parameter(nn.init.kaiming_uniform_(a, a=5**0.5))
        self.lora_B[name] = nn.Parameter(torch.zeros((self.out_features, rank), **options))

    def _parts(self) -> tuple[Any, ...]:
        return self.lora_A, self.lora_B


def holds_matrix(module: nn.Module) -> bool:
    """Returns whether a module has a dense matrix by the name of ``weight``, or adapters of it."""
    if isinstance(module, LoRAWeight):
        return True
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and weight.is_floating_point()
