"""Tables of memory to the letter: a timeline, what is saved, why memory ran out."""

import torch
from headroom.memory import Allocation, Snapshot, Span, Timeline, saved
from headroom.memory.saved import Saved, SavedTensor
from headroom.memory.snapshots.explain import explain
from headroom.memory.snapshots.tags import Tag
from torch import nn

MIB = 1 << 20


def timeline():
    deep = "blocks.11.attention.projection.of.values"
    rows = [
        (64, 0, None, "parameters", "up", "weight", "other", ()),
        (32, 1, 6, "activations", "up", "aten::mm", "forward", ("run/a.py:3 f",)),
        (32, 2, 5, "activations", "up", "aten::mm", "forward", ("run/a.py:3 f",)),
        (48, 3, 4, "temporaries", "", "aten::mm", "forward", ()),
        (64, 6, 8, "gradients", "up", "weight", "backward", ()),
        (16, 3, 7, "workspaces", deep, "aten::mm", "forward", ("run/long.py:123 g",)),
        (3, 3, 7, "communication", None, None, "forward", ()),
    ]
    allocations = [
        Allocation(n, size * MIB, start, end, kind, module, op, phase, 2, stack)
        for n, (size, start, end, kind, module, op, phase, stack) in enumerate(rows)
    ]
    spans = [Span(1, 2, "forward"), Span(4, 2, "backward"), Span(7, 2, "optimizer")]
    return Timeline(allocations, spans, "cuda:1", ["A note."])


def test_a_timeline_as_text():
    assert timeline().table(4) == "\n".join(
        [
            "Peak 195 MiB on cuda:1, in step 2, forward; event 3 of 9",
            "",
            "kind                 at the peak   share      own peak",
            "parameters              64.0 MiB  32.8 %      64.0 MiB",
            "gradients                    0 B   0.0 %      64.0 MiB",
            "activations             64.0 MiB  32.8 %      64.0 MiB",
            "communication           3.00 MiB   1.5 %      3.00 MiB",
            "workspaces              16.0 MiB   8.2 %      16.0 MiB",
            "temporaries             48.0 MiB  24.6 %      48.0 MiB",
            "",
            "phase                       peak",
            "forward                  195 MiB",
            "backward                 147 MiB",
            "optimizer                128 MiB",
            "",
            "owners at the peak         bytes  count  who",
            "parameters              64.0 MiB      1  up weight",
            "activations             64.0 MiB      2  up mm at a.py:3 f",
            "temporaries             48.0 MiB      1  (model) mm",
            "workspaces              16.0 MiB      1  ..jection.of.values mm at long.py:123 g",
            "                        3.00 MiB      1  1 more",
            "",
            "A note.",
        ]
    )
    assert "owners" not in timeline().table(0)
    assert str(timeline()) == timeline().table(10)
    many = Timeline([Allocation(n, 1, op=str(n)) for n in range(12)])
    assert many.table().count("temporaries ") == 1 + 10 and "2 more" in many.table()
    assert timeline().owners()[-1].name == "?"


def test_a_timeline_of_one_event():
    assert str(Timeline([])) == "\n".join(
        [
            "Peak 0 B on cpu, in step 0, other; event 0 of 1",
            "",
            "kind                 at the peak   share      own peak",
        ]
    )
    one = Timeline([Allocation(0, 100)])
    assert (one.events, one.peak_bytes, one.peak_index, one.spans) == (1, 100, 0, [])


