"""States on disk that survive: :func:`save_state`, :func:`load_state`, :func:`latest`."""

from __future__ import annotations

import copy
import errno
import functools
import os
import random
import re
import sys
import time
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from .._core import binaries
from ..optim.adam8bit import Adam8bit, dynamic_map
from ..optim.base import Optimizer
from .file import (
    MALFORMED,
    PIECE,
    StateFile,
    StateFileError,
    check_storage,
    check_tensor,
    identity,
    is_state_file,
    partial_of,
    remove_partial,
    shortened,
    write,
)
from .tree import decode, encode, tensor_names

__all__ = ["StateFileError", "latest", "load_state", "save_state"]

PathLike = str | os.PathLike[str]


def save_state(
    path: PathLike,
    *,
    model: Any = None,
    optimizer: Any = None,
    scaler: Any = None,
    scheduler: Any = None,
    loader: Any = None,
    extra: Any = None,
    rng: bool = True,
    keep: int | None = None,
    progress: bool = True,
) -> None:
    """Saves a run so that :func:`load_state` can go on with it to the same bits.

    The file appears at ``path`` whole or not at all: it is written beside it, synced and renamed,
    so a crash, a kill, a full disk or a power cut leaves the file that was there before. It has a
    checksum for every byte, and takes no more memory than a copy of the largest tensor and 32 MB.
    The checksums are of the bytes that are written, so that a file can be loaded even if another
    thread changed the weights meanwhile; it then holds some from before and some from after. It is
    a safetensors file (no pickle), which ``safetensors.safe_open`` and
    ``safetensors.torch.load_file`` read too; tensors are called ``model.KEY`` and
    ``optimizer.state.NUMBER.NAME``.

    Example::

        optimizer = headroom.optim.AdamW(model.parameters())
        headroom.save_state("step-100.safetensors", model=model, optimizer=optimizer, keep=3)

        extra = headroom.load_state(
            headroom.latest("."), model=model, optimizer=optimizer
        )

    Args:
        path: the file. Its folder is made if it is missing. A file that is there is replaced, and
            keeps its permissions; anything else, such as a device or a pipe, is refused.
        model, optimizer, scaler, scheduler, loader: objects with ``state_dict()`` and
            ``load_state_dict()``, or lists of such. A loader is a data loader with a position, such
            as torchdata's ``StatefulDataLoader``.
        extra: whatever else the run needs: numbers, strings, bytes, None, paths of ``pathlib``,
            dates and times (with an offset, but no named time zone), dtypes, devices, tensors,
            NumPy arrays, and lists, tuples, sets, dicts, ``argparse.Namespace`` and
            ``types.SimpleNamespace`` of those. They come back as they were, of the same classes,
            tensors on the CPU. All else is refused, subclasses too, and the error names the key.
        rng: save the states of the random number generators of Python, torch, all CUDA devices in
            use, and NumPy if it is imported.
        keep: afterwards, keep this file and the ``keep - 1`` newest whose names differ from it in
            nothing but numbers, and remove older ones. Files that are no states stay. Which are
            older is told by a number in the files, as :func:`latest` says; not by clocks or names.
        progress: show a bar if it takes longer than a second.

    Tensors that are one another, such as tied weights, are saved once. Gradients are not saved.

    Raises:
        TypeError: something is of a kind that the file does not hold; the message names it.
            DTensors are refused: sharded states are for ``torch.distributed.checkpoint``.
        ValueError: ``keep`` is not positive, or there is no number in the name of the file; or the
            memory of a tensor has been freed, as by ``untyped_storage().resize_(0)``; or there are
            more values than a header may have.
        OSError: the disk is full, the folder is not writable, there is something at ``path`` that
            is no file, ...: the message says what to do.
        StateFileError: another process or thread is writing this very file.

        The file that was there before is as it was, unless the message says otherwise.
    """
    path = os.fspath(path)
    if keep is not None and keep < 1:
        raise ValueError(f"keep={keep}: at least 1, the file that is written, must be kept")
    if keep is not None and not re.search(r"\d", os.path.basename(path)):
        raise ValueError(
            f"keep={keep} needs a number in the name of the file, such as step-100.safetensors; "
            f"{os.path.basename(path)!r} has none"
        )
    tensors: dict[str, Tensor] = {}
    names: dict[Any, str] = {}

    def add(tensor: Tensor, name: str) -> str:
        check_tensor(tensor, name)
        name = name.encode("utf-8", "backslashreplace").decode()
        same = identity(tensor)
        if same not in names:
            while name in tensors:
                name += "'"
            tensors[name] = tensor
            names[same] = name
        return names[same]

    parts = {
        "model": model,
        "optimizer": optimizer,
        "scaler": scaler,
        "scheduler": scheduler,
        "loader": loader,
    }
    tree: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    for part, objects in parts.items():
        for name, one in _named(part, objects):
            state = one.state_dict()
            if (metadata := getattr(state, "_metadata", None)) is not None:
                versions[name] = _encoded(dict(metadata), name, add)
            tree[name] = _encoded(dict(state), name, add)
    if extra is not None:
        tree["extra"] = _encoded(extra, "extra", add)
    if rng:
        tree["rng"] = _encoded(_generators(), "rng", add)
    document = {
        "headroom": binaries.VERSION,
        "torch": str(torch.__version__),
        "saved_ns": time.time_ns(),
        "tree": tree,
        "module_versions": versions,
    }
    if any(isinstance(one, Adam8bit) for _, one in _named("optimizer", optimizer)):
        document["maps_crc32"] = _maps()
    write(path, document, tensors, progress=progress)
    if keep is not None:
        _rotate(path, keep)


