"""The sizes of tensors that a run makes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Shapes(TorchDispatchMode):
    """The sizes of what ops outside of Headroom's return."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(one, torch.Tensor) and "headroom" not in str(func):
                self.seen.add(tuple(one.shape))
        return out

    def __enter__(self):
        self.seen = set()
        return super().__enter__()
