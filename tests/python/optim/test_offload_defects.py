"""What has gone wrong in other implementations of offload, and the test of each here.

Of thirty known defects one does not concern what Headroom does: a gradient hook that reads what is
still copied to the host, where the hook is torch's.
"""

import ast
import copy
import gc
from pathlib import Path

import headroom
import pytest
import torch
from headroom.host import HostArena, saved
from headroom.host.arena import default_arena
from headroom.host.engines import engine_of
from headroom.host.saved import saved_on_host, trim
from headroom.host.slabs import Slabs
from headroom.optim import AdamW8bit, offload

from helpers import modes
from helpers.bits import assert_same_bits

TESTS = Path(__file__).resolve().parents[1]
ENGINE, ARENA = "host/test_engine.py", "host/test_arena.py"
SAVED, WAITS = "host/test_saved_on_host.py", "optim/test_offload_waits.py"
STEPS, HERE = "optim/test_offload.py", "optim/test_offload_defects.py"
ON_HOST, ON_HOST_WAITS = "optim/test_host_step.py", "optim/test_host_step_waits.py"

DEFECTS = {
    "a side stream waits for itself": (ENGINE, "test_streams_and_events_of_copies"),
    "the stream of the computation is remembered": (
        ENGINE,
        "test_the_stream_of_the_computation_is_asked_for_each_time",
    ),
    "what a copy reads is computed after its wait": (SAVED, "test_each_wait_is_needed"),
    "a copy for the next step passes the last of this": (WAITS, "test_without_one"),
    "memory is freed before it is copied": (SAVED, "test_each_wait_is_needed"),
    "a state is shown before it has arrived": (WAITS, "test_without_one"),
    "a copy up is not waited for": (WAITS, "test_without_one"),
    "a slot is filled while a step reads it": (WAITS, "test_without_one"),
    "sizes are rounded to powers of two": (ARENA, "test_slabs_are_exact_aligned_and_zero"),
    "a smaller block is handed out": (HERE, "test_a_slab_that_is_used_again_has_the_size"),
    "weights are loaded and an old copy written back": (STEPS, "test_writes_between_steps_count"),
    "the count of steps is old after a load": (STEPS, "test_states_load_in_both_directions"),
    "each count of steps is read by the host": (HERE, "test_a_step_reads_nothing_on_the_host"),
    "a gradient of the last step is used again": (
        STEPS,
        "test_parameters_come_late_freeze_and_stay_without_gradients",
    ),
    "an empty parameter breaks": (STEPS, "test_a_paged_step_has_the_bits_of_the_ordinary_one"),
    "a state that is too short is taken": (HERE, "test_a_state_that_is_too_short_changes_nothing"),
    "a scheduler does not reach the groups": (STEPS, "test_groups_schedulers_and_tensor_rates"),
    "clipping is silently off": (STEPS, "test_clipping_and_skipped_steps"),
    "a budget of zero is none": (STEPS, "test_a_budget_below_the_ring_names_both"),
    "an overflow leaves other states": (STEPS, "test_a_scaler_and_its_overflow"),
    "each step makes streams": (
        ENGINE,
        "test_events_are_used_again_and_streams_are_not_made_anew",
    ),
    "hooks allocate": (HERE, "test_nothing_is_taken_after_the_first_step"),
    "storage that is shared is copied twice": (
        SAVED,
        "test_views_of_a_storage_leave_and_come_back_once",
    ),
    "a transpose comes back as its base": (SAVED, "test_strides_and_offsets_come_back"),
    "memory stays held after the context": (SAVED, "test_a_forward_that_raises_leaves_nothing"),
    "threads have no processors": (
        ON_HOST,
        "test_threads_are_within_the_affinity_and_the_quota",
    ),
    "an old copy of weights is stepped": (ON_HOST, "test_weights_written_from_outside_count"),
    "a step that overflows leaves other bits": (
        ON_HOST,
        "test_an_overflow_beside_the_backward_pass_skips_all",
    ),
    "released gradients are not clipped, or by another norm": (
        ON_HOST,
        "test_clipping_beside_the_backward_pass_is_exact",
    ),
    "weights that go up are not waited for": (ON_HOST_WAITS, "test_without_one"),
    "the limit of a cgroup is not known": (ARENA, "test_what_the_system_has_left"),
    "a system registers less than is asked for": (
        ARENA,
        "test_slabs_are_registered_once_and_unregistered",
    ),
    "memory is registered after it was copied": (
        ARENA,
        "test_slabs_are_registered_once_and_unregistered",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_each_has_a_test(defect):
    path, name = DEFECTS[defect]
    tree = ast.parse((TESTS / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def paged(**options):
    model = modes.build(torch.bfloat16)
    optimizer = AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=64)
    offload(optimizer, bucket_bytes=6000, host=HostArena(), **options)
    modes.train(model, optimizer, range(2))
    return model, optimizer


def test_a_slab_that_is_used_again_has_the_size():
    slabs, device = Slabs(saved._taken, engine_of), torch.device("cpu")
    sizes = [4096, 1000, 1001, 512, 4095]
    for size in sizes:
        slabs.give(slabs.take(size, device), device)
    for size in reversed(sizes):
        assert slabs.take(size, device).numel() == size


def test_a_step_reads_nothing_on_the_host(monkeypatch):
    model, optimizer = paged()
    modes.loss_of(model, modes.batch(3)).backward()

    def refused(*_):
        raise AssertionError("the host waits for the device")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, refused)
    optimizer.step()


def test_a_state_that_is_too_short_changes_nothing():
    model, optimizer = paged()
    before = copy.deepcopy(optimizer.state_dict())
    short = copy.deepcopy(before)
    short["param_groups"][0]["params"].pop()
    few = copy.deepcopy(before)
    few["state"][0] = {name: value[:1] for name, value in few["state"][0].items() if value.dim()}
    for bad in (short, few):
        with pytest.raises(ValueError):
            optimizer.load_state_dict(bad)
        after = optimizer.state_dict()
        for key, entry in before["state"].items():
            assert_same_bits(entry.values(), after["state"][key].values())
    modes.train(model, optimizer, range(2, 3))


@pytest.mark.parametrize("released", [False, True])
def test_nothing_is_taken_after_the_first_step(released, monkeypatch):
    """Neither of the system nor of the device: a ring, slabs and events are there."""
    monkeypatch.setattr(saved, "MIN_BYTES", 64)
    model, optimizer = paged()
    handle = headroom.release_gradients(model, optimizer) if released else None

    def step(number):
        with saved_on_host():
            loss = modes.loss_of(model, modes.batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(2)
    rings = [memory.data_ptr() for memory in optimizer._paging.rings]
    with monkeypatch.context() as patch:
        patch.setattr(HostArena, "take", lambda *_, **__: pytest.fail("a slab was taken"))
        for number in range(3, 5):
            step(number)
    assert rings == [memory.data_ptr() for memory in optimizer._paging.rings]
    if handle is not None:
        handle.remove()
    gc.collect()
    trim()
    assert not any(kind == "activations" for kind, _ in default_arena().memory())
