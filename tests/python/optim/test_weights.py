"""Weights of 16 bits: masters, remainders, Kahan and stochastic rounding."""

import copy
import math

import headroom
import pytest
import torch
from headroom._core import weight_modes
from headroom.optim import (
    SGD,
    Adafactor,
    AdamW,
    AdamW8bit,
    Lion,
    Lion8bit,
    SGD8bit,
    load_master_weights,
    master_weights,
)

from helpers import training
from helpers.modes import WEIGHTS as MODES

SHAPES = [(33, 7), (64,), (1, 1), (0, 3), (130, 5, 2)]
EXACT = MODES[:2]
UNRANDOM = [mode for mode in MODES if mode.get("rounding") != "stochastic"]


def name_of(mode):
    return "-".join(mode.values())


def start(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]


def parameters(values, dtype=torch.bfloat16):
    return [torch.nn.Parameter(value.to(dtype, copy=True)) for value in values]


def train(params, optimizer, steps, seed=1, first=0):
    """The same gradients for parameters of any dtype: bfloat16 numbers."""

    def backward(step):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        for param in params:
            grad = torch.randn(param.shape, generator=generator).bfloat16()
            param.grad = grad.to(param.dtype)

    training.train(optimizer, range(first, first + steps), backward)


def nearest_away(weights):
    """To bfloat16, ties away from zero: in integers, from the definition."""
    bits = weights.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    halves = ((bits + 0x8000) >> 16) & 0xFFFF
    return (halves - ((halves & 0x8000) << 1)).to(torch.int16).view(torch.bfloat16)


EIGHT_BIT = dict(min_8bit_size=64)


@pytest.mark.parametrize("mode", EXACT, ids=name_of)
@pytest.mark.parametrize(
    "of, options",
    [
        (AdamW, {}),
        (AdamW, dict(amsgrad=True, weight_decay=0.3, maximize=True)),
        (AdamW8bit, EIGHT_BIT),
        (AdamW8bit, dict(EIGHT_BIT, code_rounding="stochastic", nonfinite="skip_element")),
        (SGD, dict(momentum=0.9, nesterov=True)),
        (SGD8bit, dict(EIGHT_BIT, momentum=0.9)),
        (Lion, dict(weight_decay=0.1)),
        (Lion8bit, EIGHT_BIT),
        (Adafactor, {}),
        (Adafactor, dict(semantics="hf", beta1=0.9, relative_step=False)),
    ],
)
def test_weights_follow_those_of_float32_bit_for_bit(of, mode, options):
    reference, low = parameters(start(), torch.float32), parameters(start())
    exact = of(reference, lr=3e-3, **options)
    optimizer = of(low, lr=3e-3, **mode, **options)
    for step in range(0, 60, 20):
        train(reference, exact, 20, first=step)
        train(low, optimizer, 20, first=step)
        joined = master_weights(optimizer)
        for a, b in zip(reference, low):
            assert torch.equal(joined[b].view(torch.int32), a.detach().view(torch.int32))
            rounded = a.detach().bfloat16() if mode["master"] == "f32" else nearest_away(a.detach())
            assert torch.equal(b.detach(), rounded)


def all_low_halves(high):
    bits = (high << 16) + torch.arange(65536)
    return (bits - ((bits & 0x80000000) << 1)).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("high", [0x3F80, 0x3F81, 0xBF80, 0x0000, 0x0001, 0x8000, 0x7F7F, 0x42FF])
def test_every_lower_half_is_kept_and_the_weight_is_the_nearest(high):
    values = all_low_halves(high)
    param = torch.nn.Parameter(torch.zeros(65536, dtype=torch.bfloat16))
    optimizer = AdamW([param], master="remainder16")
    load_master_weights(optimizer, {param: values})
    assert torch.equal(master_weights(optimizer)[param].view(torch.int32), values.view(torch.int32))
    ties = (values.view(torch.int32) & 0xFFFF) == 0x8000
    even = values.bfloat16()
    assert torch.equal(param.detach()[~ties], even[~ties])  # torch rounds ties to even
    assert torch.equal(param.detach(), nearest_away(values))
    assert ties.sum() == 1


