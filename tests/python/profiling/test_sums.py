"""Sums of recordings that are written down by hand: kernels of a GPU, calls that begin together,
long curves, and what the table prints."""

import pytest
import torch
from headroom.profiling import rates
from headroom.profiling.analysis import analyze
from headroom.profiling.arguments import ListTypes
from headroom.profiling.events import read
from headroom.profiling.table import table
from torch import nn
from torch._C._autograd import DeviceType

LABELS = {"module: (model)": ("", False), "module: 0": ("0", False), "module: 1": ("1", False)}


class Event:
    """What torch.profiler records, of which a test says what matters to it."""

    def __init__(self, name, start, duration=0, **about):
        self._name, self._start, self._duration = name, start, duration
        arguments = ("structured_input_shapes", "structured_input_strides", "dtypes")
        nothing = dict.fromkeys([*arguments, "concrete_inputs"], ())
        self._about = nothing | {"device_type": DeviceType.CPU, "sequence_nr": -1} | about

    def name(self):
        return self._name

    def start_ns(self):
        return self._start

    def duration_ns(self):
        return self._duration

    def __getattr__(self, name):
        return lambda: self._about.get(name, 0)


def _kernel(number, duration, **about):
    return Event(
        "kernel", 0, duration, device_type=DeviceType.CUDA, linked_correlation_id=number, **about
    )


def _events():
    """Two steps of 10 ms with a model, its modules 0 and 1, and one op in each of those."""
    events = []
    for step in (0, 1):
        at = step * 10_000_000
        # The op comes first in the list, and begins with what is around it.
        events += [
            Event("aten::relu", at, 1_000_000, correlation_id=10 * step + 5),
            Event("module: 0", at, 2_000_000, correlation_id=10 * step + 3),
            Event("module: (model)", at, 6_000_000, correlation_id=10 * step + 2),
            Event(f"ProfilerStep#{step}", at, 10_000_000),
            Event("module: 1", at + 2_000_000, 3_000_000, correlation_id=10 * step + 4),
            Event("aten::tanh", at + 2_000_000, 500_000, correlation_id=10 * step + 6),
        ]
    return events


def _result(events, device="cpu", **settings):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    return analyze(
        read(events, LABELS),
        model,
        [],
        ListTypes(list),
        {0, 1},
        device=torch.device(device),
        peak_flops=1e12,
        rank=0,
        cycle=0,
        settings={"profile_memory": True} | settings,
    )


def test_times_are_those_of_the_modules_around_them():
    result = _result(_events())
    rows = {row.name: row for row in result.modules}
    assert [step.wall_us for step in result.steps] == [10_000, 10_000]
    assert {name: row.calls for name, row in rows.items()} == {"": 2, "0": 2, "1": 2}
    assert rows[""].self.forward_us == 2 * 1_000
    assert rows["0"].self.forward_us == 2 * 2_000 and rows["1"].self.forward_us == 2 * 3_000
    assert rows[""].total.forward_us == 2 * 6_000
    assert {row.name: row.self_us for row in result.ops} == {"aten::relu": 2e3, "aten::tanh": 1e3}
    assert result.outside.forward_us == 0 and rows["0"].total.device_us is None
    assert result.device == {"type": "cpu", "name": result.device["name"]}
    assert f"threads: {torch.get_num_threads()}" in result.device["name"]
    assert result.notes == []


