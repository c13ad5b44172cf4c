"""What ``headroom.plan`` refuses, and that it leaves everything as it was."""

import random

import headroom
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from headroom.planning import PlanError
from torch import nn


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))


def batch():
    return torch.randn(6, 8), torch.randint(4, (6,))


class Raising(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.inner, self.error, self.calls = mlp(), error, []

    def forward(self, x):
        self.calls.append(1)
        if len(self.calls) > 1:
            raise self.error
        return self.inner(x)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 8)

    def forward(self, x):
        x = self.gate(x)
        return x.mean() if x.sum() > 0 else x.sum()


def everything(model, optimizer):
    """All bytes that a plan could change."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    for entry in optimizer.state.values():
        tensors += [x for x in entry.values() if isinstance(x, torch.Tensor)]
    return (
        [x.detach().clone() for x in tensors],
        [(x.data_ptr(), x._version) for x in tensors],
        [p.grad is None for p in model.parameters()],
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].copy(),
        [dict(group, params=len(group["params"])) for group in optimizer.param_groups],
        [sorted(map(str, vars(m))) for m in model.modules()],
        [len(m._forward_hooks) for m in model.modules()],
        nn.Module.__call__,
        torch.autograd.graph.saved_tensors_hooks.__init__,
        torch.autocast.__enter__,
    )


def same(first, second):
    for a, b in zip(first, second, strict=True):
        if isinstance(a, list) and a and isinstance(a[0], torch.Tensor):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        elif isinstance(a, torch.Tensor):
            assert torch.equal(a, b)
        elif isinstance(a, np.ndarray):
            assert (a == b).all()
        else:
            assert a == b


def trained(model):
    """A model in the middle of a run: with gradients, state and a hook."""
    optimizer = headroom.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(batch()[0]), batch()[1]).backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_everything_is_as_before(device):
    model, sample = mlp(), batch()
    optimizer = trained(model)
    seen = []
    model[0].register_forward_hook(lambda module, args, result: seen.append(result.dtype))
    before = everything(model, optimizer)
    plan = headroom.plan(
        model, optimizer, sample, loss=F.cross_entropy, device=device, amp=torch.bfloat16
    )
    plan.advice()
    same(before, everything(model, optimizer))
    assert plan.first_step == plan.steady  # the state was there


@pytest.mark.parametrize("error", [RuntimeError("no luck"), KeyboardInterrupt()])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_step_that_raises_leaves_everything_as_before(error, device):
    model = Raising(error)
    optimizer, sample = trained(model.inner), batch()
    before = everything(model, optimizer)
    expected = PlanError if isinstance(error, RuntimeError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        headroom.plan(model, optimizer, sample, loss=F.cross_entropy, device=device)
    if expected is PlanError:
        assert "no luck" in str(caught.value) and "forward" in str(caught.value)
    same(before, everything(model, optimizer))
    assert model.calls == []
    assert torch._C._len_torch_dispatch_stack() == 0


def test_values_that_fakes_do_not_have():
    model = Branching()
    with pytest.raises(PlanError, match=r"_local_scalar_dense.* in the model.*measure=True"):
        headroom.plan(model, torch.optim.SGD(model.parameters()), torch.randn(2, 8))


def test_a_real_step_instead():
    model, sample = Branching(), torch.randn(2, 8)
    optimizer = trained_on_mean(model)
    before = everything(model, optimizer)
    plan = headroom.plan(model, optimizer, sample, measure=True)
    assert plan.peak_by_kind["parameters"] == 4 * (64 + 8)
    assert "Measured" in str(plan)
    same(before, everything(model, optimizer))
    with torch.device("meta"):
        model = Branching()
    with pytest.raises(PlanError, match="meta device"):
        headroom.plan(model, None, sample, device="cpu", measure=True)


def trained_on_mean(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8)).backward()
    optimizer.step()
    return optimizer


def test_a_wrong_batch_names_the_module():
    model = mlp()
    with pytest.raises(PlanError, match=r"forward phase, at .*addmm.* in '0'"):
        headroom.plan(model, torch.optim.SGD(model.parameters()), torch.randn(6, 7))


def test_bad_arguments():
    model, sample = mlp(), batch()
    optimizer = torch.optim.SGD(model.parameters())

    def refused(kind, words, *args, **options):
        with pytest.raises(kind, match=words):
            headroom.plan(*args, **options)

    refused(PlanError, r"output of the model has shape \[6, 4\]", model, optimizer, sample[0])
    refused(ValueError, "does not have", model, torch.optim.SGD(mlp().parameters()), sample)
    refused(TypeError, "optimizer is str", model, "adam", sample)
    refused(ValueError, "sample_batch is None", model, optimizer)
    refused(ValueError, "accumulation is 0", model, optimizer, sample, accumulation=0)
    refused(ValueError, "amp is", model, optimizer, sample, amp=torch.int8)
    refused(ValueError, "wanted cpu or cuda", model, optimizer, sample, device="xpu")
    refused(ValueError, "no blocks", model, optimizer, sample, loss=F.cross_entropy, save="L2")
    refused(TypeError, "loss is 3", model, optimizer, sample, loss=3)
    refused(PlanError, "hub", "no/such", optimizer, sample)
    for param in model.parameters():
        param.requires_grad_(False)
    refused(PlanError, "requires no gradient", model, None, sample, loss=F.cross_entropy)


def test_a_model_on_several_devices():
    model = mlp()
    model[3].to("meta")
    with pytest.raises(ValueError, match=r"several devices \(cpu, meta\)"):
        headroom.plan(model, None, batch())


class Seeds(nn.Linear):
    """Moves every generator itself; of the fakes no random number is drawn."""

    def forward(self, x):
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        return super().forward(x)


def test_random_states_are_as_before():
    model, x = Seeds(5, 3), torch.randn(4, 5)
    optimizer = torch.optim.SGD(model.parameters())
    before = everything(model, optimizer)
    headroom.plan(model, optimizer, x, forward=lambda m, x: m(x).sum())
    same(before, everything(model, optimizer))


def test_a_closure_over_the_model_sees_the_copy():
    model, sample = mlp(), batch()

    def loss(output, target):
        return F.cross_entropy(output, target) + 0.1 * model[0].weight.square().sum()

    plan = headroom.plan(model, torch.optim.SGD(model.parameters()), sample, loss=loss)
    assert plan.peak_by_kind["parameters"] == sum(4 * p.numel() for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())


class Looked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(30, 8, sparse=True), nn.Linear(8, 1)

    def forward(self, ids):
        return self.out(self.embed(ids)).mean()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sparse_gradients_are_refused_and_can_be_measured(device):
    model, ids = Looked(), torch.arange(6)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(PlanError, match=r"in 'embed' makes .*sparse_coo.* measure=True.*sparse=F"):
        headroom.plan(model, optimizer, ids, device=device)
    with pytest.raises(PlanError, match="sparse_coo"):
        headroom.fit(model, ids, optimizer=optimizer, budget="1 GiB")
    measured = headroom.plan(model, optimizer, ids, measure=True)
    model.embed.sparse = False
    assert measured.peak_bytes <= headroom.plan(model, optimizer, ids).peak_bytes + 8 * 6 * 8


class RaisesInBackward(torch.autograd.Function):
    error: BaseException = RuntimeError("no luck")

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RaisesInBackward.error


class RaisesInSecondStep(torch.optim.SGD):
    def step(self, closure=None):
        if self.state:
            raise RuntimeError("no luck")
        return super().step()


def of_other_parameters(model):
    return {"optimizer": torch.optim.SGD(mlp().parameters())}, ValueError, "does not have"


def of_a_wrong_shape(model):
    return {"sample_batch": (torch.randn(6, 7), batch()[1])}, PlanError, "addmm.* in '0'"


def of_no_scalar_loss(model):
    return {"loss": lambda output, target: output}, PlanError, r"the loss has shape \[6, 4\]"


def on_several_devices(model):
    model[3].to("meta")
    return {}, ValueError, "several devices"


def raising_in_backward(model):
    def loss(output, target):
        return F.cross_entropy(RaisesInBackward.apply(output), target)

    return {"loss": loss}, PlanError, "backward phase.*no luck"


def interrupted_in_backward(model):
    RaisesInBackward.error = KeyboardInterrupt()
    return raising_in_backward(model)[0], KeyboardInterrupt, None


def raising_in_the_second_step(model):
    optimizer = RaisesInSecondStep(model.parameters(), 0.1, momentum=0.9)
    return {"optimizer": optimizer}, PlanError, "optimizer phase.*no luck"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "bad",
    [
        of_other_parameters,
        of_a_wrong_shape,
        of_no_scalar_loss,
        on_several_devices,
        raising_in_backward,
        interrupted_in_backward,
        raising_in_the_second_step,
    ],
)
def test_what_is_refused_is_as_before(bad, device, monkeypatch):
    monkeypatch.setattr(RaisesInBackward, "error", RaisesInBackward.error)
    model = mlp()
    optimizer = trained(model)
    given = {"model": model, "optimizer": optimizer, "sample_batch": batch()}
    changed, error, words = bad(model)
    given |= {"loss": F.cross_entropy, "device": device} | changed
    if bad is on_several_devices:  # values on the meta device cannot be compared
        model = model[:3]
    before = everything(model, optimizer), everything(model, given["optimizer"])
    with pytest.raises(error, match=words):
        headroom.plan(**given)
    same(before[0], everything(model, optimizer))
    same(before[1], everything(model, given["optimizer"]))
    assert torch._C._len_torch_dispatch_stack() == 0
