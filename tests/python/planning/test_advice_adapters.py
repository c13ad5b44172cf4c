"""Advice to train adapters, and to put frozen weights into few bits: the bytes are those of a model
that was changed for real, and the user's stays as it was."""

import headroom
import pytest
import torch
from headroom.planning import advice
from headroom.techniques.frozen import Frozen
from headroom.techniques.levels import Levels
from torch import nn

from helpers.hf_models import model_of

pytest.importorskip("transformers")
LORA, QLORA = "headroom.lora(model, rank=16)", "headroom.quantize(model), then headroom.lora"
NF4, INT8 = "headroom.quantize(model)", "headroom.quantize(model, 'int8')"


def llama():
    model = model_of("Llama", hidden_size=128, intermediate_size=256)
    ids = torch.randint(3, 61, (4, 32))
    return model, dict(input_ids=ids, labels=ids)


def with_adapters(of_peft):
    model, batch = llama()
    if of_peft:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=4, target_modules="all-linear")
        return peft.get_peft_model(model, config), batch
    headroom.lora(model, 4)
    return model, batch


def adam(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def advice_of(plan, kind):
    """Advice of one technique and to train adapters, by name: each takes a plan."""
    with pytest.MonkeyPatch.context() as patch:
        techniques = [one for one in advice.TECHNIQUES if isinstance(one, kind)]
        patch.setattr(advice, "TECHNIQUES", techniques)
        return {one.name: one for one in plan.advice()}


def advised(model, batch, optimizer):
    plan = headroom.plan(model, optimizer, batch)
    found = advice_of(plan, Frozen)
    assert {*found} <= {LORA, QLORA, NF4, INT8}
    assert all(one.bytes == plan.total_bytes - one.plan.total_bytes for one in found.values())
    return found


def peak(model, optimizer, batch):
    with headroom.memory.track(model, optimizer) as timeline:
        for _ in range(2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return timeline.peak_bytes


@pytest.mark.parametrize("name", [LORA, QLORA])
@pytest.mark.parametrize(
    "kind", ["SGD", *(pytest.param(x, marks=pytest.mark.slow) for x in ("AdamW", "AdamW8bit"))]
)
def test_adapters_in_place_of_all_weights_take_what_is_planned(kind, name):
    model, batch = llama()
    make = {
        "AdamW": lambda params: torch.optim.AdamW(params, lr=0.5, amsgrad=True),
        "AdamW8bit": headroom.optim.AdamW8bit,
        "SGD": lambda params: torch.optim.SGD(params, momentum=0.9),
    }[kind]
    before = {key: x.clone() for key, x in model.state_dict().items()}
    random = torch.get_rng_state()
    one = advised(model, batch, make(model.parameters()))[name]
    assert all(p.requires_grad for p in model.parameters())
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    assert one.time.startswith("another training") and one.bytes > 0
    made = {"model": model, "headroom": headroom, "torch": torch}
    exec(one.code, made)
    assert type(made["optimizer"]).__name__ == kind
    optimizer = make(made["trained"])
    assert abs(one.plan.total_bytes / peak(model, optimizer, batch) - 1) <= 0.001


@pytest.mark.slow
@pytest.mark.parametrize("of_peft", [False, True])
def test_frozen_weights_in_few_bits_take_what_is_planned(of_peft):
    for name in (NF4, INT8):
        model, batch = with_adapters(of_peft)
        found = advised(model, batch, adam(model))
        assert [*found] == [NF4, INT8]  # the most bytes first
        assert not any(isinstance(m, headroom.nn.Linear4bit) for m in model.modules())
        exec(found[name].code, {"model": model, "headroom": headroom})
        assert abs(found[name].plan.total_bytes / peak(model, adam(model), batch) - 1) <= 0.001
        assert not advised(model, batch, adam(model))


@pytest.mark.slow
def test_what_patching_saves_of_a_model_of_peft():
    model, batch = with_adapters(True)
    plan = headroom.plan(model, adam(model), batch)
    found = advice_of(plan, Levels)
    for code in ("headroom.patch(model)", "headroom.patch(model, save='L4')"):
        exec(found[code].code, {"model": model, "headroom": headroom})
        measured = peak(model, adam(model), batch)
        assert abs(found[code].plan.total_bytes / measured - 1) <= 0.001
        headroom.unpatch(model)
    assert plan.total_bytes - found["headroom.patch(model)"].plan.total_bytes > 0.1 * measured


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW, adam])
def test_an_optimizer_that_is_not_made_yet(optimizer):
    model, batch = llama()
    given = adam(model) if optimizer is adam else optimizer
    found = advised(model, batch, given)
    assert [*found] == [QLORA, LORA]
    assert ("optimizer = " in found[LORA].code) == (optimizer is not None)
    if optimizer is torch.optim.AdamW:
        assert "torch.optim.AdamW(trained)" in found[LORA].code
    model, batch = with_adapters(False)
    assert [*advised(model, batch, None)] == [NF4, INT8]
    held = torch.optim.AdamW(model.parameters())  # which might train them later
    assert not advised(model, batch, held)


@pytest.mark.slow
def test_where_nothing_of_it_is_advised():
    x, loss = torch.randn(4, 24), nn.functional.mse_loss
    for model in (nn.Linear(24, 24), nn.Sequential(nn.Conv1d(4, 4, 1), nn.Flatten(0))):
        plan = headroom.plan(model, None, (x, model(x).detach()), loss=loss)
        assert not advice_of(plan, Frozen)
    model, batch = llama()
    model.model.embed_tokens.weight.requires_grad_(False)
    assert not advised(model, batch, None)
    model, batch = llama()
    plan = headroom.plan(model, torch.optim.AdamW, batch, world_size=2)
    assert {LORA, QLORA, NF4, INT8}.isdisjoint(advice_of(plan, Frozen))
