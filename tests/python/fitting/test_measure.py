"""Costs of blocks: against the bytes and the time of whole steps, and without a trace on the
model."""

import copy
import random
import time

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom._core.module_copies import copied_modules
from headroom.fitting.costs import measure
from headroom.fitting.costs.measure import measure_blocks, seconds_at_leanest
from headroom.fitting.costs.outline import outline
from headroom.fitting.search.candidate import Frontiers, levels_of
from headroom.fitting.search.knapsack import choose, frontier
from headroom.memory import track
from headroom.memory.alone import Alone, Seconds
from headroom.patching.levels import Blocks
from headroom.planning.checks import check_step
from headroom.step import clock
from headroom.step.pass_seconds import PassSeconds
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers import fitted_models as models
from helpers.fitting import step_of


@pytest.fixture(autouse=True)
def cpu_time(monkeypatch):
    """What else runs on the machine does not count."""
    monkeypatch.setattr(clock, "now", time.process_time)


class Work(TorchDispatchMode):
    """Counts what is computed, as the elements of all results but views: a clock that no machine
    disturbs."""

    done = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.done += sum(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))
        return result


def outline_of(step, measured, make, **options):
    """The outline of steps whose blocks are at their leanest levels."""
    shared = copied_modules(step.model, lambda x: x)
    blocks = Blocks(shared)
    blocks.set(blocks.leanest)
    kept = sum(block.levels[blocks.leanest[block.name]].kept for block in measured.blocks)
    made = check_step(step.but(model=shared, optimizer=make, **options))
    return outline(made, [block.name for block in measured.blocks], kept)


def peak_of_two_steps(step, make, levels, bucket=0):
    model = copy.deepcopy(step.model)
    Blocks(model).set(levels)
    optimizer = make([param for param in model.parameters() if param.requires_grad])
    handle = headroom.release_gradients(model, optimizer, bucket_bytes=bucket) if bucket else None
    with track(model, optimizer, batch=step.batch) as tracked:
        for _ in range(2):
            step.loss_of(model, step.batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    if handle is not None:
        handle.remove()
    return tracked.peak_bytes


def choices(measured, count):
    """The leanest levels, those that keep the most, and mixed ones."""
    every = [list(block.levels) for block in measured.blocks]
    yield [levels[-1] for levels in every]
    yield [levels[0] for levels in every]
    draw = random.Random(3)
    for _ in range(count):
        yield [draw.choice(levels) for levels in every]


CASES = {
    "headroom.nn": lambda: step_of(models.ours(), models.batch_of_ours()),
    "autocast": lambda: step_of(models.ours(), models.batch_of_ours(), amp=torch.bfloat16),
    "large vocabulary": lambda: step_of(models.ours(vocab_size=4001), models.batch_of_ours()),
    "windows": lambda: step_of(
        models.ours(window=24, window_layers=(True, False) * 2), models.batch_of_ours()
    ),
    "llama": lambda: step_of(models.llama(), models.transformers_batch()),
    "gpt2": lambda: step_of(models.gpt2(), models.transformers_batch()),
    "plain": lambda: step_of(models.Plain(), models.plain_batch()),
    "two kinds": lambda: step_of(models.Plain((150, 99, 150, 99)), models.plain_batch()),
    "frozen": lambda: step_of(models.Plain(frozen=2), models.plain_batch()),
    "convolutions": lambda: step_of(
        models.Images(), (torch.randn(5, 3, 13, 13), torch.randint(5, (5,))), F.cross_entropy
    ),
}
SLOW = {"large vocabulary", "windows", "gpt2", "plain"}
KINDS = {"two kinds": 2, "windows": 2, "frozen": 3}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES]
)
def test_one_plan_and_the_costs_of_blocks_give_the_peak_of_any_levels(case):
    torch.manual_seed(0)
    step = CASES[case]()
    measured = measure_blocks(step, repeats=1)
    assert [block.name for block in measured.blocks] == Blocks(step.model).names
    assert len({block.kind for block in measured.blocks}) == KINDS.get(case, 1)
    make = torch.optim.AdamW
    found = outline_of(step, measured, make)
    names = [block.name for block in measured.blocks]
    for levels in choices(measured, 2):
        peak = peak_of_two_steps(step, make, dict(zip(names, levels)))
        assert found.peak(measured, levels) == pytest.approx(peak, rel=0.005), levels


