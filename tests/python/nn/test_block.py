"""The dial of a block: the same gradients at every level, and the bytes that the formula says."""

from __future__ import annotations

import copy
import functools
import gc

import headroom
import pytest
import torch
from headroom.nn import LEVELS, Block, Transformer, TransformerConfig
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from helpers.bits import assert_same_bits
from helpers.kept import kept_bytes

SHAPE = dict(vocab_size=40, hidden_size=32, layers=1, heads=4, features=48, kv_heads=2)
VECTORS = dict(norm="layer", gated=False, activation="gelu", qkv_bias=True, out_bias=True)
SHAPES = {
    "llama": {},
    "qwen3": dict(qk_norm=True, qkv_bias=True, head_dim=12),
    "gpt2": VECTORS | dict(mlp_bias=True, positions="learned", kv_heads=4),
    "bert": VECTORS | dict(mlp_bias=True, positions="none", layout="post", causal=False),
    "gemma": dict(layout="sandwich", norm_offset=1.0, norm_casting="once", window=3),
    "phi": VECTORS | dict(mlp_bias=True, layout="parallel", rotary_dim=4),
    "dropout": dict(dropout=0.3, attention_dropout=0.2),
    "post_dropout": dict(dropout=0.3, layout="post"),
}
DROPS = [level for level in LEVELS if level != "L0"]


def model_of(name="llama", **options):
    torch.manual_seed(1)
    shape = SHAPE | SHAPES[name] | dict(final_norm=False, head=False) | options
    return Transformer(TransformerConfig(**shape))


def block_and_input(name="llama", dtype=torch.float32, batch=2, tokens=6, **options):
    """A block, and the arguments that a Transformer gives it."""
    model = model_of(name, **options).to(dtype)
    x = torch.randn(batch, tokens, model.config.hidden_size, dtype=dtype, requires_grad=True)
    return model.blocks[0], (
        x,
        *model._inputs(x, model.config.window is not None, tokens, *[None] * 3),
    )


def gradients(block, inputs, save=None, seed=3):
    if save is not None:
        block.save = save
    torch.manual_seed(seed)
    y = block(*inputs)
    (y.float() ** 2).sum().backward()
    return [y.detach(), *taken(block, inputs)]


def taken(block, inputs):
    """The gradients that were made, which are gone then."""
    leaves = [inputs[0], *block.parameters()]
    grads = [p.grad for p in leaves if p.grad is not None]
    for p in leaves:
        p.grad = None
    return grads


@pytest.mark.parametrize("name", SHAPES)
def test_levels_give_the_same_bits(name):
    block, inputs = block_and_input(name)
    wanted = gradients(block, inputs, "L0")
    assert len(wanted) == 2 + sum(1 for _ in block.parameters())
    for level in DROPS:
        assert_same_bits(gradients(block, inputs, level), wanted)
    other = gradients(block, inputs, "L5", seed=4)
    assert ("dropout" in name) != torch.equal(other[0], wanted[0])


def test_the_choice_of_a_backend_holds_in_the_backward_pass():
    block, inputs = block_and_input("qwen3")
    flash = gradients(block, inputs, "L0")

    def run(level):
        block.save = level
        with sdpa_kernel(SDPBackend.MATH):
            y = block(*inputs)
        (y**2).sum().backward()
        return [y.detach(), *taken(block, inputs)]

    wanted = run("L0")
    assert not all(map(torch.equal, wanted, flash))  # else this shows nothing
    for level in DROPS:
        assert_same_bits(run(level), wanted)


@pytest.mark.parametrize("level", DROPS)
def test_sixteen_bits_and_autocast(level):
    block, inputs = block_and_input("qwen3", torch.bfloat16)
    wanted = gradients(block, inputs, "L0")
    assert_same_bits(gradients(block, inputs, level), wanted)

    block, inputs = block_and_input("qwen3")
    with torch.autocast("cpu", torch.bfloat16):
        wanted = gradients(block, inputs, "L0")
        assert_same_bits(gradients(block, inputs, level), wanted)
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16):
        y = block(*inputs)
    (y.float() ** 2).sum().backward()  # outside of autocast
    assert_same_bits([y.detach(), *taken(block, inputs)], wanted)


# ---- Bytes --------------------------------------------------------------------------------------


