"""What options are when they are left out: the same bits as with the documented value, and others
with another one."""

import inspect
import math

import pytest
import torch
from headroom import functional as F

from helpers.bits import bits


def random(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def adamw(**options):
    params, grads, first = (random(7, 5, seed=seed) for seed in range(3))
    grads[0, 0] = math.inf
    lists = [[params], [grads], [first], [first.square()], [], [torch.tensor(4.0)]]
    F.adamw_(*lists, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, **options)
    return [tensor for one in lists for tensor in one]


def adamw8bit(**options):
    params, grads, moments = (random(600, seed=seed) for seed in range(3))
    params[3] = grads[3] = moments[3] = 1.0  # and not math.inf, which would spoil whole blocks
    grads[599] = math.inf
    lists = [[params], [grads]]
    for values, is_signed in ((moments, True), (moments.square(), False)):
        codes, absmax = F.quantize_blocks(values, is_signed=is_signed)
        lists += [[codes], [absmax]]
    lists.append([torch.tensor(4.0)])
    F.adamw8bit_(*lists, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, **options)
    return [tensor for one in lists for tensor in one]


def adafactor(**options):
    params = [random(6, 4, scale=1e-3), random(5, seed=1)]
    grads = [random(6, 4, seed=2), random(5, seed=3)]
    none, variance = torch.empty(0), torch.full((5,), 0.01)
    rows, columns = [torch.full((6,), 0.01), none], [torch.full((4,), 0.01), none]
    state = [rows, columns, [none, variance], [], [], [torch.tensor(2.0) for _ in params]]
    F.adafactor_(params, grads, *state, **options)
    return [*params, *rows, *columns, variance]


def accumulate(**options):
    sums, grads = random(9), random(9, seed=1)
    F.accumulate_([sums], [grads], **options)
    return [sums, grads]


def measured(function):
    def call(**options):
        grads, norm, clip = [random(9, scale=0.1)], torch.zeros(()), torch.zeros(())
        function(grads, norm=norm, clip=clip, **options)
        return [*grads, norm, clip]

    return call


def update_scale(**options):
    """Scales after one overflow, after 1,999 and 2,000 steps without, and near the bounds."""
    found = []
    for scale, tracker, overflow in (
        *((2.0**16, 5, 1.0), (2.0**16, 1998, 0.0), (2.0**16, 1999, 0.0)),
        *((2.0**-126, 5, 1.0), (2.0**126, 1999, 0.0)),
    ):
        scale, tracker = torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32)
        F.update_scale_(scale, tracker, torch.tensor(overflow), **options)
        found += [scale, tracker]
    return found


def cross_entropy(**options):
    logits = random(6, 5, scale=3.0).requires_grad_()
    loss = F.cross_entropy(logits, torch.tensor([0, 4, -100, 3, 2, 3]), **options)
    loss = loss if loss.dim() == 0 else loss.square().sum()
    (grad,) = torch.autograd.grad(loss, logits)
    return [loss.detach(), grad, logits.detach()]


def cross_entropy_of_nothing(**options):
    return [F.cross_entropy(random(2, 5), torch.tensor([-100, -100]), **options)]


def divergence(**options):
    student = random(6, 5).requires_grad_()
    target = torch.tensor([0, 4, -100, 3, 2, 3])
    loss = F.divergence(student, random(6, 5, seed=1), target, **options)
    loss = loss if loss.dim() == 0 else loss.square().sum()
    (grad,) = torch.autograd.grad(loss, student)
    return [loss.detach(), grad, student.detach()]


def gemm(**options):
    return [F.gemm(random(4, 4), random(4, 4, seed=1), c=random(4, 4, seed=2), **options)]


def glu(**options):
    return [F.glu(random(3, 8), random(3, 8, seed=1), **options)]


def rms_norm(**options):
    weight = random(8, seed=1).bfloat16()
    return [F.rms_norm(random(3, 8, scale=1e-2).bfloat16(), weight, **options)]


def layer_norm(**options):
    return [F.layer_norm(random(3, 8, scale=1e-2), **options)]


def rope(**options):
    tables = F.rope_tables(8, 16)
    return list(F.rope(random(1, 4, 4, 8), random(1, 4, 4, 8, seed=1), *tables, **options))


