"""headroom.amp.GradScaler beside torch.amp.GradScaler, with torch's optimizers and with ours."""

import copy
import inspect
import math
import pickle
import re
from functools import partial

import headroom
import pytest
import torch
from torch.amp import GradScaler as TorchScaler

from helpers.bits import assert_same_bits, bits

Scaler = headroom.amp.GradScaler
OURS = headroom.optim.AdamW
OPTIMIZERS = pytest.mark.parametrize(  # the second with 8-bit and float32 moments
    "make", [OURS, partial(headroom.optim.AdamW8bit, min_8bit_size=6)], ids=["32-bit", "8-bit"]
)
BOTH = pytest.mark.parametrize("cls", [Scaler, TorchScaler], ids=["ours", "torch"])
TORCHS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}
OVERFLOWS = [0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
VALUES = [math.inf, -math.inf, math.nan]


def parameters(shapes=((4, 3), (5,), ()), device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes
    ]


def set_grads(params, scale, seed, bad=None):
    """Gradients times `scale`, which must be a power of two, and one `bad` in the second."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device) * scale
    if bad is not None:
        params[1].grad[2] = bad


def start(scaler, device="cpu"):
    """Makes the scale tensor, as the first loss does."""
    scaler.scale(torch.zeros((), device=device))
    return scaler


def run(scaler, optimizer, params, overflows=OVERFLOWS, unscale=False):
    """A step per entry of `overflows`. Returns the scales before each."""
    start(scaler, params[0].device.type)
    scales = []
    for step, overflow in enumerate(overflows):
        scales.append(scaler.get_scale())
        set_grads(params, scales[-1], step, VALUES[step % 3] if overflow else None)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return scales


def states(optimizer):
    return [v for entry in optimizer.state.values() for v in entry.values() if torch.is_tensor(v)]


def snapshot(params, optimizer):
    return [bits(t).clone() for t in (*params, *states(optimizer))]


def unchanged(params, optimizer, before):
    now = snapshot(params, optimizer)
    return len(now) == len(before) and all(map(torch.equal, now, before))


# ---- Beside torch's ------------------------------------------------------------------------------


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("name", TORCHS)
def test_torchs_optimizers_get_the_bits_of_torchs_scaler(name, unscale, device):
    sides = []
    for cls in (Scaler, TorchScaler):
        params = parameters(device=device)
        optimizer = TORCHS[name](params)
        scaler = cls(device, growth_interval=3)
        scales = run(scaler, optimizer, params, unscale=unscale)
        sides.append((params, states(optimizer), [p.grad for p in params], scales, scaler))
    (params, state, grads, scales, scaler), torchs = sides[0], sides[1]
    assert_same_bits(params, torchs[0])
    assert_same_bits(state, torchs[1])
    assert_same_bits(grads, torchs[2])
    assert scales == torchs[3] and len(set(scales)) >= 3
    assert scaler.get_scale() == torchs[4].get_scale()


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@BOTH
@OPTIMIZERS
def test_ours_has_the_bits_of_an_unscaled_run_without_the_skipped_steps(make, cls, unscale, device):
    """Under our scaler, and under torch's. Scales are powers of two: scaling rounds nothing."""
    params, plain = parameters(device=device), parameters(device=device)
    optimizer, reference = make(params, lr=0.01), make(plain, lr=0.01)
    scaler = cls(device, growth_interval=3)
    scales = run(scaler, optimizer, params, unscale=unscale)
    for step, overflow in enumerate(OVERFLOWS):
        if not overflow:
            set_grads(plain, 1.0, step)
            reference.step()
    assert_same_bits(params, plain)
    assert_same_bits(states(optimizer), states(reference))
    other = parameters(device=device)
    assert scales == run(
        TorchScaler(device, growth_interval=3), TORCHS["adamw"](other), other, unscale=unscale
    )


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("max_norm", [0.1, 1e5])
@OPTIMIZERS
def test_clipping_in_the_step_has_the_bits_of_clipping_before_it(make, max_norm, unscale, device):
    params, plain = parameters(device=device), parameters(device=device)
    optimizer, reference = make(params, lr=0.01, max_grad_norm=max_norm), make(plain, lr=0.01)
    run(Scaler(device, growth_interval=3), optimizer, params, unscale=unscale)
    scaler = start(Scaler(device, growth_interval=3), device)
    for step, overflow in enumerate(OVERFLOWS):
        set_grads(plain, scaler.get_scale(), step, VALUES[step % 3] if overflow else None)
        scaler.unscale_(reference)
        headroom.clip_grad_norm_(plain, max_norm)
        scaler.step(reference)
        scaler.update()
    assert_same_bits(params, plain)
    assert_same_bits(states(optimizer), states(reference))


def test_clipping_over_several_groups_with_the_scaler(device):
    def groups(params):
        return [{"params": [p], "lr": 0.1 / (k + 1)} for k, p in enumerate(params)]

    params, plain = parameters(device=device), parameters(device=device)
    optimizer, reference = OURS(groups(params)), OURS(groups(plain))
    scaler = start(Scaler(device), device)
    for step in range(3):
        set_grads(params, scaler.get_scale(), step)
        scaler.step(optimizer, max_grad_norm=0.2)
        scaler.update()
        set_grads(plain, 1.0, step)
        assert headroom.clip_grad_norm_(plain, 0.2) == optimizer.grad_norm
        reference.step()
    assert_same_bits(params, plain)


def test_a_scale_that_is_not_a_power_of_two(device):
    """The gradient is multiplied by the inverse, rounded once, as torch's kernel does it."""
    params, plain = parameters(device=device), parameters(device=device)
    optimizer, reference = OURS(params), OURS(plain)
    scaler = start(Scaler(device, init_scale=1000.0), device)
    set_grads(params, 1.0, 0)
    set_grads(plain, 1.0, 0)
    scaler.step(optimizer)
    for p in plain:
        p.grad *= torch.tensor(1 / 1000.0)
    reference.step()
    assert_same_bits(params, plain)
    assert_same_bits(states(optimizer), states(reference))


# ---- A skipped step ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", VALUES)
@BOTH
@pytest.mark.parametrize(
    "make",
    [
        partial(OURS, amsgrad=True),
        partial(headroom.optim.AdamW8bit, min_8bit_size=6),
        partial(headroom.optim.AdamW8bit, min_8bit_size=6, nonfinite="skip_step"),
    ],
    ids=["32-bit", "8-bit", "8-bit propagate"],
)
def test_a_skipped_step_moves_no_byte(make, cls, value, device):
    params = parameters(device=device)
    optimizer = make(params)
    scaler = start(cls(device), device)
    set_grads(params, scaler.get_scale(), 0)
    scaler.step(optimizer)
    scaler.update()
    before = snapshot(params, optimizer)
    set_grads(params, scaler.get_scale(), 1, value)
    scaler.step(optimizer)
    scaler.update()
    assert unchanged(params, optimizer, before)
    assert scaler.get_scale() == 2.0**15
    set_grads(params, scaler.get_scale(), 2)
    scaler.step(optimizer)
    assert not unchanged(params, optimizer, before)
    assert all(optimizer.state[p]["step"] == 2 for p in params)


@pytest.mark.parametrize("bad", [None, math.inf])
def test_step_leaves_gradients_scaled_and_unscale_does_not(bad, device):
    """As documented, whether the step is skipped or not."""
    params = parameters(device=device)
    optimizer, scaler = OURS(params), start(Scaler(device), device)
    set_grads(params, 2.0**16, 0, bad)
    scaled = [p.grad.clone() for p in params]
    scaler.step(optimizer)
    scaler.update()
    assert_same_bits([p.grad for p in params], scaled)
    set_grads(params, scaler.get_scale(), 0, bad)
    scaled = [p.grad.clone() for p in params]
    inverse = 1 / scaler.get_scale()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert_same_bits([p.grad for p in params], [g * inverse for g in scaled])


def test_step_returns_the_flag(device):
    params = parameters(device=device)
    optimizer, scaler = OURS(params), start(Scaler(device), device)
    for step, overflow in enumerate(OVERFLOWS):
        for unscale in (False, True):
            set_grads(params, scaler.get_scale(), step, math.nan if overflow else None)
            if unscale:
                scaler.unscale_(optimizer)
            flag = scaler.step(optimizer)
            assert flag.dtype == torch.float32 and flag.shape == () and flag == overflow
            scaler.update()


def test_one_optimizer_of_two_overflows(device):
    """Only that one skips, and the shared scale falls."""
    first, second = parameters(device=device), parameters(device=device, seed=1)
    optimizers = OURS(first), OURS(second)
    scaler = start(Scaler(device), device)
    for params, bad in ((first, None), (second, math.inf)):
        set_grads(params, 2.0**16, 0, bad)
    before = snapshot(first, optimizers[0]), snapshot(second, optimizers[1])
    flags = [scaler.step(optimizer).item() for optimizer in optimizers]
    scaler.update()
    assert flags == [0.0, 1.0] and scaler.get_scale() == 2.0**15
    assert not unchanged(first, optimizers[0], before[0])
    assert all(torch.equal(bits(p), b) for p, b in zip(second, before[1]))
    assert all(entry["step"] == 0 for entry in optimizers[1].state.values())


@pytest.mark.parametrize("place", ["first", "last of the last"])
def test_one_nan_among_many_tensors(place, device):
    params = parameters([(7,)] * 50, device)
    optimizer, scaler = OURS(params), start(Scaler(device), device)
    set_grads(params, 2.0**16, 0)
    params[0 if place == "first" else -1].grad[0 if place == "first" else -1] = math.nan
    assert scaler.step(optimizer) == 1


@pytest.mark.parametrize("value", [-0.0, 1e-45, 3.4e38])
def test_unusual_but_finite_gradients_are_no_overflow(value, device):
    params = parameters(device=device)
    optimizer, scaler = OURS(params), start(Scaler(device), device)
    set_grads(params, 1.0, 0, value)
    assert scaler.step(optimizer) == 0
    assert all(p.isfinite().all() for p in params)


# ---- No waiting ----------------------------------------------------------------------------------


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("bad", [None, math.inf])
def test_nothing_asks_the_device(bad, unscale, monkeypatch, device):
    params = parameters(device=device)
    optimizer, scaler = OURS(params, max_grad_norm=1.0), start(Scaler(device), device)
    set_grads(params, 2.0**16, 0)
    scaler.step(optimizer)
    scaler.update()
    set_grads(params, 2.0**16, 0, bad)

    def refuse(self, *_):
        raise AssertionError("the host waits for the device")

    with monkeypatch.context() as patch:
        for name in (
            "item",
            "__bool__",
            "__float__",
            "__int__",
            "__index__",
            "tolist",
            "cpu",
            "numpy",
        ):
            patch.setattr(torch.Tensor, name, refuse)
        if unscale:
            scaler.unscale_(optimizer)
        flag = scaler.step(optimizer)
        scaler.update()
        with pytest.raises(AssertionError, match="the host waits"):
            bool(flag)
    assert flag == (bad is not None)


def test_synchronize_skips_the_call(device):
    """As torch does it, for code that counts the calls."""
    params = parameters(device=device)
    optimizer = OURS(params)
    scaler = start(Scaler(device, synchronize=True), device)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for step, bad in enumerate([None, math.inf, None]):
        set_grads(params, scaler.get_scale(), step, bad)
        assert scaler.step(optimizer) is None
        scaler.update()
    assert len(calls) == 2 and scaler.get_scale() == 2.0**15


# ---- Errors --------------------------------------------------------------------------------------


def messages(function):
    """The error that our scaler gives and the one that torch's gives."""
    out = []
    for cls in (Scaler, TorchScaler):
        with pytest.raises(Exception) as caught:
            function(cls)
        out.append((caught.type, str(caught.value)))
    return out


def ready(cls, optimizer_class=OURS):
    params = parameters()
    optimizer, scaler = optimizer_class(params), start(cls("cpu"))
    set_grads(params, 2.0**16, 0)
    return scaler, optimizer, params


def unscale_twice(cls):
    scaler, optimizer, _ = ready(cls)
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def unscale_after_step(cls):
    scaler, optimizer, _ = ready(cls)
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def step_twice(cls):
    scaler, optimizer, _ = ready(cls)
    scaler.step(optimizer)
    scaler.step(optimizer)


def step_twice_of_torchs(cls):
    scaler, optimizer, _ = ready(cls, torch.optim.AdamW)
    scaler.step(optimizer)
    scaler.step(optimizer)


def update_before_step(cls):
    ready(cls)[0].update()


def no_gradients(cls, unscale=False):
    scaler, optimizer, params = ready(cls)
    for p in params:
        p.grad = None
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)


