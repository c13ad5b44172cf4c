"""The step on the host: the same bits as on the device, whatever the slots, the engine and the
thread, with everything that a loop does."""

import copy
import gc
import os
import subprocess
import sys
import threading
from functools import partial

import headroom
import pytest
import torch
from headroom.amp import GradScaler
from headroom.host import HostArena, HostMemoryError, cutting
from headroom.host.arena import in_arena
from headroom.host.ring import aligned
from headroom.optim import Adafactor, AdamW, AdamW8bit, Muon, offload
from headroom.param_states.paging import Hosting, Paging, pipeline
from torch import nn

from helpers import alike, modes
from helpers.alike import assert_same_run, pair
from helpers.bits import assert_same_bits
from helpers.copies import (
    POLICIES,
    Failing,
    adversary,
    copying_with,
    hosted_step,
    stepping_on,
)
from helpers.layouts import LAYOUTS
from helpers.modes import EVERY, entries
from helpers.roundtrip import through_file, through_pickle

STEPPED = {n: m for n, m in EVERY.items() if not n.startswith(("adafactor", "muon"))}
HOST = ["eager", "late", "random"]


@pytest.fixture(autouse=True)
def small_cuts(monkeypatch):
    """Cuts parameters of a test into several parts."""
    monkeypatch.setattr(cutting, "CUT", 512)


def small(model, **options):
    options = {"lr": 1e-2, "min_8bit_size": 64, "master": "remainder16"} | options
    return AdamW8bit(model.parameters(), **options)


# ---- the same bits ------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [None, 512, 4000])
@pytest.mark.parametrize("name", STEPPED)
def test_a_step_on_the_host_has_the_bits_of_the_ordinary_one(name, bucket_bytes):
    ordinary, other = pair(name)
    hosting = hosted_step(other[1], bucket_bytes=bucket_bytes)
    for run in (ordinary, other):
        modes.train(*run, range(7))
    assert_same_run(ordinary, other)
    memory = hosting.memory(other[1])
    assert sum(memory) == hosting.arena.bytes
    assert all(in_arena(x) for entry in entries(other[1]) for x in entry.values() if x.numel())
    hosting.release(other[1])
    other[1]._paging = None
    assert not any(in_arena(x) for entry in entries(other[1]) for x in entry.values())
    for run in (ordinary, other):
        modes.train(*run, range(7, 9))
    assert_same_run(ordinary, other)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "name, thread",
    [("adamw-f32", "eager"), ("adamw8bit-remainder16", "late"), ("lion-kahan", "random")],
)
def test_copies_and_steps_may_run_at_any_time_that_their_tickets_allow(name, policy, thread):
    ordinary, other = pair(name)
    with copying_with(adversary(policy)) as engine, stepping_on(thread):
        hosted_step(other[1])
        for run in (ordinary, other):
            modes.train(*run, range(5))
        other[1].offload_handle.wait()
        assert_same_run(ordinary, other)
        weights = sum(p.nbytes for p in other[0].parameters())
        assert engine.bytes_up == 5 * weights
        assert 0 <= engine.bytes_down - 5 * weights < 2000  # flags of weights
        del other


# ---- everything that a loop does ----------------------------------------------------------------


def assert_train_alike(make, loop, **options):
    return alike.assert_train_alike(make, loop, partial(hosted_step, **options))


def test_groups_schedulers_and_tensor_rates():
    assert_train_alike(alike.in_groups, alike.scheduled)


@pytest.mark.parametrize("place", range(6))
def test_clipping_and_skipped_steps(place):
    def spoil(model):
        sized = [param for param in model.parameters() if param.numel()]
        sized[place].grad.view(-1)[0] = torch.nan

    assert_train_alike(lambda model: small(model, max_grad_norm=0.1), alike.clipped(spoil))


@pytest.mark.parametrize("kind", [GradScaler, torch.amp.GradScaler])
def test_a_scaler_and_its_overflow(kind):
    assert_train_alike(small, alike.scaled(kind))


