"""Sums of recordings that are written down by hand: kernels of a GPU, calls that begin together,
long curves, and what the table prints."""

import datetime
import time

import headroom
import pytest
import torch
from headroom.profiling import Figures, ModuleRow, OpRow, PeakRate, ProfileResult, StepRow, rates
from headroom.profiling.analysis import analyze
from headroom.profiling.arguments import Arguments, ListTypes, call_on_meta, op_of
from headroom.profiling.events import Memory, read
from headroom.profiling.phases import intervals
from headroom.profiling.table import _number, table
from headroom.profiling.trace import _added
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
    return _analyzed(read(events, LABELS), device, **settings)


def _analyzed(recording, device="cpu", **settings):
    return analyze(
        recording,
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),
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


def test_memory_counts_where_it_was_allocated():
    """Of steps of 10 ms, of which the model takes 6, its module 0 the first 2 and 1 the next 3."""
    ms = 1_000_000
    changes = [
        (0, 7),  # in module 0, which begins then
        (3 * ms, 100),  # in module 1
        (4 * ms, -30),
        (5_500_000, 11),  # in the model
        (7 * ms, 40),  # in none
        (13 * ms, 5),
        (21 * ms, 1000),  # after the last step
    ]
    memory = [Event("[memory]", at, nbytes=size) for at, size in changes]
    other = Event("[memory]", 8 * ms, nbytes=9, device_type=DeviceType.CUDA, device_index=1)
    result = _result([*_events(), *memory, other])
    rows = {row.name: row for row in result.modules}
    assert [rows[name].self.allocated_bytes for name in ("", "0", "1")] == [11, 7, 105]
    assert [rows[name].self.kept_bytes for name in ("", "0", "1")] == [11, 7, 75]
    assert [rows[name].total.kept_bytes for name in ("", "0", "1")] == [93, 7, 75]
    assert [rows[name].peak_bytes for name in ("", "0", "1")] == [133, 7, 133]
    assert (result.outside.allocated_bytes, result.outside.kept_bytes) == (49, 0)
    assert result.memory["cpu"]["peak_bytes"] == 1133
    assert result.memory["cpu"]["points"][1:3] == [[3000.0, 107], [4000.0, 77]]
    assert result.memory["cuda:1"] == {"peak_bytes": 9, "points": [[8000.0, 9]]}
    without = _result([*_events(), *memory], profile_memory=False)
    assert without.memory == {} and without.outside.kept_bytes is None


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


def _written_down():
    """Two steps on a GPU, in round numbers."""
    phases = [
        {"data": 90.0, "forward": 4e5, "backward": 6e5, "optimizer": 2e5, "other": 99.96},
        {"data": 110.0, "forward": 5e5, "backward": 6e5, "optimizer": 2e5, "other": 0.0},
    ]
    counts = {"model_flops": 3 * 10**12, "recomputed_flops": 10**12}
    steps = [
        StepRow(3 + k, 0.0, sum(times.values()), True, times, 30.0, 1e5, 1e6, **counts)
        for k, times in enumerate(phases)
    ]
    whole = Figures(8e5, 9e5, 2e5, 2e6, 5 * 10**12, 2 * 10**12, 3 << 30, 5 << 20)
    block = Figures(1e5, 3e5, 2e5, 2e6, 999_400_000, 10**9, 1 << 30, 2047)
    short = Figures(forward_us=3.0)
    long = "blocks.1.a_long_name_of_a_layer.that_is_cut_at_its_begin.inner.deeper"
    return ProfileResult(
        device={"type": "cuda", "name": "NVIDIA L4"},
        rank=0,
        cycle=0,
        settings={"record_shapes": True},
        steps=steps,
        flops_by_dtype={"bfloat16": 8 * 10**12},
        model_flops_by_dtype={"bfloat16": 6 * 10**12},
        peak_rate=PeakRate("published", "", {"bfloat16": 20e12}),
        modules=[
            ModuleRow("", "Net", 2, 0, Figures(), whole, 1 << 30, 2 << 30, 3 << 30),
            ModuleRow("blocks", "ModuleList", 0, 0, Figures(), Figures(), 1 << 20, 1 << 20),
            ModuleRow("blocks.0", "Block", 2, 2, short, block, 300, 700, 7 << 20),
            ModuleRow("blocks.1", "Block", 3, 1, short, block, 301, 702, 5 << 20),
            ModuleRow(long, "Linear", 2, 0, Figures(), short),
            ModuleRow("head", "Linear", 2, 0, Figures(), Figures(forward_us=4.0)),
        ],
        outside=Figures(2e3, 0.0, 0.0, None, 0, 0, 5, 4096),
        ops=[
            OpRow("aten::mm", 6, 8e5, 7e5, 5e5, 4 * 10**12, 10**12, 4 << 30, "counted", 1.5e12),
            OpRow("headroom::rms_norm", 5, 6e5, 3e5, None, 0, 0, 3 << 20, "estimate", 2e9),
            OpRow("aten::bmm", 1, 4.0, 1.0, None, 8000),
        ],
        memory={"cuda:0": {"peak_bytes": 7 << 30, "points": []}},
        notes=["A remark.", "Another."],
    )


