"""Tells which module of a model runs, without touching the modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.nn.modules import module as every_module

__all__ = ["watching_modules"]


@contextmanager
def watching_modules(
    model: nn.Module, begin: Callable[[str], None], end: Callable[[], None]
) -> Iterator[None]:
    """Calls ``begin`` with the name of a module of the model before it runs, and ``end`` after it.

    The hooks are those of all modules: with hooks of their own, blocks would run operations that
    they otherwise fuse, and so allocate something else.
    """
    names = {module: name for name, module in model.named_modules()}

    def before(module: nn.Module, args: Any) -> None:
        if (name := names.get(module)) is not None:
            begin(name)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if module in names:
            end()

    with ExitStack() as stack:
        stack.callback(every_module.register_module_forward_pre_hook(before).remove)
        stack.callback(every_module.register_module_forward_hook(after, always_call=True).remove)
        yield
