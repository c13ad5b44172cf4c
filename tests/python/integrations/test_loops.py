"""What loops of other libraries tell, refuse and leave to choose, without a training."""

import json
from collections import deque
from types import SimpleNamespace

import headroom
import pytest
import torch
from headroom.fitting import Choice
from headroom.integrations import loops
from headroom.integrations.first_steps import ToldSteps
from headroom.integrations.values import ValuesRead, line_of
from headroom.step.description import Step
from torch import nn

transformers = pytest.importorskip("transformers")

from headroom.integrations import trainer_choice, trainer_loss, trainer_step  # noqa: E402
from headroom.integrations.transformers import HeadroomCallback  # noqa: E402


def told(peak, seconds, *, extra=24, batches=2.0, predicted=(1000, 0.25)):
    """What is told of measured steps."""
    found = []
    fitted = SimpleNamespace(predicted_peak=predicted[0], predicted_seconds=predicted[1])
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    steps = ToldSteps(model, optimizer, torch.device("cpu"), fitted, extra, batches, found.append)
    steps.peak, steps._times = peak, [] if seconds is None else [seconds]
    steps.end()
    steps.end()
    return found


def test_what_is_told_of_the_first_steps():
    peak, step = "measured peak 2.00 KiB, predicted 1.00 KiB", "measured step 750.0 ms"
    predicted = f"{step}, predicted 500.0 ms"
    assert told(2048, 0.75) == [f"headroom.fit: {peak}; {predicted}"]
    assert told(2048, None) == [f"headroom.fit: {peak}"]
    assert told(None, 0.75) == [f"headroom.fit: {predicted}"]
    assert told(None, 0.75, predicted=(None, None)) == [f"headroom.fit: {step}"]
    assert told(None, None) == []
    assert told(9, None, predicted=(None, None)) == [
        "headroom.fit: measured peak 9 B, predicted 24 B"
    ]


def test_what_a_loop_holds(monkeypatch):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5, bias=False))
    model[0].weight.requires_grad_(False)
    batch = {"x": torch.ones(7, dtype=torch.float64), "n": 3}
    assert loops.extra_bytes(model) == 4096
    assert loops.extra_bytes(model, batch, [batch, torch.ones(2)]) == 4096 + 56 + 56 + 8
    monkeypatch.setattr(loops, "world_size", lambda: 2)
    assert loops.extra_bytes(model, batch) == 4096 + 56 + 4 * (4 + 20)  # and buckets of DDP
    assert [loops.batches_planned(n) for n in (1, 2, 3, 9)] == [1, 2, 2, 2]


def test_precisions():
    scaler = object()
    for name, dtype in {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}.items():
        accelerator = SimpleNamespace(mixed_precision=name, scaler=scaler)
        found = loops.mixed_precision(accelerator, who="a test")
        assert found == {"amp": dtype, "scaler": scaler}
    accelerator.mixed_precision = "fp8"
    wanted = "a test: mixed precision is 'fp8', which cannot be planned; wanted one of no, bf16, f"
    with pytest.raises(ValueError, match=wanted):
        loops.mixed_precision(accelerator, who="a test")


def test_a_budget_is_less_what_the_loop_holds(monkeypatch):
    asked = []
    monkeypatch.setattr(loops, "fit_step", lambda step, **how: asked.append(how))
    how = {"extra": 100, "who": "a test", "only": {"release": (False,)}, "allow": ("8bit",)}
    loops.fit_in_loop("a step", budget=None, **how)
    loops.fit_in_loop("a step", budget="1 KiB", **how)
    same = {"only": {"release": (False,)}, "allow": ("8bit",), "parts_add_up": True}
    assert asked == [same | {"target": "speed"}, same | {"budget": 924}]
    for budget in (100, 99):
        with pytest.raises(ValueError) as raised:
            loops.fit_in_loop("a step", budget=budget, **how)
        assert str(raised.value) == (
            f"a test: budget is {budget} B, and the loop itself holds 100 B; give a larger one"
        )