def before_the_first_scale(method):
    def call(cls):
        scaler, optimizer = cls("cpu"), OURS(parameters())
        getattr(scaler, method)(*([] if method == "update" else [optimizer]))

    return call


def closure(cls):
    scaler, optimizer, _ = ready(cls)
    scaler.step(optimizer, closure=lambda: None)


def float16_gradients(cls):
    scaler, params = start(cls("cpu")), [torch.nn.Parameter(torch.ones(3).half())]
    optimizer = OURS(params)
    params[0].grad = torch.ones(3).half()
    scaler.unscale_(optimizer)


def pickled_within_an_iteration(cls):
    scaler, optimizer, _ = ready(cls)
    scaler.step(optimizer)
    pickle.dumps(scaler)


def load_nothing(cls):
    cls("cpu").load_state_dict({})


MISUSE = {
    "unscale_ twice": unscale_twice,
    "unscale_ after step": unscale_after_step,
    "step twice": step_twice,
    "step twice, torch's optimizer": step_twice_of_torchs,
    "update before step": update_before_step,
    "no gradients": no_gradients,
    "no gradients, unscaled": lambda cls: no_gradients(cls, True),
    "step first": before_the_first_scale("step"),
    "unscale_ first": before_the_first_scale("unscale_"),
    "update first": before_the_first_scale("update"),
    "closure": closure,
    "float16 gradients": float16_gradients,
    "pickled within an iteration": pickled_within_an_iteration,
    "empty state": load_nothing,
    "scale of a number": lambda cls: cls("cpu").scale(1.0),
    "growth_factor": lambda cls: cls("cpu", growth_factor=1.0),
    "backoff_factor": lambda cls: cls("cpu", backoff_factor=1.0),
}


