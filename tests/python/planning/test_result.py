"""A plan as text and its numbers, by hand; and what a device adds to the tensors of a plan."""

import pytest
import torch
from headroom.memory import Allocation, Span, Timeline
from headroom.planning import Plan
from headroom.planning.device import device_share
from headroom.planning.result import DeviceShare
from headroom.step.micro_batches import resized, samples_of

from helpers.frozen import are_frozen

MIB = 1 << 20


def timeline(device="cpu", notes=()):
    """Two steps, of which the second has a state before it."""
    rows = [
        (100, 0, None, "parameters", "up", "weight", "other", 0),
        (50, 2, 4, "activations", "blocks.0.up", "aten::mm", "forward", 0),
        (50, 3, 4, "activations", "blocks.1.up", "aten::mm", "forward", 0),
        (80, 6, None, "optimizer_state", "up", "exp_avg", "optimizer", 0),
        (60, 8, 10, "activations", "blocks.0.up", "aten::mm", "forward", 1),
        (60, 9, 10, "activations", "blocks.1.up", "aten::mm", "forward", 1),
        (20, 9, 11, "temporaries", None, "aten::add", "forward", 1),
    ]
    allocations = [
        Allocation(n, size * MIB, start, end, kind, module, op, phase, step)
        for n, (size, start, end, kind, module, op, phase, step) in enumerate(rows)
    ]
    spans = [Span(1, 0, "forward"), Span(4, 0, "backward"), Span(5, 0, "optimizer")]
    spans += [Span(7, 1, "forward"), Span(10, 1, "backward"), Span(12, 1, "optimizer")]
    return Timeline(allocations, spans, device, list(notes))


SHARE = DeviceShare(3 * MIB, 7 * MIB, 10 * MIB, 380 * MIB, "somebody")


