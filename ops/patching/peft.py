"""Linear layers with adapters of PEFT, whose base and adapter become one op."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import Tensor, nn

from ..functional.lora import lora_linear
from ..nn.fused import is_untouched
from ..nn.lora import readable_matrix
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
        if "forward" in vars(module):
            report.leave(name, module, "something else has replaced its forward")
        elif layer.lora_variant:
            report.leave(name, module, "its adapter is a variant of LoRA, such as DoRA")
        else:
            changes.set(module, "forward", functools.partial(peft_forward, module))
            report.swap(name, module, "LoRA", "headroom.functional.lora_linear")


def peft_forward(layer: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
    """Takes the place of a layer's ``forward``, which it calls where the op cannot compute it: with
    no adapter, several or merged ones, and a base or adapters that do more."""
    base, given = layer.base_layer, None
    if not (args or options or layer.disable_adapters or layer.merged):
        given = _adapter(layer)
    if given is None:
        return type(layer).forward(layer, x, *args, **options)
    a, b, scale, dropout = given
    matrix = matrix_for(base, x) or readable_matrix(base, x, a, b)
    if matrix is None:
        return type(layer).forward(layer, x)
    bias = None if base.bias is None else base.bias.to(x.dtype)
    return lora_linear(x, matrix, bias, a, b, scale=scale, dropout=dropout)


def _adapter(layer: Any) -> tuple[Tensor, Tensor, float, float] | None:
    """Returns A, B, scale and dropout of the only active adapter; None if it is none or more."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) != 1 or names[0] in layer.lora_variant:
        return None
    a, b, drop = (part[names[0]] for part in (layer.lora_A, layer.lora_B, layer.lora_dropout))
    if type(a) is not nn.Linear or type(b) is not nn.Linear or b.bias is not None:
        return None
    if not all(map(is_untouched, (a, b, drop))):
        return None
    dropout = drop.p if isinstance(drop, nn.Dropout) and drop.training else 0.0
    return (a.weight, b.weight, layer.scaling[names[0]], dropout) if dropout < 1 else None
