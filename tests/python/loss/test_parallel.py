"""Losses of heads that are sharded: classes split over ranks, FSDP2, DDP.

The functions without `test_` in their name run on all ranks (helpers/ranks.py).
"""

import headroom
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from headroom.loss import parallel_linear_cross_entropy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from helpers.bits import assert_same_bits
from helpers.mesh import mesh, whole
from helpers.ranks import Ranks

pytestmark = pytest.mark.gloo

ROWS, FEATURES, CLASSES = 37, 24, 53
CASES = {
    "plain": {},
    "smoothed": dict(label_smoothing=0.1, reduction="sum"),
    "classes": dict(class_weight=True),
    "tokens": dict(token_weight=True, class_weight=True, reduction="sum"),
    "everything": dict(
        label_smoothing=0.2,
        softcap=5.0,
        logit_scale=1.5,
        z_loss=1e-2,
        class_weight=True,
        token_weight=True,
    ),
    "denominator": dict(denominator=17.0, z_loss=1e-2),
    "rows": dict(reduction="none", softcap=8.0),
}


@pytest.fixture(scope="module")
def four():
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def given(dtype=torch.float32, rows=ROWS):
    generator = torch.Generator().manual_seed(3)
    hidden, weight, bias = (
        torch.randn(size, generator=generator).to(dtype)
        for size in ((rows, FEATURES), (CLASSES, FEATURES), (CLASSES,))
    )
    target = torch.randint(CLASSES, (rows,), generator=generator)
    target[::5] = -100
    return hidden, weight, bias, target, torch.rand(CLASSES, generator=generator) + 0.5


def reference(hidden, weight, bias, target, class_weight, upstream, case, dtype=torch.float64):
    """The loss, the log-sum-exp and the gradients in a dtype."""
    leaves = [x.to(dtype).detach().requires_grad_() for x in (hidden, weight, bias)]
    z = F.linear(*leaves) * case.get("logit_scale", 1.0)
    if "softcap" in case:
        z = case["softcap"] * torch.tanh(z / case["softcap"])
    factors = class_weight.to(dtype) if case.get("class_weight") else None
    smoothing = case.get("label_smoothing", 0.0)
    options = dict(weight=factors, label_smoothing=smoothing, reduction="none")
    counts = (target != -100).to(dtype)
    tokens = token_weights(len(target)).to(dtype) * counts if case.get("token_weight") else counts
    rows = F.cross_entropy(z, target, **options) * tokens
    lse = z.logsumexp(-1) * counts
    rest = case.get("z_loss", 0.0) * lse.square() * tokens
    reduction = case.get("reduction", "mean")
    if "denominator" in case:
        loss = (rows + rest).sum() / case["denominator"]
    elif reduction == "mean":
        own = 1.0 if factors is None else factors[target.clamp_min(0)]
        loss = rows.sum() / (tokens * own).sum() + rest.sum() / tokens.sum()
    else:
        loss = rows + rest if reduction == "none" else (rows + rest).sum()
    loss.backward(upstream.to(dtype) if reduction == "none" else None)
    return [loss.detach(), lse.detach(), *(leaf.grad for leaf in leaves)]


def token_weights(rows):
    return torch.linspace(0.0, 2.0, rows)


def options_of(case, class_weight, rows=ROWS):
    replaced = {"class_weight": class_weight, "token_weight": token_weights(rows)}
    return {key: replaced[key] if value is True else value for key, value in case.items()}


def error(got, exact):
    return (got.double() - exact).norm() / exact.norm().clamp_min(1e-9)


def split(rank, name, dtype):
    case, ranks = CASES[name], dist.get_world_size()
    tensors = given(dtype)
    hidden, weight, bias, target, class_weight = tensors
    upstream = torch.randn(ROWS, generator=torch.Generator().manual_seed(5))
    exact = reference(*tensors, upstream, case)
    theirs = reference(*tensors, upstream, case, dtype)
    rows = -(-CLASSES // ranks)  # the last rank has fewer
    first = rank * rows
    mine = slice(first, min(first + rows, CLASSES))
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight[mine], bias[mine])]
    loss, stats = parallel_linear_cross_entropy(
        leaves[0],
        leaves[1],
        target,
        bias=leaves[2],
        first_class=first,
        all_classes=CLASSES,
        stats=["lse"],
        **options_of(case, class_weight),
    )
    loss.backward(upstream if loss.dim() else None)
    got = [loss.detach(), stats["lse"], *(leaf.grad for leaf in leaves)]
    for tensors in (exact, theirs):
        tensors[3:] = [tensor[mine] for tensor in tensors[3:]]
    assert loss.dtype == torch.float32 and got[2].dtype == dtype
    for name, mine, rounded, true in zip(("loss", "lse", "dx", "dw", "db"), got, theirs, exact):
        least = torch.finfo(mine.dtype).eps
        assert error(mine, true) <= 2 * error(rounded, true) + least, name
    same = [torch.empty_like(got[0]) for _ in range(ranks)]
    dist.all_gather(same, got[0])
    assert_same_bits(same, [got[0]] * ranks)


