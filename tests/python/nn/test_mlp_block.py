"""The op headroom::mlp_block against formulas in float64, torch, and itself with more kept."""

import pytest
import torch
from headroom.functional.mlp import of_few_bits, wanted_gradients
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from helpers.mlp_blocks import (
    CASES,
    DTYPES,
    FEATURES,
    HIDDEN,
    NAMES,
    SAVES,
    assert_same,
    block,
    composed,
    options_of,
    run,
    sample,
)


@pytest.mark.parametrize("tile", (0, 8))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, dtype, tile, device):
    tensors, dy = sample(case, dtype, device)
    exact = run(composed(case), {n: t.double() for n, t in tensors.items()}, dy.double())
    theirs = run(composed(case), tensors, dy)
    ours = run(block(case, tile_tokens=tile), tensors, dy)
    for name, value in exact.items():
        assert ours[name].dtype == dtype and ours[name].shape == value.shape, name
        error, other = ((t[name].double() - value).abs().max().item() for t in (ours, theirs))
        unit = torch.finfo(dtype).eps * value.abs().max().item()
        # A model's casting rounds before the weight of the norm as well, which torch's does not.
        rounds = options_of(case).get("casting") != "once" and "norm" not in options_of(case)
        assert error <= (3 if rounds else 2) * other + unit, f"{name}: {error} against {other}"


@pytest.mark.parametrize("tile", (0, 5))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_what_is_kept_changes_no_bit(case, dtype, tile, device):
    norm_dtype = torch.float32 if case == "gpt2" else None
    tensors, dy = sample(case, dtype, device, norm_dtype=norm_dtype)
    everything, *others = (run(block(case, save=s, tile_tokens=tile), tensors, dy) for s in SAVES)
    for other in others:
        assert_same(other, everything)


FROZEN = {
    "all but down": {"x", "norm_weight", "norm_bias", "gate_up_weight", "gate_up_bias"},
    "matrices": {"gate_up_weight", "down_weight", "gate_up_bias", "down_bias"},
    "all but x": {*NAMES} - {"x"},
    "all but biases": {*NAMES} - {"gate_up_bias", "down_bias"},
    "all but one bias": {*NAMES} - {"down_bias"},
    "all but the norm": {*NAMES} - {"norm_weight", "norm_bias"},
    "x": {"x"},
}


@pytest.mark.parametrize("tile", (0, 5))
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_weights(frozen, save, tile, device):
    tensors, dy = sample("gpt2", torch.bfloat16, device)
    function = block("gpt2", save=save, tile_tokens=tile)
    got = run(function, tensors, dy, FROZEN[frozen])
    assert_same(got, run(function, tensors, dy), tensors.keys() - FROZEN[frozen])


def kept_bytes(function, tensors):
    """What is saved for backward, without the weights."""
    kept = []
    weights = {t.untyped_storage().data_ptr() for n, t in tensors.items() if n != "x"}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        function(**tensors)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return sum(size for address, size in storages.items() if address not in weights)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("case", ("llama", "gpt2"))
def test_kept_for_backward(case, save, device):
    dtype = torch.bfloat16
    tensors, _ = sample(case, dtype, device, (4, 50))
    width = FEATURES * (1 if case == "gpt2" else 2)
    statistics = 4 * (2 if case == "gpt2" else 1)
    elements = {"all": 2 * HIDDEN + width + FEATURES, "gate_up": HIDDEN + width, "input": HIDDEN}
    for tensor in tensors.values():
        tensor.requires_grad_()
    function = block(case, save=save)
    assert kept_bytes(function, tensors) == 200 * (2 * elements[save] + statistics)
    for name, tensor in tensors.items():
        tensor.requires_grad_(name == "x")
    only_x = {"all": HIDDEN + width, "gate_up": HIDDEN + width, "input": HIDDEN}
    assert kept_bytes(function, tensors) == 200 * (2 * only_x[save] + statistics)
    for name, tensor in tensors.items():
        tensor.requires_grad_(name == "down_weight")
    only_down = 200 * 2 * FEATURES if save != "input" else 200 * (2 * HIDDEN + statistics)
    assert kept_bytes(function, tensors) == only_down
    for tensor in tensors.values():
        tensor.requires_grad_(False)
    assert kept_bytes(function, tensors) == 0
    tensors["x"].requires_grad_()
    with torch.no_grad():
        assert kept_bytes(function, tensors) == 0