def test_the_numbers_of_a_plan():
    plan = Plan(timeline("cuda"), SHARE)
    assert plan.peak_bytes == 320 * MIB and SHARE.bytes == 400 * MIB
    assert plan.total_bytes == 720 * MIB and are_frozen(SHARE)
    assert plan.reserved_bytes == 340 * MIB and plan.allocated_bytes == 333 * MIB
    assert (plan.first_step, plan.steady) == (200 * MIB, 320 * MIB)
    assert plan.fits("720 MiB") and not plan.fits(720 * MIB - 1)
    assert {k: v // MIB for k, v in plan.peak_by_kind.items() if v} == {
        "parameters": 100, "optimizer_state": 80, "activations": 120, "temporaries": 20,
    }  # fmt: skip
    owners = [(o.kind, o.name, o.bytes // MIB, o.count) for o in plan.owners_by_module()]
    assert owners == [
        ("activations", "blocks.*.up", 120, 2), ("parameters", "up", 100, 1),
        ("optimizer_state", "up", 80, 1), ("temporaries", "aten::add", 20, 1),
    ]  # fmt: skip
    assert [o.bytes // MIB for o in plan.peak_owners] == [100, 80, 60, 60, 20]


def test_a_plan_as_text():
    options = {"optimizer": "AdamW", "amp": "bfloat16"}
    plan = Plan(timeline("cuda", ["One note."]), SHARE, "GPT", options)
    assert str(plan) == "\n".join(
        [
            "GPT: 720 MiB on cuda",
            "peak of tensors 320 MiB, in the forward phase, steady state",
            "optimizer AdamW, amp bfloat16",
            "",
            "kind                 at the peak   share                              own peak",
            "parameters               100 MiB  13.9 %  ###                          100 MiB",
            "optimizer state         80.0 MiB  11.1 %  ###                         80.0 MiB",
            "activations              120 MiB  16.7 %  ####                         120 MiB",
            "temporaries             20.0 MiB   2.8 %  #                           20.0 MiB",
            "rounding                3.00 MiB   0.4 %",
            "fragmentation           7.00 MiB   1.0 %",
            "cuBLAS workspace        10.0 MiB   1.4 %",
            "CUDA context             380 MiB  52.8 %  #############               estimate",
            "total                    720 MiB 100.0 %  ########################",
            "",
            "phase                 first step      steady",
            "forward                  200 MiB     320 MiB",
            "backward                 100 MiB     200 MiB",
            "optimizer                180 MiB     180 MiB",
            "",
            "largest owners at the peak      kind                     bytes  count",
            "blocks.*.up                     activations            120 MiB      2",
            "up                              parameters             100 MiB      1",
            "up                              optimizer state       80.0 MiB      1",
            "aten::add                       temporaries           20.0 MiB      1",
            "",
            "One note.",
        ]
    )
    lines = plan.table(top=1).splitlines()
    assert sum("up" in line for line in lines) == 1
    first = Plan(Timeline([Allocation(0, 10, 1, 2)], [Span(1, 0, "backward")]))
    assert str(first).splitlines()[:2] == [
        "10 B on cpu", "peak of tensors 10 B, in the backward phase, first step"
    ]  # fmt: skip
    assert "rounding" not in str(first) and "forward" not in str(first)
    assert "workspace" not in str(Plan(timeline(), model="x" * 99, options={"a": "y" * 99}))
    long = str(Plan(timeline(), model="x" * 99, options={"a": "y" * 99}))
    assert max(map(len, long.splitlines())) <= 80


def test_the_largest_owners_are_shown():
    rows = [Allocation(n, 100 + n, module="x" * (n + 1)) for n in range(12)]
    lines = str(Plan(Timeline(rows, [Span(1, 0, "forward")]))).splitlines()
    assert [line.split()[0] for line in lines[-8:]] == ["x" * n for n in range(12, 4, -1)]
    assert "largest owners" in lines[-9]


def test_batches_of_other_sizes():
    x = torch.ones(4, 3, dtype=torch.int32)
    batch = {"x": x, "row": torch.ones(3), "scalar": torch.ones(()), "text": "t", "y": x[:, 0]}
    found = resized(batch, 9)
    assert found["x"].shape == (9, 3) and found["x"].dtype == torch.int32 and found["x"].is_meta
    assert found["y"].shape == (9,) and found["row"] is batch["row"]
    assert found["scalar"] is batch["scalar"] and found["text"] == "t"
    assert samples_of(batch) == 4 and samples_of([torch.ones(())]) is None


# ---- what a device adds -------------------------------------------------------------------------


def sized(*sizes):
    """Memory that is freed in turn, and allocated where the one before ends."""
    rows = [Allocation(n, size, n + 1, n + 2) for n, size in enumerate(sizes)]
    return Timeline(rows, [Span(1, 0, "forward")], "cuda")


@pytest.fixture
def gpu(monkeypatch):
    """Without settings, which a torch that does not say them has from its environment."""
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_share_of_a_device_by_hand(gpu):
    assert device_share(timeline()) == DeviceShare()  # of a CPU
    # 300 bytes are rounded to 512, in 2 MiB.
    share = device_share(sized(300))
    assert (share.workspaces, share.rounding) == (0, 212)
    assert share.fragmentation == 2 * MIB - 512
    assert (share.context, bool(share.source)) == (400 * MIB, True)
    # What is freed is there for what is allocated at the same event; of no bytes there is none.
    assert device_share(sized(30 * MIB, 30 * MIB, 0)).fragmentation == 0


def test_workspaces_count_by_what_they_add_to_the_peak(gpu):
    def share(*workspaces):
        found = sized(30 * MIB, 24 * MIB)  # at the events 1 and 2
        found.workspaces += [
            Allocation(n, size, start, end, "workspaces")
            for n, (size, start, end) in enumerate(workspaces)
        ]
        return device_share(found)

    assert share() == share((4 * MIB, 2, 3)) and share().fragmentation == 0
    assert share((8 * MIB, 2, 3)).workspaces == 2 * MIB
    assert share((8 * MIB, 1, None)).workspaces == 8 * MIB
    both = share((8 * MIB, 1, 2), (3 * MIB, 1, None))
    assert both.workspaces == 11 * MIB and both.fragmentation == 20 * MIB - 11 * MIB


def test_settings_of_a_device_count(gpu):
    one = sized(12 * MIB, 13 * MIB)
    usual = device_share(one)
    gpu.setenv("PYTORCH_ALLOC_CONF", "expandable_segments: True")
    grown = device_share(one)
    assert grown.fragmentation != usual.fragmentation and not one.notes
    gpu.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")  # an older name
    assert device_share(one) == grown and not one.notes
    gpu.delenv("PYTORCH_ALLOC_CONF")
    assert device_share(one) == usual
    assert one.notes == ["The plan does not follow the allocator's backend:cudaMallocAsync."]
    gpu.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "", raising=False)
    device_share(one)
    assert len(one.notes) == 1