@pytest.mark.parametrize("thread", HOST)
@pytest.mark.parametrize("clip", [None, "previous", "two-pass"])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip_step"])
def test_released_gradients(clip, nonfinite, thread):
    limit = None if clip is None else 0.1
    with stepping_on(thread):
        assert_train_alike(
            lambda model: small(model, max_grad_norm=limit, nonfinite=nonfinite),
            alike.released(clip, 2000),
        )


def released(make, clip, steps, on_host=True, scaled=None, bad=None, after=lambda: None):
    """Trains with released gradients, clipped in two passes or on the host."""
    model = modes.build(torch.bfloat16)
    optimizer = make(model)
    if on_host:
        hosted_step(optimizer)
    scaler = None if scaled is None else scaled("cpu", init_scale=2.0**10)
    handle = headroom.release_gradients(
        model, optimizer, clip=clip, scaler=scaler, bucket_bytes=2000
    )
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for is_measured in (True, False) if clip == "two-pass" else (False,):
            with handle.measure() if is_measured else torch.enable_grad():
                loss = modes.loss_of(model, modes.batch(step))
                if bad is not None and step == 2:  # only this parameter's gradient is infinite
                    sized = [param for param in model.parameters() if param.numel()]
                    loss = loss + sized[bad].flatten()[0] * float("inf")
                loss = loss if scaler is None else scaler.scale(loss)
                loss.backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        after()
        norms.append(optimizer.grad_norm.item())
    if on_host:
        hosting = optimizer._paging
        held = hosting.memory(optimizer)
        assert hosting.arena.bytes == sum(held)
        handle.remove()  # gives the places back where gradients wait
        places = sum(aligned(param.nbytes) for param in model.parameters())
        assert hosting.memory(optimizer) == held._replace(gradients=held.gradients - places)
        gc.collect()
        assert hosting.arena.bytes == sum(held) - places
    handle.remove()
    return (model, optimizer), [norm for norm in norms if norm == norm]


@pytest.mark.parametrize("limit, thread", [(0.1, "random"), (17.0, "late"), (1e9, "late")])
@pytest.mark.parametrize("policy", POLICIES)
def test_clipping_beside_the_backward_pass_is_exact(policy, limit, thread):
    """Where some steps, all, or none are clipped."""
    make = lambda model: small(model, max_grad_norm=limit)  # noqa: E731
    wanted, norms = released(make, "two-pass", 5, on_host=False)
    with copying_with(adversary(policy)) as engine, stepping_on(thread):
        found, other = released(make, None, 5, after=engine.finish_compute)
        assert other == norms
        assert_same_run(wanted, found)
        found[1].offload_handle.wait()
        del found


