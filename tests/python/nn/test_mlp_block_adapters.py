"""mlp_block with adapters: beside its steps one after another, and the formula in float64."""

import copy
from dataclasses import replace

import headroom
import headroom.adapters
import pytest
import torch
import torch.nn.functional as F
from headroom.functional import dequantize_matrix, lora_linear, quantize_matrix
from headroom.functional.glu import glu
from headroom.functional.norm import layer_norm, rms_norm
from headroom.nn import Transformer, TransformerConfig
from headroom.nn.functional import LowRank, mlp_block
from headroom.nn.fused import can_fuse
from torch.autograd.graph import saved_tensors_hooks

from helpers.mlp_blocks import ACTIVATIONS, DTYPES, HIDDEN, SAVES, assert_same, options_of, sample

MATRICES = {"gate_up_weight": "gate_up", "up_weight": "up", "down_weight": "down"}
CASES = (
    "llama",
    "apart",
    "gpt2",
    "relu",
    "biases",
)  # packed, of three matrices, and without a gate
BASES = (None, "nf4", "int8")
DROPPED = 0.3


class Block:
    """A case whose matrices are frozen and have adapters."""

    def __init__(self, case, dtype, device, base=None, rank=3, shape=(3, 7), dropout=0.0):
        self.case, self.dropout = case, dropout
        tensors, self.dy = sample(case, dtype, device, shape)
        self.matrices, self.tensors = {}, {}
        for name, tensor in tensors.items():
            if name in MATRICES:
                few = base is not None
                self.matrices[name] = quantize_matrix(tensor, base) if few else tensor
                rows, cols = tensor.shape
                made = torch.Generator().manual_seed(rows * rank)
                for what, size in (("a", (rank, cols)), ("b", (rows, rank))):
                    values = torch.randn(size, generator=made) * cols**-0.5
                    self.tensors[f"{MATRICES[name]}_{what}"] = values.to(device)
            else:
                self.tensors[name] = tensor

    def adapters(self, t):
        """By the names of their matrices. The seeds are those of no other matrix."""
        names = [MATRICES[name] for name in self.matrices]
        return {
            name: LowRank(t[f"{name}_a"], t[f"{name}_b"], 1.5, self.dropout, 17 * k)
            for k, name in enumerate(names)
        }

    def fused(self, **more):
        def call(t):
            given = {n: x for n, x in t.items() if not n.endswith(("_a", "_b"))}
            given |= {f"{n}_adapter": one for n, one in self.adapters(t).items()} | self.matrices
            required = [given.pop(n, None) for n in ("x", "norm_weight")]
            required += [given.pop(n) for n in ("gate_up_weight", "down_weight")]
            return mlp_block(*required, **given, **options_of(self.case) | more)

        return call

    def steps(self, t):
        """The ops one after another."""
        o = {"norm": "rms", "activation": "silu", "offset": 0.0, "residual": True}
        o |= {"eps": 1e-6, "casting": "llama"} | options_of(self.case)
        x, weight, ones = t["x"], t.get("norm_weight"), self.adapters(t)
        if o["norm"] == "layer":
            normed = layer_norm(x, weight, t.get("norm_bias"), o["eps"])
        else:
            normed = rms_norm(x, weight, o["eps"], offset=o["offset"], casting=o["casting"])

        def times(y, name):
            matrix, bias, one = self.matrices[f"{name}_weight"], t.get(f"{name}_bias"), ones[name]
            own = {"scale": one.scale, "dropout": one.dropout, "seed": one.seed}
            return lora_linear(y, matrix, bias, one.a, one.b, **own)

        gate, up = times(normed, "gate_up"), None
        if "up" in ones:
            up = times(normed, "up")
        packed = up is None and gate.shape[-1] != self.matrices["down_weight"].shape[1]
        y = times(glu(gate, up, o["activation"], packed=packed), "down")
        return x + y if o["residual"] else y

    def exact(self, t, masks=None):
        """The formula in torch, in the dtype of its tensors, given masks of what is kept."""
        o = {"norm": "rms", "activation": "silu", "eps": 1e-6, "offset": 0.0, "residual": True}
        o |= options_of(self.case)
        x, weight = t["x"], t.get("norm_weight")
        if o["norm"] == "layer":
            normed = F.layer_norm(x, x.shape[-1:], weight, t.get("norm_bias"), o["eps"])
        else:
            normed = F.rms_norm(x, x.shape[-1:], weight + o["offset"], o["eps"])

        def times(y, name):
            w = self.matrices[f"{name}_weight"]
            w = (dequantize_matrix(w) if not isinstance(w, torch.Tensor) else w).to(y.dtype)
            bias, one = t.get(f"{name}_bias"), self.adapters(t)[name]
            dropped = y if masks is None else y * masks[name].to(y.dtype)
            a, b = one.a.to(y.dtype), one.b.to(y.dtype)
            return F.linear(y, w, bias) + one.scale * F.linear(F.linear(dropped, a), b)

        gate = times(normed, "gate_up")
        up = times(normed, "up") if "up_weight" in self.matrices else None
        if up is None and gate.shape[-1] != self.matrices["down_weight"].shape[1]:
            gate, up = gate.chunk(2, -1)
        inner = ACTIVATIONS[o["activation"]](gate)
        y = times(inner if up is None else inner * up, "down")
        return x + y if o["residual"] else y

    def run(self, function, dtype=None, frozen=()):
        leaves = {
            n: (t if dtype is None else t.to(dtype))
            .detach()
            .clone()
            .requires_grad_(n not in frozen)
            for n, t in self.tensors.items()
        }
        y = function(leaves)
        y.backward(self.dy.to(y.dtype))
        return {"y": y.detach()} | {n: t.grad for n, t in leaves.items() if n not in frozen}

    def masks(self):
        """What each adapter keeps of its input, over the probability: the product of ones."""
        masks = {}
        for name, one in self.adapters(self.tensors).items():
            cols = one.a.shape[1]
            eye = torch.eye(cols, device=one.a.device)
            ones, zeros = torch.ones(*self.dy.shape[:-1], cols), torch.zeros(cols, cols)
            own = {"dropout": one.dropout, "seed": one.seed}
            masks[name] = lora_linear(ones.to(eye.device), zeros.to(eye), None, eye, eye, **own)
        return masks


