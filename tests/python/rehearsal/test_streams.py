"""What moves between host and device beside the computation, each technique alone and with each
other one: a training has the results of one on the CPU without any, the very bits of one on the
device without any, and the host holds what is planned.

The device is slow, since it is late; in every other case, drawn by a seed, the host is slow.
"""

import contextlib
import functools
import gc
import itertools
import random

import headroom
import pytest
import torch
from headroom.host import default_arena, saved, trim
from headroom.host.arena import in_arena
from torch import is_tensor

from helpers.dropping import transformer
from helpers.slow_host import slow_host

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("runtime")]
STEPS, PARTS = 3, 2

# The options of a training, as headroom.plan calls them.
TECHNIQUES = {
    "states": {"offload": "state"},
    "steps": {"offload": "step"},
    "saved": {"save": "L0@host"},
    "late": {"save": "L2@host"},
    "weights": {"weights": "host"},
    "prefetch": {"prefetch": True},
    "release": {"release": True},
    "sums": {"accumulation": PARTS, "accumulator": True},
}
PAIRS = [(name, None) for name in TECHNIQUES] + [
    (one, other)
    for one, other in itertools.combinations(TECHNIQUES, 2)
    if not TECHNIQUES[one].keys() & TECHNIQUES[other].keys()
]
random.Random(48).shuffle(PAIRS)


def batches():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(50, (STEPS, 2 * PARTS, 16), generator=generator)


def loss_of(model, ids):
    return model(ids).square().mean()


def made(device, save="L0", weights=None, offload=None):
    """Returns a model and its optimizer."""
    model = transformer(save).to(device)
    if weights is not None:
        headroom.patch(model, weights=weights)
    return model, headroom.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, offload=offload)


def trained(model, optimizer, host=True, prefetch=False, release=False, accumulation=1,
            accumulator=False):  # fmt: skip
    """Returns the losses of a few steps, the optimizer's states and the weights."""
    device = model.head.weight.device
    sums = headroom.GradAccumulator(model, host=host) if accumulator else None
    if release:
        headroom.release_gradients(model, optimizer, accumulator=sums)
    parts = [part for step in batches() for part in step.chunk(accumulation)]
    parts = headroom.data.DevicePrefetcher(parts, device) if prefetch else parts
    losses = []
    for number, ids in enumerate(parts, 1):
        with sums.micro_batch() if accumulator else contextlib.nullcontext():
            loss = loss_of(model, ids.to(device))
            loss.backward()
        losses.append(loss.detach())
        if number % accumulation == 0:
            if accumulator:
                sums.finish()
            optimizer.step()
            optimizer.zero_grad()
    states = sorted(optimizer.state_dict()["state"].items())
    states = [v for _, state in states for v in state.values() if is_tensor(v)]
    losses = torch.stack(losses).unflatten(0, (STEPS, -1)).mean(1)
    return [t.detach().cpu().clone() for t in [losses, *states, *model.parameters()]]


@functools.cache
def without(device, accumulator=False):
    options = {"accumulation": PARTS, "accumulator": True, "host": False} if accumulator else {}
    return trained(*made(device), **options)


@pytest.fixture
def arena(runtime):
    gc.collect()
    torch.cuda.synchronize()
    trim()
    default_arena().reset_peak()
    return default_arena()


def on_host_beside(optimizer):
    """Returns the bytes of states on the host that no arena has: of weights that are there."""
    states = [v for s in optimizer.state.values() for v in s.values() if is_tensor(v)]
    return sum(v.nbytes for v in states if v.device.type == "cpu" and not in_arena(v))


@pytest.mark.parametrize("one, other", PAIRS)
def test_a_training_is_the_one_without(one, other, arena, monkeypatch, unordered):
    monkeypatch.setattr(saved, "MIN_BYTES", 1024)
    if PAIRS.index((one, other)) % 2:
        slow_host(monkeypatch)
    names, before = {one, other}, arena.bytes
    options = TECHNIQUES[one] | TECHNIQUES.get(other, {})
    making = {k: options.pop(k) for k in ("save", "weights", "offload") if k in options}
    model, optimizer = made("cuda", **making)
    is_planned = "sums" not in names and bool(making)  # a plan has sums on the device
    if is_planned:
        plan = headroom.plan(model, optimizer, batches()[0].cuda(), forward=loss_of, **options)
    found = trained(model, optimizer, **options)
    assert unordered() == ""
    torch.testing.assert_close(found, without("cpu"))
    for there, wanted in zip(found, without("cuda", "sums" in names), strict=True):
        assert torch.equal(there, wanted)
    reached = arena.peak - before + on_host_beside(optimizer)
    assert (reached > 0) == bool(making or "sums" in names)
    if is_planned:
        # Slots for gradients that are on two devices are planned as if they were on one: larger.
        most = 1.02 * reached if names == {"steps", "weights"} else reached
        assert reached <= plan.host_peak_bytes <= most


def test_what_does_not_go_together_is_refused():
    model, optimizer = made("cuda", offload="state")
    with pytest.raises(ValueError, match="is offloaded already: see its offload_handle"):
        headroom.optim.offload(optimizer, "step")
    with pytest.raises(ValueError, match="does not go with states on the host"):
        headroom.release_gradients(model, optimizer, accumulate_into_state=True)
    sums = headroom.GradAccumulator(model, host=True)
    with pytest.raises(ValueError, match="with an accumulator, leave it out"):
        headroom.release_gradients(model, optimizer, accumulator=sums, clip="two-pass")
