"""Hears which module runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as every_module


@contextmanager
def watching_modules(
    model: nn.Module | None,
    begin: Callable[[str], None],
    end: Callable[[], None],
    hidden: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda hook: hook,
) -> Iterator[None]:
    """Calls ``begin`` with the name of a module of the model before it runs, and ``end`` after it.
    Without a model, with the class of any module. ``hidden`` wraps the hooks.

    The hooks are those of all modules: with hooks of their own, blocks would run operations that
    they otherwise fuse, and so allocate something else. What ``torch.compile`` traces has none: it
    is seen as a whole, as the module that was compiled.
    """
    names = {} if model is None else {module: name for name, module in model.named_modules()}

    def name_of(module: nn.Module) -> str | None:
        if model is None:
            return type(module).__name__
        name = names.get(module)
        if name is None and (compiled := module._modules.get("_orig_mod")) is not None:
            name = names.get(compiled)  # of torch.compile, around one of the model's
        return name

    def before(module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and (name := name_of(module)) is not None:
            begin(name)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and name_of(module) is not None:
            end()

    with ExitStack() as stack:
        stack.callback(every_module.register_module_forward_pre_hook(hidden(before)).remove)
        add = every_module.register_module_forward_hook
        stack.callback(add(hidden(after), always_call=True).remove)
        yield