def formula(block, level):
    """Bytes per token, in 16 bits, beyond what the statistics of norms take."""
    attention, mlp = block.attention, block.mlp
    h, a = attention.out.out_features, attention.heads * attention.head_dim
    k, g = attention.kv_heads * attention.head_dim, mlp.first.out_features
    behind = {"pre": 0, "parallel": 0, "post": 2 * h, "sandwich": 2 * h}[block.layout]
    x2 = 0 if block.layout in ("parallel", "post") else h
    elements = {
        "L1": h + (a + 2 * k) + a + x2 + g + behind,
        "L2": h + (a + 2 * k) + a + x2 + behind,
        "L3": h + a + x2 + behind,
        "L4": h + a + (behind // 2 if block.layout != "parallel" else 0),
        "L5": h,
    }[level]
    return 2 * elements + (4 * attention.heads if level != "L5" else 0)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "bert", "gemma", "phi"])
def test_kept_bytes_are_those_of_the_formula(name):
    tokens = 64
    sizes = dict(hidden_size=256, features=384, head_dim=64)
    block, inputs = block_and_input(name, torch.bfloat16, 1, tokens, dropout=0.1, **sizes)
    x, rotation, pattern = inputs
    spared = [*block.parameters(), *(t for t in (rotation or ()) if t is not None)]
    spared += [pattern.mask] if pattern.mask is not None else []
    found = {}
    for block.save in LEVELS:
        found[block.save] = kept_bytes(lambda: block(*inputs), spared) / tokens
    for level in DROPS:
        assert found[level] == pytest.approx(formula(block, level), rel=0.01), (level, found)
    assert found["L0"] > found["L1"]


@pytest.mark.parametrize("level", ["L1", "L5"])
def test_memory_that_is_in_use_after_the_forward_pass(level):
    """By the allocator, of two blocks: nothing else holds what is dropped."""
    sizes = dict(hidden_size=256, features=384, head_dim=64, save=level)
    block, inputs = block_and_input("llama", torch.bfloat16, 1, 128, **sizes)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        y = block(block(*inputs), *inputs[1:])
    grown = sum(event.self_cpu_memory_usage for event in profile.key_averages())
    assert grown / 128 / 2 == pytest.approx(formula(block, level), rel=0.01)
    del y


def test_kept_bytes_with_autocast():
    """Of two numbers of tokens, so that the copies of weights do not count."""
    found = []
    for tokens in (32, 64):
        sizes = dict(hidden_size=64, features=96, head_dim=16, save="L1")
        block, inputs = block_and_input("llama", torch.float32, 1, tokens, **sizes)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(kept_bytes(functools.partial(block, *inputs), inputs[1][:2]))
    # Both inputs of halves in 32 bits.
    assert (found[1] - found[0]) / 32 == pytest.approx(formula(block, "L1") + 2 * 2 * 64, rel=0.01)


def test_without_gradients_nothing_is_kept():
    block, inputs = block_and_input(save="L2")
    with torch.no_grad():
        assert kept_bytes(lambda: block(*inputs)) == 0
    frozen = (inputs[0].detach(), *inputs[1:])
    for p in block.parameters():
        p.requires_grad_(False)
    assert kept_bytes(lambda: block(*frozen)) == 0


# ---- Where it is ---------------------------------------------------------------------------------


def multiplied(block, inputs, run):
    """Multiplications of matrices in both passes, attention aside, per token."""
    with FlopCounterMode(display=False) as counter:
        run(*inputs).sum().backward()
    taken(block, inputs)
    counts = counter.get_flop_counts()["Global"]
    of_attention = sum(n for op, n in counts.items() if "attention" in str(op))
    return (sum(counts.values()) - of_attention) / 2 / inputs[0].shape[:-1].numel()


@pytest.mark.parametrize("fused", [True, False])
def test_what_is_multiplied_again(fused):
    block, inputs = block_and_input()
    if not fused:
        block.mlp.down.register_forward_hook(lambda *_: None)
    full = multiplied(block, inputs, block)
    linears = block.attention.qkv, block.attention.out, block.mlp.first, block.mlp.down
    qkv, out, first, down = (linear.weight.numel() for linear in linears)
    assert full == 3 * (qkv + out + first + down)
    for level, again in {
        "L1": 0,
        "L2": first,
        "L3": first + qkv,
        "L4": first + qkv + out,
        "L5": first + qkv + out,
    }.items():
        block.save = level
        assert multiplied(block, inputs, block) - full == again, level


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "dropout"])
def test_a_checkpoint_computes_twice_and_not_thrice(name, reentrant):
    def run(*inputs):
        return checkpoint(block, *inputs, use_reentrant=reentrant)

    block, inputs = block_and_input()
    full = multiplied(block, inputs, block)
    wanted = multiplied(block, inputs, run)
    assert full < wanted <= full * 4 / 3
    for block.save in ("L2", "L5"):
        assert multiplied(block, inputs, run) == wanted
    block, inputs = block_and_input(name)
    wanted = gradients(block, inputs, "L0")
    block.save = "L5"
    torch.manual_seed(3)
    y = run(*inputs)
    (y**2).sum().backward()
    assert_same_bits([y.detach(), *taken(block, inputs)], wanted)