def test_remainder8_keeps_16_bits():
    values = torch.cat([all_low_halves(high) for high in (0x3F80, 0x3FFF, 0xC2AA)])
    param = torch.nn.Parameter(torch.zeros_like(values, dtype=torch.bfloat16))
    optimizer = AdamW([param], master="remainder8")
    load_master_weights(optimizer, {param: values})
    kept = master_weights(optimizer)[param]
    error = ((kept - values) / values).abs().max().item()
    assert 2**-17 < error <= 2**-16
    assert ((param.detach().float() - values) / values).abs().max() <= 2**-8 + 2**-16


HALVES = [(mode, torch.bfloat16) for mode in MODES] + [
    (mode, torch.float16) for mode in MODES if mode.get("master", "f32") == "f32"
]


@pytest.mark.parametrize("mode, dtype", HALVES)
def test_what_is_not_finite_stays_so(mode, dtype):
    values = torch.tensor([math.nan, math.inf, -math.inf, 1.0, -0.0, 1e-40])
    param = torch.nn.Parameter(torch.zeros(6, dtype=dtype))
    optimizer = AdamW([param], lr=0.0, **mode)
    load_master_weights(optimizer, {param: values})
    param.grad = torch.zeros_like(param)
    optimizer.step()
    got = master_weights(optimizer)[param]
    assert got.isnan().tolist() == [True] + 5 * [False]
    assert torch.equal(got[1:5], values[1:5])
    assert param.detach().isnan().tolist() == got.isnan().tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_updates_add_up_and_with_nearest_rounding_they_do_not(dtype):
    def drift(**mode):
        param = torch.nn.Parameter(torch.ones(4096, dtype=dtype))
        optimizer = AdamW([param], lr=1e-5, weight_decay=0, count_stalled=True, **mode)
        for _ in range(100):
            param.grad = torch.ones_like(param)
            optimizer.step()
        mean = 1 - master_weights(optimizer)[param].double().mean().item()
        return mean, optimizer.stalled_fraction()

    assert drift() == (0.0, 1.0)
    for mode in [mode for mode, of in HALVES if of == dtype]:
        moved, stalled = drift(**mode)
        if mode.get("rounding") == "stochastic" and "master" not in mode:
            # A gap of 2^-8 is taken with probability p = 1e-5 / 2^-8 (f16: 2^-11) per step: the
            # mean of 4,096 sums has this standard deviation; 6 of them: false alarm in 5e8.
            gap = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
            deviation = gap * math.sqrt(100 * 1e-5 / gap / 4096)
            assert abs(moved - 1e-3) < 6 * deviation
            assert 0.9 < stalled < 1.0
        elif mode.get("master") == "remainder8" and "rounding" not in mode:
            assert moved in (0.0, pytest.approx(1e-3, rel=0.6))  # an update is 1.3 units of 2^-17
        else:
            assert moved == pytest.approx(1e-3, rel=0.05)


def test_a_copy_goes_on_counting():
    param = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = AdamW([param], lr=1e-5, weight_decay=0, count_stalled=True)
    other = copy.deepcopy(optimizer)
    train(other.param_groups[0]["params"], other, 1)
    assert other.stalled_fraction() == 1.0


def test_stochastic_rounding_has_no_bias():
    # keep * 1 lies between two bfloat16 numbers; the upper one is to be taken with probability p.
    for decay in (1e-4, 1e-3, 2.5e-3):
        n = 1_000_000
        param = torch.nn.Parameter(torch.ones(n, dtype=torch.bfloat16))
        optimizer = AdamW([param], lr=1.0, weight_decay=decay, rounding="stochastic", seed=3)
        param.grad = torch.zeros_like(param)
        optimizer.step()
        kept = float(torch.tensor(1.0 - decay, dtype=torch.float32))
        upper, lower = 1.0, 1.0 - 2**-8
        p = (kept - lower) / (upper - lower)
        values, counts = param.detach().double().unique(return_counts=True)
        assert values.tolist() == [lower, upper]
        sigma = math.sqrt(p * (1 - p) / n)
        assert abs(counts[1].item() / n - p) < 6 * sigma  # false alarm: 2e-9


