"""Calls of mlp_block: its cases, their tensors, and the same in torch."""

import functools

import torch
import torch.nn.functional as F
from headroom.nn.functional import mlp_block

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SAVES = ("all", "gate_up", "input")
HIDDEN, FEATURES = 24, 40

# Options of mlp_block, and what tensors a case has.
CASES = {
    "llama": {},
    "gemma": {"activation": "gelu_tanh", "offset": 1.0, "casting": "once"},
    "apart": {"has": {"up"}, "activation": "gelu", "casting": "narrow"},
    "gpt2": {
        "has": {"norm_bias", "gate_up_bias", "down_bias", "plain"},
        "norm": "layer",
        "activation": "gelu_tanh",
        "eps": 1e-5,
    },
    "relu": {"has": {"plain"}, "activation": "relu_squared", "residual": False},
    "biases": {"has": {"up", "gate_up_bias", "up_bias", "down_bias"}, "activation": "relu"},
    "bare": {"has": {"no norm_weight"}, "norm": "layer"},
}
NAMES = (
    *("x", "norm_weight", "gate_up_weight", "down_weight"),
    *("up_weight", "norm_bias", "gate_up_bias", "up_bias", "down_bias"),
)


def sample(case, dtype, device, shape=(3, 7), hidden=HIDDEN, features=FEATURES, norm_dtype=None):
    """The tensors of a case by their names, and the gradient of the result."""
    has = CASES[case].get("has", set())
    generator = torch.Generator().manual_seed(1)

    def made(shape, scale=1.0, center=0.0, dtype=dtype):
        values = torch.randn(shape, generator=generator) * scale + center
        return values.to(device=device, dtype=dtype)

    width = features if has & {"plain", "up"} else 2 * features
    tensors = {
        "x": made((*shape, hidden), 2.0, 0.3),
        "norm_weight": made(hidden, 0.3, 1.0, norm_dtype or dtype),
        "gate_up_weight": made((width, hidden), hidden**-0.5),
        "down_weight": made((hidden, features), features**-0.5),
        "up_weight": made((features, hidden), hidden**-0.5),
        "norm_bias": made(hidden, 0.2, 0.0, norm_dtype or dtype),
        "gate_up_bias": made(width, 0.2),
        "up_bias": made(features, 0.2),
        "down_bias": made(hidden, 0.2),
    }
    dy = made((*shape, hidden))
    absent = {"up_weight" if name == "up" else name for name in has}
    optional = {"up_weight", "norm_bias", "gate_up_bias", "up_bias", "down_bias"} - absent
    if "no norm_weight" in has:
        optional.add("norm_weight")
    return {name: t for name, t in tensors.items() if name not in optional}, dy


def options_of(case):
    return {name: value for name, value in CASES[case].items() if name != "has"}


def block(case, **more):
    """The case as a function of its tensors, which come by their names."""

    def call(**tensors):
        required = [tensors.pop(name, None) for name in NAMES[:4]]
        return mlp_block(*required, **tensors, **options_of(case), **more)

    return call


ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda t: F.relu(t).square(),
}


def composed(case):
    """The case made of torch's own functions, in the dtype of its tensors."""
    o = {"norm": "rms", "activation": "silu", "eps": 1e-6, "offset": 0.0, "residual": True}
    o |= options_of(case)
    plain = "plain" in CASES[case].get("has", set())

    def call(**t):
        x, weight = t["x"], t.get("norm_weight")
        if o["norm"] == "layer":
            normed = F.layer_norm(x, x.shape[-1:], weight, t.get("norm_bias"), o["eps"])
        else:
            normed = F.rms_norm(x, x.shape[-1:], weight + o["offset"], o["eps"])
        gate = F.linear(normed, t["gate_up_weight"], t.get("gate_up_bias"))
        up = None
        if "up_weight" in t:
            up = F.linear(normed, t["up_weight"], t.get("up_bias"))
        elif not plain:
            gate, up = gate.chunk(2, -1)
        inner = ACTIVATIONS[o["activation"]](gate)
        y = F.linear(inner if up is None else inner * up, t["down_weight"], t.get("down_bias"))
        return x + y if o["residual"] else y

    return call


def run(function, tensors, dy, frozen=()):
    """The result, and the gradients by the names of their tensors."""
    leaves = {n: t.detach().clone().requires_grad_(n not in frozen) for n, t in tensors.items()}
    y = function(**leaves)
    y.backward(dy.to(y.dtype))
    return {"y": y.detach()} | {n: t.grad for n, t in leaves.items() if n not in frozen}


def assert_same(got, wanted, only=None):
    assert not only or set(got) == {"y", *only}
    for name, tensor in got.items():
        assert tensor is not None and torch.equal(tensor, wanted[name]), name
