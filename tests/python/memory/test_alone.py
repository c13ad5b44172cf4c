"""A block that is run by itself: its bytes by hand, and what it leaves as it was."""

import pytest
import torch
from headroom.memory.alone import Alone, Bytes
from headroom.step import clock
from headroom.step.calls import Call
from torch import nn

from helpers.frozen import are_frozen

ROWS, IN, OUT = 7, 24, 40
X, Y, W = 4 * ROWS * IN, 4 * ROWS * OUT, 4 * IN * OUT
CPU = torch.device("cpu")


def alone(block, *args, used=(0,), **kwargs):
    return Alone(block, Call(args, kwargs, CPU), CPU, used)


def x(rows=ROWS):
    return torch.randn(rows, IN, requires_grad=True)


class Two(nn.Module):
    """Two matrices: the second one's gradient arrives first."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(IN, OUT, False), nn.Linear(OUT, IN, False)

    def forward(self, x, cache=None):
        y = self.first(x)
        if cache is not None:
            cache.kept = y.detach().clone()
        return self.second(y), y.detach()


def bytes_of(*given, **options):
    for _ in range(2):  # the first run of a process allocates more
        found, seconds = alone(*given, **options).bytes()
    assert seconds.forward > 0 and seconds.backward >= 0
    return found


def test_the_bytes_of_a_matrix():
    found = bytes_of(nn.Linear(IN, OUT, False), x())
    assert are_frozen(found, alone(nn.Linear(IN, OUT, False), x()))
    # Backward: the gradient of the result, which is freed by then, beside those of weight and
    # input, and the loss and its gradient.
    assert found == Bytes(Y, 0, Y, W + X + 8, W + X + 8, W, W)


def test_the_bytes_of_two_matrices():
    found = bytes_of(Two(), x())
    assert (found.held, found.kept, found.forward) == (X + Y, 0, X + Y)
    assert (found.gradients, found.largest) == (2 * W, W)
    # At the end both weights have gradients, and those of y and x take the place of what was held;
    # released, the most is when the second's gradient is there beside y and its gradient.
    assert (found.backward, found.released) == (2 * W + 8, W + Y + 8)


class Cache:
    pass


def test_what_a_cache_keeps_stays_until_the_forward_pass_has_ended():
    found = bytes_of(Two(), x(), cache=Cache())
    assert (found.held, found.kept, found.forward) == (X + Y, Y, X + 2 * Y)


def test_without_gradients_nothing_is_held():
    block = Two().requires_grad_(False)
    given = torch.randn(ROWS, IN)
    found = bytes_of(block, given, used=())
    assert found == Bytes(0, 0, X + Y, 0, 0, 0, 0)


@pytest.mark.parametrize("way", ["bytes", "seconds"])
def test_everything_is_as_before(way):
    block, given = Two(), x()
    seen = []

    def look(module, args, kwargs):
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    handle = block.register_forward_pre_hook(look, with_kwargs=True)
    with torch.autocast("cpu", torch.bfloat16):
        run = alone(block, given)
    getattr(run, way)()
    assert seen == [(True, True)]
    assert given.grad is None and all(p.grad is None for p in block.parameters())
    assert not any(p._post_accumulate_grad_hooks for p in block.parameters())
    handle.remove()
    block.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        getattr(alone(block, given), way)()
    assert not torch._C._autograd._profiler_enabled()
    assert not any(p._post_accumulate_grad_hooks for p in block.parameters())


def test_seconds_by_a_clock_that_a_block_moves(monkeypatch):
    now = [5.0]
    monkeypatch.setattr(clock, "now", lambda: now[0])

    class Slow(nn.Linear):
        def forward(self, x):
            now[0] += 3
            y = super().forward(x)
            y.register_hook(lambda grad: now.__setitem__(0, now[0] + 20))
            return y

    run = alone(Slow(IN, OUT), x())
    assert run.seconds() == (3, 20) and run.bytes()[1] == (3, 20)