def test_stochastic_rounding_depends_on_seed_and_step_and_nothing_else():
    def run(steps, seed, values):
        params = parameters(values)
        optimizer = AdamW(params, lr=1e-4, rounding="stochastic", seed=seed)
        train(params, optimizer, steps)
        return [param.detach() for param in params]

    values = start()
    first, again, other = run(3, 0, values), run(3, 0, values), run(3, 1, values)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not all(torch.equal(a, b) for a, b in zip(first, other))


@pytest.mark.parametrize("eight_bit", [False, True])
def test_every_parameter_draws_its_own_in_all_groups(eight_bit):
    def step(groups):
        values = torch.linspace(0.5, 1.5, 4096).bfloat16()
        params = [torch.nn.Parameter(values.clone()) for _ in range(4)]
        ends = [0, *groups, 4]
        parts = [dict(params=params[a:b]) for a, b in zip(ends, ends[1:])]
        if eight_bit:
            optimizer = AdamW8bit(parts, lr=1e-3, code_rounding="stochastic", **EIGHT_BIT)
        else:
            optimizer = AdamW(parts, lr=1e-3, rounding="stochastic")
        for param in params:
            param.grad = torch.linspace(-1, 1, 4096).bfloat16()
        optimizer.step()
        if eight_bit:
            return [optimizer.state[param]["exp_avg"].clone() for param in params]
        return [param.detach() for param in params]

    together, apart = step([]), step([1, 3])
    assert all(torch.equal(a, b) for a, b in zip(together, apart))
    pairs = [(a, b) for a in range(4) for b in range(a)]
    assert not any(torch.equal(apart[a], apart[b]) for a, b in pairs)


@pytest.mark.parametrize("rows", [1, 17, 32])
def test_the_bits_do_not_depend_on_how_a_tensor_is_cut(rows):
    whole = torch.nn.Parameter(start()[0].clone())
    shape = whole.shape
    grad = torch.randn(shape).bfloat16()

    def step(params, grads, places):
        states = [[torch.zeros_like(p) for p in params] for _ in range(2)]
        steps = [torch.zeros(()) for _ in params]
        headroom.functional.adamw_(
            params,
            grads,
            *states,
            [],
            steps,
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.1,
            eps=1e-8,
            rounding="stochastic",
            weight_seeds=[77] * len(params),
            places=places,
        )

    columns = 3
    by_rows = [t.clone() for t in (whole.detach()[:rows], whole.detach()[rows:])]
    by_columns = [
        t.clone().contiguous() for t in (whole.detach()[:, :columns], whole.detach()[:, columns:])
    ]
    with torch.no_grad():
        step([whole], [grad], None)
        step(by_rows, [grad[:rows], grad[rows:]], [0, 7, 7, rows * 7, 7, 7])
        step(
            by_columns,
            [grad[:, :columns].contiguous(), grad[:, columns:].contiguous()],
            [0, columns, 7, columns, 7 - columns, 7],
        )
    assert torch.equal(torch.cat(by_rows), whole.detach())
    assert torch.equal(torch.cat(by_columns, 1), whole.detach())


@pytest.mark.parametrize(
    "mode", [m for m in MODES if m.get("rounding") != "stochastic"], ids=name_of
)
def test_strides_do_not_matter(mode):
    value = torch.randn(6, 5, 4, 3).bfloat16()
    plain = torch.nn.Parameter(value.clone())
    last = torch.nn.Parameter(value.clone().to(memory_format=torch.channels_last))
    view = torch.nn.Parameter(torch.zeros(6, 5, 4, 6, dtype=torch.bfloat16)[..., ::2])
    view.data.copy_(value)
    for param in (plain, last, view):
        train([param], AdamW([param], lr=1e-2, **mode), 4)
    assert torch.equal(plain, last) and torch.equal(plain, view)


