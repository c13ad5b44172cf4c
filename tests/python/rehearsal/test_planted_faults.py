"""Faults of each kind, planted: the device must notice. Each test also runs without its fault, of
which nothing may be said."""

import contextlib

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom._core.recompute import Dropping
from headroom._core.surroundings import Settings
from headroom.release.engine import Engine
from torch import nn

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("runtime")]


@contextlib.contextmanager
def allocating_for(stream):
    """Lets memory that is allocated be that of another stream than the current one."""
    library = torch.library.Library("aten", "IMPL")
    real = torch.library.get_kernel("aten::empty.memory_format", "CUDA")

    def empty(keyset, *args, **kwargs):
        with torch.cuda.stream(stream):
            return real.call_boxed(keyset, *args, **kwargs)

    library.impl("empty.memory_format", empty, "CUDA", with_keyset=True, allow_override=True)
    try:
        yield
    finally:
        library._destroy()


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("op", ["linear_quantized", "linear_divergence"])  # which calls others
def test_a_workspace_that_is_used_again_before_its_kernel_ran(unordered, op, fault):
    layer = headroom.nn.Linear4bit(64, 32).cuda()
    x, side = torch.randn(300, 64, device="cuda"), torch.cuda.Stream()
    teacher = x.flip(0)
    side.wait_stream(torch.cuda.current_stream())
    with allocating_for(side) if fault else contextlib.nullcontext():
        # The workspace is free again when this returns.
        if op == "linear_quantized":
            y = layer(x)
        else:
            y = headroom.loss.linear_distillation_loss(x, x, teacher, x)
    with torch.cuda.stream(side):
        for count in (8 << 20, 1 << 16):  # most of it is for cuBLAS: 32 MiB
            torch.zeros(count, device="cuda")
    torch.cuda.synchronize()
    assert (f"headroom::{op}" in unordered()) == fault
    del y


@pytest.mark.parametrize("fault", [None, "freed before the replay", "outside the pool"])
def test_a_graph_whose_memory_is_not_its_own(unordered, fault):
    # No stream of the pool: the 33rd is the first again, and could be that of the capture.
    x, other = torch.ones(8, device="cuda"), torch.cuda.default_stream()
    with torch.cuda.stream(other):
        kept = torch.empty(8, device="cuda")  # there is free memory beside it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with torch.cuda.stream(other) if fault == "outside the pool" else contextlib.nullcontext():
            between = torch.empty(8, device="cuda")
        torch.mul(x, 2, out=between)
        y = between + 1
        del between
    if fault == "freed before the replay":
        del x
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
    assert ("freed before the replay" in unordered()) == (fault is not None)
    del kept, y


def test_a_capture_that_asks_the_device_for_memory():
    torch.cuda.empty_cache()
    with (
        pytest.raises(torch.AcceleratorError, match="captur"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        torch.cuda.stream(torch.cuda.default_stream()),
    ):
        # More than any segment has left that another test's tensors keep.
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")


def test_a_graph_of_ours_whose_memory_is_not_its_own(unordered):
    sums, grads = ([torch.ones(8, device="cuda")] for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        headroom.functional.accumulate_(sums, grads)
    graph.replay()
    torch.cuda.synchronize()
    assert unordered() == ""
    grads.clear()
    graph.replay()
    torch.cuda.synchronize()
    assert "headroom::accumulate" in unordered()


FLASH, EFFICIENT = [1, 2, 0, 3, 4], [2, 1, 0, 3, 4]  # orders of attention's backends


@pytest.mark.parametrize("fault", [None, "settled", "restored"])
def test_attention_that_is_computed_again_by_another_kernel(monkeypatch, fault):
    """The order changes during the first call, as torch does it on some devices, and after it."""
    if fault == "settled":
        monkeypatch.setattr(Settings, "settled", lambda settings: settings)
    if fault == "restored":
        monkeypatch.setattr(Settings, "restored", lambda settings: contextlib.nullcontext())
    calls = []

    def attention(x):
        if not calls:
            torch._C._set_sdp_priority_order(EFFICIENT)
        calls.append(x)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).square()

    x = torch.randn(2, 4, 8, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    order = torch._C._get_sdp_priority_order()
    F.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
    x.grad = None
    torch._C._set_sdp_priority_order(FLASH)
    try:
        with Dropping() as dropping:
            y = dropping.run(attention, x, keep_results=True)
        torch._C._set_sdp_priority_order(FLASH)
        if fault is None:
            y.sum().backward()
            again = x.detach().requires_grad_()
            attention(again).sum().backward()
            torch.testing.assert_close(x.grad, again.grad)
        else:
            with pytest.raises(RuntimeError, match="shape"):
                y.sum().backward()
        assert len(calls) >= 2
    finally:
        torch._C._set_sdp_priority_order(order)


@pytest.mark.parametrize("fault", [False, True])
def test_released_steps_on_another_stream_that_nothing_waits_for(monkeypatch, unordered, fault):
    if fault:
        flush = Engine.flush

        def without_waiting(engine):
            with monkeypatch.context() as here:
                here.setattr(torch.cuda.Stream, "wait_stream", lambda *_: None)
                flush(engine)

        monkeypatch.setattr(Engine, "flush", without_waiting)
    model = nn.Linear(16, 16).cuda()
    optimizer = headroom.optim.AdamW(model.parameters(), lr=1e-2)
    headroom.release_gradients(model, optimizer)
    x, side = torch.randn(4, 16, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    model(x)
    torch.cuda.synchronize()
    assert bool(unordered()) == fault
