"""Bad inputs that adamw_ and adamw8bit_ have in common. Each has a name, a change of the lists or
the options of a call of three tensors, and the words of its error."""

import torch

from helpers.bad_inputs import INF, NAN, expanded, of_dtype, one, option, overlapping, put

SHAPED = ("params", "grads", "exp_avgs", "exp_avg_sqs")


def short_lists(names):
    """Lists that have a tensor less than the others. ``params`` comes first in a call."""
    for name in names:
        words = f"{'state_steps' if name == 'steps' else name} has 2 tensors"
        if name == "params":
            words = "grads has 3 tensors"
        yield f"{name} too short", lambda lists, _, n=name: getattr(lists, n).pop(), words


def bad_shapes():
    """Shapes that differ, and elements that are written and share memory."""
    for name in SHAPED:
        if name != "params":
            words = rf"{name}\[0\] has another shape than params\[0\]"
            yield f"{name} of another shape", put(name, 0, lambda t: t.reshape(-1)), words
            yield f"{name} broadcastable", put(name, 0, lambda t: t[:1]), words
        if name != "grads":
            for make in (expanded, overlapping):
                words = rf"{name}\[0\] has elements that share memory"
                yield f"{name} {make.__name__}", put(name, 0, make), words


def bad_steps():
    for value in (-1.0, NAN, INF, 2.0**53):
        make = put("steps", 1, lambda s, v=value: one(v, torch.float64))
        yield f"step {value}", make, r"steps\[1\]"
    yield "step of integers", put("steps", 1, of_dtype(torch.int64)), r"steps\[1\]"
    yield "step bfloat16", put("steps", 1, of_dtype(torch.bfloat16)), r"steps\[1\]"
    for size in (2, 0):
        make = put("steps", 1, lambda s, n=size: torch.zeros(n, dtype=torch.float64))
        yield f"step of {size}", make, r"steps\[1\]"


def bad_numbers(**more):
    """Options that are numbers; ``more`` has the values of those that only one op has."""
    for name, values in {
        "lr": (-1.0, NAN, INF, -INF),
        "beta1": (1.0, -0.1, NAN, 2.0),
        "beta2": (1.0, -0.1, NAN, 2.0),
        "eps": (-1.0, NAN, INF),
        "weight_decay": (-1.0, NAN, INF),
        **more,
    }.items():
        for value in values:
            yield f"{name} {value}", option(**{name: value}), f"{name} is"


def bad_scalars():
    """Options that are tensors of one element."""
    for value in (-1.0, NAN, INF):
        yield f"lr tensor {value}", option(lr=one(value)), "lr_ptr is"
    for size in (2, 0):
        yield f"lr tensor of {size}", option(lr=torch.ones(size)), f"lr_tensor has {size} elements"
    yield "lr tensor of integers", option(lr=torch.tensor(1)), "lr_tensor"
    yield "lr tensor bfloat16", option(lr=one(1.0, torch.bfloat16)), "lr_tensor must be"
    for value in (0.0, -1.0, NAN, INF):
        yield f"grad_scale {value}", option(grad_scale=one(value)), "grad_scale is"
    for name in ("grad_scale", "found_inf", "clip_coef"):
        wanted = f"{name} must be a float32 tensor of one element"
        yield f"{name} float64", option(**{name: one(1.0, torch.float64)}), wanted
        for size in (2, 0):
            yield f"{name} of {size}", option(**{name: torch.ones(size)}), wanted
