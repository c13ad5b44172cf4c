"""Assertions about memory fail when they should, and say who it was."""

import gc
import inspect
import threading

import pytest
import torch
from headroom import memory
from headroom.memory import checks
from headroom.memory.collecting import no_collections
from torch import nn

pytest_plugins = "pytester"


def _uses(kib):
    torch.zeros(kib, 256).sum()  # 4 bytes, 256 to a row


def test_peak_as_a_context():
    with memory.assert_peak_below("101 KiB") as tracked:
        _uses(100)
    assert 100 << 10 < tracked.peak_bytes <= 101 << 10
    with pytest.raises(AssertionError, match="more than the limit of 100 KiB") as caught:
        with memory.assert_peak_below("100 KiB"):
            _uses(100)
    text = str(caught.value)
    assert "zeros at test_checks.py" in text and "_uses" in text
    assert caught.value.timeline.peak_bytes == tracked.peak_bytes


def test_peak_as_a_decorator_counts_each_call_alone():
    limited = memory.assert_peak_below("101 KiB")(_uses)
    limited(100)
    limited(100)
    with pytest.raises(memory.checks.PeakMemoryError):
        limited(102)
    limited(10)


async def _later(kib=1000):
    _uses(kib)


def _items(kib=1000):
    yield _uses(kib)


async def _later_items(kib=1000):
    yield _uses(kib)


class _Callable:
    async def __call__(self):
        _uses(1000)


@pytest.mark.parametrize("function", [_later, _items, _later_items, _Callable()])
def test_code_that_runs_after_the_call_is_refused(function):
    with pytest.raises(TypeError, match="whose code has not run"):
        memory.assert_peak_below("1 KiB")(function)()
    with pytest.raises(TypeError, match="whose code has not run"):
        memory.assert_no_growth(function)
    with pytest.raises(TypeError, match="whose code has not run"):
        memory.assert_no_growth(steps=2)(function)()


def test_a_decorated_function_keeps_its_name_and_signature():
    limited = memory.assert_peak_below("101 KiB")(_uses)
    assert limited.__name__ == "_uses" and list(inspect.signature(limited).parameters) == ["kib"]
    assert memory.assert_peak_below("1 MiB")(lambda x: x + 1)(2) == 3


def test_a_model_is_counted_if_it_is_given():
    model = nn.Linear(256, 100, bias=False)  # 100 KiB
    optimizer = torch.optim.SGD(model.parameters())
    with memory.assert_peak_below("90 KiB"):
        model(torch.zeros(1, 256))
    with pytest.raises(AssertionError, match="parameters"):
        with memory.assert_peak_below("90 KiB", model, optimizer):
            model(torch.zeros(1, 256))


def test_an_error_within_is_not_hidden():
    with pytest.raises(KeyError, match="mine"):
        with memory.assert_peak_below(0):
            _uses(100)
            raise KeyError("mine")


def test_wrong_arguments_change_nothing():
    model = nn.Linear(4, 4)
    model(torch.ones(2, 4)).sum().backward()
    kept = [model.weight, model.bias, model.weight.grad, model.bias.grad]
    on_meta = nn.Linear(2, 2, device="meta")
    other = torch.optim.SGD(nn.Linear(2, 2).parameters())
    bits = [t.detach().clone() for t in [*kept, torch.get_rng_state()]]
    for error, words, call in (
        (ValueError, "wanted a number of bytes", lambda: memory.assert_peak_below("2 GiBs")),
        (TypeError, "model is int", lambda: memory.assert_peak_below(9, 3)),
        (ValueError, "not in the model", lambda: memory.assert_peak_below(9, model, other)),
        (
            ValueError,
            "meta device",
            lambda: memory.assert_peak_below(9, on_meta),
        ),
        (ValueError, "warmup=-1", lambda: memory.assert_no_growth(model, warmup=-1)),
        (TypeError, "missing", lambda: memory.assert_no_growth(model.forward)),
        (RuntimeError, "shapes", lambda: memory.assert_no_growth(lambda: model(torch.ones(3)))),
    ):
        with pytest.raises(error, match=words):
            call()
    assert all(map(torch.equal, bits, [*kept, torch.get_rng_state()]))
    assert kept[2] is model.weight.grad and not torch._C._autograd._profiler_enabled()