@pytest.mark.parametrize("misuse", MISUSE.values(), ids=MISUSE)
def test_errors_are_torchs(misuse):
    ours, torchs = messages(misuse)
    assert ours == torchs


ARGUMENTS = {
    "init_scale 0": ({"init_scale": 0.0}, "init_scale must be"),
    "init_scale < 0": ({"init_scale": -1.0}, "init_scale must be"),
    "init_scale NaN": ({"init_scale": math.nan}, "init_scale must be"),
    "init_scale inf": ({"init_scale": math.inf}, "init_scale must be"),
    "growth_factor NaN": ({"growth_factor": math.nan}, "growth_factor must be"),
    "growth_factor inf": ({"growth_factor": math.inf}, "growth_factor must be"),
    "backoff_factor 0": ({"backoff_factor": 0.0}, "backoff_factor must be"),
    "backoff_factor NaN": ({"backoff_factor": math.nan}, "backoff_factor must be"),
    "growth_interval 0": ({"growth_interval": 0}, "growth_interval and hysteresis"),
    "hysteresis 0": ({"hysteresis": 0}, "growth_interval and hysteresis"),
    "min_scale > init_scale": ({"min_scale": 1e6}, "min_scale <= init_scale"),
    "max_scale < init_scale": ({"max_scale": 1.0}, "init_scale <= max_scale"),
    "min_scale NaN": ({"min_scale": math.nan}, "min_scale <= init_scale"),
    "max_consecutive_skips < 0": ({"max_consecutive_skips": -1}, "max_consecutive_skips must"),
}


