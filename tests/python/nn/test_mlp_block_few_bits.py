"""mlp_block with matrices of 4 or 8 bits: beside the decoded matrices, and beside the formula in
float64."""

from dataclasses import replace

import headroom
import pytest
import torch
from headroom._core.registration import by_name
from headroom.functional import dequantize_matrix, quantize_matrix
from headroom.functional.mlp import of_few_bits
from headroom.functional.quantize_matrix import FORMATS
from headroom.nn.functional import mlp_block
from headroom.nn.fused import can_fuse, fused_mlp, is_fusible
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from helpers.mlp_blocks import (
    CASES,
    DTYPES,
    SAVES,
    assert_same,
    block,
    composed,
    options_of,
    run,
    sample,
)

MATRICES = ("gate_up_weight", "up_weight", "down_weight")


def few_bits(case, dtype, device, to="nf4", **options):
    """A sample whose matrices are decoded ones, their codes, and the gradient of the result."""
    tensors, dy = sample(case, dtype, device)
    codes = {n: quantize_matrix(t, to, **options) for n, t in tensors.items() if n in MATRICES}
    return tensors | {n: dequantize_matrix(q) for n, q in codes.items()}, codes, dy


def of(codes, case, **more):
    """The case as a function of the other tensors."""
    return lambda **tensors: block(case, **more)(**tensors, **codes)


def without(codes, tensors):
    return {name: t for name, t in tensors.items() if name not in codes}


@pytest.mark.parametrize("tile", (0, 18))  # of 21 tokens: then the last three are few
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, to, dtype, tile, device):
    tensors, codes, dy = few_bits(case, dtype, device, to, block_size=32)
    ours = run(of(codes, case, tile_tokens=tile), without(codes, tensors), dy)
    dense = run(block(case, tile_tokens=tile), tensors, dy, frozen=codes)
    unit = 4 * torch.finfo(dtype).eps
    for name, value in ours.items():
        assert value.dtype == dense[name].dtype and value.shape == dense[name].shape
        size = dense[name].abs().max().item()
        torch.testing.assert_close(value, dense[name], rtol=unit, atol=unit * size)
    wide = {n: t.double() for n, t in tensors.items()}
    exact = run(composed(case), wide, dy.double(), frozen=codes)
    theirs = run(composed(case), tensors, dy, frozen=codes)
    for name, value in exact.items():
        error, other = ((t[name].double() - value).abs().max().item() for t in (ours, theirs))
        unit = torch.finfo(dtype).eps * value.abs().max().item()
        assert error <= 2 * other + unit, f"{name}: {error} against {other}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_every_save_has_the_same_bits(case, dtype, device):
    tensors, codes, dy = few_bits(case, dtype, device)
    rest = without(codes, tensors)
    first, *others = (run(of(codes, case, save=save), rest, dy) for save in SAVES)
    for other in others:
        assert_same(other, first)


def test_what_is_kept_and_counted(device):
    tensors, codes, dy = few_bits("apart", torch.float32, device, "int8")
    x = tensors["x"].requires_grad_()
    kept = []
    for save, per_token in zip(SAVES, (2 * 40, 2 * 40, 0)):
        kept.clear()
        with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = block("apart", save=save)(x=x, norm_weight=tensors["norm_weight"], **codes)
        elements = sum(t.numel() for t in kept if t.is_floating_point())
        assert elements == 21 * (per_token + 24 + 1) + 24  # x, rstd and norm_weight too
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(y, x, dy)
        products = 3 if save != "input" else 5
        assert counter.get_total_flops() == products * 2 * 21 * 24 * 40
    with torch.no_grad():
        assert torch.equal(of(codes, "apart")(x=x, norm_weight=tensors["norm_weight"]), y)


def test_strides_autocast_and_compile(device):
    tensors, codes, dy = few_bits("llama", torch.float32, device)
    rest = without(codes, tensors)
    wanted = run(of(codes, "llama"), rest, dy)
    strided = rest | {"x": rest["x"].transpose(0, 1).contiguous().transpose(0, 1)}
    moved = {
        n: replace(q, codes=torch.stack((q.codes, q.codes), -1)[..., 0]) for n, q in codes.items()
    }
    assert_same(run(of(moved, "llama"), strided, dy), wanted)
    compiled = torch.compile(of(codes, "llama"), fullgraph=True, backend="aot_eager")
    for name, value in run(compiled, rest, dy).items():
        torch.testing.assert_close(value, wanted[name])
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        y = of(codes, "llama")(**rest)
    narrow = rest | {"x": rest["x"].bfloat16()}
    assert y.dtype == torch.bfloat16 and torch.equal(y, of(codes, "llama")(**narrow))