def load_state(
    path: PathLike,
    *,
    model: Any = None,
    optimizer: Any = None,
    scaler: Any = None,
    scheduler: Any = None,
    loader: Any = None,
    rng: bool = True,
    strict: bool = True,
    progress: bool = True,
) -> Any:
    """Loads what :func:`save_state` saved, and returns its ``extra``.

    The whole file is checked before anything is changed. What is loaded is what was checked: it is
    read to memory of its own, never mapped. Models are filled last, by one tensor at a time (or a
    few that make 8 MB), each read and checked once more on its way; states of an optimizer that has
    some already are replaced, and both are held until it is done. So the file is read once, the
    part of a model that is larger than 8 MB twice, and what takes memory beyond the states
    themselves is one tensor.

    Args:
        path: a file of :func:`save_state`, of this version of Headroom or an earlier one.
        model, optimizer, scaler, scheduler, loader: what to load into; lists as they were saved.
            Those that are not given are left out.
        rng: put the random number generators back, if they were saved.
        strict: the model must have the names that were saved, no more and no fewer. Shapes must
            always fit.
        progress: show a bar if it takes longer than a second.

    Returns:
        ``extra`` as it was given to :func:`save_state`, or None. Its tensors are on the CPU.

    Raises:
        StateFileError: the file is damaged, cut off, no state file, of a later version, lacks a
            part that is asked for, or holds what cannot be loaded. The message names the tensor.
        OSError: it cannot be read.
        ValueError: it does not fit the model, or the generator of NumPy, which is of another kind;
            or the error of an object's ``load_state_dict``.

        Nothing is changed then, with two exceptions: a ``load_state_dict`` other than those of
        optimizers, scalers and schedulers (which are put back) may fail after it has begun; and if
        another process writes to the file in the moment in which a model of more than 8 MB is
        filled, the error says that a part of the model is loaded.
    """
    parts = {
        "optimizer": optimizer,
        "scaler": scaler,
        "scheduler": scheduler,
        "loader": loader,
        "model": model,
    }
    wanted = [(part, *pair) for part, objects in parts.items() for pair in _named(part, objects)]
    with StateFile(path) as file, torch.no_grad():
        tree = file.document["tree"]
        for _, name, _ in wanted:
            if name not in tree:
                raise StateFileError(
                    f"{file.path} has no '{name}'; it has {shortened(', '.join(tree)) or 'nothing'}"
                )
        if optimizer is not None:
            _check_maps(file)
        models = {
            name: _Filled(file, name, one, strict) for part, name, one in wanted if part == "model"
        }
        optimizers = [(name, one) for part, name, one in wanted if part == "optimizer"]
        places = {k: v for name, one in optimizers for k, v in _places(one, tree[name]).items()}
        tensors = dict(_moved(file, places, progress))
        kept = {name for _, name, _ in wanted if name not in models} | {"extra"}
        if rng:
            kept.add("rng")
        names = {name for part in kept for name in _names(file, part)}
        names.update(*(filled.held for filled in models.values()))
        tensors |= file.read(_in_file(file, names - tensors.keys()), but=tensors, progress=progress)
        states = {name: _decoded(file, name, tensors.__getitem__) for name in kept}
        for part, name, _ in wanted:
            if part != "model" and not isinstance(states[name], dict):
                raise StateFileError(f"'{name}' of {file.path} is no state")
        generators = _checked_generators(file, states.get("rng"))
        for filled in models.values():
            filled.take(tensors)
        del tensors
        file.check_unchanged()
        undo: list[Callable[[], None]] = []
        try:
            for part, name, one in wanted:
                try:
                    if part == "model":
                        models.pop(name).load(progress)
                        continue
                    if part != "loader":
                        undo.append(_undo(one, part))
                    one.load_state_dict(states.pop(name))
                except GARBLED as error:
                    raise StateFileError(
                        f"'{name}' of {file.path} does not load: {type(error).__name__}: "
                        f"{shortened(error)}"
                    ) from error
        except BaseException:
            for put_back in reversed(undo):
                put_back()
            raise
        for put in generators:
            put()
    return states["extra"]


