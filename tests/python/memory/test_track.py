"""What a step allocates is counted to the byte, named, and not changed by being looked at."""

import gc
import os
import threading

import headroom
import numpy as np
import pytest
import torch
from headroom import memory
from headroom.memory import track
from headroom.memory.cpu import CpuRecorder
from headroom.memory.watch import Watch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _model(blocks=2, width=32):
    torch.manual_seed(1)
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


def _step(model, optimizer, x):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_known_allocations_are_found_to_the_byte():
    """The program allocates what its lines say; freed at once, or at the end."""
    model = nn.Linear(4, 4)
    with track(model, stacks=True) as tracked:
        a = torch.empty(1000)  # 4000
        b = torch.empty(300, dtype=torch.uint8)  # 4300
        del a  # 300
        c = torch.empty(2000, dtype=torch.bfloat16)  # 4300
        c.resize_(3000)  # the new memory beside the old: 10300, then 6300
        view = c[5:]
        del c, view  # 300
        torch.cat([b, b])  # a temporary of 600 that is dropped: 900
    own = 4 * (16 + 4)
    sizes = [4000, 4300, 300, 4300, 10300, 6300, 300, 900, 300]
    assert tracked.timeline.bytes_over_events()[1:] == [own + size for size in sizes]
    assert tracked.peak_bytes == own + 10300
    assert tracked.timeline.live(len(sizes))[0].bytes == 300
    by_size = {a.bytes: a for a in tracked.timeline.allocations}
    assert by_size[600].op == "aten::cat" and "test_track.py" in by_size[600].stack[0]


def _raw():
    return torch.UntypedStorage(333)


def test_lines_of_memory_that_no_operation_allocates():
    with track(nn.Linear(2, 2), stacks=True) as tracked:
        kept = _raw()
    (found,) = (a for a in tracked.timeline.allocations if a.bytes == kept.nbytes())
    assert found.op is None and "test_track.py:" in found.stack[0]
    assert found.stack[0].endswith(" _raw")


