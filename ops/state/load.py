"""Loads the state of a run from a file: :func:`load_state`."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .._core.ownership import given_up
from .._core.randomness import generator_states, restore_generators
from .._core.text import quoted
from ..optim.base import Optimizer
from .file import StateFile, StateFileError
from .filling import FilledModel
from .generators import checked_generators
from .parts import Part, check_maps, decoded, in_file, named_objects, names_in

# What a forged state may raise in a load_state_dict, beside the loader's own errors.
GARBLED = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError)


def load_state(
    path: str | os.PathLike[str],
    *,
    model: Part = None,
    optimizer: Part = None,
    scaler: Part = None,
    scheduler: Part = None,
    loader: Part = None,
    rng: bool = True,
    strict: bool = True,
    progress: bool = True,
) -> Any:
    """Loads what :func:`save_state` saved, and returns its ``extra``.

    The whole file is read once and checked before anything changes. What is loaded is what was
    checked: it is read to memory of its own, never mapped. Models are filled last, by one tensor at
    a time; existing states of an optimizer are replaced, and both are held until that is done, as
    are copies on the CPU of what a model had, to give everything back if the load fails or is
    interrupted. So the memory needed beyond the states themselves is one copy of the model and one
    tensor.

    Args:
        path: a file of :func:`save_state`, of this version of Headroom or an earlier one.
        model, optimizer, scaler, scheduler, loader: what to load into; lists as they were saved.
            Parts that are not given are left out.
        rng: restore the random number generators, if they were saved.
        strict: the model must have the names that were saved, no more and no fewer. Shapes must
            always fit.
        progress: show a bar if it takes longer than a second.

    Returns:
        ``extra`` as it was given to :func:`save_state`, or None. Its tensors are on the CPU.

    Raises:
        StateFileError: the file is damaged, cut off, not a state file, of a later version, lacks a
            part that is asked for, or holds what cannot be loaded. The message names the tensor.
        OSError: it cannot be read.
        ValueError: it does not fit the model, or the generator of NumPy, which is of another kind;
            or the error of an object's ``load_state_dict``.

    Nothing has changed after an error, nor after a KeyboardInterrupt or where memory is short, but
    for what a ``load_state_dict`` of the loader, or one that a module has of its own, did before it
    failed.
    """
    parts = {
        "optimizer": optimizer,
        "scaler": scaler,
        "scheduler": scheduler,
        "loader": loader,
        "model": model,
    }
    wanted = [
        (part, *pair) for part, objects in parts.items() for pair in named_objects(part, objects)
    ]
    with StateFile(path) as file, torch.no_grad():
        tree = file.document["tree"]
        for _, name, _ in wanted:
            if name not in tree:
                raise StateFileError(
                    f"{file.path} has no '{name}'; it has {quoted(', '.join(tree)) or 'nothing'}"
                )
        if optimizer is not None:
            check_maps(file)
        models = {
            name: FilledModel(file, name, one, strict)
            for part, name, one in wanted
            if part == "model" and isinstance(one, nn.Module)
        }
        optimizers = [(name, one) for part, name, one in wanted if part == "optimizer"]
        places = {k: v for name, one in optimizers for k, v in _places(one, tree[name]).items()}
        tensors = dict(_moved(file, places, progress))
        parts_read = {"extra", *(["rng"] if rng else [])}
        parts_read.update(name for _, name, _ in wanted if name not in models)
        names = {name for part in parts_read for name in names_in(file, part)}
        names.update(*(filled.names for filled in models.values()))
        tensors |= file.read(in_file(file, names - tensors.keys()), but=tensors, progress=progress)
        states = {name: decoded(file, name, tensors.__getitem__) for name in parts_read}
        for _, name, _ in wanted:
            if name not in models and not isinstance(states[name], dict):
                raise StateFileError(f"'{name}' of {file.path} is not a state")
        generators = checked_generators(file, states.get("rng"))
        for filled in models.values():
            filled.take(tensors)
        del tensors
        with given_up():  # nobody else has what was read, nor what a failed load gives back
            _load_all(file, wanted, models, states, generators)
    return states["extra"]


def _load_all(
    file: StateFile,
    wanted: list[tuple[str, str, Any]],
    models: dict[str, FilledModel],
    states: dict[str, Any],
    generators: dict[str, Any] | None,
) -> None:
    """Loads the states into the objects. If one fails, restores those that were loaded before."""
    undo: list[Callable[[], None]] = []
    if generators is not None:
        undo.append(functools.partial(restore_generators, generator_states()))
    try:
        for part, name, one in wanted:
            try:
                if name in models:
                    undo.append(models[name].restore)
                    models[name].load()
                    continue
                if part != "loader":
                    undo.append(_undo(one, part))
                one.load_state_dict(states.pop(name))
            except GARBLED as error:
                raise StateFileError(
                    f"'{name}' of {file.path} does not load: {type(error).__name__}: "
                    f"{quoted(error)}"
                ) from error
        if generators is not None:
            restore_generators(generators)
    except BaseException:
        for restore in reversed(undo):
            restore()
        raise


def _undo(one: Any, part: str) -> Callable[[], None]:
    """Returns a function that restores an optimizer, scaler or scheduler as it is now."""
    state = one.state_dict()
    if part != "optimizer":
        state = copy.deepcopy(state)
    attributes = dict(vars(one)) if part == "scheduler" and hasattr(one, "__dict__") else None

    def restore() -> None:
        if attributes is not None:  # torch's schedulers take whatever is in a state as attributes
            vars(one).clear()
            vars(one).update(attributes)
        one.load_state_dict(state)

    return restore


# ---- states that go to the device as they are read ----------------------------------------------


def _places(optimizer: Any, tree: Any) -> dict[str, torch.device]:
    """Returns the devices of an optimizer's states by the names of their tensors in the file.
    Headroom's and torch's loaders move each state to the device of its parameter; states on the
    CPU, and those of other loaders, are left out."""
    loader = getattr(type(optimizer), "load_state_dict", None)
    if loader not in (torch.optim.Optimizer.load_state_dict, Optimizer.load_state_dict):
        return {}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found = {}
    for index, entry in _entries(tree):
        if not 0 <= index < len(params) or _on_cpu(params[index].device):
            continue
        for key, value in entry.items():
            if key != "step" and isinstance(value, dict) and value.get("$") == "tensor":
                if isinstance(name := value.get("name"), str):
                    found[name] = params[index].device
    return found


def _on_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def _entries(tree: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the entries of an optimizer's state, encoded, with the numbers of their parameters."""
    states = tree.get("state") if isinstance(tree, dict) else None
    items = states.get("items") if isinstance(states, dict) else None
    for item in items if isinstance(items, list) else ():
        if isinstance(item, list) and len(item) == 2:
            if type(item[0]) is int and isinstance(item[1], dict) and "$" not in item[1]:
                yield item[0], item[1]


def _moved(
    file: StateFile, places: dict[str, torch.device], progress: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of these names, each on its device."""
    for batch in file.batches(in_file(file, set(places)), progress=progress):
        for name, tensor in batch.items():
            yield name, tensor.to(places[name])
