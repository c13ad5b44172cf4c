"""Finds out what a model does to the logits of its head, by running its ``forward`` on numbers in
the place of its body and of its head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["returns_logits"]

TOKENS = 4
LARGEST = 64.0  # of the logits that are tried: above the caps that are known


class _Outputs(tuple):
    """Stands for what the body of a model returns: hidden states first, None by any other name."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def returns_logits(model: Any, body: nn.Module, head: nn.Linear, softcap: float | None) -> bool:
    """Returns whether the class of a model gives the hidden states of its body to its head, and
    returns what the head does, capped by ``softcap`` if there is one, and changed in no other way.

    It looks at what the class does, and not at names in a configuration: neither the body nor the
    weights are used, so that these may be on any device, sharded, or not there at all.

    Args:
        model: of transformers.
        body, head: modules in it.
    """
    hidden = torch.arange(TOKENS * head.in_features, device="cpu").remainder(7).sub(3.0)
    hidden = hidden.view(1, TOKENS, -1)
    logits = torch.linspace(-LARGEST, LARGEST, TOKENS * head.out_features, device="cpu")
    logits = logits.view(1, TOKENS, -1)
    given: list[Any] = []

    def called(x: Any, *others: Any) -> Tensor:
        given.append(x)
        return logits.clone()

    stand_ins: dict[nn.Module, Any] = {}
    for each in (body, *body.children()):  # some classes call the decoder in it
        stand_ins[each] = lambda *args, **options: _Outputs((hidden,))
    stand_ins[head] = called
    # The class decides, and nothing that was set on the model; no hook of another library runs.
    ids = torch.zeros((1, TOKENS), dtype=torch.int64, device="cpu")
    try:
        with torch.no_grad(), _disable_current_modes(), torch.device("cpu"):
            found = type(model).forward(_shell(model, stand_ins), input_ids=ids).logits
            want = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            return (
                len(given) == 1
                and torch.equal(given[0].float(), hidden)
                and found.shape == want.shape
                and torch.allclose(found.float(), want, rtol=1e-4, atol=1e-4)
            )
    except Exception:  # of a class that needs more than this, or does something else
        return False


def _shell(module: Any, stand_ins: dict[nn.Module, Any]) -> Any:
    """Returns a module with the attributes of another, whose changes leave that one as it is, and
    in which functions take the place of the ``forward`` of some modules."""
    made: Any = object.__new__(type(module))
    made.__dict__ = dict(vars(module))
    for name, value in vars(module).items():
        if name.endswith("_hooks"):
            made.__dict__[name] = type(value)()
    if module in stand_ins:
        made.__dict__["forward"] = stand_ins[module]
    children = dict(module._modules)
    for name, child in children.items():
        if child is not None and not stand_ins.keys().isdisjoint(child.modules()):
            children[name] = _shell(child, stand_ins)
    made.__dict__["_modules"] = children
    return made
