"""Plans for a GPU on a machine that needs none: kernels are those of a GPU wherever they run, and
everything else takes the bytes that it takes on the CPU."""

import functools
import sys
from dataclasses import replace
from pathlib import Path

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom.nn import flash
from headroom.patching import parts
from headroom.planning import cuda_view
from headroom.planning.recorder import Recorder
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks._plan_cases import cases

BF16 = torch.bfloat16
WIDTH, HEADS = 48, 3


class Block(nn.Module):
    """A block with what torch chooses kernels for."""

    def __init__(self, drop, attends):
        super().__init__()
        self.drop, self.attends = drop, attends
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        h = self.norm(x)
        if self.attends:
            q, k, v = self.qkv(h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = F.gelu(self.up(h))
        return x + self.down(F.dropout(h, 0.1) if self.drop else h)


class Blocks(nn.Module):
    def __init__(self, drop, attends, reentrant=None):
        super().__init__()
        self.first, self.reentrant = nn.Linear(WIDTH, WIDTH), reentrant
        self.blocks = nn.ModuleList(Block(drop, attends) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x.float().square().mean()


def precise(model, x, precision):
    """Returns a model and its batch in a precision, and the options of a plan."""
    if precision == "bfloat16":
        return model.bfloat16(), x.bfloat16(), {}
    return model, x, {} if precision == "float32" else {"amp": BF16}


def ops_of(plan):
    return {a.op.removeprefix("aten::") for a in plan.timeline.allocations if a.op}


@pytest.mark.parametrize("how", ["none", "reentrant", "non-reentrant", "every"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("drop, attends", [(True, False), (False, True), (True, True)])
def test_what_is_recomputed_takes_the_same_kernels(how, drop, attends, precision):
    reentrant = {"reentrant": True, "non-reentrant": False}.get(how)
    model, x, options = precise(
        Blocks(drop, attends, reentrant), torch.randn(3, 50, WIDTH), precision
    )
    if how == "every":
        options["checkpoint_every"] = 1
    optimizer = torch.optim.SGD(model.parameters())
    plan = headroom.plan(model, optimizer, x, device="cuda", **options)
    wanted = {"native_dropout", "native_dropout_backward"} if drop else set()
    kernel = "efficient" if precision == "float32" else "flash"
    if attends:
        name = f"_scaled_dot_product_{kernel}_attention"
        wanted |= {name, f"{name}_backward"}
    found = ops_of(plan)
    assert {op for op in found if "dropout" in op or "attention" in op} == wanted
    assert not drop or "bernoulli_" not in found
    if how != "none":
        plain = headroom.plan(
            precise(Blocks(drop, attends), x, precision)[0], None, x, device="cuda",
            amp=options.get("amp"),
        )  # fmt: skip
        most = plan.timeline.most_by_kind["activations"]
        assert most < 0.5 * plain.timeline.most_by_kind["activations"]


def test_a_leaf_with_the_number_of_a_dead_one():
    """The engine would hear of a device that no machine has, and end the process."""
    recorder = Recorder(torch.device("cuda"), is_lying=True)
    recorder.has_autocast = True
    known = recorder._accumulators
    with FakeTensorMode(), recorder:
        x, y = (torch.empty(3, requires_grad=True) for _ in range(2))
        with torch._C._AutoDispatchBelowAutograd():  # as when the engine asks in an operation
            recorder._device_for_cpp(x)
        known[id(y)] = known.pop(id(x))  # as if y had come after x
        recorder._device_for_cpp(y)
    _, node = known[id(y)]
    assert torch.autograd.graph.get_gradient_edge(y).node is node.next_functions[0][0]


class Attending(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.masked = masked

    def forward(self, x):
        mask = torch.zeros(x.shape[1], x.shape[1], dtype=torch.bool) if self.masked else None
        return self.attention(x, x, x, need_weights=False, attn_mask=mask)[0].float().mean()


class Encoding(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True)

    def forward(self, x):
        return self.layer(x).float().mean()


@pytest.mark.parametrize(
    "make", [functools.partial(Attending, False), functools.partial(Attending, True), Encoding]
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_attention_of_modules_of_torch(make, precision):
    """They call functions that leave out modes."""
    model, x, options = precise(make(), torch.randn(2, 300, 64), precision)
    plan = headroom.plan(model, None, x, device="cuda", **options)
    masked = getattr(model, "masked", False)
    kernel = "efficient" if precision == "float32" or masked else "flash"
    found = ops_of(plan)
    assert f"_scaled_dot_product_{kernel}_attention" in found
    assert "_safe_softmax" not in found and "bernoulli_" not in found
    scores = 2 * 4 * 300 * 300 * 2
    assert masked or all(a.bytes < scores for a in plan.timeline.allocations)


class Wide(nn.Module):
    """Attention whose values are wider than its queries, with fewer heads for keys and values."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.width = heads, width
        self.q, self.k, self.v = (nn.Linear(64, n) for n in (64, 16 * heads, width * heads))

    def forward(self, x):
        q = self.q(x).unflatten(-1, (4, 16)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (self.heads, 16)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (self.heads, self.width)).transpose(1, 2)
        shares = self.heads < 4
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=shares).float().square().mean()


@pytest.mark.parametrize(
    "dtype, width, heads, capability, kernel",
    [
        (torch.bfloat16, 32, 4, (8, 0), "efficient"),  # flash attention wants one width
        (torch.bfloat16, 12, 4, (8, 0), None),  # of no 16 bytes
        (torch.bfloat16, 16, 2, (8, 0), "flash"),
        (torch.float32, 16, 2, (8, 0), "efficient"),
        (torch.float32, 7, 4, (8, 0), None),
        (torch.float64, 16, 4, (8, 0), None),
        (torch.float16, 16, 4, (7, 5), "efficient"),
        (torch.bfloat16, 16, 4, (7, 5), None),
        (torch.float32, 7, 4, (7, 5), "efficient"),
    ],
)
def test_kernels_of_widths_and_shared_heads(dtype, width, heads, capability, kernel, monkeypatch):
    """As torch's own choice on a device of software."""
    x = torch.randn(2, 30, 64, dtype=dtype)
    monkeypatch.setattr(cuda_view, "_efficient_shares_heads", lambda: True)
    monkeypatch.setattr(cuda_view, "capability", lambda: capability)
    found = ops_of(headroom.plan(Wide(width, heads).to(dtype), None, x, device="cuda"))
    chosen = {op for op in found if op.startswith("_scaled_dot_product")}
    name = f"_scaled_dot_product_{kernel}_attention"
    assert chosen == ({name, f"{name}_backward"} if kernel else set())
    assert bool(kernel) != bool({"_safe_softmax", "_softmax"} & found)


def test_flash_attention_is_causal_only_of_as_many_keys_as_queries():
    def attend(model, x):
        q = model(x).unflatten(-1, (4, 16)).transpose(1, 2)
        return F.scaled_dot_product_attention(q[:, :, :10], q, q, is_causal=True).sum()

    model, x = nn.Linear(64, 64).to(BF16), torch.randn(2, 30, 64, dtype=BF16)
    found = ops_of(headroom.plan(model, None, x, forward=attend, device="cuda"))
    assert "_scaled_dot_product_efficient_attention" in found


def test_an_older_torch_multiplies_where_heads_are_shared(monkeypatch):
    monkeypatch.setattr(cuda_view, "_efficient_shares_heads", lambda: False)
    found = ops_of(headroom.plan(Wide(16, 2), None, torch.randn(2, 30, 64), device="cuda"))
    assert not any(op.startswith("_scaled_dot_product") for op in found)


def test_whether_heads_are_shared_is_asked_of_torch():
    gqa = "Memory-efficient attention also supports"  # its documentation, where it does
    assert cuda_view._efficient_shares_heads() == (gqa in F.scaled_dot_product_attention.__doc__)


def test_kernels_of_tensors_stay_as_they_are():
    """Also while a plan is made: its functions are asked of fakes alone."""
    x = torch.randn(5, 4, 9, 8)
    wanted = F.scaled_dot_product_attention(x, x, x)
    seen = []

    class Watching(nn.Linear):
        def forward(self, given):
            with torch.utils._python_dispatch._disable_current_modes():
                seen.append(F.scaled_dot_product_attention(x.data, x.data, x.data, scale=None))
            return super().forward(given).mean()

    for device in ("cpu", "cuda"):
        headroom.plan(Watching(3, 3), None, torch.randn(2, 3), device=device)
    assert len(seen) == 4 and all(torch.equal(y, wanted) for y in seen)
    names = "scaled_dot_product_attention", "dropout", "_scaled_dot_product_attention_math"
    for name in names:
        for key in ("AutogradCUDA", "AutogradCPU"):
            assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


def test_autocast_casts_what_a_backward_pass_computes_again():
    """As ``custom_bwd`` does: with autocast and without gradients."""

    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda")
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            assert torch.mm(x, weight).dtype == BF16
            return grad @ weight.t(), x.t() @ grad

    model = nn.Linear(70, 70, bias=False)
    plan = headroom.plan(
        model, None, torch.randn(9, 70), amp=BF16, device="cuda",
        forward=lambda m, x: Product.apply(Product.apply(x, m.weight), m.weight).float().mean(),
    )  # fmt: skip
    again = [a for a in plan.timeline.allocations if a.op == "aten::mm" and a.phase == "backward"]
    assert again and all(a.bytes in (2 * 9 * 70, 2 * 70 * 70) for a in again)


# ---- every model of the benchmark ---------------------------------------------------------------


@pytest.mark.parametrize(
    "loss, wanted",
    [
        # As the allocator of torch 2.15 saw them, in elements of the logits.
        (lambda x, y: F.cross_entropy(x.float(), y), [("_to_copy", 4), ("_log_softmax", 4)]),
        (F.cross_entropy, [("_log_softmax", 2), ("_to_copy", 4)]),
        (lambda x, y: F.softmax(x, -1)[0, 0], [("_to_copy", 4), ("_softmax", 4)]),
        (lambda x, y: F.softmax(x.float(), -1)[0, 0], [("_to_copy", 4), ("_softmax", 4)]),
    ],
)
def test_autocast_copies_what_it_converts(loss, wanted):
    """Such operations ask what device numbers are on, and would copy them to another."""

    def planned(model, batch):
        with torch.autocast("cuda", BF16):
            return loss(model(batch[0]), batch[1])

    batch = torch.randn(16, 8), torch.zeros(16, dtype=torch.int64)
    plan = headroom.plan(nn.Linear(8, 64), None, batch, forward=planned, device="cuda")
    made = [a for a in plan.timeline.allocations if (a.step, a.phase) == (1, "forward")]
    sizes = {2 * 16 * 64: 2, 4 * 16 * 64: 4}
    found = [(a.op.removeprefix("aten::"), sizes[a.bytes]) for a in made if a.bytes in sizes]
    assert found == [("addmm", 2), *wanted]


class Nested(nn.Module):
    """Modules whose own parameters are behind those of their children, and before."""

    def __init__(self, depth=2):
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.ones(depth)), nn.Parameter(torch.ones(5 + depth))
        self.register_buffer("shift", torch.ones(10 + depth))
        if depth:
            self.below = Nested(depth - 1)

    def forward(self, x):
        x = x * self.scale.sum() + self.bias.sum() + self.shift.sum()
        return self.below(x) if hasattr(self, "below") else x.sum()


def test_tensors_are_placed_as_torch_moves_them():
    model, x, moved = Nested(), torch.ones(100), []
    model.double()._apply(lambda tensor: moved.append(tensor.nbytes) or tensor)
    plan = headroom.plan(model, None, x, device="cuda")
    held = [a.bytes for a in plan.timeline.allocations if a.start < plan.timeline.spans[0].start]
    assert held == [*filter(None, moved), x.nbytes]


@pytest.mark.parametrize("capturable, drop", [(False, 0.1), (True, 0.0)])
def test_numbers_on_the_host_take_no_memory_of_the_device(capturable, drop):
    """Such as the counts of torch's optimizers, and the seeds of what attention drops."""
    layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=drop, batch_first=True)
    make = functools.partial(torch.optim.AdamW, lr=1e-3, capturable=capturable)
    forward = lambda model, x: model(x).sum()  # noqa: E731
    plan = headroom.plan(layer, make, torch.randn(2, 16, 64), forward=forward, device="cuda")
    made = plan.timeline.allocations
    counts = [a for a in made if a.kind == "optimizer_state" and a.bytes == 4]
    seeds = [a for a in made if "efficient_attention" in a.op and a.bytes == 8]
    assert len(counts) == len([*layer.parameters()]) * capturable
    assert len(seeds) == (0 if drop else 4)  # of two steps


def _models():
    """The cases that have models of their own, as plain steps."""
    found = {}
    for case in cases():
        options = getattr(case.model, "keywords", {})
        key = getattr(case.model, "func", case.model), getattr(case.model, "args", ())
        key = (
            *key,
            *sorted((k, v) for k, v in options.items() if k not in ("save", "dtype", "every")),
        )
        if case.shard is None and key not in found:
            found[key] = replace(case, amp=None, accumulation=1, release=False)
    return list(found.values())


LEVELS = "L0", "L1", "L2", "L3", "L4", "L5"
TECHNIQUES = {
    "plain": {},
    "micro-batches": {"accumulation": 2},
    "accumulator": {"accumulation": 2, "accumulator": True},
    "release": {"release": 1 << 16},
    "clip": {"max_grad_norm": 1.0},
    "checkpoint_every": {"checkpoint_every": 1},
    **{level: {} for level in LEVELS},
}
PRECISIONS = "float32", "autocast", "float16", "bfloat16"


def _combinations():
    """Returns rows in which each model has half of the techniques, and each technique half of the
    models. Precisions take turns, so that each model has all of them, and so has each technique."""
    models, techniques = _models(), list(TECHNIQUES)
    rows = [
        (models[i], techniques[(i + j) % len(techniques)], PRECISIONS[(i + j // 2) % 4])
        for j in range(0, len(techniques), 2)
        for i in range(len(models))
    ]
    return [pytest.param(*row, id="-".join((row[0].name, *row[1:]))) for row in rows]


def _planned(case, technique, precision, device, drops=True):
    torch.manual_seed(0)
    model, batch, options = case.model(), case.batch(), dict(TECHNIQUES[technique])
    for module in model.modules():
        if not drops and isinstance(module, nn.Dropout):
            module.p = 0.0
        elif not drops and isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    if precision == "bfloat16":
        headroom.cast_model(model, BF16)
        batch = tuple(x.to(BF16) if x.is_floating_point() else x for x in batch)
    elif precision != "float32":
        options["amp"] = BF16 if precision == "autocast" else torch.float16
        options["scaler"] = precision == "float16"
    if technique in LEVELS:
        if any(isinstance(module, headroom.nn.Block) for module in model.modules()):
            options["save"] = technique
        else:
            headroom.patch(model, save=technique)
    optimizer = functools.partial(headroom.optim.AdamW8bit, lr=1e-3)
    return headroom.plan(model, optimizer, batch, forward=case.loss, device=device, **options)


def _is_left_out(case, technique):
    """Whether a model has nothing that a technique takes."""
    if case.name == "tied-mlp":  # it has no blocks
        return technique in (*LEVELS, "checkpoint_every")
    # Other blocks can only be checkpointed.
    return technique in LEVELS[1:5] and case.name.startswith(("resnet", "vit", "moe"))


@pytest.mark.parametrize("case, technique, precision", _combinations())
def test_models_of_the_benchmark(case, technique, precision, monkeypatch):
    """Each is planned, and with the kernels that both devices have it keeps on one what it keeps on
    the other."""
    if _is_left_out(case, technique):
        with pytest.raises(ValueError, match="headroom.patch|no repeated blocks"):
            _planned(case, technique, precision, "cuda")
        return
    plan = _planned(case, technique, precision, "cuda")
    found = ops_of(plan)
    assert not any("for_cpu" in op or "mkldnn" in op for op in found)
    eager = case.name == "hf-gpt2-eager"
    assert eager or "_safe_softmax" not in found or precision == "float32"
    for module in (flash, parts):  # that of a GPU wants heads that are repeated before
        monkeypatch.setattr(module, "takes_groups", lambda q, mask: True)
    with sdpa_kernel(SDPBackend.MATH):
        cuda, cpu = (_planned(case, technique, precision, x, False) for x in ("cuda", "cpu"))
    most = [x.timeline.most_by_kind for x in (cuda, cpu)]
    kinds = ["parameters", "buffers", "gradients", "optimizer_state"]
    if technique == "release":  # they overlap in the order in which products of a device end
        kinds.remove("gradients")
        sums = [
            sum(a.bytes for a in x.timeline.allocations if a.kind == "gradients")
            for x in (cuda, cpu)
        ]
        assert sums[0] == sums[1]
    # Beside a GPU, torch's optimizers count their steps on the host.
    counts = [a.bytes for a in cpu.timeline.allocations if a.op == "step" and a.bytes == 4]
    for kind in kinds:
        left_out = (0, sum(counts)) if kind == "optimizer_state" else (0,)
        assert most[1][kind] - most[0][kind] in left_out, kind
    if precision in ("float32", "bfloat16"):  # autocast has lists for each device
        states = sum(  # that checkpoints of torch keep of the generator of the CPU
            a.bytes
            for a in cpu.timeline.allocations
            if a.op == "torch.get_rng_state" and a.step == 0
        )
        assert 0 <= most[1]["activations"] - most[0]["activations"] <= states
        products = [a.bytes for a in cuda.timeline.allocations if "softmax_backward" in str(a.op)]
        assert cuda.peak_bytes <= cpu.peak_bytes + max(products, default=0)  # only CUDA's makes
        assert cpu.peak_bytes <= 1.1 * (cuda.peak_bytes + states)


@pytest.mark.slow
def test_advice_for_a_gpu_has_checkpoints():
    """They were left out when they could not be planned."""
    x = torch.randn(3, 2000, WIDTH)
    plan = headroom.plan(Blocks(True, True), torch.optim.AdamW, x, device="cuda", amp=BF16)
    names = {advice.name for advice in plan.advice()}
    assert "checkpoint_every(model, 1)" in names
    case = next(case for case in cases() if case.name == "llama-fused")
    plan = headroom.plan(
        case.model(), torch.optim.AdamW, case.batch(), forward=case.loss, device="cuda", amp=BF16
    )
    names = {advice.name for advice in plan.advice()}
    assert {f"save={level!r} in all blocks" for level in ("L2", "L3", "L4", "L5")} <= names
