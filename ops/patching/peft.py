"""Linear layers with adapters of PEFT, whose base and adapter become one op."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import Tensor, nn

from ..nn.dora import dora_linear
from ..nn.fused import bias_of, is_untouched, readers
from ..nn.lora import joined, readable_matrix
from ..nn.mlp_lora import Factor, LowRank, times
from ..nn.quantized import QuantizedLinear
from .bitsandbytes import matrix_for
from .changes import Changes
from .report import PatchReport

CLASSES = {  # by their modules
    "peft.tuners.lora.layer": ("Linear",),
    "peft.tuners.lora.bnb": ("Linear4bit", "Linear8bitLt"),
}


def swap_adapters(model: nn.Module, changes: Changes, report: PatchReport) -> None:
    """Swaps linear layers that PEFT has given adapters of LoRA. Parameters stay where they are."""
    if "peft" not in sys.modules:
        return
    for name, module in model.named_modules():
        layer: Any = module
        if type(module).__name__ not in CLASSES.get(type(module).__module__, ()):
            continue
        if isinstance(layer.base_layer, QuantizedLinear):
            changes.set(module, "merge", refuse_merge)
        if "forward" in vars(module):
            report._leave(name, module, "something else has replaced its forward")
        elif not all(map(_is_dora, layer.lora_variant.values())):
            report._leave(name, module, "its adapter is a variant of LoRA other than DoRA")
        else:
            changes.set(module, "forward", functools.partial(peft_forward, module))
            report._swap(name, module, "LoRA", "headroom.functional.lora_linear")


def refuse_merge(*_: Any, **__: Any) -> None:
    """Takes the place of ``merge`` of layers over codes, which PEFT would overwrite as if they were
    numbers: by its ``safe_merge`` without an error.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "PEFT cannot merge into a weight of few bits of headroom.quantize: save the adapter, and "
        "use headroom.state.load_adapter and headroom.merge on the model without PEFT"
    )


def peft_forward(layer: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
    """Takes the place of a layer's ``forward``, which it calls where the op cannot compute it: with
    no adapter or merged ones, several that differ in more than their numbers, and a base or
    adapters that do more."""
    found = None if args or options else _read(layer, x)
    if found is None:
        return type(layer).forward(layer, x, *args, **options)
    factor, magnitude = found
    if magnitude is None:
        return times(x, factor)
    weight, _, one = factor
    assert one is not None
    numbers: dict[str, Any] = {"scale": one.scale, "dropout": one.dropout, "fused": True}
    return dora_linear(layer.base_layer, weight, x, one.a, one.b, magnitude, **numbers)


def _read(layer: Any, x: Tensor) -> tuple[Factor, Tensor | None] | None:
    """Returns the matrix, the bias and the adapter of a layer, and the lengths of DoRA or None;
    or None where these are not all that it computes."""
    given = None if layer.disable_adapters or layer.merged else _adapter(layer)
    if given is None:
        return None
    a, b, scale, dropout, magnitude = given
    base = layer.base_layer
    matrix = matrix_for(base, x) or readable_matrix(base, x, a, b)
    if matrix is None:
        return None
    return Factor(matrix, bias_of(base, x), LowRank(a, b, scale, dropout)), magnitude


def _read_without_lengths(layer: Any, x: Tensor) -> Factor | None:
    found = _read(layer, x)
    return None if found is None or found[1] is not None else found[0]


readers[peft_forward] = _read_without_lengths


def _adapter(layer: Any) -> tuple[Tensor, Tensor, float, float, Tensor | None] | None:
    """Returns A, B, scale, dropout and the lengths of DoRA of the active adapter, or of the sum of
    several; None if there is none, or they are no such sum."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    found = [_parts(layer, name) for name in names]
    if not found or None in found:
        return None
    dropouts = {dropout for _, dropout, _ in found}
    magnitudes = [magnitude for _, _, magnitude in found]
    if len(dropouts) > 1 or (len(names) > 1 and any(m is not None for m in magnitudes)):
        return None
    return (*joined([matrices for matrices, _, _ in found]), *dropouts, magnitudes[0])


def _parts(layer: Any, name: str) -> Any:
    """Returns A, B and scale of an adapter, its dropout, and its lengths or None; None if it
    computes more than these say."""
    a, b, drop = (part[name] for part in (layer.lora_A, layer.lora_B, layer.lora_dropout))
    if type(a) is not nn.Linear or type(b) is not nn.Linear or b.bias is not None:
        return None
    lengths = layer.lora_magnitude_vector[name] if name in layer.lora_variant else None
    if not all(map(is_untouched, (a, b, drop, *([] if lengths is None else [lengths])))):
        return None
    dropout = drop.p if isinstance(drop, nn.Dropout) and drop.training else 0.0
    if dropout >= 1:
        return None
    matrices = a.weight, b.weight, layer.scaling[name]
    return matrices, dropout, None if lengths is None else lengths.weight


def _is_dora(variant: Any) -> bool:
    return type(variant).__name__ == "DoraLinearVariant"
