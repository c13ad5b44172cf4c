"""headroom.GradAccumulator: the mean over micro-batches, in float32, of gradients of any dtype."""

import copy
import math
import weakref

import headroom
import pytest
import torch
from headroom.grad import accumulate as accumulate_module
from torch.nn.functional import cross_entropy, mse_loss

from helpers.bits import assert_same_bits
from helpers.samples import FLOATS

ACCUMULATOR = headroom.GradAccumulator


def model(dtype=torch.float32, device="cpu"):
    torch.manual_seed(3)
    layers = torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)
    return torch.nn.Sequential(*layers).to(device, dtype)


def batches(count=16, size=8, dtype=torch.float32, device="cpu", seed=5):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count * size, 8, generator=generator).to(device, dtype)
    y = torch.randn(count * size, 4, generator=generator).to(device, dtype)
    return x, y, list(zip(x.split(size), y.split(size)))


def flat_grad(params):
    return torch.cat([p.grad.double().flatten() for p in params])


def accumulate(net, micro, source=None, **options):
    accumulator = ACCUMULATOR(net if source is None else source, **options)
    for x, y in micro:
        with accumulator.micro_batch():
            mse_loss(net(x), y).backward()
    accumulator.finish()
    return accumulator


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


# ---- The mean ------------------------------------------------------------------------------------


@pytest.mark.parametrize("compensated", [False, True], ids=["plain", "compensated"])
def test_micro_batches_give_the_gradient_of_the_big_batch(compensated, device):
    """To float32 rounding: 16 additions and a division, and torch's own sums."""
    net, big = model(device=device), model(device=device)
    x, y, micro = batches(device=device)
    mse_loss(big(x), y).backward()
    accumulate(net, micro, compensated=compensated)
    got, want = flat_grad(net.parameters()), flat_grad(big.parameters())
    assert relative(got, want) <= 4 * 2**-24


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_16_bit_gradients_lose_nothing_in_the_sum(dtype, device):
    """The mean of the micro-batches' gradients, against float64. Accumulation by backward() itself
    adds them in 16 bits and is visibly worse."""
    net, usual = model(dtype, device), model(dtype, device)
    _, _, micro = batches(64, dtype=dtype, device=device)
    exact = 0
    for x, y in micro:
        usual.zero_grad()
        mse_loss(usual(x), y).backward()
        exact = exact + flat_grad(usual.parameters()) / len(micro)
    usual.zero_grad()
    for x, y in micro:
        (mse_loss(usual(x), y) / len(micro)).backward()
    accumulate(net, micro)
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())
    error = relative(flat_grad(net.parameters()), exact)
    usual_error = relative(flat_grad(usual.parameters()), exact)
    assert error <= 8 * 2**-24
    assert usual_error > 1000 * error


def test_the_mean_where_torch_makes_float64_by_default():
    net, want = model(), model()
    _, _, micro = batches(3)
    accumulate(want, micro)
    torch.set_default_dtype(torch.float64)
    accumulate(net, micro)
    assert_same_bits([p.grad for p in net.parameters()], [p.grad for p in want.parameters()])


def test_unequal_token_counts(device):
    """The loss of the big batch is a mean over all tokens that are not padding."""
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 11).to(device)
    big = copy.deepcopy(net)
    x, labels = torch.randn(40, 8, device=device), torch.randint(11, (40,), device=device)
    labels[torch.randperm(40)[:13]] = -100
    cross_entropy(big(x), labels).backward()
    accumulator, unweighted = ACCUMULATOR(net), 0
    for part, wanted in zip(x.split([3, 20, 10, 7]), labels.split([3, 20, 10, 7])):
        tokens = int((wanted != -100).sum())
        if tokens == 0:
            continue
        with accumulator.micro_batch(weight=tokens):
            cross_entropy(net(part), wanted).backward()
            unweighted = unweighted + flat_grad(net.parameters()) / 4
    accumulator.finish()
    want = flat_grad(big.parameters())
    assert relative(flat_grad(net.parameters()), want) <= 4 * 2**-24
    assert relative(unweighted, want) > 0.01


