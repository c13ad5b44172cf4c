"""Random generators: what is drawn behind a guard is what would be drawn without its block."""

import random
import sys

import numpy
import pytest
import torch
from headroom._core.randomness import (
    Random,
    generator_states,
    generators_kept,
    restore_generators,
)

DRAWS = {
    "python": random.random,
    "numpy": numpy.random.random,
    "torch": lambda: float(torch.rand(())),
}


def draw():
    return {name: one() for name, one in DRAWS.items()}


def test_a_block_draws_as_if_it_had_not_run(device):
    places = [torch.device(device), None]
    with generators_kept(*places):
        wanted = draw(), torch.rand(3, device=device).tolist()
    with pytest.raises(ZeroDivisionError), generators_kept(*places):
        assert (draw(), torch.rand(3, device=device).tolist()) == wanted
        raise ZeroDivisionError
    assert (draw(), torch.rand(3, device=device).tolist()) == wanted
    assert draw() != wanted[0]


def test_states_are_given_back_and_can_be_again(device):
    states = generator_states()
    assert states.keys() >= {"python", "numpy", "torch"}
    assert ("cuda" in states) == torch.cuda.is_initialized()
    wanted = draw(), torch.rand(3, device=device).tolist()
    for _ in range(2):
        restore_generators(states)
        assert (draw(), torch.rand(3, device=device).tolist()) == wanted


def test_what_is_left_out_is_left_alone(monkeypatch):
    states = generator_states([torch.device("cpu")], host=False)
    assert states.keys() == {"torch", "cuda"} and states["cuda"] == {}
    first = draw()
    restore_generators(states)
    second = draw()
    assert [name for name in DRAWS if first[name] == second[name]] == ["torch"]
    monkeypatch.delitem(sys.modules, "numpy")
    assert "numpy" not in generator_states()


def test_a_region_draws_its_numbers_again_and_the_others_go_on(device):
    x = torch.ones(2, device=device)
    states = Random([x])
    assert not states.moved()
    drawn = torch.rand(3).tolist(), torch.rand_like(x).tolist()
    assert states.moved()
    after = generator_states()
    with states.restored():
        assert not states.moved()
        assert (torch.rand(3).tolist(), torch.rand_like(x).tolist()) == drawn
    with generators_kept(x.device):
        wanted = draw()
    restore_generators(after)
    assert draw() == wanted