HEAD = """\
2 steps on cuda (NVIDIA L4), 1.25 s each
  data          0.1 ms   0.0%
  forward       450 ms  36.0%  ███████████
  backward      600 ms  48.0%  ██████████████
  optimizer     200 ms  16.0%  █████
  other          50 us   0.0%
  of which computed again 100 ms, in the DataLoader 30 us, kernels 1 s
3 TFLOP per step and 1 TFLOP computed again: 2.4 TFLOP/s, 12.0% of the published peak \
(16.0% with what is computed again)
7.00 GiB more at the peak on cuda:0 than at the start

"""
OPS = """
operation, per step                                                        calls      time    FLOP/s     bytes   bytes/s
aten::mm                                                                       3    250 ms      10 T  2.00 GiB    1.5 TB
headroom::rms_norm                                                           2.5    150 ms         - ~1.50 MiB     ~2 GB
aten::bmm                                                                    0.5    0.5 us       2 G         -         -
~ an estimate: the least that the operation could move

Note: A remark.
Note: Another."""  # noqa: E501
MODULES = {
    False: """\
module, per step                             calls   forward  backward     again      FLOP      peak      kept     holds
(Net)                                            1    400 ms    450 ms    100 ms     2.5 T  3.00 GiB  2.50 MiB  3.00 GiB
    blocks.0                                     1     50 ms    150 ms    100 ms     500 M  7.00 MiB  1.00 KiB  0.98 KiB
    blocks.1                                   1.5     50 ms    150 ms    100 ms     500 M  5.00 MiB  1.00 KiB  0.98 KiB
..that_is_cut_at_its_begin.inner.deeper          1    1.5 us         -         -         -         -         -       0 B
  head                                           1      2 us         -         -         -         -         -       0 B
(outside modules)                                       1 ms         -         -         -            2.00 KiB
""",  # noqa: E501
    True: """\
module, per step                             calls   forward  backward     again      FLOP      peak      kept     holds
(Net)                                            1    400 ms    450 ms    100 ms     2.5 T  3.00 GiB  2.50 MiB  3.00 GiB
    blocks.*                                   2.5    100 ms    300 ms    200 ms     999 M  7.00 MiB  2.00 KiB  1.96 KiB
..that_is_cut_at_its_begin.inner.deeper          1    1.5 us         -         -         -         -         -       0 B
  head                                           1      2 us         -         -         -         -         -       0 B
(outside modules)                                       1 ms         -         -         -            2.00 KiB
""",  # noqa: E501
}
NARROW = """\
module, per step         calls   forward  backward     again      FLOP      peak
(Net)                        1    400 ms    450 ms    100 ms     2.5 T  3.00 GiB
    blocks.0                 1     50 ms    150 ms    100 ms     500 M  7.00 MiB
(outside modules)                   1 ms         -         -         -
... and 3 smaller; table(rows=...) shows more

operation, per step                calls      time    FLOP/s     bytes   bytes/s
aten::mm                               3    250 ms      10 T  2.00 GiB    1.5 TB
headroom::rms_norm                   2.5    150 ms         - ~1.50 MiB     ~2 GB
~ an estimate: the least that the operation could move

Note: A remark.
Note: Another."""