def test_compensation_is_visible_over_many_micro_batches():
    """10,000 gradients near 1. The error of the compensated mean is that of one rounding."""
    errors = {}
    for compensated in (False, True):
        param = torch.nn.Parameter(torch.zeros(64))
        accumulator = ACCUMULATOR([param], compensated=compensated)
        generator = torch.Generator().manual_seed(0)
        exact = torch.zeros(64, dtype=torch.float64)
        for _ in range(10_000):
            param.grad = torch.rand(64, generator=generator)
            exact += param.grad.double()
            accumulator.add()
        accumulator.finish()
        errors[compensated] = relative(param.grad.double(), exact / 10_000)
    assert errors[True] <= 2 * 2**-24 and errors[False] > 10 * errors[True]


def test_one_micro_batch_is_that_batch(device):
    net, big = model(device=device), model(device=device)
    x, y, micro = batches(1, device=device)
    mse_loss(big(x), y).backward()
    accumulate(net, micro)
    assert_same_bits([p.grad for p in net.parameters()], [p.grad for p in big.parameters()])


# ---- How it is used ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["module", "optimizer", "list", "generator"])
def test_sources(form):
    net, want = model(), model()
    _, _, micro = batches(4)
    accumulate(want, micro)
    sources = {
        "module": net,
        "optimizer": headroom.optim.AdamW(net.parameters()),
        "list": list(net.parameters()),
        "generator": net.parameters(),
    }
    accumulate(net, micro, sources[form])
    assert_same_bits([p.grad for p in net.parameters()], [p.grad for p in want.parameters()])


def test_tied_parameters_count_once():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    net[1].weight = net[0].weight
    params = [net[0].weight, net[1].weight, net[0].bias]
    accumulator = ACCUMULATOR(params)
    with accumulator.micro_batch():
        net(torch.ones(2, 4)).sum().backward()
        want = net[0].weight.grad.clone()
    accumulator.finish()
    assert_same_bits([net[0].weight.grad], [want])


def test_add_in_a_loop_without_with():
    net, want = model(), model()
    _, _, micro = batches(4)
    accumulate(want, micro)
    accumulator = ACCUMULATOR(net)
    for x, y in micro:
        mse_loss(net(x), y).backward()
        accumulator.add()
        assert all(p.grad is None for p in net.parameters())
    accumulator.finish()
    assert_same_bits([p.grad for p in net.parameters()], [p.grad for p in want.parameters()])


def test_several_windows_and_no_zero_grad():
    """The mean that finish() gave is not added to the next window."""
    net, fresh = model(), model()
    _, _, micro = batches(8)
    accumulator = accumulate(net, micro[:4])
    for x, y in micro[4:]:
        with accumulator.micro_batch():
            mse_loss(net(x), y).backward()
    accumulator.finish()
    accumulate(fresh, micro[4:])
    assert_same_bits([p.grad for p in net.parameters()], [p.grad for p in fresh.parameters()])


def test_add_says_when_zero_grad_was_forgotten():
    net = model()
    _, _, micro = batches(2)
    accumulator = accumulate(net, micro)
    mse_loss(net(micro[0][0]), micro[0][1]).backward()
    with pytest.raises(RuntimeError, match=r"call zero_grad\(\) after the step"):
        accumulator.add()
    net.zero_grad(set_to_none=False)
    mse_loss(net(micro[0][0]), micro[0][1]).backward()
    with pytest.raises(RuntimeError, match="set_to_none=True"):
        accumulator.add()
    net.zero_grad()
    mse_loss(net(micro[0][0]), micro[0][1]).backward()
    accumulator.add()
    accumulator.finish()


