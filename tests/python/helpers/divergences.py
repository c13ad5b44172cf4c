"""Divergences of logits by torch's functions, in the precision of the logits, for every formula."""

import math

import torch

KINDS = {
    "forward": ("forward_kl", 0.5),
    "reverse": ("reverse_kl", 0.5),
    "js": ("js", 0.5),
    "js 0.9": ("js", 0.9),
}
ENDS = {  # where the two terms of "js" all but cancel
    "js 1e-6": ("js", 1e-6),
    "js 1 - 1e-6": ("js", 1 - 1e-6),
}


def reference(student, teacher, kind, temperature=1.0):
    """The divergence of each row, as trl computes it: from log-softmaxes."""
    p, q = ((z / temperature).log_softmax(-1) for z in (student, teacher))
    if kind == "forward":
        return (q.exp() * (q - p)).sum(-1)
    if kind == "reverse":
        return (p.exp() * (p - q)).sum(-1)
    beta = (KINDS | ENDS)[kind][1]
    m = torch.logaddexp(p + math.log(1 - beta), q + math.log(beta))
    return (beta * q.exp() * (q - m) + (1 - beta) * p.exp() * (p - m)).sum(-1)