def latest(directory: PathLike, *, verify: bool = True) -> Path | None:
    """The state in a folder that was saved last, or None if there is none, or no folder.

    It is whole: all of its checksums are looked at. States that are damaged or cut off, and files
    that cannot be read, are passed over with a warning; if there are such and none is whole, that
    is an error, since a run that then began anew would do so beside its states. Files that are no
    states are passed over in silence, folders and those whose names begin with a dot too.

    The order is that of the number which every state has, higher than those that were in its
    folder when it was saved, and does not depend on clocks, names or times of files. Files of
    Headroom 0.1.0 have none and count as older; among them, and between equal numbers (of copies,
    or of two runs that save in one folder in the same moment), the time of saving decides, which is
    in the file too, and then the numbers in the names.

    Args:
        directory: the folder; folders in it are not searched.
        verify: read the newest file whole, at the speed of the disk or of memory. Else only its
            length and its header are looked at; :func:`load_state` does the rest.

    Raises:
        StateFileError: there are states, and none that is whole.
        OSError: the folder cannot be read, or files in it cannot, and none is whole.
    """
    try:
        paths = list(Path(directory).iterdir())
    except FileNotFoundError:
        return None
    states, failures = _by_age(paths)
    found = None
    while states and found is None:
        path = states.pop()
        try:
            if verify:
                with StateFile(path) as file:
                    file.read()
            found = path
        except FileNotFoundError:
            continue  # removed by a save with keep=
        except (StateFileError, OSError) as error:
            failures.append(error)
    if found is None and failures:
        count = f"{len(failures)} file{'s' * (len(failures) > 1)} in {os.fspath(directory)}"
        advice = f"{count}, and none that is a whole state: {shortened(failures[0])}. Move away"
        unread = [error for error in failures if isinstance(error, OSError)]
        if unread:
            raise OSError(
                unread[0].errno or errno.EIO,
                f"cannot be read, or is damaged: {advice} what is not needed, or mend permissions",
                unread[0].filename or os.fspath(directory),
            ) from unread[0]
        raise StateFileError(f"{advice} what is damaged to begin anew") from failures[0]
    for error in failures:
        warnings.warn(f"passed over: {error}", stacklevel=2)
    return found


# ---- files ---------------------------------------------------------------------------------------


def _by_age(paths: Iterable[Path]) -> tuple[list[Path], list[Exception]]:
    """Those of the files that are states, the oldest first, and why others may be but were not
    looked at."""
    found, failures = [], []
    for path in paths:
        try:
            if path.name.startswith(".") or not is_state_file(path):
                continue
            with StateFile(path) as file:
                numbers = [int(digits) for digits in re.findall(r"\d+", path.name)]
                found.append((file.sequence, file.document["saved_ns"], numbers, path))
        except FileNotFoundError:
            continue  # removed by a save with keep=
        except (StateFileError, OSError) as error:
            failures.append(error)
    return [path for *_, path in sorted(found)], failures


