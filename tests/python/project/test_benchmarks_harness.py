"""What the benchmarks measure with: rounds, bytes, limits, bars and the command's exit status."""

import math
import statistics
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT))

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import _timing, adamw, adamw8bit  # noqa: E402
from benchmarks._layers import held_bytes  # noqa: E402
from benchmarks._limits import Rotation, cache_bytes, sets_needed  # noqa: E402
from benchmarks._timing import Contender, Settings, measure, ratios  # noqa: E402
from benchmarks.harness import Bar, Case, Share, Unavailable, run, run_case  # noqa: E402

CPU = torch.device("cpu")
FAST = Settings(rounds=3, sample_s=0.0, warmup_s=0.0)


class Clock:
    """Time passes where a test sleeps, which takes none, and by what is computed, but not by what
    else runs on the machine."""

    slept = 0.0

    def sleep(self, seconds):
        self.slept += seconds

    def process_time(self):
        return time.process_time() + self.slept

    perf_counter = process_time


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(_timing, "time", Clock())


def sleeper(seconds, **kwargs):
    return Contender(lambda: _timing.time.sleep(seconds), **kwargs)


def make_case(factories, **kwargs):
    return Case("fake", "sleeps", lambda device: factories, against="rival", **kwargs)


def test_new_gradients_have_new_addresses():
    case = next(c for c in adamw.cases(CPU, quick=True) if c.name.endswith("newgrads"))
    contender = case.setup(CPU)["torch fused"]()
    params = contender.call.__self__.param_groups[0]["params"]
    old = [p.grad.data_ptr() for p in params]
    contender.prepare()
    assert all(p.grad.data_ptr() != address for p, address in zip(params, old))


def test_bytes_that_have_to_move():
    f32, bf16 = torch.float32, torch.bfloat16
    per_element = {(f32, f32): 28, (bf16, bf16): 14, (f32, bf16): 20, (bf16, f32): 22}
    for (param, moment), count in per_element.items():
        assert adamw.Layout(((7,),) * 3, param, moment).bytes_moved == 21 * count


def test_bytes_of_8bit_moments():
    """The issue's 16 and 10 bytes for each parameter, and 4 scales for each block."""
    for param, count in ((torch.float32, 16), (torch.bfloat16, 10)):
        layout = adamw8bit.Layout(((700,),) * 3, param)
        assert layout.bytes_moved == 3 * (700 * count + 3 * 16)
        data = layout.allocate(CPU)
        tensors = [tensor for column in data[:-1] for tensor in column]
        assert layout.bytes_held == sum(tensor.nbytes for tensor in tensors)
        read = layout.bytes_held
        written = read - sum(grad.nbytes for grad in data.grads)
        assert layout.bytes_moved == read + written


def test_rotation_is_larger_than_the_cache():
    for layout in (
        adamw.Layout(((1 << 24,),), torch.float32, torch.float32),
        adamw.Layout(((1 << 30,),), torch.bfloat16, torch.bfloat16),
    ):
        count = sets_needed(layout.bytes_held, CPU)
        assert count * layout.bytes_held >= 4 * cache_bytes(CPU)
    data = Rotation("abc")
    assert [data.next() for _ in range(4)] == list("abca")


def test_every_round_has_every_contender_in_a_new_order():
    calls = []
    contenders = {name: Contender(lambda name=name: calls.append(name)) for name in "abc"}
    measure(contenders, CPU, Settings(rounds=8, sample_s=0.0, warmup_s=0.0))
    rounds = [tuple(calls[i : i + 3]) for i in range(len(calls) - 24, len(calls), 3)]
    assert all(sorted(order) == list("abc") for order in rounds)
    assert len(set(rounds)) > 1


