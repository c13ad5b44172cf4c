"""States on disk that survive: :func:`save_state`, :func:`load_state`, :func:`latest`."""

from __future__ import annotations

import copy
import functools
import os
import random
import re
import sys
import time
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from .._core import binaries
from ..optim.adam8bit import Adam8bit, dynamic_map
from .file import (
    StateFile,
    StateFileError,
    check_tensor,
    identity,
    is_state_file,
    partial_of,
    remove_partial,
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
    checksum for every byte, and takes no more memory than a copy of the largest tensor. It is a
    safetensors file (no pickle), which ``safetensors.safe_open`` and
    ``safetensors.torch.load_file`` read too; tensors are called ``model.KEY`` and
    ``optimizer.state.NUMBER.NAME``.

    Example::

        optimizer = headroom.optim.AdamW(model.parameters())
        headroom.save_state("step-100.safetensors", model=model, optimizer=optimizer, keep=3)

        extra = headroom.load_state(
            headroom.latest("."), model=model, optimizer=optimizer
        )

    Args:
        path: the file. Its folder must exist.
        model, optimizer, scaler, scheduler, loader: objects with ``state_dict()`` and
            ``load_state_dict()``, or lists of such. A loader is a data loader with a position, such
            as torchdata's ``StatefulDataLoader``.
        extra: whatever else the run needs: numbers, strings, bytes, None, dtypes, devices, tensors,
            NumPy arrays, and lists, tuples and dicts of those. They come back as they were, tensors
            on the CPU.
        rng: save the states of the random number generators of Python, torch, all CUDA devices in
            use, and NumPy if it is imported.
        keep: afterwards, keep this file and the ``keep - 1`` newest whose names differ from it in
            nothing but numbers, and remove older ones. Files that are no states stay.
        progress: show a bar if it takes longer than a second.

    Tensors that are one another, such as tied weights, are saved once. Gradients are not saved.

    Raises:
        TypeError: something is of a kind that the file does not hold; the message names it.
            DTensors are refused: sharded states are for ``torch.distributed.checkpoint``.
        ValueError: ``keep`` is not positive, or there is no number in the name of the file.
        OSError: the disk is full, the folder is not writable, ...: the message says what to do.
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

    The whole file is checked before anything is changed. Tensors go from the file to where they
    belong one at a time, on whatever device that is; states of an optimizer that has some already
    are replaced, and both are held until it is done.

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
        StateFileError: the file is damaged, cut off, no state file, of a later version, or lacks a
            part that is asked for. The message names the tensor.
        OSError: it cannot be read.
        ValueError: it does not fit the model; or the error of an object's ``load_state_dict``.

        Nothing is changed then, with one exception: a ``load_state_dict`` other than those of
        optimizers, scalers and schedulers (which are put back) may fail after it has begun.
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
                    f"{file.path} has no '{name}'; it has {', '.join(tree) or 'nothing'}"
                )
        if optimizer is not None:
            _check_maps(file)
        states = {}
        for part, name, one in wanted:
            if part == "model":
                states[name] = _decoded(file, name, file.view, strided=False)
                _check_fit(one, states[name], f"{name} of {file.path}", strict)
        # What stays on the CPU is read into memory of its own, the rest is taken from the file.
        away = {name for part, name, one in wanted if part == "optimizer" and not _on_cpu(one)}
        read = {name for _, name, _ in wanted} - states.keys() - away | {"extra"}
        if rng:
            read.add("rng")
        names = {name for part in read for name in tensor_names(tree.get(part))}
        tensors = file.read(names, progress=progress)
        states |= {name: _decoded(file, name, tensors.__getitem__) for name in read}
        states |= {name: _decoded(file, name, file.view) for name in away}
        del tensors
        undo: list[tuple[Any, Any]] = []
        try:
            for part, name, one in wanted:
                state = states.pop(name)
                if part == "model":
                    _load_model(one, state, file.document["module_versions"].get(name), strict)
                    continue
                if part != "loader":
                    before = one.state_dict()
                    undo.append((one, before if part == "optimizer" else copy.deepcopy(before)))
                one.load_state_dict(state)
                if name in away:
                    _take_over(file, one)
        except BaseException:
            for one, before in reversed(undo):
                one.load_state_dict(before)
            raise
        if states.get("rng"):
            _set_generators(states["rng"])
    return states["extra"]


def latest(directory: PathLike, *, verify: bool = False) -> Path | None:
    """The state in a folder that was saved last, or None if there is none.

    Files that are damaged or cut off are passed over with a warning, others in silence. The order
    is that of the times in the files, so copies of them have it too.

    Args:
        directory: the folder; folders in it are not searched.
        verify: read the file whole and look at all checksums. Else at its length and its header;
            :func:`load_state` does the rest.
    """
    for path in reversed(_by_age(Path(directory).iterdir(), warn=True)):
        if verify:
            try:
                with StateFile(path) as file:
                    file.read()
            except (StateFileError, OSError) as error:
                warnings.warn(f"passed over: {error}", stacklevel=2)
                continue
        return path
    return None