@pytest.mark.parametrize("arguments, message", ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_that_torch_accepts_and_should_not(arguments, message):
    with pytest.raises(ValueError, match=message):
        Scaler("cpu", **arguments)
    assert not Scaler("cpu", enabled=False, **arguments).is_enabled()


@pytest.mark.parametrize("new_scale", [0.0, -1.0, math.inf, math.nan])
def test_update_refuses_a_scale_that_is_none(new_scale):
    scaler = start(Scaler("cpu"))
    with pytest.raises(ValueError, match="new_scale must be"):
        scaler.update(new_scale)
    assert scaler.get_scale() == 2.0**16


def test_a_failed_step_leaves_no_trace_on_the_optimizer():
    scaler, optimizer, params = ready(Scaler)

    def fail(*_):
        raise KeyError("from a hook")

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError):
        scaler.step(optimizer)
    hook.remove()
    assert optimizer.grad_scale is None and optimizer.found_inf is None
    assert not optimizer.check_finite
    assert scaler.step(optimizer) == 0


# ---- The interface -------------------------------------------------------------------------------


def test_signatures_are_torchs_and_more():
    def public(cls):
        return {n for n, _ in inspect.getmembers(cls, callable) if not n.startswith("_")}

    assert issubclass(Scaler, TorchScaler)
    assert public(Scaler) - public(TorchScaler) == {"culprit"}
    for name in public(TorchScaler) | {"__init__"}:
        ours, torchs = (
            inspect.signature(getattr(c, name)).parameters for c in (Scaler, TorchScaler)
        )
        assert list(ours)[: len(torchs)] == list(torchs), name
        for key, parameter in torchs.items():
            assert ours[key].kind == parameter.kind and ours[key].default == parameter.default, key
        for key in list(ours)[len(torchs) :]:
            assert ours[key].kind == inspect.Parameter.KEYWORD_ONLY, key


