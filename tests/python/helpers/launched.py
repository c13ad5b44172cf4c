"""What libraries for training look for where torchrun has started the processes of a test."""

import contextlib
import os
import shutil
import tempfile
from unittest import mock

import torch.distributed as dist


@contextlib.contextmanager
def as_by_torchrun():
    """The environment of one of the processes of ``helpers.ranks``, whose group exists."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    found = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": "0",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",  # nobody listens: the group exists
        "TORCHELASTIC_RUN_ID": "tests",
    }
    with mock.patch.dict(os.environ, found):
        try:
            yield
        finally:
            _forget()


@contextlib.contextmanager
def shared_folder():
    """A folder that all ranks see, and the first one removes."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    try:
        yield name[0]
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(name[0], ignore_errors=True)


def _forget():
    """Makes accelerate look at the environment again when it is next used."""
    from accelerate import state

    state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()
