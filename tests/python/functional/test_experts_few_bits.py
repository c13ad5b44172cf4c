"""headroom::experts with stacks of 4 and 8 bits, which give the bits of decoded ones."""

import dataclasses

import pytest
import torch
from headroom.functional import dequantize_matrix, experts, linear_quantized, quantize_matrix
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from helpers.expert_layers import (
    CASES,
    EXPERTS,
    FEATURES,
    HIDDEN,
    SAVES,
    SLOTS,
    assert_same,
    errors,
    exact,
    function_of,
    kept_bytes,
    op_arguments,
    op_calls,
    options_of,
    reference,
    run,
    sample,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# 60 and 30 blocks of an expert: a scale of 256 of them belongs to several experts.
FORMATS = {
    "nf4": {"block_size": 32},
    "nf4, plain scales": {"double": False},
    "fp4": {"to": "fp4"},
    "int8": {"to": "int8"},
}


def quantized(tensors, **options):
    """The stacks in few bits, and the other tensors."""
    stacks = {n: quantize_matrix(tensors[n], **options) for n in ("gate_up", "down")}
    return stacks, {name: t for name, t in tensors.items() if name not in stacks}


def decoded(stacks, dtype):
    return {name: dequantize_matrix(q, dtype) for name, q in stacks.items()}


def run_dense(case, index, stacks, rest, dy, **more):
    """What dense stacks give, without their gradients."""
    got = run(function_of(case, index, **more), rest | decoded(stacks, dy.dtype), dy)
    return {name: t for name, t in got.items() if name not in stacks}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_decoded_stacks(case, dtype, form, device):
    tensors, index, dy = sample(case, dtype, device)
    stacks, rest = quantized(tensors, **FORMATS[form])
    expected = run_dense(case, index, stacks, rest, dy)
    for save in SAVES:
        assert_same(run(function_of(case, index, stacks, save=save), rest, dy), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ("mixtral", "gpt_oss"))
def test_values_are_as_good_as_those_of_torch(case, dtype, device):
    tensors, index, dy = sample(case, dtype, device)
    stacks, rest = quantized(tensors)
    dense = rest | decoded(stacks, dtype)
    wanted = exact(case, index, dense, dy)
    theirs = run(
        lambda x, weight, **more: reference(x, index, weight, **more, **options_of(case)), dense, dy
    )
    limits = errors(theirs, wanted)
    got = run(function_of(case, index, stacks), rest, dy)
    for name, error in errors(got, {n: wanted[n] for n in got}).items():
        one = wanted[name].abs().max().item() * torch.finfo(dtype).eps / 8
        assert error <= 2 * limits[name] + one, name


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("transposed", [False, True])
def test_odd_sizes_whose_codes_share_bytes_and_blocks(transposed, form, device):
    generator = torch.Generator().manual_seed(3)
    tokens, hidden, features, count = 21, 7, 5, 5

    def made(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    sizes = [(count, 2 * features, hidden), (count, hidden, features)]
    gate_up, down = (made(*s).mT.contiguous() if transposed else made(*s) for s in sizes)
    stacks = [quantize_matrix(t, **FORMATS[form]) for t in (gate_up, down)]
    assert all(q.shape == t.shape for q, t in zip(stacks, (gate_up, down)))
    index = torch.randint(0, count, (tokens, 2), generator=generator).to(device)
    found = []
    for pair in (stacks, map(dequantize_matrix, stacks)):
        generator.manual_seed(4)
        x, weight = made(tokens, hidden).requires_grad_(), made(tokens, 2).requires_grad_()
        y = experts(x, index, weight, *pair, transposed=transposed, save="L2")
        found.append([y, *torch.autograd.grad(y, (x, weight), torch.ones_like(y))])
    for got, expected in zip(*found):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("few", ("gate_up", "down"))
def test_one_stack_of_few_bits_beside_one_that_is_trained(few, device):
    for dtype in DTYPES[:2]:
        tensors, index, dy = sample("gpt_oss", dtype, device)
        stacks, _ = quantized(tensors)
        stacks = {few: stacks[few]}
        rest = {name: t for name, t in tensors.items() if name != few}
        expected = run_dense("gpt_oss", index, stacks, rest, dy)
        assert ("gate_up" in expected) != ("down" in expected)
        for save in SAVES:
            assert_same(run(function_of("gpt_oss", index, stacks, save=save), rest, dy), expected)


def test_bits_do_not_depend_on_threads():
    for dtype in DTYPES[:2]:
        tensors, index, dy = sample("mixtral", dtype, tokens=600)
        stacks, rest = quantized(tensors)
        threads, found = torch.get_num_threads(), []
        try:
            for number in (1, 2):
                torch.set_num_threads(number)
                found.append(run(function_of("mixtral", index, stacks), rest, dy))
        finally:
            torch.set_num_threads(threads)
        assert_same(*found)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([[2] * SLOTS] * 7, id="one expert has all rows"),
        pytest.param([[0, 5, 1]], id="one token"),
        pytest.param([[-1, EXPERTS, 2**20]] * 4, id="all are dropped"),
        pytest.param([], id="no tokens"),
        pytest.param([[4, 4, 4]] * 700, id="several tiles"),
    ],
)
def test_routing_at_its_ends(rows, device):
    index = torch.tensor(rows, dtype=torch.int64).view(len(rows), SLOTS)
    tensors, index, dy = sample("gpt_oss", torch.bfloat16, device, len(rows), index)
    stacks, rest = quantized(tensors)
    expected = run_dense("gpt_oss", index, stacks, rest, dy)
    for save in SAVES:
        assert_same(run(function_of("gpt_oss", index, stacks, save=save), rest, dy), expected)