def test_what_is_asked_for_in_a_backward_pass_tells_its_module():
    """As on CUDA, whose recorder does not see the nodes of the graph."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    watch = Watch(model, [], torch.device("cpu"), lambda number: None, unpacked=True)
    watch.install()
    try:
        y = model(torch.randn(2, 3))
        assert y.grad_fn._saved_result is not None  # asked for outside of it
        assert "backward" not in {note.phase for note in watch.notes}
        y.sum().backward()
    finally:
        watch.remove()
    assert [note.module for note in watch.notes if note.phase == "backward"] == ["1", "0"]


def test_temporaries_inside_an_operation_are_seen():
    """LayerNorm's backward pass on the CPU uses a buffer of 2 rows per thread, which no operation
    returns."""
    norm, x = nn.LayerNorm(64), torch.randn(16, 64, requires_grad=True)
    loss = norm(x).sum()
    with track(norm) as tracked:
        loss.backward()
    inside = [a for a in tracked.timeline.allocations if a.op == "NativeLayerNormBackward0"]
    assert sorted({a.bytes for a in inside}) == [2 * 64 * 4, x.nbytes]
    assert all(a.kind == "temporaries" for a in inside)
    buffer = min(inside, key=lambda a: a.bytes)
    live = tracked.timeline.live(buffer.end - 1)
    assert {a.kind for a in live} >= {"gradients"}, "it is freed after the gradients are computed"


def _peak_of_a_bare_recorder(model, optimizer, x, steps):
    recorder, live, peak = CpuRecorder(stacks=False), 0, 0
    recorder.start()
    for _ in range(steps):
        _step(model, optimizer, x)
    sizes = []
    recorder.stop()
    for event in recorder.events():
        live += event.bytes if event.action == "alloc" else -event.bytes
        peak = max(peak, live)
        sizes.append(event.bytes if event.action == "alloc" else -event.bytes)
    return peak, sizes


def test_looking_changes_neither_bits_nor_allocations():
    gc.collect()  # what earlier tests left would be freed meanwhile
    x = torch.randn(8, 32)
    runs = []
    for looked_at in (False, True):
        model = _model()
        optimizer = headroom.optim.AdamW(model.parameters(), lr=1e-2)
        random = torch.get_rng_state()
        if looked_at:
            with track(model, optimizer, batch=x) as tracked:
                _step(model, optimizer, x)
                _step(model, optimizer, x)
        else:
            peak, sizes = _peak_of_a_bare_recorder(model, optimizer, x, steps=2)
        assert torch.equal(random, torch.get_rng_state())
        runs.append([*model.parameters(), *headroom.memory.tensors_in(optimizer.state)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    before = tracked.timeline.bytes_over_events()[0]
    series = tracked.timeline.bytes_over_events()
    assert tracked.peak_bytes - before == peak
    assert [b - a for a, b in zip(series, series[1:])] == sizes


def test_kinds_are_what_the_tensors_are():
    model = _model()
    model.register_buffer("table", torch.zeros(100))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(8, 32)
    numel = sum(p.numel() for p in model.parameters())
    steps = sum(1 for _ in model.parameters())
    with track(model, optimizer) as tracked:
        for _ in range(2):
            _step(model, optimizer, x)
    most = tracked.timeline.most_by_kind
    assert most["parameters"] == 4 * numel
    assert most["buffers"] == 400
    assert most["gradients"] == 4 * numel
    assert most["optimizer_state"] == 8 * numel + 4 * steps
    assert most["batch"] == x.nbytes
    # Of a block: input, statistics, norm, up and gelu; and of the loss its argument.
    rows, width = x.shape
    block = 4 * (2 * rows * width + 2 * rows + 2 * 4 * rows * width)
    assert most["activations"] == 2 * block - x.nbytes + 4 * rows * width
    assert tracked.timeline.peaks_by_step().keys() == {0, 1}
    assert list(tracked.timeline.peaks_by_phase()) == ["forward", "backward", "optimizer", "other"]
    after = tracked.timeline.by_kind(tracked.timeline.events - 1)
    assert after["gradients"] == after["activations"] == 0


@pytest.mark.parametrize("stacks", [False, True])
def test_modules_and_lines_own_what_they_allocate(stacks):
    model = _model()
    with track(model, stacks=stacks) as tracked:
        model(torch.randn(8, 32)).sum().backward()
    kept = [a for a in tracked.timeline.allocations if a.kind == "activations"]
    up = [a for a in kept if a.module == "1.up"]
    assert [a.bytes for a in up] == [4 * 8 * 128]
    assert up[0].op == "aten::linear"
    assert up[0].stack[0].endswith("forward") and "test_track.py" in up[0].stack[0]
    backward = [a for a in tracked.timeline.allocations if a.phase == "backward"]
    temporaries = {(a.module, a.op) for a in backward if a.kind == "temporaries"}
    assert {("1.up", "AddmmBackward0"), ("0.norm", "NativeLayerNormBackward0")} < temporaries
    weight = [a for a in backward if a.kind == "gradients" and a.module == "1.up"]
    assert [(a.op, a.bytes) for a in weight] == [("weight", 4 * 32 * 128), ("bias", 4 * 128)]


@pytest.mark.parametrize("way", ["torch", "headroom", "every"])
def test_recomputed_activations_belong_to_the_backward_pass(way):
    """Under a checkpoint the forward pass keeps the inputs of blocks, and the backward pass the
    activations of one block at a time."""
    width, rows = 32, 8
    model = _model(4, width)
    x = torch.randn(rows, width)
    keep = 4 * rows * width

    def forward(x):
        for block in model:
            if way == "every":
                x = block(x)
            elif way == "headroom":
                x = headroom.checkpoint(block, x)
            else:
                x = checkpoint(block, x, use_reentrant=False)
        return x

    if way == "every":
        headroom.checkpoint_every(model)
    model.forward = forward
    with track(model) as tracked:
        model(x).square().mean().backward()
    timeline = tracked.timeline
    start = next(span.start for span in timeline.spans if span.phase == "backward")
    assert timeline.by_kind(start - 1)["activations"] == 4 * keep  # x is the batch
    block = 4 * (rows * width + 2 * rows + 2 * 4 * rows * width)
    assert timeline.most_by_kind["activations"] <= 4 * keep + block
    assert timeline.most_by_kind["activations"] >= 3 * keep + block
    again = [a for a in timeline.allocations if a.kind == "activations" and a.phase == "backward"]
    assert ("0.up", "aten::linear") in {(a.module, a.op) for a in again}


def test_released_gradients_and_master_weights():
    model = headroom.cast_model(_model(), torch.bfloat16)
    numel = sum(p.numel() for p in model.parameters() if p.dtype == torch.bfloat16)
    optimizer = headroom.optim.AdamW(model.parameters(), master="f32")
    headroom.release_gradients(model, optimizer, bucket_bytes=0)
    x = torch.randn(8, 32, dtype=torch.bfloat16)
    with track(model, optimizer) as tracked:
        for _ in range(2):
            _step(model, optimizer, x)
    most = tracked.timeline.most_by_kind
    assert most["parameters"] == sum(p.nbytes for p in model.parameters())
    assert most["master_weights"] == 4 * numel
    assert 0 < most["gradients"] < numel  # one at a time, of 2 bytes per element


def test_sums_of_micro_batches_are_gradients_from_the_first():
    model = _model()
    optimizer = headroom.optim.AdamW(model.parameters())
    accumulator = headroom.GradAccumulator(model)
    with track(model, optimizer) as tracked:
        for _ in range(2):
            with accumulator.micro_batch():
                model(torch.randn(8, 32)).square().mean().backward()
        accumulator.finish()
        optimizer.step()
        optimizer.zero_grad()
    own = sum(p.nbytes for p in model.parameters())
    assert 2 * own <= tracked.timeline.most_by_kind["gradients"] < 2.2 * own
    sums = [a for a in tracked.timeline.allocations if a.kind == "gradients" and a.op == "weight"]
    assert {a.phase for a in sums} == {"backward"}
    last = tracked.timeline.by_kind(tracked.timeline.events - 1)
    assert last["gradients"] == 0


def _everything(model, optimizer):
    """What a tracked step must leave behind as it found it."""
    hooks = [
        (name, repr(p._backward_hooks), p._post_accumulate_grad_hooks)
        for name, p in model.named_parameters()
    ]
    of_modules = [
        {key: dict(value) for key, value in vars(m).items() if "hooks" in key and value}
        for m in model.modules()
    ]
    of_optimizer = [
        dict(getattr(optimizer, key)) for key in vars(optimizer) if key.endswith("_hooks")
    ]
    stack = torch._C._autograd._top_saved_tensors_default_hooks(True)
    tensors = [*model.parameters(), *headroom.memory.tensors_in(optimizer.state)]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    bits = [t.detach().clone() for t in [*tensors, torch.get_rng_state()]]
    place = saved_tensors_hooks.__enter__
    return (hooks, of_modules, of_optimizer, stack, place), bits


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("place", ["forward", "backward", "optimizer"])
def test_errors_leave_no_trace(error, place):
    model, x = _model(), torch.randn(8, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer, x)
    model(x).sum().backward()
    before, bits = _everything(model, optimizer)

    def raising(*_):
        raise error("here")

    with pytest.raises(error, match="here"):
        with track(model, optimizer, batch=x) as tracked:
            y = model(x)
            if place == "forward":
                raising()
            if place == "backward":
                y.register_hook(raising)
                y.sum().backward()
            optimizer.register_step_pre_hook(raising)
            optimizer.step()
    if place == "optimizer":
        optimizer._optimizer_step_pre_hooks.clear()
    after, same = _everything(model, optimizer)
    assert before == after
    assert all(torch.equal(a, b) for a, b in zip(bits, same, strict=True))
    assert not torch._C._autograd._profiler_enabled()
    assert tracked.peak_by_kind["parameters"] > 0  # what was seen until then


def test_wrong_inputs_raise_as_without():
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer, torch.zeros(8, 32))
    x = torch.randn(8, 32)
    before, bits = _everything(model, optimizer)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        with track(model, optimizer):
            model(torch.zeros(8, 33))
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar"):
        with track(model, optimizer):
            model(x).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation.*expected version 0"):
        with track(model, optimizer):
            y = model(x).exp()
            y.add_(1)
            y.sum().backward()
    after, same = _everything(model, optimizer)
    assert before == after and all(map(torch.equal, bits, same))


def test_what_cannot_be_tracked_is_refused():
    model = _model()
    before, bits = _everything(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(TypeError, match="model is int, wanted a torch.nn.Module"):
        track(3)
    with pytest.raises(TypeError, match="optimizer is str, wanted a torch.optim.Optimizer"):
        track(model, ["adam"])
    with pytest.raises(TypeError, match="optimizer is int, wanted a torch.optim.Optimizer"):
        track(model, 1)
    other = torch.optim.SGD([*nn.Linear(2, 3).parameters(), model[0].up.weight])
    with pytest.raises(ValueError, match="holds 3 parameters, of which 2 are not in the model"):
        track(model, other)
    with pytest.raises(ValueError, match="0.norm.weight is on the meta device"):
        track(_model().to("meta"))
    mixed = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    with pytest.raises(ValueError, match="1.weight is on the meta device"):
        track(mixed, device="cpu")
    with pytest.raises(ValueError, match="the model has no parameters"):
        track(nn.ReLU())
    with pytest.raises(ValueError, match="wanted cpu or cuda"):
        track(model, device="mps:0")
    after, same = _everything(model, torch.optim.SGD(model.parameters()))
    assert before == after and all(map(torch.equal, bits[:-1], same[:-1]))


def test_one_at_a_time():
    model = _model()
    with track(model) as tracked:
        with pytest.raises(RuntimeError, match="a profiler is running already"):
            track(model).__enter__()
        with pytest.raises(RuntimeError, match="after the with block has ended"):
            tracked.timeline  # noqa: B018
        model(torch.randn(2, 32))
    assert tracked.timeline.allocations
    with pytest.raises(RuntimeError, match="has been used already"):
        tracked.__enter__()
    with torch.profiler.profile():
        with pytest.raises(RuntimeError, match="a profiler is running already"):
            track(model).__enter__()


def test_what_a_block_computes_again_is_an_activation():
    config = headroom.nn.TransformerConfig(
        vocab_size=32, hidden_size=32, layers=1, heads=2, features=64, dropout=0.1
    )
    # With dropout the MLP is not one operation, which would keep gate and up to itself.
    model = headroom.nn.Transformer(config, save="L2")
    with track(model) as tracked:
        model(torch.randint(32, (2, 8))).sum().backward()
    again = [
        a.bytes
        for a in tracked.timeline.allocations
        if a.kind == "activations" and a.phase == "backward"
    ]
    assert 4 * 2 * 8 * 2 * 64 in again  # gate and up


def test_what_was_there_before_ends_when_it_is_freed():
    model = _model()
    model(torch.randn(8, 32)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters())
    with track(model, optimizer) as tracked:
        optimizer.zero_grad()
        torch.zeros(10)
    timeline = tracked.timeline
    assert timeline.by_kind(0)["gradients"] == sum(p.nbytes for p in model.parameters())
    assert timeline.by_kind(timeline.events - 1)["gradients"] == 0
    assert "KINETO_LOG_LEVEL" not in os.environ


def test_a_result_that_is_dropped_does_not_keep_itself():
    model = _model()
    with track(model) as tracked:
        y = model(torch.randn(8, 32)).exp()  # saves its result
        del y
    assert tracked.timeline.by_kind(tracked.timeline.events - 1)["activations"] == 0


@pytest.mark.parametrize("look", ["track", "saved"])
def test_blocks_fuse_what_they_fuse_unwatched(look):
    """Hooks on its modules would keep a block from running its MLP as one operation."""
    config = headroom.nn.TransformerConfig(50, 32, 1, 2, 48)
    model = headroom.nn.Transformer(config)
    ids = torch.randint(50, (2, 16))
    if look == "track":
        with track(model) as tracked:
            model(ids).sum().backward()
        ops = {str(a.op) for a in tracked.timeline.allocations}
    else:
        ops = {t.op for t in headroom.memory.saved(model, ids).tensors}
    assert any("mlp" in op.lower() for op in ops), ops


# ---- memory that recorders of one thread do not see ---------------------------------------------


def _from_a_thread(make):
    """What a function returns that another thread calls."""
    made = []
    thread = threading.Thread(target=lambda: made.append(make()))
    thread.start()
    thread.join()
    return made.pop()


def _batch():
    return torch.randn(33, 17)


BATCHES = {
    "a thread's": lambda: _from_a_thread(_batch),
    "numpy's": lambda: torch.from_numpy(np.full((33, 17), 2.0, np.float32)),
    "here": _batch,
}


class _Scaled(nn.Module):
    """Saves what a library allocated."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(17, 17)

    def forward(self, x):
        return self.linear(x) * torch.from_numpy(np.full(x.shape, 3.0, np.float32))


