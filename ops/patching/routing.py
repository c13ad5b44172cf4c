"""Which experts a token goes to, in blocks that are computed again in the backward pass.

Scores that are almost equal may be in another order when they are computed again. So what is chosen
among experts in the forward pass is kept, some bytes per token, and is chosen again: weights and
gradients then are those of the same experts, from scores of the second run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Functions of scores that return values and indices, by which routers choose.
_CHOOSE = {torch.topk, Tensor.topk, torch.max, Tensor.max}
_SMALL = (torch.uint8, torch.int16, torch.int32)


class _Choices:
    """Holds what one call of a block has chosen among experts, in order."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._place: int | None = None  # in a second run; None in the first

    def begin_again(self) -> None:
        self._place = 0

    def choice(self, find: Callable[[], Tensor], count: int) -> Tensor:
        """Returns the indices that the first run has found at this place."""
        if self._place is None:
            index = find()
            dtype = next(d for d in _SMALL if count <= torch.iinfo(d).max + 1)
            self._kept.append(index.to(dtype))
            return index
        index, self._place = self._kept[self._place], self._place + 1
        return index.to(torch.int64)


_running: ContextVar[_Choices | None] = ContextVar("choices", default=None)


def keeping_choices(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that does what ``run`` does, the forward of a block, and chooses the
    same experts in its second and later calls."""
    choices, has_run = _Choices(), False

    @functools.wraps(run)
    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        if has_run:
            choices.begin_again()
        has_run = True
        token = _running.set(choices)
        try:
            return run(*args, **kwargs)
        finally:
            _running.reset(token)

    return called


def choosing_forward(
    module: nn.Module, own: Callable[..., Any] | None, count: int, /, *args: Any, **kwargs: Any
) -> Any:
    """Takes the place of the forward of a module that chooses among ``count`` experts: within
    :func:`keeping_choices` it chooses what that says."""
    run = functools.partial(type(module).forward, module) if own is None else own
    choices = None if torch.compiler.is_compiling() else _running.get()
    if choices is None:
        return run(*args, **kwargs)
    with _Choosing(choices, count):
        return run(*args, **kwargs)


class _Choosing(TorchFunctionMode):
    """Lets :class:`_Choices` say what is chosen from rows of ``count`` scores, or of those of
    groups of experts, whose scores may be masked by what was chosen among groups."""

    def __init__(self, choices: _Choices, count: int) -> None:
        super().__init__()
        self._choices, self._count = choices, count

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CHOOSE and self._is_of_experts(func, *args, **kwargs):
            return self._chosen(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _is_of_experts(self, func: Any, input: Any, *args: Any, **kwargs: Any) -> bool:
        names = ("k", "dim") if func in (torch.topk, Tensor.topk) else ("dim",)
        dim = (dict(zip(names, args)) | kwargs).get("dim", -1 if "k" in names else None)
        return (
            input.dim() == 2
            and input.shape[1] > 0
            and self._count % input.shape[1] == 0
            and type(dim) is int
            and dim in (-1, 1)
            and "out" not in kwargs
        )

    def _chosen(self, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        def find() -> Tensor:
            with torch.no_grad():
                return func(input, *args, **kwargs)[1]

        index = self._choices.choice(find, self._count)
        # The same operation in each run, as a checkpoint asks of what it runs again.
        rows = index if index.dim() == 2 else index.unsqueeze(1)
        values = input.gather(1, rows).view(index.shape)
        is_max = func in (torch.max, Tensor.max)
        kind = torch.return_types.max if is_max else torch.return_types.topk
        return kind((values, index))
