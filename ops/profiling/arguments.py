"""Gives the arguments of recorded operations back, as tensors without memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Arguments", "ListTypes", "call_on_meta", "op_of"]

_DTYPES = {  # as the profiler writes them
    "float": torch.float32,
    "double": torch.float64,
    "c10::BFloat16": torch.bfloat16,
    "c10::Half": torch.float16,
    "long int": torch.int64,
    "long": torch.int64,
    "int": torch.int32,
    "short int": torch.int16,
    "short": torch.int16,
    "signed char": torch.int8,
    "unsigned char": torch.uint8,
    "bool": torch.bool,
    "c10::complex<float>": torch.complex64,
    "c10::complex<double>": torch.complex128,
    "c10::Float8_e4m3fn": torch.float8_e4m3fn,
    "c10::Float8_e5m2": torch.float8_e5m2,
}


def op_of(name: str) -> Any:
    """Returns the op of a recorded name, such as ``aten::add``, or None if it is no op."""
    namespace, _, op = name.partition("::")
    if not op or not op.isidentifier():
        return None
    try:
        return getattr(getattr(torch.ops, namespace), op)
    except (AttributeError, RuntimeError):
        return None


class ListTypes:
    """The dtypes of tensors in lists, which the profiler keeps in its tree of events alone."""

    def __init__(self, tree: Callable[[], Any]) -> None:
        self._tree = tree
        self._found: dict[int, list[list[torch.dtype] | None]] | None = None

    def __call__(self, correlation: int) -> list[list[torch.dtype] | None]:
        """Returns, for each argument of a call, the dtypes in it if it is a list of tensors."""
        if self._found is None:
            self._found = {}
            nodes = list(self._tree())
            while nodes:
                node = nodes.pop()
                nodes += node.children
                if node.tag.name == "TorchOp":
                    types = list(map(_types, node.extra_fields.inputs))
                    if any(types):
                        self._found[node.correlation_id] = types
        return self._found.get(correlation, [])


def _types(value: Any) -> list[torch.dtype] | None:
    if not isinstance(value, list) or not all(hasattr(item, "dtype") for item in value):
        return None
    return [item.dtype for item in value]


class Arguments:
    """The arguments of one call of an op.

    Attributes:
        key: equal for calls with the same op and arguments.
    """

    def __init__(self, event: Any, types: ListTypes) -> None:
        self._shapes = event.structured_input_shapes()
        self._strides = event.structured_input_strides()
        self._dtypes = event.dtypes()
        self._concrete = event.concrete_inputs()
        lists = types(event.correlation_id()) if "TensorList" in self._dtypes else []
        self._lists = lists
        about = self._shapes, self._strides, self._dtypes, self._concrete, lists
        self.key = (event.name(), repr(about))

    @property
    def dtype(self) -> torch.dtype | None:
        """Returns the dtype of the first tensor."""
        return next((_DTYPES[kind] for kind in self._dtypes if kind in _DTYPES), None)

    def values(self) -> list[Any]:
        """Returns them by position. Tensors are on the meta device; what was not recorded, such as
        a generator, is None."""
        return [self._value(k, kind) for k, kind in enumerate(self._dtypes)]

    def _value(self, k: int, kind: str) -> Any:
        shape, strides = _at(self._shapes, k), _at(self._strides, k)
        if kind == "TensorList":
            dtypes = _at(self._lists, k) or []
            if len(dtypes) != len(shape or ()):
                raise ValueError(f"the dtypes in list {k} were not recorded")
            return [_tensor(*each) for each in zip(shape, strides, dtypes)]
        dtype = _DTYPES.get(kind)
        if dtype is None or shape is None:
            return _at(self._concrete, k)
        return _tensor(shape, strides, dtype)


def _at(values: Any, k: int) -> Any:
    return values[k] if k < len(values) else None


def _tensor(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
    if strides is None or len(strides) != len(shape):
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def call_on_meta(op: Any, values: list[Any]) -> tuple[Any, Any]:
    """Returns the schema of the overload of an op that takes these arguments, and its results, as
    tensors without memory; (None, None) if the op cannot say them."""
    for name in op.overloads():
        overload = getattr(op, name)
        arguments = overload._schema.arguments
        if len(arguments) != len(values):
            continue
        by_position = [v for v, a in zip(values, arguments) if not a.kwarg_only]
        by_name = {a.name: v for v, a in zip(values, arguments) if a.kwarg_only}
        try:
            with torch.no_grad():
                return overload._schema, overload(*by_position, **by_name)
        except Exception:  # other types, values that were not recorded, no rule for shapes
            continue
    return None, None
