"""Adapters of headroom::experts against their sum with the stacks in float64, factored products in
torch, and themselves with more kept."""

import pytest
import torch
import torch.nn.functional as F
from headroom.functional import dequantize_matrix, experts, quantize_matrix
from headroom.functional.experts import BITS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from helpers.expert_layers import (
    ADAPTERS,
    CASES,
    EXPERTS,
    FEATURES,
    HIDDEN,
    SAVES,
    SCALES,
    SLOTS,
    TOKENS,
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

RANK = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("adapter", [None, torch.float32], ids=["same", "float32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_as_good_as_those_of_torch(case, dtype, adapter, device):
    tensors, index, dy = sample(case, dtype, device, rank=RANK, adapter=adapter)
    narrow = {name: t.to(dtype) for name, t in tensors.items()}
    theirs = run(
        lambda x, weight, **rest: reference(x, index, weight, **rest, **options_of(case)),
        narrow,
        dy,
    )
    wanted = exact(case, index, narrow, dy)
    limits = errors(theirs, wanted)
    got = run(function_of(case, index), tensors, dy)
    for name, error in errors(got, wanted).items():
        own = adapter if adapter and name in ADAPTERS else dtype
        assert got[name].dtype == own and got[name].shape == wanted[name].shape
        one = wanted[name].abs().max().item() * torch.finfo(dtype).eps / 8
        assert error <= 2 * limits[name] + one, name


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_bits_do_not_depend_on_what_is_kept_or_on_threads(case, dtype, device):
    tensors, index, dy = sample(case, dtype, device, tokens=600, rank=RANK)
    threads = torch.get_num_threads()
    expected = run(function_of(case, index), tensors, dy)
    try:
        for number in (1, 2) if device == "cpu" else (threads,):
            torch.set_num_threads(number)
            for save in SAVES:
                assert_same(run(function_of(case, index, save=save), tensors, dy), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("form", ("nf4", "int8"))
def test_beside_stacks_of_few_bits(form, dtype, device):
    """The bits of decoded stacks."""
    tensors, index, dy = sample("gpt_oss", dtype, device, rank=RANK, adapter=torch.float32)
    stacks = {name: quantize_matrix(tensors.pop(name), form) for name in ("gate_up", "down")}
    decoded = {name: dequantize_matrix(q, dtype) for name, q in stacks.items()}
    expected = run(function_of("gpt_oss", index), tensors | decoded, dy)
    expected = {name: t for name, t in expected.items() if name not in stacks}
    for save in SAVES:
        got = run(function_of("gpt_oss", index, stacks, save=save), tensors, dy)
        assert_same(got, expected)
        assert got["gate_up_a"].dtype == torch.float32 and got["gate_up_a"].any()


@pytest.mark.parametrize("own", [("gate_up_a", "gate_up_b"), ("down_a", "down_b")], ids=str)
def test_one_stack_has_an_adapter(own, device):
    tensors, index, dy = sample("gpt_oss", torch.float32, device, rank=RANK)
    some = {name: t for name, t in tensors.items() if name not in ADAPTERS or name in own}
    got, wanted = run(function_of("gpt_oss", index), some, dy), exact("gpt_oss", index, some, dy)
    for name, value in wanted.items():
        assert (got[name] - value).abs().max() <= 3e-6 * value.abs().max(), name


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([[2] * SLOTS] * 7, id="one expert has all rows, each token three"),
        pytest.param([[0, 5, 1]], id="one token"),
        pytest.param([[-1, EXPERTS, 2**20]] * 4, id="all are dropped"),
        pytest.param([], id="no tokens"),
        pytest.param([[4], [4], [1]], id="one slot"),
    ],
)
@pytest.mark.parametrize("case", ("mixtral", "gpt_oss"))
def test_routing_at_its_ends(case, rows, device):
    """Experts without rows get gradients of zero."""
    index = torch.tensor(rows, dtype=torch.int64).view(len(rows), -1 if rows else SLOTS)
    tensors, index, dy = sample(case, torch.float32, device, len(rows), index, rank=RANK)
    wanted = exact(case, index, tensors, dy)
    empty = [e for e in range(EXPERTS) if not (index == e).any()]
    for save in SAVES:
        got = run(function_of(case, index, save=save), tensors, dy)
        for name, value in wanted.items():
            most = value.abs().max().item() if value.numel() else 0.0
            assert (got[name] - value).abs().le(3e-6 * most).all(), name
        for name in ADAPTERS:
            assert got[name][empty].eq(0).all()


def test_many_rows_of_one_expert_come_in_tiles(device):
    """Gradients of 16 bits are then added up in float32."""
    tokens = 1100
    index = torch.zeros(tokens, 1, dtype=torch.int64)
    index[::3] = 4
    for case in ("llama4", "nemotron"):
        for adapter in (torch.bfloat16, torch.float32):
            tensors, index, dy = sample(
                case, torch.bfloat16, device, tokens, index, rank=RANK, adapter=adapter
            )
            got = run(function_of(case, index), tensors, dy)
            wanted = exact(case, index, tensors, dy)
            for name in ADAPTERS:
                error = (got[name].double() - wanted[name]).abs().max() / wanted[name].abs().max()
                assert error < 0.02, (case, name)


def test_gradients_of_many_tiles_are_summed_in_float32(device, monkeypatch):
    """In bfloat16 a sum of positive numbers would stop growing at some hundred of them."""
    monkeypatch.setitem(SCALES, "down", 1.5)  # for positive sums
    tokens = 1500
    index = torch.zeros(tokens, 1, dtype=torch.int64, device=device)
    tensors, index, dy = sample("nemotron", torch.bfloat16, device, tokens, index, rank=RANK)
    tensors, dy = {name: t.abs() for name, t in tensors.items()}, dy.abs()
    wanted = exact("nemotron", index, tensors, dy)
    given = op_calls("nemotron", tensors, index, dy, "L2")["experts_backward"]
    found = torch.ops.headroom.experts_backward(**given | {"tile_rows": 1})
    for name, got in zip(BITS, found):
        if name in (*ADAPTERS, "gate_up", "down"):
            error = (got.double() - wanted[name]).abs().max() / wanted[name].abs().max()
            assert error < 0.02, name


def test_only_some_gradients_are_asked_for(device):
    tensors, index, dy = sample("gpt_oss", torch.float32, device, rank=RANK)
    for save in SAVES:
        function = function_of("gpt_oss", index, save=save)
        expected = run(function, tensors, dy)
        for name in tensors:
            alone = {n: t.clone().requires_grad_(n == name) for n, t in tensors.items()}
            function(**alone).backward(dy)
            assert torch.equal(alone[name].grad, expected[name]), name


def test_nothing_of_adapters_is_kept(device):
    """But x, which the gradient of the first pair reads."""
    tensors, index, _ = sample("mixtral", torch.float32, device, rank=RANK)
    leaves = {n: t.clone().requires_grad_(n in ADAPTERS) for n, t in tensors.items()}
    given = leaves["x"].nbytes + leaves["weight"].nbytes
    for save, elements in zip(SAVES, (3, 2, 0)):
        kept = kept_bytes(function_of("mixtral", index, save=save), leaves)
        assert kept == given + 4 * (index.numel() * (elements * FEATURES + 1) + EXPERTS + 1)


@pytest.mark.parametrize("case", ("mixtral", "gpt_oss"))
def test_other_ways_to_a_gradient(case, device):
    tensors, index, dy = sample(case, torch.float32, device, rank=RANK)
    function = function_of(case, index)
    expected = run(function, tensors, dy)

    def without_reentry(**leaves):
        return checkpoint(function, use_reentrant=False, **leaves)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for other in (without_reentry, compiled):
        assert_same(run(other, tensors, dy), expected)
    with torch.inference_mode():
        assert torch.equal(function(**tensors), expected["y"])
    gradient = torch.func.grad(lambda a: (function(**tensors | {"down_a": a}) * dy).sum())
    assert torch.equal(gradient(tensors["down_a"]), expected["down_a"])


def test_autocast_rounds_adapters_expert_by_expert(device):
    tensors, index, dy = sample("gpt_oss", torch.float32, device, rank=RANK)
    narrow = {n: t if n == "weight" else t.bfloat16() for n, t in tensors.items()}

    def cast(**leaves):
        with torch.autocast(device, torch.bfloat16):
            return function_of("gpt_oss", index)(**leaves)

    got, expected = run(cast, tensors, dy), run(function_of("gpt_oss", index), narrow, dy)
    assert torch.equal(got["y"], expected["y"])
    for name in ADAPTERS:
        assert got[name].dtype == torch.float32
        assert (got[name] - expected[name]).abs().max() <= got[name].abs().max() / 128


def test_strides(device):
    tensors, index, dy = sample("gpt_oss", torch.bfloat16, device, rank=RANK)
    expected = run(function_of("gpt_oss", index), tensors, dy)
    changed = {n: t.mT.contiguous().mT if n in ADAPTERS else t for n, t in tensors.items()}
    leaves = {n: t.detach().requires_grad_() for n, t in changed.items()}
    function_of("gpt_oss", index)(**leaves).backward(dy)
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, expected[name]), name


@pytest.mark.parametrize("save", SAVES)
def test_opcheck(save, device):
    tensors, index, dy = sample("gpt_oss", torch.float32, device, rank=RANK)
    calls = op_calls("gpt_oss", tensors, index.clamp(0, EXPERTS - 1), dy, save)
    for name, given in calls.items():
        torch.library.opcheck(getattr(torch.ops.headroom, name).default, (), given)


def factored(x, index, weight, gate_up, down, adapters):
    """In torch, with the products of each expert that LoRA needs, and no more."""
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        for slot in range(index.shape[1]):
            tokens = (index[:, slot] == e).nonzero()[:, 0]
            rows, matrices = x[tokens], zip((gate_up, down), ("gate_up", "down"))
            for stack, name in matrices:
                a, b = adapters[f"{name}_a"][e], adapters[f"{name}_b"][e]
                rows = rows @ stack[e].mT + SCALES[name] * (rows @ a.mT) @ b.mT
                if name == "gate_up":
                    gate, up = rows.chunk(2, -1)
                    rows = F.silu(gate) * up
            y = y.index_add(0, tokens, rows * weight[tokens, slot, None])
    return y


@pytest.mark.parametrize("wanted", [("x", *ADAPTERS), ADAPTERS, ("down_a", "gate_up_b"), ("x",)])
def test_flops_are_those_of_torch_and_what_is_computed_again(wanted, device):
    tensors, index, dy = sample("mixtral", torch.float32, device, rank=RANK)
    index = index.clamp(0, EXPERTS - 1)
    leaves = {n: t.clone().requires_grad_(n in wanted) for n, t in tensors.items()}
    rows = 2 * TOKENS * SLOTS
    passes = []
    for function in (function_of("mixtral", index), factored):
        given = leaves
        if function is factored:
            own = {name: leaves[name] for name in ADAPTERS}
            given = {n: t for n, t in leaves.items() if n not in ADAPTERS}
            given |= {"index": index, "adapters": own}
        with FlopCounterMode(display=False) as forward:
            y = function(**given)
        with FlopCounterMode(display=False) as backward:
            y.backward(dy)
        passes.append((forward.get_total_flops(), backward.get_total_flops()))
    (own, own_back), (theirs, theirs_back) = passes
    again = rows * RANK * HIDDEN * ("gate_up_b" in wanted)
    again += rows * (RANK + 1) * FEATURES * ("down_b" in wanted)
    assert own == theirs and own_back == theirs_back + again


def bad(message, error=RuntimeError, **changes):
    return pytest.param(message, error, changes, id=message)


@pytest.mark.parametrize(
    "message, error, changes",
    [
        bad("gate_up_a must be a tensor \\[6, rank, 40\\]",
            gate_up_adapter=lambda a, b, scale: (b, a, scale)),
        bad("gate_up_b must be a tensor \\[6, 48, 3\\]",
            gate_up_adapter=lambda a, b, scale: (a, b[:, 1:], scale)),
        bad("down_a must be a tensor \\[6, rank, 24\\] with a rank of 1",
            down_adapter=lambda a, b, scale: (a[:, :0], b[..., :0], scale)),
        bad("down_a must be a tensor", down_adapter=lambda a, b, scale: (a[1:], b, scale)),
        bad("down_b has dtype", down_adapter=lambda a, b, scale: (a, b.bfloat16(), scale)),
        bad("params->down_adapter is bf16",
            down_adapter=lambda a, b, scale: (a.bfloat16(), b.bfloat16(), scale)),
        bad("down_a has dtype", down_adapter=lambda a, b, scale: (a.double(), b, scale)),
        bad("params->down_adapter.scale is", down_adapter=lambda a, b, scale: (a, b, 1e300)),
        bad("A of down_adapter is None", TypeError,
            down_adapter=lambda a, b, scale: (None, b, scale)),
        bad("scale of gate_up_adapter must be a number", TypeError,
            gate_up_adapter=lambda a, b, scale: (a, b, "x")),
        bad("gate_up_adapter is a list, wanted a tuple", TypeError,
            gate_up_adapter=lambda *pair: [*pair]),
        bad("down_adapter is a tuple of 2", TypeError, down_adapter=lambda a, b, scale: (a, b)),
    ],
)  # fmt: skip
def test_bad_inputs(message, error, changes, device):
    tensors, index, _ = sample("mixtral", torch.float32, device, rank=RANK)
    given = {name: t for name, t in tensors.items() if name not in ADAPTERS} | {"index": index}
    for name, scale in SCALES.items():
        change = changes.get(f"{name}_adapter", lambda *same: same)
        given[f"{name}_adapter"] = change(tensors[f"{name}_a"], tensors[f"{name}_b"], scale)
    with pytest.raises(error, match=message):
        experts(**given)
    if "scale is" in message:
        return  # a number that no fake looks at
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(error):
        experts(**given)


def test_half_an_adapter_is_refused(device):
    tensors, index, _ = sample("mixtral", torch.float32, device, rank=RANK)
    given = op_arguments("mixtral", tensors, index, "L2")
    for name in ("gate_up_a", "down_b"):
        with pytest.raises(RuntimeError, match=f"{name} is None, but"):
            torch.ops.headroom.experts(**given | {name: None})
    message = "a gradient of the adapter of down is wanted, but its rank is 0"
    none = {"down_a": None, "down_b": None, "wanted": BITS["down_b"]}
    with pytest.raises(RuntimeError, match=message):
        torch.ops.headroom.experts(**given | none)
