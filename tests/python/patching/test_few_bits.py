"""Blocks whose Linears are in few bits: the same gradients at every level, in fewer bytes."""

import copy

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom.nn import LEVELS
from headroom.nn.fused import is_known
from torch import nn

from helpers.bits import assert_same_bits
from helpers.few_bits import error, freeze, gradients
from helpers.hf_models import inputs_of, model_of
from helpers.kept import kept_bytes

transformers = pytest.importorskip("transformers")

FORMATS = ["nf4", "fp4", "int8"]
DTYPES = [torch.float32, torch.bfloat16]
NAMES = ["Llama", "Gemma2", "Phi3", "GPT2", "Bert"]  # every layout, packed Linears, Conv1D


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()


class Adapted(nn.Module):
    """A layer with an adapter that was put in by hand."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 3, bias=False)
        self.up = nn.Linear(3, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x.float())).to(x.dtype)


def quantized(name, to, dtype=torch.float32):
    model = freeze(model_of(name).to(dtype))
    headroom.quantize(model, to)
    for part in [*model.modules()]:
        if hasattr(part, "q_proj"):
            part.q_proj = Adapted(part.q_proj)
        if hasattr(part, "down_proj"):
            part.down_proj = Adapted(part.down_proj)
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_levels_give_the_same_bits_in_fewer_bytes(name, to, dtype):
    model, inputs = quantized(name, to, dtype), inputs_of(padded=True, tokens=16)
    theirs = gradients(copy.deepcopy(model), **inputs)
    exact = headroom.dequantize(copy.deepcopy(model)).double()
    for part in exact.modules():
        if isinstance(part, Adapted):
            part.down.float(), part.up.float()
    exact = {key: x for key, x in gradients(exact, **inputs).items() if key in theirs}
    kept, wanted, held = [], None, {k: x for k, x in inputs.items() if k != "labels"}
    for level in (*LEVELS, "L1@host"):
        headroom.patch(model, level)
        got = gradients(model, **inputs)
        wanted = wanted or got
        assert_same_bits(got.values(), wanted.values())
        kept.append(kept_bytes(lambda: model(**held).logits, list(model.parameters())))
    # The loss is most of the norm, and processors differ in its last bit.
    assert error(wanted, exact) <= 2 * max(error(theirs, exact), torch.finfo(torch.float32).eps)
    for found in (wanted, theirs, exact):
        del found["loss"]
    assert error(wanted, exact) <= 2 * error(theirs, exact)
    assert kept[:6] == sorted(kept[:6], reverse=True) and kept[5] < kept[1] < kept[0]


@pytest.mark.parametrize("to", FORMATS)
def test_blocks_of_headroom_and_checkpoints(to):
    sizes = dict(vocab_size=40, hidden_size=32, features=48, layers=2, heads=4)
    torch.manual_seed(3)
    model = freeze(headroom.nn.Transformer(headroom.nn.TransformerConfig(**sizes)))
    assert len(headroom.quantize(model, to).quantized) == 8
    ids = torch.randint(40, (2, 8))

    def step(model):
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return found

    wanted = step(model)
    assert len(wanted) == 5
    for level in (*LEVELS, "L2@host"):
        headroom.patch(model, level)
        assert_same_bits(step(model), wanted)
    headroom.unpatch(model)
    headroom.checkpoint_every(model, 1)
    assert_same_bits(step(model), wanted)


def test_layers_of_few_bits_draw_no_random_numbers():
    assert is_known(headroom.nn.Linear4bit(8, 8)) and is_known(headroom.nn.Linear8bit(8, 8))


@pytest.mark.slow
def test_autocast_and_compilation_of_a_patched_model():
    model, inputs = quantized("Llama", "nf4"), inputs_of()
    headroom.patch(model, "L2")
    wanted = gradients(model, **inputs)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = gradients(compiled, **inputs)
    assert error({k.removeprefix("_orig_mod."): x for k, x in got.items()}, wanted) < 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        low = gradients(model, **inputs)
        headroom.patch(model, "L5")
        assert_same_bits(gradients(model, **inputs).values(), low.values())
    assert 1e-4 < error(low, wanted) < 5e-2
