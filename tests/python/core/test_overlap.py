"""Parameters that share memory are refused, those that lie side by side in one memory are not."""

import itertools
import random

import headroom
import pytest
import torch
from headroom._core import overlap

CLASSES = ["Adam", "AdamW", "AdamW8bit", "Adafactor"]


def halves(flat):
    return flat[:8], flat[8:]


OVERLAPS = {  # of 16 numbers
    "a transposed one": lambda flat: (flat.view(4, 4), flat.view(4, 4).t()),
    "strided views": lambda flat: (flat[:12:2], flat[2::3]),
    "a view in a gap of none": lambda flat: (flat[::2], flat[3:7]),
    "another dtype": lambda flat: (flat[:8], flat.view(torch.bfloat16)[14:18]),
    "one in the other": lambda flat: (flat, flat[5:7]),
    "as_strided": lambda flat: (flat.as_strided((3, 2), (4, 1)), flat.as_strided((2, 3), (5, 2))),
}
NEIGHBORS = {
    "halves": halves,
    "columns": lambda flat: tuple(flat.view(4, 4).unbind(1)),
    "transposed blocks": lambda flat: tuple(half.view(2, 4).t() for half in halves(flat)),
    "in gaps": lambda flat: (flat[::2], flat[1::4], flat[3::4]),
    "of two dtypes": lambda flat: (flat[:8], flat.view(torch.bfloat16)[16:]),
    "empty": lambda flat: (flat, flat[3:3]),
}


def of_views(views, apart, cls=headroom.optim.AdamW, **options):
    params = [torch.nn.Parameter(view) for view in views]
    groups = [{"params": [p]} for p in params] if apart else params
    for p in params:
        p.grad = torch.ones_like(p)
    return params, cls(groups, **options)


@pytest.mark.parametrize("apart", [False, True], ids=["in a group", "in groups"])
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("views", OVERLAPS.values(), ids=OVERLAPS)
def test_overlapping_parameters_are_refused(views, name, apart, device):
    flat = torch.ones(16, device=device)
    params, optimizer = of_views(views(flat), apart, getattr(headroom.optim, name))
    with pytest.raises(ValueError, match="parameter . of group . and parameter . of .* share mem"):
        optimizer.step()
    assert (flat == 1).all() and not optimizer.state


@pytest.mark.parametrize("apart", [False, True], ids=["in a group", "in groups"])
@pytest.mark.parametrize("views", NEIGHBORS.values(), ids=NEIGHBORS)
def test_views_side_by_side_are_fine(views, apart, device):
    flat = torch.ones(16, device=device)
    params, optimizer = of_views(views(flat), apart)
    alone, other = of_views([p.detach().clone() for p in params], apart)
    for _ in range(2):
        optimizer.step()
    for _ in range(2):
        other.step()
    for p, q in zip(params, alone):
        assert torch.equal(p, q)


def test_parameters_that_come_to_share_memory_are_refused(device):
    """In a later step, by data that is replaced, at one address or another."""
    memory = torch.ones(12, device=device)
    params, optimizer = of_views([memory[:4], memory[6:]], apart=True)
    optimizer.step()
    for data in (memory[:8], memory[4:8], memory.view(2, 6).t()[:, 1]):
        params[0].grad, params[0].data = None, data
        params[0].grad = torch.ones_like(params[0])
        with pytest.raises(ValueError, match="share memory"):
            optimizer.step()
    assert optimizer.state[params[1]]["step"] == 1


def test_overlapping_agrees_with_a_list_of_all_bytes():
    draw, found = random.Random(0), 0
    for _ in range(400):
        flat = torch.zeros(40)
        views = []
        for _ in range(draw.randint(2, 4)):
            dims = draw.randint(0, 2)
            shape, strides = ([draw.randint(0, 4) for _ in range(dims)] for _ in range(2))
            of = draw.choice([flat, flat, flat.view(torch.bfloat16)])
            views.append(of.as_strided(shape, strides, draw.randint(0, 11)))
        places = [
            {
                view.data_ptr() + view.element_size() * offset + byte
                for offset in torch.arange(40)
                .as_strided(view.shape, view.stride())
                .flatten()
                .tolist()
                for byte in range(view.element_size())
            }
            for view in views
        ]
        wanted = {
            pair
            for pair in itertools.combinations(range(len(views)), 2)
            if places[pair[0]] & places[pair[1]]
        }
        got = overlap.overlapping(views)
        assert got in wanted or (got is None and not wanted)
        found += got is not None
    assert 50 < found < 350


def test_two_parameters_in_one_memory_are_refused(device):
    memory = torch.ones(6, device=device)
    params = [torch.nn.Parameter(memory[:4]), torch.nn.Parameter(memory[3:])]
    optimizer = headroom.optim.AdamW(params)
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="parameter 0 of group 0 and parameter 1 of group 0 share"):
        optimizer.step()
    assert (memory == 1).all()


def test_neighbors_in_one_memory_are_fine(device):
    """As in a flat buffer that holds a whole model."""
    memory = torch.ones(6, device=device)
    params = [torch.nn.Parameter(part) for part in memory.split([3, 3])]
    optimizer = headroom.optim.AdamW(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert (memory < 1).all()