def test_other_ways_to_a_gradient(device):
    tensors, index, dy = sample("gpt_oss", torch.float32, device)
    stacks, rest = quantized(tensors)
    function = function_of("gpt_oss", index, stacks)
    expected = run(function, rest, dy)

    def without_reentry(**leaves):
        return checkpoint(function, use_reentrant=False, **leaves)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for other in (without_reentry, compiled):
        assert_same(run(other, rest, dy), expected)
    with torch.inference_mode():
        assert torch.equal(function(**rest), expected["y"])
    gradient = torch.func.grad(lambda x: (function(**rest | {"x": x}) * dy).sum())(rest["x"])
    assert torch.equal(gradient, expected["x"])


def test_autocast_decodes_to_its_dtype(device):
    tensors, index, dy = sample("mixtral", torch.float32, device)
    stacks, rest = quantized(tensors)
    narrow = {n: t if n == "weight" else t.bfloat16() for n, t in rest.items()}

    def cast(**leaves):
        with torch.autocast(device, torch.bfloat16):
            return function_of("mixtral", index, stacks)(**leaves)

    got = run(cast, rest, dy)
    expected = run(function_of("mixtral", index, stacks), narrow, dy)
    assert got["y"].dtype == torch.bfloat16 and torch.equal(got["y"], expected["y"])
    assert torch.equal(got["x"].bfloat16(), expected["x"])


@pytest.mark.parametrize("save", SAVES)
def test_opcheck(save, device):
    for form in ("nf4", "int8"):
        tensors, index, dy = sample("gpt_oss", torch.float32, device)
        stacks, rest = quantized(tensors, **FORMATS[form])
        calls = op_calls("gpt_oss", rest, index.clamp(0, EXPERTS - 1), dy, save, stacks)
        for name, given in calls.items():
            torch.library.opcheck(getattr(torch.ops.headroom, name).default, (), given)


def test_nothing_decoded_is_kept(device):
    tensors, index, _ = sample("mixtral", torch.float32, device)
    stacks, rest = quantized(tensors)
    leaves = {name: t.requires_grad_() for name, t in rest.items()}
    codes = [t for q in stacks.values() for t in (q.codes, q.scales)]
    kept = kept_bytes(function_of("mixtral", index, stacks, save="L2"), leaves, codes)
    assert kept == rest["x"].nbytes + rest["weight"].nbytes + 4 * (index.numel() + EXPERTS + 1)


