"""Copies of models, optimizers and batches on fakes share what the originals share, and nothing of
the user's is written."""

import threading

import headroom
import pytest
import torch
from headroom.planning import PlanError
from headroom.planning.copies import Copier
from headroom.planning.recurrent import has_recurrent_layers
from headroom.planning.states import move_to_shards
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def copier(device="cpu"):
    return Copier(FakeTensorMode(), torch.device(device))


def test_a_fake_is_like_its_tensor():
    made = copier("cuda")
    base = torch.arange(24.0)
    view = base[4:20].view(4, 4).t()
    first, second = made.fake(base), made.fake(view)
    assert isinstance(first, FakeTensor) and first.device.type == "cuda"
    assert made.fake(base) is first
    assert (second.shape, second.stride(), second.storage_offset()) == ((4, 4), (1, 4), 4)
    assert second.untyped_storage()._cdata == first.untyped_storage()._cdata
    assert first.untyped_storage().nbytes() == base.untyped_storage().nbytes()
    half = made.fake(torch.ones(3).half())
    assert half.dtype == torch.half and not half.requires_grad
    other = made.fake(torch.ones(3))
    assert other.untyped_storage()._cdata != half.untyped_storage()._cdata


def test_what_requires_gradients_and_what_is_set_on_tensors():
    made = copier()
    param = nn.Parameter(torch.ones(3))
    param.axes, param._own = (0,), "hidden"
    fake = made.fake(param)
    assert isinstance(fake, nn.Parameter) and fake.requires_grad and fake.axes == (0,)
    assert not hasattr(fake, "_own")
    assert not made.fake(nn.Parameter(torch.ones(3), requires_grad=False)).requires_grad
    assert made.fake(torch.ones(3, requires_grad=True)).requires_grad
    result = made.fake(torch.ones(3, requires_grad=True) * 2)  # has a graph, which the copy has not
    assert result.is_leaf and not result.requires_grad
    for persistent in (True, False):
        buffer = made.fake(nn.Buffer(torch.ones(3), persistent=persistent))
        assert isinstance(buffer, nn.Buffer) and buffer.persistent == persistent


def test_a_copy_is_deep_and_of_fakes():
    tied = nn.Linear(3, 3, bias=False)
    model = nn.Sequential(tied, nn.Linear(3, 3, bias=False))
    model[1].weight = tied.weight
    model.lock, model.generator = threading.Lock(), torch.Generator()
    scale = torch.tensor(2.0)

    def loss(y):
        return (y * scale * model[0].weight.sum()).sum()

    made = copier()
    copied, function = made.copy([model, loss])
    assert copied is not model and copied[0].weight is copied[1].weight
    assert all(isinstance(p, FakeTensor) for p in copied.parameters())
    assert copied.lock is model.lock and copied.generator is model.generator
    inside = {id(cell.cell_contents) for cell in function.__closure__}
    assert inside == {id(copied), id(made.fake(scale))}
    assert not isinstance(model[0].weight, FakeTensor)


def test_what_cannot_be_copied_is_said():
    made = copier()

    def refused(words, value):
        with pytest.raises(PlanError, match=words):
            made.copy([value])

    hooked, grad = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    hooked.register_hook(lambda g: g)
    grad.register_post_accumulate_grad_hook(lambda p: None)
    refused(r"shape \[3\] has hooks on its gradient", hooked)
    refused(r"shape \[2\] has hooks on its gradient", grad)
    refused("lazy parameters, whose shapes are not known", nn.LazyLinear(3))
    refused(r"a torch.sparse_coo of shape \[2, 2\]", torch.eye(2).to_sparse())

    class Stubborn:
        def __deepcopy__(self, memo):
            raise ZeroDivisionError("never")

    refused("a copy of list cannot be made to plan with: never. Give a function", Stubborn())


def test_recurrent_layers_are_found():
    for layer in (nn.LSTM(3, 3), nn.GRU(3, 3), nn.RNN(3, 3)):
        assert has_recurrent_layers(nn.Sequential(nn.Linear(3, 3), layer))
    assert not has_recurrent_layers(nn.Sequential(nn.LSTMCell(3, 3)))


# ---- optimizers of shards -----------------------------------------------------------------------


def test_groups_and_states_become_those_of_shards():
    """Whether states have 8 bits is decided by the number of elements on all ranks."""
    params = [nn.Parameter(torch.ones(n, 8)) for n in (4, 16, 2)]
    shards = [nn.Parameter(torch.ones(n, 8)) for n in (1, 4)]
    groups = [{"params": params[:2], "lr": 0.5}, {"params": params[2:], "lr": 0.25}]
    optimizer = headroom.optim.AdamW8bit(groups, min_8bit_size=64)
    other = object()
    optimizer.state = {
        params[0]: {"step": torch.tensor(3.0), "exp_avg": torch.ones(4, 8), "kind": "a"},
        params[1]: {"codes": torch.ones(77)},  # of no shape that can be cut
        params[2]: {"exp_avg": torch.ones(2, 8)},
        "other": other,
    }
    move_to_shards(optimizer, {params[0]: (shards[0], 32), params[1]: (shards[1], 64)})
    found = [(g["params"], g["lr"], g["min_8bit_size"]) for g in optimizer.param_groups]
    assert [(len(p), lr, least) for p, lr, least in found] == [
        (1, 0.5, 64),
        (1, 0.5, 0),
        (1, 0.25, 64),
    ]
    assert (
        found[0][0][0] is shards[0] and found[1][0][0] is shards[1] and found[2][0][0] is params[2]
    )
    state = optimizer.state
    assert set(state) == {shards[0], params[2], "other"} and state["other"] is other
    assert state[shards[0]]["exp_avg"].shape == (1, 8) and state[shards[0]]["kind"] == "a"
    assert state[shards[0]]["step"] == 3 and state[params[2]]["exp_avg"].shape == (2, 8)
    assert state[shards[1]] == {}  # as new

    plain = torch.optim.SGD(params, momentum=0.9)
    plain.state = {params[0]: "text"}
    move_to_shards(plain, {params[0]: (shards[0], 32)})
    assert len(plain.param_groups) == 1 and plain.param_groups[0]["params"][0] is shards[0]
    assert not plain.state
