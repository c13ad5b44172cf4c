"""Keeps the state of an optimizer on the host, and steps on the device of the parameters."""

from .handle import OffloadHandle
from .paged import Paging, PagingMemory, paged_seconds, planned_paging

__all__ = ["OffloadHandle", "Paging", "PagingMemory", "paged_seconds", "planned_paging"]