@pytest.mark.parametrize("level", ["L1", "L5"])
def test_offloading_gets_what_is_kept(level):
    block, inputs = block_and_input()
    wanted = gradients(block, inputs, "L0")
    block.save = level
    with save_on_cpu():
        y = block(*inputs)
    (y**2).sum().backward()
    assert_same_bits([y.detach(), *taken(block, inputs)], wanted)


@pytest.mark.parametrize("which", ["qkv", "adapters"])
def test_frozen_weights(which):
    block, inputs = block_and_input("qwen3")
    if which == "adapters":
        block.requires_grad_(False)
        block.attention.qkv = Adapter(block.attention.qkv)
        block.mlp.gate_up = Adapter(block.mlp.gate_up)
    else:
        block.attention.qkv.requires_grad_(False)
        inputs = (inputs[0].detach(), *inputs[1:])  # as behind frozen embeddings
    wanted = gradients(block, inputs, "L0")
    for level in DROPS:
        assert_same_bits(gradients(block, inputs, level), wanted)


class Adapter(nn.Module):
    """A frozen Linear with trained matrices of low rank beside it."""

    def __init__(self, linear):
        super().__init__()
        self.linear, rank = linear, 3
        self.out_features = linear.out_features
        self.a = nn.Linear(linear.in_features, rank, bias=False)
        self.b = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.b(self.a(x))


class Dropped(Adapter):
    """An adapter that draws random numbers."""

    def forward(self, x):
        return self.linear(x) + self.b(self.a(nn.functional.dropout(x, 0.5)))


class Noise(nn.Module):
    def forward(self, weight):
        return nn.functional.dropout(weight, 0.5)


@pytest.mark.parametrize("name", ["llama", "gemma", "bert", "dropout"])
@pytest.mark.parametrize("what", ["adapters", "parametrization", "hook"])
def test_modules_that_draw_random_numbers(name, what):
    block, inputs = block_and_input(name)
    attention, mlp = block.attention, block.mlp
    if what == "adapters":
        attention.qkv, attention.out = Dropped(attention.qkv), Dropped(attention.out)
        setattr(mlp, "gate_up" if mlp.gated else "up", Dropped(mlp.first))
        mlp.down = Dropped(mlp.down)
    for module in (attention.qkv, attention.out, mlp.first, mlp.down, block.attention_norm):
        if what == "parametrization":
            nn.utils.parametrize.register_parametrization(module, "weight", Noise())
        elif what == "hook":
            module.register_forward_hook(lambda module, args, y: nn.functional.dropout(y, 0.5))
    wanted = gradients(block, inputs, "L0")
    for level in DROPS:
        assert_same_bits(gradients(block, inputs, level), wanted)
    assert not torch.equal(gradients(block, inputs, "L5", seed=4)[0], wanted[0])


def changed_afterwards(block, inputs, how):
    """The gradients when parameters differ in the backward pass, or None where that raises."""
    named = dict(block.named_parameters())
    given = {name: (p * 1.5).detach().requires_grad_() for name, p in named.items()}
    if how == "functional_call":
        y = torch.func.functional_call(block, given, inputs)
        leaves = [inputs[0], *given.values()]
    else:
        y = block(*inputs)
        leaves = [inputs[0], *named.values()]
    with torch.no_grad():
        for name, p in named.items():
            if how == "data":
                p.data = p.data * 1.5
            elif how in name:
                p.add_(1)
    try:
        return torch.autograd.grad(y.square().sum(), leaves)
    except RuntimeError as error:
        own = "modified by an inplace operation" in str(error)  # torch's, of what it keeps
        assert own or "since the forward pass, parameter" in str(error)
        return None


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "gemma"])
@pytest.mark.parametrize("how", ["functional_call", "data", "qkv.bias", "first.bias", "out.bias"])
def test_parameters_that_change_between_the_passes(name, how):
    def run(level):
        block, inputs = block_and_input(name, save=level, qkv_bias=True, out_bias=True)
        return changed_afterwards(block, inputs, how.replace("first", "up"))

    wanted, raised = run("L0"), []
    for level in DROPS:
        got = run(level)
        raised.append(got is None)
        if got is not None:
            assert_same_bits(got, wanted)
    assert (wanted is None) == (how == "first.bias" and name == "gpt2")
    if wanted is not None:
        assert raised[0] == (how in ("functional_call", "data"))
    if how in ("functional_call", "data", "qkv.bias"):
        assert raised[-1]


