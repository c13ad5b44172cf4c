"""The op headroom::experts against formulas in float64, transformers, and itself with more kept."""

import pytest
import torch
from headroom.functional import experts
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
    TOKENS,
    assert_same,
    errors,
    exact,
    function_of,
    grouped_mm,
    kept_bytes,
    op_calls,
    options_of,
    reference,
    run,
    sample,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_as_good_as_those_of_torch(case, dtype, device):
    tensors, index, dy = sample(case, dtype, device)
    given = options_of(case)
    got = run(function_of(case, index), tensors, dy)
    theirs = run(
        lambda x, weight, **rest: reference(x, index, weight, **rest, **given), tensors, dy
    )
    wanted = exact(case, index, tensors, dy)
    limits = errors(theirs, wanted)
    for name, error in errors(got, wanted).items():
        assert got[name].dtype == dtype and got[name].shape == wanted[name].shape
        one = wanted[name].abs().max().item() * torch.finfo(dtype).eps / 8
        assert error <= 2 * limits[name] + one, name


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("mixtral", torch.float32),
        ("gpt_oss", torch.float32),
        ("mixtral", torch.bfloat16),
        ("gemma4", torch.bfloat16),
    ],
)
def test_errors_are_not_larger_than_those_of_grouped_mm(case, dtype):
    """Of transformers' experts, whose indices must be experts. In float32 both round the same sums;
    a weight's gradient is then a product of two of them, and not of one and dy."""
    generator = torch.Generator().manual_seed(0)
    index = torch.rand(400, EXPERTS, generator=generator).topk(SLOTS).indices
    tensors, _, dy = sample(case, dtype, tokens=400, index=index)
    wanted = exact(case, index, tensors, dy)
    limits = errors(run(grouped_mm(case, index), tensors, dy), wanted)
    for name, error in errors(run(function_of(case, index), tensors, dy), wanted).items():
        most = 1.0 if dtype == torch.bfloat16 else 1.12 if name == "weight" else 1.05
        assert error <= most * limits[name], (name, error / limits[name])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_bits_do_not_depend_on_what_is_kept_or_on_threads(case, dtype, device):
    tensors, index, dy = sample(case, dtype, device, tokens=600)
    threads = torch.get_num_threads()
    expected = run(function_of(case, index), tensors, dy)
    try:
        for number in (1, 2) if device == "cpu" else (threads,):
            torch.set_num_threads(number)
            for save in SAVES:
                assert_same(run(function_of(case, index, save=save), tensors, dy), expected)
    finally:
        torch.set_num_threads(threads)


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
@pytest.mark.parametrize("type", (torch.int64, torch.int32, torch.int16), ids=str)
@pytest.mark.parametrize("case", ("mixtral", "gpt_oss"))
def test_routing_at_its_ends(case, type, rows, device):
    index = torch.tensor(rows, dtype=torch.int64).view(len(rows), -1 if rows else SLOTS)
    if type == torch.int16:
        index = index.clamp(max=2**15 - 1)
    tensors, index, dy = sample(case, torch.float32, device, len(rows), index.to(type))
    wanted = exact(case, index, tensors, dy)
    for save in SAVES:
        got = run(function_of(case, index, save=save), tensors, dy)
        for name, value in wanted.items():
            most = value.abs().max().item() if value.numel() else 0.0
            assert (got[name] - value).abs().le(3e-6 * most).all(), name
            if not rows or EXPERTS in rows[0]:
                assert got[name].eq(0).all()


def test_many_rows_of_one_expert_come_in_tiles(device):
    """Gradients of 16 bits are then added up in float32."""
    tokens = 1100
    index = torch.zeros(tokens, 1, dtype=torch.int64)
    index[::3] = 4
    for case in ("llama4", "nemotron"):
        tensors, index, dy = sample(case, torch.bfloat16, device, tokens, index)
        wanted = exact(case, index, tensors, dy)
        got = run(function_of(case, index), tensors, dy)
        for name in ("gate_up", "down"):
            error = (got[name].double() - wanted[name]).abs().max() / wanted[name].abs().max()
            assert error < 0.01, (case, name)


