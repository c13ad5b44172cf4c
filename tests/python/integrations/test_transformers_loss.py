"""Trainers of transformers whose model computes its loss without logits."""

import copy

import headroom
import pytest
import torch
from headroom.integrations.transformers import fuse_loss, loss_function

from helpers.hf_models import model_of

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()


def rows(count=8):
    """Sequences of unequal numbers of labels, so that the mean of means is another number."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for k in range(count):
        ids = torch.randint(3, 61, (12,), generator=generator)
        labels = ids.clone()
        labels[: k % 4 * 3] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def trained(model, folder, prepare=lambda trainer: None, **options):
    """The logged losses, the losses of an evaluation and the weights after two steps."""
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            str(folder),
            max_steps=2,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=0.1,
            optim="sgd",  # Adam makes much of a gradient that is only rounding
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            **options,
        ),
        train_dataset=rows(),
        eval_dataset=rows(4),
    )
    prepare(trainer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    losses.append(trainer.evaluate()["eval_loss"])
    return torch.tensor(losses, dtype=torch.float64), [p.detach() for p in model.parameters()]


def assert_same_training(got, want):
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-4)  # what Trainer logs
    for mine, theirs in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


class TestTrainer:
    def test_accumulation_of_unequal_batches(self, tmp_path):
        model = model_of("Llama")
        want = trained(copy.deepcopy(model), tmp_path)
        headroom.patch(model, "L0", loss=True, norms=False, glu=False, rope=False)
        assert_same_training(trained(model, tmp_path), want)

    def test_label_smoothing(self, tmp_path):
        model = model_of("GPT2")
        options = dict(label_smoothing_factor=0.2)
        want = trained(copy.deepcopy(model), tmp_path, **options)
        unsmoothed = trained(copy.deepcopy(model), tmp_path)
        assert (want[0] - unsmoothed[0]).abs().min() > 1e-3
        headroom.patch(model, "L0", loss=True, norms=False, glu=False, rope=False)
        from_logits = copy.deepcopy(model)
        assert_same_training(trained(from_logits, tmp_path, **options), want)
        seen = set()
        model.register_forward_hook(
            lambda model, _, out: seen.add((model.training, out.logits is None))
        )
        assert_same_training(trained(model, tmp_path, fuse_loss, **options), want)
        assert seen == {(True, True), (False, False)}

    def test_what_is_refused(self, tmp_path):
        model = model_of("Llama")
        with pytest.raises(ValueError, match="the loss of LlamaForCausalLM is its own"):
            trained(model, tmp_path, fuse_loss)
        headroom.patch(model, loss=True)

        def own(trainer):
            trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch: outputs.loss
            fuse_loss(trainer)

        with pytest.raises(ValueError, match="by a function of its own, which gets logits"):
            trained(model, tmp_path, own)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("items", [None, 9, torch.tensor(9)], ids=["mean", "int", "tensor"])
def test_the_loss_function_is_that_of_transformers(items, shifted):
    from transformers.loss.loss_utils import ForCausalLMLoss

    torch.manual_seed(1)
    hidden = torch.randn(2, 7, 8, requires_grad=True)
    head = torch.nn.Linear(8, 23, bias=True)
    labels = torch.randint(23, (2, 7))
    labels[0, :3] = -100
    given = {"labels": labels, "num_items_in_batch": items}
    if shifted:
        given["shift_labels"] = labels.flip(1)
    found = [
        loss_function(hidden, head, **given),
        ForCausalLMLoss(head(hidden), vocab_size=23, **given),
    ]
    grads = [torch.autograd.grad(loss, (hidden, *head.parameters())) for loss in found]
    torch.testing.assert_close(found[0], found[1])
    for mine, theirs in zip(*grads):
        torch.testing.assert_close(mine, theirs)
