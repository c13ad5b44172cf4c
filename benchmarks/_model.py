"""The parameters of whole models, and the steps of optimizers over them as users call them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ._limits import Rotation, filled, memory_bytes
from ._timing import Contender

Shapes = tuple[tuple[int, ...], ...]
OP_ONLY = "headroom, op only"


@dataclass(frozen=True)
class Model:
    name: str
    shapes: Shapes

    @property
    def numel(self) -> int:
        return sum(map(math.prod, self.shapes))

    def __str__(self) -> str:
        return f"{self.name}, {self.numel:,} parameters in {len(self.shapes):,} tensors"


def gpt2(name: str, layers: int, width: int, tokens: int, context: int) -> Model:
    """Two embeddings, then norms, matrices and biases (Radford et al., 2019). The head is tied."""
    norm = ((width,), (width,))
    attention = ((3 * width, width), (3 * width,), (width, width), (width,))
    mlp = ((4 * width, width), (4 * width,), (width, 4 * width), (width,))
    layer = (*norm, *attention, *norm, *mlp)
    return Model(name, ((tokens, width), (context, width), *layer * layers, *norm))


GPT2_MEDIUM = gpt2("GPT-2 medium", 24, 1024, 50257, 1024)
GPT2_SMALL = gpt2("GPT-2 small", 12, 768, 50257, 1024)
GPT2_PART = gpt2("GPT-2 small with 3 layers and 16,384 tokens", 3, 768, 16384, 1024)
TINY = gpt2("a tiny GPT-2", 1, 80, 64, 16)


def model_for(device: torch.device, quick: bool, bytes_per_element: int = 64) -> Model:
    """The largest that fits, with the states of all contenders, into a quarter of the memory."""
    if quick:
        return TINY
    models = [GPT2_MEDIUM, GPT2_SMALL] if device.type == "cuda" else []
    for model in models:
        if model.numel * bytes_per_element <= memory_bytes(device) // 4:
            return model
    return GPT2_PART


def filled_like(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    return [filled(math.prod(shape), dtype, device).view(shape) for shape in shapes]


def optimizer_step(
    data: Rotation,
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    work: int | None = None,
) -> Contender:
    """``step()`` of an optimizer with states of its own for each set of the rotation, whose sets
    have ``params`` and ``grads``."""
    optimizers: dict[int, Any] = {}
    for d in data.sets:
        params = [torch.nn.Parameter(param) for param in d.params]
        for param, grad in zip(params, d.grads):
            param.grad = grad
        optimizers[id(d)] = make(params)
    return Contender(lambda: optimizers[id(data.next())].step(), work=work)