def test_scale_of_nested_outputs():
    scaler = Scaler("cpu", init_scale=4.0)
    one = torch.ones(())
    assert scaler.scale([one, (one, one)]) == [4.0, (4.0, 4.0)]


def test_setters_and_new_scale():
    scaler, optimizer, params = ready(Scaler)
    scaler.set_growth_factor(8.0)
    scaler.set_backoff_factor(0.125)
    scaler.set_growth_interval(1)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**19
    set_grads(params, 1.0, 0, math.inf)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**16
    scaler.update(128.0)
    assert scaler.get_scale() == 128
    scaler.update(torch.tensor(64.0))
    assert scaler.get_scale() == 64
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor()) == (8.0, 0.125)
    assert scaler.get_growth_interval() == 1


def test_disabled():
    """Steps pass through, whatever the gradients."""
    scaler = Scaler("cpu", enabled=False)
    params = parameters()
    optimizer, plain = OURS(params), parameters()
    reference = OURS(plain)
    for side in (params, plain):
        set_grads(side, 1.0, 0)
    loss = torch.ones(())
    assert scaler.scale(loss) is loss and scaler.get_scale() == 1.0
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer, lambda: 5.0) == 5.0
    scaler.update()
    reference.step()
    assert_same_bits(params, plain)
    assert scaler.state_dict() == {} and scaler.culprit() is None
    scaler.load_state_dict({})
    assert not pickle.loads(pickle.dumps(scaler)).is_enabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_default_device_without_a_gpu():
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert not Scaler().is_enabled()


def test_state_goes_both_ways():
    scaler, params = Scaler("cpu", growth_interval=3, hysteresis=2), parameters()
    run(scaler, OURS(params), params)
    state = scaler.state_dict()
    torchs = TorchScaler("cpu")
    torchs.load_state_dict(state)
    assert torchs.state_dict() == {k: state[k] for k in torchs.state_dict()}
    assert set(state) - set(torchs.state_dict()) == {"hysteresis_tracker"}
    for live in (False, True):
        back = start(Scaler("cpu", hysteresis=2)) if live else Scaler("cpu", hysteresis=2)
        back.load_state_dict(torchs.state_dict())
        assert back.state_dict() == state | {"hysteresis_tracker": 2}
        back.load_state_dict(state)
        assert back.state_dict() == start(back).state_dict() == state


def test_a_loaded_scale_is_moved_into_the_bounds():
    dead = TorchScaler("cpu").state_dict() | {"scale": 0.0}
    scaler = Scaler("cpu", max_scale=2.0**17)
    scaler.load_state_dict(dead)
    assert scaler.get_scale() == 2.0**-126
    scaler.load_state_dict(dead | {"scale": 2.0**20})
    assert scaler.get_scale() == 2.0**17


BAD_STATES = {
    "scale": [math.nan, math.inf, -1.0, 1e39, "1", None],
    "growth_factor": [1.0, math.nan, math.inf],
    "backoff_factor": [0.0, 1.0, math.nan],
    "growth_interval": [0, 2.5, 2**31],
    "_growth_tracker": [-1, "0"],
    "hysteresis_tracker": [1.5, 2**40, None],
}
BAD_PAIRS = [(key, value) for key, values in BAD_STATES.items() for value in values]


