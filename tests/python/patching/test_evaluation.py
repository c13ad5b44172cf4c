"""Evaluation of models that ``patch(loss=True)`` has changed: no logits before they are read."""

import copy
import pickle

import headroom
import numpy
import pytest
import torch
from headroom.patching.late_logits import LateLogits

from helpers.bits import assert_same_bits
from helpers.hf_models import MODELS, TOKENS, inputs_of, model_of
from helpers.shapes import Shapes

transformers = pytest.importorskip("transformers")

AS_IT_IS = dict(save="L0", norms=False, glu=False, rope=False)


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()


def pair(name="Llama", **options):
    """A model and its patched copy, both in evaluation."""
    options |= {"final_logit_softcapping": 3.0} if name in ("Gemma2", "Gemma3") else {}
    model = model_of(name, **options).eval()
    other = copy.deepcopy(model)
    headroom.patch(other, loss=True, **AS_IT_IS)
    return model, other


def makes_logits(run):
    with Shapes() as shapes:
        run()
    return any(s[-1:] == (61,) and torch.Size(s).numel() == 24 * 61 for s in shapes.seen)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_made_without_logits_and_these_when_they_are_read(name, context):
    model, other = pair(name)
    inputs = inputs_of(padded=True)
    with context():
        want, found = model(**inputs), []
        assert not makes_logits(lambda: found.append(other(**inputs)))
    got = found[0]
    torch.testing.assert_close(got.loss, want.loss)
    assert got.keys() == want.keys() and type(got) is type(want)
    assert got.logits.shape == want.logits.shape and got.logits.dtype == want.logits.dtype
    assert got.logits.device == want.logits.device and len(got.logits) == 2
    assert got.logits.requires_grad is False
    assert got.logits._computed is None  # until here
    assert_same_bits([got.logits], [want.logits])


def late(compute=lambda: torch.arange(12.0).view(3, 4)):
    return LateLogits(compute, (3, 4), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x + 1,
        lambda x: x[1, 2:],
        lambda x: x.argmax(-1),
        lambda x: torch.cat([x, x]),
        lambda x: x.float().double(),
        lambda x: x.detach().cpu(),
        lambda x: x.numpy(),
        lambda x: numpy.asarray(x),
        lambda x: x.tolist(),
        lambda x: [row.sum() for row in x],
        lambda x: pickle.loads(pickle.dumps(x)),
        copy.deepcopy,
        repr,
        lambda x: torch.from_dlpack(x),
        lambda x: x.masked_fill_(x > 5, 0.0),
        lambda x: torch.nn.functional.cross_entropy(x, torch.tensor([0, 1, 2])),
        lambda x: headroom.functional.cross_entropy(x, torch.tensor([0, 1, 2])),
        pytest.param(
            lambda x: torch.compile(lambda y: y.softmax(-1), backend="eager")(x),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_whatever_reads_them_gets_what_a_tensor_gives(read):
    x = late()
    got, want = read(x), read(torch.arange(12.0).view(3, 4))
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        assert_same_bits([got], [want])
    else:
        assert str(got) == str(want)


def test_they_are_computed_once_and_written_in_place():
    seen = []
    x = late(lambda: seen.append(1) or torch.zeros(3, 4))
    x.add_(1)
    assert x.sum() == 12 and seen == [1]


def test_a_cast_of_the_whole_output_waits_too():
    """As Accelerate casts what a model returns under autocast."""
    utilities = pytest.importorskip("accelerate.utils.operations")
    model, other = pair()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = utilities.convert_to_fp32(model(**inputs_of()))
        got = utilities.convert_to_fp32(other(**inputs_of()))
    assert got.logits.dtype == torch.float32 and got.logits._computed is None
    assert_same_bits([got.logits], [want.logits])  # under the autocast of the call


def test_weights_that_have_changed_are_refused():
    _, other = pair()
    with torch.no_grad():
        out = other(**inputs_of())
        other.lm_head.weight.add_(1)
        with pytest.raises(RuntimeError, match="computed when they are read, and parameter weight"):
            out.logits.sum()


@pytest.mark.parametrize(
    "change",
    [
        lambda model, inputs: inputs.update(logits_to_keep=TOKENS),
        lambda model, inputs: inputs.update(return_dict=False),
        lambda model, inputs: inputs.pop("labels"),
        lambda model, inputs: setattr(
            model, "loss_function", lambda logits, *a, **k: logits.mean()
        ),
        lambda model, inputs: model.lm_head.register_forward_hook(lambda *_: None),
    ],
)
def test_other_calls_are_those_of_the_class(change):
    (model, other), inputs = pair(tie_word_embeddings=False), inputs_of()
    given = dict(inputs)
    change(model, inputs), change(other, given)
    with torch.no_grad():
        want, got = model(**inputs), other(**given)
    want, got = (list(o.values()) if hasattr(o, "values") else o for o in (want, got))
    tensors = [x for x in want if isinstance(x, torch.Tensor)]
    assert_same_bits([x for x in got if isinstance(x, torch.Tensor)], tensors)


def test_with_gradients_and_in_generation_logits_come_as_before():
    model, other = pair()
    want, got = model(**inputs_of()), other(**inputs_of())
    assert_same_bits([got.logits, got.loss], [want.logits, want.loss])
    got.loss.backward()
    ids = inputs_of()["input_ids"]
    assert torch.equal(other.generate(ids, max_new_tokens=3), model.generate(ids, max_new_tokens=3))
