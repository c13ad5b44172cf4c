"""Under DDP and FSDP2 the tracker still counts to the byte, and tells what belongs to the ranks."""

import gc
from collections import Counter

import pytest
import torch
from headroom.memory import track
from headroom.memory.cpu import CpuRecorder
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from helpers.mesh import mesh

WIDTH, DEPTH, ROWS = 65, 3, 7
WHOLE = 4 * WIDTH * WIDTH  # bytes of a matrix
FIRST = 4 * WIDTH * (WIDTH + 1) // 2  # of the first rank's rows of it


def matrices():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def steps(model, optimizer, count):
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(count):
        model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()  # DTensors leave cycles behind


def allocated(timeline, least):
    """How often memory of each size was allocated within the steps."""
    sizes = Counter(a.bytes for a in timeline.allocations if a.start)
    return {size: count for size, count in sizes.items() if size >= least}


def bare(model, optimizer, least):
    recorder = CpuRecorder(stacks=False)
    recorder.start()
    steps(model, optimizer, 1)
    recorder.stop()
    sizes = Counter(e.bytes for e in recorder.events() if e.action == "alloc")
    return {size: count for size, count in sizes.items() if size >= least}


def of_kind(timeline, kind):
    return [a for a in timeline.allocations if a.kind == kind]


def under_ddp(rank):
    inner = matrices()
    optimizer = torch.optim.SGD(inner.parameters(), 1e-3, momentum=0.9)
    with track(inner, optimizer) as tracked:
        model = DistributedDataParallel(inner)
        steps(model, optimizer, 2)
    most = tracked.timeline.most_by_kind
    assert most["parameters"] == most["optimizer_state"] == most["gradients"] == DEPTH * WHOLE
    # The buckets that DDP makes again when it has seen the order of the gradients. A busy thread of
    # gloo may hold a number of an earlier message beside them.
    assert 0 <= most["communication"] - DEPTH * WHOLE < 64
    assert sum(tracked.peak_by_kind.values()) == tracked.peak_bytes
    found = of_kind(tracked.timeline, "gradients")
    assert Counter(a.module for a in found) == {"0": 2, "1": 2, "2": 2}
    alone = bare(model, optimizer, ROWS * WIDTH)
    with track(model, optimizer) as tracked:
        steps(model, optimizer, 1)
    assert allocated(tracked.timeline, ROWS * WIDTH) == alone
    kept = of_kind(tracked.timeline, "activations")
    assert {a.module for a in kept} >= {"module.0", "module.1", "module.2"}


def under_fsdp(rank):
    model = matrices()
    for layer in model:
        fully_shard(layer, mesh=mesh())
    fully_shard(model, mesh=mesh())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    steps(model, optimizer, 1)
    alone = bare(model, optimizer, ROWS * WIDTH)
    with track(model, optimizer) as tracked:
        steps(model, optimizer, 1)
    assert allocated(tracked.timeline, ROWS * WIDTH) == alone
    most = tracked.timeline.most_by_kind
    own = sum(p.to_local().nbytes for p in model.parameters())
    assert most["optimizer_state"] == own
    assert own <= most["gradients"] <= DEPTH * FIRST  # rows of the last rank are padded
    assert most["communication"] >= WHOLE
    assert most["activations"] <= DEPTH * 4 * ROWS * WIDTH  # and no gathered parameter
    assert sum(tracked.peak_by_kind.values()) == tracked.peak_bytes
    found = of_kind(tracked.timeline, "gradients")
    assert sorted(a.module for a in found) == ["0", "1", "2"]


@pytest.mark.gloo
@pytest.mark.parametrize("scenario", [under_ddp, under_fsdp], ids=lambda f: f.__name__)
def test_ranks(ranks, scenario):
    ranks(scenario)