def test_a_micro_batch_that_fails_is_left_out():
    net, want = model(), model()
    _, _, micro = batches(4)
    accumulate(want, micro)
    accumulator = ACCUMULATOR(net)
    for k, (x, y) in enumerate(micro):
        if k == 2:
            with pytest.raises(KeyError), accumulator.micro_batch():
                mse_loss(net(2 * x), y).backward()
                raise KeyError("in the loop")
            assert all(p.grad is None for p in net.parameters())
        with accumulator.micro_batch():
            mse_loss(net(x), y).backward()
    accumulator.finish()
    assert_same_bits([p.grad for p in net.parameters()], [p.grad for p in want.parameters()])


def test_parameters_without_gradients():
    """Frozen ones are left out, unused ones keep no gradient, and one that some micro-batches do
    not reach has a zero there."""
    net, frozen, unused = model(), torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(3))
    frozen.requires_grad_(False)
    rare = torch.nn.Parameter(torch.ones(()))
    accumulator = ACCUMULATOR([*net.parameters(), *frozen.parameters(), unused, rare])
    _, _, micro = batches(4)
    for k, (x, y) in enumerate(micro):
        with accumulator.micro_batch():
            loss = mse_loss(net(x), y)
            (loss + 3 * rare if k == 2 else loss).backward()
    accumulator.finish()
    assert frozen.weight.grad is None and unused.grad is None
    assert rare.grad == 0.75


def test_parameters_frozen_later():
    net = model()
    accumulator = ACCUMULATOR(net)
    net[0].requires_grad_(False)
    for x, y in batches(2)[2]:
        with accumulator.micro_batch():
            mse_loss(net(x), y).backward()
    accumulator.finish()
    assert net[0].weight.grad is None and net[2].weight.grad is not None


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("cls", [headroom.optim.AdamW, headroom.optim.Adam])
def test_our_optimizers_take_the_mean(cls, dtype, device):
    """16-bit parameters with float32 gradients: as if the gradient had been made in float32."""
    net = model(dtype, device)
    optimizer = cls(net.parameters(), lr=0.01, state_dtype=torch.float32, max_grad_norm=0.1)
    plain = [torch.nn.Parameter(p.detach().clone()) for p in net.parameters()]
    reference = cls(plain, lr=0.01, state_dtype=torch.float32)
    for _ in range(2):
        accumulate(net, batches(4, dtype=dtype, device=device)[2], optimizer)
        grads = [p.grad.clone() for p in net.parameters()]
        for p, grad in zip(plain, grads):
            if dtype != torch.float32:
                p.grad_dtype = None
            p.grad = grad
        headroom.clip_grad_norm_(plain, 0.1)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    assert_same_bits(net.parameters(), plain)


def test_with_the_scaler():
    """Every micro-batch is scaled, and the mean is unscaled by the step."""
    net, plain = model(), model()
    optimizer, reference = (headroom.optim.AdamW(m.parameters(), lr=0.01) for m in (net, plain))
    scaler = headroom.amp.GradScaler("cpu")
    _, _, micro = batches(4)
    for bad in (False, True, False):
        accumulator = ACCUMULATOR(optimizer)
        for k, (x, y) in enumerate(micro):
            with accumulator.micro_batch():
                scaler.scale(mse_loss(net(x), y) * (math.inf if bad and k == 1 else 1)).backward()
        accumulator.finish()
        assert scaler.step(optimizer) == bad  # one bad micro-batch spoils its window, no other
        scaler.update()
        if not bad:
            accumulate(plain, micro)
            reference.step()
    assert_same_bits(net.parameters(), plain.parameters())


# ---- Dtypes of gradients -------------------------------------------------------------------------


def test_float32_parameters_keep_their_grad_dtype():
    """Only those that would refuse a float32 gradient are changed."""
    params = [torch.nn.Parameter(torch.ones(2, dtype=d)) for d in FLOATS]
    ACCUMULATOR(params)
    assert [p.grad_dtype for p in params] == [torch.float32, None, None]


