"""headroom.ladder: the points that are shown, the table, the file and the picture."""

import gc
import itertools
import random
import weakref
from types import SimpleNamespace

import headroom
import pytest
import torch
from headroom._core import drawing
from headroom.fitting import Choice
from headroom.fitting.frontier_chart import Series, draw_frontier, telling
from headroom.fitting.ladder import Ladder, Rung, distinct
from headroom.reports import read
from torch.optim import AdamW, RMSprop

from helpers import fitted_models

MIB = 1 << 20


def frontier(count, seed=0):
    draw = random.Random(seed)
    peaks = sorted(draw.sample(range(40 * MIB, 200 * MIB), count))
    seconds = sorted((draw.uniform(0.2, 0.5) for _ in range(count)), reverse=True)
    return [
        Rung(f"{n} L5, {count - n} L2, 2 micro-batches, 8-bit moments", peak, second)
        for n, (peak, second) in enumerate(zip(peaks, seconds))
    ]


def ladder(count):
    return Ladder("GPT", "cpu", Rung("as it is", 220 * MIB, 0.25), frontier(count))


def test_a_corner_of_the_frontier_is_telling():
    """Of points on two straight lines, the corner is the first to be chosen besides the ends."""
    steep = [Rung("", 10 + n, 100.0 - 8 * n) for n in range(11)]
    flat = [Rung("", 20 + 10 * n, 20.0 - n) for n in range(1, 12)]
    points = steep + flat
    assert telling(points, 3) == [points[0], steep[-1], points[-1]]
    assert telling(points, 2) == [points[0], points[-1]]
    assert telling(points, 100) == points


def test_points_that_are_hardly_faster_are_left_out():
    """Each is compared with the one before it that stayed, so that small steps add up."""
    points = [Rung("", 10 + n, second) for n, second in enumerate([1, 0.999, 0.9975, 0.5, 0.4999])]
    assert distinct(points) == [points[0], points[2], points[3]]


@pytest.mark.parametrize("count", [1, 2, 14, 15, 777])
def test_points_that_are_shown_are_of_the_frontier_in_order(count):
    points = frontier(count)
    shown = telling(points, 14)
    assert len(shown) == min(count, 14) and len(set(shown)) == len(shown)
    assert [point for point in points if point in set(shown)] == shown
    assert shown[0] == points[0] and shown[-1] == points[-1]


@pytest.mark.parametrize("count", [1, 3, 500])
def test_table_is_narrow_and_short(count):
    found = ladder(count)
    lines = str(found).splitlines()
    assert len(lines) == 2 + 1 + min(count, 14) and max(map(len, lines)) <= 80
    assert "100%" in lines[2] and "220 MiB" in lines[2] and "250.0" in lines[2]
    share = found.points[0].peak / found.first.peak
    assert f"{100 * share:.0f}%" in lines[-1]  # the leanest comes last


def test_report_opens_the_file(tmp_path):
    found = ladder(300)
    found.save(tmp_path / "ladder.json")
    (part,) = read(tmp_path / "ladder.json")
    rungs = part.summary["rungs"]
    assert part.kind == "ladder" and part.summary["peak"] == "predicted peak"
    assert rungs[0]["title"] == "as it is" and rungs[0]["step_seconds"] == 0.25
    assert rungs[1]["peak_bytes"] == found.points[-1].peak
    assert rungs[-1]["peak_bytes"] == found.points[0].peak


@pytest.fixture
def figures(monkeypatch):
    """The figures that are written."""
    pytest.importorskip("matplotlib")
    found = []
    monkeypatch.setattr(drawing, "save_png", lambda figure, path: found.append(figure))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_labels_cover_neither_marks_nor_each_other(figures, seed):
    draw = random.Random(seed)
    points = [
        (draw.randrange(MIB, 9 * MIB), draw.uniform(0.1, 0.3), "a label of this length")
        for _ in range(30)
    ]
    draw_frontier("unused", "title", [Series("some", points[:15], True), Series("$", points[15:])])
    (axes,) = figures[0].axes
    renderer = figures[0].canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for text in axes.texts]
    assert 5 < len(boxes) < 30  # there is no room for all
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    marks = axes.transData.transform([(p / MIB, 1e3 * s) for p, s, _ in points])
    assert not any(box.contains(x, y) for box in boxes for x, y in marks)


def test_picture_is_a_png_with_labels(tmp_path, figures, monkeypatch):
    found = ladder(40)
    found.png("unused")
    words = [text.get_text() for text in figures[0].axes[0].texts]
    shared = ", 2 micro-batches, 8-bit moments"  # by all, and so in the legend alone
    first = found.points[0].title.removesuffix(shared)
    assert "as it is" in words and first in words and len(words) <= 7
    legend = [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()]
    assert legend == ["headroom.fit" + shared, "now"]
    assert str(found).splitlines()[0].endswith("14 shown, all with" + shared[1:])
    monkeypatch.undo()
    found.png(tmp_path / "ladder.png")
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no point"):
        draw_frontier(tmp_path / "none.png", "title", [Series("none", [])])
    assert not list(tmp_path.iterdir())


