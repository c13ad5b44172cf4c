"""retry_on_oom on a GPU whose allocator is held to less than a step takes."""

import contextlib
import gc

import headroom
import pytest
import torch
from headroom.retrying import retry_on_oom

from helpers.retrying import assert_same, contents, quietly, step_of
from helpers.software_device import cannot_run

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

MIB = 1 << 20


def made(save, optimizer_of, layers=8):
    torch.manual_seed(1)
    config = headroom.nn.TransformerConfig(
        vocab_size=512, hidden_size=256, layers=layers, heads=4, features=1024, dropout=0.1
    )
    model = headroom.nn.Transformer(config, save=save, device="cuda")
    optimizer = optimizer_of(model.parameters(), lr=1e-3)
    torch.manual_seed(4)
    return model, optimizer, step_of(model, optimizer)


def tokens(rows, length=1024):
    return torch.randint(512, (rows, length), device="cuda")


def fresh():
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@contextlib.contextmanager
def held_to(limit):
    """Holds the allocator to a number of bytes."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def results(model, losses):
    return [x.cpu() for x in losses + contents(model)] + [torch.cuda.get_rng_state()]


@cannot_run("six steps of this size take minutes there")
@pytest.mark.parametrize("optimizer_of", [headroom.optim.AdamW, torch.optim.AdamW])
def test_less_memory_than_a_step_takes(optimizer_of):
    """The allocator is held to what a step takes at L4: at L0 it runs out of memory."""
    batch = tokens(8)
    model, optimizer, plain = made("L4", optimizer_of)
    fresh()
    step = retry_on_oom(plain, model=model, optimizer=optimizer)
    wanted = results(model, [step(batch) for _ in range(3)])
    assert step.retries == 0
    peak = torch.cuda.max_memory_reserved()
    del model, optimizer, plain, step
    model, optimizer, plain = made("L0", optimizer_of)
    fresh()
    step = retry_on_oom(plain, model=model, optimizer=optimizer)
    with held_to(peak + 64 * MIB):
        losses = [quietly(step, batch) for _ in range(3)]
    assert step.retries >= 1, step.report()
    assert_same(results(model, losses), wanted)


def test_what_another_stream_still_writes_is_waited_for():
    """A failed attempt has queued work on a stream of its own that writes to a buffer."""
    model, optimizer, _ = made("L0", headroom.optim.AdamW, layers=1)
    model.register_buffer("seen", torch.zeros(1 << 20, device="cuda"))
    stream, errors = torch.cuda.Stream(), [MemoryError("no room")]

    def step():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            model.seen.add_(1)
        if errors:
            raise errors.pop()
        torch.cuda.current_stream().wait_stream(stream)

    quietly(retry_on_oom(step, model=model, optimizer=optimizer))
    assert bool((model.seen == 1).all())


def test_the_capture_of_a_graph():
    """A step that is captured runs as it is, and steps before the capture may be repeated."""
    model, optimizer, _ = made("L0", headroom.optim.AdamW, layers=1)
    static, errors = tokens(1, 16), [torch.OutOfMemoryError("no room")]

    def plain():
        if errors:
            raise errors.pop()
        model(static).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step = retry_on_oom(plain, model=model, optimizer=optimizer)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            quietly(step)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    before = model.norm.weight.detach().clone()
    graph.replay()
    assert step.retries == 1 and not torch.equal(model.norm.weight, before)