def test_parameters_whose_grad_dtype_cannot_be_set(monkeypatch):
    """As in an older torch: the mean is rounded to their dtype, once."""
    param = torch.nn.Parameter(torch.zeros(64).bfloat16())
    accumulator = ACCUMULATOR([param])
    wide = torch.nn.Parameter(torch.zeros(64).bfloat16())
    other = ACCUMULATOR([wide])
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        grad = torch.randn(64, generator=generator).bfloat16()
        param.grad, wide.grad = grad.clone(), grad.clone()
        accumulator.add()
        other.add()
    monkeypatch.setattr(accumulate_module, "_takes_sum", lambda param: False)
    accumulator.finish()
    monkeypatch.undo()
    other.finish()
    assert param.grad.dtype == torch.bfloat16 and wide.grad.dtype == torch.float32
    assert_same_bits([param.grad], [wide.grad.bfloat16()])


# ---- Errors --------------------------------------------------------------------------------------


def test_finish_needs_a_micro_batch():
    net = model()
    accumulator = ACCUMULATOR(net)
    with pytest.raises(RuntimeError, match=r"finish\(\) without a micro-batch"):
        accumulator.finish()
    accumulate(net, batches(2)[2])
    accumulator = accumulate(net, batches(2)[2])
    with pytest.raises(RuntimeError, match=r"finish\(\) without a micro-batch"):
        accumulator.finish()


def test_weights_that_are_no_numbers():
    accumulator = ACCUMULATOR(model())
    for weight in ("a", None, torch.ones(2)):
        with pytest.raises(TypeError, match="weight must be a number, got"):
            with accumulator.micro_batch(weight):
                pytest.fail("entered")
        with pytest.raises(TypeError, match="weight must be a number, got"):
            accumulator.add(weight)


def test_weights_that_are_tensors():
    net = model()
    accumulator = ACCUMULATOR(net)
    for tokens in (torch.tensor(3), torch.tensor([5.0])):
        with accumulator.micro_batch(tokens):
            mse_loss(net(torch.ones(1, 8)), torch.ones(1, 4)).backward()
    assert type(accumulator.state_dict()["weight"]) is float
    assert accumulator.state_dict()["weight"] == 8


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf])
def test_weights_that_are_none(weight):
    net = model()
    accumulator = ACCUMULATOR(net)
    entered = False
    with pytest.raises(ValueError, match="weight must be a finite number >= 0"):
        with accumulator.micro_batch(weight):
            entered = True
    assert not entered  # said before the work is done
    mse_loss(net(torch.ones(1, 8)), torch.ones(1, 4)).backward()
    with pytest.raises(ValueError, match="weight must be a finite number >= 0"):
        accumulator.add(weight)
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize(
    "source", [[], torch.nn.Tanh(), [torch.zeros(3)]], ids=["[]", "module", "frozen"]
)
def test_nothing_to_accumulate(source):
    with pytest.raises(ValueError, match="no parameters that require grad"):
        ACCUMULATOR(source)


def with_sums(compensated=True):
    """An accumulator in the middle of a step. (That it goes on is tested in test_resume.py.)"""
    net = model()
    accumulator = ACCUMULATOR(net, compensated=compensated)
    for x, y in batches(2)[2]:
        mse_loss(net(x), y).backward()
        accumulator.add(weight=3)
    return accumulator


BAD_SUMS = {
    "plain": (lambda s: s.update(compensated=False), "made with compensated=False"),
    "weight": (lambda s: s.update(weight=math.nan), "weight must be a finite number >= 0"),
    "fewer": (
        lambda s: s["compensations"].pop(),
        "compensations is of 3 parameters, but the accumulator has 4",
    ),
    "shape": (lambda s: s["sums"].reverse(), r"sums\[0\] is .* \(4,\), wanted .* \(32, 8\)"),
    "dtype": (lambda s: s["sums"].append(s["sums"].pop().half()), r"sums\[3\] is torch.float16"),
    "one": (lambda s: s["compensations"].__setitem__(0, None), "not of the same parameters"),
}


