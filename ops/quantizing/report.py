"""Reports which weights of a model are in few bits now, and which were left, and why."""

from __future__ import annotations

import dataclasses

from torch import nn

from .._core.grouping import grouped
from .._core.sizes import format_bytes
from ..nn.experts import QuantizedExperts
from ..nn.quantized import QuantizedLinear


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A layer, or a module of experts, whose weights are in few bits now.

    Attributes:
        name: of the layer in the model.
        was: its class before.
        format: "nf4", "fp4" or "int8".
        before, after: bytes of its weights, with the scales.
    """

    name: str
    was: str
    format: str
    before: int
    after: int


@dataclasses.dataclass(frozen=True)
class Left:
    """A parameter that was left as it is.

    Attributes:
        name: of the parameter in the model.
        was: the class of the module that has it.
        bytes: that it takes.
        reason: why it was left.
    """

    name: str
    was: str
    bytes: int
    reason: str


class QuantizeReport:
    """Lists what :func:`headroom.quantize` or :func:`headroom.load_quantized` did to a model.

    Attributes:
        model: the class of the model.
        quantized: a :class:`Quantized` per layer and module of experts.
        left: a :class:`Left` per parameter that was left in 16 or 32 bits.
        before, after: bytes of all parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = type(model).__name__
        self.quantized: list[Quantized] = []
        self.left: list[Left] = []

    @property
    def before(self) -> int:
        return sum(one.before for one in self.quantized) + sum(one.bytes for one in self.left)

    @property
    def after(self) -> int:
        return sum(one.after for one in self.quantized) + sum(one.bytes for one in self.left)

    def _add(
        self, name: str, was: str, before: int, layer: QuantizedLinear | QuantizedExperts
    ) -> None:
        """Notes a layer, or experts, whose weights took ``before`` bytes."""
        matrices = layer.stacks() if isinstance(layer, QuantizedExperts) else [layer.matrix]
        formats = ", ".join(dict.fromkeys(q.format for q in matrices))
        after = sum(q.codes.nbytes + q.scales.nbytes for q in matrices)
        self.quantized.append(Quantized(name, was, formats, before, after))

    def __str__(self) -> str:
        before, after = format_bytes(self.before), format_bytes(self.after)
        lines = [f"headroom.quantize: {self.model}, parameters of {before} -> {after}"]
        for (was, kind), same in grouped(self.quantized, lambda q: (q.was, q.format)).items():
            sizes = sum(one.before for one in same), sum(one.after for one in same)
            lines.append(f"  {len(same)} {was} -> {kind}: {' -> '.join(map(format_bytes, sizes))}")
        left = grouped(self.left, lambda one: (one.was, one.reason))
        for (was, reason), same in sorted(left.items(), key=lambda item: -_bytes(item[1])):
            where = same[0].name + (" and others" if len(same) > 1 else "")
            size = format_bytes(_bytes(same))
            lines.append(f"  left, {size}: {len(same)} of {was} ({where}): {reason}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"QuantizeReport({self.model}: {len(self.quantized)} quantized, {len(self.left)} left, "
            f"{self.before:,} -> {self.after:,} bytes)"
        )


def _bytes(left: list[Left]) -> int:
    return sum(one.bytes for one in left)
