"""What the first calls of headroom.fit meet: arguments that do not fit, batches of all kinds, and a
ladder that was looked at before."""

from collections import UserDict

import headroom
import headroom.memory
import pytest
import torch
from headroom.fitting.costs import measure
from headroom.fitting.ladder import distinct
from headroom.planning import PlanError
from headroom.step.loss import loss_of
from headroom.step.micro_batches import parts
from torch import nn

mse_loss = nn.functional.mse_loss


class Net(nn.Module):
    """Repeated blocks, and a loss if there are labels."""

    def __init__(self, width=24, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
            for _ in range(depth)
        )

    def forward(self, x, labels=None):
        for block in self.blocks:
            x = x + block(x)
        return x if labels is None else {"loss": mse_loss(x, labels), "output": x}


def net(samples=211):  # a prime number: no micro-batches
    torch.manual_seed(0)
    return Net(), (torch.randn(samples, 24), torch.randn(samples, 24))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"budget": 6},
            ValueError,
            'budget is 6, which is 6 bytes; write the unit, such as "6 GiB',
        ),
        ({"budget": 0.5}, ValueError, "budget is 0.5, which is 0 bytes"),
        ({"budget": "banana"}, ValueError, "budget is 'banana', wanted a number of bytes or text"),
        ({"loss": "mse_loss"}, TypeError, "loss is 'mse_loss', wanted a function"),
        ({"amp": "bf16"}, TypeError, "amp is 'bf16', wanted a dtype"),
        ({"amp": torch.int64}, TypeError, "amp is torch.int64, wanted a dtype"),
        ({"scaler": True}, TypeError, "scaler is True, wanted a torch.amp.GradScaler"),
        ({"max_grad_norm": "1"}, TypeError, "max_grad_norm must be a norm above 0, got '1'"),
        ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm is 0.0, wanted a norm above 0"),
        (
            {"margin": "5%"},
            TypeError,
            "margin must be a share of the budget, .* got '5%'",
        ),
        ({"allow": True}, TypeError, "allow is True, wanted names such as"),
        ({"only": "release"}, TypeError, "only is 'release', wanted a dict of values"),
        ({"only": {"micro_batches": 2}}, TypeError, "only has micro_batches=2, wanted a dict"),
        ({"only": {"optimizer": "8bit"}}, TypeError, "only has optimizer='8bit', wanted a dict"),
        ({"ladder": "L0"}, TypeError, "ladder is 'L0', wanted what headroom.ladder returned"),
        ({"optimizer": lambda params: None}, TypeError, "optimizer returned None, wanted a torch"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(options, error, text):
    model, batch = net()
    with pytest.raises(error, match=text):
        headroom.fit(model, batch, **{"budget": "1 GiB", "loss": mse_loss, **options})


def test_every_option_is_passed_on(monkeypatch):
    names = "budget", "target", "host_budget", "allow", "margin", "ladder", "dry_run", "only"
    given = {name: object() for name in (*names, "choice", "group")}
    monkeypatch.setattr(headroom.fitting.api, "fit_step", lambda step, **options: options)
    assert headroom.fit(*net(), **given) == given


def test_a_ladder_of_what_cannot_be_planned_says_why():
    model, batch = net()

    def positive(model, batch):
        output = model(batch[0])
        return output[output > 0].mean()  # as many as there are, which no fake knows

    with pytest.raises(PlanError, match="shapes depend on values"):
        headroom.ladder(model, batch, forward=positive)


@pytest.mark.parametrize("wrap", [lambda x: x.numpy(), lambda x: (x.numpy(), 3), lambda x: {}])
def test_a_batch_without_tensors_is_refused(wrap):
    model, (x, _) = net()
    with pytest.raises(TypeError, match="without tensors, wanted one batch of the loop"):
        headroom.fit(model, wrap(x), budget="1 GiB")


def test_a_loader_is_no_batch():
    model, batch = net()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch), 8)
    with pytest.raises(TypeError, match=r"a DataLoader without tensors.*next\(iter\(loader\)\)"):
        headroom.ladder(model, loader, loss=mse_loss)


def test_nothing_to_train_is_said():
    model, batch = net()
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        headroom.fit(model.requires_grad_(False), batch, budget="1 GiB", loss=mse_loss)