@pytest.mark.parametrize("scaled", [None, GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("bad", range(6))
def test_an_overflow_beside_the_backward_pass_skips_all(bad, scaled):
    """In the first, a middle or the last bucket: each byte stays."""
    make = lambda model: small(model, max_grad_norm=5.0)  # noqa: E731
    wanted, norms = released(make, "two-pass", 4, on_host=False, scaled=scaled, bad=bad)
    found, other = released(make, None, 4, scaled=scaled, bad=bad)
    if scaled is None:
        assert other == norms
    assert_same_run(wanted, found)


@pytest.mark.parametrize("scaled", [GradScaler, torch.amp.GradScaler])
def test_a_scaler_alone(scaled):
    wanted, _ = released(small, None, 4, on_host=False, scaled=scaled)
    found, _ = released(small, None, 4, scaled=scaled)
    assert_same_run(wanted, found)


def test_released_gradients_with_an_accumulator():
    assert_train_alike(small, alike.accumulated)


def test_gradients_are_freed_in_the_backward_pass():
    """Beside a thread: what has left is freed, and a backward pass holds no more than slots do."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12)))
    optimizer = AdamW(model.parameters())
    hosted_step(optimizer, bucket_bytes=64 * 64 * 4)
    handle = headroom.release_gradients(model, optimizer, bucket_bytes=0)
    model(torch.randn(2, 64)).sum().backward()
    assert all(param.grad is None for param in model.parameters())
    assert len(optimizer._paging._pipeline.tasks) <= 1
    optimizer.step()
    handle.remove()


def test_parameters_come_late_freeze_and_stay_without_gradients():
    assert_train_alike(alike.without_mix, alike.with_mix_later)


@pytest.mark.parametrize("is_released", [False, True])
def test_weights_written_from_outside_count(is_released):
    """In every way that leaves a version counter as it was, too."""

    def loop(model, optimizer):
        handle = None
        if is_released:
            handle = headroom.release_gradients(model, optimizer, bucket_bytes=2000)
        before = copy.deepcopy(model.state_dict())
        for step in range(8):
            modes.train(model, optimizer, [step])
            with torch.no_grad():
                if step == 0:
                    model.outer.weight.data.mul_(0.5)
                elif step == 1:
                    model.load_state_dict(before)
                elif step == 2:
                    model.inner.weight.clamp_(-0.01, 0.01)
                elif step == 3:
                    model.mix[0, 0, 0] = 3.0  # one element
                elif step == 4:
                    model.inner.weight.data = model.inner.weight.flip(
                        0
                    )  # the same in another order
                elif step == 5:
                    weight = model.outer.weight.data
                    weight[0], weight[1] = weight[1].clone(), weight[0].clone()
                elif step == 6:
                    optimizer.state[model.mix]["exp_avg"].fill_(3)
        if handle is not None:
            handle.remove()

    assert_train_alike(small, loop)


@pytest.mark.parametrize("waits", [False, True])
def test_weights_that_nobody_wrote_are_not_copied_again(waits):
    model = modes.build(torch.bfloat16)
    optimizer = small(model, max_grad_norm=1e9)
    hosting = hosted_step(optimizer)
    if waits:
        headroom.release_gradients(model, optimizer)
    modes.train(model, optimizer, range(2))
    copied, weights = [], [home.weights for home in hosting._homes.values()]
    original = torch.Tensor.copy_

    def noted(self, source, *args):
        if any(self is one for one in weights):
            copied.append(self)
        return original(self, source, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", noted)
        modes.train(model, optimizer, [2])
        assert not copied
        with torch.no_grad():
            model.mix.mul_(2)
        modes.train(model, optimizer, [3])
    assert len(copied) == 1 and copied[0].shape == model.mix.shape


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_and_gradients_of_any_strides(layout):
    start = LAYOUTS[layout](torch.randn(6, 8, 8, 8))
    params = [nn.Parameter(LAYOUTS[layout](start)) for _ in range(2)]
    optimizers = [AdamW([param], lr=0.1, max_grad_norm=1.0) for param in params]
    hosted_step(optimizers[1], bucket_bytes=512)
    for _ in range(3):
        grad = torch.randn(6, 8, 8, 8)
        for param, optimizer in zip(params, optimizers):
            param.grad = grad.clone()
            try:
                optimizer.step()
            except ValueError as error:
                assert optimizer is optimizers[1] and "has gaps in memory" in str(error)
                assert not params[1].is_contiguous()
                return
    assert_same_bits([params[0]], [params[1]])


def test_stalled_weights_are_counted_once():
    counts = []
    for clip, on_host in (("two-pass", False), (None, True)):
        make = lambda model: small(  # noqa: E731
            model, max_grad_norm=0.1, master=None, lr=1e-4, count_stalled=True
        )
        (_, optimizer), _ = released(make, clip, 3, on_host=on_host)
        counts.append(optimizer.stalled_fraction())
    assert counts[0] == counts[1] > 0


# ---- saving and loading -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw-f32", "adamw8bit-remainder16", "adam-amsgrad-f16-moments"])
@pytest.mark.parametrize(
    "kinds", [(None, Hosting), (Hosting, None), (Hosting, Hosting), (Paging, Hosting)]
)
def test_states_load_in_every_direction(name, kinds):
    (source, one), (target, other) = pair(name)
    for kind, optimizer in zip(kinds, (one, other)):
        if kind is Hosting:
            hosted_step(optimizer)
        elif kind is Paging:
            offload(optimizer, bucket_bytes=6000)
    modes.train(target, other, [9])
    modes.train(source, one, range(2))
    saved = through_file(one.state_dict())
    assert not any(
        in_arena(x) for entry in one.state_dict()["state"].values() for x in entry.values()
    )
    target.load_state_dict(source.state_dict())
    other.load_state_dict(saved)
    for run in ((source, one), (target, other)):
        modes.train(*run, range(2, 4))
    assert_same_run((source, one), (target, other))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
def test_copies_are_stepped_on_the_host_and_apart(duplicate):
    ordinary, other = pair("adamw8bit-remainder16")
    hosted_step(other[1])
    for run in (ordinary, other):
        modes.train(*run, range(2))
    twin = duplicate(other)
    assert type(twin[1]._paging) is Hosting and twin[1]._paging is not other[1]._paging
    for run in (ordinary, twin):
        modes.train(*run, range(2, 4))
    assert_same_run(ordinary, twin)
    modes.train(*other, range(2, 4))
    assert_same_run(ordinary, other)


def test_two_optimizers_in_one_arena():
    arena, runs = HostArena(), []
    for hosts in (False, True):
        model = modes.build(torch.bfloat16)
        params = list(model.parameters())
        optimizers = [AdamW(params[:4], lr=1e-2), AdamW8bit(params[4:], min_8bit_size=64)]
        for optimizer in optimizers if hosts else ():
            hosted_step(optimizer, arena=arena)
        for step in range(3):
            modes.loss_of(model, modes.batch(step)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        runs.append(model)
    assert_same_bits(runs[0].parameters(), runs[1].parameters())
    held = arena.bytes
    first = optimizers[0]._paging.memory(optimizers[0])
    optimizers[0]._paging.release(optimizers[0])
    gc.collect()
    assert arena.bytes == held - sum(first)


# ---- failures -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "error, limit",
    [
        (RuntimeError, None),
        pytest.param(KeyboardInterrupt, 0.1, marks=pytest.mark.slow),
        pytest.param(RuntimeError, 1e9, marks=pytest.mark.slow),
    ],
)
def test_a_failure_at_every_call_of_the_engine(error, limit):
    """Each parameter is stepped with its state, or neither is, with released gradients that are
    clipped, or could be, too; and the next step works."""
    is_released = limit is not None

    def begun(engine=None):
        model = modes.build(torch.bfloat16)
        optimizer = small(model, max_grad_norm=limit)
        hosted_step(optimizer, bucket_bytes=5000)
        modes.train(model, optimizer, range(2))
        handle = None
        if is_released:
            handle = headroom.release_gradients(model, optimizer, bucket_bytes=2000)
        return model, optimizer, handle

    def found(model, optimizer):
        return [
            [p.detach().clone(), *(v.clone() for v in e.values())]
            for p, e in zip(optimizer.param_groups[0]["params"], entries(optimizer))
        ]

    def step(model, optimizer, number):
        optimizer.zero_grad()
        modes.loss_of(model, modes.batch(number)).backward()
        optimizer.step()

    model, optimizer, handle = begun()
    before = found(model, optimizer)
    step(model, optimizer, 2)
    after = found(model, optimizer)
    k = 0
    while True:
        k += 1
        model, optimizer, handle = begun()
        with copying_with(Failing(k, lambda: error("failed"))), stepping_on("late"):
            optimizer._paging._pipeline.executor = None
            try:
                step(model, optimizer, 2)
            except error:
                pass
            else:
                break
        now = found(model, optimizer)
        for one, was, will in zip(now, before, after):
            assert any(all(map(torch.equal, one, other)) for other in (was, will)), k
        if handle is not None:
            handle.remove()
        modes.train(model, optimizer, [3])
        del model, optimizer, handle
        gc.collect()
    assert k > 10


def test_an_error_on_the_thread_surfaces_and_names_the_parameter(monkeypatch):
    model = modes.build(torch.bfloat16)
    optimizer = small(model)
    hosted_step(optimizer)
    modes.train(model, optimizer, range(2))
    calls_on = optimizer._calls_on

    def broken():
        raise RuntimeError("params[0] is broken")

    optimizer._calls_on = lambda *args: [(bucket, broken) for bucket, _ in calls_on(*args)]
    with pytest.raises(RuntimeError, match=r"params\[0\] is broken; index 0 is parameter") as info:
        modes.train(model, optimizer, [2])
    assert "broken" in [entry.name for entry in info.traceback]
    del optimizer._calls_on
    modes.train(model, optimizer, [2])
    ordinary = modes.build(torch.bfloat16)
    plain = small(ordinary)
    modes.train(ordinary, plain, range(3))
    assert_same_run((ordinary, plain), (model, optimizer))


def test_a_host_without_room_changes_nothing():
    model = modes.build(torch.bfloat16)
    optimizer = small(model)
    hosted_step(optimizer, arena=HostArena(1000))
    weights = [param.detach().clone() for param in model.parameters()]
    modes.loss_of(model, modes.batch(0)).backward()
    with pytest.raises(HostMemoryError, match="asked for .* of AdamW8bit"):
        optimizer.step()
    assert_same_bits(weights, model.parameters())
    optimizer._paging.arena.budget = None
    optimizer.step()


def test_a_backward_pass_that_ends_early_can_be_abandoned():
    """As long as its gradients wait."""
    runs = []
    for fails in (False, True):
        model = modes.build(torch.bfloat16)
        optimizer = small(model, max_grad_norm=0.1)
        hosted_step(optimizer)
        handle = headroom.release_gradients(model, optimizer, bucket_bytes=0)
        for step in range(3):
            if fails and step == 1:
                hook = model.norm.weight.register_hook(lambda grad: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    modes.loss_of(model, modes.batch(7)).backward()
                hook.remove()
                assert not handle.has_stepped
                handle.abandon()
            modes.loss_of(model, modes.batch(step)).backward()
            optimizer.step()
        runs.append((model, optimizer))
    assert_same_run(*runs)


def test_an_optimizer_its_memory_and_its_thread_are_freed():
    before = threading.active_count()
    arena = HostArena()
    model = modes.build(torch.bfloat16)
    optimizer = small(model)
    hosted_step(optimizer, arena=arena)
    modes.train(model, optimizer, range(2))
    assert arena.bytes > 0 and threading.active_count() == before + 1
    thread = next(t for t in threading.enumerate() if t.name.startswith("headroom-step"))
    del optimizer
    gc.collect()
    thread.join(5)
    assert arena.bytes == 0 and not thread.is_alive()


# ---- threads, bytes, and what is refused ---------------------------------------------------------


@pytest.mark.parametrize(
    "quota, wanted",
    [("max 100000", 64), ("150000 100000", 1), ("50000 100000", 1), ("350000 100000", 3)],
)
def test_threads_are_within_the_affinity_and_the_quota(quota, wanted, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline.os, "sched_getaffinity", lambda pid: set(range(64)))
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (tmp_path / "sys/fs/cgroup/job").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/job/cpu.max").write_text(quota)
    assert pipeline.threads_allowed(tmp_path) == wanted


@pytest.mark.parametrize("allowed, wanted", [(1, [1, 1]), (3, [3, 2]), (64, [4, 2])])
def test_steps_use_the_threads_of_torch_that_are_allowed(allowed, wanted, monkeypatch):
    """Also where torch has got fewer since."""
    monkeypatch.setattr(pipeline, "threads_allowed", lambda: allowed)
    model = modes.build(torch.bfloat16)
    optimizer = small(model)
    hosted_step(optimizer)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (4, 2):
            torch.set_num_threads(threads)
            modes.train(model, optimizer, [0])
            found.append(
                optimizer._paging._pipeline.executor.submit(torch.get_num_threads).result()
            )
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert found == wanted


def test_the_bytes_of_each_parameter():
    """6.03 with 8-bit moments, remainders and a copy of the weights, in exact sums, and 2 more for
    gradients that wait."""
    for limit in (None, 1.0):
        model = nn.Linear(1024, 1024, bias=False).bfloat16()
        optimizer = AdamW8bit(model.parameters(), master="remainder16", max_grad_norm=limit)
        hosting = hosted_step(optimizer, bucket_bytes=4096)
        handle = headroom.release_gradients(model, optimizer)
        model(torch.ones(1, 1024).bfloat16()).sum().backward()
        optimizer.step()
        memory = hosting.memory(optimizer)
        assert memory.host / model.weight.numel() == pytest.approx(6.03, rel=0.01)
        waiting = 0 if limit is None else 2
        assert memory.gradients / model.weight.numel() == pytest.approx(waiting, abs=0.02)
        assert hosting.arena.bytes == sum(memory)
        handle.remove()


def test_gradients_of_more_bits_than_weights_wait_too():
    """Also where they had fewer in the step before."""
    runs = []
    for clip in ("two-pass", None):
        torch.manual_seed(0)
        model = nn.Linear(64, 64, bias=False).bfloat16()
        optimizer = small(model, max_grad_norm=0.1)
        if clip is None:
            hosted_step(optimizer)
        handle = headroom.release_gradients(model, optimizer, clip=clip)
        for step in range(4):
            model.weight.grad_dtype = torch.bfloat16 if step == 1 else torch.float32
            for measures in (True, False) if clip else (False,):
                with handle.measure() if measures else torch.enable_grad():
                    model(torch.ones(2, 64).bfloat16() + step).float().square().mean().backward()
            optimizer.step()
        handle.remove()
        runs.append((model, optimizer))
    assert_same_run(*runs)


END = """
import threading
import headroom, torch
from helpers.copies import hosted_step

model = torch.nn.Linear(64, 64, bias=False)
optimizer = headroom.optim.AdamW(model.parameters())
hosting = hosted_step(optimizer, bucket_bytes=1 << 16)
handle = headroom.release_gradients(model, optimizer)
for step in range(2):
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
begun, go_on = threading.Event(), threading.Event()
hosting._pipeline.executor.submit(lambda: (begun.set(), go_on.wait(5)))
model(torch.ones(1, 64)).sum().backward()
begun.wait()
assert hosting._pipeline.tasks
threading.Timer(0.2, go_on.set).start()
print("ends")
"""


@pytest.mark.slow
def test_a_process_ends_with_a_step_on_its_way():
    """Which is made, or not, but nothing waits for a thread that is not there any more."""
    command = [sys.executable, "-c", END]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ends\n", "")


def test_on_the_cpu_the_step_is_there_already():
    model = nn.Linear(64, 64)
    optimizer = AdamW(model.parameters(), offload="step")
    assert type(optimizer._paging) is Paging
    handle = offload(AdamW8bit(nn.Linear(64, 64).parameters()), what="step")
    assert type(handle._paging) is Paging
    on_meta = AdamW(nn.Linear(4, 4, device="meta").parameters(), offload="step")
    assert type(on_meta._paging) is Hosting and not on_meta.offload_handle.reduce_memory()


def test_a_scaler_that_skips_and_a_release_that_ends():
    """Gradients that wait are forgotten."""
    model = modes.build(torch.bfloat16)
    optimizer = small(model)
    hosting = hosted_step(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    modes.train(model, optimizer, [0])
    before = copy.deepcopy(optimizer.state_dict()["state"])
    handle = headroom.release_gradients(model, optimizer, scaler=scaler)
    scaler.scale(modes.loss_of(model, modes.batch(1)) * float("inf")).backward()
    scaler.step(optimizer)
    handle.remove()
    assert not hosting._pipeline.waiting and not hosting._pipeline.tasks
    for key, entry in optimizer.state_dict()["state"].items():
        assert_same_bits(entry.values(), before[key].values())


def test_what_is_refused():
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match='offload must be "state", "step" or None, got .steps'):
        AdamW(model.parameters(), offload="steps")
    with pytest.raises(ValueError, match="takes no budget"):
        AdamW(model.parameters(), offload="step", budget="1 MiB")
    with pytest.raises(ValueError, match="Adafactor's state is not offloaded"):
        offload(Adafactor(model.parameters()), what="step")
    with pytest.raises(ValueError, match="products of matrices"):
        Muon(nn.Linear(4, 4, bias=False, device="meta").parameters(), offload="step")
    model = modes.build(torch.bfloat16)
    optimizer = small(model, max_grad_norm=1.0)
    hosting = hosted_step(optimizer)
    handle = headroom.release_gradients(model, optimizer)
    hosting.release(optimizer)
    optimizer._paging = None
    with pytest.raises(RuntimeError, match="is not stepped on the host any more"):
        modes.loss_of(model, modes.batch(0)).backward()
    handle.remove()
