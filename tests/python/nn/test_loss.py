"""``headroom.nn.LinearCrossEntropyLoss`` beside torch's, and the loss of a Transformer."""

import pytest
import torch
import torch.nn.functional as F
from headroom.nn import LinearCrossEntropyLoss, Transformer, TransformerConfig

ROWS, FEATURES, CLASSES = 19, 12, 31


def given():
    target = torch.randint(CLASSES, (ROWS,))
    target[3:8] = -100
    return torch.randn(ROWS, FEATURES), target


def step(loss, x, target, **options):
    x = x.clone().requires_grad_()
    value = loss(x, target, **options)
    value.sum().backward()
    return [value.detach(), x.grad, *(p.grad for p in loss.parameters())]


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyLoss"), reason="torch is too old")
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(bias=True, label_smoothing=0.1, reduction="sum"),
        dict(weight=True, reduction="none", ignore_index=5),
        dict(weight=True, ignore_index=None),
    ],
    ids=["plain", "smoothed", "rows", "weighted"],
)
def test_it_is_torchs(options):
    if options.get("weight"):
        options = options | {"weight": torch.rand(CLASSES) + 0.5}
    theirs = torch.nn.LinearCrossEntropyLoss(FEATURES, CLASSES, **options)
    ours = LinearCrossEntropyLoss(FEATURES, CLASSES, **options)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    x, target = given()
    if options.get("ignore_index") == 5:
        target = target.clamp_min(0)
    for mine, want in zip(step(ours, x, target), step(theirs, x, target), strict=True):
        torch.testing.assert_close(mine, want)


def test_options_of_the_loss_and_of_a_call():
    x, target = given()
    loss = LinearCrossEntropyLoss(FEATURES, CLASSES, z_loss=1e-2, softcap=3.0)
    z = 3.0 * torch.tanh(loss.linear(x) / 3.0)
    counts = target != -100
    extra = 1e-2 * z.logsumexp(-1)[counts].square().mean()
    torch.testing.assert_close(loss(x, target), F.cross_entropy(z, target) + extra)
    loss = LinearCrossEntropyLoss(FEATURES, CLASSES, reduction="sum")
    halved = loss(x, target, denominator=torch.tensor(2.0))
    torch.testing.assert_close(halved, loss(x, target) / 2)
    assert loss(x, torch.full_like(target, -100)) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(reduction="all"), "reduction is 'all'"),
        (dict(label_smoothing=1.5), "label_smoothing is 1.5"),
        (dict(weight=torch.ones(3)), r"weight has shape \(3,\), wanted \(31,\)"),
    ],
    ids=["reduction", "label_smoothing", "weight"],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        LinearCrossEntropyLoss(FEATURES, CLASSES, **options)


SIZES = dict(vocab_size=40, hidden_size=16, layers=1, heads=2, features=24)


def grads_of(model, value):
    value.backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return [value.detach(), *found]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_labels_of_a_transformer(causal, tied):
    model = Transformer(TransformerConfig(**SIZES, causal=causal, tied=tied, head_bias=True))
    ids = torch.randint(40, (2, 9))
    labels = ids.clone()
    labels[0, 4:] = -100
    got = grads_of(model, model(ids, labels=labels, loss_options={"label_smoothing": 0.1}))
    logits, wanted = model(ids), labels
    if causal:
        logits, wanted = logits[:, :-1], labels[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), label_smoothing=0.1)
    for mine, want in zip(got, grads_of(model, loss), strict=True):
        torch.testing.assert_close(mine, want)


def test_packed_sequences_do_not_predict_each_other():
    model = Transformer(TransformerConfig(**SIZES))
    ids = torch.randint(40, (1, 12))
    ends = torch.tensor([0, 5, 12])
    got = model(ids, labels=ids, cu_seqlens=ends)
    parts = [ids[:, :5], ids[:, 5:]]
    each = [model(part, labels=part) * (part.shape[1] - 1) for part in parts]
    torch.testing.assert_close(got, sum(each) / 10)


def test_heads_that_are_more_than_a_linear_are_called():
    model = Transformer(TransformerConfig(**SIZES))
    ids = torch.randint(40, (2, 9))
    want = model(ids, labels=ids)
    seen = []
    model.head.register_forward_hook(lambda *_: seen.append("head"))
    torch.testing.assert_close(model(ids, labels=ids), want)
    assert seen == ["head"]
    with pytest.raises(ValueError, match="workspace cannot be given, because the head is a Linear"):
        model(ids, labels=ids, loss_options={"workspace": "1 MiB"})
    without = Transformer(TransformerConfig(**SIZES, head=False))
    with pytest.raises(ValueError, match="config.head is False"):
        without(ids, labels=ids)