class Repeated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(30, 70), torch.nn.GELU(), torch.nn.Linear(70, 30))
            for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def test_ladder_of_a_model_changes_nothing():
    """The points are a frontier, the leanest takes less than the model as it is, which a plan says,
    and weights, gradients and random numbers stay."""
    torch.manual_seed(0)
    model, batch = Repeated(), (torch.randn(90, 30), torch.randn(90, 30))
    weights = [p.detach().clone() for p in model.parameters()]
    state, loss = torch.get_rng_state(), torch.nn.functional.mse_loss
    found = headroom.ladder(model, batch, loss=loss)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), weights))
    assert all(p.grad is None for p in model.parameters())
    assert all("forward" not in vars(block) for block in model.blocks)
    plan = headroom.plan(model, torch.optim.AdamW, batch, loss=loss)
    assert found.first.peak == plan.total_bytes
    pairs = list(itertools.pairwise(found.points))
    assert all(a.peak < b.peak and a.seconds > b.seconds for a, b in pairs)
    assert found.points[0].peak < found.first.peak
    assert str(found).splitlines()[2].startswith("as it is")


def test_ladder_refuses_what_fit_refuses():
    model, batch = Repeated(), (torch.zeros(6, 30), torch.zeros(6, 30))
    with pytest.raises(ValueError, match="allow has 'half'"):
        headroom.ladder(model, batch, allow=("half",))
    with pytest.raises(ValueError, match="eval"):
        headroom.ladder(model.eval(), batch)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 5])
def test_the_bytes_of_parts_are_those_of_their_plans(count):
    torch.manual_seed(0)
    ids = torch.randint(fitted_models.VOCAB, (10, fitted_models.TOKENS))
    batch = {"ids": ids, "labels": ids}
    search = headroom.ladder(fitted_models.ours(), batch)._search
    found = next(c for c in search.every() if c.choice.micro_batches == count)
    for point in (found.points[0], found.points[len(found.points) // 2], found.points[-1]):
        plan = search.candidates.plan(found.choice_of(point))
        # What does not shrink, such as the states of generators, is much of so small a model.
        assert point.peak == pytest.approx(plan.total_bytes, rel=0.015)


@pytest.fixture(scope="module")
def made():
    """A model whose ladder was made with optimizers of its own, by the class of these."""
    torch.manual_seed(0)
    model, batch = Repeated(), torch.randn(41, 30)

    def loss(output):
        return output.square().mean()

    def optimizer(cls):
        return cls(model.parameters(), lr=1e-3)

    def begun(cls):
        found = optimizer(cls)
        loss(model(batch)).backward()
        found.step()
        found.zero_grad()
        return found

    ladders = {
        cls: headroom.ladder(model, batch, loss=loss, optimizer=optimizer(cls))
        for cls in (RMSprop, AdamW)
    }

    def fit(budget="1 GiB", **options):
        return headroom.fit(model, batch, budget=budget, loss=loss, **options)

    return SimpleNamespace(ladders=ladders, optimizer=optimizer, begun=begun, fit=fit)


def test_the_optimizer_of_a_call_with_a_ladder_is_the_one_that_it_is_given(made):
    """With the state that it has, and not another one that the ladder was made with."""
    given = made.begun(RMSprop)
    fitted = made.fit(optimizer=given, ladder=made.ladders[RMSprop])
    assert fitted.optimizer is given and len(given.state) == 12
    fitted.undo()


def test_each_call_with_a_ladder_replaces_its_own_optimizer(made):
    ladder = made.ladders[AdamW]
    choice = {"optimizer": "headroom"}
    first, second = (
        made.fit(optimizer=made.optimizer(AdamW), ladder=ladder, choice=choice, dry_run=True)
        for _ in range(2)
    )
    assert type(first.optimizer) is headroom.optim.AdamW
    assert first.optimizer is not second.optimizer
    with pytest.raises(ValueError, match="before its optimizer had begun to train"):
        made.fit(optimizer=made.begun(AdamW), ladder=ladder)
    other = RMSprop(first.model.parameters(), lr=1e-3)
    with pytest.raises(ValueError, match="ladder was made with another optimizer"):
        made.fit(optimizer=other, ladder=ladder)


def test_a_call_that_is_given_a_choice_leaves_the_ladder_as_it_is(made):
    ladder = made.ladders[RMSprop]
    options = {"optimizer": made.optimizer(RMSprop), "ladder": ladder, "dry_run": True}
    budget = int(1.02 * ladder.points[0].peak) + (64 << 10)
    before = made.fit(budget, **options)
    given = made.fit(choice={}, **options)
    assert given.choice == Choice() and given.blocks == []
    after = made.fit(budget, **options)
    names = [f"blocks.{number}" for number in range(3)]
    assert after.blocks == before.blocks == names and len(after.choice.levels) == 3
    del options["dry_run"]
    fitted = made.fit(budget, **options)
    fitted.set_levels(["L5", "L0", "L5"])
    assert ["forward" in vars(block) for block in fitted.model.blocks] == [True, False, True]
    fitted.undo()


def test_a_ladder_keeps_no_optimizer_of_a_fit():
    """Its state would stay on the device. A plan that a ladder has made still gives advice."""
    model, batch, kept = Repeated(), torch.randn(41, 30), []
    options = {"loss": lambda output: output.square().mean(), "allow": ("8bit", "bf16")}
    found = headroom.ladder(model, batch, **options)
    for point in (found.points[0], found.points[-1]):
        fitted = headroom.fit(model, batch, budget=int(1.2 * point.peak), ladder=found, **options)
        assert all(advice.plan.peak_bytes for advice in fitted.plan.advice(1))
        fitted.step(batch)
        kept.append(weakref.ref(fitted.optimizer))
        fitted.undo()
        del fitted
    gc.collect()
    assert [optimizer() for optimizer in kept] == [None, None]
