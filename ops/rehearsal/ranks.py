"""Makes a process the first rank of several, of which the others are not there: its process groups
are torch's fake ones, whose collectives compute what they would if all ranks held the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup, FakeStore

__all__ = ["be_first_of"]


def be_first_of(ranks: int) -> None:
    """Makes this process rank 0 of so many on one machine, as torchrun would have started it."""
    sizes = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")
    places = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")
    os.environ.update(dict.fromkeys(sizes, str(ranks)) | dict.fromkeys(places, "0"))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    own = c10d._new_process_group_helper

    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[Any]:
        for name, given, wanted in (("rank", rank, 0), ("world_size", world_size, ranks)):
            if given not in (-1, wanted):
                raise ValueError(
                    f"{name} is {given}, and with --devices {ranks} this process is rank 0 of "
                    f"{ranks}; take both from RANK and WORLD_SIZE"
                )
        yield FakeStore(), 0, ranks

    def fake_group(
        size: int,
        rank: int,
        every: Any,
        backend: Any,
        store: Any,
        name: Any,
        *_: Any,
        **options: Any,
    ) -> Any:
        options["backend_options"] = FakeProcessGroup.Options()
        options["backend_options"].simulate_uniform_ranks = True
        return own(size, rank, every, c10d.Backend.FAKE, FakeStore(), name, **options)

    c10d.rendezvous, c10d._new_process_group_helper = rendezvous, fake_group
