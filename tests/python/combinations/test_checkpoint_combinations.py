"""``checkpoint(verify=True)`` of functions that differ in the second run: the gradients are those
of the same function without a checkpoint, in float64, or there is an error."""

import threading

import headroom
import torch
from torch import nn

from helpers.combined import combinations, distance, gradients, in_float64

SIZE = 7


class Region(nn.Module):
    """A part of a model which changes between its two runs in one of many ways.

    Args:
        body: "product" saves nothing but its input and a weight, "function" nothing but its input,
            and "layers" values of its own.
    """

    def __init__(self, changes, body):
        super().__init__()
        self.changes, self.body, self.calls = changes, body, 0
        self.experts = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(2))
        self.scale = nn.Parameter(torch.rand(SIZE) + 0.5)

    def forward(self, x):
        self.calls += 1
        changes = self.changes if self.calls > 1 else "none"
        if changes == "dtype":
            x = x.to(torch.float8_e5m2).to(x.dtype)
        elif changes == "sign":
            x = -x
        elif changes == "factor":
            x = x * 2
        if self.body == "function":
            return x.cos() if changes == "expert" else x.sin()
        x = self.experts[int(changes == "expert")](x)
        return x if self.body == "product" else x.tanh() * self.scale


def run(region, x, technique, thread, between):
    def function(value):
        return region(value)

    if technique == "call":
        checkpointed = lambda value: headroom.checkpoint(function, value, verify=True)  # noqa: E731
    elif technique == "decorator":
        checkpointed = headroom.checkpoint(verify=True)(function)
    elif technique == "reentrant":
        checkpointed = headroom.checkpoint(use_reentrant=True, verify=True)(function)
    else:
        checkpointed = function
    y = checkpointed(x)
    between()
    if not thread:
        y.square().sum().backward()
        return
    raised = []

    def backward():
        try:
            y.square().sum().backward()
        except BaseException as error:
            raised.append(error)

    other = threading.Thread(target=backward)
    other.start()
    other.join()
    if raised:
        raise raised[0]


@combinations(
    {
        "changes": ["none", "expert", "weight", "dtype", "sign", "factor"],
        "body": ["product", "function", "layers"],
        "technique": ["call", "decorator", "reentrant"],
        "dtype": [torch.float32, torch.float64, torch.bfloat16],
        "leaf": [False, True],
        "thread": [False, True],
    },
    strength=3,
)
def test_gradients_are_right_or_there_is_an_error(case):
    torch.manual_seed(0)
    region = Region(case["changes"], case["body"]).to(case["dtype"])
    x = torch.randn(5, SIZE, dtype=case["dtype"], requires_grad=True)

    def trained(region, x, technique, thread):
        leaf = x.detach().to(region.scale.dtype).requires_grad_()
        start = leaf if case["leaf"] else leaf * 1.5

        def between():
            if case["changes"] == "weight":
                with torch.no_grad():
                    region.experts[0].weight.neg_()

        # Not in the oracle: torch raises there, since the weight is needed as it was.
        run(region, start, technique, thread, between if technique else lambda: None)
        return torch.cat([gradients(region), leaf.grad.double().flatten()])

    wanted = trained(in_float64(region), x, None, False)
    plain = trained(_copied(region), x, None, False)
    try:
        got = trained(region, x, case["technique"], case["thread"])
    except RuntimeError:  # RecomputeError is one, as torch's own
        assert case["changes"] != "none"
        return
    assert distance(got, wanted) <= 2 * distance(plain, wanted) + 1e-12


def _copied(region):
    copied = Region(region.changes, region.body).to(region.scale.dtype)
    copied.load_state_dict(region.state_dict())
    return copied
