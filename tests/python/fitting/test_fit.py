"""headroom.fit: within the budget, the same training, and all of it can be taken back."""

import copy
from dataclasses import replace

import headroom
import pytest
import torch
from headroom.fitting import Choice, DoesNotFit
from headroom.fitting.apply.applied import Applied
from headroom.fitting.arguments import checked
from headroom.fitting.costs import measure
from headroom.fitting.search import candidates, changes
from headroom.fitting.search.techniques import techniques_of
from headroom.nn import Transformer, TransformerConfig
from headroom.planning.api import plan_of
from headroom.release.handle import BUCKET_BYTES, bucket_of
from headroom.step.micro_batches import bytes_of
from headroom.step.optimizers import obstacle, replacement
from headroom.step.pass_seconds import PassSeconds
from torch import nn

from helpers.fitting import cross_entropy, ours, step_of


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Plain(nn.Module):
    """Repeated blocks of a class that nothing is known of."""

    def __init__(self, width=24, depth=5):
        super().__init__()
        self.first, self.last = nn.Linear(7, width), nn.Linear(width, 3)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(depth))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def plain(samples=1201):  # a prime number: no micro-batches
    torch.manual_seed(0)
    return Plain(), (torch.randn(samples, 7), torch.randint(0, 3, (samples,)))


def peak_of(model, batch, steps=3, optimizer=torch.optim.AdamW):
    return headroom.plan(model, optimizer, batch, loss=cross_entropy).peak_bytes


def measured(fitted, batch, steps=3):
    with headroom.memory.track(fitted.model, fitted.optimizer, batch=batch) as tracked:
        losses = [fitted.step(batch).item() for _ in range(steps)]
    return tracked.peak_bytes, losses


def bits_of(model):
    return [
        (name, x.dtype, x.clone(), x.grad, x._version) for name, x in model.state_dict().items()
    ]


def shape_of(model):
    """All that is set on modules, hooks included."""
    return [
        (name, {k: (id(v), len(v) if isinstance(v, dict) else 0) for k, v in vars(part).items()})
        for name, part in model.named_modules()
    ]


@pytest.fixture
def steady_times(monkeypatch):
    """Blocks that keep less take longer, and so do parts of a batch, whatever else runs."""
    own = measure._Kind._cost

    def cost(kind, level, calls):
        seconds = calls * (2.0 + 0.1 * kind.names.index(level))
        return replace(own(kind, level, calls), forward_seconds=calls, backward_seconds=seconds)

    own_pass = measure._pass

    def steady_pass(step, blocks):
        own_pass(step, blocks)
        return PassSeconds(10.0, 1.0)

    monkeypatch.setattr(measure._Kind, "_cost", cost)
    monkeypatch.setattr(measure, "_pass", steady_pass)
    monkeypatch.setattr(candidates, "optimizer_seconds", lambda *args, **options: 0.1)
    slow = PassSeconds(1e3, 1e3)
    monkeypatch.setattr(candidates, "seconds_at_leanest", lambda step, expected, **options: slow)


@pytest.mark.parametrize("share", [0.75, 0.6])
def test_the_measured_peak_is_within_the_budget_and_near_it(share, steady_times):
    model, batch = plain()
    budget = int(share * peak_of(model, batch))
    fitted = headroom.fit(model, batch, budget=budget, loss=cross_entropy)
    most, _ = measured(fitted, batch)
    assert 0.85 * budget <= most <= budget
    assert fitted.predicted_peak == pytest.approx(most, rel=0.01)


def test_levels_leave_the_bits_of_training_as_they_are():
    model, batch = plain()
    twin = copy.deepcopy(model)
    budget = int(0.8 * peak_of(model, batch))
    optimizer = headroom.optim.AdamW(model.parameters(), lr=1e-2)
    fitted = headroom.fit(model, batch, budget=budget, optimizer=optimizer, loss=cross_entropy)
    fitted.set_levels(["L0", "L5", "L5", "L0", "L5"])
    other = headroom.optim.AdamW(twin.parameters(), lr=1e-2)
    for _ in range(3):
        loss = fitted.step(batch)
        expected = cross_entropy(twin(batch[0]), batch[1])
        expected.backward()
        other.step()
        other.zero_grad()
        assert torch.equal(loss, expected.detach())
    for x, y in zip(model.parameters(), twin.parameters()):
        assert torch.equal(x, y)


