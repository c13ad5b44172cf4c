"""States on the host: the same bits as without, whatever the budget, the slots and the engine."""

import copy

import headroom
import pytest
import torch
from headroom.host import HostArena, HostMemoryError
from headroom.optim import AdamW, AdamW8bit, offload
from headroom.optim.paging import ring
from torch import nn

from helpers import modes
from helpers.bits import assert_same_bits
from helpers.copies import POLICIES, adversary, copying_with
from helpers.modes import EVERY, entries
from helpers.roundtrip import through_pickle

PAGED = {name: mode for name, mode in EVERY.items() if not name.startswith("adafactor")}


@pytest.fixture(autouse=True)
def small_cuts(monkeypatch):
    """Cuts parameters of a test into several parts."""
    monkeypatch.setattr(ring, "CUT", 512)


def assert_same_run(left, right):
    assert_same_bits(left[0].parameters(), right[0].parameters())
    assert_same_states(left[1], right[1])


def assert_same_states(left, right):
    for one, other in zip(entries(left), entries(right)):
        assert one.keys() == other.keys()
        assert_same_bits(one.values(), [other[key] for key in one])


def pair(name, dtype=torch.bfloat16, **options):
    built = [modes.build(dtype) for _ in range(2)]
    return [(model, EVERY[name].make(model.parameters(), **options)) for model in built]


# ---- the same bits ------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [None, 512, 20_000])
@pytest.mark.parametrize("name", PAGED)
def test_a_paged_step_has_the_bits_of_the_ordinary_one(name, bucket_bytes):
    ordinary, paged = pair(name)
    handle = offload(paged[1], bucket_bytes=bucket_bytes, host=HostArena())
    for model, optimizer in (ordinary, paged):
        modes.train(model, optimizer, range(4))
    assert_same_run(ordinary, paged)
    memory = handle.memory()
    assert memory.resident == 0 and memory.host == handle.host.bytes
    handle.remove()
    assert_same_run(ordinary, paged)
    for model, optimizer in (ordinary, paged):
        modes.train(model, optimizer, range(4, 6))
    assert_same_run(ordinary, paged)
    assert optimizer.paging is None and handle.__repr__() == "OffloadHandle(removed)"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "name", ["adamw-f32", "adamw8bit-remainder16", "adamw8bit-stochastic-both"]
)
def test_copies_may_run_at_any_time_that_their_tickets_allow(name, policy):
    ordinary, paged = pair(name)
    with copying_with(adversary(policy)) as engine:
        offload(paged[1], bucket_bytes=6000, host=HostArena())
        for model, optimizer in (ordinary, paged):
            modes.train(model, optimizer, range(4))
        state = paged[1].state_dict()["state"]
        assert_same_bits(ordinary[0].parameters(), paged[0].parameters())
        for key, entry in ordinary[1].state_dict()["state"].items():
            assert_same_bits(entry.values(), [state[key][name] for name in entry])
        assert engine.pending == 0 or policy != "eager"
        assert engine.bytes_up >= engine.bytes_down > 0
