"""What a profile writes is whole or not there, what it hooks is gone afterwards, and what goes
wrong is said."""

import gzip
import json
import resource
import warnings
from contextlib import contextmanager
from pathlib import Path

import headroom
import pytest
import torch
from headroom.profiling.events import Recording
from headroom.profiling.trace import write_trace
from torch import nn
from torch.nn.modules import module as every_module
from torch.optim import optimizer as every_optimizer
from torch.profiler import ProfilerAction, schedule
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
NAMES = ("rank0.0.profile.json", "rank0.0.pt.trace.json.gz")


def _model():
    return nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 3))


def _step(model):
    checkpoint(model, torch.randn(2, 7), use_reentrant=False).sum().backward()


def _plan(**counts):
    return schedule(**({"wait": 0, "warmup": 0, "active": 1, "repeat": 1} | counts))


def _profile(path, model, **options):
    return headroom.profile(
        path, **({"model": model, "schedule": _plan(), "peak_flops": 1e12} | options)
    )


def _hooks(model):
    """Everything that a profile may add to."""
    found = [
        every_module._global_forward_hooks,
        every_module._global_forward_pre_hooks,
        every_module._global_forward_hooks_always_called,
        every_optimizer._global_optimizer_pre_hooks,
        every_optimizer._global_optimizer_post_hooks,
    ]
    for module in model.modules():
        found += [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks]
    return [dict(hooks) for hooks in found], list(warnings.filters)


def _files(path):
    return sorted(file.name for file in path.iterdir()) if path.exists() else []


def _trace(path, name=NAMES[1]):
    return json.loads(gzip.decompress((path / name).read_bytes()))


def test_files_of_each_cycle(tmp_path):
    model, seen = _model(), []
    options = {"schedule": _plan(active=2, repeat=2), "on_trace_ready": seen.append}
    with _profile(tmp_path / "a" / "b", model, **options) as prof:
        for _ in range(4):
            _step(model)
            prof.step()
    wanted = [name.replace("0.0", f"0.{cycle}") for cycle in (0, 1) for name in NAMES]
    assert _files(tmp_path / "a" / "b") == wanted == sorted(file.name for file in prof.files)
    assert seen == [prof.torch_profiler] * 2
    for cycle, result in enumerate(prof.results):
        read = json.loads((tmp_path / "a" / "b" / f"rank0.{cycle}.profile.json").read_text())
        own = result.to_dict()
        assert read | {"created": None} == json.loads(json.dumps(own)) | {"created": None}
        assert (read["format"], read["version"]) == ("headroom.profile", 1)
        assert [s["number"] for s in read["steps"]] == [2 * cycle, 2 * cycle + 1]
        assert (read["complete"], read["ended_by"], read["cycle"]) == (True, None, cycle)
        assert (tmp_path / "a" / "b" / read["trace"]).exists()
    assert prof.to_dict()["cycle"] == 1


def test_the_trace_is_one_that_torch_reads(tmp_path):
    from torch._inductor.analysis.profile_analysis import JsonProfile

    model = _model()
    with _profile(tmp_path, model) as prof:
        _step(model)
        prof.step()
    trace = _trace(tmp_path)
    names = {event["name"] for event in trace["traceEvents"]}
    assert {
        "module: (model)",
        "module: 0",
        "recompute: 0",
        "aten::addmm",
        "ProfilerStep#0",
    } <= names
    ours = [event for event in trace["traceEvents"] if event.get("pid") == "headroom"]
    phases = [event for event in ours if event.get("tid") == "phases"]
    assert [event["name"] for event in phases] == ["data", "forward", "backward", "other"]
    step = next(e for e in trace["traceEvents"] if e["name"] == "ProfilerStep#0")
    assert phases[0]["ts"] == pytest.approx(step["ts"], abs=1)  # on the same clock
    assert sum(event["dur"] for event in phases) == pytest.approx(step["dur"], abs=1)
    tracks = [event["name"] for event in ours if "backward" in str(event.get("tid"))]
    assert list(dict.fromkeys(tracks)) == ["(no module)", "2", "1", "0"]
    live = [event["args"]["bytes"] for event in ours if event["ph"] == "C"]
    assert max(live) == prof.result.memory["cpu"]["peak_bytes"]
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps(trace))
    assert len(JsonProfile(str(plain)).data["traceEvents"]) == len(trace["traceEvents"])


def test_nothing_is_hooked_in_steps_that_are_not_recorded(tmp_path):
    model = _model()
    before = _hooks(model)
    hooked = []
    with _profile(None, model, schedule=_plan(wait=1, warmup=1, active=2)) as prof:
        for _ in range(6):
            hooked.append(_hooks(model) != before)
            _step(model)
            prof.step()
    assert hooked == [False, False, True, True, False, False]
    assert _hooks(model) == before


class Stop(Exception):
    pass


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("place", ["forward", "recomputed", "step"])
def test_an_exception_keeps_what_was_recorded(tmp_path, error, place):
    model = _model()
    before = _hooks(model)
    calls = []

    def fails(module, args):
        calls.append(None)
        if len(calls) == (3 if place == "forward" else 4):
            raise error("on purpose")

    with pytest.raises(error, match="on purpose"):
        with _profile(tmp_path, model, schedule=_plan(active=5)) as prof:
            _step(model)
            prof.step()
            if place == "step":
                raise error("on purpose")
            with model[1].register_forward_pre_hook(fails):
                _step(model)
                _step(model)
    assert _hooks(model) == before
    assert tuple(_files(tmp_path)) == NAMES
    read = json.loads((tmp_path / NAMES[0]).read_text())
    assert (read["complete"], read["ended_by"]) == (False, error.__name__)
    assert [step["number"] for step in read["steps"]] == [0]
    assert _trace(tmp_path)["traceEvents"]
    _step(model)
    with _profile(None, model) as again:
        _step(model)
        again.step()
    assert again.result.steps[0].recomputed_flops > 0


