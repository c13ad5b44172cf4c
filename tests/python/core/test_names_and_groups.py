"""Names of parameters in messages, and groups of what one call takes."""

import sys

import pytest
import torch
from headroom._core.grouping import by_device, grouped
from headroom._core.lazy import lazy
from headroom._core.names import bare_name_of, name_of, named_params, param_names

A, B, C = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
GROUPS = [{"params": [A, B]}, {"params": [C], "param_names": ["weight"]}]


def test_names_of_parameters():
    names = ["parameter 0 of group 0", "parameter 1 of group 0", "parameter 'weight'"]
    assert [name for _, name in named_params(GROUPS)] == names
    assert param_names(GROUPS) == dict(zip((A, B, C), names))
    assert [name_of(GROUPS, p) for p in (A, B, C)] == names
    assert [bare_name_of(GROUPS, p) for p in (B, C)] == [names[1], "weight"]
    for name in (name_of, bare_name_of):
        assert name(GROUPS, torch.ones(2)) == "a parameter that the optimizer does not have"


def test_groups_keep_the_order():
    assert list(grouped([3, 1, 4, 1, 5, 9], lambda n: n % 2).items()) == [
        (1, [3, 1, 1, 5, 9]),
        (0, [4]),
    ]
    tensors = [torch.ones(1), torch.ones(1, device="meta"), torch.ones(2)]
    assert list(by_device(tensors)) == [torch.device("cpu"), torch.device("meta")]
    assert [[id(t) for t in ts] for ts in by_device(tensors).values()] == [
        [id(tensors[0]), id(tensors[2])],
        [id(tensors[1])],
    ]


def test_names_that_are_imported_when_used():
    import headroom.loss

    names = {".gathered": ["_Gathered"], "headroom.grad.ranks": ["LOCAL"]}
    get, shown = lazy("headroom.loss", names, ["gathered"])
    gathered = sys.modules["headroom.loss.gathered"] if get("gathered") else None
    assert headroom.loss.gathered is gathered and get("_Gathered") is gathered._Gathered
    assert get("LOCAL") == "local" and shown() == headroom.loss.__all__
    for name in ("_Gathered", "LOCAL"):  # no call is needed for the next
        assert vars(headroom.loss).pop(name) is get(name)
        del vars(headroom.loss)[name]
    with pytest.raises(AttributeError, match="module 'headroom.loss' has no attribute 'more'"):
        get("more")