@pytest.mark.parametrize("samples, steps, asked", [(6, 2, True), (3, 3, False), (2, 1, True)])
def test_parts_are_compared_where_there_are_some(samples, steps, asked, monkeypatch):
    """Batches of a step are one here; one of one sample has no parts."""
    monkeypatch.setattr(loops, "rule_of", lambda step, rules: None)
    step = Step(nn.Linear(2, 2), None, torch.ones(samples, 2), None, None, torch.device("cpu"))
    found = loops.rule_of_parts(step, ("mean", "sum"), steps)
    assert found == (None if asked else "mean")


def test_the_choice_of_a_run_that_is_resumed():
    kept = Choice(optimizer="8bit", weights="given").to_json()
    assert loops.optimizer_of_choice(kept) == {"optimizer": ("8bit",), "weights": ("given",)}
    assert loops.with_kept((), None) == ()
    assert loops.with_kept(("bf16",), kept) == ("bf16", "8bit")
    assert loops.with_kept(("8bit",), kept) == ("8bit",)
    few = Choice(frozen="nf4").to_json()
    assert loops.with_kept(("8bit",), few) == ("8bit", "nf4")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
    assert loops.weights_of_choice(kept, model) == {"frozen": ("given",)}
    assert loops.weights_of_choice(few, model) == {"frozen": ("nf4",)}
    headroom.quantize(model)  # whoever resumes has done it
    assert loops.weights_of_choice(few, model) == {"frozen": ("given",)}
    assert loops.FitsLoop(allow="8bit").allow == ("8bit",)
    loop = loops.FitsLoop(tell=(texts := []).append)
    loop.tell("not the first rank")
    loop._says = True
    loop.tell("the first")
    assert texts == ["the first"]


def test_lines_that_read_values_are_named():
    values = ValuesRead()
    assert values.note() == []
    values.lines += ["a.py:1", "b.py:2", "c.py:3"]
    text = "values that the loop reads are planned as 1, and masks as True, as for metrics: "
    assert values.note() == [text + "a.py:1, b.py:2, c.py:3"]
    values.lines += ["d.py:4", "e.py:5"]
    assert values.note() == [text + "a.py:1, b.py:2, c.py:3 and 2 more lines"]
    assert line_of(None) is None and line_of(ValueError()) is None
    with pytest.raises(RuntimeError) as raised:
        torch.ones(2) @ torch.ones(3)
    assert line_of(raised.value).startswith("test_loops.py:")


# ---- The Trainer of transformers ---------------------------------------------------------------


def trainer(**changes):
    """As much of a Trainer as is looked at."""
    args = SimpleNamespace(
        n_gpu=0, auto_find_batch_size=False, use_liger_kernel=False, world_size=1,
        per_device_train_batch_size=12, train_batch_size=0, gradient_accumulation_steps=3,
        dataloader_drop_last=False, activation_checkpointing=True, gradient_checkpointing=True,
        output_dir="nowhere",
    )  # fmt: skip
    made = transformers.Trainer.__new__(transformers.Trainer)
    vars(made).update(
        args=args, model_init=None, is_deepspeed_enabled=False, is_fsdp_enabled=False,
        is_fsdp_xla_enabled=False, optimizer=None, lr_scheduler=None, model=nn.Linear(2, 2),
        accelerator=SimpleNamespace(split_batches=False), train_dataset=list(range(50)),
        compute_loss_func=None, model_accepts_loss_kwargs=True, label_smoother=None,
    )  # fmt: skip
    for name, value in changes.items():
        vars(args if name in vars(args) else made)[name] = value
    return made


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_init": nn.Linear}, "has a model_init, which makes another model in train(); give"),
        ({"n_gpu": 2}, "uses nn.DataParallel; start one process per GPU, or let one GPU be"),
        ({"is_deepspeed_enabled": True}, "shards the model, by DeepSpeed or FSDP"),
        ({"is_fsdp_enabled": True}, "shards the model, by DeepSpeed or FSDP"),
        ({"is_fsdp_xla_enabled": True}, "shards the model, by DeepSpeed or FSDP"),
        ({"auto_find_batch_size": True}, "has auto_find_batch_size=True, which changes the batch"),
        ({"use_liger_kernel": True}, "has use_liger_kernel=True, which changes the model later"),
    ],
)
def test_trainers_that_cannot_be_planned(change, message):
    trainer_choice.check(trainer(n_gpu=1), who="a test")
    with pytest.raises(ValueError) as raised:
        trainer_choice.check(trainer(**change), who="a test")
    assert str(raised.value).startswith(f"a test: the Trainer {message}")


