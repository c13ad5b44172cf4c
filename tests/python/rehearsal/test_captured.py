"""Steps in CUDA graphs: each replay does what the eager step does."""

import math

import headroom
import pytest
import torch

from helpers.captured import captured

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("runtime")]
REPLAYS = 5


def muon_by_turns(params, **options):
    splits = (8, (2, 4)), (12, (1, 1))  # of matrices of 48 x 32 and 24 x 24
    groups = [{"params": [p], "split": each, "use_muon": True} for p, each in zip(params, splits)]
    return headroom.optim.Muon(groups, **options)


# Every optimizer that says that it is capturable, in each way in which its step differs.
OPTIMIZERS = {
    "Adam": (headroom.optim.Adam, {}),
    "Adam amsgrad": (headroom.optim.Adam, {"amsgrad": True}),
    "AdamW": (headroom.optim.AdamW, {}),
    "AdamW bfloat16": (headroom.optim.AdamW, {"dtype": torch.bfloat16}),
    "Adam8bit": (headroom.optim.Adam8bit, {}),
    "AdamW8bit": (headroom.optim.AdamW8bit, {}),
    "AdamW8bit bfloat16": (headroom.optim.AdamW8bit, {"dtype": torch.bfloat16}),
    "Adafactor": (headroom.optim.Adafactor, {}),
    "Lion": (headroom.optim.Lion, {}),
    "Lion8bit": (headroom.optim.Lion8bit, {}),
    "SGD": (headroom.optim.SGD, {"momentum": 0.9}),
    "SGD8bit": (headroom.optim.SGD8bit, {"momentum": 0.9}),
    "Muon": (headroom.optim.Muon, {}),
    "Muon8bit": (headroom.optim.Muon8bit, {}),
    "Muon with parts that take turns": (muon_by_turns, {"normuon": 0.9}),
}


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    drawn = (torch.randn(shape, generator=generator) for shape in ((48, 32), (24, 24)))
    return [torch.nn.Parameter(t.to("cuda", dtype)) for t in drawn]


def set_grads(params, step, factor=1.0, bad=False):
    """Writes the gradients of a step where those of the step before are."""
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        grad = (torch.randn(p.shape, generator=generator) * factor).to(p.device, p.dtype)
        if p.grad is None:
            p.grad = grad
        else:
            p.grad.copy_(grad)
    if bad:
        params[-1].grad[0, 0] = math.inf


def tensors_of(params, optimizer):
    states = [v for state in optimizer.state_dict()["state"].values() for v in state.values()]
    return [*params, *(v for v in states if isinstance(v, torch.Tensor))]


def assert_same(ones, others):
    assert len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        assert torch.equal(one.detach().cpu(), other.detach().cpu())


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_replay_is_an_eager_step(name, scaled):
    make, options = OPTIMIZERS[name]
    options = dict(options)
    dtype = options.pop("dtype", torch.float32)

    def prepare():
        params = parameters(dtype)
        optimizer = make(params, lr=1e-2, **options)
        scaler = headroom.amp.GradScaler("cuda", growth_interval=2, max_consecutive_skips=100)
        scaler.scale(torch.zeros((), device="cuda"))

        def step():
            if not scaled:
                return optimizer.step()
            scaler.step(optimizer)
            return scaler.update()

        return params, optimizer, scaler, step

    factor = 2.0**16 if scaled else 1.0
    eager, replayed = prepare(), prepare()
    for params, *_ in (eager, replayed):
        set_grads(params, 0, factor)
    eager[3]()
    graph, _ = captured(replayed[3])
    for number in range(1, REPLAYS + 1):
        for params, *_ in (eager, replayed):
            set_grads(params, number, factor, bad=scaled and number == 3)
        eager[3]()
        graph.replay()
        if scaled:
            assert replayed[2].get_scale() == eager[2].get_scale()
    assert_same(tensors_of(*replayed[:2]), tensors_of(*eager[:2]))
    assert all(p.isfinite().all() for p in replayed[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_replayed_fused_loss_is_the_eager_one(dtype):
    rows, features, classes = 37, 16, 90

    def drawn(seed):
        generator = torch.Generator().manual_seed(seed)
        x, w = (torch.randn(n, features, generator=generator).to(dtype) for n in (rows, classes))
        y = torch.randint(classes, (rows,), generator=generator)
        y[seed::3] = -100
        return x, w, y

    x, w, y = (t.cuda() for t in drawn(0))
    leaves = [x.requires_grad_(), w.requires_grad_()]

    def step():
        loss = headroom.linear_cross_entropy(*leaves, y)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    graph, result = captured(step)
    for seed in range(REPLAYS):
        with torch.no_grad():
            for old, new in zip((x, w, y), drawn(seed), strict=True):
                old.copy_(new)
        graph.replay()
        assert_same(result, step())


@pytest.mark.parametrize("kind", ["transformer", "mlp"])
def test_graphed_callables_train_as_eager_ones(kind):
    def prepare():
        torch.manual_seed(0)
        if kind == "mlp":
            return headroom.nn.MLP(16, 24).cuda(), torch.randn(2, 5, 16, requires_grad=True)
        config = headroom.nn.TransformerConfig(
            vocab_size=31, hidden_size=16, layers=1, heads=2, features=24, save="L2"
        )
        return headroom.nn.Transformer(config).cuda(), torch.randint(31, (2, 5))

    def trained(graphed):
        module, x = prepare()
        optimizer = headroom.optim.AdamW(module.parameters(), lr=1e-2)
        x = x.detach().cuda().requires_grad_(x.requires_grad)
        call = torch.cuda.make_graphed_callables(module, (x,)) if graphed else module
        for _ in range(REPLAYS):
            call(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                x.copy_(x.flip(1))
        return [*module.parameters()]

    assert_same(trained(True), trained(False))


@pytest.mark.parametrize("save", ["L0", "L2", "L4", "L5"])
def test_dropout_in_a_graph(save):
    """Each replay drops other elements, and the same ones in its two passes: gradients are those
    of differences between losses."""
    torch.manual_seed(0)
    config = headroom.nn.TransformerConfig(
        vocab_size=31, hidden_size=16, layers=1, heads=2, features=24, dropout=0.5, save=save
    )
    model = headroom.nn.Transformer(config).cuda()
    tokens, to = torch.randint(31, (2, 5)).cuda(), torch.randn(2, 5, 31).cuda()
    weights = [*model.blocks[0].parameters()]

    def step():
        loss = (model(tokens) * to).sum()
        return loss.detach(), torch.autograd.grad(loss, weights)

    graph, (loss, gradients) = captured(step)

    def replayed(seed):
        torch.cuda.manual_seed(seed)
        graph.replay()
        return loss.item()

    assert replayed(1) == replayed(1) != replayed(2)
    directions = [torch.randn_like(w) for w in weights]
    at = replayed(3)
    slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True)).item()
    found, size = [], 1e-3
    for sign in (1, -1):
        torch._foreach_add_([w.data for w in weights], directions, alpha=sign * size)
        found.append(replayed(3))
        torch._foreach_add_([w.data for w in weights], directions, alpha=-sign * size)
    assert (found[0] - found[1]) / (2 * size) == pytest.approx(slope, rel=0.02, abs=0.02 * abs(at))
