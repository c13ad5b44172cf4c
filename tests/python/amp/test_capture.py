"""Steps in CUDA graphs and on several streams. On the CPU a capture is pretended."""

import math

import headroom
import pytest
import torch

from helpers.bits import assert_same_bits

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
OPTIMIZERS = [
    headroom.optim.AdamW,
    headroom.optim.AdamW8bit,
    headroom.optim.Adafactor,
]
OVERFLOWS = [0, 1, 0, 0, 1, 1, 1, 0]


@pytest.fixture
def capture(monkeypatch):
    """Pretends from now on that the current stream is being captured."""

    def pretend(value=True):
        for name in ("is_initialized", "is_current_stream_capturing"):
            monkeypatch.setattr(torch.cuda, name, lambda: value)

    return pretend


def parameters(device="cpu", shapes=((64, 3), (5,), (300, 8))):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes
    ]


def set_grads(params, step, factor=1.0, bad=None):
    """Writes the gradients of a step into the tensors that are there already, for a graph."""
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        grad = (torch.randn(p.shape, generator=generator) * factor).to(p.device)
        if p.grad is None:
            p.grad = grad
        else:
            p.grad.copy_(grad)
    if bad is not None:
        params[1].grad[2] = bad


@pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda cls: cls.__qualname__)
def test_a_first_step_in_a_capture_is_refused(cls, capture):
    params = parameters()
    optimizer = cls([("first", params[0])])
    before = params[0].detach().clone()
    set_grads(params[:1], 0)
    capture()
    with pytest.raises(
        RuntimeError, match="of parameter 'first' would be made in the capture.*run one whole"
    ):
        optimizer.step()
    assert not optimizer.state and torch.equal(params[0], before)
    capture(False)
    optimizer.step()
    capture()
    optimizer.step()  # every state is there
    assert optimizer.state[params[0]]["step"] == 2


def test_a_parameter_that_comes_later_is_refused_too(capture):
    params = parameters()
    optimizer = headroom.optim.AdamW(params)
    set_grads(params, 0)
    params[2].grad = None
    optimizer.step()
    set_grads(params, 1)
    capture()
    before = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError, match="capture of a CUDA graph"):
        optimizer.step()
    assert all(map(torch.equal, params, before)) and params[2] not in optimizer.state


def test_a_scale_made_in_a_capture_is_refused(capture):
    scaler = headroom.amp.GradScaler("cpu")
    capture()
    with pytest.raises(RuntimeError, match="the loss scale would be made in the capture"):
        scaler.scale(torch.ones(()))
    capture(False)
    assert scaler.scale(torch.ones(())) == 2.0**16


def test_skips_in_a_capture_are_counted_and_nothing_is_asked(capture, monkeypatch):
    params = parameters()
    optimizer = headroom.optim.AdamW(params)
    scaler = headroom.amp.GradScaler("cpu", max_consecutive_skips=2)

    def step(number, bad):
        set_grads(params, number, bad=bad)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()

    step(0, None)
    capture()
    for name in ("item", "__bool__", "__int__", "__float__", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, None)
    for number in range(3):
        step(number, math.nan)  # more than two, but a graph has nobody to tell
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="4 steps in a row were skipped"):
        step(4, math.nan)


# ---- On a GPU ------------------------------------------------------------------------------------


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda cls: cls.__qualname__)
def test_a_captured_step_with_scaler_and_clipping_has_the_bits_of_an_eager_one(cls):
    def make():
        params = parameters("cuda")
        scaler = headroom.amp.GradScaler("cuda", growth_interval=2, max_consecutive_skips=100)
        return params, cls(params, max_grad_norm=0.5), scaler

    def step(optimizer, scaler):
        scaler.step(optimizer)
        scaler.update()

    def feed(params, number, overflow):
        set_grads(params, number, 2.0**16, math.inf if overflow else None)

    eager, captured = make(), make()
    for params, optimizer, scaler in (eager, captured):
        scaler.scale(torch.zeros((), device="cuda"))
        feed(params, 0, False)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(optimizer, scaler)
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*captured[1:])
    for number, overflow in enumerate(OVERFLOWS, 1):
        feed(eager[0], number, overflow)
        step(*eager[1:])
        feed(captured[0], number, overflow)
        graph.replay()
    assert_same_bits(captured[0], eager[0])
    assert captured[2].get_scale() == eager[2].get_scale()
    for mine, other in zip(*(one[1].state.values() for one in (captured, eager))):
        for name in mine:
            assert torch.equal(mine[name].cpu(), other[name].cpu()), name


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda cls: cls.__qualname__)
def test_gradients_freed_and_reused_right_after_the_step(cls):
    """On a side stream, whose kernels are still waiting when the host goes on."""
    shapes = ((1024, 1024), (4096,))

    def train(stream, wait):
        params = parameters("cuda", shapes)
        optimizer = cls(params, max_grad_norm=1.0)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for number in range(5):
                if wait:
                    torch.cuda.synchronize()
                set_grads(params, number)
                if not wait:
                    torch.cuda._sleep(10_000_000)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                for shape in shapes:  # takes the memory of the gradients
                    torch.full(shape, math.nan, device="cuda")
        torch.cuda.synchronize()
        return params

    wanted = train(torch.cuda.default_stream(), wait=True)
    assert_same_bits(train(torch.cuda.Stream(), wait=False), wanted)


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda cls: cls.__qualname__)
def test_two_streams_at_once(cls):
    """Two optimizers, each on its stream, in turns."""
    shapes = ((2048, 1024), (77,))

    def make(stream):
        with torch.cuda.stream(stream):
            params = parameters("cuda", shapes)
            return stream, params, cls(params, max_grad_norm=1.0)

    def step(stream, params, optimizer, number):
        with torch.cuda.stream(stream):
            set_grads(params, number)
            optimizer.step()

    wanted = make(torch.cuda.default_stream())
    for number in range(4):
        step(*wanted, number)
    torch.cuda.synchronize()
    pair = [make(torch.cuda.Stream()) for _ in range(2)]
    for number in range(4):
        for one in pair:
            step(*one, number)
    torch.cuda.synchronize()
    for _, params, _ in pair:
        assert_same_bits(params, wanted[1])