@pytest.mark.parametrize("merge", [False, True])
def test_the_whole_text(merge):
    text = table(_written_down(), rows=16, width=120, merge=merge)
    assert text == HEAD + MODULES[merge] + OPS
    if not merge:
        assert table(_written_down(), rows=2, width=80, merge=False) == HEAD + NARROW


def test_the_text_of_almost_nothing():
    result = _written_down()
    result.steps = result.steps[:1]
    step = result.steps[0]
    step.device_us = step.loader_us = None
    step.loader_us, step.recomputed_flops, step.model_flops = 0.0, 0, 1_600
    step.phases_us = {"forward": 0.0, "other": 1.0}
    step.wall_us, step.recompute_us = 0.0, 0.0
    result.peak_rate, result.notes, result.memory, result.ops = PeakRate("unknown", ""), [], {}, []
    text = table(result, rows=0, width=80, merge=False)
    assert text.splitlines() == [
        "1 step on cuda (NVIDIA L4), 1 us each",
        "  forward         0 us   0.0%",
        "  other           1 us 100.0%  " + "█" * 30,
        "  of which computed again 0 us",
        "1.6 KFLOP per step: 1.6 GFLOP/s",
        "",
        "module, per step         calls   forward  backward     again      FLOP      peak",
        "(outside modules)                   2 ms         -         -         -",
        "... and 5 smaller; table(rows=...) shows more",
        "",
        "operation, per step                calls      time    FLOP/s     bytes   bytes/s",
    ]


@pytest.mark.parametrize(
    "flops, text",
    [(999.4, "999 "), (999.5, "1 K"), (9995e5, "1 G"), (2e15, "2 P"), (0.5, "0.5 ")],
)
def test_numbers_have_a_letter_for_each_thousand(flops, text):
    assert _number(flops) == text


def test_what_the_file_holds():
    result = _written_down()
    found = result.to_dict()
    assert found["totals"] == {
        "steps": 2,
        "wall_us": 2_500_299.96,
        "phases_us": {
            "data": 200.0,
            "forward": 9e5,
            "backward": 12e5,
            "optimizer": 4e5,
            "other": 99.96,
        },
        "loader_us": 60.0,
        "recompute_us": 2e5,
        "device_us": 2e6,
        "model_flops": 6 * 10**12,
        "recomputed_flops": 2 * 10**12,
        "flops_by_dtype": {"bfloat16": 8 * 10**12},
        "mfu": pytest.approx(0.3 / 2.50029996),
        "hfu": pytest.approx(0.4 / 2.50029996),
    }
    made = datetime.datetime.fromisoformat(found["created"])
    assert made.microsecond == 0 and made.utcoffset() == datetime.timedelta()
    assert abs(made.timestamp() - time.time()) < 60
    assert (found["torch"], found["headroom"]) == (torch.__version__, headroom.__version__)
    assert found["peak_rate"] == {
        "source": "published",
        "about": "",
        "by_dtype": {"bfloat16": 20e12},
    }
    assert found["modules"][2]["self"]["forward_us"] == 3.0
    assert [found[name] for name in ("trace", "complete", "ended_by")] == [None, True, None]
    for step in result.steps:
        step.device_us = None
    assert result.totals["device_us"] is None
    result.peak_rate = PeakRate("unknown", "")
    assert result.totals["mfu"] is None


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