# ---- files ---------------------------------------------------------------------------------------


def _by_age(paths: Iterable[Path], *, warn: bool = False) -> list[Path]:
    """Those of the files that are states, the oldest first."""
    found = []
    for path in paths:
        if path.name.startswith(".") or not is_state_file(path):
            continue
        try:
            with StateFile(path) as file:
                numbers = [int(digits) for digits in re.findall(r"\d+", path.name)]
                found.append((file.document["saved_ns"], numbers, path))
        except (StateFileError, OSError) as error:
            if warn:
                warnings.warn(f"passed over: {error}", stacklevel=3)
    return [path for *_, path in sorted(found)]


def _rotate(path: str, keep: int) -> None:
    """Removes the older states of the family of a file that has just been written."""
    written = Path(os.path.realpath(path))
    family = r"\d+".join(map(re.escape, re.split(r"\d+", written.name)))
    others = [
        other
        for other in written.parent.iterdir()
        if re.fullmatch(family, other.name) and other != written
    ]
    states = _by_age(others)
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


def _decoded(file: StateFile, name: str, tensors: Callable[..., Tensor], **options: Any) -> Any:
    cached = functools.cache(functools.partial(tensors, **options))  # shared tensors stay shared
    try:
        return decode(file.document["tree"].get(name), cached)
    except (ValueError, RecursionError) as error:
        raise StateFileError(f"'{name}' of {file.path} cannot be read: {error}") from error


def _on_cpu(optimizer: Any) -> bool:
    groups = getattr(optimizer, "param_groups", ())
    return all(param.device.type == "cpu" for group in groups for param in group["params"])


def _check_fit(model: Any, state: dict[str, Any], what: str, strict: bool) -> None:
    """torch's loader finds out in the middle."""
    own = model.state_dict()
    for words, names in (
        ("lacks", own.keys() - state.keys()),
        ("has what the model lacks:", state.keys() - own.keys()),
    ):
        if strict and names:
            shown = ", ".join(map(repr, sorted(names)[:5])) + (", ..." if len(names) > 5 else "")
            raise ValueError(f"{what} {words} {shown}; strict=False loads the rest")
    for key in own.keys() & state.keys():
        here, there = own[key], state[key]
        if isinstance(here, DTensor):
            raise ValueError(
                f"'{key}' of the model is a DTensor, and {what} has whole tensors; load before "
                "sharding, or with torch.distributed.checkpoint"
            )
        if not (isinstance(here, Tensor) and isinstance(there, Tensor)) or is_lazy(here):
            continue
        if here.shape != there.shape:
            raise ValueError(
                f"'{key}' in {what} has shape {tuple(there.shape)}, the model's {tuple(here.shape)}"
            )


def _load_model(model: Any, state: dict[str, Any], versions: Any, strict: bool) -> None:
    if not isinstance(model, nn.Module):
        model.load_state_dict(state)
        return
    for key in state:
        if key.endswith("_extra_state"):  # which modules may keep
            state[key] = copy.deepcopy(state[key])
    ordered = OrderedDict(state)
    if versions is not None:
        ordered._metadata = OrderedDict(versions)
    model.load_state_dict(ordered, strict=strict)


def _take_over(file: StateFile, optimizer: Any) -> None:
    """Gives states that lie in the file, as those on the CPU, memory of their own."""
    copied: dict[int, Tensor] = {}

    def own(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in copied and file.holds(value):
                copied[id(value)] = value.clone()
            return copied.get(id(value), value)
        if isinstance(value, dict):
            for key, item in value.items():
                value[key] = own(item)
        elif isinstance(value, list):
            value[:] = map(own, value)
        return value

    for entry in optimizer.state.values():
        own(entry)


def _maps() -> str:
    """A checksum of the values that 8-bit codes stand for."""
    maps = (bytes(dynamic_map(signed).untyped_storage()) for signed in (True, False))
    return f"{zlib.crc32(b''.join(maps)):08x}"


def _check_maps(file: StateFile) -> None:
    saved = file.document.get("maps_crc32")
    if saved not in (None, _maps()):
        raise StateFileError(
            f"the 8-bit codes in {file.path} stand for other values than in this version of "
            f"Headroom (maps {saved}, wanted {_maps()}); load it with {file.document['headroom']}"
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


def _set_generators(states: dict[str, Any]) -> None:
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(states["torch"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])
    for index, state in zip(range(torch.cuda.device_count()), states.get("cuda", ())):
        torch.cuda.set_rng_state(state, index)
