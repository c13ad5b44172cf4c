"""What tests of headroom.linear_cross_entropy share: layers, options, and the formula in torch."""

import headroom
import torch
import torch.nn.functional as F

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS, FEATURES, CLASSES = 53, 19, 211
# How the logits are cut: all at once, in chunks of 13 rows, in tiles of 64 classes.
CUTS = {
    "whole": {},
    "tokens": {"mode": "tokens", "workspace": 13 * CLASSES * 4},
    "vocabulary": {"mode": "vocabulary", "workspace": 1},
}
OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum", "bias": True},
    "none": {"reduction": "none", "token_weight": True},
    "weights": {"class_weight": True, "token_weight": True, "z_loss": 0.01, "bias": True},
    "smoothing": {"label_smoothing": 0.1, "class_weight": True},
    "softcap": {"softcap": 8.0, "logit_scale": 0.5},
    "denominator": {"denominator": 17.0, "z_loss": 0.02},
    "all": {
        **{"label_smoothing": 0.2, "softcap": 20.0, "z_loss": 0.01, "logit_scale": 1.5},
        **{"bias": True, "class_weight": True, "token_weight": True},
    },
}


def sample(dtype=torch.float32, device="cpu", rows=(ROWS,), seed=0, size=0.5):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*rows, FEATURES, generator=generator)
    weight = torch.randn(CLASSES, FEATURES, generator=generator) * size
    bias = torch.randn(CLASSES, generator=generator)
    target = torch.randint(0, CLASSES, rows, generator=generator)
    target[..., ::3] = -100
    factors = torch.rand(CLASSES, generator=generator), torch.rand(*rows, generator=generator)
    leaves = [t.to(device, dtype).requires_grad_() for t in (hidden, weight, bias)]
    return leaves, target.to(device), [(t + 0.5).to(device) for t in factors]


def reference(x, w, target, b=None, cw=None, tw=None, eps=0.0, cap=None, zl=0.0, scale=1.0):
    """The losses of rows, then the weights of the two sums that "mean" divides by."""
    z = scale * (x @ w.T + (0 if b is None else b))
    z = z if cap is None else cap * (z / cap).tanh()
    tw = torch.ones(target.shape, device=x.device) if tw is None else tw
    count = torch.where(target == -100, 0.0, tw).to(z.dtype)
    weights = None if cw is None else cw.to(z.dtype)
    flat = z.flatten(0, -2), target.flatten()
    ce = F.cross_entropy(*flat, weights, reduction="none", label_smoothing=eps).view(target.shape)
    of_target = count if cw is None else count * cw[target.clamp(min=0)].to(z.dtype)
    return ce * count, zl * z.logsumexp(-1) ** 2 * count, of_target.sum(), count.sum()


def reduced(parts, reduction="mean", denominator=None):
    ce, zl, weights, count = parts
    if reduction == "none":
        return ce + zl
    if denominator is not None:
        return (ce.sum() + zl.sum()) / denominator
    return ce.sum() + zl.sum() if reduction == "sum" else ce.sum() / weights + zl.sum() / count


def evaluated(leaves, target, factors, options, cut=None, weight=None):
    """The loss and the gradients, ours if there is a cut, else those of the reference. ``weight``
    takes the place of the second leaf, and has no gradient."""
    given = dict(options)
    has_bias, cw, tw = (given.pop(k, False) for k in ("bias", "class_weight", "token_weight"))
    cw, tw = (t if used else None for t, used in zip(factors, (cw, tw)))
    x, w, b = leaves
    if cut is None:
        how = {k: given.pop(k) for k in ("reduction", "denominator") if k in given}
        names = {"label_smoothing": "eps", "softcap": "cap", "z_loss": "zl", "logit_scale": "scale"}
        given = {names[k]: v for k, v in given.items()}
        loss = reduced(reference(x, w, target, b if has_bias else None, cw, tw, **given), **how)
    else:
        loss = headroom.linear_cross_entropy(
            *(x, w if weight is None else weight, target, b if has_bias else None),
            **{"class_weight": cw, "token_weight": tw} | given | cut,
        )
    wanted = [x, *[w] * (weight is None), *[b] * has_bias]
    upstream = torch.linspace(1, 2, loss.numel(), device=loss.device).view(loss.shape)
    return [loss.detach(), *torch.autograd.grad(loss, wanted, upstream.to(loss.dtype))]


def as_float64(leaves):
    return [t.detach().double().requires_grad_() for t in leaves]
