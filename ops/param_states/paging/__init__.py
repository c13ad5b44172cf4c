"""Keeps the state of an optimizer on the host, and steps on the device of the parameters, or on the
host."""

from .handle import OffloadHandle
from .hosted import Hosting, HostingMemory
from .paged import Paging, PagingMemory, paged_seconds, planned_paging

__all__ = [
    "Hosting",
    "HostingMemory",
    "OffloadHandle",
    "Paging",
    "PagingMemory",
    "paged_seconds",
    "planned_paging",
]