@contextmanager
def _files_of_at_most(size):
    """Makes the system refuse files that are larger, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [100, 5_000], ids=["nothing", "a part"])
def test_a_full_disk_leaves_the_old_files(tmp_path, size):
    model = _model()
    old = {name: name.encode() for name in NAMES}
    for name, content in old.items():
        (tmp_path / name).write_bytes(content)
    before = _hooks(model)
    with _profile(tmp_path, model) as prof:
        _step(model)
        with _files_of_at_most(size), pytest.raises(OSError, match="free space|raise the limit"):
            prof.step()
        assert _hooks(model) == before
    assert {name: (tmp_path / name).read_bytes() for name in _files(tmp_path)} == old
    assert prof.result.steps  # and the table is still there


def test_a_folder_in_the_place_of_a_file(tmp_path):
    model = _model()
    (tmp_path / NAMES[1]).mkdir()
    with _profile(tmp_path, model) as prof:
        _step(model)
        with pytest.raises(OSError, match="give the name of a file"):
            prof.step()
    assert _files(tmp_path) == [NAMES[1]]
    with pytest.raises(Stop), pytest.warns(UserWarning, match="did not write its files"):
        with _profile(tmp_path, model):
            _step(model)
            raise Stop
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        _profile(tmp_path / "file", model).__enter__()
    assert not torch.autograd._profiler_enabled()


def test_steps_that_never_end_are_named(tmp_path):
    model = _model()
    with pytest.warns(UserWarning, match=r"call it at the end of each step"):
        with _profile(tmp_path, model, schedule=None) as prof:
            _step(model)
    assert _files(tmp_path) == []
    with pytest.raises(RuntimeError, match=r"prof.step\(\) was never called"):
        prof.table()
    with pytest.warns(UserWarning) as caught:
        with _profile(tmp_path, model) as prof:
            for _ in range(5):
                _step(model)
    assert any("call it at the end of each step" in str(w.message) for w in caught)
    result = prof.result
    assert [(step.number, step.complete) for step in result.steps] == [(0, False)]
    assert "No step was ended" in result.notes[0] and result.steps[0].model_flops > 0
    assert tuple(_files(tmp_path)) == NAMES


def test_too_few_steps_are_said(tmp_path):
    model = _model()
    with _profile(tmp_path, model, schedule=None) as prof:
        with pytest.raises(RuntimeError, match="no cycle of the schedule has ended yet"):
            prof.table()
        _step(model)
        prof.step()
    with pytest.raises(RuntimeError, match="nothing was recorded in 1 steps"):
        prof.to_dict()
    with pytest.raises(RuntimeError, match="after the with block"):
        prof.step()
    with pytest.raises(RuntimeError, match="make another"):
        prof.__enter__()


def test_bad_arguments():
    model, other = _model(), nn.Linear(2, 2)
    with pytest.raises(TypeError, match="model is int"):
        headroom.profile(model=3)
    with pytest.raises(TypeError, match="optimizer is str"):
        headroom.profile(model=model, optimizer=["x"])
    with pytest.raises(ValueError, match="not in the model"):
        headroom.profile(model=model, optimizer=torch.optim.SGD(other.parameters(), lr=1.0))
    with pytest.raises(TypeError, match=r"torch.profiler.schedule"):
        headroom.profile(model=model, schedule=(1, 2, 3))
    for wrong in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="peak_flops"):
            headroom.profile(model=model, peak_flops=wrong)
    with pytest.raises(ValueError, match="meta"):
        headroom.profile(model=nn.Linear(2, 2, device="meta"))
    with torch.profiler.profile(), pytest.raises(RuntimeError, match="another profiler runs"):
        headroom.profile(model=model).__enter__()


def test_a_schedule_that_raises_leaves_nothing(tmp_path):
    model = _model()
    before = _hooks(model)

    def plan(step):
        if step:
            raise Stop
        return ProfilerAction.RECORD

    with pytest.raises(Stop):
        with _profile(None, model, schedule=plan) as prof:
            _step(model)
            prof.step()
    assert _hooks(model) == before and not torch.autograd._profiler_enabled()


def test_ranges_that_an_interruption_left_open_are_closed():
    model = _model()

    def interrupted(module, args):
        assert [name for _, name, _ in prof._ranges._of_thread()] == ["", "1"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with _profile(None, model) as prof:
            with model[1].register_forward_pre_hook(interrupted):
                model(torch.randn(2, 7))
    assert prof._ranges._of_thread() == []


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 1.0], ids="{:.0%}".format)
def test_a_trace_that_torch_wrote_in_part_is_refused(tmp_path, kept):
    model = _model()
    with _profile(None, model) as prof:
        _step(model)
        prof.step()
    whole = tmp_path / "whole.json"
    prof.torch_profiler.export_chrome_trace(str(whole))
    content = whole.read_bytes()

    def export(name):
        Path(name).write_bytes(content[: int(kept * len(content))])

    path = tmp_path / "trace.json.gz"
    if kept < 1:
        with pytest.raises(OSError, match="could not write all of its trace"):
            write_trace(path, export, Recording())
        assert _files(tmp_path) == ["whole.json"]
    else:
        write_trace(path, export, Recording())
        read, plain = _trace(tmp_path, path.name), json.loads(content)
        assert [e for e in read["traceEvents"] if e.get("pid") != "headroom"] == plain[
            "traceEvents"
        ]
