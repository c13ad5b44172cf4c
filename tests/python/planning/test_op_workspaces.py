"""What operations allocate inside: asked of the machine, and of Headroom's own library."""

from functools import partial

import headroom
import headroom.memory
import pytest
import torch
from headroom.functional import experts
from headroom.functional.linear import SLOW_ON_CPU
from headroom.memory.cpu import CpuRecorder
from headroom.nn.functional import mlp_block
from headroom.planning import op_workspaces as module
from headroom.planning import probe, products
from headroom.planning.masks import masks_of
from headroom.planning.op_workspaces import workspaces_of
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
            workspaces_of(convolution, (fake_x, fake_weight, *options), {}, "cpu"),
            workspaces_of(torch.ops.aten.mm.default, (fake_a, fake_a.t()), {}, "cpu"),
        ]
    assert [sum(size for size, _ in sizes) for sizes in found] == real
    assert workspaces_of(torch.ops.aten.mm.default, (a.float(), a.float().t()), {}, "cpu") == []


def attention(rows, columns, dtype=torch.float32, size=8):
    q = torch.randn(1, 2, rows, size).to(dtype)
    k, v = (torch.randn(1, 2, columns, size).to(dtype) for _ in range(2))
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
    "attention in 16 bits of odd sizes": lambda: attention(201, 71, torch.bfloat16, 9),
    "attention in 16 bits of few rows": lambda: attention(63, 80, torch.bfloat16),
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
        found = workspaces_of(
            func, tree_map_only(torch.Tensor, mode.from_tensor, args), kwargs, "cpu"
        )
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
            found = workspaces_of(func, given, kwargs, "cpu")
        assert sum(size for size, _ in found) == real > 0, func
    assert len(seen.calls) == 2


@pytest.mark.parametrize("save", ["L0", "L2"])
def test_workspace_of_experts_is_that_of_the_routing_that_takes_most(save):
    """It depends on the routing only by what oneDNN takes for products of so many rows."""
    most, planned = {}, {}
    gate_up, down = torch.randn(4, 32, 16).bfloat16(), torch.randn(4, 16, 16)
    for index in (torch.arange(80).view(40, 2) % 4, torch.zeros(40, 2, dtype=torch.int64)):
        with Seen() as seen:
            x = torch.randn(40, 16).bfloat16().requires_grad_()
            weight = torch.rand(40, 2)
            y = experts(x, index, weight, gate_up.requires_grad_(), down, save=save)
            y.square().sum().backward()
        for func, args, kwargs in seen.calls:
            real = measured(partial(func, *args, **kwargs))
            with FakeTensorMode() as mode:
                given = tree_map_only(torch.Tensor, mode.from_tensor, args)
                found = workspaces_of(func, given, kwargs, "cpu")
            most[func] = max(most.get(func, 0), real)
            assert planned.setdefault(func, sum(size for size, _ in found)) > 0
        assert len(seen.calls) == 2
    if (
        torch.bfloat16 in SLOW_ON_CPU
    ):  # where Headroom multiplies: oneDNN keeps some of what it takes
        assert most == planned


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
                self.found.append((func, args, workspaces_of(func, args, kwargs or {}, "cpu")))
            return func(*args, **kwargs or {})

    weight.grad = torch.zeros_like(weight)
    found = []
    with Listener(found):
        step(hidden, weight, target)
    assert len(found) == (2 if how in ("rows", "into_grad") else 1)
    for func, args, sizes in found:
        with torch.no_grad():
            assert sum(size for size, _ in sizes) == measured(lambda f=func, a=args: (f(*a),))


@pytest.mark.parametrize(
    "shape, dims, dtype, wanted",
    [
        # As the allocator of torch 2.15 saw them, on 132 multiprocessors of 2,048 threads.
        ((4096, 384), [0], torch.float32, [12 << 20, 12]),
        ((4096, 4096), [0], torch.float32, [128 << 20, 128]),
        ((1024, 512), [0], torch.float32, [4 << 20, 16]),
        ((2, 512, 512), [0, 1], torch.bfloat16, [4 << 20, 16]),
        ((1024, 512), [1], torch.float32, []),
        ((64, 1024), [0], torch.float32, []),
    ],
)
def test_sums_of_columns_on_cuda(shape, dims, dtype, wanted, monkeypatch):
    monkeypatch.setattr(module, "_multiprocessors", lambda: (132, 2048))
    x = torch.empty(shape, dtype=dtype, device="meta")
    found = workspaces_of(aten.sum.dim_IntList, (x, dims), {}, "cuda")
    assert [size for size, _ in found] == wanted
    assert workspaces_of(aten.mean.dim, (x, dims), {}, "cuda") == found
    assert workspaces_of(aten.sum.dim_IntList, (x, dims), {}, "cpu") == []