def test_what_a_trainer_may_choose():
    def found(made, kept=None, late=False, adds_up=True):
        return trainer_choice.possible(made, kept, late=late, adds_up=adds_up, who="a test")

    whole = {"release": (False,), "micro_batches": (2,)}
    given = {"optimizer": ("given",), "weights": ("given",)}
    assert found(trainer()) == whole | {"micro_batches": (2, 4, 6, 8, 12, 24)}
    assert found(trainer(gradient_accumulation_steps=1))["micro_batches"] == (1, 2, 3, 4, 6, 12)
    assert found(trainer(), adds_up=False) == whole
    assert found(trainer(), late=True) == whole | given
    scheduled = trainer(optimizer=object(), lr_scheduler=object())
    assert found(scheduled, adds_up=False) == whole | given
    assert found(trainer(optimizer=object()), adds_up=False) == whole
    kept = Choice(micro_batches=6, optimizer="8bit", weights="given", fused_loss=True).to_json()
    assert found(trainer(), kept) == {
        "release": (False,), "micro_batches": (6,), "fused_loss": (True,), "weights": ("given",),
        "optimizer": ("8bit",), "frozen": ("given",),
    }  # fmt: skip
    kept["micro_batches"] = 5  # of another accumulation
    assert found(trainer(), kept)["micro_batches"] == (2, 4, 6, 8, 12, 24)
    own = trainer(compute_loss_func=lambda *_: 0)
    assert found(own, kept)["fused_loss"] == (False,)


@pytest.mark.parametrize(
    "changes, cuts",
    [
        ({}, [1, 2, 3, 4, 6, 12]),
        ({"world_size": 2}, [1, 2, 3, 4, 6, 12]),
        ({"dataloader_drop_last": True}, [1, 2, 3, 4]),  # 48 of 50 samples are taken
        ({"dataloader_drop_last": True, "world_size": 3}, [1, 2]),  # 12 of 16 on each rank
        ({"dataloader_drop_last": True, "train_dataset": iter(())}, [1, 2, 3, 4, 6, 12]),
        ({"per_device_train_batch_size": 1}, [1]),
        ({"accelerator": SimpleNamespace(split_batches=True), "world_size": 4}, [1, 3]),
        ({"accelerator": SimpleNamespace(split_batches=True), "world_size": 5}, [1]),
    ],
)
def test_parts_that_leave_the_samples_of_a_step(changes, cuts):
    assert trainer_choice.cuts_of(trainer(**changes), who="a test") == cuts


@pytest.mark.parametrize("follows", [True, False])
def test_a_loader_of_the_users_own_has_to_follow(follows, monkeypatch):
    made = trainer(per_device_train_batch_size=6, _train_batch_size=7)
    made.get_train_dataloader = None  # set on the Trainer itself

    def batch(one, *, who):
        size = one.args.per_device_train_batch_size
        assert size == one._train_batch_size and who == "a test"
        return {"x": torch.ones(size if follows else 6, 2)}

    monkeypatch.setattr(trainer_choice, "batch_of_loader", batch)
    assert trainer_choice.cuts_of(made, who="a test") == ([1, 2, 3, 6] if follows else [1])
    assert (made.args.per_device_train_batch_size, made._train_batch_size) == (6, 7)
    monkeypatch.setattr(trainer_choice, "batch_of_loader", lambda *_, **__: [1, 2])
    assert trainer_choice.cuts_of(made, who="a test") == [1]