def test_a_loss_that_is_none_says_what_to_give():
    model, (x, y) = net()
    with pytest.raises(PlanError, match=r"output of the model has shape \[211, 24\].*give loss="):
        loss_of(model, x)
    with pytest.raises(PlanError, match=r"the loss has shape \[211, 24\], wanted .* a mean"):
        loss_of(model, (x, y), nn.MSELoss(reduction="none"))
    with pytest.raises(TypeError, match=r"2 items, .* of Sequential.forward.*give loss="):
        loss_of(nn.Sequential(nn.Linear(24, 24)), (x, y))
    with torch.no_grad(), pytest.raises(PlanError, match=r"outside of torch.no_grad\(\)"):
        loss_of(model, (x, y), mse_loss)
    with pytest.raises(PlanError, match="cuts the graph"):
        loss_of(model, (x, y), lambda output, target: mse_loss(output.detach(), target))
    with pytest.raises(PlanError, match="no parameter of the model does"):
        loss_of(model.requires_grad_(False), (x, y), mse_loss)


def test_a_profiler_that_runs_is_named():
    model, batch = net()
    with headroom.memory.track(model), pytest.raises(RuntimeError, match="profiler is running"):
        headroom.fit(model, batch, budget="1 GiB", loss=mse_loss)


class Encoded(UserDict):
    """A mapping that is no dict and whose items are attributes too, as tokenizers return it."""

    def __getattr__(self, name):
        if name in ("x", "labels"):
            return self.data[name]
        raise AttributeError(name)


def test_a_mapping_is_a_batch():
    model, (x, y) = net(64)
    batch = Encoded(x=x, labels=y)
    assert [part.labels.shape[0] for part in parts(batch, 4)] == [16] * 4
    fitted = headroom.fit(
        model,
        batch,
        budget="1 GiB",
        forward=lambda model, batch: mse_loss(model(batch.x), batch.labels),
    )
    fitted.choice = fitted.choice.but(micro_batches=4, release=False)
    with torch.no_grad():
        expected = mse_loss(model(x), y)
    torch.testing.assert_close(fitted.step(batch), expected)
    assert headroom.plan(model, None, batch).peak_bytes > 0
    assert headroom.max_batch(model, None, batch, budget="1 MiB", limit=64) > 0


def test_a_ladder_is_not_measured_again(monkeypatch):
    model, batch = net(120)
    how = {"loss": mse_loss, "optimizer": torch.optim.AdamW(model.parameters())}
    ladder = headroom.ladder(model, batch, **how)

    def fails(*args, **kwargs):
        raise AssertionError("measured again")

    monkeypatch.setattr(measure._Kinds, "measure", fails)
    budget = ladder.first.peak
    fitted = headroom.fit(model, batch, budget=budget, ladder=ladder, **how)
    assert fitted.predicted_peak <= budget
    assert fitted.frontier[0].peak <= ladder.points[0].peak
    fitted.step(batch)
    with pytest.raises(AssertionError, match="measured again"):
        headroom.fit(model, batch, budget=budget, **how)


def test_a_ladder_of_something_else_is_refused():
    model, batch = net(60)
    ladder = headroom.ladder(model, batch, loss=mse_loss)
    for changed, named in (
        ({"loss": nn.functional.l1_loss}, "loss or forward"),
        ({"allow": ("8bit",)}, "allow"),
        ({"max_grad_norm": 1.0}, "max_grad_norm"),
        ({"optimizer": torch.optim.SGD}, "optimizer, another allow"),
        ({"amp": torch.bfloat16}, "amp"),
        ({"prefetch": True}, "prefetch"),
    ):
        with pytest.raises(ValueError, match=f"ladder was made with another {named}"):
            options = {"loss": mse_loss, **changed}
            headroom.fit(model, batch, budget="1 GiB", ladder=ladder, **options)
    with pytest.raises(ValueError, match="another sample_batch"):
        other = (batch[0].clone(), batch[1])
        headroom.fit(model, other, budget="1 GiB", ladder=ladder, loss=mse_loss)


def test_what_a_notebook_shows_is_the_table():
    model, batch = net()
    fitted = headroom.fit(model, batch, budget="1 GiB", loss=mse_loss, dry_run=True)
    assert repr(fitted) == str(fitted) and "Net in 1.00 GiB, not applied" in str(fitted)
    ladder = headroom.ladder(model, batch, loss=mse_loss)
    assert repr(ladder) == str(ladder)


