"""What a program gets when it imports the library of its loop, and the steps found in it."""

import importlib.util
import sys
from types import SimpleNamespace

import headroom
import pytest
import torch
from headroom.integrations import attaching
from headroom.integrations.attaching import Budget, after_import
from headroom.integrations.watching import WatchedSteps, optimizers_of


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A package of someone else's, which can be imported."""
    (tmp_path / "their_loops").mkdir()
    (tmp_path / "their_loops/__init__.py").write_text("")
    (tmp_path / "their_loops/trainer.py").write_text(
        "class Trainer:\n    def __init__(self, callbacks):\n        self.callbacks = callbacks\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield "their_loops.trainer"
    for name in ("their_loops", "their_loops.trainer"):
        sys.modules.pop(name, None)


def test_a_function_is_called_after_an_import_and_once(library):
    before, seen = list(sys.meta_path), []
    after_import(library, lambda module: seen.append(("first", module.Trainer)))
    after_import(library, lambda module: seen.append(("second", module.Trainer)))
    assert importlib.util.find_spec(library) is not None  # which imports nothing
    assert not seen and library not in sys.modules
    module = importlib.import_module(library)
    assert sorted(name for name, _ in seen) == ["first", "second"]
    assert all(found is module.Trainer for _, found in seen)
    importlib.reload(module)
    assert len(seen) == 2 and sys.meta_path == before
    after_import(library, lambda module: seen.append("third"))
    assert seen[-1] == "third" and sys.meta_path == before


def test_a_module_that_is_not_there_is_not_there(library):
    after_import("their_loops.nowhere", lambda module: pytest.fail("it was imported"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("their_loops.nowhere")


def test_a_budget_refuses_loops_until_there_is_a_trainer(library, monkeypatch):
    """Other optimizers may step beside that of a Trainer, such as in its fit."""
    lightning = pytest.importorskip("lightning")
    del lightning
    from headroom.integrations.lightning import FitCallback

    monkeypatch.setattr(attaching, "LIGHTNING", library)
    monkeypatch.setattr(attaching, "TRAINER", "their_loops.nowhere")
    budget = Budget("1 GiB", ("8bit",), host_budget=7)
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
    try:
        with pytest.raises(RuntimeError, match="SGD steps in a loop that belongs neither to"):
            optimizer.step()
        module = importlib.import_module(library)
        own = FitCallback("2 GiB")
        trainer, other = module.Trainer(callbacks=[0]), module.Trainer(callbacks=[own])
        optimizer.step()
    finally:
        budget._guard.remove()
    made, kept = trainer.callbacks
    assert (made.budget, made.allow, made.host_budget) == ("1 GiB", ("8bit",), 7)
    assert kept == 0 and other.callbacks == [own]
    assert budget.callbacks == [made, own] and budget.is_waiting
    for each in budget.callbacks:
        each.fitted, each.measured = object(), SimpleNamespace(has_ended=True)
    assert not budget.is_waiting


class Recording:
    """A recording that keeps what happens to it."""

    def __init__(self, model, optimizers):
        self.model, self.optimizers, self.seen = model, optimizers, []

    def __enter__(self):
        self.seen.append("enter")

    def __exit__(self, kind, error, trace):
        self.seen.append(kind)

    def step(self):
        self.seen.append("step")


def steps(model, optimizer, count):
    for _ in range(count):
        for _ in range(2):  # batches that are accumulated
            model(torch.ones(3, 4)).sum().backward()
        optimizer.step()


def test_the_model_that_trains_is_found_and_its_steps():
    frozen = torch.nn.Linear(4, 4).requires_grad_(False)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = headroom.optim.AdamW(model.parameters())
    other = torch.optim.SGD(torch.nn.Linear(4, 4).parameters(), lr=1.0)
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    waits = [True]
    watched = WatchedSteps(Recording, lambda: bool(waits))
    try:
        model(torch.ones(3, 4))  # it is too early
        waits.clear()
        frozen(torch.ones(3, 4))
        with torch.no_grad():
            model(torch.ones(3, 4))
        model.eval()(torch.ones(3, 4))
        assert watched.recording is None and hooks
        steps(model.train(), optimizer, 3)
        found = watched.recording
        assert found.model is model and found.optimizers == [optimizer] and not hooks
        assert found.seen == ["enter", "step", "step", "step"]
        other.step()
        assert found.seen == ["enter", "step", "step", "step"]
    finally:
        watched.end(KeyError("x"))
    steps(model, optimizer, 2)
    assert found.seen == ["enter", "step", "step", "step", KeyError]


def test_a_recording_ends_after_the_most_steps():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watched = WatchedSteps(Recording, lambda: False, lambda model: 2)
    steps(model, optimizer, 5)
    assert watched.recording.seen == ["enter", "step", "step", None]
    watched.end()
    assert watched.recording.seen == ["enter", "step", "step", None]


def test_optimizers_of_other_models_and_of_wrappers_are_left_out():
    model = torch.nn.Linear(4, 4)
    own = [torch.optim.SGD([model.weight], lr=1.0), headroom.optim.AdamW([model.bias])]
    both = torch.optim.SGD([model.weight, torch.nn.Parameter(torch.ones(1))], lr=1.0)
    wrapper = torch.optim.SGD([model.weight], lr=1.0)
    wrapper.optimizer = own[0]
    inner, called = optimizers_of(model)
    assert {*map(id, inner)} == {*map(id, own)}
    assert {*map(id, called)} == {id(wrapper), id(own[1])} and id(both) not in map(id, called)


def test_steps_of_wrapped_optimizers_are_followed_and_schedules_do_not_mind():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = torch.nn.Linear(4, 4), None
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    watched = WatchedSteps(Recording, lambda: False)
    try:
        for k in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(3, 4)).sum())
                if k == 1:  # which wraps step() as well
                    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
                optimizer.step()
        schedule.step()
        assert watched.recording.seen == ["enter", "step", "step"]
    finally:
        watched.end()
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
