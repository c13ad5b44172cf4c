"""Each wait between copies and steps is needed: without it, a copy engine that does what a device
may do gives other bits, or sees a source that is written while it is copied."""

import copy
import gc

import pytest
import torch
from headroom.host import HostArena, cutting, ring
from headroom.optim import AdamW, offload
from headroom.param_states.paging import paged
from torch import nn

from helpers import modes
from helpers.bits import same_bits
from helpers.copies import POLICIES, adversary, copying_with
from helpers.modes import EVERY
from helpers.rewritten import rewritten

MODE = EVERY["adamw8bit-remainder16"]


@pytest.fixture(autouse=True)
def small_cuts(monkeypatch):
    monkeypatch.setattr(cutting, "CUT", 512)


# ---- what is removed ----------------------------------------------------------------------------


WAITS = {  # the method, what it says, and what it says without the wait
    "a slot is free before it is filled": (
        ring.Run,
        "_fetch",
        "self._ring.busy[piece.slot], ",
        "",
    ),
    "a state is written before it is read again": (
        ring.Run,
        "_fetch",
        ", *(place.written for place in piece.places)",
        "",
    ),
    "a state has arrived before it is stepped": (
        ring.Run,
        "step",
        "self._engine.wait(ticket)",
        "pass",
    ),
    "a state is stepped before it is stored": (
        ring.Piece,
        "store",
        "(computed,)",
        "()",
    ),
    "memory that is lent again is free before a slot in it is filled": (
        ring.Ring,
        "__init__",
        "[engine.mark()]",
        "[None]",
    ),
    "copies that a failed step began have ended before others begin": (
        ring.Run,
        "_abandon",
        "self._engine.sync(ticket)",
        "pass",
    ),
    "a state is stored before a state dict has it": (
        paged.Paging,
        "detached",
        "self.wait()",
        "pass",
    ),
    "a state is stored before the handle says so": (paged.Paging, "wait", "home.wait()", "pass"),
    "a state is stored before another is loaded over it": (
        paged.Paging,
        "_house",
        "before.wait()",
        "pass",
    ),
    "states are stored before the device takes them back": (
        paged,
        "_bring",
        "home.wait()",
        "pass",
    ),
    "states are stored before they are freed": (paged.Paging, "_end", "home.wait()", "pass"),
    "states are stored before a larger ring replaces theirs": (
        paged.Paging,
        "_ring",
        "self.wait()",
        "pass",
    ),
    "a state is stored before its memory is given up": (
        paged.Paging,
        "adopt",
        "self._homes.pop(param).wait()",
        "self._homes.pop(param)",
    ),
}


def remove(monkeypatch, wait):
    owner, name, old, new = WAITS[wait]
    rewritten(monkeypatch, owner, name, old, new)


# ---- what notices -------------------------------------------------------------------------------


def trained(paged_too=True, steps=3, **options):
    model = modes.build(torch.bfloat16)
    optimizer = MODE.make(model.parameters())
    if paged_too:
        offload(optimizer, bucket_bytes=6000, host=HostArena(), **options)
    modes.train(model, optimizer, range(steps))
    return model, optimizer


def contents(model, state):
    return [param.detach().clone() for param in model.parameters()] + values_of(state)


def values_of(state):
    return [value for entry in state.values() for _, value in sorted(entry.items())]


def detached(optimizer):
    return copy.deepcopy(optimizer.state_dict()["state"])


def assert_equal(found, wanted):
    assert len(found) == len(wanted)
    assert all(same_bits(a, b) for a, b in zip(found, wanted))


def steps(engine):
    """Steps, and what the state dict says after them."""
    model, optimizer = trained()
    assert_equal(contents(model, optimizer.state_dict()["state"]), wanted(3))


def reads(engine):
    """Steps, and what the tensors in the arena say once the handle has waited."""
    model, optimizer = trained()
    optimizer.offload_handle.wait()
    state = {key: dict(entry) for key, entry in enumerate(optimizer.state.values())}
    assert_equal(contents(model, state), wanted(3))


def loads(engine):
    """A state that is loaded while that of the last step is on its way to the same memory."""
    other = trained(False, 2)[1].state_dict()
    _, optimizer = trained()
    optimizer.load_state_dict(copy.deepcopy(other))
    found = optimizer.state_dict()["state"]
    assert_equal(values_of(found), values_of(other["state"]))


def comes_back(engine):
    """States that go back to the device after a step."""
    model, optimizer = trained()
    optimizer.offload_handle.remove()
    assert_equal(contents(model, optimizer.state_dict()["state"]), wanted(3))


