"""Models of transformers whose loss is their own keep it under ``patch(loss=True)``; those with the
loss of their class do not."""

import functools
import inspect
import sys

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom.fitting.search.techniques import techniques_of
from headroom.patching.heads import KINDS, own_loss
from headroom.patching.losses import has_fused_loss, kept_loss, knows_loss
from headroom.step.description import Step
from torch import nn

from helpers.hf_models import MODELS, inputs_of, model_of

transformers = pytest.importorskip("transformers")
loss_utils = pytest.importorskip("transformers.loss.loss_utils")
AS_IT_IS = dict(save="L0", norms=False, glu=False, rope=False)
Llama = transformers.LlamaForCausalLM


def squared(logits, labels, vocab_size=None, **options):
    """A loss that is no cross entropy."""
    return logits.float().square().mean()


def smoothed(source, target, *args, reduction="mean", ignore_index=-100, **options):
    """Cross entropy with smoothed labels."""
    logp = source.log_softmax(-1)
    return 0.9 * F.nll_loss(logp, target, ignore_index=ignore_index) - 0.1 * logp.mean()


def plus_one(function):
    @functools.wraps(function)
    def wrapped(self, *args, **kwargs):
        out = function(self, *args, **kwargs)
        out.loss = out.loss + out.logits.square().mean()
        return out

    return wrapped


class SquaredMixin:
    @property
    def loss_function(self):
        return squared


class CallMixin:
    def __call__(self, *args, **kwargs):
        out = super().__call__(*args, **kwargs)
        out.loss = 2 * out.loss
        return out


class Squared(nn.Module):
    def forward(self, logits, labels, vocab_size, **options):
        return squared(logits, labels)


def derived(bases=(Llama,), **members):
    return lambda patch: type("LlamaForCausalLM", bases, members)


def on_class(name, made):
    def of(patch):
        patch.setattr(Llama, name, made(getattr(Llama, name)))
        return Llama

    return of


def in_transformers(set_up):
    def of(patch):
        set_up(patch)
        return Llama

    return of


def both_places(patch):
    patch.setattr(loss_utils, "ForCausalLMLoss", squared)
    patch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", squared)


def overridden(self, input_ids=None, labels=None, **kwargs):
    out = Llama.forward(self, input_ids=input_ids, labels=labels, **kwargs)
    out.loss = out.loss + 1e-2 * out.logits.logsumexp(-1).square().mean()
    return out


def registered(model, patch):
    patch.setitem(loss_utils.LOSS_MAPPING, "ForSquares", squared)
    model.loss_type = "ForSquares"


# The ways in which a class has a loss of its own, and an object of a class.
CLASSES = {
    "property": derived(loss_function=property(lambda self: squared)),
    "method": derived(loss_function=lambda self, *args, **kwargs: squared(*args, **kwargs)),
    "static method": derived(loss_function=staticmethod(squared)),
    "_loss_function of a class": derived(_loss_function=staticmethod(squared)),
    "mixin": derived((SquaredMixin, Llama)),
    "__call__ of a mixin": derived((CallMixin, Llama)),
    "forward": derived(forward=overridden),
    "wrapped forward": derived(forward=plus_one(Llama.forward)),
    "forward set on the class": on_class("forward", lambda own: overridden_of(own)),
    "wrapped on the class": on_class("forward", plus_one),
    "property set on the class": on_class("loss_function", lambda own: property(lambda _: squared)),
    "LOSS_MAPPING": in_transformers(
        lambda patch: patch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", squared)
    ),
    "LOSS_MAPPING and its module": in_transformers(both_places),
    "fixed_cross_entropy": in_transformers(
        lambda patch: patch.setattr(loss_utils, "fixed_cross_entropy", smoothed)
    ),
    "torch's cross_entropy": in_transformers(
        lambda patch: patch.setattr(F, "cross_entropy", smoothed)
    ),
}
OBJECTS = {
    "loss_function": lambda model, patch: setattr(model, "loss_function", squared),
    "_loss_function": lambda model, patch: setattr(model, "_loss_function", squared),
    "a module": lambda model, patch: setattr(model, "_loss_function", Squared()),
    "loss_type": registered,
    "functools.partial": lambda model, patch: setattr(
        model, "loss_function", functools.partial(loss_utils.ForCausalLMLoss, num_items_in_batch=50)
    ),
}


def overridden_of(own):
    def forward(self, *args, **kwargs):
        out = own(self, *args, **kwargs)
        out.loss = 3 * out.loss
        return out

    return forward


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()


def llama(kind=Llama):
    model = model_of("Llama")
    model.__class__ = kind
    return model


def step(model):
    """The loss and a gradient."""
    out = model(**inputs_of(padded=True))
    out.loss.backward()
    grad = model.lm_head.weight.grad
    model.zero_grad()
    return [out.loss.detach(), grad]


