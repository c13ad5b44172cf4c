"""Copy engines: the inline one, what all refuse, and what that of CUDA asks of its streams."""

import pytest
import torch
from headroom.host import cuda
from headroom.host.engine import Inline
from headroom.host.engines import engine_of


def test_inline_copies_at_once_and_counts():
    engine = Inline()
    host, device = torch.arange(100, dtype=torch.uint8), torch.zeros(60, dtype=torch.uint8)
    ticket = engine.up(device[:50], host[10:60], [engine.mark()])
    engine.wait(ticket)
    engine.sync(ticket)
    assert torch.equal(device[:50], host[10:60]) and not device[50:].any()
    engine.down(host[:20], device[5:25])
    assert host[0] == 15
    assert (engine.bytes_up, engine.bytes_down) == (50, 20)


def test_bits_of_floats_survive():
    values = torch.tensor([-0.0, torch.nan, torch.inf, 1e-42])
    bits = values.view(torch.int32)
    bits[1] |= 0x1234  # the payload of a NaN
    target = torch.zeros(16, dtype=torch.uint8)
    Inline().up(target, values.view(torch.uint8))
    assert torch.equal(target.view(torch.int32), bits)


@pytest.mark.parametrize(
    "tensor", [torch.zeros(4), torch.zeros(2, 2).byte(), torch.zeros(8).byte()[::2]]
)
def test_only_vectors_of_bytes_are_copied(tensor):
    plain = torch.zeros(4, dtype=torch.uint8)
    for pair in ((plain, tensor), (tensor, plain)):
        with pytest.raises(ValueError, match="wanted a vector of bytes"):
            Inline().up(*pair)
    with pytest.raises(ValueError, match="a copy of 4 bytes goes to 3"):
        Inline().down(plain[:3], plain)


def test_one_engine_for_each_device():
    assert engine_of(torch.device("cpu")) is engine_of(torch.device("cpu"))


# ---- CUDA, on streams that note what they are asked for -----------------------------------------


class Log(list):
    """Stands for torch.cuda: notes calls in their order."""

    def __init__(self):
        self.compute = Stream(self, "compute")
        self.streams, self.events, self.current = 0, 0, self.compute

    def Stream(self, device):
        self.streams += 1
        return Stream(self, f"side {self.streams}")

    def Event(self):
        self.events += 1
        return Event(self, self.events)

    def current_stream(self, device):
        return self.current

    def stream(self, stream):
        return Current(self, stream)


class Current:
    def __init__(self, log, stream):
        self.log, self.stream = log, stream

    def __enter__(self):
        self.before, self.log.current = self.log.current, self.stream

    def __exit__(self, *_):
        self.log.current = self.before


class Stream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_event(self, event):
        self.log.append((self.name, "waits for", event.number))


class Event:
    def __init__(self, log, number):
        self.log, self.number = log, number

    def record(self, stream):
        self.log.append((stream.name, "records", self.number))

    def synchronize(self):
        self.log.append(("host", "waits for", self.number))


class Bytes(torch.Tensor):
    """A tensor whose copies are noted, with the stream that they are on."""

    log: Log

    def copy_(self, source, non_blocking=False):
        assert non_blocking
        self.log.append((self.log.current.name, "copies", self.numel()))
        return torch.Tensor.copy_(self, source)


@pytest.fixture
def log(monkeypatch):
    log = Log()
    for name in ("Stream", "Event", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(log, name))
    monkeypatch.setattr(Bytes, "log", log, raising=False)
    return log


def bytes_of(size):
    return torch.zeros(size, dtype=torch.uint8).as_subclass(Bytes)


def test_streams_and_events_of_copies(log, monkeypatch):
    monkeypatch.setattr(cuda, "PIECE", 40)
    engine = cuda.Streams(torch.device("cuda:0"))
    before = engine.mark()
    ticket = engine.up(bytes_of(100), bytes_of(100), [before])
    engine.wait(ticket)
    after = engine.mark()
    down = engine.down(bytes_of(30), bytes_of(30), [after])
    engine.sync(down)
    assert log == [
        ("compute", "records", 1),
        ("side 1", "waits for", 1),
        *[("side 1", "copies", size) for size in (40, 40, 20)],
        ("side 1", "records", 2),
        ("compute", "waits for", 2),
        ("compute", "records", 3),
        ("side 2", "waits for", 3),
        ("side 2", "copies", 30),
        ("side 2", "records", 4),
        ("host", "waits for", 4),
    ]


def test_the_stream_of_the_computation_is_asked_for_each_time(log):
    engine = cuda.Streams(torch.device("cuda:0"))
    log.current = other = Stream(log, "another")
    ticket = engine.mark()
    log.current = Stream(log, "a third")
    engine.wait(ticket)
    assert log == [(other.name, "records", 1), ("a third", "waits for", 1)]


def test_events_are_used_again_and_streams_are_not_made_anew(log):
    engine = cuda.Streams(torch.device("cuda:0"))
    for _ in range(50):
        held = engine.up(bytes_of(8), bytes_of(8), [engine.mark()])
        engine.down(bytes_of(8), bytes_of(8), [held])
    assert log.streams == 2 and log.events <= 4


def test_the_event_of_a_ticket_that_is_held_is_left_alone(log):
    engine = cuda.Streams(torch.device("cuda:0"))
    held = engine.mark()
    for _ in range(5):
        assert engine.mark().event is not held.event
