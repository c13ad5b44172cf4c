"""Steps that change nothing because a gradient is infinite or NaN: counted, and told."""

import copy
import math
import warnings

import headroom
import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from helpers.compiled import compile_step
from helpers.mesh import mesh

CLASSES = [
    headroom.optim.Adam,
    headroom.optim.AdamW,
    headroom.optim.AdamW8bit,
    headroom.optim.Adafactor,
]
EVERY = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__qualname__)
NAN, INF = math.nan, math.inf


def make(cls=headroom.optim.AdamW, device="cpu", **options):
    params = [torch.nn.Parameter(torch.ones(n, device=device)) for n in (5, 3, 4)]
    names = ["tall", "small", "wide"]
    return params, cls([*zip(names, params)], lr=0.1, **{"max_grad_norm": 1.0} | options)


def step(params, optimizer, value=1.0, run=None):
    """With a value in the small parameter. Returns whether parameters changed."""
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.ones_like(p)
    params[1].grad[1] = value
    (run or optimizer.step)()
    return not any(map(torch.equal, params, before))


def counted(optimizer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return optimizer.skipped_steps


@EVERY
@pytest.mark.filterwarnings("error")
def test_skipped_steps_are_counted_and_told_once(cls, device):
    params, optimizer = make(cls, device)
    assert optimizer.skipped_steps == 0
    values = [1.0, NAN, 1.0, -INF, INF, 1.0]
    assert [step(params, optimizer, v) for v in values] == [math.isfinite(v) for v in values]
    step(params, optimizer, NAN)
    with pytest.warns(UserWarning, match=r"4 steps were skipped .* parameter 'small'") as told:
        assert optimizer.skipped_steps == 4
    assert told[0].filename == __file__
    step(params, optimizer, NAN)
    assert optimizer.skipped_steps == 5  # said once


def test_the_culprit_is_found_in_gradients_that_are_there(device):
    """Where the flag comes from elsewhere: the optimizer did not look itself."""
    params, optimizer = make(device=device, max_grad_norm=None)
    optimizer.found_inf = torch.ones((), device=device)
    assert not step(params, optimizer, INF) and optimizer._measured is None
    with pytest.warns(UserWarning, match="1 steps were skipped .* parameter 'small'"):
        assert optimizer.skipped_steps == 1


@pytest.mark.filterwarnings("error")
def test_without_a_culprit_the_warning_names_none(device):
    params, optimizer = make(device=device)
    step(params, optimizer, NAN)
    step(params, optimizer)
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match=r"1 steps were skipped because .* NaN\. A skipped step"):
        assert optimizer.skipped_steps == 1


@pytest.mark.filterwarnings("error")
def test_a_nan_is_not_skipped_and_not_counted_where_nothing_looks(device):
    params, optimizer = make(headroom.optim.AdamW8bit, device, max_grad_norm=None)
    assert step(params, optimizer, NAN)
    assert params[1].isnan().any() and optimizer.skipped_steps == 0


@EVERY
def test_many_in_a_row_are_told_without_asking(cls, device):
    params, optimizer = make(cls, device)
    optimizer.max_consecutive_skips = 4
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(12):  # never four in a row
            step(params, optimizer, 1.0 if k % 4 == 3 else NAN)
        assert not caught
        for _ in range(16):
            step(params, optimizer, NAN)
            if device == "cuda":
                torch.cuda.synchronize()
    (one,) = caught
    assert "steps were all skipped" in str(one.message) and "'small'" in str(one.message)
    assert counted(optimizer) == 25


def test_the_default_of_consecutive_skips():
    params, optimizer = make()
    with pytest.warns(UserWarning, match="the last 10 steps were all skipped") as told:
        for _ in range(10):
            step(params, optimizer, NAN)
    assert told[0].filename == __file__


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("scaler", [headroom.amp.GradScaler, torch.amp.GradScaler])
def test_steps_that_a_scaler_skips(scaler, unscale, device):
    """Torch's scaler does not call a step that it skips, and knows of it itself."""
    params, optimizer = make(device=device, max_grad_norm=None)
    scaler = scaler(device, init_scale=4.0)

    def run():
        scaler.scale(torch.ones((), device=device))
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    moved = [step(params, optimizer, v, run) for v in (1.0, INF, 1.0, NAN)]
    assert moved == [True, False, True, False]
    ours = isinstance(scaler, headroom.amp.GradScaler)
    assert counted(optimizer) == (2 if ours else 0)


@pytest.mark.parametrize("cls", [headroom.optim.AdamW, headroom.optim.AdamW8bit])
def test_compiled_steps_are_counted(cls, device):
    params, optimizer = make(cls, device)
    run = compile_step(optimizer, "aot_eager")
    moved = [step(params, optimizer, v, run) for v in (1.0, NAN, 1.0, INF, INF)]
    assert moved == [True, False, True, False, False] and counted(optimizer) == 3
    step(params, optimizer, NAN)  # not compiled
    assert counted(optimizer) == 4


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_steps_are_counted():
    params, optimizer = make(device="cuda")
    optimizer.max_consecutive_skips = 1  # so that every step would send its count
    for p in params:
        p.grad = torch.ones_like(p)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for value in (1.0, NAN, 1.0, INF, NAN):
        params[1].grad[1] = value
        graph.replay()
    assert counted(optimizer) == 3


def test_no_step_waits_for_the_device(monkeypatch, device):
    """What reads a tensor on the host is forbidden while steps are skipped."""
    params, optimizer = make(device=device)
    optimizer.max_consecutive_skips = 100
    step(params, optimizer)
    for p in params:
        p.grad = torch.full_like(p, NAN)
    for name in ("item", "__bool__", "__int__", "__float__", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, None)
    for _ in range(3):
        optimizer.step()
    monkeypatch.undo()
    assert counted(optimizer) == 3


def test_copies_keep_the_count(device):
    params, optimizer = make(device=device)
    step(params, optimizer, NAN)
    other = copy.deepcopy(optimizer)
    step(params, optimizer, NAN)
    assert (counted(other), counted(optimizer)) == (1, 2)


# ---- sharded -------------------------------------------------------------------------------------


def sharded(rank):
    """A NaN in the shard of one rank skips the step of all, and all count it."""
    here = mesh()
    whole = torch.ones(4, 3)
    params = [torch.nn.Parameter(distribute_tensor(whole, here, [Shard(0)])) for _ in range(2)]
    optimizer = headroom.optim.AdamW([*zip("ab", params)], max_grad_norm=1.0)
    for bad in (False, True, True):
        for p in params:
            p.grad = distribute_tensor(whole, here, [Shard(0)])
        if bad and rank == 1:
            params[1].grad.to_local()[1, 1] = NAN
        optimizer.step()
    assert optimizer.state[params[0]]["step"] == 1
    with pytest.warns(UserWarning, match=r"'b'\. A" if rank == 1 else r"NaN\. A"):
        assert optimizer.skipped_steps == 2
    view = torch.nn.Parameter(
        DTensor.from_local(params[0].to_local().detach()[1:], here, [Shard(0)], run_check=False)
    )
    view.grad = torch.ones_like(view)
    optimizer.add_param_group({"params": [("c", view)]})
    with pytest.raises(ValueError, match="'a' and parameter 'c' share memory"):
        optimizer.step()


@pytest.mark.gloo
def test_ranks_count_alike(ranks):
    ranks(sharded)