def alone(rank):
    """A rank that has all classes gets the bits that it gets without ranks."""
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    hidden, weight, bias, target, class_weight = given()
    for case in CASES.values():
        results = []
        for function, places in (
            (headroom.linear_cross_entropy, {}),
            (parallel_linear_cross_entropy, {"group": groups[rank]}),
        ):
            leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
            loss, stats = function(
                *leaves[:2],
                target,
                bias=leaves[2],
                stats=["lse", "target_logit"],
                **options_of(case, class_weight),
                **places,
            )
            loss.sum().backward()
            results.append([loss.detach(), *stats.values(), *(leaf.grad for leaf in leaves)])
        if "label_smoothing" in case:  # sums of logits were rounded
            torch.testing.assert_close(*results)
        else:
            assert_same_bits(*(found[:3] for found in results))
            torch.testing.assert_close(*results)


def dtensors(rank):
    """Uneven shards; with four ranks the last has no rows of five classes."""
    for classes in (CLASSES, 5):
        hidden, weight, bias, target, _ = given()
        weight, bias = weight[:classes], bias[:classes]
        target = torch.where(target < classes, target, 0)
        exact = reference(hidden, weight, bias, target, None, None, {})
        over = mesh()
        sharded = distribute_tensor(weight.clone(), over, [Shard(0)]).requires_grad_()
        x = distribute_tensor(hidden.clone(), over, [Replicate()]).requires_grad_()
        added = distribute_tensor(bias.clone(), over, [Shard(0)]).requires_grad_()
        parallel_linear_cross_entropy(x, sharded, target, bias=added).backward()
        assert sharded.grad.placements == added.grad.placements == (Shard(0),)
        got = whole([x.grad, sharded.grad, added.grad])
        for mine, true in zip(got, exact[2:]):
            torch.testing.assert_close(mine.double(), true, rtol=1e-4, atol=1e-6)
        with pytest.raises(ValueError, match="weight is placed as .*Replicate"):
            parallel_linear_cross_entropy(hidden, x, target)
        with pytest.raises(ValueError, match="bias is placed as .*Replicate"):
            parallel_linear_cross_entropy(hidden, sharded, target, bias=x)
        with pytest.raises(ValueError, match="hidden is placed as .*Shard"):
            parallel_linear_cross_entropy(sharded, sharded, target)


def one_has_none(rank):
    """All classes on rank 0, beside what one process gives: further results, frozen parts, another
    index to ignore, and a group and a denominator of one element that are given."""
    hidden, weight, bias, target, _ = given()
    options = dict(ignore_index=7, label_smoothing=0.1, stats=["target_logit", "lse"])
    target = torch.where(target == -100, 7, target)
    mine = slice(0, CLASSES) if rank == 0 else slice(CLASSES, CLASSES)
    places = dict(first_class=mine.start, all_classes=CLASSES, group=dist.group.WORLD)
    total = torch.tensor([9.0], dtype=torch.float64)
    for frozen in range(3):
        leaves = [
            x.clone().requires_grad_(k != frozen) for k, x in enumerate((hidden, weight, bias))
        ]
        one, wanted = headroom.linear_cross_entropy(
            *(leaves[0], leaves[1], target, leaves[2]), denominator=total.float()[0], **options
        )
        one.backward()
        parts = [leaves[0].detach().clone(), *(x.detach()[mine].clone() for x in leaves[1:])]
        parts = [part.requires_grad_(k != frozen) for k, part in enumerate(parts)]
        got, stats = parallel_linear_cross_entropy(
            *(parts[0], parts[1], target), bias=parts[2], denominator=total, **places, **options
        )
        torch.testing.assert_close(got, one)
        assert list(stats) == list(wanted) and not any(s.requires_grad for s in stats.values())
        for name, values in stats.items():
            torch.testing.assert_close(values, wanted[name])
        got.backward()
        for k, (part, leaf) in enumerate(zip(parts, leaves)):
            if k == frozen:
                assert part.grad is None
            else:
                torch.testing.assert_close(part.grad, leaf.grad if k == 0 else leaf.grad[mine])
    for wrong in (CLASSES, -1):
        target[4] = wrong
        with pytest.raises(RuntimeError, match=f"{wrong}.*wanted"):
            parallel_linear_cross_entropy(hidden, weight[mine], target, ignore_index=7, **places)


