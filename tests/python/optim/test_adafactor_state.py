"""Adafactor's states: checkpoints of the originals, copies, and statistics that are refused."""

import copy
import io

import pytest
import torch

from helpers.adafactors import ADAFACTOR, BOTH, EACH, make, start, train
from helpers.bits import assert_same_bits

# ---- Checkpoints ---------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("ours_first", [True, False])
def test_checkpoints_of_one_resume_the_other(semantics, options, ours_first):
    params = start()
    optimizer = make(semantics, params, ours_first, **options)
    train(params, optimizer, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = make(semantics, others, not ours_first, **options)
    other.load_state_dict(loaded)
    train(others, other, range(3, 6))
    train(params, optimizer, range(3, 6))
    for p, q in zip(params, others):
        torch.testing.assert_close(p, q, rtol=2**-20, atol=2**-24)


@BOTH
def test_states_widen_and_survive_a_change_of_precision(semantics):
    """Statistics that torch kept in bfloat16 become float32, and float32 ones stay."""
    params = start(dtype=torch.bfloat16)
    theirs = make(semantics, params, False)
    train(params, theirs, range(2))
    ours = make(semantics, params)
    ours.load_state_dict(theirs.state_dict())
    for p in params:
        for name, value in ours.state[p].items():
            assert value.dtype == (torch.float64 if name == "step" else torch.float32)
            assert torch.equal(value.float(), torch.as_tensor(theirs.state[p][name]).float())
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    again = make(semantics, wide)
    again.load_state_dict(ours.state_dict())
    for p, q in zip(params, wide):
        assert_same_bits(ours.state[p].values(), again.state[q].values())


@BOTH
def test_copies_and_pickles_continue(semantics):
    params = start()
    optimizer = make(semantics, params)
    train(params, optimizer, range(2))
    twins, twin = copy.deepcopy((params, optimizer))
    assert twin.semantics == semantics
    train(params, optimizer, range(2, 4))
    train(twins, twin, range(2, 4))
    assert_same_bits(params, twins)


def test_a_checkpoint_of_the_other_rule_is_refused():
    params = start(((3, 4), (5,)))
    ours, hf = make("torch", params), make("hf", params, False)
    train(params, ours, range(1))
    train(params, hf, range(1))
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(ValueError, match="another rule than semantics='torch'.*clip_threshold"):
        ours.load_state_dict(hf.state_dict())
    assert str(before) == str(ours.state_dict())
    with pytest.raises(ValueError, match="another rule than semantics='hf'.*beta2_decay"):
        make("hf", params).load_state_dict(ours.state_dict())


def test_a_state_of_another_shape_is_refused():
    params = start(((3, 4), (5,)))
    optimizer = make("torch", params)
    train(params, optimizer, range(1))
    spoiled = optimizer.state_dict()
    spoiled["state"][0]["row_var"] = torch.zeros(4, 1)
    with pytest.raises(ValueError, match=r"'row_var' of parameter 0 of group 0 is \(4, 1\)"):
        make("torch", params).load_state_dict(spoiled)


# ---- Weights in 16 bits --------------------------------------------------------------------------


@pytest.mark.parametrize("semantics", ["torch", "hf"])
@pytest.mark.parametrize(
    "before, after",
    [
        ((8, 4), (4, 8)),
        ((8, 4), (32,)),
        ((32,), (8, 4)),
        ((32,), (16,)),
        ((8, 8), (64,)),
        ((2, 3, 4), (6, 8)),  # as many rows and columns
        ((2, 3, 4), (4, 6, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("transposed", [False, True], ids=["table", "lists"])
def test_statistics_of_another_shape_are_refused(before, after, semantics, transposed, device):
    """After ``weight.data`` was replaced. AdamW raises, too."""
    other = torch.nn.Parameter(torch.randn(5, 3, device=device))
    param = torch.nn.Parameter(torch.randn(before, device=device))
    optimizer = ADAFACTOR([("other", other), ("weight", param)], semantics=semantics)
    other.grad, param.grad = torch.randn_like(other), torch.randn_like(param)
    optimizer.step()
    param.grad = None
    param.data = torch.randn(after, device=device)
    if transposed:
        other.data = other.data.t().contiguous().t()
    other.grad, param.grad = torch.randn_like(other), torch.randn_like(param)
    tensors = [other, param, *(t for entry in optimizer.state.values() for t in entry.values())]
    kept = [tensor.detach().clone() for tensor in tensors]
    with pytest.raises(RuntimeError, match=r"parameter 'weight'.*shape"):
        optimizer.step()
    assert all(map(torch.equal, tensors, kept))
    assert sum(map(len, optimizer.state.values())) == len(kept) - 2  # nothing was made
    del optimizer.state[param]
    optimizer.step()
    assert optimizer.state[param]["step"] == 1