def moves(engine):
    """A state of which one tensor was replaced, and which moves to another slab."""
    model, optimizer = trained(steps=2)
    param = optimizer.param_groups[0]["params"][0]
    before = optimizer._paging._homes[param]
    entry = optimizer.state[param]
    entry["exp_avg"] = entry["exp_avg"].float()  # another form
    optimizer._entry(param, optimizer.param_groups[0])
    assert before.written is None or before.written.is_done


def is_freed(engine):
    """An optimizer that is dropped right after a step."""
    model, optimizer = trained()
    del model, optimizer
    gc.collect()
    assert not any(engine.queues.values())


def gets_a_larger_ring(engine):
    """A step that needs a larger slot than the one before, whose copies are on their way."""
    model, optimizer = trained()
    before = optimizer._paging._rings[torch.device("cpu")]
    optimizer._paging._slots[torch.device("cpu")] *= 2
    made = []

    def larger(*args):
        made.append(all(ticket.is_done for ticket in before.busy))
        return ring.Ring(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged, "Ring", larger)
        modes.train(model, optimizer, range(3, 4))
    assert made == [True]


def is_left_out(engine):
    """Parameters that the groups lose after a step, and whose memory is given up."""
    _, optimizer = trained()
    tickets = [home.written for home in optimizer._paging._homes.values()]
    optimizer.param_groups[0]["params"].clear()
    optimizer._paging.adopt(optimizer)
    assert not optimizer._paging._homes and all(ticket.is_done for ticket in tickets)


def is_cut(engine):
    """A parameter in five parts: the last, in another slot than the first, counts the step."""
    ordinary, param = (nn.Parameter(torch.randn(5 * 512)) for _ in range(2))
    param.data.copy_(ordinary.data)
    optimizers = [AdamW([one], lr=0.1) for one in (ordinary, param)]
    handle = offload(optimizers[1], bucket_bytes=512 * 8 + 64, host=HostArena())
    for step in range(3):
        for one, optimizer in zip((ordinary, param), optimizers):
            one.grad = torch.full_like(one, step + 0.5)
            optimizer.step()
    handle.wait()
    assert engine.bytes_down == 3 * (5 * 512 * 8 + 8)
    state = optimizers[1].state[param]
    assert_equal([param, *state.values()], [ordinary, *optimizers[0].state[ordinary].values()])


def is_lent_memory(engine):
    """A ring in memory that something computed before still writes to."""
    memory = torch.zeros(3 * 512, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        engine.compute(lambda: memory.fill_(7))
        patch.setattr(ring.torch, "empty", lambda *_, **__: memory)
        slots = ring.Ring(torch.device("cpu"), 512, engine)
    source = torch.arange(512).byte()
    ticket = engine.up(slots.slots[0], source, [t for t in slots.busy[:1] if t is not None])
    engine.sync(ticket)
    engine.finish_compute()
    assert torch.equal(slots.slots[0], source)


def fails(engine):
    """A step that raises while copies for the pieces after it are on their way."""
    model, optimizer = trained(steps=2)
    calls = optimizer._calls_on

    def failing(*args):
        found = calls(*args)
        return [(bucket, broken) for bucket, _ in found[:1]] + found[1:]

    def broken():
        raise RuntimeError("broken")

    optimizer._calls_on = failing
    with pytest.raises(RuntimeError, match="broken"):
        modes.train(model, optimizer, range(2, 3))
    assert not engine.queues["up"]
    del optimizer._calls_on
    modes.train(model, optimizer, range(2, 3))
    assert_equal(contents(model, optimizer.state_dict()["state"]), wanted(3))


SCENARIOS = (
    steps,
    reads,
    loads,
    comes_back,
    moves,
    is_freed,
    gets_a_larger_ring,
    is_left_out,
    is_cut,
    is_lent_memory,
    fails,
)
_wanted = {}


def wanted(steps):
    if steps not in _wanted:
        model, optimizer = trained(False, steps)
        _wanted[steps] = contents(model, detached(optimizer))
    return _wanted[steps]


def run(scenario, policy):
    with copying_with(adversary(policy)) as engine:
        scenario(engine)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_with_all_waits(scenario, policy):
    run(scenario, policy)


def notices(wait):
    """The first scenario and policy that notice that a wait is missing."""
    wanted(3)
    for scenario in SCENARIOS:
        for policy in POLICIES:
            with pytest.MonkeyPatch.context() as patch:
                remove(patch, wait)
                patch.setattr(cutting, "CUT", 512)
                try:
                    run(scenario, policy)
                except (AssertionError, RuntimeError):
                    return scenario.__name__, policy
    return None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("wait", WAITS)
def test_without_one(wait):
    assert notices(wait) is not None
