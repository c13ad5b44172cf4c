"""``host_budget``: state and activations on the host, under two budgets at once."""

import itertools
import json
import random
from dataclasses import replace

import headroom
import pytest
import torch
from headroom.fitting import Choice, DoesNotFit
from headroom.fitting.costs import measure
from headroom.fitting.costs.block_costs import BlockCosts, LevelCost, Measured
from headroom.fitting.costs.on_host import hosted_seconds, streamed
from headroom.fitting.ranks import RankError
from headroom.fitting.search import candidates
from headroom.fitting.search.techniques import techniques_of
from headroom.host import HostMemoryError, arena, default_arena, trim
from headroom.host.engine import Inline
from headroom.host.schedule import Link, streamed_step
from headroom.nn import Transformer, TransformerConfig
from headroom.param_states.paging import paged
from headroom.step.pass_seconds import PassSeconds
from headroom.techniques import offload
from headroom.techniques import streamed as streaming

from helpers.fitting import cross_entropy, step_of

MIB = 1 << 20


def model_of(layers=4):
    """Blocks whose tensors are large enough to leave."""
    torch.manual_seed(0)
    config = TransformerConfig(vocab_size=96, hidden_size=64, layers=layers, heads=4, features=172)
    return Transformer(config)


def batch_of(rows=8):
    tokens = torch.randint(0, 96, (rows, 65), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:].contiguous()


@pytest.fixture
def empty_arena(monkeypatch):
    """The arena of the process, without what other tests have left there."""
    trim()
    monkeypatch.setattr(arena, "_default", headroom.HostArena())
    yield default_arena()
    trim()


def seconds_of(levels):
    """Returns costs of levels with the seconds of a machine that computes each step from one level
    to the next in 0.4 ms, and copies 10 GB/s."""
    own = [name for name in levels if not name.endswith("@host")]
    again = {name: 4e-4 * own.index(name.removesuffix("@host")) for name in levels}
    return {
        name: replace(
            cost,
            forward_seconds=2e-3 + cost.moved / 10e9,
            backward_seconds=4e-3 + again[name] + cost.moved / 10e9,
        )
        for name, cost in levels.items()
    }


@pytest.fixture(scope="module", autouse=True)
def known_seconds():
    """Stands for a machine whose times are known: which trades there are depends on them."""

    def measured(step, **options):
        found = measure.measure_blocks(step, repeats=0, **options)
        blocks = [replace(block, levels=seconds_of(block.levels)) for block in found.blocks]
        alone = sum(block.levels[block.leanest].seconds for block in blocks)
        return replace(found, blocks=blocks, whole=PassSeconds(alone, 2e-3), seconds_of_rest=2e-3)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(candidates, "measure_blocks", measured)
        patched.setattr(candidates, "optimizer_seconds", lambda *args, **options: 2e-3)
        patched.setattr(
            candidates, "seconds_at_leanest", lambda *args, **options: PassSeconds(args[1], 1e-3)
        )
        yield


@pytest.fixture(scope="module")
def trained():
    """A model, its batch, and all trades that it has."""
    model, batch = model_of(), batch_of()
    ladder = headroom.ladder(model, batch, loss=cross_entropy, host_budget="1 GiB")
    return model, batch, ladder


def fit(trained, budget, host_budget, **options):
    model, batch, ladder = trained
    return headroom.fit(
        model, batch, budget=budget, host_budget=host_budget, loss=cross_entropy, ladder=ladder,
        dry_run=True, **options,
    )  # fmt: skip


def is_on_host(choice):
    return bool(choice.offload or choice.weights_host) or any(
        level.endswith("@host") for level in choice.levels
    )


# ---- the search ---------------------------------------------------------------------------------


def test_nothing_leaves_the_device_without_a_host_budget():
    ladder = headroom.ladder(model_of(2), batch_of(), loss=cross_entropy)
    assert not any(is_on_host(point.choice) or point.host for point in ladder.points)
    assert ladder.to_json()["rungs"][1]["host_bytes"] == 0


def test_the_host_makes_room_for_what_does_not_fit_otherwise(trained):
    model, batch, ladder = trained
    bare = headroom.ladder(model, batch, loss=cross_entropy)
    assert ladder.points[0].peak < 0.85 * bare.points[0].peak
    assert any(point.choice.offload for point in ladder.points)
    assert any("@host" in level for point in ladder.points for level in point.choice.levels)
    # What blocks keep last is wanted back at once.
    assert not any("@host" in point.choice.levels[-1] for point in ladder.points)
    with pytest.raises(ValueError, match="ladder was made with another host_budget"):
        headroom.fit(model, batch, budget="1 GiB", loss=cross_entropy, ladder=ladder)


