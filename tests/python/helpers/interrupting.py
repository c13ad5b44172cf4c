"""Interrupts a call in the middle."""

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Interrupting"]


class Interrupting(TorchDispatchMode):
    """Raises in the place of an operation, as Ctrl-C does between two.

    Args:
        after: how many operations run before; None for all.

    Attributes:
        count: how many have run.
    """

    def __init__(self, after=None):
        super().__init__()
        self.after, self.count = after, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.count == self.after:
            raise KeyboardInterrupt
        self.count += 1
        return function(*args, **kwargs or {})
