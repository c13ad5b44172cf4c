"""The parts of a run's state: objects that save and load themselves, their encoded states, and
the maps of 8-bit codes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from .._core.text import quoted
from ..functional.dynamic_map import dynamic_map
from .file import MALFORMED, StateFile, StateFileError
from .tree import decode, encode, tensor_names


class Stateful(Protocol):
    """An object that gives its state and takes it back."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


Part = Stateful | Sequence[Stateful] | None


def named_objects(part: str, objects: Part) -> list[tuple[str, Any]]:
    """Returns the objects of a part, with their names in the file."""
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


def encoded(value: Any, name: str, add: Callable[[Tensor, str], str]) -> Any:
    """Returns a value as JSON takes it. ``add`` stores a tensor and returns its name."""
    try:
        return encode(value, name, add)
    except RecursionError:
        raise TypeError(f"'{name}' contains itself, or is nested too deeply") from None


def decoded(file: StateFile, name: str, tensors: Callable[[str], Tensor], tree: Any = None) -> Any:
    """Returns the state with this name in a file, or that of ``tree``, which is a part of it."""
    try:
        return decode(file.document["tree"].get(name) if tree is None else tree, tensors)
    except MALFORMED as error:
        what = f"'{name}' of {file.path} cannot be read: {quoted(error)}"
        raise StateFileError(what) from error


def names_in(file: StateFile, part: str) -> Iterable[str]:
    """Returns the names of the tensors of a part."""
    try:
        return list(tensor_names(file.document["tree"].get(part)))
    except MALFORMED as error:
        raise StateFileError(f"'{part}' of {file.path} cannot be read: {error}") from error


def in_file(file: StateFile, names: set[str]) -> list[str]:
    """Returns the names in the order of the file, and behind them those that it lacks."""
    return [name for name in file.entries if name in names] + sorted(names - file.entries.keys())


def maps_checksum() -> str:
    """Returns a checksum of the values that 8-bit codes stand for."""
    maps = (bytes(dynamic_map(signed).untyped_storage()) for signed in (True, False))
    return f"{zlib.crc32(b''.join(maps)):08x}"


def check_maps(file: StateFile) -> None:
    """Raises StateFileError if the file was saved with other maps."""
    saved = file.document.get("maps_crc32")
    if saved not in (None, maps_checksum()):
        raise StateFileError(
            f"the 8-bit codes in {file.path} stand for other values than in this version of "
            f"Headroom (maps {quoted(saved)}, wanted {maps_checksum()}); load it with "
            f"{quoted(file.document.get('headroom'))}"
        )
