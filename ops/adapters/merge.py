"""Adds adapters to the weights beside which they were trained, in place, and back."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._core.all_or_nothing import all_or_nothing
from .._core.checks import check_module
from .._core.progress import progress_bar
from .._core.registration import FLOATS
from ..functional.quantize_matrix import dequantize_matrix
from ..nn.experts import QuantizedExperts
from ..nn.lora import LoRAEmbedding, LoRALayer, LoRALinear, lora_layers
from ..nn.lora_experts import LoRAExperts
from ..nn.lora_weight import LoRAWeight
from ..nn.quantized import QuantizedLinear, quantized_weight
from ..nn.switched import Switched, outside, replace, switched
from ..nn.trained_copy import TrainedCopy
from ..patching.bitsandbytes import Held, is_bitsandbytes
from ..quantizing.choice import Holder, joined, weight_of
from ..quantizing.names import by_names_of
from ..quantizing.quantize import check_finite
from ..quantizing.stacks import Stack, read_whole
from ..quantizing.transformers_config import describe
from ..state.file.safetensors import Entry, entries_in
from .merge_experts import KEPT, changed_stacks, is_turned, merged_experts, stacks_in
from .tying import inner

PANEL = 1 << 23  # elements of a weight that are added at a time

Files = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


@dataclasses.dataclass(frozen=True)
class Merged:
    """A layer whose adapters are part of its weight now.

    Attributes:
        name: of the layer in the model.
        was: the class of its base.
        adapters: names of those that were added.
        lost: the norm of what rounding took of the sum, over the norm of what adapters added to the
            weight; 0 if they added nothing.
    """

    name: str
    was: str
    adapters: tuple[str, ...]
    lost: float


class MergeReport:
    """Lists what :func:`headroom.merge` did to a model.

    Attributes:
        model: the class of the model.
        merged: a :class:`Merged` per layer.
    """

    def __init__(self, model: nn.Module, merged: list[Merged]) -> None:
        self.model, self.merged = type(model).__name__, merged

    @property
    def lost(self) -> float:
        """Returns the largest of the layers' losses."""
        return max(one.lost for one in self.merged)

    def __str__(self) -> str:
        lines = [
            f"headroom.merge: {self.model}, {len(self.merged)} layers; of what adapters added, "
            f"rounding took at most {self.lost:.2%}"
        ]
        worst = sorted(self.merged, key=lambda one: -one.lost)[:5]
        lines += [
            f"  {one.name} ({one.was}, {', '.join(one.adapters)}): {one.lost:.2%}" for one in worst
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"MergeReport({self.model}: {len(self.merged)} merged, lost {self.lost:.2%})"


def merge(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    *,
    base: Files | None = None,
    requantize: bool = False,
    keep: bool = True,
) -> MergeReport:
    """Adds the active adapters of a model to its weights, in place: layers become ``nn.Linear`` or
    embeddings, and modules of which an adapter has trained a copy become that copy.

    Sums are in float32, and rounded once. Weights of few bits are decoded: those are what the
    adapters were trained beside. What was is kept, so that :func:`headroom.unmerge` is exact. An
    embedding and its head that have one weight have one after it.

    Args:
        model: has adapters.
        dtype: of the weights: float32, bfloat16 or float16; None for that which each base has, or
            had before it was quantized.
        base: files of the weights before quantizing, to which adapters are added in place of the
            decoded ones: a safetensors file, a folder, or several files, as of
            :func:`headroom.load_quantized`. The result is then another than that of training, by
            the error of quantizing.
        requantize: puts the sum of each quantized layer into few bits again, as its base, by which
            most of small adapters can be lost: see ``lost`` in the report.
        keep: False frees what was; ``unmerge`` then cannot bring it back.

    Returns:
        What rounding took of each layer: ``print(report)``.

    Raises:
        TypeError: a weight is a DTensor.
        ValueError: no adapter is active, or others in an embedding than in its head; ``base``
            lacks a weight, or has one of another shape or with an element that is not finite; or
            no layer is quantized, with ``requantize``.

    Nothing is changed where it raises or is interrupted.
    """
    check_module(model)
    layers = {path: one for path, one in lora_layers(model).items() if one.added}
    experts = {
        path: one
        for path, one in switched(model).items()
        if isinstance(one, LoRAExperts) and one.added_stacks()
    }
    if not layers and not experts:
        raise ValueError(f"{type(model).__name__} has no active adapter to merge")
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(f"dtype is {dtype}, wanted one of {FLOATS}")
    kinds = QuantizedLinear, QuantizedExperts
    if requantize and not any(
        isinstance(one.base_layer, kinds) for one in (*layers.values(), *experts.values())
    ):
        raise ValueError(
            "requantize=True, but no layer with an adapter is one of headroom.quantize"
        )
    for path, layer in (*layers.items(), *experts.items()):
        for name, weight in inner(layer)._parameters.items():
            if isinstance(weight, DTensor):
                name = joined(path, name)
                raise TypeError(f"'{name}' is a DTensor: gather the model before merging")
    tied = _tied(model)
    layers = {path: one for path, one in layers.items() if path not in tied}
    originals, of_stacks = {}, {}
    if base is not None:
        entries = by_names_of(model, entries_in(base), _names(layers, experts))
        originals = _originals(layers, entries)
        of_stacks = _original_stacks(experts, entries, requantize)
    merged: dict[int, Any] = {}
    found: list[Merged] = []
    count = len(layers) + len(experts)
    with torch.no_grad(), progress_bar(count, "merge", unit="layer", shown=True) as bar:
        for path, layer in layers.items():
            weight = _weight(layer.base_layer, originals.get(path))
            if base is not None:
                check_finite(joined(path, "weight"), weight, " in base")
            again = requantize and isinstance(layer.base_layer, QuantizedLinear)
            merged[id(layer)], lost = _merged(layer, weight, dtype, again)
            if keep:
                vars(merged[id(layer)])[KEPT] = layer  # no child: the model shall not have it twice
            found.append(Merged(path, type(layer.base_layer).__name__, layer.added, lost))
            bar.update(1)
        for path, one in experts.items():
            own = {name: read_whole(entry) for name, entry in of_stacks.get(path, {}).items()}
            for name, stack in own.items():
                check_finite(joined(path, name), stack, " in base")
            whole, lost = merged_experts(one, own, dtype, requantize)
            merged[id(one)] = whole
            if keep:
                vars(whole)[KEPT] = one
            found.append(Merged(path, type(one.base_layer).__name__, one.added, lost))
            bar.update(1)
        lost_of = {id(layers[one.name]): one.lost for one in found if one.name in layers}
        for path, head in tied.items():
            whole = merged[id(head.tied_to)]
            merged[id(head)] = _with_weight(head, whole.weight, False)
            if keep:
                vars(merged[id(head)])[KEPT] = head
            was = type(head.base_layer).__name__
            found.append(Merged(path, was, head.added, lost_of[id(head.tied_to)]))
    with all_or_nothing(model):
        for path, one in switched(model).items():
            if isinstance(one, TrainedCopy) and one.added:
                merged[id(one)] = whole = one.current
                if keep:
                    vars(whole)[KEPT] = one
                found.append(Merged(path, type(whole).__name__, one.added, 0.0))
        replace(model, merged)
        describe(model)
        return MergeReport(model, found)


def unmerge(model: nn.Module) -> nn.Module:
    """Puts back what :func:`headroom.merge` has replaced, to the bit, and returns the model.

    Raises:
        ValueError: the model has no layer that was merged and kept what it was; or such a layer has
            got an adapter since.

    Nothing is changed where it raises or is interrupted.
    """
    check_module(model)
    kept: dict[int, tuple[Any, Any]] = {}
    for path, module in outside(model):
        merged = inner(module)
        if KEPT not in vars(merged):
            continue
        if isinstance(module, Switched) and module.names:
            raise ValueError(
                f"'{path}' has got adapters {module.names} since it was merged: delete them first "
                "(headroom.adapters.delete_adapter)"
            )
        kept[id(module)] = merged, vars(merged)[KEPT]
    if not kept:
        raise ValueError(f"{type(model).__name__} has no layer that headroom.merge has kept")
    for merged, before in kept.values():
        before.to(next(merged.parameters()).device).train(merged.training)
    with all_or_nothing(model):
        for merged, _ in kept.values():
            del vars(merged)[KEPT]  # a copy that has trained lives on
        replace(model, {key: before for key, (_, before) in kept.items()})
        describe(model)
        return model


def _tied(model: nn.Module) -> dict[str, LoRALinear]:
    """Returns the heads that have the active adapters of their embedding, by name.

    Raises:
        ValueError: others are active in the embedding.
    """
    found = {}
    for path, one in lora_layers(model).items():
        if not isinstance(one, LoRALinear) or one.tied_to is None:
            continue
        if one.added != one.tied_to.added:
            raise ValueError(
                f"'{path}' adds the adapters {[*one.added]}, and the embedding with the same "
                f"weight {[*one.tied_to.added]}: merging would untie them"
            )
        if one.added:
            found[path] = one
    return found


def _names(layers: Mapping[str, LoRALayer], experts: Mapping[str, LoRAExperts]) -> set[str]:
    """Returns the names of the weights of layers and experts before they got adapters."""
    stacks = {joined(path, name) for path, one in experts.items() for name in one.rule.stacks}
    return stacks | {joined(path, "weight") for path in layers}


def _originals(
    layers: Mapping[str, LoRALayer], entries: Mapping[str, Entry | Stack]
) -> dict[str, Entry | Stack]:
    """Returns where the weights of layers are in files, of which ``entries`` says the tensors.

    Raises:
        ValueError: one is missing, or does not fit.
    """
    found: dict[str, Entry | Stack] = {}
    for path, layer in layers.items():
        entry = entries.get(joined(path, "weight"))
        shape = layer.out_features, layer.in_features
        shape = shape[::-1] if _is_transposed(layer.base_layer) else shape
        if entry is None:
            raise ValueError(f"base has no '{path}.weight'")
        if entry.dtype not in FLOATS or entry.shape != shape:
            raise ValueError(
                f"'{path}.weight' in base is {entry.dtype} {[*entry.shape]}, wanted floats of "
                f"{[*shape]}"
            )
        found[path] = entry
    return found


def _original_stacks(
    experts: Mapping[str, LoRAExperts], entries: Mapping[str, Entry | Stack], again: bool
) -> dict[str, dict[str, Entry | Stack]]:
    """Returns where the stacks of experts that merging changes are in files, of which ``entries``
    says the tensors.

    Raises:
        ValueError: one is missing, or does not fit.
    """
    found: dict[str, dict[str, Entry | Stack]] = {}
    for path, module in experts.items():
        held = stacks_in(module)
        for name in changed_stacks(module, again):
            full, shape = joined(path, name), tuple(held[name].shape)
            if is_turned(module):
                shape = shape[0], shape[2], shape[1]
            entry = entries.get(full)
            if entry is None:
                raise ValueError(f"base has no '{full}', as one tensor or expert by expert")
            if entry.dtype not in FLOATS or entry.shape != shape:
                raise ValueError(
                    f"'{full}' in base is {entry.dtype} {[*entry.shape]}, wanted floats of "
                    f"{[*shape]}"
                )
            found.setdefault(path, {})[name] = entry
    return found


def _is_transposed(layer: nn.Module) -> bool:
    """Returns whether a layer is Conv1D of transformers, or was before it was quantized, or is an
    embedding."""
    return "nf" in vars(layer) or isinstance(layer, nn.Embedding)


def _weight(layer: Any, original: Entry | Stack | None) -> Tensor:
    """Returns the weight that adapters are added to, ``[out, in]``: of few bits in float32."""
    if original is not None:
        weight = read_whole(original).to(layer.weight.device)
        return weight.t() if _is_transposed(layer) else weight
    if isinstance(layer, QuantizedLinear):
        return layer.dequantize(torch.float32)
    if is_bitsandbytes(layer):
        return dequantize_matrix(Held().matrix(layer), torch.float32)
    return layer.weight.t() if isinstance(layer, nn.Embedding) else weight_of(layer)


def _merged(
    layer: LoRALayer, weight: Tensor, dtype: torch.dtype | None, again: bool
) -> tuple[nn.Module, float]:
    """Returns a layer with the sum of a weight and the adapters, and what rounding took of it."""
    base: Any = layer.base_layer
    is_embedding = isinstance(layer, LoRAEmbedding)
    rows = max(1, PANEL // max(1, layer.in_features))
    panels = [slice(k, k + rows) for k in range(0, layer.out_features, rows)]
    shape = weight.shape[::-1] if is_embedding else weight.shape  # as it lies in memory
    total = torch.empty(shape, dtype=torch.float32 if again else _dtype(base, dtype))
    held = total = total.to(weight.device)
    total = total.t() if is_embedding else total
    for panel in panels:
        total[panel] = layer.sum(weight, panel)
    linear = _with_weight(layer, held, again)
    if again:
        q = quantized_weight(total, base.format, block_size=base.block_size, double=base.nested)
        linear = Holder(linear).take(dataclasses.replace(q, dtype=base.weight_dtype))
        total = linear.dequantize(torch.float32)
    squares = torch.zeros(2, dtype=torch.float64, device=weight.device)
    for panel in panels:
        exact = layer.sum(weight, panel)
        squares[0] += (total[panel].double() - exact).square().sum()
        squares[1] += (exact.double() - weight[panel].float()).square().sum()
    rounding, added = squares.sqrt().tolist()
    return linear, rounding / added if added else 0.0


def _with_weight(layer: LoRALayer, weight: Tensor, again: bool) -> Any:
    """Returns a layer like the base of another, with a weight as it lies in memory."""
    base: Any = layer.base_layer
    made: Any = nn.Linear(layer.in_features, layer.out_features, False, "meta")
    if isinstance(layer, (LoRAEmbedding, LoRAWeight)):
        made = copy.copy(base)  # of its class, with its padding and its scale
        made._parameters = dict(base._parameters)
        for name in ("forward", "_old_forward", "_hf_hook"):  # of the base, which they would call
            vars(made).pop(name, None)
    else:
        made.bias = base.bias
        if base.bias is not None and base.bias.dtype != weight.dtype and not again:
            made.bias = nn.Parameter(base.bias.detach().to(weight.dtype), requires_grad=False)
    shared = isinstance(weight, nn.Parameter)  # that of an embedding, merged before its head
    made.weight = weight if shared else nn.Parameter(weight, requires_grad=False)
    return made.train(layer.training)


def _dtype(base: Any, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of a merged weight."""
    if dtype is not None:
        return dtype
    if isinstance(base, QuantizedLinear):
        return base.weight_dtype
    if is_bitsandbytes(base):
        return getattr(base, "compute_dtype", None) or torch.float16
    return base.weight.dtype