@pytest.mark.parametrize("live", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("key, value", BAD_PAIRS, ids=str)
def test_a_loaded_state_that_no_scaler_has_changes_nothing(key, value, live):
    scaler = start(Scaler("cpu", hysteresis=2)) if live else Scaler("cpu", hysteresis=2)
    kept = scaler.state_dict()
    with pytest.raises(ValueError, match=f"the loaded state of the scaler has {key}="):
        scaler.load_state_dict(kept | {key: value})
    assert scaler.state_dict() == kept
    if key != "hysteresis_tracker":
        with pytest.raises(ValueError, match=f"has {key}=None"):
            scaler.load_state_dict({k: v for k, v in kept.items() if k != key})


def test_hysteresis_restored_into_a_used_scaler():
    """What counts is the loaded number of overflows, on the device too: the scale falls when that
    of the original does."""
    params = parameters()
    first, second = (Scaler("cpu", hysteresis=3, growth_interval=50) for _ in range(2))
    run(first, OURS(params), params, [1])
    others = parameters()
    run(second, OURS(others), others, [1, 1, 1, 1])
    saved = first.state_dict()
    assert saved["hysteresis_tracker"] == 2 and second.state_dict()["hysteresis_tracker"] < 0
    second.load_state_dict(saved)
    assert second.state_dict() == saved
    for scaler in (first, second):
        fresh = parameters()
        assert run(scaler, OURS(fresh), fresh, [1, 1, 1]) == [2.0**16, 2.0**16, 2.0**15]
    second.load_state_dict(TorchScaler("cpu").state_dict())  # which counts none
    assert second.state_dict()["hysteresis_tracker"] == 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_goes_on_as_the_original(copied):
    params = parameters()
    optimizer = OURS(params)
    scaler = Scaler("cpu", growth_interval=3, hysteresis=2, max_consecutive_skips=5)
    run(scaler, optimizer, params, OVERFLOWS[:7])
    other_params = copied(params)
    other = OURS(other_params)
    other.load_state_dict(copied(optimizer.state_dict()))
    other_scaler = copied(scaler)
    assert other_scaler.state_dict() == scaler.state_dict()
    assert run(other_scaler, other, other_params) == run(scaler, optimizer, params)
    assert_same_bits(other_params, params)


def test_a_pickle_holds_no_parameters():
    scaler, optimizer, params = ready(Scaler)
    empty = len(pickle.dumps(start(Scaler("cpu"))))
    scaler.step(optimizer)
    scaler.update()
    assert len(pickle.dumps(scaler)) < empty + 50


# ---- Bounds, hysteresis, and the end of patience -------------------------------------------------


def test_200_overflows_in_a_row_and_back(device):
    """Torch's scale is 0 then, and every step is skipped for good."""
    params = parameters(device=device)
    optimizer, scaler = OURS(params), Scaler(device, growth_interval=1)
    scales = run(scaler, optimizer, params, [1] * 200)
    assert scaler.get_scale() == 2.0**-126 == min(scales + [scaler.get_scale()])
    set_grads(params, scaler.get_scale(), 0)
    assert scaler.step(optimizer) == 0
    scaler.update()
    assert scaler.get_scale() == 2.0**-125 and all(p.isfinite().all() for p in params)


def test_growth_ends_at_the_largest_power_of_two(device):
    params = parameters(device=device)
    scaler = Scaler(device, growth_interval=1)
    start(scaler, device)
    set_grads(params, 1.0, 0)
    optimizer = OURS(params)
    for _ in range(200):
        assert scaler.step(optimizer) == 0
        scaler.update()
    assert scaler.get_scale() == 2.0**127


def test_bounds(device):
    params = parameters(device=device)
    scaler = Scaler(device, min_scale=2.0**14, max_scale=1e5, growth_interval=1)
    scales = run(scaler, OURS(params), params, [1, 1, 1, 0, 0, 0, 0, 0])
    assert scales == [2.0**16, 2.0**15, 2.0**14, 2.0**14, 2.0**15, 2.0**16, 1e5, 1e5]


def test_hysteresis(device):
    params = parameters(device=device)
    scaler = Scaler(device, hysteresis=3, growth_interval=2)
    scales = run(scaler, OURS(params), params, [1, 1, 1, 1, 0, 0, 1, 1, 1])
    exponents = [int(math.log2(s)) for s in scales]
    assert exponents == [16, 16, 16, 15, 14, 14, 15, 15, 15] and scaler.get_scale() == 2.0**14


def named(device="cpu"):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).to(device)
    optimizer = OURS(model.named_parameters())
    params = list(model.parameters())
    for p in params:
        p.grad = torch.ones_like(p)
    return model, optimizer, params


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
def test_culprit(unscale, device):
    _, optimizer, params = named(device)
    scaler = start(Scaler(device), device)
    assert scaler.culprit() is None
    params[1].grad[0] = math.nan
    params[2].grad[0, 0] = math.inf
    if unscale:
        scaler.unscale_(optimizer)
        assert scaler.culprit() == "0.bias"
    scaler.step(optimizer)
    assert scaler.culprit() == "0.bias"
    scaler.update()
    assert scaler.culprit() == "0.bias"  # of the step before the update
    for p in params:
        p.grad = torch.ones_like(p)
    scaler.step(optimizer)
    assert scaler.culprit() is None


