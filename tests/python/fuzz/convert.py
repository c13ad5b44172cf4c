"""Fuzzes convert_state: states of every library, with something changed.

A state is refused with ValueError (or NotImplementedError or ImportError, as documented), or taken
with counters that are whole numbers, and the source is the same afterwards.
"""

import copy
import math
import random
import sys

import headroom
import torch
from headroom.state.convert import LIBRARIES, RULES
from tests.python.fuzz._driver import hostile, main, mutated, snapshot

SHAPES = ((12, 8), (70,), ())
DOCUMENTED = (ValueError, NotImplementedError, ImportError)
_made: dict = {}


def trained(kind: type, **options) -> torch.optim.Optimizer:
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    if options.get("master"):
        params = [torch.nn.Parameter(param.detach().bfloat16()) for param in params]
    given: list = params
    if getattr(kind, "takes_model", False):
        given = [
            {"params": [param for param in params if (param.dim() == 2) is use], "use_muon": use}
            for use in (True, False)
        ]
    optimizer = kind(given, **options)
    for _ in range(2):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()
    return optimizer


def sources() -> dict:
    """State dicts of all libraries, by what they are."""
    if not _made:
        optim = headroom.optim
        kinds = {
            "headroom": (optim.AdamW, {"amsgrad": True}),
            "headroom-8bit": (optim.AdamW8bit, {"block_size": 64, "min_8bit_size": 16}),
            "remainder16": (optim.AdamW, {"master": "remainder16"}),
            "torch": (torch.optim.AdamW, {}),
            "adafactor": (torch.optim.Adafactor, {}),
            "sgd": (torch.optim.SGD, {"momentum": 0.9}),
            "lion": (optim.Lion8bit, {"block_size": 64, "min_8bit_size": 16}),
            "muon": (optim.Muon, {"normuon": 0.9}),
            "muon-8bit": (optim.Muon8bit, {"block_size": 64, "min_8bit_size": 16}),
        }
        for name, (kind, options) in kinds.items():
            _made[name] = trained(kind, **options).state_dict()
        _made["bnb-lion"] = headroom.state.convert_state(_made["lion"], "bitsandbytes-8bit")[0]
        for name in LIBRARIES:
            if name not in _made:
                state = _made["headroom-8bit"]
                try:
                    made = headroom.state.convert_state(
                        state, name, min_8bit_size=16, block_size=64
                    )
                except ImportError:
                    continue
                _made[name] = made.state_dict
    return _made


def case(rng: random.Random) -> str:
    name = rng.choice(sorted(sources()))
    state = sources()[name]
    if rng.random() < 0.9:
        state = mutated(rng, state, rng.choice([1, 1, 2, 3]))
    options = {}
    if rng.random() < 0.15:
        option = ("param_dtype", "block_size", "min_8bit_size", "from_", "rule")
        options[rng.choice(option)] = hostile(rng)
    if rng.random() < 0.2:
        options["rule"] = rng.choice([*RULES])
    to = rng.choice(list(LIBRARIES)) if rng.random() < 0.95 else hostile(rng)
    if rng.random() < 0.1:
        options["from_"] = rng.choice(list(LIBRARIES))
    before = snapshot(state)
    try:
        made, report = headroom.state.convert_state(state, to, **options)
    except DOCUMENTED as error:
        assert str(error), "the error says nothing"
        outcome = "refused"
    else:
        outcome = "accepted"
        str(report)
        for entry in made["state"].values():
            check_step(entry["step"] if "step" in entry else 0)
        copy.deepcopy(made["param_groups"])
    assert snapshot(state) == before, "the source has changed"
    return outcome


def check_step(step) -> None:
    step = float(step)
    assert math.isfinite(step) and step >= 0 and step == int(step), f"a step of {step} was taken"
    assert step <= 2**53, f"a step of {step} was taken"


if __name__ == "__main__":
    sys.exit(main(case))