@pytest.mark.parametrize("make", [torch.optim.AdamW, headroom.optim.AdamW8bit])
@pytest.mark.parametrize("case", ["headroom.nn", pytest.param("llama", marks=pytest.mark.slow)])
def test_one_step_says_of_a_later_one_what_two_do(case, make):
    torch.manual_seed(0)
    step = CASES[case]()
    measured = measure_blocks(step, repeats=0)
    one, two = (outline_of(step, measured, make, steps=steps) for steps in (1, 2))
    for name in ("base", "after_forward", "after_backward", "gradients", "floor"):
        assert getattr(one, name) == pytest.approx(getattr(two, name), rel=0.002), name
    assert one.plan.total_bytes == pytest.approx(two.plan.total_bytes, rel=0.002)
    for kind in ("parameters", "buffers", "batch", "optimizer_state", "master_weights"):
        assert one.standing[kind] == pytest.approx(two.standing[kind], rel=0.002), kind


@pytest.mark.parametrize("bucket", [1, pytest.param(1 << 22, marks=pytest.mark.slow)])
def test_released_gradients_do_not_stay(bucket):
    torch.manual_seed(0)
    step, make = CASES["headroom.nn"](), headroom.optim.AdamW
    measured = measure_blocks(step, repeats=1)
    found = outline_of(step, measured, make, release=bucket)
    names = [block.name for block in measured.blocks]
    for levels in choices(measured, 1):
        peak = peak_of_two_steps(step, make, dict(zip(names, levels)), bucket)
        predicted = found.peak(measured, levels, gradients_stay=False)
        # In a large bucket gradients wait that the plan cannot tell apart.
        assert 0.995 * peak <= predicted <= (1.005 if bucket == 1 else 1.2) * peak, levels
    if bucket == 1:
        assert predicted < outline_of(step, measured, make).peak(measured, levels)


@pytest.mark.parametrize("case", ["headroom.nn", "autocast"])
def test_the_frontier_has_the_peaks_of_whole_steps(case, monkeypatch):
    step = CASES[case]()
    with Work() as work:
        monkeypatch.setattr(clock, "now", lambda: work.done)
        measured = measure_blocks(step, repeats=0)
    found = outline_of(step, measured, torch.optim.AdamW)
    points = Frontiers().of(measured, found)
    assert len(points) > 3
    assert all(point.peak == found.peak(measured, point.levels) for point in points)
    peaks, seconds = [p.peak for p in points], [p.seconds for p in points]
    assert peaks == sorted(set(peaks)) and seconds == sorted(set(seconds), reverse=True)
    middle = (peaks[0] + peaks[-1]) // 2
    assert choose(points, middle).peak <= middle


def test_bytes_of_a_block_are_what_a_hand_counts():
    step = CASES["plain"]()
    block = measure_blocks(step, repeats=1).blocks[1]
    rows, wide, features = models.ROWS * models.TOKENS, 4 * models.WIDTH, 4 * 150
    # Mean and deviation, their result, what GELU and the second Linear take, the result.
    held = rows * (8 + wide + 2 * features + wide)
    assert 0 <= block.levels["L0"].held - held <= 128  # with the number that is not used
    generator = torch.get_rng_state().numel()  # that the checkpoint keeps
    assert 0 <= block.levels["L5"].held - rows * wide - generator <= 128
    assert block.levels["L5"].backward >= held - rows * wide
    sizes = [4 * x.numel() for x in step.model.blocks[1].parameters()]
    assert block.gradients == sum(sizes)