def test_micro_batches_train_the_same_up_to_rounding():
    model, batch = ours()
    twin = copy.deepcopy(model)
    fitted = headroom.fit(model, batch, budget="1 GiB", loss=cross_entropy)
    fitted.choice = fitted.choice.but(micro_batches=3, release=False)
    whole = headroom.fit(twin, batch, budget="1 GiB", loss=cross_entropy)
    for _ in range(3):
        loss, expected = fitted.step(batch), whole.step(batch)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)


def test_a_dry_run_changes_nothing():
    model, batch = ours()
    before, shape, random = bits_of(model), shape_of(model), torch.get_rng_state()
    report = headroom.fit(
        model, batch, budget="1 MiB", loss=cross_entropy, allow=("8bit", "bf16"), dry_run=True
    )
    assert torch.equal(random, torch.get_rng_state())
    assert shape == shape_of(model)
    for (name, dtype, x, grad, version), (_, *now) in zip(before, bits_of(model)):
        assert (dtype, grad, version) == (now[0], now[2], now[3]), name
        assert torch.equal(x, now[1]), name
    with pytest.raises(RuntimeError, match="dry_run"):
        report.step(batch)


def test_an_error_while_it_is_applied_takes_everything_back(monkeypatch):
    model, batch = ours()
    before, shape = bits_of(model), shape_of(model)

    def fails(*args, **kwargs):
        raise MemoryError("no memory")

    monkeypatch.setattr("headroom.techniques.weights16.load_master_weights", fails)
    optimizer = replacement(torch.optim.AdamW(model.parameters()), "8bit", "remainder16")
    with pytest.raises(MemoryError):
        Applied(model, ["blocks.1"], optimizer, Choice(("L5",), 1, "8bit", "bf16"))
    assert shape == shape_of(model)
    for (name, dtype, x, *_), (_, *now) in zip(before, bits_of(model)):
        assert dtype == now[0] and torch.equal(x, now[1]), name


def test_weights_in_16_bits_are_taken_back_to_the_bit():
    model, _ = ours()
    before, save = bits_of(model), [block.save for block in model.blocks]
    optimizer = replacement(torch.optim.AdamW(model.parameters()), "headroom", "remainder16")
    applied = Applied(
        model, ["blocks.1"], optimizer, Choice(("L5",), 1, "headroom", "bf16", release=True)
    )
    assert model.blocks[1].save == "L5"
    assert model.blocks[0].mlp.down.weight.dtype == torch.bfloat16
    applied.undo()
    assert [block.save for block in model.blocks] == save
    for (name, dtype, x, *_), (_, *now) in zip(before, bits_of(model)):
        assert dtype == now[0] and torch.equal(x, now[1]), name


@pytest.mark.slow
@pytest.mark.release
def test_where_nothing_fits_the_error_says_why_and_what_would():
    model, batch = ours()
    with pytest.raises(DoesNotFit, match="parameters .* What would fit: a budget of") as raised:
        headroom.fit(model, batch, budget="64 KiB", loss=cross_entropy)
    assert raised.value.least > 64 << 10
    assert raised.value.by_kind["parameters"] > 0
    fitted = headroom.fit(
        model, batch, budget=2 * raised.value.least, loss=cross_entropy, dry_run=True
    )
    assert fitted.predicted_peak <= 2 * raised.value.least


