"""Loops that read values of tensors for their metrics, as the trainers of TRL do."""

import types
from collections import defaultdict

import headroom
import pytest
import torch
from headroom.integrations.values import ValuesRead
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.hf_models import model_of

transformers = pytest.importorskip("transformers")

from headroom.integrations.transformers import HeadroomCallback  # noqa: E402

from helpers.trainers import losses_of, trained, trainer_of  # noqa: E402


class Logs(transformers.Trainer):
    """Takes metrics as DPOTrainer and SFTTrainer of TRL do."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._metrics = {"train": defaultdict(list)}
        self._tokens = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        kept = outputs.logits.detach()[:, 1:].mean(-1)
        mask = inputs["labels"][:, 1:] > 20
        count = self.accelerator.gather_for_metrics(mask.sum())
        metrics = self._metrics["train"]
        metrics["loss"].append(outputs.loss.item())
        metrics["mean"].append((kept[mask].sum() / count).item() if count > 0 else 0.0)
        metrics["high"].append(bool((kept > 0).any()))
        self._tokens += int(inputs["labels"].ne(-100).sum())
        metrics["tokens"] = [self._tokens]
        return outputs.loss


def rows(count=12):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 61, (count, 12), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def test_a_trainer_that_logs_values(tmp_path):
    callback = HeadroomCallback("1 GiB", tell=lambda text: None)
    wanted = trained(model_of("Llama"), rows(), tmp_path, cls=Logs)
    got = trained(model_of("Llama"), rows(), tmp_path, [callback], cls=Logs)
    assert losses_of(got) == pytest.approx(losses_of(wanted), rel=1e-3)
    # Nothing that was tried is among the metrics.
    for name, values in wanted._metrics["train"].items():
        assert got._metrics["train"][name] == pytest.approx(values, rel=1e-2, abs=1e-4), name
    note = next(note for note in callback.fitted.notes if note.startswith("values that the loop"))
    assert "test_values.py:" in note and note.endswith("more lines")
    assert callback.measured.peak <= 1.05 * callback.measured._predicted_peak


class Asks(torch.nn.Module):
    """A module whose forward reads a value, by which the size of what follows may be decided."""

    def forward(self, x):
        return x * 2 if x.sum().item() > 0 else x


def test_a_model_that_reads_values_is_refused(tmp_path):
    model = model_of("Llama")
    model.model.layers[1].mlp.act_fn = Asks()
    callback = HeadroomCallback("1 GiB", tell=lambda text: None)
    trainer = trainer_of(model, rows(), tmp_path, [callback])
    with pytest.raises(headroom.planning.PlanError) as raised:
        trainer.train()
    message = str(raised.value)
    assert "'model.layers.1.mlp.act_fn' asks for the value of a tensor" in message
    assert "This is at test_values.py:" in message
    assert "Without HeadroomCallback, headroom.patch(model, 'L5')" in message


def test_a_loader_that_yields_no_dict(tmp_path):
    """GRPOTrainer makes what its loss is given from lists of prompts."""
    trainer = trainer_of(
        model_of("Llama"), rows(), tmp_path, [HeadroomCallback("1 GiB")], data_collator=list
    )
    with pytest.raises(TypeError, match=r"batch of the loader is list, .* give such a dict as sam"):
        trainer.train()


def selecting(self, x):
    """A forward that a loop sets on a model, as TRL does."""
    return self.forward_of_class(x)[x > 0]


def around(forward):
    return lambda *args: forward(*args)


def test_a_forward_that_a_loop_has_set():
    values, module = ValuesRead(), torch.nn.Linear(5, 5)
    module.forward_of_class = module.forward
    module.forward = types.MethodType(selecting, module)
    for _ in range(2):
        with FakeTensorMode(allow_non_fake_inputs=True), values.answered():
            assert module(torch.randn(3, 5)).shape == (15,)
        module.forward = around(module.forward)  # as Accelerate does
    assert len(values.lines) == 1
    inner = Selects()
    module.forward_of_class = inner
    with FakeTensorMode(allow_non_fake_inputs=True), values.answered():
        with pytest.raises(Exception, match="nonzero"):
            module(torch.randn(3, 5))


class Selects(torch.nn.Module):
    def forward(self, x):
        return x[x > 0]


def test_values_of_fakes():
    values, module = ValuesRead(), Asks()
    with FakeTensorMode(), values.answered():
        x = torch.randn(3, 5)
        found = x.sum().item(), x.argmax().item(), (x.sum() > 0).item()
        assert found == (1.0, 1, True) and [*map(type, found)] == [float, int, bool]
        assert torch.tensor(7).item() == 7  # is known
        assert x[x > 0].shape == (15,) and x[x.sum(1) > 0].shape == (3, 5)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            module(x)
    assert len(values.lines) == 2
    with values.answered():
        assert torch.tensor([2.5]).item() == 2.5
    assert ValuesRead().note() == []
