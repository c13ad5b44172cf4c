"""What holds for every optimizer in every mode: its step has the same bits however it is run."""

import headroom
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from helpers import modes
from helpers.bits import assert_same_bits
from helpers.compiled import compile_step, graphs
from helpers.mesh import RESUMMED, mesh, whole
from helpers.modes import EVERY, IN_EVERY_WAY, entries
from helpers.optimizer_suite import OnLists

QUICK = [  # the others take seconds each
    name if name in IN_EVERY_WAY else pytest.param(name, marks=pytest.mark.slow) for name in EVERY
]


def pair(name):
    """The same model and optimizer twice."""
    built = [modes.build(torch.bfloat16) for _ in range(2)]
    return [(model, EVERY[name].make(model.parameters())) for model in built]


def assert_same_run(left, right):
    assert_same_bits(left[0].parameters(), right[0].parameters())
    for one, other in zip(entries(left[1]), entries(right[1])):
        assert one.keys() == other.keys()
        assert_same_bits(one.values(), [other[key] for key in one])


@pytest.mark.parametrize("name", EVERY)
def test_a_step_by_addresses_has_the_bits_of_one_on_lists(name):
    by_addresses, on_lists = pair(name)
    for step in range(3):
        modes.train(*by_addresses, [step])
        on_lists[1].zero_grad()
        modes.loss_of(on_lists[0], modes.batch(step)).backward()
        with OnLists():
            on_lists[1].step()
    assert_same_run(by_addresses, on_lists)


@pytest.mark.parametrize("name", QUICK)
def test_a_compiled_step_has_the_bits_of_the_eager_one(name, fresh_dynamo):
    eager, compiled = pair(name)
    is_muon = name.startswith("muon")  # which runs between graphs
    step = compile_step(compiled[1], "aot_eager", fullgraph=not is_muon)
    for number in range(3):
        for model, optimizer in (eager, compiled):
            optimizer.zero_grad()
            modes.loss_of(model, modes.batch(number)).backward()
        eager[1].step()
        step()
    assert_same_run(eager, compiled)
    assert is_muon or graphs() == 1


@pytest.mark.parametrize("bucket_bytes", [0, 1000])
@pytest.mark.parametrize("name", EVERY)
def test_a_released_step_has_the_bits_of_the_ordinary_one(name, bucket_bytes):
    ordinary, released = pair(name)
    with headroom.release_gradients(*released, bucket_bytes=bucket_bytes):
        for model, optimizer in (ordinary, released):
            modes.train(model, optimizer, range(3))
    assert_same_run(ordinary, released)


# ---- FSDP2 ---------------------------------------------------------------------------------------


def blocks():
    """A model whose shards on two ranks are whole blocks of 8-bit moments."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(256, 6), nn.Tanh(), nn.Linear(6, 256, bias=False)).to(
        torch.bfloat16
    )


def sharded(rank, name):
    mode, models = EVERY[name], [blocks() for _ in range(3)]
    for model in models[1:]:
        fully_shard(model, mesh=mesh())
    single, *_ = optimizers = [mode.make(model.parameters()) for model in models]
    headroom.release_gradients(models[2], optimizers[2])
    for step in range(3):
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(step)).bfloat16()
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            optimizer.step()
    expected = list(models[0].parameters())
    for model, optimizer in zip(models[1:], optimizers[1:]):
        if isinstance(single, headroom.optim.Adafactor):  # sums over ranks have another order
            tolerance = {"rtol": 2**-6, "atol": RESUMMED["atol"]}
            for param, want in zip(whole(model.parameters()), expected):
                torch.testing.assert_close(param, want, **tolerance)
            continue
        if isinstance(single, headroom.optim.Muon | headroom.optim.Muon8bit):  # norms of matrices
            for param, want in zip(whole(model.parameters()), expected):
                torch.testing.assert_close(param, want, rtol=2**-6, atol=2e-3)
            continue
        assert_same_bits(whole(model.parameters()), expected)
        weights = headroom.optim.master_weights(optimizer).values()
        assert_same_bits(whole(weights), headroom.optim.master_weights(single).values())
        for entry, want in zip(entries(optimizer), entries(single)):
            assert entry.keys() == want.keys()
            names = sorted(entry.keys() - {"remainder"})  # collectives have no int16
            states = whole(entry[key] for key in names)
            assert_same_bits([t.flatten() for t in states], [want[key].flatten() for key in names])


@pytest.mark.gloo
@pytest.mark.parametrize("name", EVERY)
def test_shards_have_the_bits_of_the_whole(ranks, name):
    """Released or not."""
    if EVERY[name].options.get("code_rounding") == "stochastic":
        pytest.skip("codes that are rounded at random depend on the shard")
    ranks(sharded, name)
