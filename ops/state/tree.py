"""Values as JSON and back: what ``state_dict()`` methods return, with the tensors kept elsewhere.

JSON has no tuples, no keys that are not strings, no infinities. What it lacks is an object with the
key ``"$"``, which names the kind.
"""

from __future__ import annotations

import base64
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["decode", "encode", "tensor_names"]

SEQUENCES = {tuple: "tuple", torch.Size: "size"}
MAPPINGS = {dict: "dict", OrderedDict: "ordered_dict", Counter: "counter"}
KINDS = {name: kind for kind, name in (*SEQUENCES.items(), *MAPPINGS.items())}


def encode(value: Any, path: str, keep: Callable[[Tensor, str], str]) -> Any:
    """``value`` as JSON takes it. ``keep`` stores a tensor and returns its name.

    Raises:
        TypeError: something in it is not among what :func:`decode` can make again. The message
            names it by ``path`` and its keys.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
    if kind is list:
        return [encode(item, f"{path}.{i}", keep) for i, item in enumerate(value)]
    if kind in SEQUENCES:
        items = [encode(item, f"{path}.{i}", keep) for i, item in enumerate(value)]
        return {"$": SEQUENCES[kind], "items": items}
    if kind in MAPPINGS:
        if kind is dict and "$" not in value and all(type(key) is str for key in value):
            return {key: encode(item, f"{path}.{key}", keep) for key, item in value.items()}
        pairs = [
            [encode(key, f"{path}.{key}", _no_key), encode(item, f"{path}.{key}", keep)]
            for key, item in value.items()
        ]
        return {"$": MAPPINGS[kind], "items": pairs}
    if kind in (bytes, bytearray):
        return {"$": kind.__name__, "base64": base64.b64encode(value).decode()}
    if kind is torch.dtype:
        return {"$": "dtype", "name": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"$": "device", "name": str(value)}
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
        "it takes tensors, numbers, strings, bytes, None, dtypes, devices, NumPy arrays, and "
        "lists, tuples and dicts of those"
    )


def _no_key(tensor: Tensor, path: str) -> str:
    raise TypeError(f"a key of '{path}' is a tensor, which a state file does not hold")


def tensor_names(value: Any) -> Iterator[str]:
    """The names under which :func:`encode` kept the tensors of what it returned."""
    if isinstance(value, dict):
        if value.get("$") in ("tensor", "numpy"):
            yield value["name"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from tensor_names(item)


def decode(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """What :func:`encode` was given. ``tensor`` returns the tensor of a name.

    Raises:
        ValueError: nothing that ``encode`` makes.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: decode(item, tensor) for key, item in value.items()}
    try:
        return _special(value, tensor)
    except (AttributeError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"a value of kind {value['$']!r} is malformed: {error}") from error


def _special(value: dict[str, Any], tensor: Callable[[str], Tensor]) -> Any:
    name = value["$"]
    if name == "tensor":
        return tensor(value["name"])
    if name == "float":
        return float(value["value"])
    if name in ("bytes", "bytearray"):
        return {"bytes": bytes, "bytearray": bytearray}[name](base64.b64decode(value["base64"]))
    if name == "dtype":
        dtype = getattr(torch, value["name"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{value['name']!r} is not a dtype")
        return dtype
    if name == "device":
        return torch.device(value["name"])
    if name == "numpy":
        array = tensor(value["name"]).numpy()  # raises if NumPy is missing
        return array[()] if value["scalar"] else array
    kind = KINDS.get(name)
    if kind in SEQUENCES:
        return kind(decode(item, tensor) for item in value["items"])
    if kind in MAPPINGS:
        pairs = [(decode(key, tensor), decode(item, tensor)) for key, item in value["items"]]
        return kind(dict(pairs)) if kind is Counter else kind(pairs)
    raise ValueError(f"there is no kind {name!r} in this version of Headroom")
