"""Snapshots of memory: files that torch's memory_viz page opens, with kinds and owners in them.

:class:`snapshot` records and writes them, on the CPU and on CUDA, and :func:`load_snapshot` reads
them, and those that torch wrote, without running code.

**The format** is that of ``torch.cuda.memory._dump_snapshot``: a pickle (protocol 4) of dicts,
lists, tuples, text and numbers with the keys ``segments``, ``device_traces``,
``allocator_settings`` and ``external_annotations``. What is added to it:

- every entry ``alloc``, ``free_requested`` and ``free_completed``, and every live block, has
  ``category``, its kind of :data:`headroom.memory.KINDS`, by which memory_viz colors;
- the last entry, ``snapshot``, has the category ``unknown``, without which memory_viz stops;
- and ``user_metadata``, which memory_viz shows: JSON with the keys ``kind``, ``module``, ``op``,
  ``phase`` and ``step``, and ``user`` with what the program had set itself;
- its first frame has the filename ``"<headroom>"`` and says the same in words, for the views that
  show frames only;
- ``external_annotations`` has a range ``headroom::step 3 backward`` per phase of a step;
- the key ``headroom`` holds ``format`` (``"headroom.memory.snapshot/1"``), ``devices`` (the name
  of each row of ``device_traces``) and ``spans`` (for each row ``[event, step, phase]``, where
  events are its entries ``alloc`` and ``free_completed``, counted from 1).

On the CPU there is one row. Its segments are the pages in which allocations were, so that memory
which went back to the system counts as inactive; addresses are those of the process.

**What is read** is a :class:`Snapshot`: its ``timeline`` is the :class:`headroom.memory.Timeline`
of allocations with kind, module, op, phase, step and lines of Python, ``times`` the time of each
event, ``at_peak()`` and ``at_end()`` what was live, ``segments`` the blocks of the allocator, and
``reserved_over_events()`` their sum.
"""

from .loaded import Block, OutOfMemory, Segment, Snapshot, load_snapshot
from .record import snapshot

__all__ = ["Block", "OutOfMemory", "Segment", "Snapshot", "load_snapshot", "snapshot"]