def test_functional_gradients():
    block, inputs = block_and_input()
    named = {name: p.detach() for name, p in block.named_parameters()}

    def loss(named):
        return torch.func.functional_call(block, named, inputs).square().sum()

    wanted = dict(zip(named, gradients(block, inputs, "L0")[2:]))
    for block.save in LEVELS:
        got = torch.func.grad(loss)(named)
        for name, grad in wanted.items():
            torch.testing.assert_close(got[name], grad)


def test_one_block_used_twice_and_a_graph_used_twice():
    block, inputs = block_and_input("dropout")

    def run(level):
        block.save = level
        torch.manual_seed(2)
        y = block(block(*inputs), *inputs[1:]).square().sum()
        y.backward(retain_graph=True)
        first = taken(block, inputs)
        y.backward()
        assert_same_bits(taken(block, inputs), first)
        return first

    wanted = run("L0")
    for level in DROPS:
        assert_same_bits(run(level), wanted)


def test_levels_may_differ_and_change():
    model = model_of(layers=3, head=True, final_norm=True, tied=True)
    ids = torch.randint(40, (2, 5))

    def run():
        model.zero_grad()
        model(ids).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    wanted = run()
    model.save = ["L1", "L5", "L0"]
    assert model.save == ["L1", "L5", "L0"]
    assert_same_bits(run(), wanted)
    with pytest.raises(ValueError, match="save has 2 levels, wanted one, or one for each of the 3"):
        model.save = ["L1", "L5"]
    with pytest.raises(ValueError, match="save is 'L6', wanted one of L0, L1"):
        model.save = "L6"


@pytest.mark.parametrize("counted", [False, True])  # whether the version tells of the change
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "gemma", "phi"])
def test_weights_may_change_in_the_backward_pass(name, counted):
    """As with optimizers that step as soon as a gradient is there: nothing is computed again from
    weights that have been changed."""

    def step(p):
        with torch.no_grad():
            (p if counted else p.data).sub_(p.grad, alpha=0.1)

    def run(level):
        block, inputs = block_and_input(name, save=level)
        for p in block.parameters():
            p.register_post_accumulate_grad_hook(step)
        x = inputs[0]
        (block(*inputs) ** 2).sum().backward()
        return [x.grad, *block.parameters()]

    wanted = run("L0")
    for level in DROPS:
        assert_same_bits(run(level), wanted)


def test_checkpoint_every_and_levels():
    model = model_of(layers=2)
    ids = torch.randint(40, (2, 5))

    def run():
        model.zero_grad()
        model(ids).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    wanted = run()
    model.save = "L3"
    handle = headroom.checkpoint_every(model, verify=True)
    assert_same_bits(run(), wanted)
    handle.remove()
    assert_same_bits(run(), wanted)


def test_a_backward_that_raises_leaves_nothing():
    block, inputs = block_and_input()
    wanted = gradients(block, inputs, "L0")

    class Fails(Exception):
        pass

    def fail(*_):
        raise Fails

    def live():
        return sum(type(o) is torch.Tensor for o in gc.get_objects())

    gc.freeze()
    try:
        for block.save in DROPS:
            gradients(block, inputs)
            before = live()
            handle = block.attention.qkv.weight.register_hook(fail)
            with pytest.raises(Fails):
                (block(*inputs) ** 2).sum().backward()
            handle.remove()
            taken(block, inputs)
            assert_same_bits(gradients(block, inputs), wanted)
            gc.collect()  # the exception's traceback; and torch keeps the graph until the next pass
            assert live() == before, block.save
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("level", ["L2", "L5"])
def test_compile(level):
    block, inputs = block_and_input()
    wanted = gradients(block, inputs, "L0")
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    got = gradients(compiled, inputs, level)
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def test_deep_copies_and_the_state_are_as_usual():
    block, inputs = block_and_input(save="L4")
    assert copy.deepcopy(block).save == "L4"
    assert not any("save" in name for name in block.state_dict())
    assert isinstance(block, Block) and "save=L4" in repr(block)
