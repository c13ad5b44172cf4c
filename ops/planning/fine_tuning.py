"""Finds what takes less of a fine-tune: adapters in place of all weights, and few bits for weights
that do not train."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from .._core.module_copies import copied_modules
from ..adapters import lora
from ..quantizing.choice import choose
from ..quantizing.frozen import frozen_layers, quantize_shapes
from ..step.description import Step, class_of_optimizer

__all__ = ["CHANGES_TRAINING", "adapters_instead", "fewer_bits"]

RANK = 16  # the default of headroom.lora
CHANGES_TRAINING = ("another training", "other numbers")
"""How ``time`` begins of changes of what is trained, or of the numbers beside it."""

Change = tuple[str, Step, str, str, str]
"""The name of a change, the step with it, and ``time``, ``source`` and ``code`` of its advice."""


def adapters_instead(step: Step) -> Iterator[Change]:
    """Yields LoRA and QLoRA for a step that trains all of a model, with adapters on its linear
    layers. Models whose layers cannot have any, and steps of several ranks, have no such change.
    """
    params = [*step.model.parameters()]
    if step.sharding is not None or not all(p.requires_grad for p in params):
        return
    for name, few_bits, source in (
        (f"headroom.lora(model, rank={RANK})", False, "Hu et al., arXiv:2106.09685"),
        ("headroom.quantize(model), then headroom.lora", True, "Dettmers et al., arXiv:2305.14314"),
    ):
        try:
            model = copied_modules(step.model, _on_meta)
            if few_bits:
                quantize_shapes(model, [*choose(model, None)[0]], "nf4")
            lora(model, RANK)
        except Exception:  # it cannot be copied or has no such layer, and then it is not advised
            return
        lines = ["headroom.quantize(model)"] if few_bits else []
        lines.append(f"headroom.lora(model, rank={RANK})")
        if step.optimizer is not None:
            lines.append("trained = [p for p in model.parameters() if p.requires_grad]")
            lines.append(f"optimizer = {_name(step.optimizer)}(trained)  # with its other options")
        yield (
            name,
            step.but(model=model, optimizer=_remade(step.optimizer)),
            "another training: adapters alone, whose learning rate is to be found",
            f"{source}; docs/lora.md",
            "\n".join(lines),
        )


def fewer_bits(step: Step) -> Iterator[Change]:
    """Yields the formats for the frozen weights of a step's linear layers, if there are any."""
    if step.sharding is not None:
        return
    names, _ = frozen_layers(step.model, step.optimizer)
    for to, bits in (("nf4", 4), ("int8", 8)) if names else ():
        try:
            model = copied_modules(step.model, lambda x: x)
            quantize_shapes(model, names, to)
        except Exception:  # it cannot be copied, and then it is not advised
            return
        given = "" if to == "nf4" else f", {to!r}"
        yield (
            f"headroom.quantize(model{given})",
            step.but(model=model),
            f"other numbers: frozen weights are rounded to {bits} bits",
            "docs/quantized.md",
            f"headroom.quantize(model{given})",
        )


def _on_meta(x: Tensor) -> Tensor:
    made = x.detach().to("meta")
    return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made


def _remade(optimizer: Any) -> Any:
    """Returns what makes such an optimizer of other parameters, with the defaults of this one."""
    if not hasattr(optimizer, "param_groups"):
        return optimizer
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    return partial(kind, **{k: v for k, v in optimizer.defaults.items() if k in accepted})


def _name(optimizer: Any) -> str:
    """Returns the name by which code calls the class of an optimizer."""
    kind = class_of_optimizer(optimizer)
    name = getattr(kind, "__name__", "make")
    for library in ("headroom", "torch"):
        if getattr(kind, "__module__", "").startswith(f"{library}.optim"):
            return f"{library}.optim.{name}"
    return name
