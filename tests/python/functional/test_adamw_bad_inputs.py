"""What headroom::adamw_ refuses: the error names the argument, and no byte has changed. And what
only looks bad: any clip_coef is a factor."""

import headroom
import pytest
import torch

from helpers.bad_adamw_calls import (
    SHAPED,
    bad_numbers,
    bad_scalars,
    bad_shapes,
    bad_steps,
    short_lists,
)
from helpers.bad_inputs import (
    INF,
    NAN,
    assert_untouched,
    meta,
    misaligned,
    of_dtype,
    one,
    option,
    put,
    quantized,
    snapshot,
    sparse,
)
from helpers.samples import DEFAULTS, sample, table


def bad_lists():
    yield from short_lists((*SHAPED, "steps"))
    yield "max_exp_avg_sqs missing", option(amsgrad=True), "max_exp_avg_sqs has 0 tensors"
    keep = put("max_exp_avg_sqs", slice(None), lambda _: [torch.zeros(3)])
    yield "max_exp_avg_sqs for nothing", keep, "max_exp_avg_sqs has"


def bad_tensors():
    yield from bad_shapes()
    for name in SHAPED:
        for dtype in (torch.float64, torch.int32, torch.bool, torch.int8, torch.float8_e4m3fn):
            yield f"{name} {dtype}", put(name, 2, of_dtype(dtype)), rf"{name}\[2\]"
        yield f"{name} complex", put(name, 2, of_dtype(torch.complex64)), rf"{name}\[2\]"
        yield f"{name} misaligned", put(name, 0, misaligned), rf"{name}\[0\] is at"
    words = r"exp_avg_sqs\[1\] has another dtype than exp_avgs"
    yield "moments of two dtypes", put("exp_avg_sqs", 1, of_dtype(torch.bfloat16)), words


BAD_CALLS = [*bad_lists(), *bad_tensors(), *bad_steps(), *bad_numbers(), *bad_scalars()]


@pytest.mark.parametrize(
    "change, words", [case[1:] for case in BAD_CALLS], ids=[c[0] for c in BAD_CALLS]
)
def test_the_op_refuses(change, words):
    lists, options = sample([(3, 4), (), (5,)]), dict(DEFAULTS)
    change(lists, options)
    kept = snapshot(lists.tensors())
    with pytest.raises(RuntimeError, match=words):
        headroom.functional.adamw_(*lists.lists(), **options)
    assert_untouched(kept)


UNUSUAL = {"sparse": sparse, "meta": meta, "quantized": quantized}


@pytest.mark.parametrize("name", ["params", "grads", "exp_avgs", "exp_avg_sqs"])
@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL)
@pytest.mark.filterwarnings("ignore:.*quant")  # torch's own, which is on its way out
def test_the_op_refuses_tensors_that_are_not_plain(make, name):
    lists = sample([(3, 4), (), (5,)])
    getattr(lists, name)[0] = make(getattr(lists, name)[0])
    kept = snapshot(lists.tensors())
    with pytest.raises((RuntimeError, NotImplementedError)):
        headroom.functional.adamw_(*lists.lists(), **DEFAULTS)
    assert_untouched(kept)


def test_the_op_refuses_a_list_on_two_devices(device):
    if device == "cpu":
        pytest.skip("needs a second device")
    for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "steps"):
        lists = sample([(3, 4), (5,)], device=device)
        getattr(lists, name)[1] = getattr(lists, name)[1].cpu()
        kept = snapshot(lists.tensors())
        with pytest.raises(RuntimeError, match=r"\[1\]|state_steps"):
            headroom.functional.adamw_(*lists.lists(), **DEFAULTS)
        assert_untouched(kept)
    lists = sample(device=device)
    with pytest.raises(RuntimeError, match="grad_scale is on cpu"):
        headroom.functional.adamw_(*lists.lists(), **DEFAULTS, grad_scale=one(1.0))


@pytest.mark.parametrize("value", ["1e-3", None, [1.0], 1j], ids=repr)
@pytest.mark.parametrize("name", ["lr", "eps", "beta1", "weight_decay"])
def test_the_op_refuses_what_is_not_a_number(name, value):
    lists = sample()
    kept = snapshot(lists.tensors())
    with pytest.raises((TypeError, RuntimeError)):
        headroom.functional.adamw_(*lists.lists(), **(DEFAULTS | {name: value}))
    assert_untouched(kept)


def test_the_table_must_be_that_of_the_call():
    """The internal op reads addresses from it."""
    lists = sample()
    of_five = table(lists)
    kept = snapshot(lists.tensors())
    for wrong in (of_five[:, :1], of_five[:-1], of_five.flatten(), of_five.int(), of_five.mT):
        with pytest.raises(RuntimeError, match="table must be a contiguous int64 tensor"):
            torch.ops.headroom._adamw_table_(lists.params[0], wrong, **DEFAULTS)
    with pytest.raises(RuntimeError, match="table must be"):
        torch.ops.headroom._adamw_table_(lists.params[0], of_five, **(DEFAULTS | {"amsgrad": True}))
    assert_untouched(kept)


@pytest.mark.parametrize("value", [NAN, INF, 0.0, -2.0])
def test_any_clip_coef_is_a_factor(value, device):
    """Whoever computes it may make a NaN of it, which spoils gradients as a product would."""
    lists = sample(device=device)
    scaled = lists.clone()
    scaled.grads = [grad * value for grad in scaled.grads]
    clip = torch.full((), value, device=device)
    headroom.functional.adamw_(*lists.lists(), **DEFAULTS, clip_coef=clip)
    headroom.functional.adamw_(*scaled.lists(), **DEFAULTS)
    for a, b in zip(lists.params, scaled.params):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=2**-22, atol=2**-24)