def _rotate(path: str, keep: int) -> None:
    """Removes the older states of the family of a file that has just been written."""
    written = Path(os.path.realpath(path))
    family = r"\d+".join(map(re.escape, re.split(r"\d+", written.name)))
    others = [
        other
        for other in written.parent.iterdir()
        if re.fullmatch(family, other.name) and other != written
    ]
    states, _ = _by_age(others)  # what cannot be read is left alone
    for other in states[: max(0, len(states) - (keep - 1))]:
        try:
            other.unlink(missing_ok=True)
        except OSError as error:
            warnings.warn(f"an old state is not removed: {error}", stacklevel=3)
    for other in written.parent.iterdir():
        if re.fullmatch(partial_of(family), other.name):
            remove_partial(other)


# ---- parts ---------------------------------------------------------------------------------------


def _named(part: str, objects: Any) -> list[tuple[str, Any]]:
    """The objects of a part, with their names in the file."""
    if objects is None:
        return []
    many = isinstance(objects, (list, tuple))
    named = [(f"{part}.{i}", o) for i, o in enumerate(objects)] if many else [(part, objects)]
    for name, one in named:
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(one, method, None)):
                raise TypeError(
                    f"{name} is a {type(one).__name__} without {method}(); give the object itself, "
                    "not its state, and values as extra="
                )
    return named


def _encoded(value: Any, name: str, add: Callable[[Tensor, str], str]) -> Any:
    try:
        return encode(value, name, add)
    except RecursionError:
        raise TypeError(f"'{name}' contains itself, or is nested too deeply") from None


# What a state that someone has made up may raise in a load_state_dict, beside its own errors.
GARBLED = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError)


def _names(file: StateFile, part: str) -> Iterable[str]:
    try:
        return list(tensor_names(file.document["tree"].get(part)))
    except MALFORMED as error:
        raise StateFileError(f"'{part}' of {file.path} cannot be read: {error}") from error


def _in_file(file: StateFile, names: set[str]) -> list[str]:
    """The names in the order of the file, and those that are not in it."""
    return [name for name in file.entries if name in names] + sorted(names - file.entries.keys())


def _decoded(file: StateFile, name: str, tensors: Callable[[str], Tensor], tree: Any = None) -> Any:
    try:
        return decode(file.document["tree"].get(name) if tree is None else tree, tensors)
    except MALFORMED as error:
        what = f"'{name}' of {file.path} cannot be read: {shortened(error)}"
        raise StateFileError(what) from error


def _places(optimizer: Any, tree: Any) -> dict[str, torch.device]:
    """Where the states of an optimizer will lie that are to be moved there as they are read, by the
    names of their tensors: those of Headroom's and torch's loaders, which move each to the device
    of its parameter, unless that is the CPU."""
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
    """The entries of an optimizer's state, encoded, with the numbers of their parameters."""
    states = tree.get("state") if isinstance(tree, dict) else None
    items = states.get("items") if isinstance(states, dict) else None
    for item in items if isinstance(items, list) else ():
        if isinstance(item, list) and len(item) == 2:
            if type(item[0]) is int and isinstance(item[1], dict) and "$" not in item[1]:
                yield item[0], item[1]


