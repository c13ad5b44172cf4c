"""What can be chosen for a model, from its optimizer, its batch and what is allowed; in which order
the search takes candidates."""

import functools

import headroom
import pytest
import torch
from headroom.fitting import Choice
from headroom.fitting.arguments import checked
from headroom.fitting.search.techniques import techniques_of
from headroom.step.description import Step
from torch import nn

from helpers.fitted_models import llama
from helpers.frozen import are_frozen

GIVEN, OURS = Choice(), Choice(optimizer="headroom")


def model_of(*layers):
    return nn.Sequential(nn.Linear(4, 4), *layers)


def techniques(
    optimizer=torch.optim.AdamW, allow=(), only=None, add_up=False, model=None, rows=6, **options
):
    model = model_of() if model is None else model
    step = Step(model, optimizer, (torch.ones(rows, 4), torch.ones(rows, 4)), len)
    return techniques_of(checked(step).but(**options), allow, only, add_up)


def pairs(found):
    return set(found.optimizers)


def test_every_choice_in_order():
    found = techniques()
    assert found.choices == tuple(
        choice
        for n in (1, 2, 6)
        for choice in (
            GIVEN.but(micro_batches=n),
            OURS.but(micro_batches=n),
            *[OURS.but(release=True)] * (n == 1),
        )
    )
    assert found.micro_batches == (1, 2, 6) and found.fused_losses == (False,)
    assert are_frozen(found) and found.notes == [] and found.allowed == () and found.only == {}
    assert found.parts_add_up is False and techniques(add_up=True).parts_add_up is True
    assert type(found.optimizer_of(OURS)) is headroom.optim.AdamW
    assert found.optimizer_of(GIVEN) is found.step.optimizer
    assert techniques(rows=7).micro_batches == (1, 7) and techniques(rows=1).micro_batches == (1,)


def test_optimizers_that_may_take_the_place_of_another():
    given, ours = ("given", "given"), ("headroom", "given")
    eight, factored = ("8bit", "given"), ("adafactor", "given")
    assert pairs(techniques()) == {given, ours}
    assert pairs(techniques(allow=("8bit", "adafactor"))) == {given, ours, eight, factored}
    half = techniques(allow=("bf16",))
    assert pairs(half) == {given, ours, ("headroom", "bf16")} and half.notes == []
    assert half.optimizers["headroom", "bf16"].defaults["master"] == "remainder16"
    assert half.optimizers[ours].defaults.get("master") is None
    both = techniques(allow=("8bit", "bf16"))
    assert pairs(both) == {given, ours, eight, ("headroom", "bf16"), ("8bit", "bf16")}
    # Those of Headroom stay, but for the bits of their states.
    mine = techniques(headroom.optim.AdamW, ("8bit", "bf16"))
    assert pairs(mine) == {given, eight, ("headroom", "bf16"), ("8bit", "bf16")}
    assert GIVEN.but(release=True) in mine.choices
    assert pairs(techniques(headroom.optim.AdamW8bit, ("8bit", "bf16"))) == {
        given,
        ("8bit", "bf16"),
    }
    sgd = techniques(torch.optim.SGD)
    assert pairs(sgd) == {given} and sgd.notes[0].startswith(
        "the optimizer stays as it is: SGD without momentum has no state"
    )
    momentum = functools.partial(torch.optim.SGD, momentum=0.9)
    assert pairs(techniques(momentum, ("8bit", "adafactor"))) == {given, ours, eight}
    found = techniques(momentum, ("8bit", "bf16"))
    assert pairs(found) == {given, ours, eight, ("headroom", "bf16"), ("8bit", "bf16")}
    assert type(found.optimizers["8bit", "bf16"]) is headroom.optim.SGD8bit
    assert pairs(techniques(headroom.optim.Lion, ("8bit",))) == {given, eight}
    assert pairs(techniques(headroom.optim.Lion8bit, ("8bit", "adafactor"))) == {given}
    assert techniques(headroom.optim.Adafactor).notes == []
    assert len(techniques(headroom.optim.Adafactor, ("8bit",)).notes) == 1