def assert_near(block, ours, dtype, masks=None):
    exact = block.run(lambda t: block.exact(t, masks), torch.float64)
    theirs = block.run(lambda t: block.exact(t, masks))
    for name, value in exact.items():
        error, other = ((t[name].double() - value).abs().max().item() for t in (ours, theirs))
        # What goes into a sum was rounded twice, and torch's error may be small by luck.
        unit = 2 * torch.finfo(dtype).eps * value.abs().max().item()
        assert error <= 3 * other + unit, f"{name}: {error} against {other}"


@pytest.mark.parametrize("tile", (64, 5))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, base, dtype, tile, device):
    block = Block(case, dtype, device, base)
    ours = block.run(block.fused(tile_tokens=tile))
    for name, value in ours.items():
        like = block.dy if name == "y" else block.tensors[name]
        assert value.dtype == like.dtype and value.shape == like.shape, name
    assert_near(block, ours, dtype)
    if tile == 64:  # all tokens: the same ops, on the same rows
        steps = block.run(block.steps)
        for name, value in steps.items():
            size = value.abs().max().item()
            unit = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(ours[name], value, rtol=unit, atol=unit * size)
        assert torch.equal(ours["y"], steps["y"])


@pytest.mark.parametrize("rank", (1, 3, 16, 64))
@pytest.mark.parametrize("base", BASES)
def test_ranks(base, rank, device):
    block = Block("biases", torch.float32, device, base, rank)
    assert_near(block, block.run(block.fused()), torch.float32)


@pytest.mark.parametrize("dropout", (0.0, DROPPED))
@pytest.mark.parametrize("tile", (0, 5))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("case", CASES)
def test_what_is_kept_changes_no_bit(case, base, dtype, tile, dropout, device):
    block = Block(case, dtype, device, base, dropout=dropout)
    first, *others = (block.run(block.fused(save=s, tile_tokens=tile)) for s in SAVES)
    for other in others:
        assert_same(other, first)


@pytest.mark.parametrize("save", SAVES)
def test_dropout_by_a_mask(save, device):
    block = Block("biases", torch.float32, device, dropout=DROPPED)
    masks = block.masks()
    kept = torch.cat([mask.flatten() for mask in masks.values()])
    assert 0.5 < (kept > 0).float().mean().item() < 0.9
    ours = block.run(block.fused(save=save))
    assert_near(block, ours, torch.float32, masks)
    assert torch.equal(ours["y"], block.run(block.steps)["y"])
    # Each tile drops other elements, the first those of the whole.
    tiled = block.run(block.fused(save=save, tile_tokens=5))["y"].flatten(0, 1)
    whole = ours["y"].flatten(0, 1)
    torch.testing.assert_close(tiled[:5], whole[:5])
    assert not torch.allclose(tiled[5:10], whole[5:10])
    torch.manual_seed(5)
    block.adapters = lambda t: {n: replace(one, seed=None) for n, one in drawn(t).items()}
    drawn = Block.adapters.__get__(block)
    other = block.run(block.fused(save=save))["y"]
    assert not torch.allclose(other, ours["y"])
    torch.manual_seed(5)
    assert torch.equal(other, block.run(block.fused(save=save))["y"])