def in_bfloat16(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return model(**batch)


def test_autocast_of_the_users_own_counts():
    model, batch = models.ours(layers=2), models.batch_of_ours()
    costs = [
        measure_blocks(step, repeats=1).blocks[1].levels["L0"]
        for step in (
            step_of(model, batch, amp=torch.bfloat16),
            step_of(model, batch, forward=in_bfloat16),
            step_of(model, batch),
        )
    ]
    assert costs[0].held == costs[1].held != costs[2].held
    assert costs[0].backward == costs[1].backward


def test_frozen_blocks_without_gradients_hold_nothing():
    measured = measure_blocks(CASES["frozen"](), repeats=1)
    costs = measured.blocks[0].levels["L0"]
    assert (costs.held, costs.backward, measured.blocks[0].gradients) == (0, 0, 0)
    assert measured.blocks[3].gradients > 0


def test_seconds_add_up_to_those_of_a_step(monkeypatch):
    model = models.ours()
    step = step_of(model, models.batch_of_ours())
    monkeypatch.setattr(measure, "WARM", 0.0)  # first runs of blocks copy their arguments
    with Work() as work:
        monkeypatch.setattr(clock, "now", lambda: work.done)
        measured = measure_blocks(step, repeats=1, steps=1000)
        names = [block.name for block in measured.blocks]
        for levels in choices(measured, 3):
            Blocks(model).set(dict(zip(names, levels)))
            start = work.done
            step.loss_of(model, step.batch).backward()
            whole = work.done - start
            model.zero_grad()
            costs = [block.levels[level] for block, level in zip(measured.blocks, levels)]
            blocks = sum(cost.seconds for cost in costs)
            assert blocks + measured.seconds_of_rest == pytest.approx(whole, rel=0.002)


class Ticking(torch.autograd.Function):
    """Takes time on a clock of its own: 1 forward, 2 backward."""

    time = 0

    @staticmethod
    def forward(ctx, x):
        Ticking.time += 1
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        Ticking.time += 2
        return grad


class Ticks(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return Ticking.apply(x * self.weight) * self.weight


@pytest.mark.parametrize(
    "sizes",
    [((4,),) * 4, ((4,), (1,)) * 4, ((4,), (1,), (3, 1), (3, 4))],
    ids=["one kind", "two kinds", "all different"],
)
def test_measuring_takes_at_most_seven_steps(sizes, monkeypatch):
    monkeypatch.setattr(clock, "now", lambda: Ticking.time)
    model, began = nn.Sequential(*(Ticks(size) for size in sizes)), Ticking.time
    measured = measure_blocks(step_of(model, torch.ones(3, 4), forward=lambda m, x: m(x).sum()))
    assert len(measured.blocks) == len(sizes)
    assert Ticking.time - began < 7 * 3 * len(sizes)
    for block in measured.blocks:
        assert block.levels["L0"].seconds == 3 and block.levels["L5"].seconds == 4
    assert measured.seconds_of_rest == 0


@pytest.mark.parametrize(
    ("held_up", "rounds", "least"),
    [((), 1, 0), ((9, 0), 2, 0), ((9, 9, 0), 3, 0), ((9,) * 9, 5, 9)],
)
@pytest.mark.parametrize("of_backward", [False, True])
def test_times_are_taken_until_levels_are_apart(held_up, rounds, least, of_backward, monkeypatch):
    """The level that keeps all is held up in the first rounds. No backward pass that computes more
    again is said to take less."""
    taken = []

    def seconds(self):
        number, is_leanest = divmod(len(taken), 2)  # in turn
        taken.append(number)
        more = held_up[number] if number < len(held_up) and not is_leanest else 0
        forward, backward = (0, more) if of_backward else (more, 0)
        return Seconds(1.0 + forward, (3.0 if is_leanest else 2.0) + backward)

    counted, found, kinds = Alone.bytes, [], measure._Kinds
    monkeypatch.setattr(Alone, "bytes", lambda self: (counted(self)[0], Seconds(50.0, 50.0)))
    monkeypatch.setattr(Alone, "seconds", seconds)
    monkeypatch.setattr(clock, "now", lambda: Ticking.time)
    monkeypatch.setattr(measure, "_Kinds", lambda *given: found.append(kinds(*given)) or found[0])
    model = nn.Sequential(*(Ticks((4,)) for _ in range(3)))
    step = step_of(model, torch.ones(3, 4), forward=lambda m, x: m(x.requires_grad_()).sum())
    measure_blocks(step, steps=1000)
    assert len(taken) == 2 * rounds
    for block in found[0].costs():
        keeps, leanest = block.levels["L0"], block.levels["L5"]
        assert leanest.seconds == 4 and keeps.backward_seconds == (2, 3)[of_backward and least > 0]
        assert keeps.forward_seconds == (1 if of_backward else 1 + least)


@pytest.mark.parametrize(
    ("blocks", "expected", "kept", "left"),
    [([4, 3], 4, 4, 1), ([5, 3], 4, 3, 0), ([5, 6], 4, 5, 0), ([4, 3], 0, 3, 0)],
    ids=["as expected", "faster the second time", "slower the second time", "nothing expected"],
)
def test_a_pass_that_was_held_up_is_run_again(blocks, expected, kept, left, monkeypatch):
    seconds = iter(PassSeconds(took, 10 - took) for took in blocks)
    monkeypatch.setattr(measure, "seconds_of_pass", lambda step, model, blocks: next(seconds))
    found = seconds_at_leanest(images_step(models.Images()), expected)
    assert found == (kept, 6 if left else min(10 - took for took in blocks))
    assert len(list(seconds)) == left


def state_of(model):
    """All that measuring could leave on a model and around it."""
    return (
        {
            name: (id(x), x._version, x.clone())
            for name, x in model.state_dict(keep_vars=True).items()
        },
        {name: (id(p.grad), p.grad.clone()) for name, p in model.named_parameters()},
        [
            (module.training, sorted(vars(module)), len(module._forward_hooks))
            for module in model.modules()
        ],
        torch.get_rng_state(),
        random.getstate(),
    )


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def prepared_images():
    """A model with gradients, hooks and a part that is not in training, and what hooks saw."""
    model = models.Images()
    model.blocks[1][3].eval()
    seen = []
    for param in model.parameters():
        param.grad = torch.randn_like(param)
        param.register_hook(lambda grad: seen.append("hook"))
        param.register_post_accumulate_grad_hook(lambda param: seen.append("accumulated"))
    return model, seen


def images_step(model):
    return step_of(model, (torch.randn(4, 3, 9, 9), torch.randint(5, (4,))), F.cross_entropy)


def test_the_model_stays_as_it_is():
    model, seen = prepared_images()
    step = images_step(model)
    before = state_of(model)
    measured = measure_blocks(step)
    assert same(before, state_of(model))
    assert not seen and len(measured.blocks) == 3


def test_a_forward_that_closes_over_the_model_runs_the_copy():
    """As accelerate sets it on a model in mixed precision."""
    model, seen = prepared_images()
    own = model.forward

    def forward(images):
        return own(images).float()

    model.forward = forward
    step = images_step(model)
    before = state_of(model)
    measured = measure_blocks(step, repeats=1)
    assert same(before, state_of(model)) and not seen
    assert len(measured.blocks) == 3 and model.forward is forward


class Breaks(nn.Module):
    """Runs so many times, and then raises."""

    left = 0

    def forward(self, x):
        Breaks.left -= 1
        if Breaks.left < 0:
            raise ArithmeticError("this block is broken")
        return x


@pytest.mark.parametrize("runs", [0, 1, 4, 7, 9, 11])
def test_a_failure_leaves_the_model_as_it_is(runs):
    model, seen = prepared_images()
    for block in model.blocks:
        block.insert(0, Breaks())
    step = images_step(model)
    before = state_of(model)
    Breaks.left = runs
    with pytest.raises(ArithmeticError, match="this block is broken"):
        measure_blocks(step)
    assert same(before, state_of(model)) and not seen
    Breaks.left = 1 << 30
    with track(model):  # no recorder is left running
        measure = step.loss_of(model, step.batch)
    assert measure.isfinite()


def test_a_model_without_blocks_is_all_rest():
    model = nn.Linear(4, 3)
    measured = measure_blocks(step_of(model, torch.ones(5, 4), forward=lambda m, x: m(x).sum()))
    assert measured.blocks == [] and measured.seconds_of_rest > 0
    assert frontier(levels_of(measured), 5)[0].peak == 5


class Again(nn.Module):
    """Calls its first block twice and its last never."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        return self.blocks[1](self.blocks[0](self.blocks[0](x))).sum()


def test_blocks_count_as_often_as_they_are_called():
    measured = measure_blocks(step_of(Again(), torch.randn(7, 6)))
    assert [block.name for block in measured.blocks] == ["blocks.0", "blocks.1"]
    twice, once = (block.levels["L0"] for block in measured.blocks)
    assert once.held == 7 * 6 * 4 and twice.held == 2 * once.held
    assert twice.forward == once.forward + once.held