def test_options_of_groups_carry_over():
    model = Plain()
    decays = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    given = torch.optim.AdamW(
        [
            {"params": decays, "weight_decay": 0.2, "lr": 3e-3, "name": "decays"},
            {"params": others, "weight_decay": 0.0, "betas": (0.5, 0.6)},
        ],
        lr=1e-4,
        eps=1e-6,
    )
    for kind, cls in (("headroom", "AdamW"), ("8bit", "AdamW8bit"), ("adafactor", "Adafactor")):
        made = replacement(given, kind)
        assert type(made).__name__ == cls
        first, second = made.param_groups
        assert (first["lr"], first["weight_decay"], first["name"]) == (3e-3, 0.2, "decays")
        assert (second["lr"], second["weight_decay"]) == (1e-4, 0.0)
        assert first["params"] == decays and second["params"] == others
        if kind != "adafactor":
            assert first["betas"] == (0.9, 0.999) and second["betas"] == (0.5, 0.6)
            assert first["eps"] == second["eps"] == 1e-6


def test_an_optimizer_that_has_begun_or_has_a_scheduler_is_kept():
    model, batch = plain(8)
    optimizer = torch.optim.AdamW(model.parameters())
    assert obstacle(optimizer) is None
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    assert "scheduler" in obstacle(optimizer)
    optimizer = torch.optim.AdamW(model.parameters())
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    assert "begun" in obstacle(optimizer)
    assert "RMSprop" in obstacle(torch.optim.RMSprop(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "budget"),
        ({"budget": "1 GiB", "target": "speed"}, "budget"),
        ({"target": "memory"}, "target"),
        ({"budget": "1 GiB", "allow": ("4bit",)}, "allow"),
        ({"budget": "1 GiB", "margin": 1.0}, "margin"),
        ({"budget": "1 GiB", "forward": lambda model, batch: 0}, "forward"),
    ],
)
def test_bad_arguments(options, error):
    model, batch = plain(8)
    with pytest.raises(ValueError, match=error):
        headroom.fit(model, batch, loss=cross_entropy, **options)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.8, 0.65, 0.5])
@pytest.mark.parametrize("allow", [(), ("8bit",), ("8bit", "bf16"), ("adafactor",)])
def test_what_is_allowed_stays_within_the_budget(allow, share):
    torch.manual_seed(0)
    config = TransformerConfig(vocab_size=500, hidden_size=64, layers=6, heads=4, features=172)
    tokens = torch.randint(0, 500, (5, 65))
    model, batch = Transformer(config), (tokens[:, :-1], tokens[:, 1:].contiguous())
    budget = int(share * peak_of(model, batch))
    fitted = headroom.fit(model, batch, budget=budget, loss=cross_entropy, allow=allow)
    most, losses = measured(fitted, batch)
    assert most <= budget
    assert losses[-1] < losses[0]
    assert all(len(line) <= 80 for line in str(fitted).splitlines())
    fitted.undo()
    assert all(x.dtype == torch.float32 for x in model.parameters())


@pytest.mark.slow
def test_a_running_training_can_be_made_leaner(steady_times):
    model, batch = plain(120)
    fitted = headroom.fit(model, batch, budget="1 GiB", loss=cross_entropy)
    seen = {fitted.choice}
    before, first = fitted.predicted_peak, fitted.step(batch)
    while fitted.reduce_memory():
        assert fitted.choice not in seen
        seen.add(fitted.choice)
        if fitted.choice.micro_batches == 1:
            least = fitted.predicted_peak
        fitted.step(batch)
        assert len(seen) < 40
    assert least < before
    assert fitted.choice.micro_batches > 1 and "L5" in fitted.choice.levels
    assert fitted.step(batch) < first and fitted.measured_peak is not None
    fitted.undo()
    with pytest.raises(RuntimeError, match="undo"):
        fitted.step(batch)
    with pytest.raises(RuntimeError, match="undo"):
        fitted.reduce_memory()  # where nothing leaner is left, too
    with pytest.raises(TypeError, match="pickled"):
        copy.copy(fitted)


