"""Loops that others wrote: GradScaler, schedulers, accelerate, Lightning, transformers' Trainer."""

import copy
from functools import partial

import headroom
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from helpers import modes
from helpers.bits import assert_same_bits
from helpers.modes import EVERY, entries

ADAMW = headroom.optim.AdamW
OURS = pytest.mark.parametrize(  # the second with 8-bit moments for one of four parameters
    "make",
    [
        partial(ADAMW, state_dtype=torch.bfloat16),
        partial(headroom.optim.AdamW8bit, min_8bit_size=8),
    ],
    ids=["AdamW", "AdamW8bit"],
)

QUIET = dict(  # options of lightning.Trainer
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=False,
)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def made(name):
    """A model in two precisions, and its optimizer."""
    model = modes.build(torch.bfloat16)
    return model, EVERY[name].make(model.parameters())


def batches(count, rows=8):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 5, generator=generator) for _ in range(count)]


def assert_same_run(model, optimizer, other, other_optimizer):
    assert_same_bits(model.parameters(), other.parameters())
    for left, right in zip(entries(optimizer), entries(other_optimizer)):
        assert_same_bits(left.values(), right.values())


def assert_close(model, other):
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def plain_run(data, cls=ADAMW, **options):
    model = build()
    optimizer = cls(model.parameters(), **options)
    for x in data:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model, optimizer


# ---- GradScaler ----------------------------------------------------------------------------------


def scaled_run(cls, data, overflows, unscale, clip=None, **options):
    """Returns the model, the optimizer, the scaler and for every step whether it was taken."""
    model = build()
    optimizer = cls(model.parameters(), lr=1e-2, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    taken = []
    for k, x in enumerate(data):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        if k in overflows:
            model[0].weight.grad[0, 0] = overflows[k]
        if unscale:
            scaler.unscale_(optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        scaler.step(optimizer)
        scaler.update()
        after = [model.state_dict(), optimizer.state_dict()]
        taken.append(not torch.equal(before[0]["0.weight"], after[0]["0.weight"]))
        if not taken[-1]:
            assert_same_bits(before[0].values(), after[0].values())
            for i, entry in after[1]["state"].items():
                assert_same_bits(before[1]["state"][i].values(), entry.values())
    return model, optimizer, scaler, taken


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_grad_scaler_skips_the_overflow_and_nothing_else(unscale, value):
    data, overflows = batches(7), {1: value, 2: value, 5: value}
    model, optimizer, scaler, taken = scaled_run(ADAMW, data, overflows, unscale)
    assert taken == [k not in overflows for k in range(7)]
    assert all(entry["step"] == 4 for entry in entries(optimizer))
    theirs = scaled_run(torch.optim.AdamW, data, overflows, unscale)
    assert_close(model, theirs[0])
    assert theirs[3] == taken
    assert scaler.state_dict() == theirs[2].state_dict()
    # The scale is a power of two, so unscaled gradients are those of a run without it.
    good = plain_run([x for k, x in enumerate(data) if k not in overflows], lr=1e-2)
    assert_same_run(model, optimizer, *good)


def test_grad_scaler_with_clipping():
    data, overflows = batches(4), {1: float("inf")}
    ours = scaled_run(ADAMW, data, overflows, True, clip=0.05)
    theirs = scaled_run(torch.optim.AdamW, data, overflows, True, clip=0.05)
    assert_close(ours[0], theirs[0])
    assert ours[3] == theirs[3] == [True, False, True, True]


def test_scalars_of_the_step_do_what_the_scaler_does():
    """grad_scale and found_inf as attributes: unscaled and skipped inside the op."""
    data, overflows = batches(5), {2: float("inf")}
    model = build()
    optimizer = ADAMW(model.parameters(), lr=1e-2)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    for k, x in enumerate(data):
        optimizer.zero_grad()
        (model(x).square().mean() * 1024).backward()
        if k in overflows:
            model[0].weight.grad[0, 0] = overflows[k]
        finite = all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.found_inf.fill_(not finite)
        optimizer.step()
    good = plain_run([x for k, x in enumerate(data) if k not in overflows], lr=1e-2)
    assert_same_run(model, optimizer, *good)


def test_a_scaler_with_two_optimizers_skips_one():
    model = build()
    first, second = ADAMW(model[0].parameters()), ADAMW(model[2].parameters())
    scaler = torch.amp.GradScaler("cpu")
    before = copy.deepcopy(model.state_dict())
    scaler.scale(model(batches(1)[0]).square().mean()).backward()
    model[0].bias.grad[0] = float("nan")
    for optimizer in (first, second):
        scaler.step(optimizer)
    scaler.update()
    after = model.state_dict()
    assert_same_bits([before["0.weight"], before["0.bias"]], [after["0.weight"], after["0.bias"]])
    assert not torch.equal(before["2.weight"], after["2.weight"])
    assert len(first.state) == 0 and len(second.state) == 2


# ---- schedulers ----------------------------------------------------------------------------------

SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "one cycle, which moves beta1 too": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "cyclic, which moves beta1 too": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-1, 3),
    "warm-up, then decay": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.ExponentialLR(o, 0.8)], [3]
    ),
}


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name, tensor_lr, recwarn):
    runs = []
    for cls in (ADAMW, torch.optim.AdamW):
        model = build()
        optimizer = cls(model.parameters(), lr=torch.tensor(1e-2) if tensor_lr else 1e-2)
        scheduler = SCHEDULERS[name](optimizer)
        rates = []
        for x in batches(8):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            scheduler.step()
            rates.append(
                (float(optimizer.param_groups[0]["lr"]), optimizer.param_groups[0]["betas"])
            )
        runs.append((model, rates))
    assert runs[0][1] == runs[1][1] and len({rate for rate, _ in rates}) > 1
    assert_close(runs[0][0], runs[1][0])
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]


