"""Chooses the layers and experts of a model whose weights are quantized, and says why others are
not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._core.checks import list_of_names
from .._core.registration import FLOATS
from ..functional.quantize_matrix import QuantizedMatrix
from ..nn.experts import ExpertsRule, QuantizedExperts
from ..nn.linear import Linear
from ..nn.quantized import CLASSES
from ..patching.changes import Changes, patched_names
from ..patching.experts import found_experts
from ..patching.peft_experts import param_wrappers
from .report import Left

FROZEN = "it is trained, and others are frozen"
HEAD = "an output head"
ROUTER = "a part of a router, which chooses or weighs experts"
WIDE = "transformers keeps it in float32"
ADAPTER = "a part of an adapter"
EXPERTS = "matrices of experts in one parameter"
GATES = "gate", "*expert*_gate", "gating"  # names of routers, where experts are beside them


def joined(module: str, name: str) -> str:
    """Returns the name of a tensor of a module, whose own name is empty if it is the model."""
    return f"{module}.{name}" if module else name


def is_conv1d(module: nn.Module) -> bool:
    """Returns whether a module is the Conv1D of transformers: a linear layer with the transposed
    weight."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module) -> bool:
    """Returns whether a module is a linear layer and nothing more: subclasses may compute, or use
    their weights, in other ways."""
    return type(module) in (nn.Linear, Linear) or is_conv1d(module)


def weight_of(module: nn.Module) -> Tensor:
    """Returns the weight of a linear layer, ``[out, in]``."""
    weight: Any = module.weight
    return weight.detach().t() if is_conv1d(module) else weight.detach()


@dataclasses.dataclass(frozen=True)
class Holder:
    """A module whose weights can be quantized: a linear layer, or experts, with their rule."""

    module: nn.Module
    rule: ExpertsRule | None = None

    @property
    def params(self) -> dict[str, Any]:
        """Returns the parameters that are quantized, by their names in the module."""
        names = ("weight",) if self.rule is None else self.rule.stacks
        return {name: getattr(self.module, name) for name in names}

    @property
    def weights(self) -> dict[str, Tensor]:
        """Returns the weights by name: ``[out, in]``, or stacks as they lie."""
        if self.rule is None:
            return {"weight": weight_of(self.module)}
        return {name: param.detach() for name, param in self.params.items()}

    @property
    def trains(self) -> bool:
        return any(param.requires_grad for param in self.params.values())

    def take(self, *weights: QuantizedMatrix) -> Any:
        """Turns the module into one with these weights, in place. What :func:`headroom.patch` set
        on a layer reads weights of floats, and goes; that of experts reads both."""
        if self.rule is not None:
            return QuantizedExperts.take(self.module, self.rule, weights)
        Changes().restore(self.module)
        return CLASSES[weights[0].format].take(self.module, *weights)


def holders(model: nn.Module) -> tuple[dict[str, Holder], dict[str, str]]:
    """Returns the linear layers and the experts of a model by name, and why other experts are not
    among them, by name."""
    experts, in_peft = found_experts(model), param_wrappers(model)
    found, left = {}, {}
    for name, module in model.named_modules():
        rule = experts.get(module)
        if module in in_peft:
            left[name] = "PEFT has given its stacks adapters"
        elif isinstance(rule, str):
            left[name] = rule
        elif is_linear(module) or (rule and not isinstance(module, QuantizedExperts)):
            found[name] = Holder(module, rule)
    return found, left


def choose(
    model: nn.Module, skip: Iterable[str] | str | None
) -> tuple[dict[str, Holder], dict[str, str]]:
    """Returns the layers and experts to quantize by name, and reasons for the others, by name.

    Raises:
        TypeError: a weight is a DTensor, or ``skip`` are no names.
        ValueError: ``skip`` has a name that the model does not have, or the weight of a layer lies
            in memory of another parameter.
    """
    held, left = holders(model)
    modules = {name: one.module for name, one in held.items()}
    linears = {name: one.module for name, one in held.items() if one.rule is None}
    left |= _skipped(model, modules, skip) if skip is not None else heads(model, linears)
    owners, adapters = _owners(model), _in_adapters(model)
    for name, one in held.items():
        for key, weight in one.params.items():
            full = joined(name, key)
            if isinstance(weight, DTensor):
                raise TypeError(f"'{full}' is a DTensor: quantize before fully_shard()")
            if name in left:
                continue
            places = owners.get(id(weight), [])
            shared = [other for other in places if other != full]
            if id(one.module) in adapters:
                left[name] = ADAPTER
            elif (reason := _obstacle(one.module, weight, places)) is not None:
                left[name] = reason
            elif shared and skip is None:
                left[name] = f"it is also {shared[0]}"
            elif shared:
                raise ValueError(f"'{full}' is also '{shared[0]}': name one of them in skip")
    chosen = {name: one for name, one in held.items() if name not in left}
    frozen = {name for name, one in chosen.items() if not one.trains}
    if 0 < len(frozen) < len(chosen):
        left |= dict.fromkeys(chosen.keys() - frozen, FROZEN)
        chosen = {name: one for name, one in chosen.items() if name in frozen}
    _refuse_shared(model, chosen)
    return chosen, left


def _obstacle(module: nn.Module, weight: Tensor, places: list[str]) -> str | None:
    """Returns why a weight of a module cannot be quantized, or None."""
    if not places:
        return "it is computed from other parameters"
    if weight.dtype not in FLOATS:
        return f"it is {weight.dtype}"
    if not weight.numel():
        return "it has no elements"
    if "forward" in vars(module).keys() - patched_names(vars(module)):
        return "its forward was replaced"
    return None


