"""Budgets count the evaluation of the loops that have one."""

import headroom
import numpy
import pytest
import torch
from headroom.fitting import DoesNotFit
from headroom.memory import track
from headroom.patching.late_logits import LateLogits
from torch.utils.data import DataLoader

from helpers.hf_models import model_of
from helpers.trainers import trainer_of

transformers = pytest.importorskip("transformers")

from headroom.integrations.trainer_step import evaluated  # noqa: E402
from headroom.integrations.transformers import fit_trainer  # noqa: E402

VOCABULARY, TOKENS, SAMPLES = 3001, 20, 16
LOGITS = SAMPLES * TOKENS * VOCABULARY * 4
SGD = dict(optim="sgd", max_steps=1, per_device_train_batch_size=1)


def rows(count):
    ids = torch.randint(3, 61, (count, TOKENS), generator=torch.Generator().manual_seed(3))
    return [dict(input_ids=row, labels=row, attention_mask=torch.ones_like(row)) for row in ids]


def own(logits, labels, vocab_size, **options):
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, labels)


def trainer(folder, has_own_loss=False, **options):
    model = model_of("Llama", vocab_size=VOCABULARY)
    if has_own_loss:
        model.loss_function = own
    evaluation = dict(eval_dataset=rows(32), per_device_eval_batch_size=SAMPLES)
    return trainer_of(model, rows(4), folder, **SGD | evaluation | dict(do_eval=True) | options)


def fitted(made, budget="1 GiB"):
    return fit_trainer(made, budget, tell=lambda text: None).fitted


@pytest.mark.parametrize("has_own_loss", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_plan_has_the_peak_of_evaluation(has_own_loss, tmp_path):
    made = trainer(tmp_path, has_own_loss)
    found = fitted(made)
    assert found.predicted_peak > (2 if has_own_loss else 1) * LOGITS
    with track(made.model) as tracked:
        made.evaluate()
    assert tracked.peak_bytes == pytest.approx(found.predicted_peak, rel=0.02)
    assert not any("evaluation is" in note for note in found.notes)
    assert "the predicted peak is that of evaluation; steps take less" in found.notes


def test_a_budget_below_it_is_refused_and_says_why(tmp_path):
    with pytest.raises(DoesNotFit, match="in evaluation .*or smaller batches of evaluation"):
        fitted(trainer(tmp_path, has_own_loss=True), 2 * LOGITS)


@pytest.mark.slow
def test_a_training_without_evaluation_has_none_in_its_plan(tmp_path):
    found = fitted(trainer(tmp_path, has_own_loss=True, do_eval=False), 2 * LOGITS)
    assert found.predicted_peak < LOGITS


def test_metrics_need_logits_of_all_batches_and_the_report_says_so(tmp_path):
    seen = []

    def metrics(result):
        assert type(result.predictions) is numpy.ndarray
        seen.append(result.predictions.shape)
        return {"accuracy": 1.0}

    made = trainer(tmp_path)
    made.compute_metrics = metrics
    batch, (note,) = evaluated(made, who="test")
    assert batch["input_ids"].shape == (SAMPLES, TOKENS)
    assert note.startswith("evaluation is counted with the logits of one batch")
    made.args.eval_accumulation_steps = 1
    assert evaluated(made, who="test")[1] == []
    headroom.patch(made.model, loss=True)
    made.evaluate()
    assert seen == [(32, TOKENS, VOCABULARY)]


def test_what_cannot_be_planned_is_left_out_and_the_report_says_so(tmp_path):
    class Reads(transformers.Trainer):
        def prediction_step(self, model, inputs, *given, **options):
            assert inputs["labels"].nonzero().numel()  # of which fakes know no size
            return super().prediction_step(model, inputs, *given, **options)

    found = fitted(trainer(tmp_path, cls=Reads))
    assert found.predicted_peak < LOGITS
    (note,) = [note for note in found.notes if note.startswith("evaluation is not counted: ")]
    assert "nonzero" in note


def test_evaluation_by_a_trainer_computes_no_logits_that_nobody_reads(tmp_path, monkeypatch):
    want = trainer(tmp_path, bf16=True).evaluate()["eval_loss"]
    made = trainer(tmp_path, bf16=True)  # by Accelerate, which casts what a model returns
    headroom.patch(made.model, loss=True)
    seen, computed = [], LateLogits.computed.fget
    monkeypatch.setattr(LateLogits, "computed", property(lambda x: seen.append(1) or computed(x)))
    assert made.evaluate()["eval_loss"] == pytest.approx(want, rel=1e-2)
    assert not seen
    assert made.predict(made.eval_dataset).predictions.shape == (32, TOKENS, VOCABULARY)
    assert seen


lightning = pytest.importorskip("lightning")

from headroom.integrations.lightning import FitCallback  # noqa: E402

from helpers.loops import QUIET  # noqa: E402


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model_of("Llama", vocab_size=VOCABULARY)

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("loss", self.model(**batch).loss)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


OTHERS = ({"limit_val_batches": 0}, {"num_sanity_val_steps": 0})


@pytest.mark.parametrize(
    "options", [{}, *(pytest.param(o, marks=pytest.mark.slow) for o in OTHERS)]
)
def test_lightning(options, tmp_path):
    callback = FitCallback("1 GiB", tell=lambda text: None, fused_loss=True)
    loop = lightning.Trainer(
        **QUIET | options, max_steps=1, default_root_dir=tmp_path, callbacks=[callback]
    )
    loop.fit(Module(), DataLoader(rows(4)), DataLoader(rows(32), batch_size=SAMPLES))
    has_validation = "limit_val_batches" not in options
    assert (callback.fitted.predicted_peak > LOGITS) == has_validation
    assert not any("evaluation is" in note for note in callback.fitted.notes)