def refused(rank):
    hidden, weight, _, target, _ = given()
    for options, message in (
        (dict(reduction="product"), "reduction is 'product'"),
        (dict(empty="none"), "empty is 'none'"),
        (dict(stats="lse"), "stats is 'lse', wanted a list"),
        (dict(first_class=3, all_classes=CLASSES), "first_class is 3 and all_classes is 53"),
        (dict(first_class=-1, all_classes=CLASSES + 9), "first_class is -1 and all_classes is 62"),
        (dict(reduction="none", denominator=3.0), "denominator is given, but reduction is 'none'"),
    ):
        with pytest.raises(ValueError, match=message):
            parallel_linear_cross_entropy(hidden, weight, target, **options)
    column = torch.ones(*target.shape, 1)
    for options, message in (
        (dict(token_weight=column), "token_weight has shape .* wanted that of target"),
        (dict(denominator=torch.ones(2)), r"denominator has shape \(2,\), wanted a number"),
        (dict(class_weight=torch.ones(CLASSES).requires_grad_()), "class_weight requires grad"),
    ):
        with pytest.raises(RuntimeError, match=message):
            parallel_linear_cross_entropy(hidden, weight, target, **options)
    with pytest.raises(RuntimeError, match=r"target has shape \(36,\), .* dimension, \(37,\)"):
        parallel_linear_cross_entropy(hidden, weight, target[1:])
    target[4] = 2 * CLASSES
    with pytest.raises(RuntimeError, match="106"):
        parallel_linear_cross_entropy(hidden, weight, target)


def nothing_counts(rank):
    hidden, weight, _, target, _ = given()
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    loss = parallel_linear_cross_entropy(*leaves, torch.full_like(target, -100))
    loss.backward()
    assert loss == 0 and all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)
    loss = parallel_linear_cross_entropy(*leaves, torch.full_like(target, -100), empty="nan")
    assert loss.isnan()


def weighs_nothing(rank):
    """Weights of 0 or NaN give what they give without ranks."""
    hidden, weight, _, target, ones = given()
    counts = (target != -100).float()
    mine = slice(0, 30) if rank == 0 else slice(30, CLASSES)
    for options in (
        {"token_weight": counts * 0},
        {"class_weight": ones * 0},
        {"class_weight": ones * 0, "z_loss": 0.1},
        {"token_weight": torch.where(counts > 0, counts, torch.nan)},
        {"class_weight": ones * 1e-8, "z_loss": 1.0},
    ):
        for empty in ("zero", "nan"):
            results = []
            for function, part, places in (
                (headroom.linear_cross_entropy, slice(None), {}),
                (
                    parallel_linear_cross_entropy,
                    mine,
                    {"first_class": mine.start, "all_classes": CLASSES},
                ),
            ):
                leaves = [x.clone().requires_grad_() for x in (hidden, weight[part])]
                loss = function(*leaves, target, empty=empty, **places, **options)
                loss.backward()
                results.append([loss.detach(), *(leaf.grad for leaf in leaves)])
            results[0][2] = results[0][2][mine]
            for one, other in zip(*results):
                torch.testing.assert_close(one, other, equal_nan=True)
            is_empty = not (counts * options.get("token_weight", counts)).any()
            is_empty |= not options.get("class_weight", ones).any()
            assert results[0][0].isnan() == (is_empty and empty == "nan")
            assert all(grad.isfinite().all() for grad in results[1][1:])


def distilled(rank, is_biased):
    """Heads that are sharded are gathered: what each rank's own whole heads give, averaged."""
    hidden, weight, bias, target, _ = given()
    teacher_hidden, teacher = hidden.flip(-1).clone(), weight.flip(0).clone()
    leaves = [hidden * (1 + rank), weight, bias if is_biased else None]
    leaves = [None if x is None else x.clone().requires_grad_() for x in leaves]

    def loss(hidden, weight, bias, teacher):
        return headroom.linear_distillation_loss(
            hidden, weight, teacher_hidden, teacher, target, student_bias=bias, divergence="js"
        )

    expected = loss(*leaves, teacher)
    expected.backward()
    shards = [
        None if x is None else distribute_tensor(x.detach(), mesh(), [Shard(0)]).requires_grad_()
        for x in leaves[1:]
    ]
    own = leaves[0].detach().clone().requires_grad_()
    got = loss(own, *shards, distribute_tensor(teacher, mesh(), [Shard(0)]))
    got.backward()
    assert_same_bits([got.detach(), own.grad], [expected.detach(), leaves[0].grad])
    for shard, leaf in zip(shards, leaves[1:]):
        if shard is not None:
            dist.all_reduce(leaf.grad)
            assert shard.grad.placements == (Shard(0),)
            (whole_grad,) = whole([shard.grad])
            torch.testing.assert_close(whole_grad, leaf.grad / dist.get_world_size())


