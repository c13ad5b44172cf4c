"""Memory of the host that tensors of a device can stay in: an arena with an account, and engines
that copy between the two."""

from .arena import HostArena, HostMemoryError, default_arena
from .saved import trim

__all__ = ["HostArena", "HostMemoryError", "default_arena", "trim"]