def test_plateau_scheduler():
    optimizer = ADAMW(build().parameters(), lr=1e-2)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for loss in (1.0, 2.0, 3.0):
        scheduler.step(loss)
    assert optimizer.param_groups[0]["lr"] == 2.5e-3


# ---- accelerate ----------------------------------------------------------------------------------


@pytest.fixture
def accelerator():
    accelerate = pytest.importorskip("accelerate")
    yield accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state(True)


@OURS
def test_accelerate_has_the_bits_of_a_plain_loop(make, accelerator):
    data = batches(6)
    model = build()
    optimizer = make(model.parameters(), lr=1e-2)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.7)
    model, prepared, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for x in data:
        prepared.zero_grad()
        accelerator.backward(model(x).square().mean())
        prepared.step()
        scheduler.step()
        assert not prepared.step_was_skipped

    reference = build()
    other = make(reference.parameters(), lr=1e-2)
    decay = lr_scheduler.ExponentialLR(other, 0.7)
    for x in data:
        other.zero_grad()
        reference(x).square().mean().backward()
        other.step()
        decay.step()
    assert_same_run(model, optimizer, reference, other)
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"] < 1e-2


@pytest.mark.parametrize("name", EVERY)
def test_accelerate_prepares_moves_saves_and_loads(name, accelerator, tmp_path):
    """prepare() loads the live state_dict into the optimizer that it came from."""
    model, optimizer = made(name)
    modes.train(model, optimizer, range(2))
    before = copy.deepcopy(entries(optimizer))
    model, prepared = accelerator.prepare(model, optimizer)
    for left, right in zip(entries(optimizer), before):
        assert list(left) == list(right)
        assert_same_bits(left.values(), right.values())

    def train(steps):
        for step in steps:
            prepared.zero_grad()
            accelerator.backward(modes.loss_of(model, modes.batch(step)))
            prepared.step()

    train([2])
    accelerator.save_state(tmp_path)
    train(range(3, 6))
    reference = made(name)
    modes.train(*reference, range(6))
    assert_same_run(model, optimizer, *reference)
    accelerator.load_state(tmp_path)
    assert all(entry["step"] == 3 for entry in entries(optimizer))
    train(range(3, 6))
    assert_same_run(model, optimizer, *reference)


def test_what_takes_an_optimizer_takes_the_one_that_accelerate_wraps(accelerator):
    model = build().to(torch.bfloat16)
    optimizer = ADAMW(model.parameters(), lr=1e-2, master="remainder16")
    model, prepared = accelerator.prepare(model, optimizer)
    assert type(prepared) is not ADAMW
    with headroom.optim.release_gradients(model, prepared):
        accelerator.backward(model(batches(1)[0].bfloat16()).square().mean())
        prepared.step()
    weights = headroom.optim.master_weights(prepared, model)
    for ours, plain in zip(
        weights.values(), headroom.optim.master_weights(optimizer, model).values()
    ):
        assert ours.dtype == torch.float32 and torch.equal(ours, plain)
    doubled = {name: 2 * weight for name, weight in weights.items()}
    headroom.optim.load_master_weights(prepared, doubled, model)
    for name, weight in headroom.optim.master_weights(optimizer, model).items():
        assert torch.equal(weight, doubled[name])


