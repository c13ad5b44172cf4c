"""The Trainer of transformers within a budget of memory."""

import copy
import importlib
import json
import re
import sys
from types import SimpleNamespace

import headroom
import pytest
import torch
from headroom.fitting import DoesNotFit
from headroom.fitting.search import candidates

from helpers.bits import assert_same_bits
from helpers.fitting import Peak, samples, stack
from helpers.hf_models import model_of

transformers = pytest.importorskip("transformers")

from headroom.integrations.trainer_choice import choice_of_checkpoint  # noqa: E402
from headroom.integrations.trainer_step import step_of  # noqa: E402
from headroom.integrations.transformers import HeadroomCallback, fit_trainer  # noqa: E402

from helpers.trainers import forced, losses_of, rates_of, trained, trainer_of  # noqa: E402


class Watch(transformers.TrainerCallback):
    """Measures by itself. Added before the other callback, which then leaves the profiler alone."""

    def __init__(self):
        self.peak = Peak()

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **given):
        self.peak.begin(model, optimizer.optimizer)

    def on_step_end(self, *args, **given):
        self.peak.step_ended()


def ceiling(model, data, folder, **options):
    """The peak that is predicted for the model as it is."""
    callback = HeadroomCallback("1 GiB", tell=lambda text: None)
    callback.fit(trainer_of(model, data, folder, **options))
    return callback.fitted.before_peak


SGD = dict(optim="sgd", per_device_train_batch_size=1)  # only levels can be changed


def test_levels_leave_the_bits_the_order_and_the_random_numbers(tmp_path):
    want = trained(stack(), samples(), tmp_path, **SGD)
    most = ceiling(stack(), samples(), tmp_path, **SGD)
    told, watch = [], Watch()
    callback = HeadroomCallback(int(0.85 * most), tell=told.append)
    got = trained(stack(), samples(), tmp_path, [watch, callback], **SGD)
    choice = callback.fitted.choice
    assert "L5" in choice.levels and choice.micro_batches == 1 and choice.optimizer == "given"
    assert losses_of(got) == losses_of(want)
    assert_same_bits(got.model.parameters(), want.model.parameters())
    assert watch.peak.bytes <= callback.budget < most
    assert "L5" in told[0]