@pytest.mark.parametrize(
    ("took", "sizes"), [(9.5e-5, [256, 512, 1024]), (6.5e-3, [256, 512]), (6.6e-3, [256])]
)
def test_a_rate_is_that_of_the_fastest_product_within_a_third_of_a_second(took, sizes, monkeypatch):
    """Larger ones are tried while five of them would still end in time."""
    now, seen = [0.0], []

    def product(a, b):
        seen.append(a.shape[0])
        assert a.shape == b.shape == (seen[-1], seen[-1]) and a.dtype == torch.float64
        slow = 1.5 if len(seen) < 3 else 1.0  # the first ones
        now[0] += slow * took * (seen[-1] / 256) ** 3

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(rates.time, "perf_counter", lambda: now[0])
    found = rates._measured.__wrapped__(torch.device("cpu"), "float64", 1)
    assert found == pytest.approx(2 * 256**3 / took)
    assert sorted(set(seen)) == sizes and now[0] > 0.3


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


NODE = "autograd::engine::evaluate_function: "
MS = 1_000_000


def _backward():
    """A step on thread 1 whose backward pass runs on thread 2, in which module 0 runs again."""
    here, there = {"start_thread_id": 1}, {"start_thread_id": 2}
    node = there | {"scope": 1, "fwd_thread_id": 1}
    return [
        Event("ProfilerStep#0", 0, 20 * MS, **here),
        Event("module: (model)", 1 * MS, 6 * MS, **here),
        Event("module: 0", 1 * MS, 2 * MS, **here),
        Event("aten::relu", 1 * MS, 1 * MS, sequence_nr=7, **here),
        Event("module: 1", 3 * MS, 2 * MS, **here),
        Event("aten::tanh", 3 * MS, 1 * MS, sequence_nr=8, **here),
        Event("aten::sum", 7 * MS, 1 * MS, sequence_nr=9, **here),  # of no module
        Event("aten::waits", 8 * MS, 1 * MS, is_async=True, **here),
        Event("aten::hidden", 8 * MS, 1 * MS, is_hidden_event=True, **here),
        Event(f"{NODE}SumBackward", 9 * MS, 1 * MS, sequence_nr=9, **node),
        Event(f"{NODE}TanhBackward", 10 * MS, 2 * MS, sequence_nr=8, **node),
        Event("aten::tanh_backward", 10 * MS, 1 * MS, **there),
        Event(f"{NODE}ReluBackward", 12 * MS, 4 * MS, sequence_nr=7, **node),
        Event("recompute: 0", 12 * MS, 2 * MS, **there),
        Event("aten::relu", 12 * MS, 1 * MS, sequence_nr=3, **there),
        Event("aten::mul", 15 * MS, 1 * MS, sequence_nr=4, **there),
        Event(f"{NODE}AccumulateGrad", 16 * MS, 1 * MS, fwd_thread_id=1, **there),
        Event("Optimizer.step#SGD.step", 17 * MS, 2 * MS, **here),
        Event("aten::add_", 17 * MS, 1 * MS, **here),
    ]


