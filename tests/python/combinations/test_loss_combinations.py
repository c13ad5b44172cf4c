"""Losses without logits in every loop: gradients no further from those of logits in float64 than
twice torch's own in the same precision."""

import headroom
import torch
import torch.nn.functional as F
from torch import nn

from helpers.combined import combinations, distance

SIZE = 8


def cross_entropy(logits, other, target, **options):
    return F.cross_entropy(logits, target, reduction=options["reduction"])


def distillation(logits, other, target, **options):
    teacher = F.log_softmax(other / options["temperature"], -1)
    student = F.log_softmax(logits / options["temperature"], -1)
    rows = (teacher.exp() * (teacher - student)).sum(-1)
    return getattr(rows, options["reduction"])()


def ours_cross_entropy(hidden, weight, teacher, head, target, **options):
    return headroom.linear_cross_entropy(hidden, weight, target, reduction=options["reduction"])


def ours_distillation(hidden, weight, teacher, head, target, **options):
    return headroom.linear_distillation_loss(hidden, weight, teacher, head, **options)


LOSSES = {
    "cross_entropy": (ours_cross_entropy, cross_entropy),
    "distillation": (ours_distillation, distillation),
}


@combinations(
    {
        "loss": [*LOSSES],
        "dtype": [torch.float32, torch.bfloat16, torch.float16],
        "classes": [61, 32003, 128256],
        "tokens": [4, 37],
        "loop": ["plain", "scaler"],
        "temperature": [1.0, 2.5],
        "spread": [0.35, 0.02],  # of the weights: 0.02 leaves every class about as likely
        "reduction": ["mean", "sum"],
        "frozen": [False, True],
    },
    full=40,
    strength=3,
    possible=lambda loss, dtype, tokens, classes, temperature, loop, **_: (
        tokens * classes < 2**20
        and (loss == "distillation" or temperature == 1.0)
        # Without a scaler float16 loses gradients with torch too.
        and (loop == "scaler") == (dtype == torch.float16)
    ),
)
def test_gradients_are_those_of_logits(case):
    dtype, classes, tokens = case["dtype"], case["classes"], case["tokens"]
    given = [torch.randn(tokens, SIZE), torch.randn(classes, SIZE) * case["spread"]] * 2
    given = [(x + 0.3 * x.std() * torch.randn_like(x)).to(dtype) for x in given]
    target = torch.randint(classes, (tokens,))
    options = {"reduction": case["reduction"], "temperature": case["temperature"]}
    ours, reference = LOSSES[case["loss"]]
    scale = 2.0**10 if case["loop"] == "scaler" else 1.0

    def trained(function, dtype):
        hidden, weight, teacher, head = (x.to(dtype) for x in given)
        hidden = nn.Parameter(hidden)
        weight = nn.Parameter(weight, requires_grad=not case["frozen"])
        (function(hidden, weight, teacher, head, target, **options) * scale).backward()
        grads = [hidden.grad] if case["frozen"] else [hidden.grad, weight.grad]
        return [grad.double() / scale for grad in grads]

    def with_logits(hidden, weight, teacher, head, target, **options):
        logits = [hidden @ weight.T, teacher @ head.T]
        # A softmax is computed in float32, as under autocast.
        logits = [x if x.dtype == torch.float64 else x.float() for x in logits]
        return reference(*logits, target, **options)

    wanted = trained(with_logits, torch.float64)
    plain = trained(with_logits, dtype)
    got = trained(ours, dtype)
    for mine, torchs, right in zip(got, plain, wanted):
        allowed = 2 * distance(torchs, right) + torch.finfo(dtype).eps
        assert distance(mine, right) <= allowed
