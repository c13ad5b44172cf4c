"""Lends tensors to modules in the place of their parameters, to one thread: others that call the
same modules meanwhile, or read their parameters, do not see them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch import nn

_lock = threading.Lock()


class _Lent(MutableMapping[str, Any]):
    """The parameters of a module that some threads run: each finds what was lent to it.

    Attributes:
        own: the parameters that the module has.
        by_thread: what was lent.
    """

    def __init__(self, own: dict[str, Any]) -> None:
        self.own = own
        self.by_thread: dict[int, Mapping[str, Any]] = {}

    def _of(self, name: str) -> Mapping[str, Any]:
        here = self.by_thread.get(threading.get_ident(), {})
        return here if name in here and name in self.own else self.own

    def __getitem__(self, name: str) -> Any:
        return self._of(name)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.own[name] = value

    def __delitem__(self, name: str) -> None:
        del self.own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)

    def __reduce__(self) -> Any:
        return dict, (self.own,)  # a copy of the module has its parameters


@contextmanager
def lent(tensors: Mapping[nn.Module, Mapping[str, Any]]) -> Iterator[None]:
    """Lets this thread find tensors, by their modules and names, in the place of parameters."""
    thread = threading.get_ident()
    with _lock:
        for module, found in tensors.items():
            if type(module._parameters) is not _Lent:
                vars(module)["_parameters"] = _Lent(module._parameters)
            module._parameters.by_thread[thread] = found  # type: ignore[attr-defined]
    try:
        yield
    finally:
        with _lock:
            for module in tensors:
                params: Any = module._parameters
                del params.by_thread[thread]
                if not params.by_thread:
                    vars(module)["_parameters"] = params.own
