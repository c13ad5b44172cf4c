"""The feed-forward half of a transformer block as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._core.checks import check_choice
from ..functional.glu import ACTIVATIONS, glu
from .linear import Linear


class MLP(nn.Module):
    """``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` without a gate.

    Args:
        hidden_size: the size of the last dimension of inputs and results.
        features: how many values the activation gives per token.
        activation: "silu", "gelu", "gelu_tanh", "relu" or "relu_squared".
        gated: whether there is a gate. Gate and up are then one Linear, ``gate_up``, whose first
            ``features`` rows are the gate's.
        bias: whether the Linears have biases.
    """

    def __init__(
        self,
        hidden_size: int,
        features: int,
        *,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("activation", activation, ACTIVATIONS, "MLP: ")
        self.activation, self.gated = activation, gated
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        if gated:
            self.gate_up = Linear(hidden_size, 2 * features, **options)
        else:
            self.up = Linear(hidden_size, features, **options)
        self.down = Linear(features, hidden_size, **options)

    @property
    def first(self) -> Linear:
        """Returns the Linear in front of the activation."""
        return self.gate_up if self.gated else self.up

    def activate(self, x: Tensor) -> Tensor:
        """Returns the input of ``down``, given the result of ``first``."""
        return glu(x, activation=self.activation, packed=self.gated)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activate(self.first(x)))

    def extra_repr(self) -> str:
        return f"activation={self.activation}, gated={self.gated}"
