"""What headroom::adamw8bit_ refuses, in eager mode and while it is traced."""

import re
from dataclasses import fields

import headroom
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from helpers.bad_adamw_calls import bad_numbers, bad_scalars, bad_shapes, bad_steps, short_lists
from helpers.bad_inputs import assert_untouched, misaligned, of_dtype, option, put, snapshot
from helpers.reference8bit import OPTIONS, Sample, run, sample

NAMES = [f.name for f in fields(Sample)]
CODES = ("exp_avgs", "exp_avg_sqs")
ABSMAXS = ("exp_avg_absmaxs", "exp_avg_sq_absmaxs")


def bad_lists():
    yield from short_lists(NAMES)
    yield from bad_shapes()
    for name in NAMES[:-1]:
        kinds = {torch.float64, torch.int32, torch.bool, torch.int8, torch.complex64, torch.uint8}
        kinds |= {torch.float32, torch.bfloat16}
        right = {torch.uint8} if name in CODES else {torch.float32}
        right |= {torch.bfloat16} if name in ("params", "grads") else set()
        for dtype in sorted(kinds - right, key=str):
            yield f"{name} {dtype}", put(name, 2, of_dtype(dtype)), rf"{name}\[2\]"
    for name in ("params", "grads"):
        yield f"{name} misaligned", put(name, 0, misaligned), rf"{name}\[0\] is at"
    for name in ABSMAXS:
        for wrong in (1, 3):
            words = rf"{name}\[0\] has numel {wrong}, wanted 2"
            yield f"{name} of {wrong}", put(name, 0, lambda t, n=wrong: t.new_zeros(n)), words
        words = rf"{name}\[0\] must be float32 and contiguous"
        yield f"{name} strided", put(name, 0, lambda t: t.new_zeros(4)[::2]), words
        yield f"{name} expanded", put(name, 0, lambda t: t[:1].expand(2)), words
        yield f"{name} misaligned", put(name, 0, misaligned), rf"{name}\[0\] is at"


def bad_options():
    for more in ({"decoupled": False}, {"skip_nonfinite": True}, {"seeds": [1, 2, 3]}):
        yield f"bnb_exact, {more}", option(bnb_exact=True, **more), "bnb_exact"
    for seeds in ([], [1], [1, 2, 3, 4]):
        yield (
            f"{len(seeds)} seeds",
            option(seeds=seeds),
            f"seeds has {len(seeds)} numbers, wanted 3",
        )


BLOCK_SIZES = (0, -256, 1, 255, 1024, 2**32 + 256)
BAD_CALLS = [
    *bad_lists(),
    *bad_steps(),
    *bad_numbers(block_size=BLOCK_SIZES),
    *bad_scalars(),
    *bad_options(),
]


@pytest.mark.parametrize(
    "change, words", [case[1:] for case in BAD_CALLS], ids=[c[0] for c in BAD_CALLS]
)
def test_the_op_refuses(change, words):
    lists, options = sample([(30, 14), (), (5,)]), dict(OPTIONS)
    change(lists, options)
    kept = snapshot(lists.tensors())
    with pytest.raises(RuntimeError, match=words):
        headroom.functional.adamw8bit_(*lists.lists(), **options)
    assert_untouched(kept)


def test_bnb_exact_refuses_other_blocks():
    lists = sample([(300,)], block_size=64)
    kept = snapshot(lists.tensors())
    with pytest.raises(RuntimeError, match="block_size is 64, but bnb_exact needs 256"):
        run(lists, block_size=64, bnb_exact=True)
    assert_untouched(kept)


def of_values(name):
    return re.search(
        r"nan|inf|-1|2\.0|9007|grad_scale 0|misaligned|beta|eps|decay|overlap|expanded", name
    )


TRACED = [case for case in BAD_CALLS if not of_values(case[0])]


@pytest.mark.parametrize("change", [case[1] for case in TRACED], ids=[c[0] for c in TRACED])
def test_what_eager_mode_refuses_is_refused_while_tracing(change):
    lists, options = sample([(30, 14), (), (5,)]), dict(OPTIONS)
    change(lists, options)
    with FakeTensorMode() as mode, pytest.raises(RuntimeError):
        columns, options = tree_map_only(torch.Tensor, mode.from_tensor, (lists.lists(), options))
        headroom.functional.adamw8bit_(*columns, **options)


def test_a_derivative_is_refused_and_nothing_is_written():
    lists = sample([(5,)])
    lists.params[0].requires_grad_()
    kept = snapshot(lists.tensors())
    with pytest.raises(RuntimeError, match="no derivative.*no_grad"):
        run(lists)
    assert_untouched(kept)
    with torch.no_grad():
        run(lists)


def test_the_op_refuses_a_list_on_two_devices(device):
    if device == "cpu":
        pytest.skip("needs a second device")
    for name in NAMES:
        lists = sample([(30, 14), (5,)], device=device)
        getattr(lists, name)[1] = getattr(lists, name)[1].cpu()
        kept = snapshot(lists.tensors())
        with pytest.raises(RuntimeError, match=r"\[1\] is on"):
            run(lists)
        assert_untouched(kept)