def test_the_first_pass_is_that_of_the_largest_batch(tmp_path):
    class Seen(HeadroomCallback):
        def on_train_begin(self, *args, model=None, **given):
            model.register_forward_pre_hook(
                lambda module, args, named: rows.append(named["x"].shape[1]), with_kwargs=True
            )
            super().on_train_begin(*args, model=model, **given)

    class Long(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.drop = torch.nn.Linear(1, 16), torch.nn.Dropout(0.5)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return {"loss": self.drop(self.inner(x[..., None])).square().mean()}

    lengths, rows = [4, 9, 5, 30, 8, 6, 7, 11, 12], []
    data = [{"x": torch.full((length,), 0.1 * length)} for length in lengths]
    options = dict(per_device_train_batch_size=1, train_sampling_strategy="sequential", max_steps=5)
    torch.manual_seed(0)
    model = Long()
    want = trained(copy.deepcopy(model), data, tmp_path, **options)
    got = trained(model, data, tmp_path, [Seen("1 GiB", tell=lambda text: None)], **options)
    assert rows == [30, *lengths[:5]]
    assert losses_of(got) == pytest.approx(losses_of(want), rel=1e-5) and model.calls == 5
    for mine, others in zip(got.model.parameters(), want.model.parameters()):
        torch.testing.assert_close(mine, others)


def test_the_first_pass_of_a_batch_that_was_given_is_no_larger_than_those_of_steps(tmp_path):
    """It is as the loader yielded it before micro-batches were chosen."""
    data, rows = samples(16), []
    callback = forced(2)
    callback.sample_batch = {name: torch.stack([one[name] for one in data[:4]]) for name in data[0]}
    begin = callback.on_train_begin

    def watched(*args, model=None, **given):
        model.eval()  # as an evaluation before training leaves it
        model.register_forward_pre_hook(
            lambda module, args, named: rows.append((len(named["x"]), module.training)),
            with_kwargs=True,
        )
        begin(*args, model=model, **given)

    callback.on_train_begin = watched
    trained(stack(dropout=0.0), data, tmp_path, [callback], optim="sgd", max_steps=1)
    assert callback.fitted.choice.micro_batches == 2
    assert rows == [(2, True)] * 3


class Packed(torch.nn.Module):
    """Takes rows of packed sequences, and notes how many tokens each has."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64)
        self.rows = []

    def forward(self, input_ids, labels, position_ids, num_items_in_batch=None, **others):
        self.rows.append(input_ids.shape[1])
        output = self.head(self.embed(input_ids) + position_ids[..., None]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(output, labels.flatten(), reduction="sum")
        return {"loss": loss / (labels != -100).sum().clamp(min=1)
                if num_items_in_batch is None else loss / num_items_in_batch}  # fmt: skip


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_packed_rows_are_planned_as_the_loader_makes_them(tmp_path, is_given, steps):
    """Of fewer samples, not of as many tokens, and from other batches than the largest."""
    lengths = [5, 5, 20, 20, 3, 3, 3, 43, 4, 4, 4, 4]
    data = [{"input_ids": [*range(1, 1 + length)]} for length in lengths]
    collator, callback = transformers.DataCollatorWithFlattening(), forced(2)
    if is_given:
        callback.sample_batch = collator(data[:4])
    trainer = trained(
        Packed(), data, tmp_path, [callback], data_collator=collator, optim="sgd", max_steps=1,
        train_sampling_strategy="sequential", gradient_accumulation_steps=steps,
    )  # fmt: skip
    assert callback.fitted.choice.micro_batches == 2 * min(steps, 2)
    rows = trainer.model.rows[-1 - 2 * steps :]
    assert rows == [40 if is_given else 46, *[10, 40, 6, 46, 8, 8][: 2 * steps]]
    planned = callback.fitted.plan.timeline.most_by_kind["batch"]
    assert planned == 8 * (3 * rows[0] + 1)  # with the labels in a step


def test_labels_are_counted_as_the_trainer_does(tmp_path):
    ids = torch.arange(1, 13).view(2, 6)
    for batch in ({"labels": ids}, {"labels": ids, "shift_labels": ids.roll(-1)}):
        trainer = trainer_of(model_of("GPT2"), [batch], tmp_path)
        assert step_of(trainer, batch)[1] == trainer._get_num_items_in_batch([batch], "cpu")


@pytest.mark.slow
def test_micro_batches_have_the_same_samples(tmp_path):
    data = samples(24)
    options = dict(gradient_accumulation_steps=3, max_steps=3, per_device_train_batch_size=4)
    want = trained(stack(dropout=0.0), data, tmp_path, **options)
    most = ceiling(stack(), data, tmp_path, **options)
    told, watch = [], Watch()
    callback = HeadroomCallback(int(0.6 * most), tell=told.append)
    got = trained(stack(dropout=0.0), data, tmp_path, [watch, callback], **options)
    args = got.args
    assert args.gradient_accumulation_steps == 3 * callback.fitted.choice.micro_batches // 2
    assert args.gradient_accumulation_steps > 3
    assert args.gradient_accumulation_steps * args.per_device_train_batch_size == 12
    assert got.state.global_step == want.state.global_step == 3
    assert got.state.epoch == pytest.approx(want.state.epoch)
    assert losses_of(got) == pytest.approx(losses_of(want), rel=1e-3)
    assert rates_of(got) == rates_of(want)
    assert watch.peak.bytes <= callback.budget


def test_what_was_measured_is_told(tmp_path):
    told = []
    callback = HeadroomCallback("1 GiB", tell=told.append)
    trained(stack(), samples(), tmp_path, [callback], **SGD)
    measured = callback.measured
    assert re.search(r"measured peak .* predicted .*; measured step .* ms, predicted", told[-1])
    assert 0.95 * callback.fitted.predicted_peak <= measured.peak
    assert measured.peak <= callback.fitted.predicted_peak + callback.extra
    assert measured.seconds > 0 and len(told) == 2


@pytest.mark.slow
@pytest.mark.parametrize("by", ["callback", "call"])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(by, tmp_path, monkeypatch):
    """With 8-bit moments, which it takes because the run that it resumes did, and measures nothing;
    within another budget it looks for other levels."""
    options = dict(save_strategy="steps", save_steps=2, max_steps=4, max_grad_norm=0.0)
    options["per_device_train_batch_size"] = 1
    data = samples()
    with pytest.raises(headroom.fitting.DoesNotFit) as least:
        fit_trainer(trainer_of(stack(), data, tmp_path, **options), "200 KiB")

    def run(resume=None, share=0.9):
        budget, told = int(share * least.value.least), []
        given = dict(budget=budget, allow=("8bit",), tell=told.append)
        if by == "callback":
            callback = HeadroomCallback(**given)
            trainer = trainer_of(stack(), data, tmp_path, [callback], **options)
        else:
            trainer = trainer_of(stack(), data, tmp_path, **options)
            callback = fit_trainer(trainer, resume_from_checkpoint=resume, **given)
        trainer.train(resume_from_checkpoint=resume)
        assert "measured peak" in told[-1]
        return trainer, callback.fitted

    whole, fitted = run()
    choice = fitted.choice
    assert choice.optimizer == "8bit" and type(whole.optimizer.optimizer).__name__ == "AdamW8bit"
    with monkeypatch.context() as patched:
        patched.setattr(candidates, "measure_blocks", None)
        resumed, again = run(str(tmp_path / "checkpoint-2"))
    assert again.choice == choice and again.is_given
    _, other = run(str(tmp_path / "checkpoint-2"), share=2.0)
    assert other.choice.optimizer == "8bit" and not other.is_given
    assert resumed.state.global_step == 4
    assert_same_bits(resumed.model.parameters(), whole.model.parameters())
    assert rates_of(resumed) == rates_of(whole)


def language_rows():
    generator = torch.Generator().manual_seed(2)
    rows = []
    for k in range(8):
        ids = torch.randint(3, 997, (61,), generator=generator)
        rows.append({"input_ids": ids, "labels": ids.clone().index_fill_(0, torch.arange(k), -100)})
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_language_model_without_logits_and_without_their_checkpoints(smoothing, tmp_path):
    options = dict(
        optim="sgd",
        max_steps=3,
        per_device_train_batch_size=1,  # so that micro-batches cannot help
        label_smoothing_factor=smoothing,
        learning_rate=0.05,
    )
    model = model_of("Llama", vocab_size=997)
    want = trained(copy.deepcopy(model), language_rows(), tmp_path, **options)
    logits = 61 * 997 * 4
    budget = int(0.9 * 2**20)
    assert budget < 2 * sum(p.nbytes for p in model.parameters()) + 3 * logits
    watch, callback = Watch(), HeadroomCallback(budget, tell=lambda text: None)
    got = trained(
        model,
        language_rows(),
        tmp_path,
        [watch, callback],
        gradient_checkpointing=True,
        **options,
    )
    assert callback.fitted.choice.fused_loss
    assert not model.is_activation_checkpointing and not got.args.activation_checkpointing
    assert losses_of(got) == pytest.approx(losses_of(want), rel=1e-3)
    assert watch.peak.bytes <= callback.budget


class TestRefused:
    def test_trainers_that_cannot_be_planned(self, tmp_path):
        trainer = trainer_of(stack(), samples(), tmp_path)
        trainer.model_init = stack
        with pytest.raises(ValueError, match="HeadroomCallback: the Trainer has a model_init"):
            fit_trainer(trainer, "1 GiB")
        trainer = trainer_of(stack(), samples(), tmp_path, auto_find_batch_size=True)
        with pytest.raises(ValueError, match="has auto_find_batch_size=True"):
            fit_trainer(trainer, "1 GiB")
        trainer = trainer_of(stack(), samples(), tmp_path)
        with pytest.raises(ValueError, match="budget is 1.00 KiB, and the loop itself holds"):
            fit_trainer(trainer, "1 KiB")

    def test_a_budget_that_is_too_small_changes_nothing(self, tmp_path):
        model = stack()
        model.layers[1].gradient_checkpointing = True  # as models of transformers have it
        trainer = trainer_of(model, samples(), tmp_path, **SGD)
        before = copy.deepcopy(trainer.args)
        with pytest.raises(headroom.fitting.DoesNotFit):
            fit_trainer(trainer, "200 KiB")
        assert trainer.args == before and trainer.optimizer is None
        assert model.layers[1].gradient_checkpointing
        assert not any("forward" in vars(module) for module in model.modules())

    def test_one_callback_is_of_one_trainer_and_a_trainer_of_one(self, tmp_path):
        callback = HeadroomCallback("1 GiB", tell=lambda text: None)
        first = trained(stack(), samples(), tmp_path, [callback], **SGD)
        first.train()
        with pytest.raises(RuntimeError, match="fitted the training of another Trainer"):
            trained(stack(), samples(), tmp_path, [callback], **SGD)
        late = trainer_of(stack(), samples(), tmp_path, **SGD)
        late.add_callback(callback)
        with pytest.raises(RuntimeError, match="fitted the training of another Trainer"):
            late.train()
        with pytest.raises(RuntimeError, match="the Trainer's training is fitted already"):
            fit_trainer(first, "1 GiB")
        both = [HeadroomCallback("1 GiB", tell=lambda text: None) for _ in range(2)]
        with pytest.raises(RuntimeError, match="the Trainer's training is fitted already"):
            trained(stack(), samples(), tmp_path, both, **SGD)

    def test_a_callback_that_something_else_calls(self):
        with pytest.raises(RuntimeError, match="called by something else than a Trainer"):
            HeadroomCallback("1 GiB").on_init_end(None, None, None)


@pytest.mark.slow
def test_added_to_a_trainer_that_exists_it_changes_levels_and_loss_alone(tmp_path):
    options = SGD | dict(per_device_train_batch_size=2, gradient_accumulation_steps=2)
    want = trained(stack(), samples(), tmp_path, **options)
    most = ceiling(stack(), samples(), tmp_path, **options)
    watch, callback = Watch(), HeadroomCallback(int(0.8 * most), tell=lambda text: None)
    trainer = trainer_of(stack(), samples(), tmp_path, **options)
    trainer.add_callback(callback)
    trainer.add_callback(watch)
    trainer.train()
    assert trainer.args.gradient_accumulation_steps == 2
    assert callback.fitted.choice.micro_batches == 2 and "L5" in callback.fitted.choice.levels
    assert losses_of(trainer) == losses_of(want)
    assert_same_bits(trainer.model.parameters(), want.model.parameters())
    assert watch.peak.bytes <= callback.budget


class Odd(transformers.TrainerCallback):
    """A callback as those of loggers are, with what has no copy."""

    def __init__(self):
        self.module, self.rows, self.logs = json, (k for k in ()), 0

    def on_log(self, *args, **given):
        self.logs += 1


class Logs(transformers.Trainer):
    """Counts its losses, which it logs, and has what has no copy."""

    losses = 0

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.rows = (k for k in ())
        self.seen = []  # behind that, and copied all the same

    def compute_loss(self, *args, **options):
        self.losses += 1
        self.seen.append(self.losses)
        self.log({"mine": float(self.losses)})
        return super().compute_loss(*args, **options)


def test_fitting_leaves_loggers_and_counters_alone(tmp_path):
    class Rows(list):
        def __deepcopy__(self, memo):
            raise AssertionError("data may be large")

    found = []
    for callbacks in ([], [HeadroomCallback("1 GiB", tell=lambda text: None)]):
        odd = Odd()
        options = SGD | dict(cls=Logs, eval_dataset=Rows(samples(2)))
        trainer = trained(stack(), Rows(samples()), tmp_path, [*callbacks, odd], **options)
        logged = [
            {k: v for k, v in one.items() if "train_" not in k} for one in trainer.state.log_history
        ]
        found.append((trainer.losses, trainer.seen, odd.logs, logged))
    assert found[0] == found[1]


class TestChoiceOfACheckpoint:
    """As transformers stores the states of callbacks."""

    def choice(self, folder, resume, kept=None):
        if kept is not None:
            text = json.dumps({"stateful_callbacks": {"HeadroomCallback": kept}})
            (folder / "trainer_state.json").write_text(text)
        args = SimpleNamespace(output_dir=str(folder / "out"))
        return choice_of_checkpoint(SimpleNamespace(args=args), resume)

    KEPT = {"args": {"budget": 7}, "attributes": {"choice": {"micro_batches": 2}}}

    def test_it_is_of_the_checkpoint_and_not_of_the_working_directory(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "out").mkdir()
        assert self.choice(tmp_path, True, self.KEPT) is None
        assert self.choice(tmp_path, str(tmp_path)) == ({"micro_batches": 2}, (7, None))

    def test_several_callbacks_are_a_list(self, tmp_path):
        none = {"args": {"budget": 8}, "attributes": {"choice": None}}
        assert self.choice(tmp_path, tmp_path, [none, self.KEPT]) == (
            {"micro_batches": 2},
            (7, None),
        )
        assert self.choice(tmp_path, tmp_path, [none]) is None
        assert self.choice(tmp_path, tmp_path, []) is None


@pytest.mark.slow
def test_the_host_holds_what_the_device_has_no_room_for(tmp_path):
    options = dict(optim="adamw_torch", per_device_train_batch_size=4, max_steps=3)
    small = HeadroomCallback("250 KiB")
    with pytest.raises(DoesNotFit) as caught:
        small.fit(trainer_of(stack(), samples(), tmp_path, **options))
    told, watch = [], Watch()
    budget = int(0.95 * caught.value.least) + small.extra
    callback = HeadroomCallback(budget, host_budget="1 GiB", tell=told.append)
    got = trained(stack(), samples(), tmp_path, [watch, callback], **options)
    choice = callback.fitted.choice
    assert choice.offload and "on the host" in told[0]
    assert got.optimizer.optimizer.offload_handle.memory().host > 0
    assert watch.peak.bytes <= callback.budget
    kept = callback.state()
    assert kept["attributes"]["choice"]["offload"]
    other = HeadroomCallback(**kept["args"])
    assert (other.budget, other.host_budget) == (callback.budget, "1 GiB")
    assert other._again(callback.choice, callback.budget, 1 << 30) is callback.choice
    assert other._again(callback.choice, callback.budget) is None
    before = trainer_of(stack(), samples(), tmp_path, **options)
    fitted = fit_trainer(before, callback.budget, host_budget="1 GiB", tell=told.append).fitted
    assert fitted.choice.offload and fitted.host_budget == 1 << 30


def test_without_transformers(monkeypatch):
    name = "headroom.integrations.trainer_fit"
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="needs the package transformers"):
        importlib.import_module(name)
