"""What operations allocate inside: asked of the machine, and of Headroom's own library."""

from functools import partial

import headroom
import headroom.memory
import pytest
import torch
from headroom.memory.cpu import CpuRecorder
from headroom.nn.functional import mlp_block
from headroom.planning import probe
from headroom.planning.inside import inside
from headroom.planning.masks import masks_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten


def measured(call) -> int:
    """Returns the most bytes of a call beyond its results."""
    call()
    recorder = CpuRecorder(stacks=False)
    recorder.start()
    try:
        result = call()
    finally:
        recorder.stop()
    live = most = 0
    for event in recorder.events():
        live += event.bytes if event.action == "alloc" else -event.bytes
        most = max(most, live)
    assert result is not None
    return most - live


def test_scratch_of_a_convolution_and_of_a_16_bit_product():
    x, weight = torch.randn(2, 16, 8, 8), torch.randn(8, 16, 3, 3)
    options = [None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    convolution = torch.ops.aten.convolution.default
    a = torch.randn(64, 96).bfloat16()
    real = [
        measured(lambda: convolution(x, weight, *options)),
        measured(lambda: torch.ops.aten.mm.default(a, a.t())),
    ]
    with FakeTensorMode() as mode:
        fake_x, fake_weight, fake_a = map(mode.from_tensor, (x, weight, a))
        found = [
            inside(convolution, (fake_x, fake_weight, *options), {}, "cpu"),
            inside(torch.ops.aten.mm.default, (fake_a, fake_a.t()), {}, "cpu"),
        ]
    assert [sum(size for size, _ in sizes) for sizes in found] == real
    assert inside(torch.ops.aten.mm.default, (a.float(), a.float().t()), {}, "cpu") == []


def attention(rows, columns, dtype=torch.float32):
    q = torch.randn(1, 2, rows, 8).to(dtype)
    k, v = (torch.randn(1, 2, columns, 8).to(dtype) for _ in range(2))
    return aten._scaled_dot_product_flash_attention_for_cpu.default, (q, k, v), {}


def norm(dtype):
    x, weight = torch.randn(5, 7, 9).to(dtype), torch.ones(7, 9).to(dtype)
    _, mean, rstd = aten.native_layer_norm.default(x, (7, 9), weight, weight, 1e-5)
    masks = [True, True, True]
    args = (torch.ones_like(x), x, (7, 9), mean, rstd, weight, weight, masks)
    return aten.native_layer_norm_backward.default, args, {}


def embedding(contiguous):
    indices = torch.arange(24).view(4, 6)
    indices = indices if contiguous else indices.t()
    return aten.embedding.default, (torch.randn(30, 8), indices), {}


CALLS = {
    "attention": lambda: attention(33, 40),
    "attention of 200 rows": lambda: attention(200, 600),
    "attention of 192 rows": lambda: attention(192, 600),
    "attention of 768 rows": lambda: attention(768, 70),
    "attention of 800 rows": lambda: attention(800, 70),
    "attention in 16 bits": lambda: attention(200, 70, torch.bfloat16),
    "norm": lambda: norm(torch.float32),
    "norm in 16 bits": lambda: norm(torch.bfloat16),
    "norm in 64 bits": lambda: norm(torch.float64),
    "embedding": lambda: embedding(True),
    "embedding of transposed indices": lambda: embedding(False),
    "sort": lambda: (aten.sort.default, (torch.randn(7, 9),), {}),
    "sort of columns": lambda: (aten.sort.default, (torch.randn(7, 9), 0), {}),
    "stable sort": lambda: (aten.sort.stable, (torch.randn(7, 9),), {"stable": True, "dim": 0}),
}


@pytest.mark.parametrize("name", CALLS)
def test_scratch_is_what_the_cpu_takes(name):
    func, args, kwargs = CALLS[name]()
    real = measured(partial(func, *args, **kwargs))
    with FakeTensorMode() as mode:
        found = inside(func, tree_map_only(torch.Tensor, mode.from_tensor, args), kwargs, "cpu")
    assert sum(size for size, _ in found) == real
    assert {kind for _, kind in found} <= {"temporaries"}


class Seen(TorchDispatchMode):
    """Keeps the calls of ops of Headroom."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "headroom":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("save", ["all", "input"])
def test_workspace_of_an_mlp_forward_and_backward(save):
    x, gate_up, down = torch.randn(40, 32), torch.randn(96, 32), torch.randn(32, 48)
    with Seen() as seen:
        x.requires_grad_()
        y = mlp_block(x, None, gate_up.requires_grad_(), down, save=save)
        y.square().sum().backward()
    for func, args, kwargs in seen.calls:
        real = measured(partial(func, *args, **kwargs))
        with FakeTensorMode() as mode:
            given = tree_map_only(torch.Tensor, mode.from_tensor, args)
            found = inside(func, given, kwargs, "cpu")
        assert sum(size for size, _ in found) == real > 0, func
    assert len(seen.calls) == 2


def test_large_operations_are_not_run(monkeypatch):
    monkeypatch.setattr(probe, "LIMIT", 100)
    x = torch.randn(7, 9).half()
    assert probe.asked(torch.ops.aten.mm.default, (x, x.t()), {}) is None
    model, images = nn.Conv2d(3, 5, 3), torch.randn(2, 3, 9, 9)
    plan = headroom.plan(model, None, images, forward=lambda model, x: model(x).mean())
    said = "What aten::convolution, aten::convolution_backward hold inside was too large to see"
    assert said in str(plan)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("save", ["L0", "L1"])
def test_workspace_of_the_fused_mlp(norm, save):
    """A block that is planned allocates in its MLP what it allocates when it runs."""
    config = headroom.nn.TransformerConfig(50, 32, 1, 2, 48, norm=norm, save=save)
    model = headroom.nn.Transformer(config)
    ids = torch.randint(50, (2, 16))

    def loss(model, ids):
        return model(ids).square().mean()

    plan = headroom.plan(model, None, ids, forward=loss)
    with headroom.memory.track(model, batch=ids, stacks=False) as tracked:
        for _ in range(2):
            loss(model, ids).backward()
            model.zero_grad()
    assert plan.peak_bytes == pytest.approx(tracked.peak_bytes, rel=0.001)


def test_masks_of_ones_mask_nothing():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(50, (2, 16))
    peaks = {}
    padded = torch.ones_like(ids)
    padded[0, 0] = 0
    for name, mask in {"none": None, "ones": torch.ones_like(ids), "padded": padded}.items():
        batch = {"input_ids": ids, "labels": ids}
        if mask is not None:
            batch["attention_mask"] = mask
        peaks[name] = headroom.plan(model, None, batch).peak_bytes
    assert peaks["none"] < peaks["ones"] == peaks["none"] + ids.numel() * 8 < peaks["padded"]


def test_masks_leave_transformers_as_it_was():
    utils = pytest.importorskip("transformers.masking_utils")
    before = dict(vars(utils))
    with masks_of({"attention_mask": torch.ones(2, 3)}):
        assert vars(utils) != before
    assert vars(utils) == before
    with masks_of(nn.Linear(2, 2)):
        pass


@pytest.mark.parametrize(
    "how, dtype",
    [
        ("fused", torch.float32),
        ("fused", torch.float16),
        ("rows", torch.float16),
        ("into_grad", torch.float32),
        ("evaluation", torch.float32),
        ("vocabulary", torch.float32),
    ],
    ids=str,
)
def test_workspace_of_the_linear_cross_entropy(how, dtype):
    """What it says is what the op allocates beside its results, in the pass that needs most."""
    hidden = torch.randn(71, 19).to(dtype).requires_grad_(how != "evaluation")
    weight = torch.randn(1009, 19).to(dtype).requires_grad_(how != "evaluation")
    target = torch.randint(1009, (71,))
    options = {
        "rows": {"reduction": "none"},
        "into_grad": {"accumulate_into_grad": True, "workspace": "32 KiB"},
        "vocabulary": {"mode": "vocabulary", "workspace": "32 KiB"},
    }

    def step(hidden, weight, target):
        loss = headroom.linear_cross_entropy(hidden, weight, target, **options.get(how, {})).sum()
        if loss.requires_grad:
            loss.backward()

    class Listener(TorchDispatchMode):
        def __init__(self, found):
            super().__init__()
            self.found = found

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name.startswith("headroom::linear_cross_entropy"):
                self.found.append((func, args, inside(func, args, kwargs or {}, "cpu")))
            return func(*args, **kwargs or {})

    weight.grad = torch.zeros_like(weight)
    found = []
    with Listener(found):
        step(hidden, weight, target)
    assert len(found) == (2 if how in ("rows", "into_grad") else 1)
    for func, args, sizes in found:
        with torch.no_grad():
            assert sum(size for size, _ in sizes) == measured(lambda f=func, a=args: (f(*a),))