@pytest.mark.parametrize("other", [torch.optim.AdamW, dict], ids=["torch's", "no optimizer"])
def test_what_takes_an_optimizer_refuses_others(other):
    model = build()
    thing = other(model.named_parameters())
    for function, args in (
        ("master_weights", (thing, model)),
        ("load_master_weights", (thing, {}, model)),
        ("load_sharded", ({}, model, thing)),
        ("release_gradients", (model, thing)),
    ):
        with pytest.raises(
            TypeError, match=rf"{function}\(\) wants an optimizer of headroom.optim"
        ):
            getattr(headroom.optim, function)(*args)


def test_accelerate_tells_a_skipped_step(accelerator):
    model, optimizer = build(), None
    optimizer = ADAMW(model.parameters(), lr=1e-2)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, prepared = accelerator.prepare(model, optimizer)
    skipped = []
    for k, x in enumerate(batches(3)):
        prepared.zero_grad()
        accelerator.backward(model(x).square().mean())
        if k == 1:
            model[0].weight.grad[0, 0] = float("inf")
        prepared.step()
        skipped.append(prepared.step_was_skipped)
    assert skipped == [False, True, False]
    assert all(entry["step"] == 2 for entry in entries(optimizer))


# ---- Lightning -----------------------------------------------------------------------------------


@OURS
def test_lightning(make, tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = build()

        def training_step(self, batch, _):
            return self.model(batch).square().mean()

        def configure_optimizers(self):
            optimizer = make(self.parameters(), lr=1e-2)
            return [optimizer], [lr_scheduler.StepLR(optimizer, 1, 0.5)]

    data = torch.cat(batches(6))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=False)

    def trainer(epochs):
        return lightning.Trainer(
            max_epochs=epochs,
            **QUIET,
            gradient_clip_val=0.5,
            default_root_dir=tmp_path,
        )

    whole = Module()
    trainer(2).fit(whole, loader)
    half = trainer(1)
    half.fit(Module(), loader)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, second = Module(), trainer(2)
    second.fit(resumed, loader, ckpt_path=tmp_path / "half.ckpt")
    assert_same_bits(whole.model.parameters(), resumed.model.parameters())
    (optimizer,) = second.strategy.optimizers
    assert all(entry["step"] == 12 for entry in entries(optimizer))
    assert entries(optimizer)[0]["exp_avg"].dtype in (torch.bfloat16, torch.uint8)

    reference = build()
    other = make(reference.parameters(), lr=1e-2)
    for epoch in range(2):
        for x in data.split(8):
            other.zero_grad()
            reference(x).square().mean().backward()
            nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            other.step()
        other.param_groups[0]["lr"] = 1e-2 * 0.5 ** (epoch + 1)
    assert_same_bits(reference.parameters(), whole.model.parameters())


@pytest.mark.parametrize("name", EVERY)
def test_lightning_resumes(name, tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = modes.build(torch.bfloat16)

        def training_step(self, *_):
            return modes.loss_of(self.model, modes.batch(self.global_step))

        def configure_optimizers(self):
            return EVERY[name].make(self.parameters())

    def fit(steps, **options):
        trainer = lightning.Trainer(
            max_steps=steps,
            **QUIET,
            default_root_dir=tmp_path,
        )
        module = Module()
        trainer.fit(module, torch.utils.data.DataLoader(torch.arange(3)), **options)
        return trainer, module.model

    fit(3)[0].save_checkpoint(tmp_path / "half.ckpt")
    trainer, model = fit(6, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    reference = made(name)
    modes.train(*reference, range(6))
    assert_same_run(model, trainer.strategy.optimizers[0], *reference)


# ---- transformers --------------------------------------------------------------------------------


def trainer_run(folder, cls, steps, resume=None, dtype=torch.float32, **options):
    """GPT-2 in small, saved at step 3. Returns the model, the optimizer and the losses."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
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
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.5,
        save_strategy="steps",
        save_steps=3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    torch.manual_seed(0)
    trainer = transformers.Trainer(
        transformers.GPT2LMHeadModel(config).to(dtype),
        arguments,
        train_dataset=rows,
        optimizer_cls_and_kwargs=(cls, options),
    )
    trainer.train(resume_from_checkpoint=resume)
    optimizer = trainer.optimizer.optimizer
    assert type(optimizer) is cls
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return trainer.model, optimizer, losses


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