def batch(rank, ignored):
    hidden, weight, _, target, _ = given()
    hidden, target = hidden.roll(rank, 1), target.roll(rank)
    return hidden, target.fill_(-100) if rank == ignored else target


class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(FEATURES, FEATURES)
        self.head = torch.nn.Linear(FEATURES, CLASSES, bias=False)
        self.head.weight.data.copy_(given()[1])

    def forward(self, hidden, target):
        return headroom.linear_cross_entropy(self.body(hidden), self.head.weight, target)


def averages(ignored, ranks):
    """The gradients that every rank should have, from the whole model and each rank's batch."""
    torch.manual_seed(0)
    model = Head()
    found = [torch.zeros_like(p) for p in model.parameters()]
    for rank in range(ranks):
        hidden, target = batch(rank, ignored)
        loss = F.cross_entropy(model.head(model.body(hidden)), target, reduction="sum")
        (loss / (target != -100).sum().clamp_min(1) / ranks).backward()
    found = [p.grad for p in model.parameters()]
    return found


def ddp(rank, ignored):
    torch.manual_seed(0)
    model = DistributedDataParallel(Head())
    for _ in range(2):
        model.zero_grad()
        loss = model(*batch(rank, ignored))
        loss.backward()
    assert loss.isfinite() and (loss == 0) == (rank == ignored)
    for p, want in zip(model.parameters(), averages(ignored, dist.get_world_size())):
        torch.testing.assert_close(p.grad, want)


def fsdp(rank, head_alone):
    """The head within the model's group, and with a group of its own that nothing gathers."""
    torch.manual_seed(0)
    model = Head()
    if head_alone:
        fully_shard(model.head, mesh=mesh())
    fully_shard(model, mesh=mesh())
    for _ in range(2):
        model.zero_grad()
        model(*batch(rank, 0)).backward()
    assert model.head.weight.grad.placements == (Shard(0),)
    got = whole([p.grad for p in model.parameters()])
    for grad, want in zip(got, averages(0, dist.get_world_size())):
        torch.testing.assert_close(grad, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_classes_split_over_two(ranks, name, dtype):
    ranks(split, name, dtype)


@pytest.mark.slow
def test_classes_split_over_four(four):
    for name in CASES:
        four(split, name, torch.float32)


def test_a_rank_alone(ranks):
    ranks(alone)


@pytest.mark.parametrize("reduction", [0, 1])
def test_join_is_an_op(reduction):
    parts, target = torch.randn(3, 5, 8), torch.randint(9, (3, 5))
    weights = torch.rand(9), torch.rand(3, 5)
    call = (parts, target, *weights, torch.tensor(3.0), reduction, -100, 0.1, 0.01, 9)
    torch.library.opcheck(torch.ops.headroom.linear_cross_entropy_join.default, call)
    for k, wrong in enumerate((parts.double(), target[:2], weights[0][:8], weights[1][:2])):
        bad = (*call[:k], wrong, *call[k + 1 :])
        for device in ("cpu", "meta"):
            moved = [x.to(device) if isinstance(x, torch.Tensor) else x for x in bad]
            with pytest.raises(RuntimeError, match="parts|target|class_weight|token_weight"):
                torch.ops.headroom.linear_cross_entropy_join(*moved)
    with pytest.raises(RuntimeError, match="linear_cross_entropy_join has no derivative"):
        torch.ops.headroom.linear_cross_entropy_join(parts.requires_grad_(), *call[1:])


def test_dtensors(ranks):
    ranks(dtensors)


@pytest.mark.slow
def test_dtensors_of_four(four):
    four(dtensors)


@pytest.mark.parametrize("is_biased", [False, True])
def test_distillation_of_sharded_heads(ranks, is_biased):
    ranks(distilled, is_biased)


def test_a_rank_without_classes(ranks):
    ranks(one_has_none)


def test_what_is_refused_before_anyone_waits(ranks):
    ranks(refused)


def test_nothing_counts(ranks):
    ranks(nothing_counts)


def test_weights_that_are_0_or_nan(ranks):
    ranks(weighs_nothing)


@pytest.mark.parametrize("ignored", [None, 0, 1])
def test_ddp_does_not_hang_where_nothing_counts(ranks, ignored):
    ranks(ddp, ignored)


@pytest.mark.parametrize("head_alone", [False, True])
def test_fsdp(ranks, head_alone):
    ranks(fsdp, head_alone)
