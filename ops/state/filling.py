"""Fills a model with tensors that were read from a state file."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from .._core.text import quoted
from .file import StateFile, StateFileError, check_storage, identity
from .parts import decoded, names_in


class FilledModel:
    """Fills a model from a file.

    Parameters and buffers that torch's loader would only copy to are copied to one by one, each
    from a tensor that is dropped then, and given to the model's ``load_state_dict`` as they are, so
    that its hooks run. Beside what a model had, no more than one tensor is then held.
    """

    def __init__(self, file: StateFile, name: str, model: nn.Module, strict: bool) -> None:
        self._file, self._name, self._model, self._strict = file, name, model, strict
        self._tree = file.document["tree"][name]
        if not isinstance(self._tree, dict) or "$" in self._tree:
            raise StateFileError(f"'{name}' of {file.path} is not the state of a module")
        self.names = names_in(file, name)  # of all its tensors
        stored = {key: of for key, item in self._tree.items() if (of := _tensor_of(item))}
        shapes = {key: file.check_has(of).shape for key, of in stored.items()}
        self._check_fit(dict.fromkeys(self._tree) | shapes)
        self._targets = {key: target for key, target in _copied_to(model).items() if key in stored}
        self._overwritten: list[tuple[Tensor, Tensor]] = []
        self._places: dict[str, list[Tensor]] = {}  # by the names of tensors in the file
        for key, target in self._targets.items():
            self._places.setdefault(stored[key], []).append(target)

    def take(self, tensors: dict[str, Tensor]) -> None:
        """Takes the tensors to copy, and decodes the rest."""
        self._new = {name: tensors[name] for name in self._places}
        others = {key: item for key, item in self._tree.items() if key not in self._targets}
        self._others = decoded(self._file, self._name, tensors.__getitem__, others)
        versions = self._file.document["module_versions"].get(self._name)
        self._versions = None if versions is None else _versions(self._file, versions)

    def load(self) -> None:
        """Fills the model, and keeps what it overwrites."""
        for name, targets in self._places.items():
            tensor = self._new.pop(name)
            for target in targets:
                self._overwritten.append((target, target.to("cpu", copy=True)))
                target.copy_(tensor)
        state: OrderedDict[str, Any] = OrderedDict()
        for key in self._tree:
            state[key] = self._targets[key] if key in self._targets else self._others[key]
            if key.endswith("_extra_state"):  # which modules may keep
                state[key] = copy.deepcopy(state[key])
        if self._versions is not None:
            state._metadata = self._versions
        self._model.load_state_dict(state, strict=self._strict)

    def restore(self) -> None:
        """Gives the model what :meth:`load` has overwritten."""
        for target, before in self._overwritten:
            target.copy_(before)

    def _check_fit(self, shapes: dict[str, Any]) -> None:
        """Compares with the model's own state before anything changes: torch's loader would fail
        half-way. What is not a tensor in the file has the shape None."""
        own, what = self._model.state_dict(), f"{self._name} of {self._file.path}"
        held = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        held |= {name for name, _ in self._model.named_buffers(remove_duplicate=False)}
        for words, names in (
            ("lacks", own.keys() - shapes.keys()),
            ("has what the model lacks:", shapes.keys() - own.keys()),
        ):
            if self._strict and names:
                first = ", ".join(quoted(repr(name), 100) for name in sorted(names)[:5])
                shown = first + ", ..." * (len(names) > 5)
                raise ValueError(f"{what} {words} {shown}; strict=False loads the rest")
        for key in own.keys() & shapes.keys():
            here, shape = own[key], shapes[key]
            if isinstance(here, DTensor):
                raise ValueError(
                    f"'{key}' of the model is a DTensor, and {what} has whole tensors; load before "
                    "sharding, or with torch.distributed.checkpoint"
                )
            if not isinstance(here, Tensor):
                continue
            if shape is None:
                raise ValueError(f"'{key}' in {what} is not a tensor, but the model's is")
            if is_lazy(here):
                continue
            # What a module makes for its state, such as a text, may have another size in another.
            if key in held and here.shape != shape:
                raise ValueError(
                    f"'{key}' in {what} has shape {quoted(tuple(shape))}, the model's "
                    f"{tuple(here.shape)}"
                )
            if _has_memory(here):
                check_storage(here, f"{key} of the model")


def _tensor_of(item: Any) -> str | None:
    """Returns the name of the tensor that an encoded value stands for, or None for other values."""
    return item["name"] if isinstance(item, dict) and item.get("$") == "tensor" else None


def _has_memory(tensor: Tensor) -> bool:
    """Returns whether a tensor is dense or strided memory on a device, and no subclass."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and not is_lazy(tensor)
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and tensor.device.type != "meta"
    )


def _copied_to(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers that the model's ``load_state_dict`` copies to and leaves
    as they are otherwise. Those below modules with hooks or a loader of their own are left out."""
    own_loader = vars(model).get("load_state_dict", type(model).load_state_dict)
    if own_loader is not nn.Module.load_state_dict:
        return {}
    own = model.state_dict()
    found: dict[str, Tensor] = {}
    special: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        if prefix.startswith(tuple(special)):
            continue
        loader = type(module)._load_from_state_dict
        if module._load_state_dict_pre_hooks or not loader.__module__.startswith("torch.nn."):
            special.append(prefix)
            continue
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            shown = own.get(prefix + key)
            if tensor is None or not isinstance(shown, Tensor) or not _has_memory(tensor):
                continue
            if identity(shown) == identity(tensor):  # else hooks show another
                found[prefix + key] = tensor.detach()
    return found


def _versions(file: StateFile, versions: Any) -> OrderedDict[str, dict[str, Any]]:
    """Returns the versions that torch keeps of modules, for loading states of older torch."""
    if not isinstance(versions, dict) or not all(isinstance(v, dict) for v in versions.values()):
        raise StateFileError(f"the versions of modules in {file.path} are malformed")
    if not all(type(v.get("version")) in (int, type(None)) for v in versions.values()):
        raise StateFileError(f"the versions of modules in {file.path} are not numbers")
    found = OrderedDict(versions)
    for name, version in found.items():  # how a load went, not what was saved
        found[name] = {k: v for k, v in version.items() if k != "assign_to_params_buffers"}
    return found
