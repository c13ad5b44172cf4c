"""``patch(loss=True)`` of mixtures of experts, with the loss of the balance of their routers."""

import copy
import inspect

import headroom
import pytest
import torch
from headroom.patching.heads import MIXTURES

from helpers.moe_models import FAMILIES, moe_of, step, tokens_of, transformers

KNOWN = [name for name in FAMILIES if name in {kind for kind, _ in MIXTURES.values()}]
BALANCED = [name for name in KNOWN if dict(MIXTURES.values())[name]]


def padded():
    batch = tokens_of()
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 8:] = 0
    return batch | {
        "attention_mask": mask,
        "labels": batch["labels"].masked_fill(mask == 0, -100),
    }


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_losses_and_gradients(name, experts):
    model = moe_of(name)
    want = step(model, padded())
    report = headroom.patch(model, "L5", loss=True, norms=False, experts=experts)
    assert "1 loss" in str(report) and not any("loss" in one.reason for one in report.left)
    torch.testing.assert_close(step(model, padded()), want)


@pytest.mark.parametrize("way", ["argument", "config"])
@pytest.mark.parametrize("name", BALANCED)
def test_the_balance_of_routers_is_added(name, way):
    model, batch = moe_of(name), padded()
    model.router_aux_loss_coef = 0.7
    if way == "argument":
        batch["output_router_logits"] = True
    else:
        model.config.output_router_logits = True
    other = copy.deepcopy(model)
    headroom.patch(other, loss=True, norms=False)
    outputs = [each(**batch) for each in (model, other)]
    want, got = outputs
    assert want.aux_loss > 0 and got.logits is None
    for field in ("loss", "aux_loss"):
        torch.testing.assert_close(got[field], want[field])
    assert len(got.router_logits) == len(want.router_logits)
    torch.testing.assert_close(got.router_logits, want.router_logits)
    torch.testing.assert_close(step(other, batch), step(model, batch))
    without = other(**batch | {"output_router_logits": False})
    assert without.aux_loss is None
    torch.testing.assert_close(without.loss + 0.7 * got.aux_loss, got.loss)


def test_an_evaluation_and_calls_that_want_logits():
    model, batch = moe_of("Mixtral").eval(), padded() | {"output_router_logits": True}
    with torch.no_grad():
        want = model(**batch)
        headroom.patch(model, loss=True, norms=False)
        got = model(**batch)
        torch.testing.assert_close(got.loss, want.loss)
        torch.testing.assert_close(got.logits.clone(), want.logits)
        plain = model(input_ids=batch["input_ids"], output_router_logits=True)
    assert plain.loss is None and plain.logits is not None and plain.aux_loss > 0


def test_label_smoothing_leaves_the_balance_in_the_loss():
    """Also where the class computes logits, as in an evaluation with gradients."""
    model, batch = moe_of("Mixtral"), padded() | {"output_router_logits": True}
    model.router_aux_loss_coef = 0.7
    headroom.patch(model, loss=True, norms=False)
    want = model(**batch, label_smoothing=0.1)
    got = model.eval()(**batch, label_smoothing=0.1)
    assert want.logits is None and got.logits is not None
    torch.testing.assert_close(got.loss, want.loss)


def test_mixtures_whose_loss_is_not_known():
    report = headroom.patch(moe_of("GraniteMoe"), loss=True)
    assert any(one.reason.startswith("its loss: not a model") for one in report.left)


def test_every_mixture_that_is_known_exists():
    for module, (prefix, balances) in MIXTURES.items():
        kind = getattr(transformers, f"{prefix}ForCausalLM")
        assert kind.__module__ == f"transformers.models.{module}.modeling_{module}"
        used = inspect.unwrap(kind.forward).__code__.co_names
        assert balances == ("load_balancing_loss_func" in used)