@pytest.mark.parametrize("name", TORCHS)
def test_culprit_without_names_and_of_torchs_optimizers(name):
    params = parameters()
    optimizer = TORCHS[name]([{"params": params[:1]}, {"params": params[1:]}])
    scaler = start(Scaler("cpu"))
    set_grads(params, 1.0, 0, math.nan)
    scaler.step(optimizer)
    assert scaler.culprit() == "parameter 0 of group 1"


def test_culprit_of_the_second_optimizer():
    params, others = parameters(), parameters()
    scaler = start(Scaler("cpu"))
    set_grads(params, 1.0, 0)
    set_grads(others, 1.0, 0, math.inf)
    for optimizer in (OURS(params), OURS([("a", others[0]), ("b", others[1]), ("c", others[2])])):
        scaler.step(optimizer)
    assert scaler.culprit() == "b"


def test_too_many_skips(device):
    _, optimizer, params = named(device)
    scaler = start(Scaler(device, init_scale=1024.0, max_consecutive_skips=2), device)
    params[3].grad[1] = math.nan
    for _ in range(2):
        scaler.step(optimizer)
        scaler.update()
    with pytest.raises(RuntimeError) as caught:
        for _ in range(10):  # on a GPU it may come late
            scaler.step(optimizer)
            scaler.update()
            torch.cuda.is_available() and torch.cuda.synchronize()
    text = str(caught.value)
    assert re.search(r"^\d+ steps in a row were skipped", text)
    assert "max_consecutive_skips=2" in text
    assert "512 -> 256 -> 128" in text and "that of 1.bias" in text
    if device == "cpu":
        assert text.startswith("3 steps") and scaler.get_scale() == 128
    params[3].grad[1] = 0.0  # training may go on
    scaler.step(optimizer)
    scaler.update()


def test_skips_that_are_not_in_a_row(device):
    params = parameters(device=device)
    scaler = Scaler(device, max_consecutive_skips=2)
    run(scaler, OURS(params), params, [1, 1, 0] * 10)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, OURS])
def test_no_patience_at_all(optimizer_class):
    params = parameters()
    scaler = Scaler("cpu", max_consecutive_skips=0)
    with pytest.raises(RuntimeError, match="^1 steps in a row"):
        run(scaler, optimizer_class(params), params, [0, 0, 1])


# ---- What the kernels do not take ----------------------------------------------------------------


@pytest.mark.parametrize("bad", [None, math.inf])
def test_float64_and_sparse_gradients_are_torchs(bad):
    sides = []
    for cls in (Scaler, TorchScaler):
        torch.manual_seed(0)
        model = torch.nn.Embedding(6, 3, sparse=True)
        wide = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
        optimizer = torch.optim.SGD([*model.parameters(), wide], lr=0.1)
        scaler = start(cls("cpu"))
        loss = model(torch.tensor([1, 4, 1])).square().sum() + wide.square().sum()
        scaler.scale(loss).backward()
        if bad is not None:
            wide.grad[2] = bad
        scaler.step(optimizer)
        scaler.update()
        sides.append(([model.weight, wide], scaler.get_scale()))
    assert_same_bits(sides[0][0], sides[1][0])
    assert sides[0][1] == sides[1][1] == (2.0**16 if bad is None else 2.0**15)


# ---- A run in float16 ----------------------------------------------------------------------------


