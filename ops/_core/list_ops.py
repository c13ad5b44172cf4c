"""Makes the fakes of element-wise ops on lists of tensors from what each says of its lists."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from .checks import check_list
from .registration import complete, require


@dataclass(frozen=True)
class ListOp:
    """Describes an op whose lists hold tensors of the same shapes on one device."""

    name: str
    lists: dict[str, tuple[torch.dtype, ...]]  # what each takes; the first leads
    may_be_empty: Collection[str]
    scalars: Collection[str]  # optional float32 tensors of one element on that device


LIST_OPS: dict[str, ListOp] = {}  # the tests call each at random


def list_op(
    name: str,
    lists: dict[str, tuple[torch.dtype, ...]],
    *,
    may_be_empty: Collection[str] = (),
    scalars: Collection[str] = (),
    spared: Callable[[dict[str, Any]], set[str]] = lambda given: set(),
) -> None:
    """Registers the fake of ``headroom::name``, and completes the op (see :func:`complete`)."""
    op = getattr(torch.ops.headroom, name).default
    positional = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]
    (leader, _), *_ = lists.items()

    def fake(*args: Any, **options: Any) -> None:
        given = dict(zip(positional, args)) | options
        for key, dtypes in lists.items():
            if given[key] or key not in may_be_empty:
                check_list(key, given[key], given[leader], dtypes, leader=leader)
        for key in scalars:
            if (scalar := given.get(key)) is not None:
                require(
                    scalar.dtype == torch.float32
                    and scalar.numel() == 1
                    and all(scalar.device == tensor.device for tensor in given[leader][:1]),
                    f"{key} must be a float32 tensor of one element, on the device of {leader}[0]",
                )

    torch.library.register_fake(f"headroom::{name}")(fake)
    complete(name, spared)
    LIST_OPS[name] = ListOp(name, lists, may_be_empty, scalars)
