"""Tables of the addresses of tensors, for ops on thousands of small ones.

Passing 10,000 small tensors to an op through the dispatcher takes several times as long as updating
them. A table holds their addresses, sizes and dtypes, read through DLPack's C exchange API.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .binaries import _C

_PLAIN = (Tensor, torch.nn.Parameter)
_ROWS = 3  # address, number of elements, dtype: torch_ext/table.h
_exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)


def table_of(
    lists: tuple[list[Tensor], ...],
    state: dict[Any, Any] | None = None,
    param_like: tuple[str, ...] = (),
    extra: tuple[str, ...] = (),
) -> Tensor | None:
    """Returns a table of lists of tensors and of states of the tensors in the first list.

    Returns None unless every tensor is a contiguous ``Tensor`` or ``Parameter`` of a dtype that the
    kernels support, all lie on one device, all states exist, and the tensors at one position of
    ``lists`` and of the states ``param_like`` have the same shape. The states ``extra`` may have
    other shapes. The table keeps no tensor alive, so use it at once.
    """
    if _C is None or _exchange is None or torch.compiler.is_compiling():
        return None
    if torch._C._len_torch_dispatch_stack():
        return None  # a mode wants to see the tensors
    if any(any(map(Tensor.is_neg, tensors)) for tensors in lists):
        return None  # memory holds the negative of the values
    shape = len(lists) + len(param_like) + len(extra), _ROWS, len(lists[0])
    table = torch.empty(shape, dtype=torch.int64, device="cpu")
    found = _C.describe(table.data_ptr(), _exchange, _PLAIN, lists, state, param_like, extra)
    return table if found else None


def joined(tables: list[Tensor], places: list[Tensor]) -> Tensor:
    """Merges tables of the same lists: entry i of ``tables[k]`` goes to ``places[k][i]``."""
    if len(tables) == 1:
        return tables[0]
    shape = len(tables[0]), _ROWS, sum(map(len, places))
    table = torch.empty(shape, dtype=torch.int64, device="cpu")
    for part, where in zip(tables, places):
        table[:, :-1, where] = part[:, :-1]
        table.view(torch.int32)[:, -1, where] = part.view(torch.int32)[:, -1, : len(where)]
    return table
