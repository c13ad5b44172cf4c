"""Copies of models, optimizers and batches whose tensors are fakes: nothing of the user's is
written, and no memory is taken."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from .._core.module_copies import deepcopy_with
from ..patching.bitsandbytes import Held, parameter_classes
from ..patching.bitsandbytes_experts import HeldExperts
from ..step.errors import PlanError

__all__ = ["Copier", "copy_attributes"]

_PLAIN = (Tensor, nn.Parameter, nn.Buffer, nn.UninitializedParameter)


class Copier:
    """Makes fakes of tensors, and copies of objects in which fakes take the place of tensors.

    Tensors that share memory have fakes that share memory, and one tensor has one fake however
    often it is met, so that tied weights stay tied.
    """

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self.mode, self.device = mode, device
        self.memo: dict[int, Any] = {}
        self._kept: list[Any] = []  # a memo is valid as long as its keys are alive
        self._storages: dict[int, torch.UntypedStorage] = {}

    def fake(self, x: Tensor) -> Tensor:
        """Returns the fake of a tensor."""
        found = self.memo.get(id(x))
        if found is None:
            found = self.memo[id(x)] = self._made(x)
            self._kept.append(x)
            if x.is_leaf and x.requires_grad:
                self._copy_hooks(x, found)
        return found

    def _made(self, x: Tensor) -> Tensor:
        if isinstance(x, FakeTensor):
            raise PlanError("a tensor is a fake already; plan outside of FakeTensorMode")
        if is_lazy(x):
            raise PlanError(
                "the model has lazy parameters, whose shapes are not known yet; call it once, or "
                "plan with measure=True"
            )
        if type(x) not in (*_PLAIN, *parameter_classes()) or x.layout != torch.strided:
            kind = type(x).__name__ if x.layout == torch.strided else str(x.layout)
            raise PlanError(
                f"a {kind} of shape {list(x.shape)} has no fake of its own; plan with measure=True"
            )
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._kept.append(storage)
            self._storages[key] = torch.UntypedStorage(storage.nbytes(), device="meta")
        # A tensor on meta, so the storage takes no memory. Outside of the mode: it is no operation.
        with torch.no_grad(), _disable_current_modes():
            on_meta = torch.empty(0, dtype=x.dtype, device="meta")
            on_meta.set_(self._storages[key], x.storage_offset(), x.shape, x.stride())
        return self._like(x, FakeTensor(self.mode, on_meta, self.device))

    def _like(self, x: Tensor, made: Any) -> Tensor:
        if isinstance(x, nn.Parameter):
            made = nn.Parameter(made, requires_grad=x.requires_grad)
        else:
            made.requires_grad_(x.requires_grad and x.is_leaf)
        copy_attributes(x, made)
        if isinstance(x, nn.Buffer):
            made.persistent, made._is_buffer = getattr(x, "persistent", True), True
        return made

    def _copy_hooks(self, x: Tensor, made: Tensor) -> None:
        hooks = getattr(x, "_post_accumulate_grad_hooks", None) or {}
        if hooks or x._backward_hooks:
            raise PlanError(
                f"a parameter of shape {list(x.shape)} has hooks on its gradient, which belong to "
                "the real one; remove them, and say release=True for gradients that are released"
            )

    def copy(self, value: Any) -> Any:
        """Returns a deep copy. All tensors in it are fakes, and functions that hold tensors or
        modules in their closures hold the copies."""
        with _tensors_as_fakes(self):
            try:
                return copy.deepcopy(value, self.memo)
            except PlanError:
                raise
            except Exception as error:
                raise PlanError(
                    f"a copy of {type(value).__name__} cannot be made to plan with: {error}. Give "
                    "a function that makes it, as 'module:function', or plan with measure=True"
                ) from error


def copy_attributes(x: Tensor, made: Tensor) -> None:
    """Gives a tensor the attributes of another, such as the axes that optimizers look for."""
    for name, value in vars(x).items():
        if not name.startswith("_") and not hasattr(made, name):
            setattr(made, name, value)


def _tensors_as_fakes(copier: Copier) -> AbstractContextManager[None]:
    """Lets :func:`copy.deepcopy` make fakes of tensors and look into closures."""
    added: dict[type, Callable[..., Any]] = {
        kind: lambda x, memo: copier.fake(x) for kind in (*_PLAIN, *parameter_classes())
    }
    added |= {kind: lambda x, memo: x.faked(copier.fake) for kind in (Held, HeldExperts)}
    shared = (torch._C.Generator, type(threading.Lock()), type(threading.RLock()))
    added |= {kind: lambda x, memo: x for kind in shared}
    return deepcopy_with(added)