def test_strides_and_odd_addresses(device):
    tensors, index, dy = sample("gpt_oss", torch.bfloat16, device)
    expected = run(function_of("gpt_oss", index), tensors, dy)

    def gapped(t):  # rows with gaps, at an odd address
        wide = torch.zeros(*t.shape[:-1], t.shape[-1] + 3, dtype=t.dtype, device=t.device)
        return wide[..., 1:-2].copy_(t)

    changed = (
        gapped,
        lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
        lambda t: torch.stack((t, t), -1)[..., 0],
    )
    for change in changed:
        leaves = {name: change(t).requires_grad_() for name, t in tensors.items()}
        y = function_of("gpt_oss", change(index))(**leaves)
        y.backward(change(dy))
        assert torch.equal(y, expected["y"])
        for name, leaf in leaves.items():
            assert torch.equal(leaf.grad, expected[name]), name
    leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    function_of("gpt_oss", index)(**leaves).sum().backward()  # its gradient is one element
    other = run(function_of("gpt_oss", index), tensors, torch.ones_like(dy))
    assert torch.equal(leaves["x"].grad, other["x"])


def test_weights_in_float32_beside_16_bits(device):
    tensors, index, dy = sample("mixtral", torch.bfloat16, device, weight=torch.float32)
    got, wanted = (
        f(function_of("mixtral", index), tensors, dy)
        if f is run
        else f("mixtral", index, tensors, dy)
        for f in (run, exact)
    )
    assert got["weight"].dtype == torch.float32
    error = (got["weight"].double() - wanted["weight"]).abs().max() / wanted["weight"].abs().max()
    assert error < 0.01


def test_autocast_rounds_stacks_expert_by_expert(device):
    tensors, index, dy = sample("gpt_oss", torch.float32, device, tokens=600)
    narrow = {n: t if n == "weight" else t.bfloat16() for n, t in tensors.items()}

    def cast(**leaves):
        with torch.autocast(device, torch.bfloat16):
            return function_of("gpt_oss", index)(**leaves)

    got, expected = run(cast, tensors, dy), run(function_of("gpt_oss", index), narrow, dy)
    assert got["y"].dtype == torch.bfloat16
    for name, grad in got.items():
        assert grad.dtype == (torch.bfloat16 if name == "y" else torch.float32), name
        if name in ("gate_up", "down"):  # which need not be rounded
            assert (grad - expected[name]).abs().max() <= grad.abs().max() / 128
        else:
            assert torch.equal(grad.bfloat16(), expected[name].bfloat16()), name
    compiled = torch.compile(cast, fullgraph=True, backend="aot_eager")
    assert_same(run(compiled, tensors, dy), got)


@pytest.mark.parametrize("save", SAVES)
def test_bytes_that_are_kept(save, device):
    for dtype in DTYPES[:2]:
        tensors, index, _ = sample("mixtral", dtype, device, tokens=400, weight=torch.float32)
        for tensor in tensors.values():
            tensor.requires_grad_()
        function = function_of("mixtral", index, save=save)
        per_token = HIDDEN + {"L0": 3, "L1": 2, "L2": 0}[save] * SLOTS * FEATURES
        routing = 400 * SLOTS * 8 + 4 * (EXPERTS + 1)  # order and weight, offsets
        assert kept_bytes(function, tensors) == 400 * per_token * dtype.itemsize + routing
        for name in ("gate_up", "down"):
            tensors[name].requires_grad_(False)
        without_x = 0 if save == "L2" else 400 * HIDDEN * dtype.itemsize
        assert (
            kept_bytes(function, tensors) == 400 * per_token * dtype.itemsize + routing - without_x
        )
        with torch.no_grad():
            assert kept_bytes(function, tensors) == 0


def test_only_some_gradients_are_asked_for(device):
    tensors, index, dy = sample("gpt_oss", torch.float32, device)
    for save in SAVES:
        function = function_of("gpt_oss", index, save=save)
        expected = run(function, tensors, dy)
        leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
        y = function(**leaves)
        for name, leaf in leaves.items():
            (grad,) = torch.autograd.grad(y, leaf, dy, retain_graph=True)
            assert torch.equal(grad, expected[name]), name
        for name in leaves:  # of those that forward kept nothing for
            alone = {n: t.clone().requires_grad_(n == name) for n, t in tensors.items()}
            function(**alone).backward(dy)
            assert torch.equal(alone[name].grad, expected[name]), name


@pytest.mark.parametrize("case", ("mixtral", "gpt_oss"))
def test_other_ways_to_a_gradient(case, device):
    tensors, index, dy = sample(case, torch.float32, device)
    function = function_of(case, index)
    expected = run(function, tensors, dy)

    def without_reentry(**leaves):
        return checkpoint(function, use_reentrant=False, **leaves)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for other in (without_reentry, compiled):
        assert_same(run(other, tensors, dy), expected)
    with torch.inference_mode():
        assert torch.equal(function(**tensors), expected["y"])
    leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    with torch.autograd.graph.save_on_cpu():
        y = function(**leaves)
    y.backward(dy, retain_graph=True)
    y.backward(dy)
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, 2 * expected[name]), name