def test_opcheck(device):
    for save, case in enumerate(("llama", "apart", "gpt2")):
        tensors, dy = sample(case, torch.float32, device, (2, 3), 8, 12)
        leaves = [
            tensors[n].requires_grad_() if n in tensors else None
            for n in ("x", "norm_weight", "norm_bias", "gate_up_weight", "up_weight",
                      "down_weight", "gate_up_bias", "up_bias", "down_bias")
        ]  # fmt: skip
        norm, activation = (1, 2) if case == "gpt2" else (0, 0)
        has = wanted_gradients([tensor is not None for tensor in leaves])
        numbers, saves = (norm, 0, 1e-6, 0.0, activation, True, 4), (save, has, 0)
        *codes, features, gated, format, block_size, nested = of_few_bits().values()
        few_bits = format, block_size, nested
        torch.library.opcheck(
            torch.ops.headroom.mlp_block_workspace.default,
            (6, 8, 12, 0, 0, True, False, False, *numbers, *few_bits, *saves),
        )
        options = (*numbers, features, gated, *few_bits, *saves)
        torch.library.opcheck(torch.ops.headroom.mlp_block.default, (*leaves, *codes, *options))
        if case == "llama":
            continue
        with torch.no_grad():
            _, *kept = torch.ops.headroom.mlp_block(*leaves, *codes, *options)
        given = [None if t is None else t.detach() for t in leaves[:8]]
        options = (*options, has)
        backward = torch.ops.headroom.mlp_block_backward.default
        torch.library.opcheck(backward, (dy, *given, *codes, *kept, *options))


@pytest.mark.parametrize("case", ("llama", "gpt2"))
def test_other_ways_to_a_gradient(case, device):
    tensors, dy = sample(case, torch.float32, device)
    function = block(case)
    expected = run(function, tensors, dy)

    def reentrant(**leaves):
        names = list(leaves)
        positional = lambda *values: function(**dict(zip(names, values)))  # noqa: E731
        return checkpoint(positional, *leaves.values(), use_reentrant=True)

    def without_reentry(**leaves):
        return checkpoint(function, use_reentrant=False, **leaves)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for other in (reentrant, without_reentry, compiled):
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


def test_compiled_without_gradients(device):
    tensors, _ = sample("llama", torch.float32, device)
    compiled = torch.compile(block("llama"), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(**tensors), block("llama")(**tensors))


def test_only_some_gradients_are_asked_for(device):
    """Of those that forward kept everything for."""
    tensors, dy = sample("llama", torch.float32, device)
    for save in SAVES:
        function = block("llama", save=save, tile_tokens=6)
        expected = run(function, tensors, dy)
        leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
        y = function(**leaves)
        for name, leaf in leaves.items():
            (grad,) = torch.autograd.grad(y, leaf, dy, retain_graph=True)
            assert torch.equal(grad, expected[name]), name


def test_autocast(device):
    tensors, dy = sample("gpt2", torch.float32, device)
    narrow = {n: t if "norm" in n else t.bfloat16() for n, t in tensors.items()}
    function = block("gpt2")

    def cast(**leaves):
        with torch.autocast(device, torch.bfloat16):
            return function(**leaves)

    got, expected = run(cast, tensors, dy), run(function, narrow, dy)
    assert got["y"].dtype == torch.bfloat16
    for name, grad in got.items():
        assert torch.equal(grad.bfloat16(), expected[name].bfloat16()), name
        assert grad.dtype == (torch.bfloat16 if name == "y" else torch.float32)
    compiled = torch.compile(cast, fullgraph=True, backend="aot_eager")
    assert_same(run(compiled, tensors, dy), got)