def test_growth_names_the_line():
    kept = []

    def leaking():
        _uses(3)
        kept.append(torch.zeros(64))

    with pytest.raises(AssertionError) as caught:
        memory.assert_no_growth(leaking, steps=4)
    text = str(caught.value)
    assert text.startswith("each of 3 steps left 256 B behind")
    assert "768 B in 3 pieces, of 3 steps, by aten::zeros" in text
    assert text.splitlines()[2].strip().startswith("test_checks.py:")
    assert text.splitlines()[2].endswith("leaking")
    assert len(kept) == 6
    memory.assert_no_growth(leaking, steps=4, tolerance=256)


def test_what_is_replaced_or_made_once_is_no_growth():
    kept, calls = {}, []

    def step():
        calls.append(1)
        kept["last"] = torch.zeros(64)
        if len(calls) == 2:
            kept["state"] = torch.zeros(64)

    memory.assert_no_growth(step, steps=4)
    calls.clear()
    with pytest.raises(AssertionError, match="1 pieces, of 1 steps"):
        memory.assert_no_growth(step, steps=4, warmup=0)

    @memory.assert_no_growth(steps=2)
    def test():
        _uses(1)

    test()
    with pytest.raises(ValueError, match="steps=1, warmup=2; wanted at least 2 and 0"):
        memory.assert_no_growth(test, steps=1)


def test_options_of_decorated_tests_that_may_not_grow():
    kept, calls = [], []

    def leak(size, times=1):
        calls.append(size)
        kept.extend(torch.zeros(size) for _ in range(times))

    memory.assert_no_growth(steps=3, warmup=1, tolerance=512)(leak)(64, times=2)
    assert calls == [64] * 4
    with pytest.raises(memory.checks.GrowthError, match="each of 2 steps left 512 B") as caught:
        memory.assert_no_growth(steps=3, warmup=0, tolerance=511)(leak)(64, times=2)
    assert [a.bytes for a in caught.value.allocations] == [256] * 4
    assert {a.step for a in caught.value.allocations} == {0, 1}
    assert memory.assert_no_growth(steps=2)(leak).__name__ == "leak"
    assert memory.assert_no_growth(lambda: None) is None and len(calls) == 4 + 3
    calls.clear()
    memory.assert_no_growth(lambda: calls.append(1))
    assert len(calls) == 5 + 2
    with pytest.raises(ValueError, match="steps=2, warmup=-1"):
        memory.assert_no_growth(leak, steps=2, warmup=-1)


def test_a_report_of_growth_names_five_places():
    kept, has_more = [], True

    def step():
        for size in (10, 20, 30):
            kept.append(torch.zeros(size))  # 240 bytes in three pieces
        kept.append(torch.ones(40))
        kept.append(torch.ones(50))
        kept.append(torch.full((70,), 1.0))
        kept.append(torch.arange(80.0))
        if has_more:
            kept.append(torch.rand(1))
            kept.append(torch.rand(2))

    with pytest.raises(memory.checks.GrowthError) as caught:
        memory.assert_no_growth(step, steps=2)
    lines = str(caught.value).splitlines()
    assert lines[0] == "each of 1 steps left 1.18 KiB behind, on average"
    assert [line for line in lines if "pieces" in line] == [
        f"  {size} B in {count} pieces, of 1 steps, by aten::{op}"
        for size, count, op in (
            (320, 1, "arange"), (280, 1, "full"), (240, 3, "zeros"), (200, 1, "ones"),
            (160, 1, "ones"),
        )
    ]  # fmt: skip
    assert lines[-1] == "  and 2 more"
    has_more = False
    with pytest.raises(memory.checks.GrowthError) as caught:
        memory.assert_no_growth(step, steps=2)
    assert "more" not in str(caught.value)