def test_modules_and_phases_of_a_backward_pass_on_another_thread():
    labels = LABELS | {"recompute: 0": ("0", True)}
    recording = read(_backward(), labels)
    found = [
        (call.name.removeprefix(NODE), call.thread, call.module, call.phase, call.again)
        for call in recording.calls
    ]
    assert found == [
        ("module: (model)", 1, "", "forward", False),
        ("module: 0", 1, "0", "forward", False),
        ("aten::relu", 1, "0", "forward", False),
        ("module: 1", 1, "1", "forward", False),
        ("aten::tanh", 1, "1", "forward", False),
        ("aten::sum", 1, None, None, False),
        ("SumBackward", 2, None, "backward", False),
        ("TanhBackward", 2, "1", "backward", False),
        ("aten::tanh_backward", 2, "1", "backward", False),
        ("ReluBackward", 2, "0", "backward", False),
        ("recompute: 0", 2, "0", "backward", True),
        ("aten::relu", 2, "0", "backward", True),
        ("aten::mul", 2, "0", "backward", True),
        ("AccumulateGrad", 2, None, "backward", False),
        ("Optimizer.step#SGD.step", 1, None, "optimizer", False),
        ("aten::add_", 1, None, "optimizer", False),
    ]
    assert not recording.has_device and list(recording.steps) == [0]
    result = _analyzed(recording)
    rows = {row.name: row for row in result.modules}
    times = {
        name: (row.self.forward_us, row.self.backward_us, row.self.recompute_us)
        for name, row in rows.items()
    }
    # The model alone; the node of 0 but what ran again in it, and the product within.
    assert times == {"": (2e3, 0, 0), "0": (2e3, 1e3, 3e3), "1": (2e3, 2e3, 0)}
    assert (rows["0"].calls, rows["0"].recomputed_calls) == (1, 1)
    outside = result.outside
    assert (outside.forward_us, outside.backward_us, outside.recompute_us) == (1e3, 2e3, 0)
    (step,) = result.steps
    assert step.recompute_us == 3e3 and step.wall_us == 20e3
    assert step.phases_us == {
        "data": 1e3, "forward": 8e3, "backward": 8e3, "optimizer": 2e3, "other": 1e3,
    }  # fmt: skip
    assert intervals(recording, recording.steps[0]) == [
        (0, MS, "data"),
        (MS, 9 * MS, "forward"),
        (9 * MS, 17 * MS, "backward"),
        (17 * MS, 19 * MS, "optimizer"),
        (19 * MS, 20 * MS, "other"),
    ]
    ops = {row.name: (row.calls, row.total_us, row.self_us) for row in result.ops}
    assert ops["aten::relu"] == (2, 2e3, 2e3) and ops["aten::mul"] == (1, 1e3, 1e3)
    assert ops["Optimizer.step#SGD.step"] == (1, 2e3, 1e3)
    assert not any(name.startswith((NODE, "module", "recompute")) for name in ops)


def test_tracks_of_the_trace():
    recording = read(_backward(), LABELS | {"recompute: 0": ("0", True)})
    memory = [Memory(2 * MS, 30, "cpu", None), Memory(3 * MS, -10, "cpu", None)]
    recording.memory = [*memory, Memory(4 * MS, 5, "cuda:0", None)]
    first, second, *events = _added(recording, MS)
    assert first["args"] == {"name": "headroom"} and second["args"] == {"sort_index": -1}
    spans = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans == [
        ("phases", "data", -1e3, 1e3),
        ("phases", "forward", 0, 8e3),
        ("phases", "backward", 8e3, 8e3),
        ("phases", "optimizer", 16e3, 2e3),
        ("phases", "other", 18e3, 1e3),
        ("modules in the backward pass", "(no module)", 8e3, 1e3),
        ("modules in the backward pass", "1", 9e3, 2e3),
        ("modules in the backward pass", "0", 11e3, 4e3),
        ("modules in the backward pass", "(no module)", 15e3, 1e3),
    ]
    counts = [(e["name"], e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C"]
    assert counts == [
        ("live bytes on cpu since the start", 1e3, 30),
        ("live bytes on cpu since the start", 2e3, 20),
        ("live bytes on cuda:0 since the start", 3e3, 5),
    ]


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32),
        *(torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
    ],
    ids=str,
)
def test_dtypes_that_the_profiler_writes(dtype):
    x = torch.ones(3, 5).to(dtype)
    with torch.profiler.profile(record_shapes=True) as prof:
        x.t().clone()
        torch.cat([x, x])
    events = {event.name(): event for event in prof.profiler.kineto_results.events()}
    types = ListTypes(prof.profiler.kineto_results.experimental_event_tree)
    found = Arguments(events["aten::clone"], types)
    given = found.values()[0]
    assert found.dtype == given.dtype == dtype and given.is_meta
    assert (given.shape, given.stride()) == ((5, 3), (1, 5))
    parts, dim = Arguments(events["aten::cat"], types).values()
    assert [(part.dtype, part.shape) for part in parts] == [(dtype, (3, 5))] * 2
    schema, result = call_on_meta(op_of("aten::cat"), [parts, 0])
    assert schema.name == "aten::cat" and (result.shape, result.dtype) == ((6, 5), dtype)


def test_names_that_are_no_ops():
    for name in ("relu", "aten::", "aten::no such op", "aten::bogus", "nobody::relu"):
        assert op_of(name) is None, name
    assert call_on_meta(op_of("aten::relu"), [1, 2, 3]) == (None, None)
