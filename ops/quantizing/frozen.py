"""Quantizes the weights of a model that do not train and gives them back: for what finds out by
itself whether to, as ``headroom.fit`` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..functional.quantize_matrix import QuantizedMatrix, quantize_matrix
from ..nn.quantized import QuantizedLinear, quantized_weight
from ..nn.torch_encoder import call_linears
from .choice import choose, is_conv1d, joined, weight_of
from .quantize import check_finite, take, take_shape, why_none
from .transformers_config import describe

OPTIONS: dict[str, Any] = {"block_size": 64, "double": True}
"""Those of :func:`headroom.quantize`, if nobody says otherwise."""


def frozen_layers(model: nn.Module, optimizer: Any) -> tuple[list[str], str | None]:
    """Returns the names of the layers whose weights can be quantized, and why others cannot be:
    those that :func:`headroom.quantize` chooses, if they are frozen and the optimizer lacks them,
    since what it has may be trained later. One that is not made yet gets what trains."""
    try:
        chosen, reasons = choose(model, None)
    except (TypeError, ValueError) as error:
        return [], str(error)
    if not chosen:
        return [], why_none(model, reasons)
    frozen = [name for name, module in chosen.items() if not module.weight.requires_grad]
    if not frozen:
        return [], (
            f"no weight of a linear layer is frozen, and packed ones cannot train: {len(chosen)} "
            f"train, such as '{joined(next(iter(chosen)), 'weight')}'; call requires_grad_(False) "
            "of those that need not, as beside adapters"
        )
    held = {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
    free = [name for name in frozen if id(chosen[name].weight) not in held]
    if len(free) == len(frozen):
        return free, None
    first = next(name for name in frozen if name not in free)
    return free, (
        f"the optimizer has {len(frozen) - len(free)} frozen weights, such as "
        f"'{joined(first, 'weight')}', which are left: make it of parameters that require gradients"
    )


def _layers(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    return {name: model.get_submodule(name) for name in names}


def quantize_shapes(model: nn.Module, names: Sequence[str], to: str) -> None:
    """Turns layers of a copy of a model, which shares its weights, into layers of few bits that
    take no memory: their weights are on the meta device."""
    for module in _layers(model, names).values():
        take_shape(module, to)


def quantize_alike(model: nn.Module, names: Sequence[str], to: str) -> None:
    """Turns layers of a copy of a model, which shares its weights, into layers of few bits that
    take as long and no more memory than one layer of each shape: others share its codes."""
    known: dict[Any, QuantizedMatrix] = {}
    for module in _layers(model, names).values():
        weight = weight_of(module)
        key = weight.shape, weight.dtype, weight.device
        if key not in known:
            known[key] = quantize_matrix(weight, to, **OPTIONS)
        take(module, known[key])


class FrozenWeights:
    """The weights of layers of a model, which are quantized one at a time, in place.

    The memory of each is freed, whoever holds its Parameter, which is without elements until
    :meth:`give_back` fills it again: with the numbers of the codes.

    Raises:
        ValueError: an element is not finite; nothing is changed then.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._model, self._layers = model, _layers(model, names)
        self._before: dict[str, tuple[type[nn.Module], Any]] = {}
        for name, module in self._layers.items():
            check_finite(joined(name, "weight"), weight_of(module))

    def quantize(self, to: str) -> None:
        """Quantizes all. If it fails, :meth:`give_back` gives back those that were."""
        for name, module in self._layers.items():
            kind, weight = type(module), module.weight
            q = quantized_weight(weight_of(module), to, **OPTIONS)
            self._before[name] = kind, weight
            take(module, q)
            weight.data = weight.data.new_empty(0)
        call_linears(self._model)
        describe(self._model)

    def give_back(self) -> None:
        """Makes the layers what they were, with the numbers of their codes."""
        for name, (kind, weight) in self._before.items():
            layer: Any = self._layers[name]
            if isinstance(layer, QuantizedLinear):
                layer.release()
                layer.__class__ = kind
                found = layer.weight.data
                weight.data = found.t().contiguous() if is_conv1d(layer) else found
                layer.weight = weight
        self._before = {}
        describe(self._model)
