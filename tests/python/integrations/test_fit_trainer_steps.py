"""A Trainer that is fitted makes the steps that it would have made: with losses that it weighs in
its own way, loaders of every sort, evaluations between steps, and checkpoints."""

import math
from dataclasses import asdict

import pytest
import torch
from headroom.fitting import Choice
from headroom.nn import Linear4bit
from torch.utils.data import DataLoader, IterableDataset

from helpers.few_bits import freeze
from helpers.fitting import Stack, samples, stack
from helpers.hf_models import model_of

transformers = pytest.importorskip("transformers")

from headroom.integrations.transformers import HeadroomCallback, fit_trainer  # noqa: E402

from helpers.trainers import forced, losses_of, rates_of, trained, trainer_of  # noqa: E402

SGD = dict(optim="sgd", max_steps=3, warmup_steps=0)


def parameters(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def assert_same_training(got, want, began, tolerance=1e-4):
    ended = parameters(want.model)
    assert (parameters(got.model) - ended).norm() <= tolerance * (ended - began).norm()
    assert got.state.global_step == want.state.global_step
    assert rates_of(got) == rates_of(want)
    assert losses_of(got) == pytest.approx(losses_of(want), rel=1e-3)


def padded_rows(count=12):
    generator = torch.Generator().manual_seed(2)
    rows = []
    for k in range(count):
        ids = torch.randint(3, 61, (12,), generator=generator)
        labels = ids.clone()
        labels[12 - 5 * (k % 3) :] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


class TestLosses:
    def run(self, model, tmp_path, rows=None, cuts=4, **options):
        began = parameters(model())
        rows = padded_rows() if rows is None else rows
        options = SGD | options
        want = trained(model(), rows, tmp_path, **options)
        callback = forced(cuts)
        got = trained(model(), rows, tmp_path, [callback], **options)
        assert_same_training(got, want, began)
        return callback.fitted

    def test_padded_rows(self, tmp_path):
        fitted = self.run(lambda: model_of("Llama"), tmp_path)
        assert fitted.choice.micro_batches == 4

    @pytest.mark.slow
    def test_padded_rows_and_accumulation(self, tmp_path):
        options = dict(gradient_accumulation_steps=2, per_device_train_batch_size=2, max_steps=2)
        fitted = self.run(lambda: model_of("Llama"), tmp_path, cuts=2, **options)
        assert fitted.choice.micro_batches == 4

    @pytest.mark.slow
    def test_label_smoothing(self, tmp_path):
        fitted = self.run(lambda: model_of("Llama"), tmp_path, label_smoothing_factor=0.2)
        assert fitted.choice.micro_batches == 4

    @pytest.mark.parametrize("counts", [pytest.param(True, marks=pytest.mark.slow), False])
    def test_a_function_for_the_loss(self, counts, tmp_path):
        """Trainer adds up what it returns: a mean must not be cut."""

        def loss(outputs, labels, num_items_in_batch=None):
            logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            total = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            return total / (num_items_in_batch if counts else labels.ne(-100).sum())

        fitted = self.run(lambda: model_of("Llama"), tmp_path, compute_loss_func=loss)
        assert fitted.choice.micro_batches == (4 if counts else 1)
        assert not fitted.choice.fused_loss
        assert any("do not add up" in note for note in fitted.notes) is not counts

    @pytest.mark.slow
    def test_a_model_that_leaves_the_number_of_items_unused(self, tmp_path):
        """Trainer takes it for one that has divided by it."""

        class Takes(Stack):
            def forward(self, x, labels=None, **options):
                return super().forward(x, labels)

        def model():
            torch.manual_seed(3)
            made = Takes(2)
            for layer in made.layers:
                layer.dropout.p = 0.0
            return made

        rows = [{"x": row["x"], "labels": row["target"]} for row in samples(12)]
        fitted = self.run(model, tmp_path, rows)
        assert fitted.choice.micro_batches == 1


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        yield from self.rows


class OwnLoader(transformers.Trainer):
    """With a loader that knows nothing of the Trainer's batch size."""

    def get_train_dataloader(self):
        return self.accelerator.prepare(DataLoader(self.train_dataset, batch_size=4))


@pytest.mark.slow
class TestLoaders:
    """Batches of 4 samples in steps of 4 or 8, over the end of an epoch."""

    @pytest.mark.parametrize(
        "case",
        [
            pytest.param((11, dict(max_steps=4)), id="a smaller last batch"),
            pytest.param((11, dict(max_steps=3, dataloader_drop_last=True)), id="dropped"),
            pytest.param((9, dict(max_steps=3, dataloader_drop_last=True)), id="one dropped"),
            pytest.param((12, dict(max_steps=-1, num_train_epochs=2)), id="epochs"),
            pytest.param((11, dict(train_sampling_strategy="group_by_length")), id="by length"),
        ],
    )
    def test_the_samples_of_a_step_stay(self, case, tmp_path):
        count, options = case
        rows = padded_rows(count)
        if "train_sampling_strategy" in options:
            rows = [row | {"length": 12} for row in rows]
        self.check(rows, 2, options, tmp_path)

    def test_a_stream(self, tmp_path):
        self.check(Stream(padded_rows(12)), 4, dict(max_steps=3), tmp_path, expected=4)

    def test_a_loader_of_ones_own(self, tmp_path):
        self.check(padded_rows(12), 4, {}, tmp_path, expected=1, cls=OwnLoader)

    def check(self, data, cuts, options, tmp_path, expected=None, **others):
        began = parameters(model_of("Llama"))
        options = SGD | options
        want = trained(model_of("Llama"), data, tmp_path, **options, **others)
        callback = forced(cuts)
        got = trained(model_of("Llama"), data, tmp_path, [callback], **options, **others)
        assert_same_training(got, want, began)
        if expected is not None:
            assert callback.fitted.choice.micro_batches == expected


class TestBetweenSteps:
    @pytest.mark.slow
    def test_evaluations_change_nothing(self, tmp_path):
        rows = padded_rows(12)
        options = SGD | dict(eval_strategy="steps", eval_steps=1, eval_on_start=True)
        options |= dict(eval_dataset=rows[:4], label_smoothing_factor=0.1)
        began = parameters(model_of("Llama"))
        want = trained(model_of("Llama"), rows, tmp_path, **options)
        told = []
        callback = HeadroomCallback("1 GiB", tell=told.append)
        got = trained(model_of("Llama"), rows, tmp_path, [callback], **options)
        assert_same_training(got, want, began)
        scores = [
            [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
            for run in (got, want)
        ]
        assert len(scores[0]) == 4 and scores[0] == pytest.approx(scores[1], rel=1e-4)
        assert "measured peak" in told[1] and "measured step" in told[1]
        assert callback.measured.peak <= callback.fitted.predicted_peak + callback.extra

    @pytest.mark.slow
    def test_callbacks_that_are_restored_from_a_checkpoint(self, tmp_path):
        """transformers makes new ones, of budget and allow alone."""
        options = dict(max_steps=4, save_strategy="steps", save_steps=2, max_grad_norm=0.0)
        options |= dict(restore_callback_states_from_checkpoint=True)

        def run(resume=None):
            told = []
            callback = HeadroomCallback("1 GiB", ("8bit",), tell=told.append)
            trainer = trainer_of(stack(), samples(), tmp_path, [callback], **options)
            trainer.train(resume_from_checkpoint=resume)
            return trainer, callback, told

        whole, first, _ = run()
        resumed, callback, told = run(str(tmp_path / "checkpoint-2"))
        assert torch.equal(parameters(resumed.model), parameters(whole.model))
        assert type(resumed.optimizer.optimizer) is type(whole.optimizer.optimizer)
        assert first.choice == callback.choice or first.fitted.choice != callback.fitted.choice
        assert callback.measured is not None and len(told) == 2

    @pytest.mark.slow
    def test_a_run_resumes_with_another_accumulation_and_without_allow(self, tmp_path):
        """The optimizer is that of the checkpoint; the batches are the Trainer's."""
        options = dict(max_steps=2, save_strategy="steps", save_steps=1, max_grad_norm=0.0)
        quiet = dict(tell=lambda text: None)
        first = HeadroomCallback("1 GiB", "8bit", **quiet)
        first.choice = asdict(Choice(optimizer="8bit"))  # as if there had been less memory
        trained(stack(), samples(), tmp_path, [first], **options)
        assert first.fitted.choice.optimizer == "8bit"
        changed = options | dict(gradient_accumulation_steps=2, per_device_train_batch_size=2)
        second = HeadroomCallback("1 GiB", **quiet)
        trainer = trainer_of(stack(), samples(), tmp_path, [second], **changed)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        assert second.fitted.choice.optimizer == "8bit"
        assert type(trainer.optimizer.optimizer).__name__ == "AdamW8bit"
        args = trainer.args
        assert args.gradient_accumulation_steps * args.per_device_train_batch_size == 4

    def test_a_run_resumes_with_frozen_weights_in_few_bits(self, tmp_path):
        """A checkpoint of the whole model has codes, which the fitted layers read."""
        options = dict(max_steps=3, save_strategy="steps", save_steps=1, max_grad_norm=0.0)

        def run(choice=None, resume=None, budget="1 GiB"):
            model = freeze(stack(dropout=0.0))
            callback = HeadroomCallback(budget, () if choice is None else "nf4", tell=str)
            callback.choice = None if choice is None else asdict(choice)
            trainer = trainer_of(model, samples(), tmp_path, [callback], **options)
            trainer.train(resume_from_checkpoint=resume)
            assert type(model.layers[0].up) is Linear4bit and callback.fitted.choice.frozen == "nf4"
            return model.state_dict(), callback.fitted

        whole, fitted = run(Choice(frozen="nf4"))  # as if there had been less memory
        resumed, again = run(resume=str(tmp_path / "checkpoint-1"))
        assert fitted.is_given and again.is_given
        assert all(torch.equal(resumed[name], whole[name]) for name in whole)
        _, other = run(resume=str(tmp_path / "checkpoint-1"), budget="2 GiB")
        assert not other.is_given


class TestFlags:
    @pytest.mark.slow
    @pytest.mark.parametrize("late", [False, True])
    def test_bfloat16(self, late, tmp_path):
        options = SGD | dict(bf16=True, per_device_train_batch_size=1)
        rows = padded_rows()
        want = trained(model_of("Llama"), rows, tmp_path, **options)
        told = []
        callback = HeadroomCallback("1 GiB", tell=told.append)
        callbacks = [] if late else [callback]
        trainer = trainer_of(model_of("Llama"), rows, tmp_path, callbacks, **options)
        if late:
            trainer.add_callback(callback)
        trainer.train()
        assert losses_of(trainer) == pytest.approx(losses_of(want), rel=2e-2)
        if not late:
            assert callback.measured.peak <= callback.fitted.predicted_peak + callback.extra

    @pytest.mark.slow
    def test_lora(self, tmp_path):
        peft = pytest.importorskip("peft")

        def model():
            base = model_of("Llama", num_hidden_layers=3)
            torch.manual_seed(7)
            shape = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
            return peft.get_peft_model(base, shape)

        began = parameters(model())
        options = dict(max_steps=3, warmup_steps=0, max_grad_norm=0.5)
        want = trained(model(), padded_rows(), tmp_path, **options)
        free = HeadroomCallback("1 GiB", tell=lambda text: None)
        free.fit(trainer_of(model(), padded_rows(), tmp_path, **options))
        callback = HeadroomCallback(int(0.8 * free.fitted.before_peak), tell=lambda text: None)
        got = trained(model(), padded_rows(), tmp_path, [callback], **options)
        assert_same_training(got, want, began, tolerance=1e-2)
        choice = callback.fitted.choice  # which way is faster is for the machine to say
        assert choice.micro_batches > 1 or set(choice.levels) > {"L0"} or "L0" not in choice.levels
        assert callback.measured.peak <= callback.budget
        assert math.isfinite(losses_of(got)[-1])

    def test_liger_is_refused(self, tmp_path):
        trainer = trainer_of(stack(), samples(), tmp_path)
        trainer.args.use_liger_kernel = True
        with pytest.raises(ValueError, match="has use_liger_kernel=True"):
            fit_trainer(trainer, "1 GiB")