def _moved(
    file: StateFile, places: dict[str, torch.device], progress: bool
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of these names, each on its device."""
    effect = f"Nothing was loaded. {file.advice}"
    for batch in file.batches(_in_file(file, set(places)), lambda: effect, progress=progress):
        for name, tensor in batch.items():
            yield name, file.strided(name, tensor).to(places[name], copy=True)


def _undo(one: Any, part: str) -> Callable[[], None]:
    """What puts an optimizer, scaler or scheduler back as it is now."""
    before = one.state_dict()
    if part != "optimizer":
        before = copy.deepcopy(before)
    attributes = dict(vars(one)) if part == "scheduler" and hasattr(one, "__dict__") else None

    def put_back() -> None:
        if attributes is not None:  # torch's schedulers take whatever is in a state as attributes
            vars(one).clear()
            vars(one).update(attributes)
        one.load_state_dict(before)

    return put_back


class _Filled:
    """A model that is to be filled from a file, by one tensor at a time.

    Parameters and buffers that torch would do no more than copy to are copied to from the file,
    and given to the model's ``load_state_dict`` as what they are by then, so that its hooks run.
    All else is read before anything is changed: states of modules that load themselves in another
    way, and models of up to a piece.

    Attributes:
        held: the names of the tensors to read before.
    """

    def __init__(self, file: StateFile, name: str, model: Any, strict: bool) -> None:
        self._file, self._name, self._model, self._strict = file, name, model, strict
        self._tree = file.document["tree"][name]
        if not isinstance(self._tree, dict):
            raise StateFileError(f"'{name}' of {file.path} is no state")
        self.held = set(_names(file, name))
        stored = {key: of for key, item in self._tree.items() if (of := _tensor_of(item))}
        if "$" not in self._tree:  # else it has keys that are no names
            for of in stored.values():
                file.check_has(of)
            shapes = {key: file.entries[of].shape for key, of in stored.items()}
            self._check_fit(dict.fromkeys(self._tree) | shapes)
        self._targets = {
            key: target for key, target in _plainly_loaded(model).items() if key in stored
        }
        self._places: dict[str, list[Tensor]] = {}  # by the names of tensors in the file
        for key, target in self._targets.items():
            self._places.setdefault(stored[key], []).append(target)
        if sum(file.entries[of].size for of in self._places) > PIECE:
            others = {key: item for key, item in self._tree.items() if key not in self._targets}
            self.held = set(tensor_names(others))

    def take(self, tensors: dict[str, Tensor]) -> None:
        """Takes what is held."""
        self._tensors = {name: tensors[name] for name in self.held}
        others = {key: item for key, item in self._tree.items() if key not in self._targets}
        self._others = _decoded(self._file, self._name, tensors.__getitem__, others)
        if not isinstance(self._others, dict):
            raise StateFileError(f"'{self._name}' of {self._file.path} is no state")
        if "$" in self._tree:
            self._check_fit({k: getattr(v, "shape", None) for k, v in self._others.items()})
        versions = self._file.document["module_versions"].get(self._name)
        self._versions = None if versions is None else _versions(self._file, versions)

    def load(self, progress: bool) -> None:
        for name, tensor in self._stored(progress):
            for target in self._places[name]:
                target.copy_(tensor)
        if not isinstance(self._model, nn.Module):
            self._model.load_state_dict(self._others)
            return
        state: OrderedDict[str, Any] = OrderedDict()
        for key in self._others if "$" in self._tree else self._tree:
            state[key] = self._targets[key] if key in self._targets else self._others[key]
            if key.endswith("_extra_state"):  # which modules may keep
                state[key] = copy.deepcopy(state[key])
        if self._versions is not None:
            state._metadata = self._versions
        self._model.load_state_dict(state, strict=self._strict)

    def _stored(self, progress: bool) -> Iterator[tuple[str, Tensor]]:
        if self._places.keys() <= self._tensors.keys():
            yield from ((name, self._tensors[name]) for name in self._places)
            return
        count = 0

        def effect() -> str:
            what = f"{count} of {len(self._places)} tensors of the {self._name} are loaded"
            state = f"{what}, so do not go on with it" if count else "Nothing was loaded"
            return f"The file was changed while it was loaded. {state}. {self._file.advice}"

        for batch in self._file.batches(
            _in_file(self._file, set(self._places)), effect, progress=progress
        ):
            yield from batch.items()
            count += len(batch)

    def _check_fit(self, shapes: dict[str, Any]) -> None:
        """Compares with the model's own state: torch's loader finds out in the middle. What is no
        tensor in the file has the shape None."""
        own, what = self._model.state_dict(), f"{self._name} of {self._file.path}"
        for words, names in (
            ("lacks", own.keys() - shapes.keys()),
            ("has what the model lacks:", shapes.keys() - own.keys()),
        ):
            if self._strict and names:
                shown = ", ".join(map(repr, sorted(names)[:5])) + ", ..." * (len(names) > 5)
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
            if shape is None and isinstance(self._model, nn.Module):
                raise ValueError(f"'{key}' in {what} is no tensor, and the model's is one")
            if shape is None or is_lazy(here):
                continue
            if here.shape != shape:
                raise ValueError(
                    f"'{key}' in {what} has shape {tuple(shape)}, the model's {tuple(here.shape)}"
                )
            if _is_plain(here):
                check_storage(here, f"{key} of the model")


def _tensor_of(item: Any) -> str | None:
    """The name of the tensor that an encoded value is, if it is one."""
    return item["name"] if isinstance(item, dict) and item.get("$") == "tensor" else None


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is memory of its own, on a device, and nothing else."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and not is_lazy(tensor)
        and tensor.layout == torch.strided
        and not tensor.is_nested
        and tensor.device.type != "meta"
    )


def _plainly_loaded(model: Any) -> dict[str, Tensor]:
    """The parameters and buffers of a model that its ``load_state_dict`` copies to as they are: not
    those below modules with hooks or a way of their own."""
    if not isinstance(model, nn.Module) or "load_state_dict" in vars(model):
        return {}
    if type(model).load_state_dict is not nn.Module.load_state_dict:
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
            if tensor is None or not isinstance(shown, Tensor) or not _is_plain(tensor):
                continue
            if identity(shown) == identity(tensor):  # else hooks show another
                found[prefix + key] = tensor.detach()
    return found


def _versions(file: StateFile, versions: Any) -> OrderedDict[str, dict[str, Any]]:
    """What torch keeps of modules beside their states, for loading those of older torch."""
    if not isinstance(versions, dict) or not all(isinstance(v, dict) for v in versions.values()):
        raise StateFileError(f"the versions of modules in {file.path} are malformed")
    if not all(type(v.get("version")) in (int, type(None)) for v in versions.values()):
        raise StateFileError(f"the versions of modules in {file.path} are no numbers")
    found = OrderedDict(versions)
    for name, version in found.items():  # how a load went, not what was saved
        found[name] = {k: v for k, v in version.items() if k != "assign_to_params_buffers"}
    return found


def _maps() -> str:
    """A checksum of the values that 8-bit codes stand for."""
    maps = (bytes(dynamic_map(signed).untyped_storage()) for signed in (True, False))
    return f"{zlib.crc32(b''.join(maps)):08x}"


def _check_maps(file: StateFile) -> None:
    saved = file.document.get("maps_crc32")
    if saved not in (None, _maps()):
        raise StateFileError(
            f"the 8-bit codes in {file.path} stand for other values than in this version of "
            f"Headroom (maps {shortened(saved)}, wanted {_maps()}); load it with "
            f"{shortened(file.document.get('headroom'))}"
        )


# ---- random numbers ------------------------------------------------------------------------------


def _generators() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    states = {
        "python": (version, torch.tensor(words), gauss),
        "torch": torch.get_rng_state(),
    }
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _checked_generators(file: StateFile, states: Any) -> list[Callable[[], None]]:
    """What puts the generators back. Each state was given to a generator that nobody uses, so that
    none can fail once other things are changed."""
    if not states:
        return []
    try:
        version, words, gauss = states["python"]
        python = (version, tuple(words.tolist()), gauss)
        random.Random(0).setstate(python)
        if gauss is not None and type(gauss) is not float:
            raise ValueError("Python's last normal number is none")
        torch.Generator().set_state(states["torch"])
        put = [
            functools.partial(random.setstate, python),
            functools.partial(torch.set_rng_state, states["torch"]),
        ]
        for index, state in zip(range(torch.cuda.device_count()), states.get("cuda", ())):
            torch.Generator(device=f"cuda:{index}").set_state(state)
            put.append(functools.partial(torch.cuda.set_rng_state, state, index))
        if "numpy" in states and "numpy" in sys.modules:
            _check_numpy_state(states["numpy"])
            put.append(functools.partial(sys.modules["numpy"].random.set_state, states["numpy"]))
    except OtherGenerator as error:
        raise ValueError(f"{file.path}: {error}; rng=False loads the rest") from None
    except MALFORMED as error:
        raise StateFileError(
            f"the states of random number generators in {file.path} do not load: "
            f"{shortened(error)}; rng=False loads the rest"
        ) from error
    return put


class OtherGenerator(Exception):
    """NumPy draws from a generator of another kind than the saved one."""


def _check_numpy_state(state: Any) -> None:
    numpy = sys.modules["numpy"]
    kind = type(numpy.random.get_state.__self__._bit_generator)
    if state["bit_generator"] != kind.__name__:
        raise OtherGenerator(
            f"NumPy's global generator was a {shortened(state['bit_generator'])} when the state "
            f"was saved, and is a {kind.__name__} here: put in one of the same kind with "
            "numpy.random.set_bit_generator"
        )
    numpy.random.RandomState(kind(0)).set_state(state)
    # NumPy reads its tables at these places without looking.
    for place, end in (("pos", 624), ("buffer_pos", 4)):
        value = state["state"].get(place, state.get(place, 0))
        if not 0 <= value <= end:
            raise ValueError(f"NumPy's generator is at place {shortened(value)} of {end}")
