"""Takes back what has been done to the modules of a model when it cannot be finished."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

CONTAINERS = dict, list, set  # which are changed in place: parameters, hooks, names of buffers


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Returns a context that gives the modules of a model back what they were if something is
    raised in it, a ``KeyboardInterrupt`` too: their classes, attributes, parameters, buffers and
    submodules, which parameters require gradients, and the attributes of the model's config.

    Tensors that are replaced live until the context ends. What is written into tensors stays.
    """
    config = getattr(model, "config", None)
    holders = [*model.modules(), *([config] if hasattr(config, "__dict__") else [])]
    kept = [(one, type(one), {k: _copied(v) for k, v in vars(one).items()}) for one in holders]
    flags = [(param, param.requires_grad) for param in model.parameters()]
    try:
        yield
    except BaseException:
        for holder, kind, attributes in kept:
            if type(holder) is not kind:
                holder.__class__ = kind
            _restore(vars(holder), attributes)
        for param, requires_grad in flags:
            if param.requires_grad != requires_grad:
                param.requires_grad_(requires_grad)
        raise


def _copied(value: Any) -> tuple[Any, Any]:
    """Returns a value, and a copy of it where it is changed in place."""
    return value, value.copy() if isinstance(value, CONTAINERS) else None


def _restore(attributes: dict[str, Any], before: dict[str, tuple[Any, Any]]) -> None:
    for name in attributes.keys() - before.keys():
        del attributes[name]
    for name, (value, content) in before.items():
        attributes[name] = value
        if content is None:
            continue
        value.clear()
        if isinstance(value, list):
            value.extend(content)
        else:
            value.update(content)