def test_bfloat16_weights_are_timed_as_such(monkeypatch):
    own, dtypes = candidates.optimizer_seconds, {}

    def seconds(optimizer, device, *, dtype, offload):
        dtypes[optimizer.defaults.get("master")] = dtype
        return own(optimizer, device, dtype=dtype, offload=offload)

    monkeypatch.setattr(candidates, "optimizer_seconds", seconds)
    model, batch = ours()
    headroom.fit(model, batch, budget="1 GiB", loss=cross_entropy, allow=("bf16",), dry_run=True)
    assert dtypes["remainder16"] == torch.bfloat16
    assert {dtype for master, dtype in dtypes.items() if master != "remainder16"} == {None}


def test_release_helps_a_small_model_as_much_as_its_plan_says():
    """Its gradients are less than the default bucket, in which all of them would wait."""
    model, batch = ours()
    gradients = sum(p.nbytes for p in model.parameters())
    assert gradients < BUCKET_BYTES
    stays = fitted_with(Choice(("L5",) * 4, optimizer="headroom"), batch)
    released = fitted_with(Choice(("L5",) * 4, optimizer="headroom", release=True), batch)
    most, losses = measured(released, batch)
    assert released.predicted_peak == pytest.approx(most, rel=0.005)
    most_with_gradients, expected = measured(stays, batch)
    assert losses == expected
    assert most < most_with_gradients - gradients // 3


@pytest.mark.parametrize("weights", ["given", "bf16"])
def test_the_bucket_is_that_of_the_plan_before_and_after_weights_are_cast(weights):
    model, _ = ours()
    choice = Choice(weights=weights, release=True).dtype
    size = sum(p.numel() for p in model.parameters()) * (2 if weights == "bf16" else 4)
    bucket = bucket_of(model, choice)
    assert bucket == size // 8
    if weights == "bf16":
        assert bucket_of(headroom.cast_model(model), choice) == bucket
    large = nn.ModuleList([nn.Linear(4096, 4096, device="meta")])
    assert bucket_of(large, choice) == BUCKET_BYTES


def fitted_with(choice, batch):
    model, _ = ours()
    return headroom.fit(model, batch, budget="1 GiB", loss=cross_entropy, choice=choice)


def test_the_model_as_given_is_planned_only_where_it_must_be(monkeypatch):
    model, batch = plain()
    plan = headroom.plan(model, torch.optim.AdamW, batch, loss=cross_entropy)

    def refuse(search, steps):
        raise AssertionError("the model as given is planned")

    monkeypatch.setattr(changes, "peak_as_given", refuse)
    whole = headroom.fit(model, batch, budget="1 GiB", loss=cross_entropy, dry_run=True)
    if whole.choice.optimizer == "given":
        assert whole.before_peak == plan.total_bytes
    less = headroom.fit(
        model, batch, budget=int(0.7 * plan.peak_bytes), loss=cross_entropy, dry_run=True
    )
    assert less.before_peak == pytest.approx(plan.total_bytes, rel=0.005)
    total = sum(change.bytes for change in less.changes)
    assert less.before_peak + total == less.predicted_peak
    headroom.patch(model, save="L5")
    with pytest.raises(AssertionError, match="as given is planned"):
        headroom.fit(model, batch, budget="1 GiB", loss=cross_entropy, dry_run=True)


def test_the_memory_of_the_device_is_a_target():
    model, batch = plain(8)
    fitted = headroom.fit(model, batch, target="speed", loss=cross_entropy, dry_run=True)
    assert fitted.budget > fitted.predicted_peak
    assert not fitted.is_applied


def test_a_loss_that_is_no_mean_has_no_micro_batches():
    model, batch = plain(600)

    def total(output, target):
        return nn.functional.cross_entropy(output, target, reduction="sum")

    budget = int(0.6 * peak_of(model, batch))
    fitted = headroom.fit(model, batch, budget=budget, loss=total, dry_run=True)
    assert fitted.choice.micro_batches == 1


