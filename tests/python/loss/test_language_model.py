"""language_model_loss: heads that are a plain Linear, whose logits never exist, and others."""

from functools import partial

import pytest
import torch
from headroom.functional.linear import linear_forward
from headroom.loss import language_model_loss
from headroom.loss.language_model import is_plain_head
from torch import nn

from helpers.linear_cross_entropy import CLASSES, FEATURES, reduced, reference, sample


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def head_of(weight, bias, cls=nn.Linear):
    head = cls(FEATURES, CLASSES, bias=bias is not None)
    head.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        head.bias = nn.Parameter(bias.detach().clone())
    return head


HEADS = {
    "a Linear": head_of,
    "no bias": lambda weight, bias: head_of(weight, None),
    "a module": lambda weight, bias: nn.Sequential(head_of(weight, bias)),
}
NAMES = {"label_smoothing": "eps", "softcap": "cap", "z_loss": "zl"}
OPTIONS = {
    "none": {},
    "smoothing": {"label_smoothing": 0.2},
    "softcap": {"softcap": 4.0},
    "z_loss": {"z_loss": 0.05},
    "not shifted": {"shift": False},
    "a number": {"denominator": 17.0, "z_loss": 0.05},
    "a tensor": {"denominator": torch.tensor(9.0), "shift": False},
    "ignored": {"ignore_index": 3, "label_smoothing": 0.1},
}


def case(seed=0):
    (x, w, b), labels, _ = sample(rows=(3, 11), seed=seed)
    return x, w, b, labels


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", HEADS)
def test_values_and_gradients(kind, options):
    """Against the formula on whole logits, in float64."""
    x, w, b, labels = case()
    ignored = options.get("ignore_index", -100)
    labels[labels == -100] = ignored
    head = HEADS[kind](w, b)
    got = language_model_loss(x, head, labels, **options)
    assert got.dtype == torch.float32 and got.shape == ()
    found = torch.autograd.grad(got, [x, *head.parameters()])

    wide = [t.detach().double().requires_grad_() for t in (x, *head.parameters())]
    seen, wanted = wide[0], torch.where(labels == ignored, -100, labels)
    if options.get("shift", True):
        seen, wanted = seen[:, :-1], wanted[:, 1:]
    given = {NAMES[name]: value for name, value in options.items() if name in NAMES}
    bias = wide[2] if len(wide) > 2 else None
    parts = reference(seen, wide[1], wanted, bias, **given)
    exact = reduced(parts, denominator=options.get("denominator"))
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=0)
    for grad, right in zip(found, torch.autograd.grad(exact, wide)):
        torch.testing.assert_close(grad.double(), right, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", HEADS)
def test_nothing_counts(kind):
    x, w, b, labels = case()
    head = HEADS[kind](w, b)
    loss = language_model_loss(x, head, torch.full_like(labels, -100))
    assert loss == 0
    assert all(grad.eq(0).all() for grad in torch.autograd.grad(loss, [x, *head.parameters()]))


def test_options_of_the_fused_loss_need_a_plain_linear():
    x, w, b, labels = case()
    plain, other = (HEADS[kind](w, b) for kind in ("a Linear", "a module"))
    loss = language_model_loss(x, plain, labels, logit_scale=0.5, workspace=1)
    half = head_of(0.5 * w, 0.5 * b)
    torch.testing.assert_close(loss, language_model_loss(x, half, labels))
    words = "language_model_loss: logit_scale, workspace cannot be given, because the head is a Seq"
    with pytest.raises(ValueError, match=words):
        language_model_loss(x, other, labels, logit_scale=0.5, workspace=1)


def keep(*_):
    return None


HOOKS = ["forward", "forward_pre", "full_backward", "full_backward_pre"]


def test_which_heads_are_plain():
    x, w, b, labels = case()
    head = partial(head_of, w, b)
    assert is_plain_head(head())
    assert not is_plain_head(head(cls=Doubling)) and not is_plain_head(nn.Sequential(head()))
    for hook in HOOKS:
        hooked = head()
        getattr(hooked, f"register_{hook}_hook")(keep)
        assert not is_plain_head(hooked), hook
    # What torch's own, or ours that stands in for it, is bound to is plain too.
    for forward in (partial(nn.Linear.forward, head()), partial(linear_forward, head())):
        bound = head()
        bound.forward = forward
        assert is_plain_head(bound)
    bound.forward = lambda x: x
    assert not is_plain_head(bound)


def test_what_a_head_does_besides_counts():
    """A subclass and a hook that double the logits, against weights of twice the size."""
    x, w, b, labels = case()
    wanted = language_model_loss(x, head_of(2 * w, 2 * b), labels)
    hooked = head_of(w, b)
    hooked.register_forward_hook(lambda module, args, out: 2 * out)
    for head in (head_of(w, b, Doubling), hooked):
        torch.testing.assert_close(language_model_loss(x, head, labels), wanted)
