"""Quantizes the weights of a model that do not train and gives them back: for what finds out by
itself whether to, as ``headroom.fit`` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..functional.quantize_matrix import QuantizedMatrix, quantize_matrix
from ..nn.experts import QuantizedExperts
from ..nn.quantized import QuantizedLinear, quantized_weight
from ..nn.torch_encoder import call_linears
from .choice import Holder, choose, holders, is_conv1d, joined
from .quantize import check_finite, take_shape, why_none
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
    frozen = [name for name, one in chosen.items() if not one.trains]
    if not frozen:
        return [], (
            f"no weight of a linear layer is frozen, and packed ones cannot train: {len(chosen)} "
            f"train, such as '{_first(chosen)}'; call requires_grad_(False) "
            "of those that need not, as beside adapters"
        )
    held = {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
    free = [name for name in frozen if held.isdisjoint(map(id, chosen[name].params.values()))]
    if len(free) == len(frozen):
        return free, None
    taken = {name: chosen[name] for name in frozen if name not in free}
    return free, (
        f"the optimizer has {len(frozen) - len(free)} frozen weights, such as "
        f"'{_first(taken)}', which are left: make it of parameters that require gradients"
    )


def _first(held: Mapping[str, Holder]) -> str:
    name, one = next(iter(held.items()))
    return joined(name, next(iter(one.params)))


def _layers(model: nn.Module, names: Sequence[str]) -> dict[str, Holder]:
    found, _ = holders(model)
    return {name: found[name] for name in names}


def quantize_shapes(model: nn.Module, names: Sequence[str], to: str) -> None:
    """Turns layers of a copy of a model, which shares its weights, into layers of few bits that
    take no memory: their weights are on the meta device."""
    for one in _layers(model, names).values():
        take_shape(one, to)


def quantize_alike(model: nn.Module, names: Sequence[str], to: str) -> None:
    """Turns layers of a copy of a model, which shares its weights, into layers of few bits that
    take as long and no more memory than one layer of each shape: others share its codes."""
    known: dict[Any, QuantizedMatrix] = {}
    for one in _layers(model, names).values():
        alike = []
        for weight in one.weights.values():
            key = weight.shape, weight.dtype, weight.device
            if key not in known:
                known[key] = quantize_matrix(weight, to, **OPTIONS)
            alike.append(known[key])
        one.take(*alike)


class FrozenWeights:
    """The weights of layers of a model, which are quantized one at a time, in place.

    The memory of each is freed, whoever holds its Parameter, which is without elements until
    :meth:`give_back` fills it again: with the numbers of the codes.

    Raises:
        ValueError: an element is not finite; nothing is changed then.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._model, self._layers = model, _layers(model, names)
        self._before: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {}
        for name, one in self._layers.items():
            for key, weight in one.weights.items():
                check_finite(joined(name, key), weight)

    def quantize(self, to: str) -> None:
        """Quantizes all. If it fails, :meth:`give_back` gives back those that were."""
        for name, one in self._layers.items():
            kind, params = type(one.module), one.params
            found = [quantized_weight(w, to, **OPTIONS) for w in one.weights.values()]
            self._before[name] = kind, params
            one.take(*found)
            for param in params.values():
                param.data = param.data.new_empty(0)
        call_linears(self._model)
        describe(self._model)

    def give_back(self) -> None:
        """Makes the layers what they were, with the numbers of their codes."""
        for name, (kind, params) in self._before.items():
            layer: Any = self._layers[name].module
            if isinstance(layer, (QuantizedLinear, QuantizedExperts)):
                layer.release()
                layer.__class__ = kind
                for key, param in params.items():
                    found = getattr(layer, key).data
                    param.data = found.t().contiguous() if is_conv1d(layer) else found
                    setattr(layer, key, param)
        self._before = {}
        describe(self._model)
