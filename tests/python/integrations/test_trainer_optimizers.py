"""Headroom's optimizers in the Trainer of transformers."""

import pytest
import torch

from helpers.loops import ADAMW, assert_same_run
from helpers.modes import EVERY, entries

transformers = pytest.importorskip("transformers")

from helpers.trainers import losses_of, trainer_of  # noqa: E402


def trainer_run(folder, cls, steps, resume=None, dtype=torch.float32, **options):
    """GPT-2 in small, saved at step 3. Returns the model, the optimizer and the losses."""
    config = transformers.GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        attn_pdrop=0,
        embd_pdrop=0,
        resid_pdrop=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = torch.randint(0, 32, (24, 16), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    torch.manual_seed(0)
    trainer = trainer_of(
        transformers.GPT2LMHeadModel(config).to(dtype),
        rows,
        folder,
        max_steps=steps,
        gradient_accumulation_steps=2,
        lr_scheduler_type="constant",
        warmup_steps=0,
        save_strategy="steps",
        save_steps=3,
        seed=0,
        optimizer_cls_and_kwargs=(cls, options),
    )
    trainer.train(resume_from_checkpoint=resume)
    optimizer = trainer.optimizer.optimizer
    assert type(optimizer) is cls
    return trainer.model, optimizer, losses_of(trainer)


@pytest.mark.parametrize(
    "name",
    ["adamw8bit-remainder16", "adamw-remainder8-stochastic", "adafactor-kahan", "adafactor-hf-lr"],
)
def test_trainer_of_transformers_resumes(name, tmp_path):
    mode = EVERY[name]
    how = {"cls": mode.cls, "dtype": torch.bfloat16, **mode.options}
    model, optimizer, _ = trainer_run(tmp_path, steps=5, **how)
    resumed = trainer_run(tmp_path, steps=5, resume=str(tmp_path / "checkpoint-3"), **how)
    assert all(entry["step"] == 5 for entry in entries(optimizer))
    assert_same_run(model, optimizer, *resumed[:2])


def test_trainer_of_transformers(tmp_path):
    options = {"lr": 1e-2, "betas": (0.9, 0.95)}
    model, optimizer, losses = trainer_run(tmp_path / "ours", ADAMW, 6, **options)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert all(entry["step"] == 6 for entry in entries(optimizer))
    # Of the losses, not of the parameters: gradients that are zero but for rounding, as those of
    # the biases of keys are, decide where Adam takes those.
    theirs = trainer_run(tmp_path / "theirs", torch.optim.AdamW, 6, **options)[2]
    assert len(theirs) == 6 and losses[5] < losses[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(theirs), rtol=1e-4, atol=0)