def test_how_a_choice_is_applied():
    made = trainer()
    optimizer = object()
    fitted = SimpleNamespace(optimizer=optimizer, choice=Choice(micro_batches=8))
    trainer_choice.apply(made, fitted, late=True)
    args = made.args
    assert not args.activation_checkpointing and not args.gradient_checkpointing
    assert args.per_device_train_batch_size == 12 and made.optimizer is None
    args.train_batch_size = 3
    trainer_choice.apply(made, fitted, late=False)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (3, 12)
    assert made._train_batch_size == 3 and made.optimizer is None
    for choice in (Choice(micro_batches=2, optimizer="8bit"), Choice(micro_batches=2, weights="k")):
        other = trainer()
        fitted.choice = choice
        trainer_choice.apply(other, fitted, late=False)
        assert other.optimizer is optimizer and other.args.per_device_train_batch_size == 12


def test_the_choice_that_a_checkpoint_keeps(tmp_path):
    def found(state, resume=str(tmp_path / "checkpoint-4"), made=None):
        folder = tmp_path / "checkpoint-4"
        folder.mkdir(exist_ok=True)
        (folder / "trainer_state.json").write_text(json.dumps(state))
        made = trainer(output_dir=str(tmp_path))
        return trainer_choice.choice_of_checkpoint(made, resume)

    callback = HeadroomCallback("6 GiB", ("8bit",))
    callback.choice = {"micro_batches": 2}
    kept = {"stateful_callbacks": {"HeadroomCallback": callback.state()}}
    assert kept["stateful_callbacks"]["HeadroomCallback"]["args"]["allow"] == ["8bit"]
    assert found(kept) == found(kept, True) == ({"micro_batches": 2}, ("6 GiB", None))
    assert found(kept, None) is None and found(kept, str(tmp_path / "other")) is None
    for nothing in ({}, {"stateful_callbacks": None}, {"stateful_callbacks": {}}):
        assert found(nothing) is None
    several = [{}, HeadroomCallback("1 GiB").state(), callback.state()]
    assert found({"stateful_callbacks": {"HeadroomCallback": several}})[1] == ("6 GiB", None)


def test_the_rule_and_the_items_of_a_step():
    labels = torch.tensor([[1, -100, 3], [-100, -100, 5]])
    inputs = {"labels": labels, "x": torch.ones(2)}
    found, items = trainer_step.step_of(trainer(), inputs)
    assert found is inputs and items == 3
    plain = trainer(model_accepts_loss_kwargs=False)
    assert trainer_step.step_of(plain, inputs)[1] is None
    own = trainer(model_accepts_loss_kwargs=False, compute_loss_func=print)
    assert trainer_step.step_of(own, inputs)[1] == 3
    assert trainer_step.step_of(trainer(), {"x": 1})[1] is None
    rule = trainer_step.rule_of_trainer
    assert rule(trainer(), (inputs, items)) == trainer_step.SUM != trainer_step.SAMPLES
    assert rule(trainer(), (inputs, None)) == rule(plain, (inputs, items)) == trainer_step.SAMPLES
    assert rule(own, (inputs, None)) == trainer_step.SUM
    for scaled, wanted in ((True, trainer_step.SUM), (False, trainer_step.SAMPLES)):
        assert rule(trainer(loss_is_scaled_for_ga=scaled), (inputs, items)) == wanted


def test_losses_that_can_be_fused():
    class Own(transformers.Trainer):
        def compute_loss(self, *_, **__):
            return 0

    assert trainer_step.loss_can_be_fused(trainer())
    assert not trainer_step.loss_can_be_fused(trainer(compute_loss_func=print))
    assert not trainer_step.loss_can_be_fused(trainer(compute_loss=print))
    assert not trainer_step.loss_can_be_fused(Own.__new__(Own))
    with pytest.raises(ValueError, match="the loss of Linear is its own; call headroom.patch"):
        trainer_loss.fuse_loss(trainer())