def test_options_of_a_peak():
    model = nn.Linear(64, 64)

    @memory.assert_peak_below("1 KiB", model, top=1)
    def step():
        model(torch.ones(2, 64))

    for _ in range(2):  # each call alone, with the same options
        with pytest.raises(memory.checks.PeakMemoryError) as caught:
            step()
        text = str(caught.value)
        assert text.startswith("17.") and "more than the limit of 1.00 KiB" in text
        assert sum(line.startswith(" " * 18) for line in text.splitlines()) == 1  # the rest
        assert caught.value.timeline.peak_by_kind["parameters"] == 4 * 65 * 64
    peak = caught.value.timeline.peak_bytes
    with memory.assert_peak_below(peak, model):
        model(torch.ones(2, 64))
    with pytest.raises(memory.checks.PeakMemoryError, match="1 B more than the limit"):
        with memory.assert_peak_below(peak - 1, model):
            model(torch.ones(2, 64))


def test_collections_are_as_before():
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            with pytest.raises(KeyError), no_collections(), no_collections():
                assert not gc.isenabled()
                raise KeyError
            assert gc.isenabled() == enabled
        finally:
            gc.enable()


def test_what_another_thread_replaces_is_no_growth():
    """Also in the last step."""
    leaf, kept = torch.ones(64, requires_grad=True), {}

    def step():
        made = {"last": leaf.exp()}  # which autograd keeps, so that its end is seen
        thread = threading.Thread(target=kept.update, args=(made,))
        thread.start()
        thread.join()

    memory.assert_no_growth(step, steps=4)


def test_growth_ends_the_recording_when_a_step_raises():
    def step():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        memory.assert_no_growth(step)
    assert not torch._C._autograd._profiler_enabled()


def test_marker_of_pytest(pytester):
    """In another pytest, which knows the marker by the entry point of the package."""
    pytester.makepyfile(
        """
        import pytest, torch

        @pytest.mark.peak_memory("101 KiB")
        def test_fits():
            torch.zeros(100, 256)

        @pytest.mark.peak_memory("100 KiB")
        def test_does_not():
            torch.zeros(100, 256).sum()

        @pytest.mark.peak_memory("100 KB")
        def test_fails_by_itself():
            raise KeyError("mine")
        """
    )
    result = pytester.runpytest_inprocess("--strict-markers", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        ["*more than the limit of 100 KiB*", "*owners at the peak*", "*KeyError: 'mine'*"]
    )


def test_marker_with_wrong_arguments(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.peak_memory("2 GiBs")
        def test_fits():
            pass
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*limit is '2 GiBs', wanted a number of bytes*"])


def test_growth_on_a_gpu_is_seen_where_no_device_is_named(monkeypatch):
    sizes = iter(range(0, 10**6, 1000))
    monkeypatch.setattr(checks, "_allocated_on_gpus", lambda *_: [500, next(sizes)])
    with pytest.raises(checks.GrowthError, match="left .* behind on cuda:1"):
        memory.assert_no_growth(lambda: None)
    with pytest.raises(checks.PeakMemoryError, match="were live at once on cuda:1"):
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda gpu: None)
        with memory.assert_peak_below(999):
            pass
    memory.assert_no_growth(lambda: None, device="cpu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_that_grows():
    kept = []
    with pytest.raises(checks.GrowthError, match="behind on cuda:0"):
        memory.assert_no_growth(lambda: kept.append(torch.empty(5000, device="cuda")))
    with pytest.raises(checks.PeakMemoryError, match="on cuda:0"), memory.assert_peak_below("1 MB"):
        torch.empty(10**6, device="cuda")
    with memory.assert_peak_below("5 MB"):
        torch.empty(10**6, device="cuda")
