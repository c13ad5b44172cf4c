"""Lets ``headroom.memory.track`` see no memory of the host that was there before."""

import contextlib
import gc
import sys

import headroom
import pytest
from headroom.host.arena import slabs


@contextlib.contextmanager
def empty_host():
    """Frees what nobody holds, and leaves out what others hold: loops of other libraries keep their
    last optimizer."""
    gc.collect()
    headroom.host.trim()
    before = set(slabs())
    with pytest.MonkeyPatch.context() as patch:
        module = sys.modules["headroom.memory.track"]
        patch.setattr(
            module, "slabs", lambda: {k: v for k, v in slabs().items() if k not in before}
        )
        yield