def test_weights_in_16_bits_that_cannot_be():
    def note(**options):
        found = techniques(allow=("bf16",), **options)
        assert not any(weights == "bf16" for _, weights in found.optimizers)
        return tuple(found.notes)

    assert note(model=model_of().bfloat16()) == (
        "bf16: not all parameters of the optimizer are float32",
    )
    double = note(model=model_of().double())
    assert double[1].startswith("headroom: AdamW takes parameters in float32")
    assert note(amp=torch.float16) == ("bf16: not with float16 or a scaler of losses",)
    assert note(scaler=torch.amp.GradScaler("cpu")) == note(amp=torch.float16)
    assert techniques(allow=("bf16",), amp=torch.bfloat16).notes == []
    model = model_of(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model[0].parameters())
    found = techniques(optimizer, ("bf16",), model=model)
    assert len(found.notes) == 1 and found.notes[0].startswith(
        "bf16: the weights that the optimizer"
    )
    narrow = model_of(nn.Linear(4, 4).half())
    optimizer = torch.optim.AdamW(narrow[0].parameters())
    assert techniques(optimizer, ("bf16",), model=narrow).notes == []


def test_gradients_are_released_only_where_a_step_is_its_optimizers_alone():
    def releases(optimizer=headroom.optim.AdamW, **options):
        return any(choice.release for choice in techniques(optimizer, **options).choices)

    assert releases() and releases(torch.optim.AdamW) and not releases(torch.optim.SGD)
    assert not releases(max_grad_norm=1.0) and not releases(scaler=torch.amp.GradScaler("cpu"))
    assert not releases(lambda params: headroom.optim.AdamW(params, max_grad_norm=1.0))
    model = model_of(nn.Linear(4, 4))
    optimizer = headroom.optim.AdamW(model[0].parameters())
    assert not releases(optimizer, model=model)
    model[1].requires_grad_(False)
    assert releases(optimizer, model=model)
    assert {c.micro_batches for c in techniques().choices if c.release} == {1}


def test_a_batch_norm_is_not_parted():
    model = model_of(nn.BatchNorm1d(4))
    found = techniques(model=model)
    assert found.micro_batches == (1,) and found.notes[0].startswith(
        "micro-batches: not with a Bat"
    )
    looped = techniques(model=model, add_up=True, only={"micro_batches": (2,)})
    assert looped.micro_batches == (2,)  # which the loop makes anyway
    model[1].eval()
    assert techniques(model=model).micro_batches == (1, 2, 6)


def test_losses_of_language_models():
    pytest.importorskip("transformers")
    model, ids = llama(), torch.zeros(4, 3, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}

    def losses(loss=None):
        return techniques_of(checked(Step(model, None, batch, loss))).fused_losses

    assert losses() == (False, True) and losses(len) == (False,)
    headroom.patch(model, loss=True)
    assert losses() == losses(len) == (True,)


def test_what_a_loop_takes():
    found = techniques(allow=("8bit",), only={"micro_batches": (6, 2, 4), "optimizer": ("8bit",)})
    assert [(c.micro_batches, c.optimizer) for c in found.choices] == [(2, "8bit"), (6, "8bit")]
    assert pairs(found) == {("8bit", "given")}
    released = techniques(only={"release": (True,)})
    assert released.choices == (OURS.but(release=True),)
    assert all(not c.release for c in techniques(only={"release": (False,)}).choices)
    for only, words in (
        ({"optimizer": ("8bit",)}, 'wanted one of given, headroom for optimizer; "8bit" is not in'),
        ({"micro_batches": (4,)}, "wanted one of 1, 2, 6 for micro_batches"),
        ({"fused_loss": (True,)}, r"only has fused_loss=\(True,\), wanted one of False for"),
        ({"micro_batches": (2,), "release": (True,)}, "one of False for release: gradients can be"),
    ):
        with pytest.raises(ValueError, match=words):
            techniques(only=only)


def test_a_choice_that_cannot_be_is_named():
    found = techniques(torch.optim.SGD, ("8bit",))
    assert found.obstacle(GIVEN) is None and found.obstacle(GIVEN.but(levels=("L9",))) is None
    assert found.obstacle(OURS).startswith("has optimizer='headroom', wanted one of given; the opt")
    assert found.obstacle(GIVEN.but(micro_batches=3)).startswith(
        "has micro_batches=3, wanted one of 1, 2, 6"
    )
    ours = techniques()
    assert ours.obstacle(GIVEN.but(release=True)) == "has release=True, wanted one of False"
    assert ours.obstacle(OURS.but(release=True, micro_batches=2)) == (
        "has release=True, wanted one of False"
    )
    assert ours.obstacle(OURS.but(release=True)) is None


def test_whole_batches():
    found = techniques().whole_batches("so it is")
    assert found.micro_batches == (1,) and found.notes == ["micro-batches: so it is"]
    with pytest.raises(ValueError, match="wanted one of 1 for micro_batches; micro-batches: so"):
        techniques(only={"micro_batches": (2, 6)}).whole_batches("so it is")