def test_weights_in_16_bits_that_the_model_does_not_run_with_are_left_out():
    """Its batch is float32, which a linear layer in bfloat16 refuses."""
    model, batch = net()
    fitted = headroom.fit(
        model, batch, budget="1 GiB", loss=mse_loss, allow=("bf16",), dry_run=True
    )
    assert fitted.choice.weights == "given"
    assert any("does not run with bf16 weights: mat1" in note for note in fitted.notes)


def test_changes_of_a_model_that_kept_less_add_up():
    model, batch = net(1201)
    headroom.patch(model, save="L5")
    fitted = headroom.fit(model, batch, budget="1 GiB", loss=mse_loss, dry_run=True)
    first = fitted.changes[0]
    assert (first.technique, first.before, first.after) == ("levels", "as given", "3 L0")
    assert first.bytes > 0
    rest = sum(change.bytes for change in fitted.changes)
    assert fitted.before_peak + rest == fitted.predicted_peak


def test_of_points_that_take_the_same_the_fastest_stays():
    """A point is compared with the first of those about as large, so that small steps add up."""
    sizes = [10_000, 10_001, 10_015, 10_030, 10_045, 20_000]
    points = [headroom.fitting.FrontierPoint(s, 9.0 - n, None) for n, s in enumerate(sizes)]
    assert [point.peak for point in distinct(points)] == [10_015, 10_045, 20_000]


def test_neighbors_differ_by_something():
    model, batch = net(120)
    fitted = headroom.fit(model, batch, budget="1 GiB", loss=mse_loss, dry_run=True)
    peak, seconds = fitted.predicted_peak, fitted.predicted_seconds
    point = headroom.fitting.FrontierPoint
    near = [point(peak - 9, seconds, None), point(peak + 99, 0.999 * seconds, None)]
    far = [point(peak // 2, 2 * seconds, None), point(2 * peak, seconds / 2, None)]
    fitted.frontier = [far[0], *near, far[1]]
    assert (fitted.next_down, fitted.next_up) == tuple(far)
    fitted.frontier = near
    assert fitted.next_down is None and fitted.next_up is None
    assert "next leaner: none was found" in str(fitted)


class Words(nn.Module):
    """A language model of an LSTM, and its loss."""

    def __init__(self, width=40):
        super().__init__()
        self.embed, self.head = nn.Embedding(200, width), nn.Linear(width, 200)
        self.layers = nn.LSTM(width, width, 2, batch_first=True)

    def forward(self, tokens, labels):
        logits = self.head(self.layers(self.embed(tokens))[0])
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def test_a_model_of_lstms_stays_within_its_budget():
    torch.manual_seed(0)
    model, tokens = Words(), torch.randint(200, (8, 21))
    batch = {"tokens": tokens, "labels": tokens}
    budget = int(0.7 * headroom.plan(model, torch.optim.AdamW, batch).peak_bytes)
    fitted = headroom.fit(model, batch, budget=budget)
    with headroom.memory.track(model, fitted.optimizer, batch=batch, stacks=False) as tracked:
        for _ in range(2):
            fitted.step(batch)
    assert tracked.peak_bytes <= budget
    assert tracked.peak_bytes == pytest.approx(fitted.predicted_peak, rel=0.002)
    assert not any("LSTM" in note for note in fitted.notes)


def test_bytes_by_kind_of_a_ladder_are_near_those_of_plans():
    """They add up to the peak. What stands for the whole step is as in a plan of its own; what
    comes and goes is so but for a quarter of the peak."""
    torch.manual_seed(0)
    model, batch = Net(48, 4), (torch.randn(480, 48), torch.randn(480, 48))
    ladder = headroom.ladder(model, batch, loss=mse_loss, allow=("8bit",))
    rungs = ladder.rungs(8)
    search = ladder._search_for(ladder._search)
    assert {r["bytes"]["parameters"] for r in ladder.to_json()["rungs"]} == {
        sum(p.nbytes for p in model.parameters())
    }
    for rung in rungs:
        assert sum(rung.bytes.values()) == rung.peak
        if rung.choice is None:
            plan = headroom.plan(model, torch.optim.AdamW, batch, loss=mse_loss)
        else:
            plan = search.candidates.plan(rung.choice)
        for kind, size in plan.peak_by_kind.items():
            moves = kind in ("gradients", "activations", "temporaries")
            near = pytest.approx(size, abs=(0.25 if moves else 0.002) * rung.peak)
            assert rung.bytes.get(kind, 0) == near, (kind, rung)
