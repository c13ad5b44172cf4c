"""Plans of blocks whose weights are on the host: against steps on the CPU, where host and device
are one, and the arena's bytes are none of torch's."""

from functools import partial

import headroom
import pytest
import torch
from headroom.host import HostArena, trim
from headroom.host.engines import engine_of
from headroom.nn import Transformer, TransformerConfig
from headroom.optim import AdamW, AdamW8bit, SGD8bit
from headroom.patching.streaming import streamed_blocks
from torch import nn

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self, layers=4, freeze=False):
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
            for _ in range(layers)
        )
        self.last = nn.Linear(256, 10)
        for p in self.blocks.parameters() if freeze else ():
            p.requires_grad_(False)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def loss(out):
    return out.float().square().mean()


def ours(**options):
    config = TransformerConfig(vocab_size=96, hidden_size=128, layers=4, heads=4, features=344)
    return Transformer(config)


def run(model, optimizer, x, forward, micro_batches=1):
    """Returns the peak of two steps, and the bytes that the second copies."""
    engine, counts = engine_of(CPU), []
    with headroom.memory.track(model, optimizer) as tracked:
        for _ in range(2):
            before = engine.bytes_up + engine.bytes_down
            for _ in range(micro_batches):
                (forward(model, x) / micro_batches).backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(engine.bytes_up + engine.bytes_down - before)
    return tracked.peak_bytes, counts[1]


MODELS = {
    "plain": (Net, lambda: torch.randn(32, 64), lambda model, x: loss(model(x))),
    "frozen": (
        lambda: Net(freeze=True), lambda: torch.randn(32, 64), lambda model, x: loss(model(x))
    ),
    "ours": (ours, lambda: torch.randint(96, (4, 33)), lambda model, x: loss(model(x))),
}  # fmt: skip


@pytest.mark.parametrize(
    "where, save", [("host", None), ("host", "L5"), ({0: "host", 2: "host"}, "L5")]
)
@pytest.mark.parametrize("offload, micro_batches", [(None, 1), ("state", 2)])
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_says_what_a_step_takes(name, offload, micro_batches, where, save):
    """Before the model is patched, and after."""
    torch.manual_seed(0)
    make, batch, forward = MODELS[name]
    model, x, arena = make(), batch(), HostArena()
    if save is not None:
        headroom.patch(model, save=save)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = AdamW8bit(params)
    options = {"forward": forward, "accumulation": micro_batches}
    bare = headroom.plan(model, optimizer, x, offload=offload, **options)
    before = headroom.plan(model, optimizer, x, weights=where, offload=offload, **options)
    headroom.patch(model, save=save, weights=where, host=arena)
    if offload is not None:
        headroom.optim.offload(optimizer, host=arena)
    after = headroom.plan(model, optimizer, x, **options)
    peak, copied = run(model, optimizer, x, forward, micro_batches)
    for plan in (before, after):
        assert plan.peak_bytes == pytest.approx(peak, rel=0.002)
        assert plan.host_peak_bytes == arena.peak
        assert plan.link_bytes == copied
    assert before.peak_bytes < bare.peak_bytes
    trim()


def test_weights_on_the_host_are_of_the_device_that_their_block_computes_on():
    """As on a GPU, where the rest of the model is on another device than these weights."""
    model, x, arena = Net(), torch.randn(32, 64), HostArena()
    options = {"forward": lambda model, x: loss(model(x)), "device": "cuda"}
    headroom.patch(model, weights="host", host=arena)
    wanted = headroom.plan(model, AdamW8bit, x, **options)
    for module in (model.first, model.last):
        module.to("meta")
    with pytest.raises(ValueError, match="several devices"):
        headroom.plan(model, AdamW8bit, x, **options)
    for block in streamed_blocks(model):
        block.device = torch.device("meta")
    found = headroom.plan(model, AdamW8bit, x, **options)
    assert found.allocated_bytes == wanted.allocated_bytes
    assert found.host_peak_bytes == wanted.host_peak_bytes > 0
    trim()


@pytest.mark.parametrize("pinned", [False, True])
def test_what_torch_saves_on_the_cpu_is_on_the_host(pinned):
    """One block's rows are there for its backward pass, and those of all blocks on the host."""

    class Saving(Net):
        def forward(self, x):
            with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
                return super().forward(x)

    torch.manual_seed(0)
    x = torch.randn(4096, 64)
    options = {"forward": lambda model, x: loss(model(x)), "device": "cuda"}
    bare, saving = (headroom.plan(make(), None, x, **options) for make in (Net, Saving))
    kept = bare.timeline.most_by_kind["activations"]
    assert 0.9 * kept < saving.host_peak_bytes < 1.2 * kept
    assert saving.link_bytes == 2 * saving.host_peak_bytes
    assert saving.peak_bytes < bare.peak_bytes - 0.6 * kept
    assert bare.timeline.host is None


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("where", ["before", "after"])
def test_states_of_weights_on_the_host_are_there(where, release):
    """They are tensors of the CPU, which are where their parameters are, without an offload too."""
    options = {"forward": lambda model, x: loss(model(x)), "device": "cuda", "release": release}
    x = torch.randn(32, 64)
    plan = partial(headroom.plan, Net(), sample_batch=x, weights="host", **options)
    if where == "after":
        model = Net()
        headroom.patch(model, weights="host", host=HostArena())
        plan = partial(headroom.plan, model, sample_batch=x, **options)
    # Without momentum there are no states.
    bare, with_states = plan(partial(SGD8bit, lr=0.1, momentum=0.0)), plan(AdamW)
    for found in bare, with_states:  # slots are filled ahead from the first pass on
        first, second = (a for a in found.timeline.allocations if a.op == "slots")
        assert second.start == first.start + 1
    model = Net()
    of_blocks = 8 * sum(p.numel() for p in model.blocks.parameters())
    of_others = 8 * sum(p.numel() for p in model.parameters()) - of_blocks
    assert with_states.timeline.most_by_kind["optimizer_state"] == pytest.approx(of_others, abs=199)
    assert with_states.host_peak_bytes - bare.host_peak_bytes == pytest.approx(of_blocks, abs=199)
    trim()