def _in_steps(model, steps, batch, backward=lambda loss: loss.backward()):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with track(model, optimizer) as tracked:
        for _ in range(steps):
            backward(model(batch()).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return tracked.timeline


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("model", [lambda: nn.Linear(17, 17), _Scaled])
def test_batches_of_others_end(model, batch):
    size = 4 * 33 * 17
    few, many = (_in_steps(model(), steps, BATCHES[batch]) for steps in (3, 9))
    assert few.peak_bytes == many.peak_bytes
    assert size <= many.most_by_kind["batch"] <= 2 * size
    left = many.by_kind(many.events - 1)
    assert left.pop("parameters") == 4 * 18 * 17 and not any(left.values())


def test_a_backward_pass_on_another_thread():
    size = 4 * 18 * 17
    timeline = _in_steps(_Scaled(), 9, _batch, lambda loss: _from_a_thread(loss.backward))
    assert timeline.most_by_kind["gradients"] == size
    left = timeline.by_kind(timeline.events - 1)
    assert left.pop("parameters") == size and not any(left.values())
    with memory.assert_peak_below("64 KiB"):
        for _ in range(9):
            model = _Scaled()
            _from_a_thread(model(_batch()).sum().backward)
    memory.assert_no_growth(lambda: _from_a_thread(model(_batch()).sum().backward))


def test_weights_that_are_replaced_are_parameters():
    class Renewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(17, 100)
            self.register_buffer("seen", torch.zeros(1000))

        def forward(self, x):
            self.seen = self.seen + 1
            return self.linear(x)

    model = Renewed()

    def renew():
        for p in model.parameters():
            p.data = p.data.clone()
        return _batch()

    timeline = _in_steps(model, 5, renew)
    kinds = [a.kind for a in timeline.allocations if a.bytes == 4 * 17 * 100]
    assert kinds.count("parameters") == 6  # what was there before, and one of each step
    assert [a.kind for a in timeline.allocations if a.bytes == 4000] == ["buffers"] * 6