def rope_tables(**options):
    return list(F.rope_tables(8, 5, **options))


def blocks(**options):
    codes, absmax = F.quantize_blocks(random(600), is_signed=True, **options)
    return [codes, absmax, F.dequantize_blocks(codes, absmax, is_signed=True, **options)]


def few_bits(**options):
    q = F.quantize_matrix(random(8, 72), **options)
    return [q.codes, q.scales, F.dequantize_matrix(q)]


def weights(**options):
    params, residuals = random(9).bfloat16(), torch.arange(9, dtype=torch.int16)
    values = torch.empty(9)
    has_residuals = [residuals] if options.get("master") else []
    F.join_weights_([values], [params], has_residuals, **options)
    F.split_weights_([params], has_residuals, [values + 1e-3], **options)
    return [values, params]


FLAGS = {"maximize": False, "decoupled": True, "skip_nonfinite": False}
MEASURED = {"p": 2.0, "max_norm": 0.0}
MEASURED_OTHERS = [{"p": 1.0}, {"max_norm": 0.1}]
# Of each function its documented values, and other values of each.
CASES = {
    adamw: (
        FLAGS | {"residuals": (), "master": None, "rounding": "nearest"},
        [{"maximize": True}, {"decoupled": False}, {"skip_nonfinite": True}],
    ),
    adamw8bit: (
        FLAGS | {"block_size": 256, "bnb_exact": False, "residuals": ()},
        [{"maximize": True}, {"decoupled": False}, {"skip_nonfinite": True}, {"bnb_exact": True}],
    ),
    adafactor: (
        dict(
            **dict(semantics="torch", lr=0.0, beta2_decay=-0.8, eps=(None, 1e-3)),
            **dict(clip_threshold=1.0, weight_decay=0.0, maximize=False),
        ),
        [{"lr": 0.1}, {"beta2_decay": -0.5}],
    ),
    accumulate: ({"factor": 1.0, "zero_grads": False}, [{"factor": 2.0}, {"zero_grads": True}]),
    measured(F.unscale_norm_): (MEASURED, MEASURED_OTHERS),
    measured(F.grad_norm): (MEASURED, MEASURED_OTHERS),
    update_scale: (
        dict(
            **dict(growth_factor=2.0, backoff_factor=0.5, growth_interval=2000),
            **dict(min_scale=0.0, max_scale=math.inf, hysteresis=1),
        ),
        [
            *({"growth_factor": 2.5}, {"backoff_factor": 0.25}, {"growth_interval": 1999}),
            *({"growth_interval": 2001}, {"min_scale": 2.0**-126}, {"max_scale": 2.0**126}),
        ],
    ),
    cross_entropy: (
        dict(
            **dict(ignore_index=-100, reduction="mean", label_smoothing=0.0, softcap=None),
            **dict(z_loss=0.0, inplace_backward=False, empty="nan", weight=None),
        ),
        [
            *({"reduction": "sum"}, {"label_smoothing": 0.1}, {"softcap": 3.0}, {"z_loss": 0.1}),
            *({"reduction": "none"}, {"return_lse": True}),
        ],
    ),
    cross_entropy_of_nothing: ({"empty": "nan"}, [{"empty": "zero"}]),
    divergence: (
        dict(
            **dict(divergence="forward_kl", temperature=1.0, ignore_index=-100),
            **dict(reduction="mean", mask=None, inplace_backward=False),
        ),
        [{"divergence": "js"}, {"temperature": 2.0}, {"reduction": "sum"}, {"ignore_index": 3}],
    ),
    gemm: (
        {"transpose_a": False, "transpose_b": False, "alpha": 1.0, "beta": 1.0, "bias": None},
        [{"transpose_a": True}, {"transpose_b": True}, {"alpha": 2.0}, {"beta": 0.0}],
    ),
    glu: ({"activation": "silu", "packed": False}, [{"activation": "gelu"}, {"packed": True}]),
    rms_norm: (
        {"eps": 1e-6, "offset": 0.0, "casting": "llama", "residual": None},
        [{"eps": 1e-3}, {"offset": 1.0}, {"casting": "gemma"}],
    ),
    layer_norm: ({"eps": 1e-5, "weight": None, "bias": None}, [{"eps": 1e-3}]),
    rope: (
        {"interleaved": False, "offset": 0, "rotary_dim": 8, "token_major": False},
        [{"interleaved": True}, {"offset": 1}, {"rotary_dim": 4}, {"token_major": True}],
    ),
    rope_tables: (
        {"base": 10000.0, "scaling": None, "rotary_dim": 8, "dtype": torch.float32},
        [{"base": 10001.0}, {"rotary_dim": 4}, {"dtype": torch.bfloat16}],
    ),
    blocks: ({"block_size": 256}, [{"block_size": 512}, {"block_size": 128}]),
    few_bits: (
        {"to": "nf4", "block_size": 64, "double": True, "search": False},
        [{"to": "fp4"}, {"to": "int8"}, {"block_size": 32}, {"double": False}, {"search": True}],
    ),
    weights: ({"master": None, "rounding": "nearest"}, [{"master": "remainder16"}]),
}


