"""``patch(loss=True)``: models of transformers whose loss comes from hidden states."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import types
import warnings

import headroom
import pytest
import torch

from helpers.bits import assert_same_bits
from helpers.hf_models import MODELS, TOKENS, inputs_of, model_of
from helpers.shapes import Shapes

transformers = pytest.importorskip("transformers")

WITH_SOFTCAP = ("Gemma2", "Gemma3")
AS_IT_IS = dict(norms=False, glu=False, rope=False)


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()


def made(name, **options):
    if name in WITH_SOFTCAP:
        options["final_logit_softcapping"] = 3.0
    return model_of(name, **options)


def step(model, inputs, **options):
    """The loss and the gradients, by name."""
    out = model(**inputs, **options)
    out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"loss": out.loss.detach()} | grads


def patched(model, loss=True, **options):
    copied = copy.deepcopy(model)
    headroom.patch(copied, loss=loss, **{"save": "L0"} | AS_IT_IS | options)
    return copied


def assert_close(got, want):
    assert got.keys() == want.keys()
    for key in want:
        torch.testing.assert_close(got[key], want[key])


def makes_logits(model, inputs, **options):
    vocabulary = model.config.vocab_size
    rows = inputs["input_ids"].numel()
    with Shapes() as shapes:
        step(model, inputs, **options)
    return any(
        s and s[-1] == vocabulary and rows == torch.Size(s[:-1]).numel() for s in shapes.seen
    )


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_transformers(name):
    model, inputs = made(name), inputs_of(padded=True)
    want = step(model, inputs)
    other = patched(model)
    assert_close(step(other, inputs), want)
    assert makes_logits(model, inputs)
    assert not makes_logits(other, inputs)
    assert other(**inputs).logits is None


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_num_items_in_batch(name):
    model, inputs = made(name), inputs_of(padded=True)
    for items in (37, torch.tensor(37)):
        want = step(model, inputs, num_items_in_batch=items)
        assert_close(step(patched(model), inputs, num_items_in_batch=items), want)
        assert want["loss"] < step(model, inputs)["loss"]


def test_num_items_in_batch_holds_for_bert_too():
    """Whose own forward ignores it, although Trainer divides by nothing else then."""
    model, inputs = made("Bert"), inputs_of(padded=True)
    count = (inputs["labels"] != -100).sum()
    want = step(model, inputs)["loss"]
    got = step(patched(model), inputs, num_items_in_batch=2 * count)["loss"]
    torch.testing.assert_close(got, want / 2)


def test_labels_that_were_shifted_before():
    model, inputs = made("Llama"), inputs_of(padded=True)
    shifted = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    inputs["shift_labels"] = shifted
    want = step(model, inputs)
    assert_close(step(patched(model), inputs), want)
    inputs["shift_labels"] = shifted.roll(1, 0)
    assert step(patched(model), inputs)["loss"] != want["loss"]


def test_options_are_those_of_the_loss():
    model, inputs = made("Llama"), inputs_of()
    one = patched(model, {"label_smoothing": 0.25, "z_loss": 1e-2})
    got = step(one, inputs)["loss"]
    logits = model(inputs["input_ids"]).logits[:, :-1].flatten(0, 1).double()
    want = torch.nn.functional.cross_entropy(
        logits, inputs["labels"][:, 1:].flatten(), label_smoothing=0.25
    )
    want = want + 1e-2 * logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(got.double(), want)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Bert"])
def test_logits_come_where_they_are_wanted(name):
    model, inputs = made(name), inputs_of(padded=True)
    other = patched(model)
    without = {key: x for key, x in inputs.items() if key != "labels"}
    assert_same_bits([other(**without).logits], [model(**without).logits])
    want = model(**inputs, return_dict=False)
    assert_same_bits(other(**inputs, return_dict=False)[:2], want[:2])
    if name != "Bert":
        want = model(**inputs, logits_to_keep=TOKENS)
        assert_same_bits([other(**inputs, logits_to_keep=TOKENS).logits], [want.logits])
    with torch.no_grad():
        got, want = other.eval()(**inputs), model.eval()(**inputs)
    torch.testing.assert_close(got.loss, want.loss)
    assert_same_bits([got.logits], [want.logits])


def test_hidden_states_and_attentions_are_passed_on():
    model, inputs = made("GPT2", attn_implementation="eager"), inputs_of()
    options = dict(output_hidden_states=True, output_attentions=True)
    got, want = patched(model)(**inputs, **options), model(**inputs, **options)
    assert type(got) is type(want)
    assert got.keys() == want.keys() - {"logits"}
    for name in ("hidden_states", "attentions"):
        assert_same_bits(got[name], want[name])


@pytest.mark.parametrize("to", ["nf4", "int8"])
def test_a_head_of_few_bits_makes_no_logits(to):
    model, inputs = made("Llama", tie_word_embeddings=False), inputs_of(padded=True)
    headroom.quantize(model.requires_grad_(False), to, skip=())
    model.model.norm.requires_grad_(True)
    want = step(model, inputs)
    assert makes_logits(model, inputs)
    other = patched(model)
    assert type(other.lm_head).__name__ in ("Linear4bit", "Linear8bit")
    assert_close(step(other, inputs), want)
    assert not makes_logits(other, inputs)


def test_a_head_that_is_more_than_a_linear_makes_logits():
    model, inputs = made("Llama", tie_word_embeddings=False), inputs_of()
    seen = []
    other = patched(model)
    hook = other.lm_head.register_forward_hook(lambda *_: seen.append("head"))
    assert_same_bits(step(other, inputs).values(), step(model, inputs).values())
    assert seen == ["head"]
    hook.remove()
    other.loss_function = lambda logits, labels, vocab_size, **_: logits.float().mean()
    assert step(other, inputs)["loss"] == other(inputs["input_ids"]).logits.mean()


@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
@pytest.mark.parametrize("first", ["peft", "patch"])
def test_lora(first, target):
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=2, target_modules=[target], init_lora_weights=False)

    def lora(loss):
        model = made("Llama")
        torch.manual_seed(2)
        if first == "peft":
            model = peft.get_peft_model(model, options)
            headroom.patch(model, "L0", loss=loss, **AS_IT_IS)
        else:
            headroom.patch(model, "L0", loss=loss, **AS_IT_IS)
            model = peft.get_peft_model(model, options)
        return model.train()

    inputs = inputs_of(padded=True)
    assert_close(step(lora(True), inputs), step(lora(False), inputs))
    assert makes_logits(lora(True), inputs) == (target == "lm_head")


def test_undone_to_the_bit():
    model, inputs = made("Llama"), inputs_of()
    before = {path: dict(vars(m)) for path, m in model.named_modules()}
    want = step(model, inputs)
    report = headroom.patch(model, loss=True)
    assert "  1 loss (LlamaForCausalLM) -> headroom.linear_cross_entropy" in str(report)
    headroom.patch(model, loss={"z_loss": 1e-3})
    headroom.unpatch(model)
    after = {path: vars(m).keys() for path, m in model.named_modules()}
    assert after == {path: attributes.keys() for path, attributes in before.items()}
    assert_same_bits(step(model, inputs).values(), want.values())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_bound_to_itself(copied):
    model, inputs = patched(made("Llama")), inputs_of()
    other = copied(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    plain = copy.deepcopy(other)
    headroom.unpatch(plain)
    assert_close(step(other, inputs), step(plain, inputs))


def test_the_signature_is_that_of_the_class():
    """Trainer drops the columns of a data set that are not in it."""
    model = made("GPT2")
    want = inspect.signature(model.forward)
    assert inspect.signature(patched(model).forward) == want


def test_models_that_are_not_known_are_left_alone():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 5))
    report = headroom.patch(model, loss=True)
    assert not report.changed and "with the head of a language model" in str(report)
    other = made("Llama")
    other.forward = other.forward
    report = headroom.patch(other, loss=True)
    assert "something else has replaced its forward" in str(report)


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (1.5, TypeError, "loss is 1.5, wanted True, False or a dict"),
        ({"smoothing": 0.1}, ValueError, "loss has 'smoothing', wanted options of"),
        ({"reduction": "sum"}, ValueError, "loss has 'reduction'"),
    ],
)
def test_bad_options_change_nothing(loss, error, message):
    model = made("Llama")
    before = {path: dict(vars(m)) for path, m in model.named_modules()}
    with pytest.raises(error, match=message):
        headroom.patch(model, loss=loss)
    assert {path: dict(vars(m)) for path, m in model.named_modules()} == before


@pytest.mark.slow
def test_compiled(fresh_dynamo):
    model, inputs = patched(made("Llama")), inputs_of()
    want = step(model, inputs)
    model.compile(fullgraph=True, backend="aot_eager")
    assert_close(step(model, inputs), want)


def set_forward_as_trl(model):
    """Sets a forward as ``patch_fused_lm_head`` of TRL does: with a loss of its own, and the one
    that was there for all other calls."""
    own = model.forward

    def forward(self, *args, fused_lm_head=False, labels=None, **kwargs):
        if not fused_lm_head:
            return own(*args, labels=labels, **kwargs)
        hidden = self.base_model(*args, **kwargs).last_hidden_state
        logits = self.get_output_embeddings()(hidden[:, :-1]).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())

    model.forward = types.MethodType(forward, model)


class TestAForwardThatIsSetLater:
    def test_says_that_the_loss_is_not_taken(self):
        model = patched(made("Llama"), {"z_loss": 1.0})
        set_forward_as_trl(model)
        with pytest.warns(UserWarning, match="loss= and its options do nothing in this training"):
            model(**inputs_of(), fused_lm_head=True).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(**inputs_of()).loss.backward()  # which calls ours
            model(inputs_of()["input_ids"])
            model.eval()(**inputs_of(), fused_lm_head=True)
            with torch.no_grad():
                model.train()(**inputs_of(), fused_lm_head=True)

    def test_can_stay_when_the_model_is_unpatched(self):
        plain = made("Llama")
        model = patched(plain, {"z_loss": 1.0})
        set_forward_as_trl(model)
        set_later = model.forward
        headroom.unpatch(model)
        assert model.forward == set_later and "forward" not in vars(model.model)
        assert_same_bits(step(model, inputs_of()).values(), step(plain, inputs_of()).values())
        assert model(**inputs_of()).logits is not None
        assert headroom.patch(model, loss=True).left[0].reason.startswith("its loss: something")

    def test_of_a_layer_has_to_be_removed_first(self):
        model = patched(made("Llama"), save="L5")
        layer = model.model.layers[1]
        layer.forward = functools.partial(lambda own, *a, **k: own(*a, **k), layer.forward)
        with pytest.raises(RuntimeError, match="forward of model.layers.1 was replaced"):
            headroom.unpatch(model)
        assert "_headroom_patch" in vars(model)