def test_master_weights_of_a_model_is_a_state_dict():
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7)).bfloat16()
    model[1].float()
    optimizer = AdamW(model.parameters(), lr=1e-3, master="remainder16")
    train(list(model.parameters()), optimizer, 3)
    weights = master_weights(optimizer, model)
    assert list(weights) == list(model.state_dict())
    assert all(weights[name].dtype == torch.float32 for name, _ in model.named_parameters())
    assert not torch.equal(weights["0.weight"], model[0].weight.float())
    full = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    full.load_state_dict(weights)

    other = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7)).bfloat16()
    other[1].float()
    again = AdamW(other.parameters(), lr=1e-3, master="remainder16")
    load_master_weights(again, weights, other)
    assert torch.equal(other[0].weight, model[0].weight)
    for name, value in master_weights(again, other).items():
        assert torch.equal(value, weights[name])


def test_bad_parameters_and_states():
    with pytest.raises(ValueError, match="needs bfloat16"):
        AdamW(parameters(start(), torch.float16), master="remainder16")
    params = parameters(start())
    optimizer = AdamW(params, master="remainder16")
    with pytest.raises(RuntimeError, match="count_stalled=True"):
        optimizer.stalled_fraction()
    with pytest.raises(RuntimeError, match="after a step"):
        AdamW(params, count_stalled=True).stalled_fraction()
    train(params, optimizer, 1)
    full = AdamW(parameters(start(), torch.float32), master="remainder16")
    with pytest.raises(ValueError, match="'remainder', which belongs to weights"):
        full.load_state_dict(optimizer.state_dict())
    weights = master_weights(optimizer)
    with pytest.raises(ValueError, match="a weight has shape"):
        load_master_weights(optimizer, weights | {params[0]: torch.zeros(3)})
    before = [param.detach().clone() for param in params]
    with pytest.raises(KeyError, match="parameter 0 of group 0"):
        load_master_weights(optimizer, {p: w + 1 for p, w in weights.items() if p is not params[0]})
    assert all(torch.equal(a, b) for a, b in zip(before, params))


def test_a_checkpoint_of_a_plain_optimizer_starts_the_remainders_at_zero():
    params = parameters(start())
    plain = AdamW(params, state_dtype=torch.float32)
    train(params, plain, 2)
    optimizer = AdamW(params, master="remainder16")
    optimizer.load_state_dict(plain.state_dict())
    train(params, optimizer, 1)
    assert all(optimizer.state[p]["remainder"].dtype == torch.int16 for p in params)


@pytest.mark.parametrize("mode", MODES, ids=name_of)
def test_opcheck(mode):
    params = [value.clone() for value in start()[:2]]
    kept = weight_modes.weights_mode(**mode)
    residuals = [torch.zeros_like(p, dtype=kept.dtype) for p in params] if kept.residual else []
    options = dict(
        lr=1e-3,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.0,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
        decoupled=True,
        weights_mode=kept.number,
        stalled=torch.zeros((), dtype=torch.int64),
        weight_seeds=[1, 2] if kept.is_random else None,
    )
    states = [[torch.zeros_like(p) for p in params] for _ in range(3)]
    steps = [torch.zeros(()) for _ in params]
    torch.library.opcheck(
        torch.ops.headroom.adamw_, (params, *states, [], steps, residuals), options
    )
    for name in ("join_weights_", "split_weights_"):
        values = [p.float() for p in params]
        lists = (values, params, residuals) if name[0] == "j" else (params, residuals, values)
        torch.library.opcheck(getattr(torch.ops.headroom, name), (*lists, kept.number))


def test_8_bit_moments_and_weights_take_six_bytes():
    param = torch.nn.Parameter(torch.randn(1000, 1024).bfloat16())
    for mode, wanted in ((dict(master="remainder16"), 6.1), (dict(master="remainder8"), 5.1)):
        optimizer = AdamW8bit([param], **mode)
        train([param], optimizer, 1)
        live = [param, *optimizer.state[param].values()]
        size = sum(t.untyped_storage().nbytes() for t in live) / param.numel()
        assert size <= wanted
        assert f"{size - 2:.2f} bytes for each" in repr(optimizer)
