"""The software device by itself: memory, streams, events, graphs and what they refuse."""

import ctypes
import subprocess
import sys
import threading

import pytest
import torch
from headroom_rehearsal import values

pytestmark = pytest.mark.cuda
MiB = 1 << 20


@pytest.fixture(autouse=True)
def _on_the_device(runtime):
    yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def on_host(values):
    return torch.tensor(values, dtype=torch.float32).pin_memory()


def test_copies_go_there_and_back():
    x = torch.arange(1000.0)
    assert torch.equal(x.cuda().cpu(), x)
    assert torch.equal(x.cuda()[::3].contiguous().cpu(), x[::3])


def test_memory_ends_where_the_device_ends(runtime):
    free, total = torch.cuda.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError, match=r"total capacity of 8\.00 GiB"):
        torch.empty(free + MiB, dtype=torch.uint8, device="cuda")
    x = torch.empty(free // 64, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info() == (total - runtime.rehearsal_used(0), total)
    del x
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= free


def test_memory_lies_behind_what_was_there_before():
    """So that what torch's allocator does, which prefers low addresses, is the same in each run."""
    addresses = []
    for _ in range(3):
        addresses.append(torch.empty(32 * MiB, dtype=torch.uint8, device="cuda").data_ptr())
        torch.cuda.empty_cache()
    assert addresses == sorted(set(addresses))


def test_a_late_copy_is_seen_only_after_a_wait(late):
    source, target = on_host([1.0, 2.0]), on_host([0.0, 0.0])
    there = source.to("cuda", non_blocking=True)
    target.copy_(there, non_blocking=True)
    assert target.tolist() == [0.0, 0.0]
    torch.cuda.synchronize()
    assert target.tolist() == [1.0, 2.0]


def test_a_pinned_source_that_is_written_early_is_seen(late):
    source = on_host([1.0])
    there = source.to("cuda", non_blocking=True)
    source.fill_(7.0)  # before the copy was waited for
    assert there.cpu().tolist() == [7.0]


def forced(there):
    """Lets the device run what the current stream was given, without a wait of the host."""
    there.add(1)


def test_a_copy_that_has_run_is_seen_only_after_a_wait(late):
    target = on_host([0.0, 0.0])
    there = torch.tensor([1.0, 2.0], device="cuda")
    target.copy_(there, non_blocking=True)
    forced(there)
    assert target.isnan().all()
    torch.cuda.current_stream().synchronize()
    assert target.tolist() == [1.0, 2.0]


def test_a_copy_that_has_run_is_seen_by_the_device(late):
    target = on_host([0.0, 0.0])
    target.copy_(torch.tensor([1.0, 2.0], device="cuda"), non_blocking=True)
    assert target.cuda(non_blocking=True).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("waits", [True, False])
def test_a_pinned_source_that_is_written_without_a_wait_is_reported(unordered, waits):
    source = on_host([1.0])
    there = source.to("cuda", non_blocking=True)
    forced(there)
    if waits:
        torch.cuda.current_stream().synchronize()
    source.fill_(7.0)
    assert there.tolist() == [1.0]
    assert ("written before the host had waited" in unordered()) != waits


def test_pageable_memory_is_taken_along(late):
    source = torch.ones(4)
    there = source.to("cuda", non_blocking=True)
    source.fill_(7.0)
    assert there.cpu().tolist() == [1.0] * 4


def test_an_event_is_reached_when_its_stream_is():
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    on_host([1.0]).to("cuda", non_blocking=True)
    end.record()
    end.synchronize()
    assert begin.query() and end.query()
    assert begin.elapsed_time(end) >= 0


@pytest.mark.parametrize("fault", ["none", "no wait for the upload", "no wait for the download"])
def test_copies_on_another_stream_are_ordered_by_events(unordered, fault):
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    source, target = on_host([1.0]), on_host([0.0])
    there = torch.empty(1, device="cuda")
    side.wait_stream(main)  # the memory is there
    with torch.cuda.stream(side):
        there.copy_(source, non_blocking=True)
    if fault != "no wait for the upload":
        main.wait_stream(side)
    copied = torch.empty(1, device="cuda")
    copied.copy_(there, non_blocking=True)
    if fault != "no wait for the download":
        side.wait_stream(main)
    with torch.cuda.stream(side):
        target.copy_(copied, non_blocking=True)
    torch.cuda.synchronize()
    assert bool(unordered()) == (fault != "none")


def test_memory_is_not_poisoned_before_what_uses_it_is_over(late):
    sources, target = [on_host([k] * 128) for k in (1.0, 2.0)], on_host([0.0] * 128)
    first, second = (source.to("cuda", non_blocking=True) for source in sources)
    second.copy_(sources[1], non_blocking=True)
    target.copy_(first, non_blocking=True)
    begin = first.data_ptr()
    del first, second
    both = torch.empty(256, device="cuda")  # which is poisoned after all of these
    assert both.data_ptr() == begin
    torch.cuda.synchronize()
    assert target.tolist() == [1.0] * 128
    assert both.isnan().all()


@pytest.mark.parametrize("records", [True, False])
def test_memory_that_another_stream_uses_must_be_recorded(unordered, records):
    side = torch.cuda.Stream()
    x = on_host([1.0] * 1024).to("cuda", non_blocking=True)
    side.wait_stream(torch.cuda.current_stream())
    target = on_host([0.0] * 1024)
    with torch.cuda.stream(side):
        target.copy_(x, non_blocking=True)
    if records:
        x.record_stream(side)
    del x
    again = torch.empty(1024, device="cuda")
    again.copy_(on_host([2.0] * 1024), non_blocking=True)
    torch.cuda.synchronize()
    assert bool(unordered()) != records


def test_a_host_that_waits_orders_what_comes_after(unordered):
    side = torch.cuda.Stream()
    there = torch.empty(1, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        there.copy_(on_host([1.0]), non_blocking=True)
    side.synchronize()
    assert there.cpu().tolist() == [1.0]
    assert unordered() == ""


def test_a_graph_copies_in_each_replay():
    source, target = on_host([1.0]), on_host([0.0])
    there = torch.empty(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        there.copy_(source, non_blocking=True)
        target.copy_(there, non_blocking=True)
    assert target.tolist() == [0.0]
    for value in (2.0, 3.0):
        source.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert target.tolist() == [value]


def test_a_capture_refuses_to_wait():
    x = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(graph):
        x.cpu()
    torch.cuda.synchronize()


def test_a_capture_wants_its_side_streams_back():
    side = torch.cuda.Stream()
    source, there = on_host([1.0]), torch.empty(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="unjoined"), torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            there.copy_(source, non_blocking=True)
    torch.cuda.synchronize()


def test_a_graph_takes_side_streams_along():
    side = torch.cuda.Stream()
    source, there = on_host([1.0]), torch.empty(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            there.copy_(source, non_blocking=True)
        main.wait_stream(side)
    source.fill_(5.0)
    graph.replay()
    assert there.cpu().tolist() == [5.0]


def test_the_default_stream_and_blocking_streams_take_turns(unordered):
    stream = torch.cuda.ExternalStream(_blocking_stream())
    there = torch.empty(1, device="cuda")
    with torch.cuda.stream(stream):
        there.copy_(on_host([1.0]), non_blocking=True)
    assert there.cpu().tolist() == [1.0]
    assert unordered() == ""


def _blocking_stream():
    made = ctypes.c_void_p()
    ctypes.CDLL("libcudart.so.13").cudaStreamCreate(ctypes.byref(made))
    return made.value


def test_a_function_of_the_host_may_wait_for_another_thread(runtime):
    stream, side = torch.cuda.Stream(), torch.cuda.Stream()
    thread, ended = threading.Thread(target=lambda: torch.cuda.Event().record(side)), []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def wait(_):
        thread.start()
        thread.join(10)
        ended.append(not thread.is_alive())

    runtime.cudaLaunchHostFunc(ctypes.c_void_p(stream.cuda_stream), wait, None)
    stream.synchronize()
    assert ended == [True]


def test_what_a_graph_computes_goes_with_it():
    x, kept = torch.ones(8, device="cuda"), []
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.mul_(2)
        graph.replay()
        torch.cuda.synchronize()
        del graph
        kept.append(len(values._captured))
    assert kept[0] == kept[1] == kept[2]


def test_allocations_are_poisoned():
    x = torch.empty(256, device="cuda")
    assert x.cpu().isnan().all()


OUTLIVED = """
import threading
import time
import torch

begun = threading.Event()

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        begun.set()
        time.sleep(0.5)
        return grad

class Fails(Slow):
    @staticmethod
    def backward(ctx, grad):
        begun.wait()
        raise ValueError

here, there = (torch.ones(4, device=d, requires_grad=True) for d in ("cpu", "cuda"))
try:
    # What was computed last comes first in a backward pass.
    (Fails.apply(here) + Slow.apply(there).cpu()).sum().backward()
except ValueError:
    print("the end")
"""


def test_a_program_may_end_before_its_backward_pass(tmp_path):
    """The host's thread raises while the device's is in Python: see _wait_for_backward."""
    (tmp_path / "outlived.py").write_text(OUTLIVED)
    start = "import headroom_rehearsal as r, runpy; r.start(); runpy.run_path('outlived.py')"
    command = [sys.executable, "-c", start]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "the end\n"), ran.stderr
