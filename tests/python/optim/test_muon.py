"""Muon and Muon8bit in one process: against torch's and the exact polar factor, which parameters
they step and how packed ones are split, states, and refusals."""

import copy
import functools
import itertools

import headroom
import pytest
import torch
from headroom.functional.newton_schulz import newton_schulz_workspace
from headroom.optim import AdamW, Muon, Muon8bit
from headroom.optim.muon import muon as muon_module
from headroom.optim.muon.matrices import newton_schulz_work, parts_of
from headroom.optim.muon.rule import iterations
from torch import nn

from helpers.compiled import compile_step

SHAPES = [(64, 32), (32, 64), (48, 48), (64, 32), (128, 96)]
BOTH = pytest.mark.parametrize("cls", [Muon, Muon8bit])


def matrices(dtype=torch.float32, shapes=SHAPES):
    random = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for shape in shapes]


def set_grads(step, *lists):
    for owners in lists:
        random = torch.Generator().manual_seed(100 + step)
        for param in owners:
            param.grad = torch.randn(param.shape, generator=random).to(param.dtype)


def run(optimizer, owners, steps):
    for step in steps:
        set_grads(step, owners)
        optimizer.step()


def orthogonalized(u, ns_coefficients, steps, dtype=torch.bfloat16):
    """Newton-Schulz on one matrix, as in Keller Jordan's post."""
    x = u.to(dtype) / max(float(u.norm()), 1e-7)
    x = x.T if u.shape[0] > u.shape[1] else x
    for a, b, c in iterations(ns_coefficients, steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if u.shape[0] > u.shape[1] else x


# ---- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.02},
        {"lr": 0.01, "adjust_lr_fn": "match_rms_adamw", "nesterov": False, "momentum": 0.8},
        {"lr": 0.01, "adjust_lr_fn": "spectral_unclamped", "ns_steps": 3, "weight_decay": 0.0},
    ],
)
def test_steps_are_those_of_torch(options):
    """Moments bit for bit, and what was made orthogonal within the rounding of bfloat16."""
    ours, theirs, before = matrices(), matrices(), matrices()
    optimizer, reference = Muon(ours, **options), torch.optim.Muon(theirs, **options)
    run(optimizer, ours, range(4))
    run(reference, theirs, range(4))
    for param, other, first in zip(ours, theirs, before):
        moment = optimizer.state[param]["momentum_buffer"]
        assert torch.equal(moment, reference.state[other]["momentum_buffer"])
        moved = (other - first).norm()
        assert (param - other).norm() < 0.02 * moved


def exact_factor(u):
    left, _, right = torch.linalg.svd(u.double(), full_matrices=False)
    return left @ right


@BOTH
@pytest.mark.parametrize("variant", ["standard", "gram"])
def test_one_step_goes_along_the_exact_polar_factor(cls, variant):
    """Of the gradient: 12 iterations that converge leave the error of the arithmetic alone."""
    owners = matrices()
    optimizer = cls(
        owners,
        lr=1.0,
        weight_decay=0.0,
        momentum=0.0,
        ns_dtype="float32",
        ns_coefficients=[(3.4445, -4.7750, 2.0315)] * 5 + [(1.875, -1.25, 0.375)] * 7,
        ns_steps=12,
        variant=variant,
        adjust_lr_fn="spectral_unclamped",
    )
    set_grads(0, owners)
    before = [param.detach().clone() for param in owners]
    optimizer.step()
    for param, first in zip(owners, before):
        rows, cols = param.shape
        step = (first - param) / (rows / cols) ** 0.5
        torch.testing.assert_close(step.double(), exact_factor(param.grad), rtol=0, atol=2e-4)


@BOTH
@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e6])
def test_products_in_float16_take_gradients_of_any_size(cls, size):
    """A step is that of gradients near 1, also where these are 0 or infinite in float16."""
    steps = []
    for factor in (1.0, size):
        owners = matrices()
        optimizer = cls(owners, lr=1.0, weight_decay=0.0, variant="gram", eps=1e-30)
        set_grads(0, owners)
        for param in owners:
            param.grad *= factor
        before = [param.detach().clone() for param in owners]
        optimizer.step()
        steps.append([first - param.detach() for param, first in zip(owners, before)])
    for moved, other in zip(*steps):
        assert (other - moved).norm() < 0.03 * moved.norm()


