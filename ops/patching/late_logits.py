"""Logits that are computed when something reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

# What can be known of a tensor without its values.
_KNOWN = {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point),
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout")),
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_cpu", "is_cuda", "is_meta")),
}


class LateLogits(Tensor):
    """A tensor that computes its values when something reads them, once; its shape, dtype and
    device are known before. What any function of torch returns of it is a plain tensor, but for
    :meth:`float`, which waits as well: Accelerate calls it for all that a model returns.

    Args:
        compute: returns the values.
        shape, dtype, device: that they have.
    """

    _compute: Callable[[], Tensor] | None
    _computed: Tensor | None

    @staticmethod
    def __new__(
        cls, compute: Callable[[], Tensor], shape: Any, dtype: torch.dtype, device: torch.device
    ) -> LateLogits:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._compute, made._computed = compute, None
        return made

    @property
    def computed(self) -> Tensor:
        """Returns the values."""
        if self._computed is None:
            assert self._compute is not None
            self._computed, self._compute = self._compute(), None
        return self._computed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        if func is Tensor.float and args[0]._computed is None:
            late = args[0]
            return cls(lambda: late.computed.float(), late.shape, torch.float32, late.device)
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda x: x.computed, (args, kwargs or {}))
        return func(*args, **kwargs)