def test_what_is_saved_as_text():
    def row(module, op, shape, dtype, size, uses=1):
        return SavedTensor(module, op, shape, dtype, size, uses)

    long = "ScaledDotProductFlashAttentionForCpuBackward0.result0, MulBackward0.self"
    table = Saved(
        [
            row("layers.10.up", "AddmmBackward0.mat1", (8, 32), torch.bfloat16, 4 * MIB),
            row("layers.2.up", "AddmmBackward0.mat1", (8, 32), torch.bfloat16, 2 * MIB),
            row("", long, (2, 3, 4), torch.uint8, MIB),
            row("layers.up2", "held by a hook", (1,), torch.bool, 512),
        ],
        torch.device("cpu"),
    )
    assert str(table) == "\n".join(
        [
            "7.00 MiB saved for the backward pass on cpu, in 4 pieces",
            "",
            "    bytes   n  module             saved by                    shape",
            " 6.00 MiB   2  layers.*.up        Addmm.mat1                  bf16[8,32]",
            " 1.00 MiB   1  (model)            SDPFlashAttention.result0.. u8[2,3,4]",
            "    512 B   1  layers.up2         held by a hook              bool[1]",
        ]
    )
    many = Saved(
        [row("x" * (n + 1), "op", (1,), torch.half, 22 - n) for n in range(22)], table.device
    )
    assert len(str(many).splitlines()) == 3 + 20 + 1
    assert str(many).splitlines()[-1] == "      3 B   2  2 more rows"
    assert table.table(1).splitlines()[-1] == " 1.00 MiB   2  2 more rows"
    assert table.table(3) == str(table)
    assert table.bytes == 7 * MIB + 512
    assert table.by_module() == {
        "layers.10.up": 4 * MIB, "layers.2.up": 2 * MIB, "": MIB, "layers.up2": 512,
    }  # fmt: skip
    assert table.by_module(1) == {"layers": 6 * MIB + 512, "": MIB}


def test_the_largest_is_saved_first():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5))

        def forward(self, x):
            return (self.weight[:2] * 2).exp().sum() + (self.weight * 3).sin().sum()

    table = saved(Alone(), torch.ones(5))
    assert [t.bytes for t in table.tensors] == [20, 8]


def entries(*frames):
    base = {"stream": 0, "time_us": 1, "frames": list(frames)}
    return lambda action, addr, size, **more: base | {
        "action": action, "addr": addr, "size": size, **more
    }  # fmt: skip


def exhausted(grows=False, free=7 * MIB):
    """Memory of a GPU that ran out with gaps of 6 and 5 MiB, of which one was to be 10."""
    frame = {"name": "forward", "filename": "/home/me/run/model.py", "line": 12}
    made, tag = entries(frame), Tag("activations", "blocks.0.attention.projection", "aten::mm")
    live, gap = "active_allocated", "inactive"
    blocks = [(0, 20, live), (20, 6, gap), (26, 9, live), (35, 5, gap)]
    trace = [
        made("alloc", 0, 20 * MIB, category="parameters"),
        made("alloc", 26 * MIB, 9 * MIB, user_metadata=tag.metadata()),
        {"action": "oom", "size": 10 * MIB, "device_free": free, "time_us": 3},
    ]
    segment = {
        "device": 0, "address": 0, "total_size": 40 * MIB, "stream": 0, "is_expandable": grows,
        "blocks": [
            {"address": at * MIB, "size": size * MIB, "requested_size": size * MIB,
             "state": state, "frames": [frame]}
            for at, size, state in blocks
        ],
    }  # fmt: skip
    return Snapshot({"segments": [segment], "device_traces": [trace]})


def test_why_memory_ran_out():
    text = explain(exhausted(), torch.OutOfMemoryError("CUDA out of memory"), 3 * MIB)
    assert text.splitlines()[:-2] == [
        "",
        "Memory ran out on cuda:0: 10.0 MiB were asked for, and 29.0 MiB were live, in step 0, "
        "other.",
        "",
        "live by kind                 bytes    share",
        "parameters                20.0 MiB   69.0 %",
        "activations               9.00 MiB   31.0 %",
        "",
        "live by module",
        "of no module              20.0 MiB   69.0 %",
        "..ttention.projection     9.00 MiB   31.0 %",
        "",
        "largest owners",
        "  20.0 MiB, parameters: ?",
        "      run/model.py:12 forward",
        "  9.00 MiB, activations: blocks.0.attention.projection mm",
        "      run/model.py:12 forward",
        "",
        "The allocator held 40.0 MiB, of which 11.0 MiB were free in 2 gaps, the largest of "
        "6.00 MiB; the device had 7.00 MiB free.",
        "The gaps together would have been enough: let segments grow, with",
        '       os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"',
        "",
    ]
    assert "expandable" not in explain(exhausted(grows=True), MemoryError(), 0)
    assert [s.free_bytes for s in exhausted().segments] == [11 * MIB]