def test_strides_odd_addresses_and_no_tokens(device):
    tensors, dy = sample("apart", torch.bfloat16, device, (4, 6))
    function = block("apart", tile_tokens=7)
    expected = run(function, tensors, dy)

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
        y = function(**leaves)
        y.backward(change(dy))
        assert torch.equal(y, expected["y"])
        for name, leaf in leaves.items():
            assert torch.equal(leaf.grad, expected[name]), name
    leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    function(**leaves).sum().backward()  # its gradient is expanded from one element
    assert_same({"x": leaves["x"].grad}, run(function, tensors, torch.ones_like(dy)))
    tensors["x"] = tensors["x"][:0]
    for save in SAVES:
        none = run(block("apart", save=save), tensors, dy[:0])
        assert none["y"].shape == (0, 6, HIDDEN)
        assert all(grad.eq(0).all() for grad in none.values())


def test_flops(device):
    tokens, product = 21, 2 * HIDDEN * FEATURES
    tensors, dy = sample("llama", torch.float32, device)
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}
    for save in SAVES:
        with FlopCounterMode(display=False) as forward:
            y = block("llama", save=save)(**leaves)
        with FlopCounterMode(display=False) as backward:
            y.backward(dy)
        assert forward.get_total_flops() == 3 * tokens * product
        assert backward.get_total_flops() == (8 if save == "input" else 6) * tokens * product
    with FlopCounterMode(display=False) as of_torch:
        composed("llama")(**leaves).backward(dy)
    assert of_torch.get_total_flops() == 9 * tokens * product


def test_names_in_a_profile(device):
    tensors, dy = sample("llama", torch.float32, device)
    run(block("llama"), tensors, dy)
    with torch.profiler.profile() as profile:
        run(block("llama"), tensors, dy)
    names = {event.name for event in profile.events()}
    assert {"headroom::mlp_block", "headroom::mlp_block_backward"} <= names


def test_second_derivative_raises(device):
    tensors, dy = sample("llama", torch.float32, device)
    leaf = tensors["x"].requires_grad_()
    (grad,) = torch.autograd.grad(block("llama")(**tensors), leaf, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative cannot be computed"):
        grad.sum().backward()


def bad(message, error=RuntimeError, **changes):
    return pytest.param(message, error, changes, id=message)


@pytest.mark.parametrize(
    "message, error, changes",
    [
        bad("x has no dimensions", x=lambda t: t["x"][0, 0, 0]),
        bad("x has dtype", x=lambda t: t["x"].double()),
        bad("gate_up must be a matrix", gate_up_weight=lambda t: t["gate_up_weight"][:-1]),
        bad("gate_up must be a matrix", gate_up_weight=lambda t: t["gate_up_weight"][:, :-1]),
        bad("must be matrices", down_weight=lambda t: t["down_weight"][0]),
        bad("down must be a matrix", down_weight=lambda t: t["down_weight"][:-1]),
        bad("gate_up has dtype", gate_up_weight=lambda t: t["gate_up_weight"].half()),
        bad("up must be a matrix", up_weight=lambda t: t["gate_up_weight"]),
        bad("gate_up_bias must be a tensor", gate_up_bias=lambda t: t["norm_weight"]),
        bad("norm_weight must be a tensor", norm_weight=lambda t: t["norm_weight"][1:]),
        bad("norm_weight has dtype", norm_weight=lambda t: t["norm_weight"].double()),
        bad("norm_bias", norm_bias=lambda t: t["norm_weight"]),
        bad("up_bias", up_bias=lambda t: t["gate_up_weight"][:FEATURES, 0]),
        bad("eps is -1", eps=lambda t: -1.0),
        bad("tile_tokens is -1", tile_tokens=lambda t: -1),
        bad("norm is 'rsm'", ValueError, norm=lambda t: "rsm"),
        bad("casting is 'lama'", ValueError, casting=lambda t: "lama"),
        bad("activation is 'swish'", ValueError, activation=lambda t: "swish"),
        bad("save is 'none'", ValueError, save=lambda t: "none"),
        bad("casting is 1, wanted HR_NORM_ONCE", norm=lambda t: "layer", casting=lambda t: "llama"),
    ],
)
def test_bad_inputs(message, error, changes, device):
    tensors, _ = sample("llama", torch.float32, device)
    before = {name: t.clone() for name, t in tensors.items()}
    with pytest.raises(error, match=message):
        block("llama")(**tensors | {name: change(tensors) for name, change in changes.items()})
    for name, tensor in tensors.items():
        assert torch.equal(tensor, before[name])