def half_precision_run(scaler_class, optimizer_class, steps, **scaler_options):
    """A small model under float16 autocast, with a batch that overflows every 37 steps. Gradients
    are unscaled before the step where the optimizer is torch's, and within it where it is ours."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = optimizer_class(model.parameters(), lr=1e-3)
    scaler = scaler_class("cpu", growth_interval=20, **scaler_options)
    generator = torch.Generator().manual_seed(1)
    scales, skips = [], []
    for step in range(steps):
        optimizer.zero_grad()
        batch = torch.randn(32, 8, generator=generator)
        with torch.autocast("cpu", torch.float16):
            loss = (model(batch).float() - batch.sum(1, keepdim=True).sin()).square().mean()
            loss = loss * (1e30 if step % 37 == 36 else 1.0)
        scaler.scale(loss).backward()
        skips.append(any(not p.grad.isfinite().all() for p in model.parameters()))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, skips, [p.detach() for p in model.parameters()], loss.item()


@pytest.mark.parametrize("steps", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_run_in_float16_with_overflows_is_torchs(steps):
    """Torch's optimizer gets torch's bits. Ours rounds an update differently now and then, by parts
    in 10^7, and float16 activations make more of it: the trajectories stay within 1e-3."""
    scales, skips, weights, _ = half_precision_run(TorchScaler, torch.optim.AdamW, steps)
    assert sum(skips) >= steps // 37 and len(set(scales)) >= 3
    same = half_precision_run(Scaler, torch.optim.AdamW, steps)
    assert same[:2] == (scales, skips)
    assert_same_bits(same[2], weights)
    ours = half_precision_run(Scaler, OURS, steps)
    assert ours[:2] == (scales, skips)
    for a, b in zip(ours[2], weights):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


# ---- Other packages ------------------------------------------------------------------------------


@pytest.mark.parametrize("scaler_class", [TorchScaler, Scaler], ids=["its own", "ours"])
def test_accelerate_sees_a_skipped_step(scaler_class, monkeypatch):
    """And its scheduler does not move. Its fp16 mode needs a GPU, so the scaler is put in."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = scaler_class("cpu")
    model = torch.nn.Linear(3, 2)
    optimizer = OURS(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    assert optimizer.scaler is accelerator.scaler
    seen = []
    for bad in (False, True, False, True):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean()
        accelerator.backward(loss)
        if bad:
            next(model.parameters()).grad[0, 0] = math.inf
        before = [bits(p).clone() for p in model.parameters()]
        optimizer.step()
        scheduler.step()
        moved = not all(torch.equal(bits(p), b) for p, b in zip(model.parameters(), before))
        assert moved is not bad
        seen.append((optimizer.step_was_skipped, scheduler.get_last_lr()[0]))
    assert seen == [(False, 0.05), (True, 0.05), (False, 0.025), (True, 0.025)]
    assert accelerator.scaler.get_scale() == 2.0**14


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_clips_with_our_optimizer(precision, tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
            self.norms = []

        def training_step(self, batch, _):
            return 100 * self.layer(batch[0]).square().mean()

        def on_before_optimizer_step(self, optimizer):
            pass

        def configure_gradient_clipping(self, optimizer, **options):
            super().configure_gradient_clipping(optimizer, **options)
            flat = torch.cat([p.grad.flatten() for p in self.parameters()])
            self.norms.append(flat.norm().item())

        def configure_optimizers(self):
            return OURS(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4))
    module = Module()
    before = [p.detach().clone() for p in module.parameters()]
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision=precision,
        max_epochs=1,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))
    assert module.norms == pytest.approx([0.5] * 4, rel=1e-3)
    assert not any(torch.equal(p, b) for p, b in zip(module.parameters(), before))


def test_lightning_takes_the_scaler():
    """Its own plugin, on the CPU: 16-mixed of the Trainer is for GPUs."""
    precision = pytest.importorskip("lightning.pytorch.plugins.precision")
    plugin = precision.MixedPrecision("16-mixed", "cpu", scaler=Scaler("cpu"))
    optimizer = OURS(parameters())
    plugin.clip_gradients(optimizer, 0.5)  # raises for optimizers that say they unscale
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        plugin.clip_gradients(torch.optim.AdamW(parameters(), fused=True), 0.5)


def test_our_optimizers_do_not_claim_to_unscale():
    """Which would make accelerate and Lightning take the paths that fail."""
    assert not getattr(OURS(parameters()), "_step_supports_amp_scaling", False)