@pytest.mark.parametrize("name", ["jordan", "you_jiacheng", "polar_express"])
def test_coefficients_by_name(name):
    """All bring the singular values near 1, and each gives its own polynomials."""
    owners = matrices()
    optimizer = Muon(owners, lr=1.0, weight_decay=0.0, momentum=0.0, ns_coefficients=name)
    set_grads(0, owners)
    before = [param.detach().clone() for param in owners]
    optimizer.step()
    for param, first in zip(owners, before):
        scale = max(1.0, param.shape[0] / param.shape[1]) ** 0.5
        step = (first - param).detach() / scale
        values = torch.linalg.svdvals(step)
        assert 0.3 < values.min() and values.max() < 1.3
        want = orthogonalized(param.grad, name, 5, torch.float64)
        theirs = orthogonalized(param.grad, name, 5)
        assert (step - want).norm() <= 2 * (theirs - want).norm()


def test_normuon_gives_rows_one_size():
    """After the first step: all rows of one norm, and the norm of the matrix as it was."""
    (owner,) = matrices(shapes=[(16, 48)])
    optimizer = Muon([owner], lr=1.0, weight_decay=0.0, normuon=0.95)
    plain = matrices(shapes=[(16, 48)])
    reference = Muon(plain, lr=1.0, weight_decay=0.0)
    before = owner.detach().clone()
    run(optimizer, [owner], range(1))
    run(reference, plain, range(1))
    moved, other = (before - owner).detach(), (before - plain[0]).detach()
    rows = moved.norm(dim=1)
    torch.testing.assert_close(rows, rows.mean().expand(16), rtol=1e-3, atol=0)
    torch.testing.assert_close(moved.norm(), other.norm(), rtol=1e-3, atol=0)
    assert optimizer.state[owner]["row_var"].shape == (16,)


def test_less_workspace_is_the_same_step():
    steps = []
    for workspace in (0, "1 GiB"):
        owners = matrices()
        run(Muon(owners, workspace=workspace), owners, range(2))
        steps.append(owners)
    for param, other in zip(*steps):
        torch.testing.assert_close(param, other, rtol=1e-3, atol=1e-5)


# ---- which parameters ----------------------------------------------------------------------------


class Attention(nn.Module):
    heads, kv_heads, head_dim = 4, 2, 8

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 64)
        self.out = nn.Linear(32, 32)


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attn": Attention(),
                    "norm": nn.LayerNorm(32),
                    "gate_up": nn.Linear(32, 96, bias=False),
                    "down": nn.Linear(48, 32, bias=False),
                }
            )
            for _ in range(2)
        )
        self.conv = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(32, 50, bias=False)


def names_of(optimizer, use_muon):
    groups = [group for group in optimizer.param_groups if group["use_muon"] is use_muon]
    return {name for group in groups for name in group["param_names"]}


@BOTH
@pytest.mark.parametrize("by_names", [False, True])
def test_hidden_matrices_are_chosen(cls, by_names, capsys):
    muon_module._printed.clear()
    model = Gpt()
    optimizer = cls(list(model.named_parameters()) if by_names else model, adamw={"lr": 3e-4})
    hidden = {f"blocks.{i}.{name}.weight" for i in range(2) for name in ("attn.qkv", "attn.out")}
    hidden |= {f"blocks.{i}.{name}.weight" for i in range(2) for name in ("gate_up", "down")}
    assert names_of(optimizer, True) == hidden
    assert names_of(optimizer, False) == {name for name, _ in model.named_parameters()} - hidden
    for group in optimizer.param_groups:
        expected = (1e-3, 1e-7) if group["use_muon"] else (3e-4, 1e-8)
        assert (group["lr"], group["eps"]) == expected
    splits = {
        name: group["split"] for group in optimizer.param_groups for name in group["param_names"]
    }
    assert splits["blocks.0.gate_up.weight"] == 2
    assert splits["blocks.0.attn.qkv.weight"] == (None if by_names else (32, 16, 16))
    report = capsys.readouterr().err
    assert f"{cls.__name__} chose" in report and str(optimizer.choice) in report
    assert "AdamW embeddings: 1,600 elements in 1 tensor (wte.weight)" in report
    assert "AdamW heads: 1,600 elements" in report and "convolutions: 216" in report


def test_tied_heads_are_embeddings_and_convolutions_may_be_chosen():
    model = Gpt()
    model.head.weight = model.wte.weight
    optimizer = Muon(model, convolutions=True)
    assert "conv.weight" in names_of(optimizer, True)
    assert "wte.weight" in names_of(optimizer, False)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    before = model.conv.weight.detach().clone()
    optimizer.step()
    moved = (model.conv.weight - before).flatten(1)
    assert moved.norm() > 0