def heads_in_rows(heads, rows=512, size=64, dtype=torch.bfloat16):
    return torch.empty(2, rows, heads, size, dtype=dtype, device="meta").transpose(1, 2)


def sizes_of(call, *args):
    return [size for size, _ in workspaces_of(call, args, {}, "cuda")]


@pytest.mark.parametrize("heads", [8, 4])
def test_gradients_of_attention_on_cuda(heads):
    q, kv = heads_in_rows(8), heads_in_rows(heads)
    call = aten._scaled_dot_product_flash_attention_backward.default
    # Sums of rows, the gradient of the query, and those of all heads where keys are shared.
    wanted = [0, 32 << 10, 2 << 20] + [1 << 20, 1 << 20] * (heads < 8)  # behind the results, 0
    assert sizes_of(call, q, q, kv, kv, q) == wanted
    assert sizes_of(call, q.contiguous(), q, kv, kv, q) == [1 << 20, *wanted]  # copied


@pytest.mark.parametrize(
    "rows, size, dtype, wanted",
    [
        # As the allocator of torch 2.15 saw them: those of f32, in which products are summed and
        # the sums copied, are freed before the workspace is allocated.
        (128, 64, torch.float16, [4096, 262400]),
        (100, 64, torch.float16, [3200, 262400]),
        (130, 128, torch.float32, [532480, 4160, 4160, -4160, -532480, 1049088]),
        (128, 96, torch.float32, [393216, 4096, 4096, -4096, -393216, 524544]),
        (128, 64, torch.float32, [262144, 4096, 4096, -4096, -262144, 262400]),
    ],
)
def test_gradients_of_efficient_attention_on_cuda(rows, size, dtype, wanted):
    q = heads_in_rows(4, rows, size, dtype)
    call = aten._scaled_dot_product_efficient_attention_backward.default
    assert sizes_of(call, q, q, q, q) == [0, *wanted]  # behind the results
    copied = q.contiguous()
    assert sizes_of(call, copied, q, q, q) == [q.nbytes, 0, *wanted]


@pytest.mark.parametrize(
    "rows, size, dropout, wanted",
    [(128, 64, 0.0, []), (130, 128, 0.0, [8320, 1064960]), (130, 128, 0.1, [16])],
)
def test_few_rows_split_the_keys_of_flash_attention(rows, size, dropout, wanted):
    """As the allocator of torch 2.15 saw them, on 108 multiprocessors."""
    q = heads_in_rows(4, rows, size)
    assert sizes_of(aten._scaled_dot_product_flash_attention.default, q, q, q, dropout) == wanted


@pytest.mark.parametrize("capability, wanted", [((8, 0), []), ((9, 0), [512, 67584])])
def test_products_of_groups_on_cuda(capability, wanted, monkeypatch):
    """As the allocator of torch 2.15 saw them, on 132 multiprocessors."""
    monkeypatch.setattr(module, "capability", lambda: capability)
    monkeypatch.setattr(products, "capability", lambda: capability)
    monkeypatch.setattr(module, "_multiprocessors", lambda: (132, 2048))
    x = torch.empty(64, 16, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(4, 16, 32, dtype=torch.bfloat16, device="meta")
    call, out = aten._grouped_mm.default, torch.empty(64, 32, device="meta")
    assert sizes_of(call, x, weight) == wanted
    found = products.Products().scratch(call, (x, weight), {}, out)
    assert (found is None) == bool(wanted)


@pytest.mark.parametrize("norm", [headroom.nn.RMSNorm, headroom.nn.LayerNorm])
def test_sums_of_the_gradients_of_norms(norm):
    x, found = torch.randn(71, 19), []

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name.endswith("_norm_backward"):
                found.append((func, args, workspaces_of(func, args, kwargs or {}, "cpu")))
            return func(*args, **kwargs or {})

    with Listener():
        norm(19)(x).backward(torch.randn(71, 19))
    ((func, args, sizes),) = found
    assert [size for size, _ in sizes] == [measured(lambda: func(*args))]
    torch.library.opcheck(torch.ops.headroom.norm_workspace.default, (71, 19, True))