@pytest.mark.parametrize("way", CLASSES)
def test_the_loss_of_a_class_is_kept(way, monkeypatch):
    plain = step(llama())
    model = llama(CLASSES[way](monkeypatch))
    want = step(model)
    assert abs(want[0] - plain[0]) > 1e-3
    assert not knows_loss(model) and kept_loss(model)
    report = headroom.patch(model, loss=True, **AS_IT_IS)
    assert not has_fused_loss(model)
    assert "its loss, which is its own: " in str(report)
    torch.testing.assert_close(step(model), want, rtol=0, atol=0)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", OBJECTS)
def test_the_loss_of_a_model_is_kept_whenever_it_is_set(way, when, monkeypatch):
    model, other = llama(), llama()
    OBJECTS[way](model, monkeypatch)
    want = step(model)
    if when == "before":
        OBJECTS[way](other, monkeypatch)
    report = headroom.patch(other, loss=True, **AS_IT_IS)
    assert ("which is its own" in str(report)) == (when == "before")
    if when == "after":
        OBJECTS[way](other, monkeypatch)
    torch.testing.assert_close(step(other), want, rtol=0, atol=0)


def test_of_a_class_that_is_changed_after_it_was_patched(monkeypatch):
    model = llama()
    headroom.patch(model, loss=True, **AS_IT_IS)
    monkeypatch.setattr(Llama, "forward", overridden_of(Llama.forward))
    torch.testing.assert_close(step(model), step(llama()), rtol=0, atol=0)


def test_of_bert_which_computes_it_itself(monkeypatch):
    model = model_of("Bert")
    module = sys.modules[KINDS["BertForMaskedLM"].module]
    model.loss_function = squared  # which its forward does not call
    headroom.patch(model, loss=True, **AS_IT_IS)
    assert has_fused_loss(model)
    monkeypatch.setattr(module, "CrossEntropyLoss", functools.partial(nn.CrossEntropyLoss, 3))
    assert "CrossEntropyLoss" in own_loss(model)


class Plain(transformers.LlamaForCausalLM):
    """What has the loss of its class."""

    def scores(self):
        return self.lm_head.weight


STAYS_FUSED = {
    "derived": lambda model: setattr(model, "__class__", Plain),
    "derived twice": lambda model: setattr(model, "__class__", type("Other", (Plain,), {})),
    "the function itself": lambda model: setattr(
        model, "loss_function", loss_utils.ForCausalLMLoss
    ),
    "a type that is not known": lambda model: setattr(model, "loss_type", None),
    "the same for another type": lambda model: setattr(
        model, "loss_type", "ForConditionalGeneration"
    ),
    "a config that its class does not read": lambda model: vars(model.config).update(
        final_logit_softcapping=0.5, logit_scale=0.1
    ),
    "a name of its wrapper": lambda model: setattr(model.model, "loss_function", squared),
    "a hook": lambda model: model.register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("way", STAYS_FUSED)
def test_what_changes_no_loss_stays_fused(way):
    model, other = llama(), llama()
    STAYS_FUSED[way](model), STAYS_FUSED[way](other)
    report = headroom.patch(other, loss=True, **AS_IT_IS)
    assert has_fused_loss(other) and not report.left
    assert other(**inputs_of()).logits is None
    torch.testing.assert_close(step(other), step(model))


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_has_the_loss_of_transformers(name):
    model = model_of(name)
    assert own_loss(model) is None
    module = inspect.getsource(inspect.unwrap(type(model).forward))
    kind = KINDS[type(model).__name__]
    assert ("self.loss_function(" in module) == (kind.loss is not None)
    assert ("final_logit_softcapping" in module) == kind.caps


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert"])
@pytest.mark.parametrize(
    "given", [{"ignore_index": 7}, {"weight": torch.ones(61)}, {"reduction": "sum"}], ids=str
)
def test_what_a_caller_gives_counts_as_it_does_unpatched(name, given):
    model, inputs = model_of(name), inputs_of()
    try:
        want = model(**inputs, **given).loss
    except TypeError:
        pytest.skip("this class takes no such argument")
    headroom.patch(model, loss=True, **AS_IT_IS)
    torch.testing.assert_close(model(**inputs, **given).loss, want)


def test_fit_keeps_it_and_says_so():
    model = llama(derived(loss_function=property(lambda self: squared))(None))
    optimizer = torch.optim.AdamW(model.parameters())
    step = Step(model, optimizer, inputs_of(), device=torch.device("cpu"))
    found = techniques_of(step)
    assert found.fused_losses == (False,)
    assert any("because it is the model's own: it is computed by" in n for n in found.notes)
    assert not techniques_of(step, only={"fused_loss": (False,)}).notes
    assert techniques_of(step.but(model=llama())).fused_losses == (False, True)
