"""Finds what takes less of a fine-tune: adapters in place of all weights."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from .._core.module_copies import copied_modules
from ..adapters import lora
from ..quantizing.choice import choose
from ..quantizing.frozen import quantize_shapes
from ..step.description import Step, class_of_optimizer
from ..techniques.frozen import OTHER_NUMBERS
from ..techniques.technique import Change

__all__ = ["CHANGES_TRAINING", "adapters_instead"]

RANK = 16  # the default of headroom.lora
CHANGES_TRAINING = ("another training", OTHER_NUMBERS)
"""How ``time`` begins of changes of what is trained, or of the numbers beside it."""


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