def test_other_parameters_are_stepped_as_adamw_does():
    model, other = Gpt(), Gpt()
    other.load_state_dict(model.state_dict())
    optimizer = Muon(model, adamw={"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.2})
    reference = AdamW(other.parameters(), lr=1e-2, betas=(0.8, 0.9), weight_decay=0.2)
    for step in range(3):
        set_grads(step, list(model.parameters()), list(other.parameters()))
        optimizer.step()
        reference.step()
    chosen, own = names_of(optimizer, False), dict(model.named_parameters())
    for name, param in other.named_parameters():
        assert torch.equal(param, own[name]) is (name in chosen)


@BOTH
def test_packed_matrices_are_stepped_as_their_parts(cls):
    """Bit for bit up to the rounding of products: rows, columns, experts, and convolutions."""
    shapes = [
        ((96, 64), 3),
        ((128, 64), (64, 32, 32)),
        ((32, 96), (32, 32, 32)),  # the columns of a transposed weight
        ((3, 32, 64), 2),
        ((2, 32, 64), (16, 48)),
    ]
    for (shape, split), normuon in itertools.product(shapes, (None, 0.5)):
        packed = nn.Parameter(torch.randn(shape))
        rows, blocks = parts_of(shape, split), []
        for matrix in packed.detach().unbind(0) if packed.dim() == 3 else [packed.detach()]:
            blocks += [part.of(matrix) for part in rows]
        parts = [nn.Parameter(block.clone()) for block in blocks]
        packed.grad = torch.randn(shape)
        grads = packed.grad.unbind(0) if packed.dim() == 3 else [packed.grad]
        for part, grad in zip(parts, [p.of(g) for g in grads for p in rows]):
            part.grad = grad.contiguous()
        options = {"lr": 0.1, "normuon": normuon}
        options |= {"min_8bit_size": 0} if cls is Muon8bit else {}
        together = cls([{"params": [packed], "split": split, "use_muon": True}], **options)
        apart = cls(parts, **options)
        for _ in range(2):
            together.step()
            apart.step()
        bound = 2e-3 if cls is Muon else 6e-3  # codes beside float32, where columns are split
        for part, block in zip(parts, blocks):
            torch.testing.assert_close(block, part.detach(), rtol=2e-3, atol=bound)
        if normuon is not None:
            means = torch.cat([apart.state[part]["row_var"] for part in parts])
            own = together.state[packed]["row_var"].flatten()
            torch.testing.assert_close(own, means, rtol=0.05 if cls is Muon else 0.3, atol=0)


@pytest.mark.parametrize(
    "layer, gates",
    [(nn.LSTM(16, 32, proj_size=8), 4), (nn.LSTMCell(16, 32), 4), (nn.GRUCell(16, 32), 3)],
    ids=["LSTM", "LSTMCell", "GRUCell"],
)
def test_gates_are_split_and_projections_are_none(layer, gates):
    splits = Muon(layer).choice.splits
    names = {
        name for name, _ in layer.named_parameters() if name.startswith(("weight_ih", "weight_hh"))
    }
    assert len(names) == 2 and splits == dict.fromkeys(names, gates)


def test_an_embedding_called_shared():
    """That of encoders and decoders, by its name; a layer of experts may be called so, too."""
    named = {
        name: nn.Parameter(torch.randn(40, 16)) for name in ("shared.weight", "model.shared.weight")
    }
    named |= {"layers.0.shared.weight": nn.Parameter(torch.randn(16, 16))}
    assert names_of(Muon(named.items()), False) == {"shared.weight", "model.shared.weight"}
    assert names_of(Muon(nn.ModuleDict({"shared": nn.Linear(16, 40)})), True) == {"shared.weight"}


def test_more_steps_of_polar_express_stay_at_one():
    """Each of the paper's polynomials, and the last one again, for singular values from 0.001."""
    values = torch.logspace(-3, 0, 200, dtype=torch.float64)
    errors = []
    for steps in range(1, 13):
        x = values
        for a, b, c in iterations("polar_express", steps):
            x = a * x + b * x**3 + c * x**5
        errors.append((x - 1).abs().max().item())
    assert errors[:8] == sorted(errors[:8], reverse=True)
    assert errors[4] < 0.28 and max(errors[7:]) < 1e-6


@pytest.mark.parametrize("split", [{"qvk": 3}, {"wte": 2}, {"attn.qkv": 2, "kv": 2}], ids=str)
def test_a_split_of_no_matrix_is_refused(split):
    """Also of a matrix that AdamW steps."""
    with pytest.raises(ValueError, match=f"split has '{[*split][-1]}', and no name of a matrix"):
        Muon(Gpt(), split=split)
    optimizer = Muon(Gpt(), split={"attn.qkv": None, "qkv.weight": 2})
    assert not any("qkv" in name for name in optimizer.choice.splits)
    optimizer.add_param_group({"params": [("more", nn.Parameter(torch.randn(8, 8)))]})


class Conv1D(nn.Module):
    """That of transformers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 96))


@BOTH
def test_rows_that_are_inputs(cls):
    """The learning rate is that of the matrix of a Linear, which is the transposed one."""
    model, other = nn.ModuleDict({"up": Conv1D()}), nn.ModuleDict({"up": nn.Linear(32, 96)})
    other["up"].weight.data = model["up"].weight.detach().T.clone()
    optimizer = cls(model, lr=0.1)
    assert optimizer.param_groups[0]["transposed"]
    reference = cls([other["up"].weight], lr=0.1)
    model["up"].weight.grad = torch.randn(32, 96)
    other["up"].weight.grad = model["up"].weight.grad.T.contiguous()
    optimizer.step()
    reference.step()
    own, wanted = model["up"].weight.T, other["up"].weight
    torch.testing.assert_close(own, wanted, rtol=0, atol=2e-3)


class Experts(nn.Module):
    """Those of transformers."""

    def __init__(self, is_transposed=False, is_concatenated=True):
        super().__init__()
        self.is_transposed, self.is_concatenated = is_transposed, is_concatenated
        shape = (2, 16, 48) if is_transposed else (2, 48, 16)
        self.gate_up_proj = nn.Parameter(torch.randn(shape))


@pytest.mark.parametrize(
    "layout, split, transposed",
    [
        ((False, True), 2, False),
        ((True, True), (24, 24), True),
        ((True, False), (24, (1, 1)), True),
        ((False, False), (24, (1, 1)), False),
    ],
)
def test_experts_are_split(layout, split, transposed):
    (group,) = Muon(Experts(*layout)).param_groups
    assert (group["split"], group["transposed"]) == (split, transposed)


def test_groups_may_have_their_model():
    """Whose modules say what names do not."""
    model = nn.ModuleDict({"symbols": nn.Embedding(50, 32), "inner": nn.Linear(32, 32)})
    named = list(model.named_parameters())
    optimizer = Muon([{"params": named, "model": model, "weight_decay": 0.0}])
    assert names_of(optimizer, True) == {"inner.weight"}
    assert all("model" not in group for group in optimizer.param_groups)


def test_groups_and_bare_parameters():
    model = Gpt()
    hidden, rest = [model.blocks[0]["down"].weight], [model.conv.bias]
    optimizer = Muon(
        [{"params": hidden, "use_muon": True, "lr": 0.5}, {"params": rest, "use_muon": False}]
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1e-3]
    optimizer.add_param_group({"params": [model.blocks[1]["down"].weight]})
    assert optimizer.param_groups[-1]["use_muon"] and optimizer.choice is None


BAD = {
    "a whole model without names": (
        lambda: Muon(Gpt().parameters()),
        "parameters without names do not say which are hidden matrices",
    ),
    "a vector": (
        lambda: Muon([{"params": [nn.Parameter(torch.ones(3))], "use_muon": True}]),
        r"Muon steps matrices, and a parameter has shape \[3\].* FSDP1 flattened",
    ),
    "a flat parameter": (
        lambda: Muon([("_flat_param", nn.Parameter(torch.ones(3)))]),
        "FSDP1 keeps parameters in flat shards: '_flat_param' is of one",
    ),
    "coefficients": (lambda: Muon(matrices(), ns_coefficients="newton"), "ns_coefficients is"),
    "two numbers": (lambda: Muon(matrices(), ns_coefficients=(1, 2)), "three numbers"),
    "steps": (lambda: Muon(matrices(), ns_steps=100), "must be less than 100"),
    "adjust": (lambda: Muon(matrices(), adjust_lr_fn="other"), "adjust_lr_fn is 'other'"),
    "gram in bfloat16": (
        lambda: Muon(matrices(), variant="gram", ns_dtype="bfloat16"),
        "bfloat16 has too few bits",
    ),
    "split": (
        lambda: Muon([{"params": matrices(), "use_muon": True, "split": (5, 7)}]),
        r"split=\(5, 7\) adds up to 12",
    ),
    "normuon": (lambda: Muon(matrices(), normuon=1.0), r"normuon must be in \[0, 1\)"),
    "skipped elements": (
        lambda: Muon8bit(matrices(), nonfinite="skip_element"),
        "nonfinite must be one of",
    ),
    "adamw": (lambda: Muon(matrices(), adamw={"momentum": 0.1}), "no option of AdamW's groups"),
}


@pytest.mark.parametrize("make, words", BAD.values(), ids=BAD)
def test_what_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_matrix_that_was_flattened_later_is_refused():
    (owner,) = matrices(shapes=[(8, 8)])
    optimizer = Muon([owner])
    owner.data = torch.zeros(64)
    owner.grad = torch.zeros(64)
    with pytest.raises(RuntimeError, match="FSDP1 keeps parameters in flat shards"):
        optimizer.step()


def test_no_step_is_part_of_a_graph(fresh_dynamo):
    """A compiled loop breaks there; test_every_mode.py has its bits."""
    owners = matrices(shapes=[(8, 8)])
    optimizer = Muon(owners)
    set_grads(0, owners)
    before = owners[0].detach().clone()
    with pytest.raises(Exception, match="`MatrixOptimizer._step`"):
        compile_step(optimizer, "eager")()
    assert torch.equal(owners[0], before)


# ---- states --------------------------------------------------------------------------------------


def test_all_in_a_bfloat16_matrix_takes_seven_bytes():
    (owner,) = matrices(torch.bfloat16, [(512, 512)])
    optimizer = Muon8bit([owner], master="remainder16")
    run(optimizer, [owner], range(1))
    state = sum(tensor.nbytes for tensor in optimizer.state[owner].values())
    whole = (owner.nbytes + owner.grad.nbytes + state) / owner.numel()
    assert whole == pytest.approx(7.02, abs=0.005)


@pytest.mark.parametrize("master", [None, "remainder16"])
def test_codes_of_a_convolution_whose_memory_order_changed(master):
    """Their blocks stay those of the order in which they were made."""
    dtype = torch.float32 if master is None else torch.bfloat16
    options = {"convolutions": True, "min_8bit_size": 0, "master": master}
    first = nn.Sequential(nn.Conv2d(16, 32, 3, bias=False)).to(dtype)
    optimizer = Muon8bit(first, lr=0.1, **options)
    run(optimizer, list(first.parameters()), range(2))
    weights = []
    for order in (torch.contiguous_format, torch.channels_last):
        again = copy.deepcopy(first).to(memory_format=order)
        resumed = Muon8bit(again, lr=0.1, **options)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        run(resumed, list(again.parameters()), range(2, 4))
        weights.append(again[0].weight)
    assert weights[1].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(*weights) and not torch.equal(weights[0], first[0].weight)


# ---- plans ---------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x):
        return self.outer(self.inner(x).relu())


def planned(rows, **options):
    batch = torch.randn(rows, 128), torch.randn(rows, 128)
    make = functools.partial(Muon, **options)
    return headroom.plan(Mlp(), make, batch, loss=nn.functional.mse_loss, device="cpu")


def test_a_plan_has_the_workspace():
    """Of two matrices that are iterated together, or one after the other."""
    more, less = (planned(4, workspace=size).peak_bytes for size in ("1 MiB", 0))
    one = newton_schulz_workspace(1, 128, 256, torch.bfloat16) + 2 * 128 * 256
    assert more - less == pytest.approx(one, rel=0.01)


def test_operations_are_those_of_matrices_that_train():
    """m = 128 and n = 256: 5 (4 m m n + 2 m m m) beside 6 m n for a token."""
    model = Mlp()
    model.inner.weight.requires_grad_(False)
    wanted = 5 * (4 * 128 * 128 * 256 + 2 * 128**3), 6 * 128 * 256
    theirs = torch.optim.Muon([model.outer.weight, model.inner.weight])
    for optimizer in (Muon(model), theirs):
        assert newton_schulz_work(optimizer.param_groups) == wanted
    assert newton_schulz_work(torch.optim.AdamW(model.parameters()).param_groups) == (0, 0)
