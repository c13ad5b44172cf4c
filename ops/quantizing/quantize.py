"""Puts the weights of a model's linear layers and experts into few bits, in place, and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .._core.checks import check_choice, check_module
from .._core.progress import progress_bar
from .._core.registration import FLOATS
from ..functional.quantize_matrix import BLOCK_SIZES, quantize_matrix
from ..nn.experts import QuantizedExperts
from ..nn.quantized import CLASSES, QuantizedLinear, quantized_weight
from ..nn.torch_encoder import call_linears
from .choice import Holder, choose, joined, left_parameters
from .report import QuantizeReport
from .transformers_config import describe


def quantize(
    model: nn.Module,
    to: str = "nf4",
    *,
    block_size: int = 64,
    double: bool = True,
    skip: Iterable[str] | str | None = None,
    search: bool = False,
) -> QuantizeReport:
    """Puts the weights of the linear layers and experts of a model into 4 or 8 bits, in place.

    Layers become :class:`headroom.nn.Linear4bit` or :class:`headroom.nn.Linear8bit`: the same
    modules with their hooks and biases, whose weights are frozen. One weight is quantized at a
    time, and that which it was is freed if nothing else holds it, such as an optimizer: make that
    afterwards. Of a model of transformers ``config.quantization_config`` is set, so that what
    ``save_pretrained`` writes is loaded by transformers with bitsandbytes.

    Layers are modules of the classes ``nn.Linear``, :class:`headroom.nn.Linear`, and Conv1D of
    transformers. The experts of mixtures of transformers that :func:`headroom.patch` computes
    become :class:`headroom.nn.QuantizedExperts`, one module after the other. Where weights of some
    are frozen and those of others trained, as those of adapters, the latter are left.

    Example::

        layers = torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 9)
        model = torch.nn.Sequential(*layers)
        report = headroom.quantize(model)
        print(report)  # what was quantized, what was left and why, and bytes

    Args:
        model: with parameters in float32, bfloat16 or float16, on any device; not sharded.
        to: "nf4", "fp4" or "int8".
        block_size: of "nf4" and "fp4": weights that share a scale, a power of two from 32 to 4096.
        double: of "nf4" and "fp4": quantizes the scales too: 4.13 bits per weight in place of 4.5.
        skip: names of modules that are left, with all inside them: whole names or their ends after
            a dot, with ``*``, ``?`` and ``[...]`` as in :mod:`fnmatch`; ``()`` for none. None
            leaves what answers: the output head, classifiers, the layer with the last parameter;
            routers of experts and gates beside them; weights that are also another's; and those
            that transformers keeps in float32.
        search: of "nf4" and "fp4": looks for the scale of a block with the least squared error,
            which takes several times as long.

    Returns:
        What was done, and what was left in 16 or 32 bits: ``print(report)``.

    Raises:
        TypeError: ``model`` is no module, ``skip`` are no names, or a weight is a DTensor.
        ValueError: an argument is none of the above; no layer is left to quantize; a weight has an
            element that is not finite, or lies in memory of another parameter. Nothing is changed
            then.

    Since weights are freed one after the other, a call that is interrupted leaves those layers
    quantized that were; a further call goes on with the others.
    """
    check_arguments(model, to, block_size)
    chosen, reasons = choose(model, skip)
    if not chosen:
        raise ValueError(f"headroom.quantize: {why_none(model, reasons)}")
    for name, one in chosen.items():
        for key, weight in one.weights.items():
            check_finite(joined(name, key), weight)
    options: Any = {"block_size": block_size, "double": double, "search": search}
    report = QuantizeReport(model)
    sizes = {name: sum(w.nbytes for w in one.weights.values()) for name, one in chosen.items()}
    with progress_bar(sum(sizes.values()), "quantize", unit="B", shown=True) as bar:
        try:
            for name, one in chosen.items():
                was, weights = type(one.module).__name__, one.weights.values()
                found = [quantized_weight(weight, to, **options) for weight in weights]
                del weights
                report._add(name, was, sizes[name], one.take(*found))
                bar.update(sizes[name])
        finally:
            call_linears(model)
            describe(model)
    report.left = left_parameters(model, reasons)
    return report


def take_shape(one: Holder, to: str) -> None:
    """Turns a layer or experts into few bits, in place, whose weights are on the meta device."""
    forms = (torch.empty(w.shape, dtype=w.dtype, device="meta") for w in one.weights.values())
    one.take(*(quantize_matrix(form, to=to) for form in forms))


def dequantize(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Turns layers of few bits into ``nn.Linear``, and experts into what they were, in place, and
    returns the model.

    Weights have the numbers of their codes, not those that they had before, and require gradients.

    Args:
        model: any module.
        dtype: of the weights: float32, bfloat16 or float16; None for that which each had before.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``dtype`` is none of those.

    A call that is interrupted leaves some layers quantized; a further call goes on with these.
    """
    check_module(model)
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(f"dtype is {dtype}, wanted one of {FLOATS}")
    try:
        for module in model.modules():
            if isinstance(module, (QuantizedLinear, QuantizedExperts)):
                module.release(dtype)
    finally:
        describe(model)
    return model


def check_arguments(model: Any, to: str, block_size: int) -> None:
    """Raises for arguments that are none of those of :func:`quantize`."""
    check_module(model)
    check_choice("to", to, CLASSES)
    if type(block_size) is not int or block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size is {block_size!r}, wanted a power of two from 32 to 4096")


def check_finite(name: str, weight: Tensor, where: str = "") -> None:
    """Raises where an element of a weight is not finite."""
    if weight.is_meta or not weight.numel():
        return
    ends = torch.stack(torch.aminmax(weight))  # which are NaN where an element is
    if not ends.isfinite().all():
        raise ValueError(f"'{name}'{where} has an element that is not finite")


def why_none(model: nn.Module, reasons: dict[str, str]) -> str:
    """Returns why a model has no layer to quantize."""
    kinds = QuantizedLinear, QuantizedExperts
    held = [name for name, one in model.named_modules() if isinstance(one, kinds)]
    if held:
        return f"no layer is left: {len(held)}, such as '{held[0]}', are quantized already"
    if reasons:
        name, reason = next(iter(reasons.items()))
        return f"no layer is left: {len(reasons)} are skipped, such as '{name}': {reason}"
    return f"{type(model).__name__} has no linear layer"