def test_what_was_patched_before_is_so_again():
    model, batch = ours()
    headroom.patch(model, save=["L2", "L0", "L5", "L3"])
    before = [block.save for block in model.blocks]
    fitted = headroom.fit(model, batch, budget="1 GiB", loss=cross_entropy)
    fitted.set_levels(["L4"] * 4)
    fitted.undo()
    assert [block.save for block in model.blocks] == before
    headroom.unpatch(model)
    assert [block.save for block in model.blocks] == ["L0"] * 4


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.7, 0.45])
def test_a_model_of_transformers_stays_within_the_budget(share):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=700,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(0, 700, (6, 64))
    batch = {"input_ids": ids, "labels": ids}
    shape = shape_of(model)
    budget = int(share * headroom.plan(model, torch.optim.AdamW, batch).peak_bytes)
    fitted = headroom.fit(model, batch, budget=budget)
    most, losses = measured(fitted, batch)
    assert most <= budget
    assert losses[-1] < losses[0]
    fitted.undo()
    assert shape == shape_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize(
    "choice",
    [
        Choice(("L0", "L5", "L2", "L5"), 2),
        Choice(("L0",) * 4, 4, fused_loss=True),
        Choice(("L1", "L0", "L0", "L3"), 1, "headroom", "bf16"),
    ],
    ids=str,
)
def test_softcaps_and_windows_are_on_their_plan(choice, use_cache):
    """Of Gemma 2, whose attention is eager and has two masks, with padding in the batch."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=211,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=24,
        max_position_embeddings=128,
        use_cache=use_cache,
    )
    model = transformers.Gemma2ForCausalLM(config).train()
    ids = torch.randint(0, 211, (4, 56))
    mask = torch.ones_like(ids)
    mask[1, -9:] = 0
    batch = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    fitted = headroom.fit(model, batch, budget="1 GiB", choice=choice)
    most, _ = measured(fitted, batch)
    assert fitted.predicted_peak == pytest.approx(most, rel=0.001)


def two_steps(runs_out):
    """The losses and weights after two steps, which run out of memory once or start with less."""
    model, batch = ours()
    errors = []

    def loss(output, target):
        if errors:
            raise errors.pop()
        return cross_entropy(output, target)

    optimizer = headroom.optim.AdamW(model.parameters())
    fitted = headroom.fit(model, batch, budget="1 GiB", optimizer=optimizer, loss=loss)
    step = headroom.retry_on_oom(fitted.step)
    if runs_out:
        errors.append(MemoryError("no room"))
        with pytest.warns(UserWarning, match="all L0 became .*L1. no room"):
            losses = [step(batch), step(batch)]
    else:
        assert fitted.reduce_memory()
        losses = [step(batch), step(batch)]
    return losses + [param.detach() for param in model.parameters()]


def test_a_step_that_runs_out_of_memory_has_the_bits_of_a_leaner_start(steady_times):
    assert all(map(torch.equal, two_steps(runs_out=True), two_steps(runs_out=False)))


@pytest.mark.parametrize("count", [1, 3])
def test_a_prefetcher_holds_a_whole_batch_on_a_gpu(count):
    """Whatever parts it is cut into."""
    model, (tokens, target) = ours()
    batch = tokens.contiguous(), target
    held = []
    for prefetch in (False, True):
        step = checked(step_of(model, batch, cross_entropy).but(prefetch=prefetch))
        made = candidates.Candidates(techniques_of(step))
        choice = Choice(micro_batches=count)
        planned = made.step_with(choice, [], made.techniques.optimizer_of(choice))
        plan = plan_of(planned.but(device=torch.device("cuda")))
        held.append(plan.peak_by_kind["batch"])
    assert held == [bytes_of(batch), 2 * bytes_of(batch)]


def test_fit_plans_with_a_prefetcher():
    model, batch = ours()
    fitted = headroom.fit(
        model, batch, budget="1 GiB", loss=cross_entropy, prefetch=True, dry_run=True
    )
    assert fitted.plan.options["prefetch"] == "on"