@pytest.mark.parametrize("save", SAVES)
def test_opcheck(save, device):
    for case in ("mixtral", "gpt_oss"):
        tensors, index, dy = sample(case, torch.float32, device)
        index = index.clamp(0, EXPERTS - 1)  # rows that are dropped are not written
        calls = op_calls(case, tensors, index, dy, save)
        for name in ("experts", "experts_backward", "experts_workspace"):
            op = getattr(torch.ops.headroom, name).default
            torch.library.opcheck(op, (), calls.pop(name))
        assert not calls


def test_flops(device):
    rows, product = TOKENS * SLOTS, 2 * HIDDEN * FEATURES
    tensors, index, dy = sample("mixtral", torch.float32, device)
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    for save in SAVES:
        with FlopCounterMode(display=False) as forward:
            y = function_of("mixtral", index, save=save)(**leaves)
        with FlopCounterMode(display=False) as backward:
            y.backward(dy)
        assert forward.get_total_flops() == 3 * rows * product
        assert backward.get_total_flops() == (8 if save == "L2" else 6) * rows * product


def test_names_in_a_profile(device):
    tensors, index, dy = sample("mixtral", torch.float32, device)
    with torch.profiler.profile() as profile:
        run(function_of("mixtral", index), tensors, dy)
    names = {event.name for event in profile.events()}
    assert {"headroom::experts", "headroom::experts_backward"} <= names


def test_second_derivative_raises(device):
    tensors, index, dy = sample("mixtral", torch.float32, device)
    leaf = tensors["x"].requires_grad_()
    y = function_of("mixtral", index)(**tensors)
    (grad,) = torch.autograd.grad(y, leaf, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative cannot be computed"):
        grad.sum().backward()


def bad(message, error=RuntimeError, **changes):
    return pytest.param(message, error, changes, id=message)


BAD = [
    bad("x must be a matrix", x=lambda t: t["x"][0]),
    bad("x has dtype", x=lambda t: t["x"].double()),
    bad("x is None", TypeError, x=lambda t: None),
    bad("weight must be a matrix", weight=lambda t: t["weight"][1:]),
    bad("weight has dtype", weight=lambda t: t["weight"].double()),
    bad("config->weight_dtype is f16", weight=lambda t: t["weight"].half()),
    bad("index has dtype", index=lambda t: t["index"].float()),
    bad("index has another shape", index=lambda t: t["index"][:, 1:]),
    bad("down is .*, wanted .experts, rows, cols", down=lambda t: t["down"][0]),
    bad("gate_up must be a tensor", gate_up=lambda t: t["gate_up"][1:]),
    bad("gate_up must be a tensor", gate_up=lambda t: t["gate_up"][:, 1:]),
    bad("params->down is bf16", down=lambda t: t["down"].bfloat16()),
    bad("gate_up must be a tensor", down=lambda t: t["down"][..., 1:]),
    bad("down_bias must be a tensor", down_bias=lambda t: t["x"]),
    bad("gate_up_bias has dtype", gate_up_bias=lambda t: t["x"].half()),
    bad("activation is 'relu', wanted", ValueError, activation=lambda t: "relu"),
    bad("save is 'L5', wanted", ValueError, save=lambda t: "L5"),
    bad("gated is 1", TypeError, gated=lambda t: 1),
    bad("alpha is 0", ValueError, alpha=lambda t: 0),
    bad("limit is inf", ValueError, limit=lambda t: float("inf")),
    bad("limit must be a number", TypeError, limit=lambda t: "x"),
    bad("config->interleaved is 1, wanted 0 without", gated=lambda t: False,
        interleaved=lambda t: True, gate_up=lambda t: t["gate_up"][:, :FEATURES]),
]  # fmt: skip


@pytest.mark.parametrize("message, error, changes", BAD)
def test_bad_inputs(message, error, changes, device):
    tensors, index, _ = sample("mixtral", torch.float32, device)
    given = tensors | {"index": index}
    before = {name: t.clone() for name, t in given.items()}
    changed = given | {name: change(given) for name, change in changes.items()}
    with pytest.raises(error, match=message):
        experts(**changed)
    assert all(torch.equal(t, before[name]) for name, t in given.items())
    with FakeTensorMode() as mode:  # or a graph would fail when it runs
        fakes = {n: mode.from_tensor(t) if torch.is_tensor(t) else t for n, t in changed.items()}
        with pytest.raises(error):
            experts(**fakes)