@pytest.mark.parametrize("case", ("llama", "biases"))
def test_opcheck(case, device):
    tensors, codes, dy = few_bits(case, torch.float32, device)
    names = {"gate_up_weight": "gate_up", "down_weight": "down", "up_weight": "up"}
    given = {names.get(n, n): None if n in codes else t for n, t in tensors.items()}
    given = {n: t if t is None else t.requires_grad_() for n, t in given.items()}
    op, backward = (getattr(torch.ops.headroom, f"mlp_block{n}").default for n in ("", "_backward"))
    optional = [a.name for a in op._schema.arguments if "Optional" in str(a.type)]
    given = dict.fromkeys(optional) | given
    given |= of_few_bits(*(codes.get(n) for n in MATRICES))
    given |= {"norm": 0, "casting": 0, "eps": 1e-6, "offset": 0.0, "activation": 0}
    given |= {"residual": True, "tile_tokens": 0, "save": 1, "wanted": 83, "precision": 0}
    torch.library.opcheck(op, [given[a.name] for a in op._schema.arguments])
    given = {n: t.detach() if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    found = op(*(given[a.name] for a in op._schema.arguments))
    given |= dict(zip((result.name for result in op._schema.returns), found))
    given |= {"dy": dy, "gradients": 83}
    torch.library.opcheck(backward, [given[a.name] for a in backward._schema.arguments])
    given |= {"wanted": 127, "gradients": 8}
    with pytest.raises(RuntimeError, match="a matrix of few bits has no gradient"):
        backward(*(given[a.name] for a in backward._schema.arguments))


def test_bad_inputs():
    tensors, codes, _ = few_bits("biases", torch.float32, "cpu")
    rest = {"x": tensors["x"], "norm_weight": tensors["norm_weight"]}
    q = codes["gate_up_weight"]
    op = by_name("mlp_block")
    names = dict.fromkeys((*("norm_bias", "gate_up", "up", "down"),))
    names |= dict.fromkeys(("gate_up_bias", "up_bias", "down_bias"))
    given = rest | names | of_few_bits(*(codes[n] for n in MATRICES))
    given |= {"norm": 0, "casting": 0, "eps": 1e-6, "offset": 0.0, "activation": 0}
    given |= {"residual": True, "tile_tokens": 0, "save": 1, "wanted": 0, "precision": 0}

    def call(**other):
        return lambda: op(**given | other)

    def public(**other):
        return lambda: block("biases")(**rest, **codes | other)

    few = "wanted codes and scales of gate_up and down, and no matrices, for format 1"
    for message, refuse in (
        ("codes has .*, wanted 480 of uint8", call(down_codes=q.codes[1:])),
        ("codes has", call(features=41)),
        ("codes has", call(gated=False, up_codes=None, up_scales=None, features=80)),
        ("scales has", call(up_scales=q.scales[:4])),
        (few, call(gate_up_codes=None)),
        (few, call(up_scales=None)),
        (few, call(down=tensors["down_weight"])),
        ("wanted gate_up and down, and neither codes nor scales, for format 0", call(format=0)),
        ("format is 5", call(format=5)),
        ("have different formats", public(up_weight=quantize_matrix(tensors["up_weight"], "fp4"))),
        ("down is \\[24, 41\\]", public(down_weight=replace(codes["down_weight"], shape=(24, 41)))),
        (  # of as many codes
            "up is \\[24, 40\\], but down is \\[24, 40\\]: wanted \\[40, 24\\]",
            public(up_weight=replace(codes["up_weight"], shape=(24, 40))),
        ),
    ):
        with pytest.raises(RuntimeError, match=message):
            refuse()
    with pytest.raises(TypeError, match="down_weight is a Tensor, but another is of few bits"):
        public(down_weight=tensors["down_weight"])()
    with pytest.raises(TypeError, match="gate_up_weight is a NoneType"):
        public(gate_up_weight=None)()


# ---- Blocks --------------------------------------------------------------------------------------


def test_layers_of_one_format_are_fused(device):
    x = torch.randn(2, 17, 24, device=device)

    def layer(cls=headroom.nn.Linear4bit, **options):
        return cls(24, 24, device=device, **options)

    assert can_fuse(x, (layer(), layer()), ())
    assert can_fuse(x.half(), (layer(headroom.nn.Linear8bit),) * 2, ())
    assert not can_fuse(x[:1, :16], (layer(), layer()), ())  # few rows are decoded on the way
    assert not can_fuse(x.double(), (layer(), layer()), ())
    for other in (
        layer(format="fp4"),
        layer(block_size=32),
        layer(double=False),
        layer(headroom.nn.Linear8bit),
        torch.nn.Linear(24, 24, device=device),
    ):
        assert not can_fuse(x, (layer(), other), ())
    hooked = layer()
    hooked.register_forward_hook(lambda *_: None)
    assert not can_fuse(x, (layer(), hooked), ())


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("to", FORMATS)
def test_a_block_whose_bias_has_another_dtype(to, dtype, device):
    mlp = headroom.nn.MLP(24, 40, bias=True, device=device)
    norm = headroom.nn.RMSNorm(24, device=device, dtype=dtype)
    headroom.quantize(mlp, to, skip=())
    x = torch.randn(2, 17, 24, device=device, dtype=dtype)
    assert is_fusible(norm, mlp, x)
    unit = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        fused_mlp(norm, mlp, x, "input"), x + mlp(norm(x)), rtol=unit, atol=unit
    )


def test_options_are_those_of_dense_matrices(device):
    """Each has its effect on both."""
    tensors, codes, _ = few_bits("apart", torch.float32, device)
    rest = without(codes, tensors)
    x, norm_weight = rest["x"], rest["norm_weight"]
    for options in ({"residual": False}, {"eps": 1e-2}, {"offset": 1.0}, {"norm": "layer"}):
        names = options_of("apart") | {"casting": "once"} | options
        ours, dense = (
            mlp_block(x, norm_weight, gate, down, up_weight=up, **names)
            for gate, up, down in ([w[n] for n in MATRICES] for w in (codes, tensors))
        )
        torch.testing.assert_close(ours, dense, rtol=1e-5, atol=1e-5)