@pytest.mark.parametrize("chosen, smooths", [(True, True), (True, False), (False, True)])
def test_a_smoothed_loss_is_fused_where_that_was_chosen(chosen, smooths, monkeypatch):
    fused = []
    monkeypatch.setattr(trainer_choice, "fuse_loss", fused.append)
    args = SimpleNamespace(
        gradient_accumulation_steps=1, per_device_train_batch_size=6, train_batch_size=3
    )
    made = SimpleNamespace(args=args, label_smoother=object() if smooths else None)
    choice = Choice(micro_batches=2, optimizer="given", weights="given", fused_loss=chosen)
    trainer_choice.apply(made, SimpleNamespace(choice=choice), late=False)
    assert (args.gradient_accumulation_steps, args.per_device_train_batch_size) == (2, 3)
    assert fused == ([made] if chosen and smooths else [])


def test_smoothing_is_left_to_the_model():
    seen = []
    made = trainer(label_smoother=SimpleNamespace(epsilon=0.25))

    def own(model, inputs, *args, **kwargs):
        seen.append((made.label_smoother, inputs, args, kwargs))
        return 7

    labelled = {"x": 1, "labels": 2}
    loss = trainer_loss.smoothed_loss(made, own, "model", labelled, True, more=3)
    assert loss == 7 and made.label_smoother.epsilon == 0.25
    assert seen == [(None, labelled | {"label_smoothing": 0.25}, (True,), {"more": 3})]
    seen.clear()
    trainer_loss.smoothed_loss(made, own, "model", {"x": 1})
    made.label_smoother = None
    trainer_loss.smoothed_loss(made, own, "model", labelled)
    assert [inputs for _, inputs, *_ in seen] == [{"x": 1}, labelled]


@pytest.mark.parametrize(
    "value, plain",
    [
        (3, True), (None, True), ("a", True), ([1, (2.0, {"a": deque([1])})], True),
        ({"a": object()}, False), ([torch.ones(1)], False), ({object(): 1}, False), ({1}, True),
    ],
)  # fmt: skip
def test_plain_values(value, plain):
    assert trainer_step._is_plain(value) is plain


def test_checkpointing_is_off_until_an_error():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].gradient_checkpointing = True
    with trainer_step.without_checkpointing(model):
        assert model[1].gradient_checkpointing is False
    assert model[1].gradient_checkpointing is False
    model[1].gradient_checkpointing = True
    with pytest.raises(KeyError), trainer_step.without_checkpointing(model):
        raise KeyError
    assert model[1].gradient_checkpointing is True
    assert not hasattr(model[0], "gradient_checkpointing")


def test_the_optimizer_of_a_trainer_is_borrowed():
    made, inner = trainer(optimizer="before"), object()
    made.create_optimizer = lambda: setattr(made, "optimizer", SimpleNamespace(optimizer=inner))
    with trainer_step.optimizer_of(made) as found:
        assert found is inner
    assert made.optimizer == "before"


def test_errors_of_planning_name_the_line_and_what_helps(monkeypatch):
    def fails(step, **how):
        try:
            torch.ones(2) @ torch.ones(3)
        except RuntimeError as error:
            raise headroom.planning.PlanError("it failed") from error

    monkeypatch.setattr(loops, "fit_step", fails)
    with pytest.raises(headroom.planning.PlanError) as raised:
        loops.fit_in_loop("a step", budget=None, extra=0, who="Name", only={})
    text = str(raised.value)
    assert text.startswith("Name: it failed. This is at test_loops.py:")
    assert "Without Name, headroom.patch(model, 'L5') and smaller batches save memory" in text
    plain = headroom.planning.PlanError("without a cause")

    def raises(step, **how):
        raise plain

    monkeypatch.setattr(loops, "fit_step", raises)
    with pytest.raises(headroom.planning.PlanError) as raised:
        loops.fit_in_loop("a step", budget=None, extra=0, who="Name", only={})
    assert raised.value is plain