def result(call, options):
    """The bits of what a call gives, or the kind of its error."""
    try:
        return [(t.shape, t.dtype, bits(t).flatten().tolist()) for t in call(**options)]
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        return type(error)


@pytest.mark.parametrize("call", CASES, ids=lambda call: call.__name__)
def test_options_that_are_left_out(call):
    documented, others = CASES[call]
    left_out = result(call, {})
    assert isinstance(left_out, list)
    for name, value in documented.items():
        assert result(call, {name: value}) == left_out, name
    assert result(call, documented) == left_out
    for other in others:
        assert result(call, other) != left_out, other


def test_js_is_half_of_each_by_default():
    assert result(divergence, {"divergence": "js"}) == result(
        divergence, {"divergence": "js", "beta": 0.5}
    )
    assert result(divergence, {"divergence": "js"}) != result(
        divergence, {"divergence": "js", "beta": 0.25}
    )


def test_adafactor_of_transformers_by_default():
    """Relative steps, scaled by the parameter, without a warmup; the rate is unused then."""
    usual = {"semantics": "hf", "eps": (1e-30, 1e-3)}
    documented = {"scale_parameter": True, "relative_step": True, "warmup_init": False}
    left_out = result(adafactor, usual)
    assert isinstance(left_out, list) and left_out == result(adafactor, usual | documented)
    for name, value in documented.items():
        changed = usual | {name: not value}
        assert result(adafactor, changed) != left_out, name
    with_rate = {"lr": 0.1, "eps": (None, 1e-3)}
    usual = result(adafactor, with_rate)
    for name, value, other in (
        *(("clip_threshold", 1.0, 0.1), ("weight_decay", 0.0, 0.5), ("maximize", False, True)),
        *(("eps", (None, 1e-3), (None, 0.5)), ("semantics", "torch", "hf")),
    ):
        assert result(adafactor, with_rate | {name: value}) == usual, name
        assert result(adafactor, with_rate | {name: other}) != usual, name
    assert result(adafactor, {"lr": 0.1}) == usual


def test_fakes_of_blocks_have_the_default_too():
    from torch._subclasses.fake_tensor import FakeTensorMode

    for options in ({}, {"block_size": 64}):
        real = F.quantize_blocks(random(600), is_signed=False, **options)
        with FakeTensorMode():
            fake = F.quantize_blocks(torch.empty(600), is_signed=False, **options)
            op = torch.ops.headroom.quantize_blocks(torch.empty(600), False, *options.values())
            back = torch.ops.headroom.dequantize_blocks(*op, False, *options.values())
        for one, other, third in zip(real, fake, op):
            assert one.shape == other.shape == third.shape and one.dtype == other.dtype
        assert back.shape == (600,) and back.dtype == torch.float32


@pytest.mark.parametrize("name", ["adafactor_", "adamw_", "adamw8bit_"])
def test_lists_have_places_and_options_names(name):
    parameters = inspect.signature(getattr(F, name)).parameters.values()
    lists = [p.kind for p in parameters if p.annotation == "list[Tensor]"]
    options = [p.kind for p in parameters][len(lists) : -1]
    assert set(lists) == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert set(options) == {inspect.Parameter.KEYWORD_ONLY}