@pytest.mark.parametrize("name", BAD_SUMS)
def test_sums_that_do_not_fit_change_nothing(name):
    change, words = BAD_SUMS[name]
    accumulator = with_sums()
    saved = copy.deepcopy(accumulator.state_dict())
    kept = copy.deepcopy(saved)
    change(saved)
    with pytest.raises(ValueError, match=words):
        accumulator.load_state_dict(saved)
    now = accumulator.state_dict()
    assert now["weight"] == kept["weight"] == 6
    assert_same_bits([*now["sums"], *now["compensations"]], [*kept["sums"], *kept["compensations"]])


def test_a_state_without_sums_loads():
    accumulator = with_sums()
    accumulator.load_state_dict(ACCUMULATOR(model(), compensated=True).state_dict())
    assert accumulator.state_dict()["weight"] == 0
    with pytest.raises(RuntimeError, match="without a micro-batch"):
        accumulator.finish()


@pytest.mark.parametrize("source", ["live", "snapshot", "own"])
@pytest.mark.parametrize("host", [False, True])
def test_loaded_sums_are_nobody_elses(host, source):
    """The next micro-batch adds to them in place, and finish() divides them."""
    first, net = with_sums(), model()
    second = ACCUMULATOR(net, compensated=True, host=host)
    given = first.state_dict() if source == "live" else copy.deepcopy(first.state_dict())
    kept = copy.deepcopy([*given["sums"], *given["compensations"]])
    second.load_state_dict(given)
    if source == "own":
        second.load_state_dict(second.state_dict())
    x, y = batches(2)[2][0]
    with second.micro_batch(weight=3):
        mse_loss(net(x), y).backward()
    second.finish()
    assert all(param.grad is not None for param in net.parameters())
    assert_same_bits([*given["sums"], *given["compensations"]], kept)


def test_no_state_in_the_middle_of_a_micro_batch():
    accumulator = with_sums()
    saved = accumulator.state_dict()
    with accumulator.micro_batch():
        with pytest.raises(RuntimeError, match=r"^state_dict\(\) inside micro_batch\(\)"):
            accumulator.state_dict()
        with pytest.raises(RuntimeError, match=r"load_state_dict\(\) inside micro_batch\(\)"):
            accumulator.load_state_dict(saved)


def test_memory_is_freed():
    """The sums become the gradients: after zero_grad nothing is left."""
    net = model()
    accumulator = accumulate(net, batches(2)[2], compensated=True)
    assert not accumulator._sums and not accumulator._compensations
    ref = weakref.ref(net[0].weight.grad)
    net.zero_grad()
    assert ref() is None


# ---- Layers that are unfrozen, weights of 0, other kinds of gradients ----------------------------


@pytest.mark.parametrize("source", ["module", "optimizer", "list"])
def test_layers_that_are_unfrozen_later(source):
    """One more layer in each step: every gradient is that of the big batch."""
    net = model(torch.float64)
    net[2].requires_grad_(False)
    given = {
        "module": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "list": list(net.parameters()),
    }[source]
    accumulator = ACCUMULATOR(given)
    x, y, micro = batches(4, dtype=torch.float64)
    for unfreezes in (False, True, True):
        net[2].requires_grad_(unfreezes)
        big = copy.deepcopy(net)
        big.zero_grad()
        mse_loss(big(x), y).backward()
        for part, wanted in micro:
            with accumulator.micro_batch():
                mse_loss(net(part), wanted).backward()
        accumulator.finish()
        assert (net[2].weight.grad is not None) == unfreezes
        trained = [p for p in net.parameters() if p.requires_grad]
        want = flat_grad(p for p in big.parameters() if p.requires_grad)
        assert relative(flat_grad(trained), want) <= 1e-14