@pytest.mark.parametrize(
    "count, seed", [(5, 29), pytest.param(25, 1, marks=[pytest.mark.slow, pytest.mark.release])]
)
def test_both_peaks_are_within_their_budgets(trained, count, seed):
    rng = random.Random(seed)
    points = trained[2].points
    least, most = points[0].peak, points[-1].peak
    host = max(point.host for point in points)
    fits = 0
    for _ in range(count):
        budget = rng.randrange(int(0.9 * least), int(1.1 * most))
        host_budget = rng.choice((0, rng.randrange(1, int(1.2 * host))))
        room = 0.98 * budget - 50_000
        try:
            fitted = fit(trained, budget, host_budget)
        except DoesNotFit as error:
            assert error.least > room
            assert not any(p.peak <= room and p.host <= host_budget for p in points)
            continue
        fits += 1
        assert fitted.predicted_peak == fitted.plan.total_bytes <= budget
        assert fitted.predicted_host == fitted.plan.host_peak_bytes <= host_budget
        assert is_on_host(fitted.choice) == (fitted.predicted_host > 0)
    assert fits > count // 2


def test_a_larger_host_budget_is_never_slower_or_larger(trained):
    """Whatever takes some bytes and seconds, with more room on the host there is something that
    takes no more of either."""
    search = trained[2]._search
    host = max(point.host for point in trained[2].points)
    before = []
    for room in (0, host // 50, host // 9, host // 4, host // 2, host - 1, host, 2 * host):
        wider = search.with_techniques(search.candidates.techniques, None)
        wider.candidates.host_room = room
        after = wider.frontier()
        assert all(point.host <= room for point in after)
        for point in before:
            assert any(p.peak <= point.peak and p.seconds <= point.seconds for p in after)
        before = after


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_choice_for_a_larger_host_budget_is_not_slower(trained, share):
    least, most = trained[2].points[0].peak, trained[2].points[-1].peak
    budget = round(least + share * (most - least))
    seconds = []
    for host_budget in ("64 KiB", "2 MiB", "4 MiB", "8 MiB", "64 MiB"):
        try:
            seconds.append(fit(trained, budget, host_budget).predicted_seconds)
        except DoesNotFit:
            assert not seconds
    assert len(seconds) > 1 and all(a >= b for a, b in itertools.pairwise(seconds))


# ---- training -----------------------------------------------------------------------------------


def steps(fitted, batch, count=3):
    return [fitted.step(batch) for _ in range(count)]


CHOICES = {
    "state": {"offload": "state"},
    "some of it": {"offload": "state", "state_budget": 700_000},
    "released": {"offload": "state", "release": True},
    "weights": {"weights_host": 3, "levels": ["L5", "L2", "L5", "L0"]},
    "weights and state": {
        "weights_host": 4, "offload": "state", "release": True, "levels": ["L1@host", *["L5"] * 3]
    },
    "blocks": {"levels": ["L2@host", "L0@host", "L5@host", "L2"]},
    "both, in parts": {
        "offload": "state", "micro_batches": 2, "levels": ["L1@host", "L1@host", "L3", "L0"]
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_bits_are_those_of_the_same_training_without(empty_arena, name):
    choice = {"optimizer": "headroom"} | CHOICES[name]
    batch, (model, other) = batch_of(), (model_of(), model_of())
    fitted = headroom.fit(model, batch, budget="1 GiB", loss=cross_entropy, choice=choice)
    assert is_on_host(fitted.choice) and fitted.predicted_host > 100_000
    on_host = ("offload", "state_budget", "weights_host")
    bare = {key: value for key, value in choice.items() if key not in on_host}
    if "levels" in bare:
        bare["levels"] = [level[:2] for level in bare["levels"]]
    plain = headroom.fit(other, batch, budget="1 GiB", loss=cross_entropy, choice=bare)
    assert plain.predicted_host == 0
    assert torch.equal(torch.stack(steps(fitted, batch)), torch.stack(steps(plain, batch)))
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    # As planned, and as measured: the device within the tables and the like, the host exactly.
    assert abs(fitted.measured_peak - fitted.predicted_peak) <= 0.002 * fitted.predicted_peak
    assert fitted.measured_host == fitted.predicted_host
    assert f"{'on the host':>14}" in str(fitted).splitlines()[2]
    told = json.loads(json.dumps(fitted.to_json()))
    assert told["measured"]["host_bytes"] == fitted.predicted_host
    assert Choice.from_json(told["choice"]) == fitted.choice
    fitted.undo()
    assert fitted.optimizer._paging is None
    assert all(x.device.type == "cpu" and not arena.in_arena(x)
               for entry in fitted.optimizer.state.values() for x in entry.values())  # fmt: skip
    trim()
    assert empty_arena.bytes == 0


def test_fit_applies_what_it_finds(empty_arena, trained):
    """Also where the state is there already."""
    least = trained[2].points[0].peak
    model, batch = model_of(), batch_of()
    optimizer = headroom.optim.AdamW(model.parameters())
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    model.zero_grad()
    fitted = headroom.fit(
        model, batch, budget=int(1.2 * least), host_budget="1 GiB", loss=cross_entropy,
        optimizer=optimizer,
    )  # fmt: skip
    assert fitted.choice.offload and fitted.optimizer is optimizer
    assert optimizer.offload_handle.memory().host > 0
    steps(fitted, batch)
    assert fitted.measured_peak <= int(1.2 * least)
    assert fitted.measured_host == fitted.predicted_host <= fitted.host_budget == 1 << 30
    assert any(change.technique == "state" for change in fitted.changes)


def test_a_given_choice_needs_no_host_budget_and_keeps_to_one(empty_arena):
    model, batch = model_of(2), batch_of()
    choice = Choice(optimizer="headroom", offload="state")
    fitted = headroom.fit(
        model, batch, budget="1 GiB", loss=cross_entropy, choice=choice, dry_run=True
    )
    assert fitted.predicted_host > 0 and "state on the host" in str(fitted)
    with pytest.raises(DoesNotFit, match="on the host, and the host_budget leaves 1.00 KiB"):
        headroom.fit(
            model, batch, budget="1 GiB", loss=cross_entropy, choice=choice, host_budget=1024
        )
    with pytest.raises(ValueError, match="has offload='state', wanted one of ''"):
        headroom.fit(
            model, batch, budget="1 GiB", loss=cross_entropy, choice=choice.but(optimizer="given")
        )


def test_no_room_on_the_host_leaves_the_model_as_it_was(empty_arena, monkeypatch):
    model, batch = model_of(2), batch_of()
    optimizer = headroom.optim.AdamW(model.parameters())
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    before = [x.clone() for x in model.parameters()]
    empty_arena.budget = 1000
    with pytest.raises(HostMemoryError):
        headroom.fit(
            model, batch, budget="1 GiB", loss=cross_entropy, optimizer=optimizer,
            choice={"offload": "state", "levels": ["L3", "L3"]},
        )  # fmt: skip
    assert optimizer._paging is None and all(map(torch.equal, before, model.parameters()))
    assert {block.save for block in model.blocks} == {"L0"}


def test_the_optimizers_whose_state_can_leave():
    step = step_of(model_of(2), batch_of(), cross_entropy)

    def offloads(optimizer, **options):
        found = techniques_of(step.but(optimizer=optimizer), on_host=True, **options)
        return {choice.optimizer for choice in found.choices if choice.offload}

    params = list(step.model.parameters())
    assert offloads(torch.optim.AdamW(params)) == {"headroom"}
    assert offloads(headroom.optim.AdamW8bit(params)) == {"given"}
    assert offloads(torch.optim.SGD(params)) == set()
    assert offloads(headroom.optim.AdamW(params, offload="state")) == set()  # it has
    assert offloads(torch.optim.AdamW(params), allow=("adafactor",)) == {"headroom"}
    assert offloads(torch.optim.AdamW(params), only={"offload": ("",)}) == set()


def the_least_host_budget_counts(rank):
    model, batch = model_of(2), batch_of(2)
    with pytest.raises(RankError if rank else DoesNotFit, match="nothing trains the model within"):
        headroom.fit(
            model, batch, budget="1.8 MiB", loss=cross_entropy,
            host_budget=("1 GiB", "100 KiB")[rank],
        )  # fmt: skip
    fitted = headroom.fit(
        model, batch, budget="1.8 MiB", loss=cross_entropy, host_budget=("1 GiB", "900 MiB")[rank]
    )
    assert fitted.choice.offload and fitted.host_budget == ((1 << 30), 900 * MIB)[rank]


@pytest.mark.slow
def test_the_least_host_budget_of_the_ranks_counts(ranks):
    ranks(the_least_host_budget_counts)


@pytest.mark.parametrize(
    ("host_budget", "error"), [("much", ValueError), (-1, ValueError), ([], TypeError)]
)
def test_host_budgets_that_are_none(host_budget, error):
    with pytest.raises(error, match="host_budget"):
        headroom.fit(model_of(2), batch_of(), budget="1 GiB", host_budget=host_budget)


# ---- prices where copies run beside the computation ---------------------------------------------


class Asynchronous(Inline):
    is_asynchronous = True


def test_prices_of_copies_beside_the_computation(monkeypatch):
    """What a link of 1 GB/s has no time for, and the memory of what is on its way."""
    block = measure._Kind(0, None, None, ("L0", "L0@host"), torch.device("cpu"), count=4)
    cost = measure.LevelCost(5000, 70, 60, 6000, 0, 1e-6, 3e-6)
    stays, leaves = cost, measure.replace(cost, moved=4000, forward_seconds=9.0)
    monkeypatch.setattr(measure, "engine_of", lambda device: Asynchronous())
    found = []
    for rate in (1e9, 1e15):
        monkeypatch.setattr(
            measure, "measured_link", lambda device, rate=rate: Link(rate, rate, 0.0)
        )
        found.append(block._copied(leaves, stays))
    slow, quick = found
    assert (slow.held, slow.forward) == (1000, 10_000) and slow.moved == 4000
    assert (slow.backward, slow.backward_released) == (8070, 8060)
    assert slow.forward_seconds == quick.forward_seconds == 1e-6
    assert quick.backward_seconds == pytest.approx(3e-6, rel=1e-3)
    assert 4e-6 < slow.backward_seconds < 3e-6 + 8e-6
    # On the CPU a block by itself shows what copies take, which is never less than nothing.
    monkeypatch.undo()
    assert block._copied(leaves, stays) == leaves
    assert block._copied(measure.replace(stays, forward_seconds=0.0), stays) == stays


def test_the_price_of_a_paged_step(monkeypatch):
    model, batch = model_of(2), batch_of()
    monkeypatch.setattr(candidates, "engine_of", lambda device: Asynchronous())
    monkeypatch.setattr(paged, "engine_of", lambda device: Asynchronous())
    monkeypatch.setattr(paged, "measured_link", lambda device: Link(1e6, 1e6, 0.0))
    monkeypatch.setattr(candidates, "optimizer_seconds", lambda *args, **options: 1e-3)
    step = step_of(model, batch, cross_entropy, optimizer=torch.optim.AdamW(model.parameters()))
    made = candidates.Candidates(techniques_of(step, on_host=True), None)
    whole = Choice(optimizer="headroom", offload="state")
    host = made.paged(whole).host
    assert made._seconds_of_step(Choice(optimizer="headroom"), Measured()) == 1e-3
    found = made._seconds_of_step(whole, Measured())
    assert host / 1e6 < found < 1.5 * host / 1e6  # the pieces go up one after another
    budgets = sorted(c.state_budget for c in made.techniques.choices if c.offload)
    part = made._seconds_of_step(whole.but(state_budget=budgets[-1]), Measured())
    assert 1e-3 < part < 0.9 * found and budgets[0] == 0
    assert all(made.paged(whole.but(state_budget=budget)).host > 0 for budget in budgets)


@pytest.fixture
def slow_link(monkeypatch):
    """Stands for a device whose copies run beside what it computes, at 1 GB/s."""
    link = Link(1e9, 1e9, 0.0)
    for module in (offload, streaming, candidates, measure, paged):
        monkeypatch.setattr(module, "engine_of", lambda device: Asynchronous())
    for module in (candidates, measure, paged):
        monkeypatch.setattr(module, "measured_link", lambda device: link)
    return link


def test_what_the_host_can_do_for_a_device(slow_link):
    step = step_of(model_of(8), batch_of(), cross_entropy)
    step = step.but(optimizer=headroom.optim.AdamW8bit(step.model.parameters()))
    found = techniques_of(step, on_host=True).choices
    assert {choice.offload for choice in found} == {"", "state", "step"}
    assert {choice.weights_host for choice in found} == {0, 2, 4, 6, 8}
    assert not any(choice.weights_host and choice.state_budget for choice in found)
    assert not any(is_on_host(choice) for choice in techniques_of(step).choices)


def block_of(weights, gradients, forward=2.0, backward=3.0):
    cost = LevelCost(10, 70, 60, 50, 0, forward, backward)
    return BlockCosts("block", 0, {"L5": cost}, gradients, gradients, weights)


def test_the_bytes_and_seconds_of_weights_on_the_host():
    blocks = Measured([block_of(100, 40) for _ in range(4)])
    link = Link(50.0, 50.0, 0.0)  # a block's weights take as long as its forward pass
    found = streamed(blocks, 3, link)
    assert found.device == 2 * 100 - 3 * 100  # two slots
    assert (found.gradients, found.host) == (3 * 40, 3 * 140)
    # The first fetch is waited for, and so is the one that the last block leaves no time for.
    assert found.seconds == streamed_step([100] * 3 + [0], [40] * 3 + [0], [2.0] * 4, [3.0] * 4,
                                          link).exposed >= 2.0  # fmt: skip
    first, *_, last = found.measured.blocks
    assert first.levels["L5"].backward == 60 and first.gradients == 0
    assert last == blocks.blocks[-1]
    inline = streamed(blocks, 3, link._replace(is_asynchronous=False))
    assert inline.device == 100 - 300
    # The backward pass finds the weights of the last of them where they are.
    assert inline.seconds == pytest.approx((300 + 200 + 120) / 50)
    assert streamed(blocks, 0, link)[1:] == (0, 0, 0, 0)


def test_a_step_on_the_host_hides_behind_the_backward_pass_only_if_it_is_released():
    blocks, link = [block_of(100, 100) for _ in range(4)], Link(100.0, 100.0, 0.0)
    waits = hosted_seconds(blocks, 450, 4.5, link, False)
    assert waits == pytest.approx(1 + 4 + 1 + 0.5)  # down, four steps one by one, and up
    hides = hosted_seconds(blocks, 450, 4.5, link, True)
    assert hides == pytest.approx(1 + 1 + 1 + 0.5)  # of the first block, and of the embedding
    assert hosted_seconds([], 0, 0.0, link, True) == 0


def test_where_copies_run_beside_weights_and_steps_leave(slow_link, monkeypatch):
    """By estimates, which a plan confirms before a choice is made."""
    seconds = {"cpu": 1e-4}
    monkeypatch.setattr(candidates, "optimizer_seconds", lambda o, device, **_: seconds["cpu"])
    model, batch = model_of(8), batch_of()
    ladder = headroom.ladder(model, batch, loss=cross_entropy, host_budget="1 GiB")
    bare = headroom.ladder(model, batch, loss=cross_entropy)
    leanest = ladder.points[0]
    assert leanest.choice.weights_host == 8 and leanest.choice.offload
    assert leanest.peak < 0.7 * bare.points[0].peak
    weights = sum(p.nbytes for block in model.blocks for p in block.parameters())
    assert leanest.host > 2 * weights
    # Within a host budget that has room for two blocks, no more of them leave.
    search = ladder._search.with_techniques(ladder._search.candidates.techniques, None)
    search.candidates.host_room = leanest.host // 2
    assert all(point.host <= leanest.host // 2 for point in search.frontier())
    assert any("weights of" in point.title for point in ladder.points)


# ---- while it trains ----------------------------------------------------------------------------


def test_leaner_pages_more_as_far_as_the_host_budget_goes(empty_arena):
    model, batch = model_of(2), batch_of()
    choice = Choice(("L5", "L5"), optimizer="headroom", offload="state", state_budget=700_000)
    options = {"budget": "1 GiB", "loss": cross_entropy, "choice": choice}
    fitted = headroom.fit(model, batch, host_budget="1 GiB", **options)
    steps(fitted, batch)
    before = fitted.optimizer.offload_handle.memory()
    assert before.resident > 0 and fitted.reduce_memory()
    after = fitted.optimizer.offload_handle.memory()
    assert 0 < fitted.choice.state_budget < 700_000 or not fitted.choice.state_budget
    assert after.resident < before.resident and after.host > before.host
    steps(fitted, batch)
    assert fitted.measured_host == after.host
    narrow = headroom.fit(model_of(2), batch, host_budget=before.host + 10_000, **options)
    steps(narrow, batch)
    assert narrow.reduce_memory() and narrow.choice == choice.but(micro_batches=2)