def test_kernels_count_where_they_were_launched(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA L4")
    kernels = [_kernel(5, 7_000), _kernel(15, 2_000), _kernel(6, 4_000), _kernel(77, 9_000)]
    kernels.append(_kernel(6, 3_000, is_user_annotation=True))  # a range, which is no kernel
    result = _result([*_events(), *kernels], "cuda")
    assert [step.device_us for step in result.steps] == [11.0, 2.0]
    rows = {row.name: row for row in result.modules}
    assert [rows[name].total.device_us for name in ("", "0", "1")] == [13.0, 9.0, 4.0]
    assert {r.name: r.device_us for r in result.ops} == {"aten::relu": 9.0, "aten::tanh": 4.0}
    assert result.totals["device_us"] == 13.0 and result.device["name"] == "NVIDIA L4"
    assert result.notes == []
    assert "no kernels" in _result(_events(), "cuda").notes[0]


def test_a_long_curve_keeps_its_peaks():
    sizes = [100, -100, 7, -3] * 2_500  # 10,000 points: at most 2,000 are kept
    memory = [Event("[memory]", 1_000 * k, nbytes=size) for k, size in enumerate(sizes)]
    curve = _result([*_events(), *memory]).memory["cpu"]
    live = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    assert curve["peak_bytes"] == max(live)
    assert len(curve["points"]) == 2_000
    assert [size for _, size in curve["points"]] == [
        max(live[k : k + 5]) for k in range(0, len(live), 5)
    ]
    for at, size in curve["points"]:
        assert live[int(at)] == size


def _cells(text, name):
    lines = (line.split() for line in text.splitlines())
    return next(cells[1:] for cells in lines if cells[:1] == [name] and "FLOP" not in cells)


def test_the_table_prints_means_of_the_steps():
    result = _result(_events())
    text = table(result, rows=16, width=120, merge=False)
    assert text.startswith("2 steps on cpu") and "10 ms each" in text
    assert _cells(text, "(Sequential)")[:4] == ["1", "6", "ms", "-"]
    assert _cells(text, "0")[:3] == ["1", "2", "ms"]
    assert _cells(text, "1")[:3] == ["1", "3", "ms"]
    assert _cells(text, "aten::relu")[:3] == ["1", "1", "ms"]
    assert _cells(text, "forward")[:3] == ["6", "ms", "60.0%"]
    merged = table(result, rows=16, width=120, merge=True)
    assert _cells(merged, "*")[:3] == ["2", "5", "ms"]  # both, in each step
    assert _cells(merged, "*")[-2:] == ["96", "B"]
    assert "smaller" not in text
    few = table(result, rows=1, width=120, merge=False)
    assert "... and 2 smaller" in few and "aten::tanh" not in few


@pytest.mark.parametrize(("terminal", "width"), [(60, 80), (100, 100), (200, 120)])
def test_the_table_is_as_wide_as_the_terminal(terminal, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(terminal))
    result = _result(_events())
    assert table(result, rows=16, width=None, merge=True) == table(
        result, rows=16, width=width, merge=True
    )


# https://www.nvidia.com/en-us/data-center/: dense TFLOP/s of half precision, TF32 and float32
@pytest.mark.parametrize(
    ("name", "half", "single"),
    [
        ("NVIDIA H100 PCIe", 756.5, 51),
        ("NVIDIA H100 NVL", 835.5, 60),
        ("NVIDIA H200", 989.5, 67),
        ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA L40S", 362.05, 91.6),
        ("NVIDIA L4", 121, 30.3),
    ],
)
def test_rates_are_the_published_ones(name, half, single, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    kinds = ["bfloat16", "float16", "float32"]
    found = rates.peak_rate(torch.device("cuda", 0), kinds, None)
    wanted = {"bfloat16": half, "float16": half, "float32": single}
    assert found.by_dtype == {kind: rate * 1e12 for kind, rate in wanted.items()}


@pytest.mark.parametrize("threads", [1, 2])
def test_a_measured_rate_says_its_threads(threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(rates, "_measured", lambda *_: 1e9)
    found = rates.peak_rate(torch.device("cpu"), ["float32"], None)
    assert found.source == "measured" and found.by_dtype == {"float32": 1e9}
    assert found.about.endswith(f"{threads} thread" + "s" * (threads == 2))


def test_time_in_front_of_a_batch_is_data_only_at_the_begin_of_a_step():
    loader, optimizer = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "SGD.step"
    events = [
        Event("ProfilerStep#0", 0, 10_000_000),
        Event(loader, 1_000_000, 1_000_000),
        Event(f"Optimizer.step#{optimizer}", 2_000_000, 2_000_000),
        Event(loader, 7_000_000, 2_000_000),
    ]
    phases = _result(events).steps[0].phases_us
    assert phases == {"data": 4e3, "forward": 0, "backward": 0, "optimizer": 2e3, "other": 4e3}
