"""Where the local elements of a DTensor lie in the whole one, on two ranks."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from headroom._core import dtensor
from headroom._core.dtensor import (
    first_row,
    local_part,
    moved_shard,
    place_of,
    shard_groups,
    shard_number,
    sharded_dim,
)
from headroom._core.ranks import fsdp_class
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from helpers.mesh import mesh

WHERE = "_local_shape_and_offsets"
WHOLE = torch.arange(5 * 4 * 3).view(5, 4, 3)


def found(place):
    """The numbers of the elements at a place, as ``hr_place`` in ``headroom.h`` says it."""
    offset, run, stride = place

    def number(i):
        return offset + i // run * stride + i % run

    return number


def places(rank):
    for dim in range(3):
        sharded = distribute_tensor(WHOLE, mesh(), [Shard(dim)])
        part = sharded.to_local()
        number = found(place_of(sharded))
        assert [number(i) for i in range(part.numel())] == part.flatten().tolist()
        assert shard_number(sharded) == rank and len(shard_groups(sharded)) == 1
        assert first_row(sharded) == (3 * rank if dim == 0 else 0)
        assert local_part(sharded).equal(part)
    copied = distribute_tensor(WHOLE, mesh(), [Replicate()])
    for whole in (copied, WHOLE):
        assert place_of(whole) == (0, 60, 0) and shard_groups(whole) == ()
        assert shard_number(whole) == first_row(whole) == 0 and local_part(whole).equal(WHOLE)
    # One of the ranks has nothing, and a place all the same.
    row = distribute_tensor(WHOLE[:1], mesh(), [Shard(0)])
    assert place_of(row) == ((0, 12, 0) if rank == 0 else (0, 1, 0))
    assert place_of(WHOLE[:0]) == (0, 1, 0)
    over = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("a", "b"))
    both = distribute_tensor(WHOLE, over, [Shard(1), Shard(0)])
    number, part = found(place_of(both)), both.to_local()
    assert [number(i) for i in range(part.numel())] == part.flatten().tolist()
    assert shard_number(both) == rank and len(shard_groups(both)) == 2
    turned = distribute_tensor(WHOLE, over, [Replicate(), Shard(0)])
    assert shard_number(turned) == 0 and len(shard_groups(turned)) == 1


def cuts_in_two_dimensions(rank):
    """As two dimensions of a mesh cut them, of which this process has one alone."""
    sharded = distribute_tensor(WHOLE, mesh(), [Shard(0)])
    for rows, columns, last in (
        *((slice(0, 3), slice(2, 4), slice(0, 3)), (slice(3, 5), slice(0, 2), slice(0, 3))),
        *((slice(3, 5), slice(0, 4), slice(2, 3)), (slice(0, 5), slice(1, 3), slice(0, 3))),
    ):
        part = WHOLE[rows, columns, last]
        offsets = rows.start, columns.start, last.start
        with mock.patch.object(dtensor, WHERE, return_value=(part.shape, offsets)):
            number = found(place_of(sharded))
            assert [number(i) for i in range(part.numel())] == part.flatten().tolist()
    local = (5, 2, 2), (0, 2, 1)
    with mock.patch.object(dtensor, WHERE, return_value=local):
        with pytest.raises(NotImplementedError, match="along the first and another; got "):
            place_of(sharded)


@pytest.mark.slow
@pytest.mark.gloo
def test_places_of_shards_of_two_dimensions(ranks):
    ranks(cuts_in_two_dimensions)


@pytest.mark.gloo
def test_places_of_shards(ranks):
    ranks(places)


def test_kinds_of_shards():
    assert sharded_dim(Shard(2)) == 2 and sharded_dim(Replicate()) is None
    assert moved_shard(Shard(2), 1) == Shard(1)
    try:
        from torch.distributed.tensor.placement_types import _StridedShard
    except ImportError:
        return
    strided = _StridedShard(0, split_factor=2)
    assert sharded_dim(strided) == 0
    assert moved_shard(strided, 1) == _StridedShard(1, split_factor=2)


def test_classes_of_fsdp():
    assert fsdp_class("FSDPModule") == (FSDPModule,) and fsdp_class("none") == ()
