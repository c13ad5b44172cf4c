"""``headroom::attention_segments``: each sequence has the bits that it has alone, and a window the
values of a mask."""

import functools

import pytest
import torch
import torch.nn.functional as F
from headroom.functional.attention_segments import groups_of, pieces_of
from torch.utils.flop_counter import FlopCounterMode

from helpers.bits import assert_same_bits

OP = torch.ops.headroom.attention_segments
LENGTHS = {"mixed": [7, 0, 300, 300, 5], "one": [200], "equal": [64] * 4, "ones": [1] * 3}


def heads(lengths, dtype=torch.float32, size=16):
    """q, k and v, of which keys and values have half the heads, a gradient, and the ends."""
    torch.manual_seed(0)
    tokens = sum(lengths)
    packed = torch.randn(tokens, 8, size).to(dtype)  # as a projection gives them
    q, k, v = (x.detach().requires_grad_() for x in packed.split([4, 2, 2], 1))
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return (q, k, v), torch.randn(tokens, 4, size).to(dtype), ends


def results(attend, inputs, grad):
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def ours(ends, causal=True, window=0, scale=None):
    return lambda q, k, v: OP(q, k, v, ends, causal, window, scale)[0]


def masked(ends, causal, window, scale=None):
    """By torch, with a mask of all pairs."""

    def attend(q, k, v):
        index = torch.arange(q.shape[0])
        sequence = torch.searchsorted(ends[1:], index, right=True)
        distance = index[:, None] - index
        seen = sequence[:, None] == sequence
        if causal:
            seen &= distance >= 0
        if window:
            seen &= (distance < window) & (distance > -window)
        rows = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(*rows, attn_mask=seen, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("causal", [True, False])
def test_bits_are_those_of_each_sequence_alone(lengths, dtype, window, causal):
    inputs, grad, ends = heads(lengths, dtype)
    got = results(ours(ends, causal, window), inputs, grad)
    for start, length in zip(ends.tolist(), lengths):
        own = [x[start : start + length].detach().requires_grad_() for x in inputs]
        alone = ours(torch.tensor([0, length]), causal, window)
        wanted = results(alone, own, grad[start : start + length])
        assert_same_bits([x[start : start + length] for x in got], wanted)
        if dtype == torch.float32 and not window and length:  # and those of torch
            rows = (x.transpose(0, 1)[None] for x in own)
            out = F.scaled_dot_product_attention(*rows, is_causal=causal, enable_gqa=True)
            by_torch = torch.autograd.grad(
                out, own, grad[start : start + length].transpose(0, 1)[None]
            )
            assert_same_bits(wanted, [out[0].transpose(0, 1), *by_torch])


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("window", [0, 1, 2, 70, 301])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_a_mask(lengths, window, causal, dtype):
    inputs, grad, ends = heads(lengths, dtype)
    got = results(ours(ends, causal, window, 0.3), inputs, grad)
    by_mask = masked(ends, causal, window, 0.3)
    wanted = results(by_mask, inputs, grad)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    for a, b, true in zip(got, wanted, results(by_mask, exact, grad.double())):
        rounding = torch.finfo(dtype).eps * (true.norm() + grad.norm())  # gradients may be 0
        assert (a - true).norm() <= 2 * (b - true).norm() + rounding


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 5, 64, 100, 513])
@pytest.mark.parametrize("length", [1, 2, 64, 65, 700])
def test_pieces_cover_what_is_seen(causal, window, length):
    """Each query is in one of them, with all the keys that it sees, and in memory that grows with
    the tokens."""
    seen, masks = set(), set()
    for piece in pieces_of(length, causal, window, torch.empty(0)):
        rows, cols = range(length)[piece.queries], range(length)[piece.keys]
        mask = piece.mask
        if mask is None:
            mask = torch.zeros(len(rows), len(cols))
            if piece.causal:
                mask.masked_fill_(torch.ones_like(mask).triu(1).bool(), float("-inf"))
        else:
            masks.add(id(piece.mask))
            assert mask.numel() <= 512 * (1024 + 2 * window)
        for i, j in (mask == 0).nonzero().tolist():
            assert (rows[i], cols[j]) not in seen
            seen.add((rows[i], cols[j]))
    wanted = {
        (i, j)
        for i in range(length)
        for j in range(max(0, i - window + 1), min(length, i + (1 if causal else window)))
    }
    assert seen == wanted
    assert len(masks) <= 4


def test_sequences_of_one_length_are_taken_at_once():
    assert groups_of([0, 3, 3, 6, 9, 10]) == [(0, 3, 3), (9, 1, 1)]
    assert groups_of([0, 0]) == groups_of([0]) == []


def test_nothing_but_heads_and_sums_is_kept():
    (q, k, v), _, ends = heads([64] * 4)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out, sums = OP(q, k, v, ends, True, 0, None)
    wanted = [q, k, v, out, sums, ends]
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in wanted]
    assert sums.dtype == torch.float32 and sums.shape == (256, 4)


@pytest.mark.parametrize("window", [0, 9])
def test_opcheck(window):
    (q, k, v), _, ends = heads([7, 0, 30])
    utils = "test_schema", "test_faketensor", "test_autograd_registration"
    check = functools.partial(torch.library.opcheck, test_utils=utils)
    check(OP.default, (q, k, v, ends, True, window, None))
    out, sums = OP(q, k, v, ends, True, window, None)
    backward = torch.ops.headroom.attention_segments_backward
    given = [x.detach() for x in (out, q, k, v, out, sums)]
    check(backward.default, (*given, ends, True, window, None))


def test_no_tokens():
    inputs, grad, _ = heads([])
    for ends in ([0], [0, 0, 0]):
        for x in results(ours(torch.tensor(ends)), inputs, grad):
            assert x.numel() == 0


def test_unused_results_and_second_derivatives():
    (q, k, v), _, ends = heads([5, 3])
    out, sums = OP(q, k, v, ends, True, 0, None)
    assert sums.requires_grad and not any(torch.autograd.grad(sums.sum(), q, allow_unused=True))
    (dq,) = torch.autograd.grad(OP(q, k, v, ends, True, 0, None)[0].sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        dq.sum().backward()


def test_flops_are_the_least_that_sequences_can_take():
    inputs, grad, ends = heads([64] * 4)
    for window, causal, seen in ((0, True, 64), (9, True, 9), (9, False, 17), (99, True, 64)):
        with FlopCounterMode(display=False) as counter:
            results(ours(ends, causal, window), inputs, grad)
        assert counter.get_total_flops() == (2 + 5) * 2 * 256 * 4 * 16 * seen


@pytest.mark.parametrize("ends", [[0, 5], [1, 8], [0, 9, 8], []], ids=str)
def test_ends_that_are_none(ends):
    (q, k, v), _, _ = heads([8])
    with pytest.raises(RuntimeError, match="cu_seqlens is .*, wanted 0 and then .* up to 8"):
        OP(q, k, v, torch.tensor(ends, dtype=torch.int32), True, 0, None)
