"""``headroom.forecast``: the largest steps and those over a budget, against a plan of each step and
the real counter."""

import importlib
import os
import random
from dataclasses import dataclass

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom.memory import track
from headroom.planning import PlanError
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 64


class Attending(nn.Module):
    """Attention whose scores are kept, so that memory has the square of the length."""

    def __init__(self, switch=10**9):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 48)
        self.wide, self.head = nn.Linear(16, 64), nn.Linear(16, VOCABULARY)
        self.switch = switch

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v
        if tokens.shape[1] > self.switch:  # another step, with other allocations
            x = x + self.wide(x).square().mean(-1, keepdim=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def collate(lengths):
    tokens = torch.ones(len(lengths), max(lengths), dtype=torch.int64)
    return {"tokens": tokens, "labels": tokens.clone()}


def some_lengths(count, rows, most=96, seed=3):
    draws = random.Random(seed)
    return [[draws.randint(2, most) for _ in range(draws.choice(rows))] for _ in range(count)]


def foretold(lengths, model=None, optimizer=torch.optim.AdamW, **options):
    model = Attending() if model is None else model
    return headroom.forecast(
        model, optimizer, lengths, **{"collate": collate, "progress": False} | options
    )


def planned(lengths, model, device="cpu"):
    """Returns the peak and all bytes of each step, by a plan of each size."""
    plans, found = {}, []
    for step, given in enumerate(lengths):
        size = len(given), max(given)
        if size not in plans:
            plans[size] = headroom.plan(model, torch.optim.AdamW, collate(given), device=device)
        plan = plans[size]
        peak = plan.steady if step else plan.first_step
        found.append((peak + plan.device_share.bytes, peak))
    return found


@pytest.fixture
def few(monkeypatch):
    """The steps that are planned exactly are fewer, so that tests make fewer plans."""
    monkeypatch.setattr(importlib.import_module("headroom.data.forecast"), "LARGEST", 4)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("rows", [(4,), (1, 3)], ids=["one size", "two sizes"])
def test_the_largest_steps_are_as_their_own_plans(device, rows, few):
    lengths = some_lengths(16, rows)
    truth = planned(lengths, Attending(), device)
    found = foretold(lengths, device=device)
    assert 4 <= sum(found.is_exact) and found.plans < 9
    assert found.worst(4) == sorted(range(16), key=truth.__getitem__, reverse=True)[:4]
    assert all(found.is_exact[step] for step in found.worst(4))
    for step, need in enumerate(zip(found.total_bytes, found.peak_bytes)):
        assert need == truth[step] if found.is_exact[step] else need >= truth[step]


@pytest.mark.parametrize("rows", [(4,), (1, 3)], ids=["one size", "two sizes"])
def test_it_is_known_of_each_step_whether_it_fits(rows, few):
    lengths = some_lengths(16, rows)
    truth = planned(lengths, Attending())
    budget = sorted(total for total, _ in truth)[7]
    found = foretold(lengths, budget=budget)
    assert found.over == [step for step, (total, _) in enumerate(truth) if total > budget]
    assert 4 < len(found.over) <= 8 and found.plans < 12


def test_few_plans_tell_which_of_many_steps_do_not_fit(few):
    lengths = [[n] for n in range(2, 202)]
    limit = headroom.plan(Attending(), torch.optim.AdamW, collate([77])).steady
    found = foretold(lengths, budget=limit)
    assert found.over == [*range(76, 200)]
    assert found.plans <= 4 + 8  # 196 others are halved
    assert found.sizes[7] == {"tokens[1]": 9}


def test_a_longer_batch_of_fewer_rows_is_no_bound():
    lengths = [[40] * 8, [90], [4] * 3, [80]]
    found = foretold(lengths, budget="1 GiB")
    truth = planned(lengths, Attending())
    assert found.is_exact == [True] * 4
    assert [*zip(found.total_bytes, found.peak_bytes)] == truth


@pytest.mark.slow
def test_a_length_that_changes_the_step_to_a_larger_one_is_no_hindrance(few):
    lengths = [[n] for n in range(2, 160)]
    model = Attending(switch=77)
    plans = {n: headroom.plan(model, torch.optim.AdamW, collate([n])).steady for n in (77, 78)}
    assert plans[78] > 1.02 * plans[77]
    found = foretold(lengths, model, budget=(plans[77] + plans[78]) // 2)
    assert found.over == [*range(76, 158)]


def test_the_worst_steps_are_those_that_take_the_most(few):
    model = Attending()
    optimizer = torch.optim.AdamW(model.parameters())
    lengths = some_lengths(30, (2, 6))
    found = headroom.forecast(model, optimizer, lengths, collate=collate, progress=False)
    measured = {}
    worst = found.worst(4)
    for step in [0, *worst, *found.worst(30)[-3:]]:
        batch = found.batch(step)
        with track(model, optimizer, batch=batch, stacks=False) as tracked:
            model(**batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        measured[step] = tracked.peak_bytes
        if found.is_exact[step]:
            assert found.peak_bytes[step] == pytest.approx(tracked.peak_bytes, rel=0.001)
        else:
            assert found.peak_bytes[step] >= tracked.peak_bytes
    assert worst == sorted(worst, key=lambda step: -measured[step])


class Rows(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, at):
        return torch.randn(3 + at), torch.tensor(0.0)


def padded(samples):
    x = nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
    return x, torch.stack([y for _, y in samples])


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(1, 128)

    def forward(self, x):
        return self.scale(x[..., None]).relu().mean((1, 2))


@pytest.mark.parametrize("own", [False, True], ids=["the default generator", "its own"])
def test_a_loader_is_foretold_in_the_order_of_its_next_epoch(own):
    generator = torch.Generator().manual_seed(5) if own else None
    loader = DataLoader(Rows(), 4, shuffle=True, collate_fn=padded, generator=generator)
    torch.manual_seed(11)
    found = foretold(loader, Mean(), None, collate=None, loss=F.mse_loss)
    real = [x.shape[1] for x, _ in loader]
    assert [sizes["batch[0][1]"] for sizes in found.sizes] == real and len(set(real)) > 1


def test_sizes_that_are_equal_in_every_batch_are_no_sizes_of_their_own():
    def packed(lengths):
        ends = torch.tensor([0, *lengths]).cumsum(0)
        return {"tokens": torch.ones(1, sum(lengths), dtype=torch.int64), "ends": ends,
                "labels": torch.ones(1, sum(lengths), dtype=torch.int64)}  # fmt: skip

    found = foretold(
        [[5, 6], [9, 1], [30, 4], [50, 50], [7, 90], [3, 3]],
        collate=packed,
        forward=lambda model, batch: model(batch["tokens"], batch["labels"]),
    )
    assert found.sizes[2] == {"tokens[1]": 34} and found.plans == 6


@pytest.mark.slow
def test_each_way_out_lets_every_step_fit():
    lengths = some_lengths(30, (4,))
    model = Attending()
    free = foretold(lengths, model)
    budget = (free.total_bytes[free.worst(1)[0]] + min(free.total_bytes)) // 2
    found = foretold(lengths, model, budget=budget)
    assert found.over and not found.fits and found.worst(1)[0] in found.over
    assert {*found.over} == {
        n for n, (total, _) in enumerate(planned(lengths, model)) if total > budget
    }
    ways = {way.name.partition(" ")[2] or way.name: way for way in found.ways_out()}
    assert all(way.total_bytes <= budget for way in ways.values())
    limit = next(way for name, way in ways.items() if "of at most" in name)
    most = int(limit.name.rpartition(" ")[2])
    for cut, fits in ((most, True), (most + 1, False)):
        again = foretold([[min(n, cut) for n in one] for one in lengths], model, budget=budget)
        assert again.fits is fits
    assert "micro-batches" in ways
    parts = int(ways["micro-batches"].name.partition(" ")[0])
    small = [collate([max(one)] * (4 // parts)) for one in lengths]
    again = foretold(small, model, collate=None, budget=budget, accumulation=parts)
    assert again.fits


def test_a_run_that_fits_needs_no_way_out():
    found = foretold([4, 8, 12], budget="1 GiB")
    assert found.fits and found.over == [] and found.ways_out() == []
    with pytest.raises(ValueError, match="give budget= to headroom.forecast"):
        foretold([4, 8]).ways_out()


def test_the_table_and_the_picture(tmp_path, few):
    found = foretold(some_lengths(20, (2,)), budget=200_000)
    text = str(found)
    assert "20 steps: at most" in text and "of a budget of 195 KiB" in text
    assert f"{found.plans} plans: {sum(found.is_exact)} steps exact" in text
    assert f"{found.worst(1)[0]:>8}" in text and all(len(line) <= 80 for line in text.splitlines())
    pytest.importorskip("matplotlib")
    found.draw(tmp_path / "forecast.png")
    assert (tmp_path / "forecast.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("made", [torch.tensor, lambda x: torch.tensor(x).numpy()])
def test_lengths_may_be_numbers_of_tensors_and_arrays(made):
    want = foretold([4, 9, 5])
    assert foretold(made([4, 9, 5])).peak_bytes == want.peak_bytes
    assert foretold([made([4]), made([9]), made(5)]).peak_bytes == want.peak_bytes


class Short(Attending):
    def forward(self, tokens, labels):
        if tokens.shape[1] > 40:
            raise ValueError("at most 40 positions")
        return super().forward(tokens, labels)


def test_an_error_says_of_which_step_it_is():
    with pytest.raises(PlanError, match=r"(?s)^step 2, of tokens\[1\] 50: .*at most 40 positions"):
        foretold([5, 6, 50, 7], Short())


def test_a_limit_between_few_lengths_is_planned():
    free = foretold([4, 200])
    budget = free.total_bytes[0] + (free.total_bytes[1] - free.total_bytes[0]) // 3
    limit = foretold([4, 200], budget=budget).ways_out()[0]
    most = int(limit.name.rpartition(" ")[2])
    assert foretold([4, most], budget=budget).fits
    assert not foretold([4, most + 1], budget=budget).fits
    plan = headroom.plan(Attending(), torch.optim.AdamW, collate([most]))
    assert limit.total_bytes == plan.total_bytes


@pytest.mark.slow
def test_micro_batches_are_a_way_out_only_if_they_are_one_for_all_steps():
    """A step of one sequence, which cannot be cut, does not fit either."""
    lengths = [[40] * 64, [12] * 4, [220]]
    free = foretold(lengths)
    assert free.worst(2) == [0, 2]
    budget = (free.total_bytes[1] + free.total_bytes[2]) // 2
    found = foretold(lengths, budget=budget)
    assert found.over == [0, 2]
    assert not [way for way in found.ways_out() if "micro-batches" in way.name]


def test_batches_of_workers_do_not_hold_files_open():
    loader = DataLoader(Rows(), 1, num_workers=1, collate_fn=padded)
    before = len(os.listdir("/proc/self/fd"))
    found = foretold(loader, Mean(), None, collate=None, loss=F.mse_loss)
    assert len({*map(str, found.sizes)}) == 24
    assert len(os.listdir("/proc/self/fd")) < before + 10


@dataclass
class Pair:
    tokens: torch.Tensor
    labels: torch.Tensor


def test_sizes_in_a_dataclass_have_names_of_their_own():
    def pair(lengths):
        rows, length = len(lengths), max(lengths)
        tokens = torch.ones(rows, length, dtype=torch.int64)
        return Pair(tokens, torch.ones(length, dtype=torch.int64))

    found = foretold(
        [[4, 5], [6], [7, 9]],
        collate=pair,
        forward=lambda model, batch: model(batch.tokens, batch.labels.expand_as(batch.tokens)),
    )
    assert found.sizes[2] == {"batch.0[0]": 2, "batch.0[1]": 9}
    assert found.peak_bytes[2] == found.plan(2).steady


@pytest.mark.parametrize(
    "lengths, options, error, words",
    [
        ([], {}, ValueError, "lengths is empty"),
        ([4, 0], {}, ValueError, r"lengths\[1\] is \[0\]"),
        ([4, 2.5], {}, ValueError, r"lengths\[1\] is 2.5"),
        ([4, []], {}, ValueError, r"lengths\[1\] is \[\]"),
        (Rows(), {}, TypeError, "lengths is a Rows: give a DataLoader"),
        ([4], {"budget": "4 apples"}, ValueError, "budget is '4 apples'"),
        ([4], {"budgets": 1}, TypeError, "budgets"),
    ],
)
def test_refuses(lengths, options, error, words):
    with pytest.raises(error, match=words):
        foretold(lengths, **options)
