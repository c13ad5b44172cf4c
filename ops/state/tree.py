"""Turns the results of ``state_dict()`` methods into JSON and back. Tensors are stored elsewhere.

JSON has no tuples, no keys that are not strings, no infinities. Values that it lacks become objects
with the key ``"$"``, which names their kind. Every value comes back as it was, with the same class;
other values and subclasses are refused, with the keys that lead to them.
"""

from __future__ import annotations

import base64
import math
import pathlib
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

DEEPEST = 100  # containers inside one another
LARGEST = 8192  # bits of an integer, which Python reads up to 4,300 digits of

SEQUENCES = {tuple: "tuple", torch.Size: "size"}
MAPPINGS = {dict: "dict", OrderedDict: "ordered_dict", Counter: "counter"}
SETS = {set: "set", frozenset: "frozenset"}
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
KINDS = {name: kind for kinds in (SEQUENCES, MAPPINGS, SETS) for kind, name in kinds.items()}
# Values that become a text: the name of their kind, the key of the text, the way there and back.
TEXTS: dict[type, tuple[str, str, Callable[[Any], str], Callable[[str], Any]]] = {
    float: ("float", "value", repr, float),
    bytes: ("bytes", "base64", lambda value: base64.b64encode(value).decode(), base64.b64decode),
    pathlib.PosixPath: ("path", "path", str, pathlib.Path),
    torch.dtype: ("dtype", "name", lambda value: str(value)[len("torch.") :], DTYPES.__getitem__),
    torch.device: ("device", "name", str, torch.device),
}
BACK = {name: (key, back) for name, key, _, back in TEXTS.values()}
INSTEAD = "save what it is made of, such as vars(), str(), list() or isoformat() of it"


def encode(value: Any, path: str, keep: Callable[[Tensor, str], str], depth: int = 0) -> Any:
    """Returns a value in a form that JSON takes. ``keep`` stores a tensor and returns its name.

    Raises:
        TypeError: it contains something that :func:`decode` cannot restore. The message names it by
            ``path`` and its keys.
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        if value.bit_length() > LARGEST:
            raise TypeError(f"'{path}' is a number of {value.bit_length():,} bits; save a tensor")
        return value
    if kind is float and math.isfinite(value):
        return value
    if kind in TEXTS:
        name, place, text_of, _ = TEXTS[kind]
        return {"$": name, place: text_of(value)}
    if depth > DEEPEST:
        raise TypeError(f"'{path}' contains itself, or is nested too deeply")

    def inner(item: Any, key: Any, keep: Callable[[Tensor, str], str] = keep) -> Any:
        return encode(item, f"{path}.{key}", keep, depth + 1)

    if kind is list:
        return [inner(item, i) for i, item in enumerate(value)]
    if kind in SEQUENCES:
        return {"$": SEQUENCES[kind], "items": [inner(item, i) for i, item in enumerate(value)]}
    if kind in SETS:
        items = [inner(item, "*", _no_element) for item in value]
        return {"$": SETS[kind], "items": sorted(items, key=repr)}
    if kind in MAPPINGS:
        if kind is dict and "$" not in value and all(type(key) is str for key in value):
            return {key: inner(item, key) for key, item in value.items()}
        pairs = [[inner(key, key, _no_key), inner(item, key)] for key, item in value.items()]
        return {"$": MAPPINGS[kind], "items": pairs}
    if isinstance(value, Tensor):
        return {"$": "tensor", "name": keep(value, path)}
    if (numpy := sys.modules.get("numpy")) and isinstance(value, (numpy.ndarray, numpy.generic)):
        try:
            tensor = torch.from_numpy(numpy.array(value, order="C"))
        except TypeError as error:
            raise TypeError(f"'{path}' is a NumPy array that torch cannot hold: {error}") from error
        scalar = isinstance(value, numpy.generic)
        return {"$": "numpy", "name": keep(tensor, path), "scalar": scalar}
    raise TypeError(
        f"'{path}' is a {kind.__module__}.{kind.__qualname__}, which a state file does not hold: "
        "it takes tensors, numbers, strings, bytes, None, paths, dtypes, devices, NumPy arrays, "
        f"and lists, tuples, sets and dicts of those; {INSTEAD}"
    )


def _no_key(tensor: Tensor, path: str) -> str:
    raise TypeError(f"a key of '{path}' is a tensor, which a state file does not hold")


def _no_element(tensor: Tensor, path: str) -> str:
    raise TypeError(f"an element of the set '{path.removesuffix('.*')}' is a tensor: save a list")


def tensor_names(value: Any) -> Iterator[str]:
    """Yields the names under which :func:`encode` stored the tensors of an encoded value.

    Raises:
        ValueError: a tensor has no name.
    """
    unread = [value]
    while unread:
        value = unread.pop()
        if isinstance(value, dict):
            if value.get("$") in ("tensor", "numpy"):
                if not isinstance(value.get("name"), str):
                    raise ValueError("a tensor has no name")
                yield value["name"]
            unread.extend(value.values())
        elif isinstance(value, list):
            unread.extend(value)


def decode(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Returns the value that :func:`encode` was given. ``tensor`` returns the tensor of a name.

    Raises:
        ValueError: ``encode`` does not make such a value.
        RecursionError: the interpreter's stack is nearly full.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: decode(item, tensor) for key, item in value.items()}
    try:
        return _special(value, tensor)
    except RecursionError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, RuntimeError) as error:
        kind = repr(value["$"])[:100]
        raise ValueError(f"a value of kind {kind} is malformed: {error}") from error


def _special(value: dict[str, Any], tensor: Callable[[str], Tensor]) -> Any:
    name = value["$"]
    if name == "tensor":
        return tensor(value["name"])
    if name in BACK:
        key, back = BACK[name]
        return back(value[key])
    if name == "numpy":
        array = tensor(value["name"]).numpy()  # raises if NumPy is missing
        return array[()] if value["scalar"] else array
    kind = KINDS.get(name)
    if kind is None:
        raise ValueError(f"there is no kind {name!r} in this version of Headroom")
    if kind in MAPPINGS:
        pairs = [(decode(key, tensor), decode(item, tensor)) for key, item in value["items"]]
        return kind(dict(pairs)) if kind is Counter else kind(pairs)
    return kind(decode(item, tensor) for item in value["items"])