def test_times_are_of_one_call_without_its_preparation(clock):
    log = []

    def note(what, seconds):
        log.append(what)
        _timing.time.sleep(seconds)

    contenders = {
        "short": sleeper(0.001),
        "long": sleeper(0.03),
        "prepared": Contender(lambda: note("call", 0.001), lambda: note("prepare", 0.02)),
    }
    timings = measure(contenders, CPU, Settings(rounds=3, sample_s=0.02, warmup_s=0.0))
    assert timings["short"].calls > 1 and timings["long"].calls == 1
    assert 0.001 <= timings["short"].median < 0.01 < 0.03 <= timings["long"].median
    assert statistics.median(ratios(timings["long"], timings["short"])) > 2
    assert 0.001 <= timings["prepared"].median < 0.01
    assert len(log) > 6 and log == ["prepare", "call"] * (len(log) // 2)


def test_bars(clock):
    bars = [
        Bar("ratio", 2.0, "cpu"),
        Bar("ratio", 1000.0, "cpu"),
        Bar("fraction", 0.5, "cpu"),
        Bar("ratio", 2.0, "cuda"),
    ]
    factories = {"headroom": lambda: sleeper(0.001), "rival": lambda: sleeper(0.02)}
    case = make_case(factories, work=1000, bars=bars)
    limit = "sleep", sleeper(0.01, work=1000)
    found = run_case(case, CPU, FAST, limit)["bars"]
    assert [bar["met"] for bar in found] == [True, False, True]  # the CUDA bar is not judged
    factories["headroom"] = lambda: sleeper(0.05)
    found = run_case(case, CPU, FAST, limit)["bars"]
    assert [bar["met"] for bar in found] == [False, False, False]


def test_shares_of_rows_in_another(clock):
    def counting(seconds, count):
        return lambda: sleeper(seconds, counts=lambda: {"bytes": count})

    factories = {"headroom": counting(0.001, 40), "rival": counting(0.02, 100), "peer": missing}
    bars = [
        Share("time", "headroom", "rival", 0.5, "cpu"),
        Share("time", "rival", "headroom", 1.0, "cpu"),
        Share("bytes", "headroom", "rival", 0.4, "cpu"),
        Share("bytes", "headroom", "rival", 0.39, "cpu"),
        Share("colors", "headroom", "rival", 0.5, "cpu"),  # which nobody counts
        Share("time", "peer", "rival", 1.0, "cpu"),
        Share("time", "headroom", "rival", 1.0, "cuda"),
    ]
    found = run_case(make_case(factories, bars=bars), CPU, FAST)
    assert [bar["met"] for bar in found["bars"]] == [True, False, True, False, False]
    assert found["bars"][2]["value"] == 0.4
    assert found["contenders"]["rival"]["counts"] == {"bytes": 100}


def test_bytes_that_a_call_holds(device):
    """What lives with the result, and the most in between."""
    call = lambda: torch.ones(1000, device=device).add(1)[:1]  # noqa: E731
    held, peak = held_bytes(call, torch.device(device))
    assert 4000 <= held < 4000 + 600 and 8000 <= peak < 8000 + 1200


def broken():
    raise ValueError("cannot do it")


def missing():
    raise Unavailable("not installed")


def test_a_contender_that_fails_does_not_cost_the_others(clock):
    case = make_case(
        {"headroom": broken, "peer": missing, "rival": lambda: sleeper(0.001)},
        bars=[Bar("ratio", 0.1, "cpu")],
    )
    result = run_case(case, CPU, FAST)
    assert result["contenders"]["headroom"] == {"error": "ValueError: cannot do it"}
    assert result["contenders"]["peer"] == {"unavailable": "not installed"}
    assert result["contenders"]["rival"]["seconds"]["median"] >= 0.001
    assert [bar["met"] for bar in result["bars"]] == [False]


def test_flop_bound_case():
    a = torch.rand(128, 128)
    case = make_case({"headroom": lambda: Contender(lambda: a @ a)}, work=2 * 128**3, unit="flop")
    kinds = dict(run([case], CPU, FAST, quick=True))
    assert kinds["limit"]["best"] == "matmul 128 x 128 x 128 float32"
    ours = kinds["case"]["contenders"]["headroom"]
    assert ours["rate"] == pytest.approx(2 * 128**3 / ours["seconds"]["median"])
    assert math.isfinite(ours["fraction"]) and ours["fraction"] > 0


@pytest.mark.parametrize(
    "ours, arguments, code",
    [(0.001, ["--check"], 0), (0.02, ["--check"], 1), (0.02, [], 0), (None, [], 1)],
)
def test_exit_status(clock, monkeypatch, capsys, ours, arguments, code):
    make = broken if ours is None else lambda: sleeper(ours)
    case = make_case(
        {"headroom": make, "rival": lambda: sleeper(0.005)}, bars=[Bar("ratio", 1.0, "cpu")]
    )
    monkeypatch.setattr(adamw, "cases", lambda device, quick: [case])
    assert command.main(["adamw", "--rounds", "2", *arguments]) == code
    table = capsys.readouterr().out
    assert ("NOT MET" in table) == (ours != 0.001)


def test_bad_arguments(capsys):
    for arguments in (["adamw", "--quick", "--check"], ["adamw", "--rounds", "1"], ["nothing"]):
        with pytest.raises(SystemExit) as stopped:
            command.main(arguments)
        assert stopped.value.code == 2
    with pytest.raises(SystemExit, match="no such case: nosuch"):
        command.main(["adamw", "--quick", "--cases", "nosuch"])
