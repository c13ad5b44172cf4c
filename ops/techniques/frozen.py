"""Frozen weights of linear layers, quantized to 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .._core.module_copies import copied_modules
from ..quantizing.frozen import FrozenWeights, frozen_layers, quantize_alike, quantize_shapes
from ..step.description import Step
from .technique import Change, Request, Target, Technique

OTHER_NUMBERS = "other numbers"
"""How ``time`` begins of changes of the numbers beside what is trained."""

_BITS = {"nf4": 4, "int8": 8}


class Frozen(Technique):
    """Quantizes the weights that do not train. They come back with the numbers of their codes:
    nobody keeps those that they had."""

    field, default = "frozen", "given"
    told, row = 4, 3
    in_words, in_row = "frozen in {}", ("frozen weights", "as given", "{}")
    allowed = {"int8": 5, "nf4": 6}  # the first one changes them the least
    changes = {"int8": "frozen weights have 8 bits", "nf4": "frozen weights have 4 bits"}

    def values(self, request: Request, choice: Any) -> Sequence[str]:
        formats = [name for name in self.allowed if name in request.allowed]
        if formats:
            request.layers[:], reason = frozen_layers(request.step.model, request.step.optimizer)
            if reason is not None:
                request.note(f"{', '.join(formats)}: {reason}")
        return (self.default, *formats) if request.layers else (self.default,)

    def rank(self, value: Any) -> int:
        return self.allowed.get(value, 0)

    def on_copy(self, target: Target, choice: Any) -> None:
        quantize_shapes(target.model, target.layers, choice.frozen)

    def on_measured_copy(self, target: Target, choice: Any) -> None:
        quantize_alike(target.model, target.layers, choice.frozen)

    def apply(self, target: Target, choice: Any) -> Callable[[], None] | None:
        frozen = FrozenWeights(target.model, target.layers)
        try:
            frozen.quantize(choice.frozen)
        except BaseException:
            frozen.give_back()
            raise
        return frozen.give_back

    def advice(self, step: Step) -> Iterator[Change]:
        if step.sharding is not None:
            return
        names, _ = frozen_layers(step.model, step.optimizer)
        for to, bits in _BITS.items() if names else ():
            try:
                model = copied_modules(step.model, lambda x: x)
                quantize_shapes(model, names, to)
            except Exception:  # it cannot be copied, and then it is not advised
                return
            code = f"headroom.quantize(model{'' if to == 'nf4' else f', {to!r}'})"
            yield (
                code,
                step.but(model=model),
                f"{OTHER_NUMBERS}: frozen weights are rounded to {bits} bits",
                "docs/quantized.md",
                code,
            )
