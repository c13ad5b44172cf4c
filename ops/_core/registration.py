"""Completes ops registered from C++: version counters, an error where a gradient would be lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from . import binaries  # noqa: F401  (registers the ops)

__all__ = ["FLOATS", "complete", "require"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # what the kernels read and write

_library = torch.library.Library("headroom", "IMPL")


def require(condition: bool, message: str) -> None:
    """Raises in a fake, while an op is traced, the error that the op would raise when it runs."""
    if not condition:
        raise RuntimeError(message)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (item for item in value if isinstance(item, Tensor))


def complete(name: str, spared: Callable[[dict[str, Any]], set[str]] = lambda given: set()) -> None:
    """Makes ``headroom::name`` bump the version counters of the tensors that its schema marks as
    written, and refuse tensors that require grad outside ``torch.no_grad()``.

    ``spared`` gets the arguments of a call and returns the names of those that this call does not
    write although the schema marks them.
    """
    op = getattr(torch.ops.headroom, name).default
    arguments = op._schema.arguments
    positional = [argument.name for argument in arguments if not argument.kwarg_only]
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]

    def before(keyset: torch._C.DispatchKeySet, *args: Any, **options: Any) -> Any:
        given = dict(zip(positional, args)) | options
        if torch.is_grad_enabled() and any(
            tensor.requires_grad for value in given.values() for tensor in _tensors(value)
        ):
            raise RuntimeError(
                f"headroom::{name} has no derivative, but one of its tensors requires grad; call "
                "it under torch.no_grad(), or detach the tensor"
            )
        skipped = spared(given)
        torch.autograd.graph.increment_version(
            [t for key in written if key not in skipped for t in _tensors(given.get(key))]
        )
        return op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args, **options)

    _library.impl(name, before, "ADInplaceOrView", with_keyset=True)