@pytest.mark.parametrize("save", SAVES)
def test_each_tile_drops_by_a_seed_of_its_own(save, device):
    """Tile number k is a call on its rows, with the seeds plus k; sums are those of the tiles."""
    block = Block("biases", torch.float32, device, shape=(15,), dropout=DROPPED)
    drawn = Block.adapters.__get__(block)
    tiled, total = block.run(block.fused(save=save, tile_tokens=5)), {}
    x, dy = block.tensors["x"], block.dy
    for k in range(3):
        rows = slice(5 * k, 5 * k + 5)
        block.tensors["x"], block.dy = x[rows], dy[rows]
        block.adapters = lambda t, k=k: {
            n: replace(o, seed=o.seed + k) for n, o in drawn(t).items()
        }
        for name, value in block.run(block.fused(save=save)).items():
            if name in ("y", "x"):
                assert torch.equal(value, tiled[name][rows]), name
            else:
                total[name] = value + total.get(name, 0)
    for name, value in total.items():
        torch.testing.assert_close(tiled[name], value, rtol=1e-5, atol=1e-5)


def test_gradients_of_many_tiles_are_added_in_float32(device):
    """A sum in 16 bits no longer grows when it is 256 times as large as what is added."""
    block = Block("relu", torch.bfloat16, device, shape=(600,))
    for name, tensor in block.tensors.items():
        rows = tensor[:1].expand(tensor.shape) if name == "x" else tensor
        block.tensors[name] = rows.to(torch.bfloat16).clone()
    block.dy = block.dy[:1].expand(block.dy.shape).clone()
    whole, tiled = (block.run(block.fused(tile_tokens=tile)) for tile in (600, 1))
    for name, value in whole.items():
        torch.testing.assert_close(
            tiled[name], value, rtol=0.02, atol=0.01 * value.abs().max().item(), msg=name
        )


@pytest.mark.parametrize("shape", ((0,), (2, 0), (1,), ()))
@pytest.mark.parametrize("base", BASES)
def test_few_rows(base, shape, device):
    block = Block("biases", torch.float32, device, base, shape=shape)
    first, *others = (block.run(block.fused(save=save)) for save in SAVES)
    for other in others:
        assert_same(other, first)
    assert first["y"].shape == (*shape, HIDDEN)
    if 0 in shape:
        assert not any(first[n].any() for n in block.tensors if n not in ("x",))
    else:
        assert_near(block, first, torch.float32)


FROZEN = {
    "all but x": lambda name: name != "x",
    "all but down's adapter": lambda name: not name.startswith("down_"),
    "all but gate's B": lambda name: name != "gate_up_b",
    "all but up's A": lambda name: name != "up_a",
    "x and norm": lambda name: name in ("x", "norm_weight"),
    "biases": lambda name: name.endswith("bias"),
    "all but the last bias": lambda name: name != "down_bias",
}


@pytest.mark.parametrize("tile", (0, 5))
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen(frozen, save, tile, device):
    block = Block("biases", torch.float32, device)
    names = {name for name in block.tensors if FROZEN[frozen](name)}
    function = block.fused(save=save, tile_tokens=tile)
    got = block.run(function, frozen=names)
    assert_same(got, block.run(function), block.tensors.keys() - names)


@pytest.mark.parametrize("tile", (0, 50))
def test_what_is_kept(tile, device):
    block = Block("apart", torch.bfloat16, device, "nf4", rank=3, shape=(4, 50))
    leaves = {n: t.requires_grad_() for n, t in block.tensors.items()}

    def kept_bytes(save):
        kept = []
        with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            block.fused(save=save, tile_tokens=tile)(leaves)
        held = [
            *leaves.values(),
            *(t for q in block.matrices.values() for t in (q.codes, q.scales)),
        ]
        own = {t.untyped_storage().data_ptr() for t in held} - {leaves["x"].data_ptr()}
        found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
        return sum(size for address, size in found.items() if address not in own)

    # Per token: x, gate and up, normed and activated, and 3 per adapter, besides the reciprocal.
    x, gates, rest, t = HIDDEN, 2 * 40, HIDDEN + 40, 3
    for save, elements in zip(SAVES, (x + gates + rest + 3 * t, x + gates + 3 * t, x + t)):
        assert kept_bytes(save) == 200 * (2 * elements + 4), save
    with torch.no_grad():
        assert kept_bytes("all") == 0
    for name, tensor in leaves.items():
        tensor.requires_grad_(name == "down_b")
    assert kept_bytes("all") == 200 * 2 * t


