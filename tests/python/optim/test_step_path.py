"""The way of a step through Python: how many files it passes through on its way to the ops, and how
often it climbs back to a file that it came from."""

import re
import sys
from pathlib import Path

import headroom
import pytest
import torch

OPS = Path(headroom.__file__).resolve().parent
MOST_FILES, MOST_CLIMBS = 6, 2  # beside those of _core, which all packages share


class Way:
    """The files of headroom in the order in which they are reached, and the calls between them."""

    def __init__(self):
        self.files, self.calls = [], []

    def __call__(self, frame, event, _):
        if event == "call" and (here := self.place(frame)):
            if here not in self.files:
                self.files.append(here)
            caller = frame.f_back
            while caller and not self.place(caller):
                caller = caller.f_back
            if caller:
                self.calls.append((self.place(caller), here, frame.f_code.co_name))

    @staticmethod
    def place(frame):
        path = Path(frame.f_code.co_filename).resolve()
        return str(path.relative_to(OPS)) if path.is_relative_to(OPS) else None

    def climbs(self):
        """Returns the calls from a file into one that was reached before it."""
        order = self.files.index
        return {call for call in self.calls if order(call[1]) < order(call[0])}


def traced(optimizer):
    seen = Way()
    sys.setprofile(seen)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW"])
def test_a_step_passes_through_few_files_and_does_not_climb_back(name):
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((64, 100), (10,))]
    optimizer = getattr(headroom.optim, name)(params)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    way = traced(optimizer)
    own = [file for file in way.files if not file.startswith("_core")]
    assert own[0] == "optim/base.py" and "optim/adam.py" in own
    assert len(own) <= MOST_FILES, own
    assert len(way.climbs()) <= MOST_CLIMBS, way.climbs()


def test_climbs_are_seen():
    way = Way()
    way.files, way.calls = ["a.py", "b.py"], [("a.py", "b.py", "f"), ("b.py", "a.py", "g")]
    assert way.climbs() == {("b.py", "a.py", "g")}


@pytest.mark.parametrize("package", ["optim", "state", "amp", "grad"])
def test_helpers_read_no_private_attributes_of_an_optimizer(package):
    """Its methods with an underscore, and the attributes that its class declares, are for them."""
    kinds = (kind for own in vars(headroom.optim).values() for kind in getattr(own, "__mro__", ()))
    declared = {
        name for kind in kinds for name in {*vars(kind), *vars(kind).get("__annotations__", ())}
    }
    for path in (OPS / package).rglob("*.py"):
        found = {*re.findall(r"optimizer\.(_[a-z]\w*)\b(?!\()", path.read_text())}
        assert found <= declared, (path, found - declared)