@pytest.mark.parametrize("source", ["module", "optimizer"])
def test_layers_that_are_added_later(source):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    accumulator = ACCUMULATOR(net if source == "module" else optimizer)
    net.append(torch.nn.Linear(4, 4))
    optimizer.add_param_group({"params": list(net[3].parameters())})
    x, y, micro = batches(4)
    for _ in range(2):
        big = copy.deepcopy(net)
        big.zero_grad()
        mse_loss(big(x), y).backward()
        for part, wanted in micro:
            with accumulator.micro_batch():
                mse_loss(net(part), wanted).backward()
        accumulator.finish()
        got, want = flat_grad(net.parameters()), flat_grad(big.parameters())
        assert relative(got, want) <= 8 * 2**-24


def test_a_micro_batch_without_labels_has_weight_0():
    """Its loss, a mean over nothing, is not a number, and neither are its gradients."""
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 11)
    x, labels = torch.randn(12, 8), torch.randint(11, (12,))
    labels[4:8] = -100
    big = copy.deepcopy(net)
    cross_entropy(big(x), labels).backward()
    accumulator = ACCUMULATOR(net)
    for part, wanted in zip(x.split(4), labels.split(4)):
        with accumulator.micro_batch(weight=(wanted != -100).sum()):
            cross_entropy(net(part), wanted).backward()
    accumulator.finish()
    assert relative(flat_grad(net.parameters()), flat_grad(big.parameters())) <= 4 * 2**-24
    with accumulator.micro_batch(weight=0):
        cross_entropy(net(x[4:8]), labels[4:8]).backward()
    accumulator.finish()
    assert all(p.grad is None for p in net.parameters())
    with pytest.raises(RuntimeError, match="without a micro-batch"):
        accumulator.finish()


@pytest.mark.parametrize("compensated", [False, True])
def test_float64_gradients_are_summed_in_float64(compensated):
    net, big = model(torch.float64), model(torch.float64)
    x, y, micro = batches(dtype=torch.float64)
    mse_loss(big(x), y).backward()
    accumulator = ACCUMULATOR(net, compensated=compensated)
    for k, (part, wanted) in enumerate(micro):
        if k == 5:
            state, accumulator = accumulator.state_dict(), ACCUMULATOR(net, compensated=compensated)
            accumulator.load_state_dict(state)
        with accumulator.micro_batch(weight=len(part)):
            mse_loss(net(part), wanted).backward()
    accumulator.finish()
    assert all(p.grad.dtype == torch.float64 for p in net.parameters())
    assert relative(flat_grad(net.parameters()), flat_grad(big.parameters())) <= 1e-14


def test_gradients_of_other_kinds_are_refused_before_anything_is_added():
    layer = torch.nn.Embedding(7, 3, sparse=True)
    dense = torch.nn.Parameter(torch.zeros(3))
    accumulator = ACCUMULATOR([dense, layer.weight])
    (layer(torch.tensor([1, 2])) + dense).sum().backward()
    with pytest.raises(TypeError, match=r"\(7, 3\) has a sparse gradient.*sparse=False"):
        accumulator.add()
    assert dense.grad is not None and accumulator.state_dict()["sums"] == [None, None]
    phase = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    accumulator = ACCUMULATOR([phase])
    phase.abs().sum().backward()
    with pytest.raises(TypeError, match="complex64 gradient.*real numbers"):
        accumulator.add()


def test_states_without_frozen_parameters_load():
    """As Headroom 0.1.0 saved them."""
    net = model()
    net[0].requires_grad_(False)
    x, y, micro = batches(2)
    accumulator = ACCUMULATOR(net)
    with accumulator.micro_batch():
        mse_loss(net(micro[0][0]), micro[0][1]).backward()
    state = accumulator.state_dict()
    state["sums"], state["compensations"] = state["sums"][2:], state["compensations"][2:]
    del state["has_any"]
    state["losts"] = state.pop("compensations")  # its name then
    other = ACCUMULATOR(net)
    other.load_state_dict(state)
    assert other.state_dict()["sums"][:2] == [None, None]
    assert_same_bits(other.state_dict()["sums"][2:], accumulator.state_dict()["sums"][2:])