@pytest.mark.parametrize("base", BASES)
def test_only_some_have_adapters_or_few_bits(base, device):
    block = Block("apart", torch.float32, device, base)
    x, norm_weight = block.tensors["x"], block.tensors["norm_weight"]
    dense = Block("apart", torch.float32, device).matrices
    one = block.adapters(block.tensors)["up"]
    for mixed in (block.matrices, block.matrices | {"down_weight": dense["down_weight"]}):
        gate, up, down = (mixed[n] for n in ("gate_up_weight", "up_weight", "down_weight"))
        options = options_of("apart") | {"up_weight": up, "up_adapter": one}
        found = []
        for save in SAVES:
            leaf = x.clone().requires_grad_()
            y = mlp_block(leaf, norm_weight, gate, down, **options, save=save)
            y.backward(block.dy)
            found.append({"y": y.detach(), "x": leaf.grad})
        wide = {
            n: w if isinstance(w, torch.Tensor) else dequantize_matrix(w) for n, w in mixed.items()
        }
        leaf = x.clone().requires_grad_()
        added = wide["up_weight"] + one.scale * one.b @ one.a
        y = mlp_block(
            *(leaf, norm_weight, wide["gate_up_weight"], wide["down_weight"]),
            **options_of("apart") | {"up_weight": added},
        )
        y.backward(block.dy)
        for each in found:
            assert_same(each, found[0])
            torch.testing.assert_close(each["y"], y.detach(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(each["x"], leaf.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", ("rms", "layer"))
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_an_offset_is_added_to_the_weight_of_either_norm(norm, dtype, device):
    block = Block("gpt2", dtype, device)
    tensors = {n: t for n, t in block.tensors.items() if not n.endswith(("_a", "_b"))}
    if norm == "rms":
        del tensors["norm_bias"]
    one = block.adapters(block.tensors)["down"]
    found = []
    for adapter in (None, replace(one, b=torch.zeros_like(one.b))):
        t = {n: x.clone().requires_grad_() for n, x in tensors.items()}
        rows, weight = t.pop("x"), t.pop("norm_weight")
        own = options_of("gpt2") | {"norm": norm, "offset": 1.0, "down_adapter": adapter}
        y = mlp_block(rows, weight, *block.matrices.values(), **t, **own)
        y.backward(block.dy)
        found.append((y.detach(), rows.grad, weight.grad))
    for ours, wanted in zip(*found):
        unit = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(ours, wanted, rtol=unit, atol=unit * wanted.abs().max().item())


@pytest.mark.parametrize("tile", (0, 5))
def test_the_result_may_be_changed_in_place(tile, device):
    block = Block("apart", torch.float32, device)
    wanted = block.run(lambda t: block.fused(tile_tokens=tile)(t) * 2)
    assert_same(block.run(lambda t: block.fused(tile_tokens=tile)(t).mul_(2)), wanted)


def test_strides_autocast_compile_and_func(device):
    block = Block("biases", torch.float32, device, "nf4")
    wanted = block.run(block.fused())
    x = block.tensors["x"]
    block.tensors["x"] = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert_same(block.run(block.fused()), wanted)
    compiled = torch.compile(block.fused(), fullgraph=True, backend="aot_eager")
    for name, value in block.run(compiled).items():
        torch.testing.assert_close(value, wanted[name])
    leaf = {"x": x}
    found = torch.func.grad(lambda t: (block.fused()(block.tensors | t) * block.dy).sum())(leaf)
    torch.testing.assert_close(found["x"], wanted["x"])
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        y = block.fused()(block.tensors)
    narrow = {n: t if n.endswith(("_a", "_b")) else t.bfloat16() for n, t in block.tensors.items()}
    narrow |= {n: block.tensors[n] for n in block.tensors if n.startswith("norm")}
    assert y.dtype == torch.bfloat16 and torch.equal(y, block.fused()(narrow))
    with pytest.raises(RuntimeError, match="has no derivative"):
        leaf = x.clone().requires_grad_()
        y = block.fused()(block.tensors | {"x": leaf})
        (grad,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
        grad.sum().backward()


def test_bad_inputs():
    block = Block("biases", torch.float32, "cpu")
    ones = block.adapters(block.tensors)
    given = {n: t for n, t in block.tensors.items() if not n.endswith(("_a", "_b"))}
    given |= block.matrices | {f"{n}_adapter": one for n, one in ones.items()}

    def call(**other):
        options = given | other
        names = "x", "norm_weight", "gate_up_weight", "down_weight"
        required = [options.pop(name) for name in names]
        return mlp_block(*required, **options)

    trained = block.matrices["down_weight"].clone().requires_grad_()
    for message, other in (
        (
            "down_weight requires grad, but gets no gradient beside adapters",
            {"down_weight": trained},
        ),
        (r"down_weight is \[20, 40\], wanted \[24, 40\]", {"down_weight": trained.detach()[:20]}),
        ("gate_up_weight has 30 rows", {"gate_up_weight": block.matrices["gate_up_weight"][:30]}),
        ("up_adapter is given, but up_weight is not", {"up_weight": None, "up_bias": None}),
        ("b must be a matrix", {"up_adapter": replace(ones["up"], b=ones["up"].b[:3])}),
        ("a must be a matrix", {"up_adapter": replace(ones["up"], a=ones["up"].a[:, :3])}),
        ("tile_tokens is -1", {"tile_tokens": -1}),
        ("x has no dimensions", {"x": block.tensors["x"][0, 0, 0]}),
        ("only norm='layer' has one", {"norm_bias": block.tensors["norm_weight"]}),
        ("wanted 'once' with norm='layer'", {"norm": "layer", "casting": "llama"}),
    ):
        with pytest.raises(RuntimeError, match=message):
            call(**other)
    with pytest.raises(ValueError, match="dropout is 1.0"):
        replace(ones["up"], dropout=1.0)
    with pytest.raises(TypeError, match="a is None"):
        replace(ones["up"], a=None)


# ---- Blocks --------------------------------------------------------------------------------------


def test_blocks_call_it(monkeypatch, device):
    """Layers of a block become the one call, whose gradients are those of the steps."""
    calls = []
    monkeypatch.setattr(
        "headroom.nn.fused.mlp_block", lambda *a, **o: calls.append(o) or mlp_block(*a, **o)
    )
    config = TransformerConfig(vocab_size=40, hidden_size=32, features=48, layers=1, heads=4)
    torch.manual_seed(3)
    plain = Transformer(config).to(device)
    ids = torch.randint(40, (2, 20), device=device)

    def step(model):
        calls.clear()
        torch.manual_seed(9)
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return found

    for to in BASES:
        model = copy.deepcopy(plain)
        if to is not None:
            headroom.quantize(model, to)
        headroom.lora(model, 3, dropout=DROPPED)
        headroom.lora(model, 2, dropout=DROPPED, name="second")
        headroom.adapters.use_adapters(model, "default", "second")
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.1)
        got = step(model)
        assert len(calls) == 1 and calls[0]["down_adapter"].a.shape[0] == 5
        handle = model.blocks[0].mlp.down.register_forward_hook(lambda *_: None)
        steps = step(model)
        assert not calls  # a hook runs
        handle.remove()
        assert got.keys() == steps.keys()
        for name, value in got.items():
            torch.testing.assert_close(value, steps[name], rtol=1e-4, atol=1e-6)
    x = torch.randn(2, 20, 32, device=device)
    first, down = model.blocks[0].mlp.first, model.blocks[0].mlp.down
    assert can_fuse(x, (first, down), ())
    assert not can_fuse(x.double(), (first, down), ())
    with torch.autocast(x.device.type, torch.bfloat16):
        assert not can_fuse(x, (first, down), ())
    with headroom.adapters.adapters_disabled(model):
        assert not can_fuse(x, (first, down), ())
    down.adapters["second"] = replace(down.adapters["second"], dropout=0.1)
    assert not can_fuse(x, (first, down), ())  # two masks
    down.eval()
    assert can_fuse(x, (first, down), ())
    model = copy.deepcopy(plain)
    headroom.lora(model, 3, dora=True)
    step(model)
    assert not calls
    model = copy.deepcopy(plain)
    headroom.lora(model, 3, targets=["down"])
    step(model)
    assert calls[0]["gate_up_adapter"] is None and calls[0]["down_adapter"] is not None
    model.blocks[0].mlp.first.weight.requires_grad_()
    step(model)
    assert not calls
