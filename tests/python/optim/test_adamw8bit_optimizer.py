"""Adam8bit and AdamW8bit: which moments have 8 bits, and what they do to training."""

import headroom
import pytest
import torch

from helpers.bits import assert_same_bits, same_bits
from helpers.optimizers8bit import (
    ADAM8BIT,
    ADAMW8BIT,
    CLASSES,
    is_8bit,
    mixed,
    run,
    set_grads,
)
from helpers.parameters import parameter, with_grads
from helpers.reference8bit import Sample, check_moments, check_params
from helpers.samples import FLOATS

# ---- Construction --------------------------------------------------------------------------------


# ---- Which moments have 8 bits -------------------------------------------------------------------


def test_the_size_decides(device):
    shapes = [(4096,), (4095,), (64, 64), (), (0,), (5000,)]
    params = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    groups = [
        {"params": params[:-1]},
        {"params": params[-1:], "optim_bits": 32},
        {"params": [parameter(100, device=device)], "min_8bit_size": 100},
        {"params": [parameter(99, device=device)], "min_8bit_size": 100},
    ]
    optimizer = ADAMW8BIT(groups)
    params += [group["params"][0] for group in groups[2:]]
    with_grads(*params)
    optimizer.step()
    assert [is_8bit(optimizer, p) for p in params] == [1, 0, 1, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("block_size", [64, 128, 256, 512])
def test_scales_are_one_per_block(block_size, device):
    shapes = [(1000,), (3, 512), (7, 100), (2, 2, 256)]
    params, optimizer = mixed(device, shapes, min_8bit_size=0, block_size=block_size)
    run(params, optimizer, 1)
    for p in params:
        for name in ("exp_avg_absmax", "exp_avg_sq_absmax"):
            scales = optimizer.state[p][name]
            assert scales.numel() == -(-p.numel() // block_size) and scales.dtype == torch.float32
            assert scales.is_contiguous() and (scales > 0).all()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 50)
        self.head = torch.nn.Linear(50, 100)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


OVERRIDES = {
    "none": (lambda net: [], [True, True, False]),
    "by tensor": (lambda net: [(net.head.weight, None, 32)], [True, False, False]),
    "by module and name": (lambda net: [(net, "head.bias", 8)], [True, True, True]),
    "by module": (lambda net: [(net.head, None, 32)], [True, False, False]),
    "all": (lambda net: [(net, None, 8)], [True, True, True]),
    "the last one counts": (
        lambda net: [(net, None, 32), (net.embedding, "weight", 8)],
        [True, False, False],
    ),
}


@pytest.mark.parametrize("make, wanted", OVERRIDES.values(), ids=OVERRIDES)
def test_override(make, wanted, device):
    net = Net().to(device)
    optimizer = ADAMW8BIT(net.parameters())
    for target, name, bits_wanted in make(net):
        optimizer.override(target, name, bits=bits_wanted)
    by_memory = {name for row in optimizer.memory() if "uint8" in row.dtypes for name in row.names}
    net(torch.arange(100, device=device)).square().mean().backward()
    optimizer.step()
    assert [is_8bit(optimizer, p) for p in net.parameters()] == wanted
    assert len(by_memory) == sum(wanted)


def test_override_refuses():
    net = Net()
    optimizer = ADAMW8BIT([("embedding", net.embedding.weight)])
    with pytest.raises(ValueError, match="bits must be 8 or 32, got 16"):
        optimizer.override(net.embedding, bits=16)
    for target in (net.head.weight, net, net.head):
        with pytest.raises(ValueError, match="a parameter that this optimizer does not have"):
            optimizer.override(target, bits=32)
    with pytest.raises(AttributeError, match="nothing"):
        optimizer.override(net, "nothing", bits=32)
    with_grads(*net.parameters())
    optimizer.step()
    assert is_8bit(optimizer, net.embedding.weight)  # the refused ones left nothing behind
    with pytest.raises(ValueError, match="'embedding' has a state already; call override"):
        optimizer.override(net.embedding, bits=32)


def test_small_parameters_have_the_bits_of_adamw(device):
    """Beside 8-bit ones in a group, and in bfloat16 with the float32 moments of state_dtype."""
    for dtype in FLOATS:
        params, optimizer = run(*mixed(device, dtype=dtype))
        alike, plain = mixed(device, dtype=dtype, cls=headroom.optim.AdamW, state_dtype=FLOATS[0])
        run(alike, plain)
        assert [is_8bit(optimizer, p) for p in params] == [True, False]
        assert_same_bits([params[1]], [alike[1]])
        for name, value in plain.state[alike[1]].items():
            assert same_bits(optimizer.state[params[1]][name], value)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@CLASSES
def test_moments_and_parameters_against_float64(cls, dtype, device):
    """A step after three, held to the rule that the op is held to."""
    adam = cls is ADAM8BIT
    params, optimizer = run(*mixed(device, [(31, 17), (1000,)], dtype, cls, min_8bit_size=0))
    before = sample_of(params, optimizer)
    set_grads(params, 7)
    before.grads = [p.grad for p in params]
    optimizer.step()
    got = sample_of(params, optimizer)
    check_moments(got, before, decoupled=not adam)
    if dtype == torch.float32:
        check_params(got, before, decoupled=not adam)


def sample_of(params, optimizer):
    keys = ("exp_avg", "exp_avg_absmax", "exp_avg_sq", "exp_avg_sq_absmax", "step")
    values = [[optimizer.state[p][key] for p in params] for key in keys]
    return Sample([p.detach() for p in params], [p.grad for p in params], *values).clone()


@CLASSES
def test_bnb_exact(cls, device):
    """Whatever the class: the rule always decouples the decay, of the small parameters too."""
    params, optimizer = run(*mixed(device, cls=cls, bnb_exact=True, nonfinite="propagate"))
    large = params[:1]
    before = sample_of(large, optimizer)
    set_grads(params, 7)
    before.grads = [large[0].grad]
    optimizer.step()
    got = sample_of(large, optimizer)
    check_moments(got, before, bnb_exact=True)
    check_params(got, before, bnb_exact=True)
    alike, plain = mixed(device, cls=headroom.optim.AdamW)
    for seed in (0, 1, 2, 7):
        set_grads(alike, seed)
        plain.step()
    assert_same_bits(params[1:], alike[1:])


# ---- Trajectories --------------------------------------------------------------------------------


def test_training_reaches_the_loss_of_float32_moments(device):
    """200 steps of a small regression: losses are those with float32 moments to 1% of the first
    one, and fall by more than a factor of 1000."""
    losses = {}
    for cls in (torch.optim.AdamW, ADAMW8BIT):
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh()
        ).append(torch.nn.Linear(64, 1))
        x = torch.randn(256, 20)
        y = torch.sin(x[:, :3].sum(1, keepdim=True))
        net, x, y = net.to(device), x.to(device), y.to(device)
        small = {"min_8bit_size": 1000} if cls is ADAMW8BIT else {}
        optimizer = cls(net.parameters(), lr=3e-3, **small)
        losses[cls] = []
        for _ in range(200):
            optimizer.zero_grad()
            loss = (net(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            losses[cls].append(loss.detach())
    assert [is_8bit(optimizer, p) for p in net.parameters()] == [1, 0, 1, 0, 0, 0]
    theirs, ours = (torch.stack(losses[cls]).double() for cls in losses)
    assert ours[-1] < ours[0] / 1000
    assert (ours - theirs).abs().max() < 0.01 * ours[0]
