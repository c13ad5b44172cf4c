"""retry_on_oom in loops as people write them, which fail at every few of their allocations."""

import copy

import headroom
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from helpers.failing_allocator import failing_allocator
from helpers.retrying import Run, fail_everywhere, model_of


@pytest.fixture
def allocator():
    with failing_allocator() as allocator:
        yield allocator


class Loop(Run):
    """A model of one block, and Headroom's AdamW."""

    late = None  # what an error says that comes when an optimizer has stepped or begun to
    adamw = headroom.optim.AdamW

    def made(self, save):
        self.model = model_of(save, layers=1)
        self.optimizer = self.adamw(self.model.parameters(), lr=0.01)

    def loss(self, batch):
        return self.model(batch).square().mean()

    def plain(self, batch):
        self.loss(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class MicroBatches(Loop):
    """Micro-batches in an accumulator."""

    more = ("accumulator",)

    def made(self, save):
        super().made(save)
        self.accumulator = headroom.GradAccumulator(self.model)

    def plain(self, batch):
        for part in batch.chunk(2):
            with self.accumulator.micro_batch(weight=len(part)):
                self.loss(part).backward()
        self.accumulator.finish()
        self.optimizer.step()
        self.optimizer.zero_grad()


class OverCalls(Loop):
    """Gradients that add up over two calls."""

    calls = 0

    def plain(self, batch):
        self.loss(batch).backward()
        if self.calls % 2:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.calls += 1

    def others(self):
        return {f"gradient {k}": p.grad for k, p in enumerate(self.model.parameters())}


class Zeroed(Loop):
    """Gradients that are set to 0 at the start of a step."""

    def plain(self, batch):
        self.optimizer.zero_grad(set_to_none=False)
        self.loss(batch).backward()
        self.optimizer.step()


class Scaled(Loop):
    """Mixed precision as torch's pages have it."""

    more = ("scaler",)
    adamw = torch.optim.AdamW
    late = "AdamW has stepped|that of AdamW failed half way"  # scaler.update() allocates, too
    scaler_of = torch.amp.GradScaler

    def made(self, save):
        super().made(save)
        self.scaler = self.scaler_of("cpu", init_scale=8.0, growth_interval=1)

    def plain(self, batch):
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss(batch)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def others(self):
        return {k: v for k, v in self.scaler.state_dict().items()}


class ScaledAndOurs(Scaled):
    """The optimizer is Headroom's."""

    adamw = headroom.optim.AdamW
    late = "AdamW has stepped"


class ScaledByOurs(ScaledAndOurs):
    scaler_of = headroom.amp.GradScaler


class Checkpointed(Loop):
    """A checkpoint around the whole model."""

    def loss(self, batch):
        return checkpoint(super().loss, batch, use_reentrant=False)


class Hooked(Loop):
    """Hooks of the user on gradients."""

    def made(self, save):
        super().made(save)
        for param in self.model.parameters():
            param.register_hook(lambda grad: 0.5 * grad)
            param.register_post_accumulate_grad_hook(self.triple)

    @staticmethod
    def triple(param):
        param.grad *= 3


class Compiled(Loop):
    """A model that torch.compile has wrapped."""

    def made(self, save):
        super().made(save)
        self.compiled = torch.compile(self.model, backend="aot_eager")

    def loss(self, batch):
        return self.compiled(batch).square().mean()


class Behind(Loop):
    """A schedule and a moving average of the weights behind the step."""

    late = "AdamW has stepped"

    def made(self, save):
        super().made(save)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.average = copy.deepcopy(self.model)

    def plain(self, batch):
        super().plain(batch)
        self.schedule.step()
        with torch.no_grad():
            for mean, param in zip(self.average.parameters(), self.model.parameters()):
                mean.lerp_(param, 0.1)

    def others(self):
        return {f"mean {k}": p for k, p in enumerate(self.average.parameters())}


class TwoOptimizers(Loop):
    """The second one may fail when the first one has stepped."""

    late = "AdamW has stepped|that of SGD failed half way"

    def made(self, save):
        super().made(save)
        first, *rest = self.model.parameters()
        self.optimizer = [
            headroom.optim.AdamW([first], lr=0.01),
            torch.optim.SGD(rest, lr=0.1, momentum=0.9),
        ]

    def plain(self, batch):
        self.loss(batch).backward()
        for optimizer in self.optimizer:
            optimizer.step()
            optimizer.zero_grad()


class Released(Loop):
    """Steps in backward."""

    late = "AdamW has stepped"

    def made(self, save):
        super().made(save)
        self.handle = headroom.release_gradients(self.model, self.optimizer, bucket_bytes=1 << 10)


class Own(torch.optim.Optimizer):
    """An optimizer that keeps its state where nobody else does."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.params = self.param_groups[0]["params"]
        self.means = [torch.zeros_like(p) for p in self.params]
        self.count = 0
        self.state["steps"] = 0

    @torch.no_grad()
    def step(self):
        self.count += 1
        self.state["steps"] += 1
        for param, mean in zip(self.params, self.means):
            mean.lerp_(param.grad, 0.1)
            param.data -= self.param_groups[0]["lr"] / self.count * mean


class WithOwn(Loop):
    late = "that of Own failed half way"

    def made(self, save):
        super().made(save)
        self.optimizer = Own(self.model.parameters(), lr=0.1)

    def others(self):
        means = {f"mean {k}": mean for k, mean in enumerate(self.optimizer.means)}
        counts = {"count": self.optimizer.count, "steps": self.optimizer.state["steps"]}
        return means | counts


KINDS = [
    *(MicroBatches, OverCalls, Zeroed, Scaled, ScaledAndOurs, ScaledByOurs, Checkpointed, Hooked),
    *(Behind, TwoOptimizers, Released, WithOwn),
]


@pytest.mark.parametrize("kind", KINDS)
def test_some_allocations(allocator, kind):
    assert fail_everywhere(allocator, kind, which=2, stride=23, late=kind.late) > 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, Compiled])
@pytest.mark.parametrize("which", [1, 2], ids=["first", "second"])
def test_every_allocation(allocator, kind, which):
    assert fail_everywhere(allocator, kind, which, late=kind.late) > 10