def test_flops_do_not_depend_on_how_stacks_lie(device):
    tensors, index, dy = sample("mixtral", torch.float32, device)
    stacks, rest = quantized(tensors)
    found = []
    for given, own in ((stacks, rest), (None, rest | decoded(stacks, dy.dtype))):
        leaves = {n: t.clone().requires_grad_(n in rest) for n, t in own.items()}
        with FlopCounterMode(display=False) as counter:
            function_of("mixtral", index, given, save="L2")(**leaves).backward(dy)
        found.append(counter.get_total_flops())
    assert found[0] == found[1] == 2 * index.numel() * HIDDEN * FEATURES * 8


def test_stacks_of_few_bits_refuse_gradients(device):
    tensors, index, dy = sample("mixtral", torch.float32, device)
    stacks, rest = quantized(tensors)
    given = op_arguments("mixtral", rest, index, "L2", stacks)
    message = "a gradient of down is wanted, but stacks of few bits have none"
    with pytest.raises(RuntimeError, match=message):
        torch.ops.headroom.experts(**given | {"wanted": 16})
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match=message):
        fakes = {n: mode.from_tensor(t) if torch.is_tensor(t) else t for n, t in given.items()}
        torch.ops.headroom.experts(**fakes | {"wanted": 16})


def changed(stack, name, change):
    q = quantize_matrix(stack)
    return dataclasses.replace(q, **{name: change(getattr(q, name))})


def bad(message, error=RuntimeError, **changes):
    return pytest.param(message, error, changes, id=message)


@pytest.mark.parametrize(
    "message, error, changes",
    [
        bad("gate_up is \\[6, 1920\\], wanted \\[experts, rows, cols\\]",
            gate_up=lambda t: quantize_matrix(t["gate_up"].flatten(1))),
        bad("gate_up is \\[5, .*\\], wanted \\[6, ",
            gate_up=lambda t: quantize_matrix(t["gate_up"][1:])),
        # Of as many codes as it would have:
        bad("gate_up is \\[6, 40, 48\\], wanted \\[6, 48, 40\\]",
            gate_up=lambda t: quantize_matrix(t["gate_up"].mT.contiguous())),
        bad("gate_up is \\[12, 24, 40\\], wanted \\[6, 48, 40\\]",
            gate_up=lambda t: quantize_matrix(t["gate_up"].reshape(12, 24, 40))),
        bad("gate_up is \\[6, 40, 48\\], wanted \\[6, 40, 80\\]", transposed=lambda t: True,
            gate_up=lambda t: quantize_matrix(t["gate_up"].mT.contiguous()),
            down=lambda t: quantize_matrix(t["down"])),
        bad("gate_up_bias must be a tensor", gate_up_bias=lambda t: t["x"]),
        bad("down is a list, wanted", TypeError, down=lambda t: [t["down"]]),
        bad("codes has .* of Float, wanted .* of uint8",
            down=lambda t: changed(t["down"], "codes", torch.Tensor.float)),
        bad("scales has", down=lambda t: changed(t["down"], "scales", lambda s: s[4:])),
    ],
)  # fmt: skip
def test_bad_inputs(message, error, changes, device):
    tensors, index, _ = sample("mixtral", torch.float32, device)
    stacks, rest = quantized(tensors)
    given = rest | stacks | {"index": index}
    spoiled = given | {name: change(tensors) for name, change in changes.items()}
    with pytest.raises(error, match=message):
        experts(**spoiled)


def test_matrices_refuse_stacks(device):
    q = quantize_matrix(torch.randn(2, 4, 64, device=device))
    with pytest.raises(RuntimeError, match="q is a stack \\[2, 4, 64\\], wanted a matrix"):
        linear_quantized(torch.randn(3, 64, device=device), q)


@pytest.mark.parametrize("form", FORMATS)
def test_a_stack_has_the_bytes_of_its_matrices_one_behind_another(form, device):
    x = torch.randn(3, 5, 7, device=device)
    q, flat = (quantize_matrix(t, **FORMATS[form]) for t in (x.mT, x.mT.flatten(0, 1)))
    assert q.shape == (3, 7, 5) and flat.shape == (21, 5)
    assert torch.equal(q.codes, flat.codes) and torch.equal(q.scales, flat.scales)
    assert torch.equal(dequantize_matrix(q), dequantize_matrix(flat).view(3, 7, 5))
