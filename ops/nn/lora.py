"""Linear layers with low-rank adapters beside a frozen weight."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._core.checks import check_count, check_flags, check_number
from .._core.grouping import grouped
from .._core.rows import autocast_dtype
from .._core.surroundings import takes_ops
from ..functional.linear import linear
from ..functional.lora import lora_linear
from ..functional.quantize_matrix import QuantizedMatrix
from .fused import is_known, known
from .linear import Linear
from .quantized import QuantizedLinear


@dataclasses.dataclass(frozen=True)
class Adapter:
    """The numbers of an adapter of a layer.

    Attributes:
        rank: rows of A and columns of B.
        alpha: what B A is multiplied with, times the rank, or its root with ``rslora``.
        dropout: the probability with which elements of x are zero in front of A, in training.
        rslora: whether ``scale`` is that of rsLoRA (Kalajdzievski, arXiv:2312.03732).

    Raises:
        TypeError: one of them has another type.
        ValueError: the rank is less than 1, alpha is not finite, or the dropout is not in [0, 1).
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    rslora: bool = False

    def __post_init__(self) -> None:
        check_count("rank", self.rank, 1)
        check_number("alpha", self.alpha)
        check_number("dropout", self.dropout)
        check_flags(rslora=self.rslora)
        if not math.isfinite(self.alpha):
            raise ValueError(f"alpha is {self.alpha}, wanted a finite number")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}, wanted a number in [0, 1)")

    @property
    def scale(self) -> float:
        """Returns what B A is multiplied with."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class LoRALinear(nn.Module):
    """A linear layer with adapters: ``base_layer(x) + sum of scale * B A dropout(x)`` (Hu et al.,
    arXiv:2106.09685).

    A and B may be wider than x: their products are in the dtype of x, or of autocast, and their
    gradients in their own. Names of parameters are those of PEFT: ``lora_A.default.weight``
    ``[rank, in]``, ``lora_B.default.weight`` ``[out, rank]``, and ``base_layer.weight``.

    Args:
        base_layer: ``nn.Linear``, :class:`Linear4bit`, :class:`Linear8bit`, or another module that
            multiplies its input with a matrix; it is called as it is.

    Attributes:
        adapters: the :class:`Adapter` of each name.
        active: names of the adapters that are added up.
        enabled: whether any is.
    """

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        self.adapters: dict[str, Adapter] = {}
        self.active: tuple[str, ...] = ()
        self.enabled = True
        self.train(base_layer.training)

    @property
    def in_features(self) -> int:
        return features_of(self.base_layer)[0]

    @property
    def out_features(self) -> int:
        return features_of(self.base_layer)[1]

    @property
    def weight(self) -> Any:
        """Returns the weight of the base, for those who ask a layer for its dtype or device."""
        return self.base_layer.weight

    @property
    def bias(self) -> Any:
        return self.base_layer.bias

    @property
    def added(self) -> tuple[str, ...]:
        """Returns the names of the adapters that a call adds up."""
        return self.active if self.enabled else ()

    @property
    def draws(self) -> bool:
        """Returns whether a call may draw random numbers."""
        return not is_known(self.base_layer) or any(map(self._dropout, self.added))

    def add_adapter(
        self, name: str, adapter: Adapter, dtype: torch.dtype | None = torch.float32
    ) -> None:
        """Adds an adapter whose product is zero, and which is not active yet: A as ``nn.Linear``
        initializes its weight, B zeros.

        Raises:
            ValueError: there is one of this name.
        """
        if name in self.adapters:
            raise ValueError(f"there is an adapter {name!r} already")
        options: Any = {"bias": False, "device": self.weight.device, "dtype": dtype}
        self.lora_A[name] = nn.Linear(self.in_features, adapter.rank, **options)
        self.lora_B[name] = nn.Linear(adapter.rank, self.out_features, **options)
        nn.init.zeros_(self.lora_B[name].weight)
        self.adapters[name] = adapter

    def delete_adapter(self, name: str) -> None:
        """Removes an adapter of this name, if there is one."""
        if self.adapters.pop(name, None) is not None:
            del self.lora_A[name], self.lora_B[name]
            self.active = tuple(other for other in self.active if other != name)

    def delta(self, rows: slice = slice(None)) -> Tensor:
        """Returns the sum of the ``added`` adapters' matrices in float32, ``[out, in]``, or some
        rows of it."""
        total = torch.zeros((1, 1), device=self.weight.device)
        for name in self.added:
            a, b = self.lora_A[name].weight.detach(), self.lora_B[name].weight.detach()
            total = total + b[rows].float() @ a.float() * self.adapters[name].scale
        return total

    def forward(self, input: Tensor) -> Tensor:
        y = None
        for dropout, names in grouped(self.added, self._dropout).items():
            # Adapters that drop as much are one of their joined rank, which reads x once.
            a, b, scale = self._joined(names)
            if y is None and (weight := readable_matrix(self.base_layer, input, a, b)) is not None:
                bias = None if self.bias is None else self.bias.to(input.dtype)
                y = lora_linear(input, weight, bias, a, b, scale=scale, dropout=dropout)
                continue
            y = self.base_layer(input) if y is None else y
            x = F.dropout(input, dropout) if dropout else input
            t = linear(x, a.to(x.dtype)) * scale
            y = y + linear(t, b.to(t.dtype)).to(y.dtype)
        return self.base_layer(input) if y is None else y

    def _dropout(self, name: str) -> float:
        return self.adapters[name].dropout if self.training else 0.0

    def _joined(self, names: list[str]) -> tuple[Tensor, Tensor, float]:
        """Returns A, B and the scale of one adapter, or of the sum of several."""
        a = [self.lora_A[name].weight for name in names]
        b = [self.lora_B[name].weight for name in names]
        scales = [self.adapters[name].scale for name in names]
        if len(names) == 1:
            return a[0], b[0], scales[0]
        scaled = [one * scale for one, scale in zip(b, scales)]
        return torch.cat(a), torch.cat(scaled, dim=1), 1.0

    def extra_repr(self) -> str:
        numbers = (f"{name}: rank={one.rank}" for name, one in self.adapters.items())
        return f"{', '.join(numbers)}, active={[*self.active]}"


known.add(LoRALinear)


def takes_adapters(module: nn.Module) -> bool:
    """Returns whether a module is a linear layer that may have adapters, or has some: of torch, of
    Headroom, Conv1D of transformers, or of bitsandbytes. Other subclasses may compute, or be used,
    in other ways."""
    kind = type(module)
    library = kind.__module__.partition(".")[0]
    return (
        isinstance(module, (LoRALinear, QuantizedLinear))
        or kind in (nn.Linear, Linear)
        or (library == "transformers" and kind.__name__ == "Conv1D")
        or (library == "bitsandbytes" and isinstance(module, nn.Linear))
    )


def readable_matrix(
    base: nn.Module, x: Tensor, a: Tensor, b: Tensor
) -> Tensor | QuantizedMatrix | None:
    """Returns the matrix of the base of an adapter, if ``lora_linear`` may take the place of a call
    of it; None where the base does more, is trained, or has another dtype."""
    lowered = autocast_dtype(x.device.type)
    if not is_known(base) or not all(map(takes_ops, (x, a, b))):
        return None
    if a.dtype != b.dtype or a.dtype not in (torch.float32, lowered or x.dtype):
        return None
    if isinstance(base, QuantizedLinear):
        return base.matrix
    if type(base) not in (nn.Linear, Linear) or not takes_ops(base.weight):
        return None
    fits = lowered is not None or base.weight.dtype == x.dtype
    return base.weight if fits and not base.weight.requires_grad else None


def features_of(layer: Any) -> tuple[int, int]:
    """Returns how many columns and rows the matrix of a linear layer has, of Conv1D too."""
    if hasattr(layer, "in_features"):
        return layer.in_features, layer.out_features
    return layer.weight.shape[0], layer.weight.shape[1]  # transposed


# ---- all layers of a model -----------------------------------------------------------------------


def lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """Returns the layers of a model that have adapters, by their names."""
    return {name: one for name, one in model.named_modules() if isinstance(one, LoRALinear)}


def adapter_names(model: nn.Module) -> list[str]:
    """Returns the names of all adapters of a model."""
    return [*dict.fromkeys(name for one in lora_layers(model).values() for name in one.adapters)]


def attach(
    model: nn.Module, wanted: Mapping[str, Adapter], name: str, dtype: torch.dtype | None
) -> None:
    """Adds an adapter to layers of a model, which become :class:`LoRALinear` if they are none. The
    adapter is the only one that is active, and all else is frozen.

    Args:
        model: holds the layers.
        wanted: the numbers of the adapter for each layer, by the name of the layer.
        name: of the adapter.
        dtype: of A and B.

    Raises:
        TypeError: a weight is a DTensor.
        ValueError: the name is taken or none, a weight is that of another module too, or the model
            is itself such a layer. Nothing is changed then.
    """
    if not isinstance(name, str) or not name or "." in name or hasattr(nn.ModuleDict(), name):
        raise ValueError(f"name is {name!r}, wanted one that a module may have, without a dot")
    layers = {path: model.get_submodule(path) for path in wanted}
    if "" in layers:
        raise ValueError("the model is itself the layer: give a module that holds it")
    for path, layer in layers.items():
        if isinstance(layer, LoRALinear) and name in layer.adapters:
            raise ValueError(f"'{path}' has an adapter {name!r} already")
        if isinstance(layer.weight, DTensor):
            raise TypeError(f"'{path}.weight' is a DTensor: add adapters before fully_shard()")
    _refuse_shared(model, layers)
    plain = {path: one for path, one in layers.items() if not isinstance(one, LoRALinear)}
    swapped = {path: LoRALinear(one) for path, one in plain.items()}
    replace(model, {id(one): swapped[path] for path, one in plain.items()})
    for path, adapter in wanted.items():
        layer = swapped.get(path, layers[path])
        assert isinstance(layer, LoRALinear)
        layer.add_adapter(name, adapter, dtype)
    for param in model.parameters():
        param.requires_grad_(False)
    activate(model, [name])


def activate(model: nn.Module, names: Iterable[str]) -> None:
    """Makes these adapters active and lets them train; others are neither."""
    for layer in lora_layers(model).values():
        layer.active = tuple(name for name in names if name in layer.adapters)
        for name in layer.adapters:
            layer.lora_A[name].requires_grad_(name in layer.active)
            layer.lora_B[name].requires_grad_(name in layer.active)


def replace(model: nn.Module, others: Mapping[int, nn.Module]) -> None:
    """Puts modules in the places of others, which are given by their ids, wherever they are held
    as children."""
    for parent in [*model.modules()]:
        for key, child in parent._modules.items():
            if id(child) in others:
                parent._modules[key] = others[id(child)]


def _refuse_shared(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raises where the weight of a layer is that of another module too, which would not have the
    adapter."""
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        if isinstance(weight := module._parameters.get("weight"), Tensor):
            owners.setdefault(id(weight), []).append((path, module))
    for path, layer in layers.items():
        # A weight that weight_norm or pruning computes is no parameter.
        others = [name for name, one in owners.get(id(layer.weight), ()) if one is not layer]
        if others and not isinstance(layer, LoRALinear):
            raise ValueError(
                f"'{path}' and '{others[0]}' have the same weight, and an adapter would be that of "
                "the first alone: leave it out, or untie them"
            )
