"""Counts of skipped steps, and when they come to the host."""

import torch
from headroom.optim.counts import LateCounts, SkippedSteps


def test_steps_are_counted():
    """All that were skipped, and those in a row, from any flag of one element; every third time
    those in a row are looked at, and said where they are three or more."""
    skips, seen, said = SkippedSteps(), [], []
    counts = skips.on(torch.device("cpu"))
    assert counts.dtype == torch.int64 and counts.tolist() == [0, 0]
    for flag in (1.0, 0.5, 0.0, torch.nan, -2.0, torch.inf, 0.0, 1.0):
        said.append(skips.prepared(torch.tensor([[flag]], requires_grad=True), 3)())
        seen.append(counts.tolist())
    assert seen == [[1, 1], [2, 2], [2, 0], [3, 1], [4, 2], [5, 3], [5, 0], [6, 1]]
    assert said == [[], [], [], [], [], [3], [], []]
    assert skips.on(counts.device) is counts and skips.total() == 6
    assert skips.on(torch.device("meta")).is_meta


def test_counts_arrive_once_in_their_order():
    late, count = LateCounts(), torch.tensor(5)
    late.send(count)
    count += 1
    own = torch.empty_like(count)
    late.send(count, own)
    count += 1
    assert own == 6 and list(late.arrived()) == [5, 6] and list(late.arrived()) == []
    late.send(count)
    late.clear()
    assert list(late.arrived()) == []
    room = late.room_for(count)
    assert room is not count and room.dtype == count.dtype and room.shape == ()


def test_a_count_of_a_gpu_arrives_when_its_copy_has(monkeypatch):
    class Event:
        """As CUDA's: true of what was given to the device before it, which may be nothing."""

        ready = False

        def __init__(self):
            self.is_recorded = False

        def record(self):
            self.is_recorded = True

        def query(self):
            return not self.is_recorded or Event.ready

    class OnDevice(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    late, count = LateCounts(), torch.tensor(5)
    late.send(count.as_subclass(OnDevice), torch.empty_like(count))
    assert list(late.arrived()) == []
    Event.ready = True
    assert list(late.arrived()) == [5]
