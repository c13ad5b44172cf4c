"""Weights that stream: the same bits as without, whatever keeps, wraps or changes a model."""

import contextlib
import copy
import functools
import gc
import io
import pickle
import threading
import time

import headroom
import pytest
import torch
from headroom.host import HostArena, HostMemoryError
from headroom.host.streaming import Stream
from headroom.nn.steps import LEVELS
from headroom.patching.streaming import STREAM
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from helpers.dropping import Part, transformer
from helpers.lagging_engine import Lagging

IDS = torch.randint(50, (2, 19), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def arena():
    arena = HostArena()
    yield arena
    gc.collect()
    assert arena.memory() == {}


@pytest.fixture(params=["inline", "late", "random 1"])
def engine(request, monkeypatch):
    if request.param == "inline":
        yield Stream.engine_of(torch.device("cpu"))
        return
    seed = request.param.removeprefix("random ")
    yield from _lagging(monkeypatch, None if seed == "late" else int(seed))


@pytest.fixture
def lagging(monkeypatch):
    yield from _lagging(monkeypatch, None)


def _lagging(monkeypatch, seed):
    engine = Lagging(seed)
    monkeypatch.setattr(Stream, "engine_of", staticmethod(lambda device: engine))
    yield engine
    gc.collect()
    engine.finish()
    assert engine.errors == []


class Tower(nn.Module):
    """Blocks that are called in any order, and as often as one wants."""

    def __init__(self, *order):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.order = nn.ModuleList(Part() for _ in range(4)), order or range(4)

    def forward(self, x):
        for k in self.order:
            x = self.blocks[k](x)
        return x


def loss_of(model, x):
    out = model(x, labels=x) if x.dtype == torch.int64 else model(x)
    out = getattr(out, "loss", out)
    return out if out.dim() == 0 else out.square().sum()


def trained(model, x=IDS, steps=3, micro=1, optimizer=None, autocast=False):
    """Losses, gradients of the last step, and parameters."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(5)
    found = []
    for step in range(steps):
        for _ in range(micro):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_of(model, x)
            loss.backward()
            found.append(loss.detach())
        if step == steps - 1:
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found + [p.detach().clone() for p in model.parameters()]


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted):
        assert torch.equal(one, other)


def stream_of(model):
    block = next(m for m in model.modules() if STREAM in vars(m))
    return vars(block)[STREAM].stream


def x_of(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


# ---- the same bits -------------------------------------------------------------------------------


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("level", [*LEVELS, "L2@host", "L5@host"])
def test_a_transformer_trains_the_same(level, micro, engine, arena):
    wanted = trained(transformer(level, dropout=0.1), micro=micro)
    model = transformer(level, dropout=0.1)
    report = headroom.patch(model, weights="host", host=arena)
    assert [*report.streamed] == [f"blocks.{k}" for k in range(4)]
    assert "4 blocks (Block) with weights on the host" in str(report)
    assert_same(trained(model, micro=micro), wanted)


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_slots_are_one_more_than_blocks_ahead(prefetch, lagging, arena):
    model = transformer("L2")
    wanted = trained(transformer("L2"))
    report = headroom.patch(model, weights="host", prefetch=prefetch, host=arena)
    assert_same(trained(model), wanted)
    stream, block = stream_of(model), vars(model.blocks[0])[STREAM]
    assert stream.slot_bytes == min(prefetch + 1, 4) * block.size
    # Each block once in the forward pass; in the backward pass those that no slot has any more.
    assert lagging.bytes_up == 3 * (4 + max(0, 3 - prefetch)) * block.size
    assert lagging.bytes_down == 3 * sum(report.streamed.values())
    assert arena.memory()["weights", "blocks"] == 4 * block.size


def test_nothing_waits_for_what_is_prefetched(lagging):
    """The copy of the next block is under way while a block runs."""
    model = Tower()
    headroom.patch(model, weights="host", norms=False)
    under_way = []

    def look(*_):
        under_way.append(sum(not copy.is_over for copy in lagging._queues["up"]))

    for block in model.blocks:
        block.register_forward_hook(look)
        block.second.register_full_backward_hook(look)
    model(x_of(5, 8)).sum().backward()
    # Behind the last block no other comes; and its weights, and those before it, are still there.
    assert under_way == [1, 1, 1, 0, 0, 1, 1, 0]


@pytest.mark.parametrize("level", ["L0", "L5", "L0@host", "L5@host"])
def test_blocks_of_any_class(level, engine):
    x = x_of(5, 8)
    wanted = trained(Tower(), x, micro=2)
    model = Tower()
    headroom.patch(model, save=level, weights="host", norms=False)
    assert_same(trained(model, x, micro=2), wanted)


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 0, 1), (3, 2, 1, 0), (1, 1, 0), (0, 2, 3)])
def test_orders_and_blocks_that_are_called_twice(order, engine):
    x = x_of(5, 8)
    wanted = trained(Tower(*order), x)
    model = Tower(*order)
    headroom.patch(model, weights="host", norms=False)
    assert_same(trained(model, x), wanted)


def test_an_order_that_changes_is_learned(lagging):
    x = x_of(5, 8)
    model, ordinary = Tower(), Tower()
    headroom.patch(model, weights="host", norms=False)
    for order in [(0, 1, 2, 3), (2, 0, 3, 1), (2, 0, 3, 1)]:
        before = lagging.bytes_up
        model.order = ordinary.order = order
        assert_same(trained(model, x, 1), trained(ordinary, x, 1))
    assert lagging.bytes_up - before == 6 * vars(model.blocks[0])[STREAM].size


def test_several_graphs_and_one_that_is_kept(engine):
    x, y = x_of(5, 8), x_of(3, 8)
    results = []
    for weights in (None, "host"):
        model = Tower().eval()
        headroom.patch(model, weights=weights, norms=False)
        first, second = model(x).sum(), model(y).square().sum()
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
        results.append([p.grad for p in model.parameters()])
    assert_same(*results)


def test_gradients_of_some_parameters_and_of_the_input(engine):
    x = x_of(5, 8).requires_grad_()
    results = []
    for weights in (None, "host"):
        model = Tower().eval()
        headroom.patch(model, weights=weights, norms=False)
        wanted = [x, model.blocks[1].second.weight, model.blocks[3].norm.bias]
        results.append(torch.autograd.grad(model(x).square().sum(), wanted))
    assert_same(*results)


def test_a_penalty_on_gradients_of_the_input(engine):
    x = x_of(5, 8).requires_grad_()
    results = []
    for weights in (None, "host"):
        model = Tower().eval()
        headroom.patch(model, weights=weights, norms=False)
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        results.append([p.grad for p in model.parameters()])
    assert_same(*results)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("own", [False, True], ids=["around", "inside"])
def test_checkpoints(own, use_reentrant, engine):
    class Inside(Part):
        def forward(self, x):
            run = super().forward
            return headroom.checkpoint(run, x, use_reentrant=use_reentrant)

    class Around(Tower):
        def forward(self, x):
            for block in self.blocks:
                x = torch_checkpoint(block, x, use_reentrant=use_reentrant)
            return x

    x, results = x_of(5, 8).requires_grad_(), []
    for weights in (None, "host"):
        model = Tower() if own else Around()
        if own:
            torch.manual_seed(0)
            model.blocks = nn.ModuleList(Inside() for _ in range(4))
        headroom.patch(model, weights=weights, norms=False)
        results.append(trained(model, x))
    assert_same(*results)


@pytest.mark.parametrize("level", ["L0", "L2", "L5"])
def test_autocast_keeps_no_casts(level, engine):
    results = []
    for weights in (None, "host"):
        model = transformer(level)
        headroom.patch(model, weights=weights)
        results.append(trained(model, autocast=True))
    assert_same(*results)


@pytest.mark.parametrize("order", [(0, 1, 1, 2), (0, 1, 0, 1)])
def test_autocast_casts_each_use_of_a_weight(order):
    """As without its cache, which casts a weight once and adds the gradients in 16 bits."""
    x, results = x_of(5, 8), []
    for weights in (None, "host"):
        model = Tower(*order).eval()
        for block in model.blocks:
            block.first.weight = block.second.weight = nn.Parameter(torch.eye(20)[:8])
            block.forward = functools.partial(twice, block)
        headroom.patch(model, weights=weights, norms=False)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=weights is not None):
            loss = model(x).square().sum()
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert_same(*results)


def twice(block, x):
    return x + F.linear(F.linear(x, block.first.weight.t()), block.second.weight)


@pytest.mark.parametrize("cast", [False, True])
def test_no_graph_holds_weights_or_casts_of_them(cast):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(300, 300), nn.Tanh()) for _ in range(4)])
    headroom.patch(model, weights="host", norms=False)
    with (
        headroom.memory.track(model) as tracked,
        torch.autocast("cpu", torch.bfloat16, enabled=cast),
    ):
        loss = model(x_of(2, 300)).sum()
    stream = stream_of(model)
    assert not any(one.is_used() for found in stream._memories.values() for one in found)
    activations = 4 * 3 * 2 * 300 * 4
    assert tracked.timeline.bytes_over_events()[-1] < stream.slot_bytes + activations
    with headroom.memory.track(model) as tracked:
        loss.backward()
    grads = sum(p.nbytes for p in model.parameters()) / 4  # those of one block at a time
    assert max(tracked.timeline.bytes_over_events()) < (3 if cast else 2) * grads + activations


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps(context, engine):
    results = []
    for weights in (None, "host"):
        model = transformer("L2")
        headroom.patch(model, weights=weights)
        with context():
            before = model(IDS)
        found = trained(model, steps=1)
        with context():
            for block in model.blocks:
                for p in block.parameters():
                    p.data.mul_(0.5)  # no version counts it
            results.append([before.clone(), *found, model(IDS).clone()])
    assert_same(*results)


# ---- threads -------------------------------------------------------------------------------------


def test_a_thread_in_the_middle_of_a_block_has_its_own_weights(engine):
    """Another one evaluates and trains meanwhile, and sees the parameters of the model."""
    x, y = x_of(5, 8), x_of(3, 8)
    model, wanted = Tower().eval(), Tower().eval()
    headroom.patch(model, weights="host", norms=False)
    params = [*model.parameters()]
    inside, others_are_done = threading.Event(), threading.Event()

    def wait(module, _):
        if threading.current_thread() is thread:
            inside.set()
            assert others_are_done.wait(20)
            assert any(p is not q for p, q in zip(model.parameters(), params, strict=True))

    found = []
    thread = threading.Thread(target=lambda: found.append(run_and_differentiate(model, x)))
    handle = model.blocks[1].second.register_forward_pre_hook(wait)
    thread.start()
    assert inside.wait(20)
    assert all(p is q for p, q in zip(model.parameters(), params, strict=True))
    assert_same([*model.state_dict().values()], [*wanted.state_dict().values()])
    assert copy.deepcopy(model.blocks[1]).second.weight.is_leaf
    with torch.no_grad():
        before = model(y).clone()
    assert_same(run_and_differentiate(model, y), run_and_differentiate(wanted, y))
    assert torch.equal(before, wanted(y))
    others_are_done.set()
    thread.join()
    handle.remove()
    assert_same(found[0], run_and_differentiate(wanted, x))
    assert all(type(m._parameters) is dict for m in model.modules())


def run_and_differentiate(model, x):
    out = model(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [*model.parameters()])]


@pytest.mark.parametrize("level", [None, "L5", "L2@host"])
def test_threads_evaluate_and_train_beside_each_other(level):
    models = [transformer(level or "L0").eval() for _ in range(2)]
    if level is None:
        models = [Tower().eval() for _ in range(2)]
    headroom.patch(models[1], save=level, weights="host", norms=False)
    inputs = [IDS[:, k : k + 7] if level else x_of(5, 8) * k for k in range(1, 4)]
    wanted = [run_and_differentiate(models[0], x) for x in inputs]
    found = [[] for _ in inputs]

    def work(k):
        for turn in range(12):
            if (turn + k) % 2:
                found[k].append(run_and_differentiate(models[1], inputs[k]))
            else:
                with torch.inference_mode():
                    found[k].append([models[1](inputs[k])])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for some, one in zip(found, wanted):
        assert len(some) == 12
        for each in some:
            assert_same(each, one[: len(each)])


# ---- frozen weights ------------------------------------------------------------------------------


@pytest.mark.parametrize("quantized", [False, True])
def test_frozen_weights_only_go_up(quantized, engine):
    def made():
        torch.manual_seed(0)
        config = headroom.nn.TransformerConfig(
            vocab_size=50, hidden_size=64, layers=4, heads=2, features=128
        )
        model = headroom.nn.Transformer(config, save="L2")
        if quantized:
            headroom.quantize(model)
        headroom.lora(model, rank=4)
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p.add_(0.01)
        return model

    wanted = trained(made())
    model = made()
    headroom.patch(model, weights="host")
    before = engine.bytes_down
    assert_same(trained(model), wanted)
    adapters = [p for b in model.blocks for p in b.parameters() if p.requires_grad]
    assert engine.bytes_down - before == 3 * sum(p.nbytes for p in adapters)
    assert adapters and sum(p.nbytes for p in adapters) < sum(
        block.size for block in stream_of(model).blocks
    )


def test_weights_that_are_frozen_and_thawed(engine):
    results = []
    for weights in (None, "host"):
        model = transformer("L1")
        headroom.patch(model, weights=weights)
        model.blocks[1].requires_grad_(False)
        found = trained(model)
        model.blocks[1].requires_grad_(True)
        model.blocks[2].mlp.requires_grad_(False)
        results.append(found + trained(model))
    assert_same(*results)


# ---- optimizers and what reads parameters --------------------------------------------------------


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("offload", [None, "state"])
def test_optimizers_of_headroom(release, offload, engine):
    results = []
    for weights in (None, "host"):
        model = transformer("L3", dropout=0.1)
        headroom.patch(model, weights=weights)
        optimizer = headroom.optim.AdamW8bit(
            model.parameters(), lr=1e-2, min_8bit_size=64, offload=offload
        )
        if release:
            headroom.release_gradients(model, optimizer)
        results.append(trained(model, optimizer=optimizer))
    assert_same(*results)


def test_clipping_accumulators_and_averages_see_whole_tensors(engine):
    results = []
    for weights in (None, "host"):
        model = transformer("L2")
        headroom.patch(model, weights=weights)
        average = torch.optim.swa_utils.AveragedModel(model)
        accumulator = headroom.GradAccumulator(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(2):
            for _ in range(2):
                with accumulator.micro_batch():
                    model(IDS, labels=IDS).backward()
            accumulator.finish()
            found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        results.append([*found, *average.parameters(), average(IDS)])
    assert_same(*results)


def test_gradients_and_weights_are_in_the_arena(arena):
    model = transformer()
    report = headroom.patch(model, weights="host", host=arena)
    loss_of(model, IDS).backward()
    for block in model.blocks:
        for p in block.parameters():
            assert type(p) is nn.Parameter and p.is_leaf
            assert headroom.host.arena.in_arena(p.data) and headroom.host.arena.in_arena(p.grad)
    size = vars(model.blocks[0])[STREAM].size
    assert arena.memory() == {("weights", "blocks"): 4 * size, ("gradients", "blocks"): 4 * size}
    assert sum(report.streamed.values()) <= 4 * size < 1.3 * sum(report.streamed.values()) + 4096
    held = model.blocks[0].mlp.down.weight.grad
    before = held.clone()
    model.zero_grad()
    loss_of(model, IDS).mul(3).backward()
    assert torch.equal(held, before)  # who holds a gradient keeps it


def test_gradients_that_are_there_stay():
    """Blocks take in parameters that train already, and those that took others' places later."""
    model = transformer()
    loss_of(model, IDS).backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    headroom.patch(model, weights="host")
    assert_same([p.grad for p in model.parameters()], wanted)
    down = model.blocks[1].mlp.down
    down.weight = nn.Parameter(down.weight.detach().clone())
    down.weight.grad = torch.ones_like(down.weight)
    with torch.no_grad():
        model(IDS)
    assert torch.equal(down.weight.grad, torch.ones_like(down.weight))
    headroom.unpatch(model)
    assert torch.equal(down.weight.grad, torch.ones_like(down.weight))


def test_a_state_dict_is_whole_and_loads(engine):
    wanted = transformer()
    model = transformer()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    state = wanted.state_dict()
    headroom.patch(model, weights="host")
    assert model.state_dict().keys() == state.keys()
    model.load_state_dict(state)
    assert_same(trained(model), trained(wanted))
    for assign in (False, True):
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        other = transformer()
        headroom.patch(other, weights="host")
        other.load_state_dict(torch.load(file, weights_only=True), assign=assign)
        assert_same(trained(other), trained(copy.deepcopy(wanted)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_stream_by_themselves(copied, engine):
    wanted = trained(transformer("L2"))
    model = transformer("L2")
    headroom.patch(model, weights="host")
    other, part = copied(model), copied(model.blocks[1])
    assert_same(trained(model), wanted)
    assert_same(trained(other), wanted)
    assert stream_of(other) is not stream_of(model)
    assert len(stream_of(other).blocks) == 4 and stream_of(part).blocks == []
    assert headroom.host.arena.in_arena(other.blocks[0].mlp.down.weight.data)
    headroom.unpatch(other)
    assert_same(trained(other, steps=1), trained(model, steps=1))


def test_casts_and_moves_go_block_by_block(engine, arena):
    model = transformer("L2")
    headroom.patch(model, weights="host", host=arena)
    wanted = transformer("L2").bfloat16()
    model.bfloat16()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(headroom.host.arena.in_arena(p.data) for p in model.blocks.parameters())
    assert_same(trained(model.to("cpu")), trained(wanted))
    size = sum(vars(block)[STREAM].size for block in model.blocks)
    assert arena.memory()["weights", "blocks"] == size


def test_adapters_that_come_later_stream_too(engine):
    results = []
    for weights in (None, "host"):
        model = transformer("L0")
        headroom.patch(model, weights=weights)
        trained(model, steps=1)
        torch.manual_seed(7)
        headroom.lora(model, rank=2)
        results.append(trained(model))
    assert_same(*results)
    lora = [p for n, p in model.named_parameters() if "blocks" in n and "lora" in n]
    assert lora and all(headroom.host.arena.in_arena(p.data) for p in lora)


# ---- transformers --------------------------------------------------------------------------------


def language_model(kind, **options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=50, n_positions=64, n_embd=24, n_layer=3, n_head=2
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=2,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("save", [None, "L0", "L2", "L5", "L2@host"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_models_of_transformers(kind, save, engine):
    models = [language_model(kind).train() for _ in range(2)]
    for model, weights in zip(models, (None, "host")):
        report = headroom.patch(model, save=save, weights=weights, loss=save == "L2")
    assert len(report.streamed) == 3
    assert_same(*[trained(model, micro=2) for model in models])
    for model in models:
        model.eval()
    found = [model.generate(IDS[:, :5], max_new_tokens=6, do_sample=False) for model in models]
    assert torch.equal(*found)
    states = [model.state_dict() for model in models]
    assert states[0].keys() == states[1].keys()
    assert_same([*states[1].values()], [*states[0].values()])
    assert all(not headroom.host.arena.in_arena(x) for x in (models[1].lm_head.weight.data,))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("save", [None, "L2"])
def test_checkpoints_of_transformers(save, use_reentrant, engine):
    results = []
    for weights in (None, "host"):
        model = language_model("llama").train()
        headroom.patch(model, save=save, weights=weights)
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        results.append(trained(model))
    assert_same(*results)


# ---- what stays ----------------------------------------------------------------------------------


def test_tied_weights_stay_and_the_report_says_so(engine):
    def made():
        model = Tower()
        model.blocks[2].first.weight = model.blocks[0].first.weight
        model.blocks[1].first.weight = nn.Parameter(model.blocks[1].second.weight.t())
        model.blocks[3].lstm = nn.LSTM(8, 8)
        return model

    x = x_of(5, 8)
    wanted = trained(made(), x)
    model = made()
    report = headroom.patch(model, weights="host", norms=False)
    stays = {left.name: left.reason for left in report.left}
    assert "tied to one outside" in stays["blocks.0.first.weight"]
    assert "tied to one outside" in stays["blocks.2.first.weight"]
    assert "shares memory" in stays["blocks.1.first.weight"]
    assert "list of them" in stays["blocks.3.lstm.weight_ih_l0"]
    assert not headroom.host.arena.in_arena(model.blocks[0].first.weight.data)
    assert headroom.host.arena.in_arena(model.blocks[0].second.weight.data)
    assert_same(trained(model, x), wanted)


def test_weights_of_one_block_may_be_tied(engine):
    def made():
        model = Tower()
        for block in model.blocks:
            block.third = nn.Linear(20, 8)
            block.second.weight = block.third.weight
        return model

    x = x_of(5, 8)
    model = made()
    headroom.patch(model, weights="host", norms=False)
    assert_same(trained(model, x), trained(made(), x))
    assert model.blocks[0].second.weight is model.blocks[0].third.weight


def test_some_blocks(engine, arena):
    wanted = trained(transformer("L1"))
    model = transformer("L1")
    report = headroom.patch(model, weights={1: "host", "blocks.3": "host"}, host=arena)
    assert [*report.streamed] == ["blocks.1", "blocks.3"]
    assert_same(trained(model), wanted)
    assert not headroom.host.arena.in_arena(model.blocks[0].mlp.down.weight.data)


# ---- the way back, and patches again -------------------------------------------------------------


def test_unpatch_brings_all_back(engine, arena):
    model = transformer("L2")
    params, state = [*model.parameters()], copy.deepcopy(model.state_dict())
    report = headroom.patch(model, weights="host", host=arena)
    loss_of(model, IDS).backward()
    grads = [p.grad.clone() for p in params]
    report.undo()
    gc.collect()
    assert arena.memory() == {}
    assert all(a is b for a, b in zip(model.parameters(), params))
    assert_same([*model.state_dict().values()], [*state.values()])
    assert_same([p.grad for p in params], grads)
    model.zero_grad()
    assert_same(trained(model), trained(transformer("L2")))
    headroom.unpatch(model)


def test_a_second_patch_moves_nothing_that_is_there(lagging, arena):
    model = transformer("L0")
    headroom.patch(model, weights="host", host=arena)
    at = [p.data_ptr() for p in model.blocks.parameters()]
    headroom.patch(model, "L2", weights="host", host=arena, prefetch=2)
    assert [p.data_ptr() for p in model.blocks.parameters()] == at
    assert_same(trained(model), trained(transformer("L2")))
    headroom.patch(model, weights={0: "host"}, host=arena)
    assert [headroom.host.arena.in_arena(b.mlp.down.weight.data) for b in model.blocks] == [
        *(True, False, False, False)
    ]


def test_an_arena_without_room_leaves_the_model_as_it_was(arena):
    model = transformer()
    attributes = {name: dict(vars(m)) for name, m in model.named_modules()}
    at = [p.data_ptr() for p in model.parameters()]
    small = HostArena("60 KB")
    with pytest.raises(HostMemoryError, match="weights of blocks"):
        headroom.patch(model, weights="host", host=small)
    gc.collect()
    assert small.bytes == 0
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == attributes
    assert len(at) == len([*model.parameters()])
    headroom.patch(model, weights="host", host=arena)
    kept = [p.data_ptr() for p in model.blocks.parameters()]
    with pytest.raises(ValueError, match="prefetch is 0"):
        headroom.patch(model, weights="host", host=arena, prefetch=0)
    assert [p.data_ptr() for p in model.blocks.parameters()] == kept
    assert_same(trained(model), trained(transformer()))


# ---- errors --------------------------------------------------------------------------------------


def test_passes_that_raise_leave_nothing_behind(engine):
    x = x_of(5, 8)
    model = Tower()
    headroom.patch(model, weights="host", norms=False)
    handles = [model.blocks[2].first.register_forward_hook(_fail)]
    with pytest.raises(KeyboardInterrupt):
        model(x)
    handles[0].remove()
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in model.parameters())
    assert not any(p.grad_fn for p in model.parameters())
    handles = [model.blocks[1].second.register_full_backward_hook(_fail)]
    with pytest.raises(KeyboardInterrupt):
        model(x).sum().backward()
    handles[0].remove()
    model.zero_grad()
    model(x)
    stream = stream_of(model)
    assert not stream._arrivals
    assert_same(trained(model, x), trained(Tower(), x))
    gc.collect()
    assert not any(one.is_used() for found in stream._memories.values() for one in found)


def _fail(*_):
    raise KeyboardInterrupt


def test_weights_that_were_changed_since_raise():
    model = transformer("L0")
    headroom.patch(model, weights="host")
    loss = loss_of(model, IDS)
    with torch.no_grad():
        model.blocks[1].mlp.down.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"blocks\.1\.mlp\.down\.weight is at version"):
        loss.backward()


def test_a_block_that_writes_to_its_weights_is_refused():
    model = Tower()

    def write(module, _):
        with torch.no_grad():
            module.weight.clamp_(-1, 1)

    model.blocks[1].second.register_forward_pre_hook(write)
    headroom.patch(model, weights="host", norms=False)
    with pytest.raises(RuntimeError, match=r"blocks\.1\.second\.weight is written to"):
        model(x_of(5, 8))


def test_bad_arguments():
    with pytest.raises(ValueError, match="weights is 'disk', wanted \"host\""):
        headroom.patch(transformer(), weights="disk")
    with pytest.raises(ValueError, match="weights has 7, which is no block of Transformer"):
        headroom.patch(transformer(), weights={7: "host"})
    with pytest.raises(ValueError, match="weights is True"):
        headroom.patch(transformer(), weights=True)
    with pytest.raises(ValueError, match="no repeated blocks"):
        headroom.patch(nn.Linear(2, 2), weights="host")
    with pytest.raises(TypeError, match=r"wanted a headroom\.HostArena"):
        headroom.patch(transformer(), weights="host", host="32 GiB")
    with pytest.raises(ValueError, match=r"blocks\.0\..* is on meta"):
        headroom.patch(transformer().to("meta"), weights="host")
    mixed = transformer()
    mixed.blocks[1].mlp.to("meta")
    with pytest.raises(ValueError, match="on meta|several devices"):
        headroom.patch(mixed, weights="host")


def test_compiled_models_and_transforms_are_refused():
    with pytest.raises(ValueError, match="compiled"):
        headroom.patch(torch.compile(transformer()), weights="host")
    model = transformer()
    model.compile()
    with pytest.raises(ValueError, match="compiled"):
        headroom.patch(model, weights="host")
    model = Tower().eval()
    headroom.patch(model, weights="host", norms=False)
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.grad(lambda x: model(x).sum())(x_of(5, 8))
    with pytest.raises(RuntimeError, match="cannot trace"):
        torch.compile(model, backend="eager", fullgraph=True)(x_of(5, 8))


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", [False, True])
def test_files(release, tmp_path):
    results = []
    for weights in (None, "host"):
        model = transformer("L2")
        arena = HostArena(file=tmp_path)
        headroom.patch(model, weights=weights, host=arena)
        optimizer = headroom.optim.AdamW(model.parameters(), lr=1e-2)
        headroom.optim.offload(optimizer, host=arena)
        if release:
            headroom.release_gradients(model, optimizer)
        results.append(trained(model, optimizer=optimizer))
    assert_same(*results)
    assert not [*tmp_path.iterdir()]  # files have no names


# ---- ranks ---------------------------------------------------------------------------------------


def under_ddp(rank):
    results = []
    for weights in (None, "host"):
        model = Tower().eval()
        headroom.patch(model, weights=weights, norms=False)
        wrapped = nn.parallel.DistributedDataParallel(model)
        x = torch.randn((5, 8), generator=torch.Generator().manual_seed(rank))
        results.append(trained(wrapped, x, micro=2))
    assert_same(*results)


def under_fsdp(rank):
    from torch.distributed.fsdp import fully_shard

    model = Tower()
    fully_shard(model)
    with pytest.raises(ValueError, match="FSDP has a CPUOffloadPolicy instead"):
        headroom.patch(model, weights="host", norms=False)
    model = Tower()
    headroom.patch(model, weights="host", norms=False)
    fully_shard(model)
    with pytest.raises(RuntimeError, match="cannot stream"):
        model(x_of(5, 8))


def test_two_ranks(ranks):
    ranks(under_ddp)
    ranks(under_fsdp)


# ---- devices -------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_blocks_compute_where_the_rest_of_the_model_goes():
    model, x = Tower(), x_of(5, 8)
    model.head = nn.Linear(8, 8)
    headroom.patch(model, weights="host", norms=False)
    wanted = model.eval()(x)
    file = io.BytesIO()
    torch.save(model.cuda(), file)

    def assert_on(device, model):
        assert {vars(block)[STREAM].device.type for block in model.blocks} == {device}
        torch.testing.assert_close(model(x.to(device)).cpu(), wanted)
        headroom.unpatch(model)
        assert {p.device.type for p in model.parameters()} == {device}

    for mapped, device in ((None, "cuda"), ("cpu", "cpu")):
        file.seek(0)
        assert_on(device, torch.load(file, map_location=mapped, weights_only=False))
    assert_on("cuda", copy.deepcopy(model))
    assert_on("cpu", copy.deepcopy(model).cpu())
    assert_on("cpu", copy.deepcopy(model).to("cpu", torch.float64).float())
    assert_on("cuda", copy.deepcopy(model).cpu().cuda().float())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("slow", [False, True])
def test_gradients_do_not_pile_up_where_the_host_is_slow(slow, arena):
    """A plan knows how many blocks' gradients are on the host at once."""
    model, x = Tower(*range(4), *range(4)).cuda(), x_of(5, 8).cuda()
    model.blocks.extend(Part().cuda() for _ in range(6))
    model.order = range(10)
    optimizer = headroom.optim.AdamW(model.parameters())
    options = {"forward": loss_of, "weights": "host", "release": 1}
    wanted = headroom.plan(model, optimizer, x, **options).host_peak_bytes
    headroom.patch(model, weights="host", norms=False, host=arena)
    for block in model.blocks if slow else ():
        block.first.weight.register_post_accumulate_grad_hook(lambda p: time.sleep(0.02))
    with headroom.release_gradients(model, optimizer, bucket_bytes=1):
        for _ in range(3):
            loss_of(model, x).backward()
            optimizer.step()
    assert arena.peak <= wanted


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_pass_that_raises_on_a_gpu_leaves_nothing_in_the_arena(hook, arena):
    model = Tower().cuda()
    headroom.patch(model, weights="host", norms=False, host=arena)
    getattr(model.blocks[2].second.weight, hook)(_fail)
    with contextlib.suppress(KeyboardInterrupt):  # and not kept, with all that it went through
        model(x_of(5, 8).cuda()).sum().backward()
        pytest.fail("the pass did not raise")
    del model
    until = time.monotonic() + 10  # the device's thread is still in the pass
    while arena.memory() and time.monotonic() < until:
        gc.collect()
    assert arena.memory() == {}
