"""What autograd keeps and which module runs is heard, and hooks may be hidden from profilers."""

import gc
import sys
import weakref

import pytest
import torch
from headroom._core.running_modules import watching_modules
from headroom.step.watch import listening, unseen
from torch import nn
from torch.utils.checkpoint import checkpoint


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no such function before 3.11")
def test_calls_of_a_hook_are_not_seen():
    seen = []

    def inner():
        return 1

    hook = unseen(lambda: [inner() for _ in range(3)])
    fails = unseen(lambda: {}["it"])
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, about: seen.append(frame.f_code.co_name))
    try:
        hook()
        with pytest.raises(KeyError):
            fails()
        inner()
    finally:
        sys.setprofile(before)
    assert seen.count("inner") == 2  # its call outside, and its return


def test_what_is_kept_comes_back_by_the_name_of_its_place():
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    running, kept, asked = [""], [], []
    with watching_modules(model, running.append, running.pop):
        with listening(kept.append, lambda: running[-1], asked.append):
            model(torch.randn(4, 5)).sum().backward()
    assert {"0", "1", "2"} >= set(asked) >= {"1", "2"} and len(asked) == len(kept)
    assert not nn.modules.module._global_forward_hooks


def test_hooks_of_others_compute_nothing_while_one_asks():
    model, calls, is_asking = nn.Linear(5, 5), [], [True]

    def run(x):
        calls.append(1)
        return model(x).tanh()

    with listening(lambda tensor: None, asks=lambda: is_asking[0]):
        out = checkpoint(run, torch.randn(3, 5, requires_grad=True), use_reentrant=False)
    assert out.grad_fn._saved_result.numel() == 0 and calls == [1]
    is_asking[0] = False
    out.sum().backward()
    assert calls == [1, 1]


def test_what_hooks_of_others_keep_is_noted_in_the_place_of_what_they_got():
    made, noted = [], []

    def halved(tensor):
        made.append(tensor.detach().half())
        return {"scale": 2.0, "values": [made[-1]]}

    halved.is_marked = True
    hooks = torch.autograd.graph.saved_tensors_hooks(halved, lambda kept: kept["values"][0].float())
    enter = torch.autograd.graph.saved_tensors_hooks.__enter__
    weight = torch.ones(3, requires_grad=True)
    with listening(noted.append):
        with hooks:
            pack = torch._C._autograd._top_saved_tensors_default_hooks(False)[0]
            assert pack.__name__ == "halved" and pack.is_marked
            out = (weight * torch.full((3,), 2.0)).sum()
        assert hooks.pack_hook is halved
        out.backward()
    assert weight.grad.tolist() == [2.0] * 3
    assert made and [id(x) for x in noted] == [id(x) for x in made]
    assert torch.autograd.graph.saved_tensors_hooks.__enter__ is enter


def test_a_kept_tensor_that_is_changed_in_place_is_an_error():
    asked = []
    leaf = torch.ones(3, requires_grad=True)
    with listening(lambda tensor: None, lambda: None, asked.append):
        for changed in (True, False):
            x = leaf * 1.0
            out = (x * x).sum()
            if changed:
                with torch.no_grad():
                    x.mul_(2)
                with pytest.raises(RuntimeError, match=r"inplace .*\[3\]\] is at version 1"):
                    out.backward()
            else:
                out.backward()
    assert asked == [] and leaf.grad.tolist() == [2.0] * 3  # places that are None are not told


def test_a_kept_result_does_not_keep_itself_alive():
    leaf, kept = torch.ones(3, requires_grad=True), []
    gc.disable()
    try:
        with listening(lambda tensor: kept.append(tensor.shape)):
            out = leaf.exp()
            storage = weakref.ref(out.untyped_storage())
            del out
            assert kept == [(3,)] and storage() is None
    finally:
        gc.enable()