def left_parameters(model: nn.Module, reasons: dict[str, str]) -> list[Left]:
    """Returns what is left of a model: parameters of floats, each once, with their reasons."""
    found, seen, adapters = [], set(), _in_adapters(model)
    for prefix, module in model.named_modules():
        known = ADAPTER if id(module) in adapters else reasons.get(prefix)
        for name, param in module.named_parameters(recurse=False):
            if id(param) in seen or not param.is_floating_point():
                continue
            seen.add(id(param))
            reason = _reason(module, name, param, known)
            found.append(Left(joined(prefix, name), type(module).__name__, param.nbytes, reason))
    return found


def _reason(module: nn.Module, name: str, param: Tensor, known: str | None) -> str:
    if param.dim() < 2:
        return "a vector"
    if known is not None and (name == "weight" or known == ADAPTER):
        return known
    if name.endswith("_bias") and is_of_experts(module, param):
        return "biases of experts"
    if is_of_experts(module, param):
        why = "" if known is None else f": {known}"
        return f"{EXPERTS}, which are not quantized{why}"
    if isinstance(module, nn.Linear):
        return "of a subclass of Linear, which may use its weight in another way"
    return "not the weight of a linear layer"


def is_of_experts(module: nn.Module, param: Tensor) -> bool:
    """Returns whether a parameter of a module holds the matrices of several experts."""
    if isinstance(module, (nn.Linear, nn.Embedding)) or is_conv1d(module):
        return False
    if param.dim() == 3:
        return len(param) > 1 and not isinstance(module, (nn.Conv1d, nn.ConvTranspose1d))
    return param.dim() == 2 and "expert" in type(module).__name__.lower()


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """Returns the names of each parameter by its id: to hold parameters would keep their memory."""
    owners: dict[int, list[str]] = {}
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(param), []).append(joined(prefix, name))
    return owners


def _in_adapters(model: nn.Module) -> set[int]:
    """Returns the ids of what layers with adapters, of Headroom or of PEFT, have beside their
    base, and of modules of which adapters have copies that train, with these."""
    return {
        id(part)
        for module in model.modules()
        if module._modules.keys() & {"base_layer", "modules_to_save"}
        for name, child in module.named_children()
        if name != "base_layer"
        for part in child.modules()
    }


def _skipped(
    model: nn.Module, modules: dict[str, nn.Module], skip: Iterable[str] | str
) -> dict[str, str]:
    patterns = [skip] if isinstance(skip, str) else list_of_names("skip", skip)
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"skip has {pattern!r}, wanted names")
        if not any(_matches(name, pattern) for name in names):
            raise ValueError(f"skip: the model has no module with the name {pattern!r}")
    return {
        name: "named in skip"
        for name in modules
        if any(_matches(above, pattern) for above in _above(name) for pattern in patterns)
    }


def _matches(name: str, pattern: str) -> bool:
    """Returns whether a name, or its end after a dot, is the pattern."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _above(name: str) -> Iterator[str]:
    """Yields the name of a module and of those that it lies in."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def heads(model: nn.Module, linears: dict[str, nn.Module]) -> dict[str, str]:
    """Returns the layers that answer, those in routers, and those of which transformers says that
    they need float32. Layers that answer are the output embedding of a model of transformers, what
    lies outside its base model, such as classifiers, and the layer with the last parameter of any
    model."""
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    base = getattr(model, "base_model", model)
    inside = {id(module) for module in base.modules()} if isinstance(base, nn.Module) else set()
    last = [name.rpartition(".")[0] for name, _ in model.named_parameters()][-1:]
    lists = "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"
    wide = [name for each in lists for name in getattr(model, each, None) or ()]
    modules = dict(model.named_modules(remove_duplicate=False))
    left = {}
    for name, module in linears.items():
        if module is outputs or id(module) not in inside or name in last:
            left[name] = HEAD
        elif _is_in_router(name, modules):
            left[name] = ROUTER
        elif any(f".{one}." in f".{name}.weight." for one in wide):
            left[name] = WIDE
    return left


def _is_in_router(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Returns whether a module chooses the experts of a token or weighs them, or lies in one that
    does, by the names of modules and of their classes."""
    for above in _above(name):
        parent, _, last = above.rpartition(".")
        if any(fnmatchcase(last, gate) for gate in GATES) and _has_experts(modules[parent]):
            return True
        is_router = "router" in last.lower() or "router" in type(modules[above]).__name__.lower()
        if is_router and not _has_experts(modules[above]):
            return True
    return False


def _has_experts(module: nn.Module) -> bool:
    params = module.parameters(recurse=False)
    names = (name for name, _ in module.named_children())
    return any("expert" in name for name in names) or any(is_of_experts(module, p) for p in params)


def _refuse_shared(model: nn.Module, chosen: dict[str, Holder]) -> None:
    """Raises where memory of a weight would stay, because it is that of another parameter too."""
    weights = {
        id(param): joined(name, key)
        for name, one in chosen.items()
        for key, param in one.params.items()
    }
    own = set(weights.values())
    holders: dict[tuple[torch.device, int], list[str]] = {}
    for name, param in model.named_parameters():
        if type(param) is nn.Parameter and param.untyped_storage().nbytes() and not param.is_meta:
            place = param.device, param.untyped_storage().data_ptr()
            holders.setdefault(place, []).append(weights.get(id(param), name))
    for names in holders.values():
        mine = [name for name in names if name in own]
        if mine and len(names) > 1:
            other = next(name for name in names if name != mine[0])
            raise ValueError(
                f"'{mine[0]}' and '{other}' lie in one storage, which would stay: clone one of them"
            )
