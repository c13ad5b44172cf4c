"""What is asked of every op on rows, and of the ops of its gradient. They are found where they are
registered, and so are right calls of them."""

import random

import headroom.functional  # noqa: F401  (registers the ops)
import pytest
import torch
from headroom._core.row_ops import ROW_OPS
from torch._subclasses import FakeTensorMode

from helpers.differentiable_ops import OPS
from helpers.row_calls import is_described, right_call

NAMES = [
    pytest.param(op, name, id=name)
    for op in ROW_OPS.values()
    for name in op.ops
    if is_described(op, name)
]


def accepted(op, name, seed=0, rows=((2, 3),)):
    """A call that the op takes. Where options exclude each other, they are drawn again."""
    rng = random.Random(seed)
    for _ in range(200):
        given = right_call(rng, op, name, rows)
        try:
            called(name, given)
        except RuntimeError:
            continue
        return given
    raise AssertionError(f"no call of {name} is taken")


def called(name, given):
    return getattr(torch.ops.headroom, name).default(*given.values())


@pytest.mark.parametrize("op, name", NAMES)
def test_opcheck(op, name):
    every = getattr(torch.ops.headroom, name).default
    simple = ("test_schema", "test_faketensor")  # the others trace, which takes seconds
    for seed in range(6):
        torch.library.opcheck(
            every, tuple(accepted(op, name, seed).values()), test_utils=simple if seed else "ALL"
        )


def tensors_of(given):
    return [(key, x) for key, x in given.items() if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("op, name", NAMES)
def test_wrong_tensors_are_refused_by_the_op_and_its_fake(op, name):
    given = accepted(op, name)
    tensors = tensors_of(given)
    for key, x in tensors:
        if not x.numel():
            continue  # stands for one that is left out
        wrong = [x.to(torch.complex64)]
        if len(tensors) > 1:  # of which one does not fit the others
            wrong += [torch.zeros((*x.shape, 2)).to(x.dtype), x.to("meta")]
        for bad in wrong:
            before = [(x, x.clone()) for other, x in tensors if other != key]
            with pytest.raises(RuntimeError):
                called(name, given | {key: bad})
            assert all(torch.equal(x, old) for x, old in before)
            if bad.is_meta:
                continue
            with FakeTensorMode() as mode, pytest.raises(RuntimeError):
                faked = {
                    k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v
                    for k, v in (given | {key: bad}).items()
                }
                called(name, faked)


@pytest.mark.parametrize("op, name", NAMES)
def test_rows_may_be_views(op, name):
    """Of any strides, at odd addresses; but not what the forward pass has made."""
    given = accepted(op, name)
    if name.endswith("_"):
        return
    made = {result.name for result in getattr(torch.ops.headroom, op.name).default._schema.returns}
    wanted = called(name, given)
    for view in (
        lambda x: torch.stack((x, x), -1)[..., 0],
        lambda x: x.permute([*range(x.dim())][::-1]).contiguous().permute([*range(x.dim())][::-1]),
        lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]] if x.dim() else x,
        lambda x: torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x),
    ):
        views = given | {k: view(x) for k, x in tensors_of(given) if k not in made}
        got = called(name, views)
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, wanted))):
            assert torch.equal(a, b) or (a.isnan() == b.isnan()).all()


@pytest.mark.parametrize("op, name", NAMES)
def test_no_rows(op, name):
    """Sums over them are zeros."""
    for rows in ((0,), (3, 0)):
        found = called(name, accepted(op, name, rows=(rows,)))
        if name.endswith("_backward"):
            every = found if isinstance(found, tuple) else (found,)
            assert all(x.eq(0).all() for x in every)


def test_every_row_op_goes_every_way_to_a_gradient():
    """`differentiable_ops.py` calls each, under its own name or that of a function built on it."""
    seen = {op.name.split(" of ")[0] for op in OPS}
    public = {"linear_divergence": "linear_distillation_loss"}
    assert {public.get(name, name) for name in ROW_OPS} <= seen


@pytest.mark.parametrize("op, name", NAMES)
def test_strided_tensors_whose_memory_was_freed_are_refused(op, name):
    """Torch's copies do not look before they read."""
    given = accepted(op, name)
    for key, x in given.items():
        if isinstance(x, torch.Tensor) and x.numel():
            strided = x.repeat_interleave(2, -1)[..., ::2] if x.dim() else x.clone()
            strided.untyped_storage().resize_(0)
            with pytest.raises(RuntimeError, match="memory|layout|strid|contiguous"):
                called(name, given | {key: strided})
