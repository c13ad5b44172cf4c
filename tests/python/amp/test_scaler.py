"""The interface of headroom.amp.GradScaler: torch's and more; its errors; its state and copies."""

import copy
import inspect
import math
import pickle
import re

import pytest
import torch
from torch.amp import GradScaler as TorchScaler

from helpers.bits import assert_same_bits
from helpers.scalers import OURS, OVERFLOWS, Scaler, parameters, run, set_grads, start

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


SMALL, ALMOST_1, PAST_1 = 5e-324, math.nextafter(1, 0), math.nextafter(1, 2)


def test_arguments_at_the_ends_of_what_is_allowed():
    Scaler("cpu", 4.0, PAST_1, SMALL, 1, min_scale=4.0, max_scale=4.0, max_consecutive_skips=0)
    Scaler("cpu", SMALL, 1e308, ALMOST_1, min_scale=0.0)
    with pytest.raises(ValueError, match="got 1 and 0$"):
        Scaler("cpu", growth_interval=1, hysteresis=0)
    with pytest.raises(ValueError, match="got -1.0, 65536.0, inf$"):
        Scaler("cpu", min_scale=-1.0)


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
    "scale": [math.nan, math.inf, -1.0, 2.0**128, "1", None],
    "growth_factor": [1.0, math.nan, math.inf],
    "backoff_factor": [0.0, 1.0, math.nan],
    "growth_interval": [0, 2.5, 2**31],
    "_growth_tracker": [-1, "0", 2**31],
    "hysteresis_tracker": [1.5, 2**31, -(2**31) - 1, None],
}
# What each may be at most and at least.
ENDS = {
    "scale": [0, math.nextafter(2.0**128, 0)],
    "growth_factor": [PAST_1, 1e308],
    "backoff_factor": [SMALL, ALMOST_1],
    "growth_interval": [1, 2**31 - 1],
    "_growth_tracker": [0, 2**31 - 1],
    "hysteresis_tracker": [-(2**31), 2**31 - 1],
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


def test_loaded_values_at_the_ends_of_what_is_allowed():
    scaler = Scaler("cpu", min_scale=0.0)
    kept = scaler.state_dict()
    for key, values in ENDS.items():
        for value in values:
            scaler.load_state_dict(kept | {key: value})
            assert scaler.state_dict() == kept | {key: value}


def test_a_bad_value_is_quoted_with_what_was_wanted():
    scaler = Scaler("cpu")
    for key, value, words in (
        ("growth_factor", 1.0, "=1.0, wanted a finite number > 1"),
        ("growth_interval", 0, "=0, wanted an integer >= 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            scaler.load_state_dict(scaler.state_dict() | {key: value})


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
