"""Linear layers that bitsandbytes has made, whose weights are read where they are."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._core.surroundings import takes_ops
from ..functional.linear_quantized import linear_quantized
from ..functional.quantize_matrix import QuantizedMatrix
from ..nn.bitsandbytes import matrix_of
from ..nn.fused import is_untouched, known
from .bitsandbytes_experts import HeldExperts, bitsandbytes_experts_forward
from .changes import Changes
from .report import PatchReport

CLASSES = ("Linear4bit", "LinearNF4", "LinearFP4", "Linear8bitLt")


class Held:
    """Holds the matrix of a layer between calls: its codes are the layer's, and so are its scales,
    unless these are quantized, which bitsandbytes keeps in several tensors.

    Both are Parameters, which no save level drops or moves. A copy holds nothing, and looks for
    the matrix of its own layer when that is called.

    Attributes:
        found: the matrix, or None.
    """

    def __init__(self) -> None:
        self.found: QuantizedMatrix | None = None
        self._source: tuple[Any, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return Held, ()

    def faked(self, fake: Callable[[Tensor], Tensor]) -> Held:
        """Returns what holds the matrix for a copy of the layer, with fakes of its tensors, whose
        values nobody can read.

        Args:
            fake: returns the fake of a tensor.
        """
        found, q = Held(), self.found
        if q is not None:
            found.found = dataclasses.replace(q, codes=fake(q.codes), scales=fake(q.scales))
        return found

    @property
    def scales(self) -> list[Tensor]:
        """Returns the scales of the matrix, in a list."""
        return [] if self.found is None else [self.found.scales]

    def hold(self, layer: Any) -> None:
        """Looks for the matrix, if it is not held."""
        self.matrix(layer)

    def matrix(self, layer: Any) -> QuantizedMatrix:
        """Returns the matrix.

        Raises:
            ValueError: the layer holds none that can be read.
        """
        if self.found is not None and (torch.compiler.is_compiling() or self._is_of(layer)):
            return self.found
        shape = layer.out_features, layer.in_features
        q = matrix_of(_entries(layer), shape, torch.float16)
        self._source = layer.weight.untyped_storage()._cdata, _scales(layer)
        codes, scales = (nn.Parameter(x, requires_grad=False) for x in (q.codes, q.scales))
        self.found = dataclasses.replace(q, codes=codes, scales=scales)
        return self.found

    def _is_of(self, layer: Any) -> bool:
        """Returns whether the layer still has the tensors of the matrix that is held. Fakes are
        made of one moment, and always are."""
        if not self._source:
            return True
        storage, scales = self._source
        return storage == layer.weight.untyped_storage()._cdata and scales is _scales(layer)


def _scales(layer: Any) -> Tensor | None:
    """Returns the scales of blocks or rows as bitsandbytes has them; None where the weight is not
    quantized yet."""
    if not is_8bit(layer):
        return getattr(layer.weight.quant_state, "absmax", None)
    own = layer.weight.SCB  # until the first call of the layer
    return layer.state.SCB if own is None else own


def _entries(layer: Any) -> dict[str, Any]:
    """Returns what would stand in a ``state_dict``, without copies of codes and scales."""
    with torch._C.DisableTorchFunctionSubclass():
        entries = {"weight": layer.weight.detach()}  # of class Tensor
    if is_8bit(layer):
        return entries | {"SCB": _scales(layer)}
    state = layer.weight.quant_state.as_dict(packed=True)
    return entries | {f"weight.{key}": value for key, value in state.items()}


def is_8bit(layer: nn.Module) -> bool:
    return type(layer).__name__ == "Linear8bitLt"


def is_bitsandbytes(module: nn.Module) -> bool:
    """Returns whether a module is a linear layer of bitsandbytes."""
    kind = type(module)
    return kind.__name__ in CLASSES and kind.__module__.partition(".")[0] == "bitsandbytes"


def _is_repacked(layer: Any) -> bool:
    return getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False)


def _obstacle(layer: Any, held: Held) -> str | None:
    """Returns why the weight of a layer cannot be read, or None."""
    if "forward" in vars(layer):
        return "something else has replaced its forward"
    if is_8bit(layer) and layer.state.has_fp16_weights:
        return "its weight is in 16 bits, and is trained"
    if _is_repacked(layer):
        return (
            "bitsandbytes has packed its weight anew for inference on this CPU, with rounded "
            "scales; patch before the first call in eval()"
        )
    if _scales(layer) is None:
        return "its weight is not quantized yet, which moving it to a device does"
    try:
        held.matrix(layer)
    except ValueError as error:
        return f"its weight cannot be read: {error}"
    return None


def parameter_classes() -> tuple[type, ...]:
    """Returns the classes of the weights of these layers; none if bitsandbytes is not imported."""
    module = sys.modules.get("bitsandbytes.nn")
    names = ("Params4bit", "Int8Params")
    return tuple(getattr(module, name) for name in names if hasattr(module, name))


def held_of(module: nn.Module) -> Held | HeldExperts | None:
    """Returns what holds the matrix of a patched layer, or the stacks of experts; None for any
    other module."""
    forward: Any = vars(module).get("forward")
    is_ours = getattr(forward, "func", None) in (bitsandbytes_forward, bitsandbytes_experts_forward)
    return forward.args[1] if is_ours else None


def swap_bitsandbytes(model: nn.Module, changes: Changes, report: PatchReport) -> None:
    """Swaps the linear layers of bitsandbytes. Weights stay where they are."""
    if "bitsandbytes" not in sys.modules:
        return
    for name, module in model.named_modules():
        if not is_bitsandbytes(module):
            continue
        held = Held()
        if (reason := _obstacle(module, held)) is not None:
            report._leave(name, module, reason)
            continue
        changes.set(module, "forward", functools.partial(bitsandbytes_forward, module, held))
        kind = held.matrix(module).format
        report._swap(name, module, f"Linear in {kind}", "headroom.functional.linear_quantized")


def bitsandbytes_forward(layer: Any, held: Held, x: Tensor) -> Tensor:
    """Takes the place of a layer's ``forward``: the product in the dtype that the layer was told to
    compute in, else in that of x or of autocast; x is not quantized."""
    lowered = x.to(getattr(layer, "compute_dtype", None) or x.dtype)
    if not takes_ops(lowered) or _is_repacked(layer):
        return type(layer).forward(layer, x)
    bias = None if layer.bias is None else layer.bias.to(lowered.dtype)
    return linear_quantized(lowered, held.matrix(layer), bias).to(x.dtype)


def matrix_for(layer: nn.Module, x: Tensor) -> QuantizedMatrix | None:
    """Returns the matrix of a layer whose ``forward`` is that above and computes in the dtype of
    ``x``; None for any other."""
    held = held_of(layer)
    if not isinstance(held, Held) or not is_untouched(layer):
        return None
    if getattr(layer, "compute_dtype", None) not in (None, x.dtype):
        return None
    if not takes_ops(x) or _is_repacked(layer):
        return None
    return held.matrix(layer)


known.add(bitsandbytes_forward)
