"""Formulas that vector code repeats: exhaustively, or over every case of rounding, the same bits on
each instruction set as on the baseline, whose loop calls the shared inline functions.

The two places of each: weights_join() and weights_split() in kernels/weights/weights.h and
weights_cpu_vbmi.h; quant_encode() in kernels/quant/quantize_blocks.h and dynamic_map_cpu*.h;
hr_from_f16() and hr_to_f16() in kernels/core/dtype.h and halves_cpu.h; hr_philox() in
kernels/core/random.h and weights_cpu.c.
"""

import pytest
import torch
from headroom import _C
from headroom._core.weight_modes import MODES
from headroom.functional import dequantize_blocks, layer_norm, quantize_blocks

from helpers.reference8bit import MAPS, nearest

BLOCK = 64
PARAMS = torch.arange(2**16, dtype=torch.int32).to(torch.int16)  # every bf16, as bits
# Residuals around 0, the ends and the ties of 16 and of 8 bits.
EDGES = [0, 1, 127, 128, 129, 255, 256, 2**14, 2**15 - 129, 2**15 - 128, 2**15 - 1]
MODE_NAMES = {
    "kahan": (None, "kahan"),
    "master": ("f32", "nearest"),
    "remainder16": ("remainder16", "nearest"),
    "remainder8": ("remainder8", "nearest"),
}


@pytest.fixture
def levels():
    """The instruction sets above the baseline; the one in use is put back afterwards."""
    if _C is None:
        pytest.skip("headroom._C is not built")
    before, found = _C.get_cpu_level(), []
    for level in _C.CpuLevel:
        try:
            _C.set_cpu_level(level)
        except ValueError:
            continue
        found.append(level)
    if found == [_C.CpuLevel.BASELINE]:
        pytest.skip("this CPU has one instruction set only")
    yield found[1:]
    _C.set_cpu_level(before)


def step(level, param, grad, residual=None, mode=0, **options):
    """What one step writes: param, residual, codes and scales, from moments of zero."""
    _C.set_cpu_level(level)
    param = param.clone()
    residuals = [] if residual is None else [residual.clone()]
    numel, blocks = param.numel(), -(-param.numel() // BLOCK)
    codes = [torch.zeros(numel, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.zeros(blocks) for _ in range(2)]
    defaults = {"lr": 0.0, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    torch.ops.headroom.adamw8bit_(
        [param], [grad], codes[:1], scales[:1], codes[1:], scales[1:], [torch.zeros(1)], residuals,
        **{**defaults, **options}, maximize=False, decoupled=True, block_size=BLOCK,
        weights_mode=mode,
    )  # fmt: skip
    return [param, *residuals, *codes, *scales]


def assert_same_bits(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
        assert torch.equal(one.view(width), other.view(width))


def residuals_of(name):
    """For every param, in rows: the residuals that a join or a split may treat in its own way."""
    if name == "remainder8":
        return torch.arange(-128, 128, dtype=torch.int8).expand(2**16, -1)
    if name == "remainder16":
        edges = torch.tensor([s * e for e in EDGES for s in (1, -1)] + [-(2**15)])
        return edges.to(torch.int16).expand(2**16, -1)
    if name == "master":  # the params that round to nearest, the ties and what is beside them
        low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, -1, -0x8000, -0x8001])
        return ((PARAMS.to(torch.int64) << 16)[:, None] + low).to(torch.int32).view(torch.float32)
    # Kahan: from nothing to more than half a unit in the last place, which is 2^-8 of the power
    # of two below the param, with infinity and NaN.
    power = (PARAMS.view(torch.bfloat16).float().view(torch.int32) & 0x7F800000).view(torch.float32)
    halves = torch.tensor([0.0, 2.0**-9, 1 - 2.0**-8, 1, 1 + 2.0**-7, 2, 256, float("inf")])
    halves = torch.cat([halves, -halves, torch.tensor([float("nan")])])
    tiny = torch.tensor([2.0**-133, -(2.0**-133), 2.0**-126]).expand(2**16, -1)
    return torch.cat([(power * 2.0**-8)[:, None] * halves, tiny], 1).bfloat16()


@pytest.mark.parametrize("weight_decay", [0.0, 0.3], ids=["as they are", "to be rounded"])
@pytest.mark.parametrize("name", MODE_NAMES)
def test_weights_of_every_param_are_joined_and_split_alike(name, weight_decay, levels):
    residual = residuals_of(name)
    param = PARAMS[:, None].expand_as(residual)
    if weight_decay:  # beside one another: params with one kind of residual, else one param's
        param, residual = param.T, residual.T
    param, residual = param.reshape(-1).view(torch.bfloat16), residual.reshape(-1)
    grad = torch.zeros_like(param)
    options = {"lr": 0.1 if weight_decay else 0.0, "weight_decay": weight_decay}
    mode = MODES[MODE_NAMES[name]].number
    wanted = step(_C.CpuLevel.BASELINE, param, grad, residual, mode, **options)
    for level in levels:
        assert_same_bits(step(level, param, grad, residual, mode, **options), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_params_of_every_rounding_are_stored_alike(dtype, levels):
    """Every bf16 as a gradient, and weights of every bf16 that decay to what must be rounded."""
    grad = PARAMS.view(torch.bfloat16)
    grad = torch.where(grad.isfinite(), grad, 0).to(dtype)
    param = PARAMS.flip(0).contiguous().view(torch.bfloat16).to(dtype)
    for options in ({}, {"lr": 0.1, "weight_decay": 0.3}):
        wanted = step(_C.CpuLevel.BASELINE, param, grad, **options)
        for level in levels:
            assert_same_bits(step(level, param, grad, **options), wanted)


@pytest.mark.parametrize("largest", [1.0, 1.5, 2.0**-60, 2.0**60], ids=str)
def test_no_positive_second_moment_gets_the_code_of_zero(largest, levels):
    """With beta2 0 the second moment is the square of the gradient. Each block holds its largest
    and squares of every size below: of 2^-149 to 1 times it, close to one another in all decades of
    the map, and those beside each border."""
    edges = ((MAPS[False][:-1] + MAPS[False][1:]) / 2).sqrt().float()
    beside = torch.cat([edges, *(edges.nextafter(torch.tensor(x)) for x in (0.0, 2.0))])
    every = (torch.arange(2**15, 2**15 + 0x3F80, dtype=torch.int32) << 16).view(torch.float32)
    close = (torch.arange(0x39000, 0x3F800, dtype=torch.int32) << 12).view(torch.float32)
    ratios = torch.cat([every.abs(), close, beside])
    ratios = torch.nn.functional.pad(ratios, (0, -ratios.numel() % (BLOCK - 1)))
    grad = torch.nn.functional.pad(ratios.view(-1, BLOCK - 1) * largest, (1, 0), value=largest)
    grad = grad.flatten()
    moment = grad * grad
    absmax = (moment.view(-1, BLOCK).amax(1)).repeat_interleave(BLOCK)
    wanted = nearest((moment * (1 / absmax)).double(), False)
    wanted = torch.where(moment > 0, wanted.clamp(min=1), wanted)
    for level in (_C.CpuLevel.BASELINE, *levels):
        codes = step(level, torch.zeros_like(grad), grad, beta2=0.0)[2]
        if 2.0**-32 < largest < 2.0**32:  # else the reciprocal is taken in two steps
            assert torch.equal(codes.long(), wanted)
        assert torch.equal(codes == 0, moment == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("largest", [1.0, 1.5, 2.0**-100, 2.0**100, 0.0], ids=str)
def test_blocks_of_numbers_are_coded_and_decoded_alike(dtype, largest, levels):
    """Numbers on either side of every border, in blocks with their largest, the last one short; in
    one block an infinity, and in one a NaN. The rule is a search in the table of the map."""
    edges = ((MAPS[True][:-1] + MAPS[True][1:]) / 2).float()
    beside = torch.cat([edges, *(edges.nextafter(torch.tensor(x)) for x in (-2.0, 2.0))])
    beside = torch.nn.functional.pad(beside, (0, -beside.numel() % (BLOCK - 1)))
    x = torch.nn.functional.pad(beside.view(-1, BLOCK - 1), (0, 1), value=1.0).flatten()
    x = (torch.cat([x, torch.ones(5)]) * largest).to(dtype)
    x[3 * BLOCK + 7], x[4 * BLOCK + 1] = float("inf"), float("nan")
    found = []
    for level in (_C.CpuLevel.BASELINE, *levels):
        _C.set_cpu_level(level)
        codes, absmax = quantize_blocks(x, is_signed=True, block_size=BLOCK)
        found.append(
            [codes, absmax, dequantize_blocks(codes, absmax, is_signed=True, block_size=BLOCK)]
        )
    for one in found[1:]:
        assert_same_bits(one, found[0])
    codes, absmax, values = found[0]
    scale = absmax.repeat_interleave(BLOCK)[: x.numel()]
    is_plain = ~scale.isnan()
    assert torch.equal(values.isnan(), ~is_plain)
    whole = torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    assert torch.equal(absmax.isnan(), ~whole.isfinite().all(1))
    if 2.0**-64 < largest < 2.0**64:  # else the reciprocal is taken in two steps
        quotients = x.float()[is_plain] * (1 / scale[is_plain])
        assert torch.equal(codes[is_plain].long(), nearest(quotients.double(), True))


@pytest.mark.parametrize("numel", [4 * BLOCK, 4 * BLOCK - 3])
def test_second_moments_with_scales_of_either_sign_are_stored_alike(numel, levels):
    """No step makes a negative scale, but a state may hold one."""
    torch.manual_seed(0)
    codes = torch.randint(256, (2, numel), dtype=torch.uint8)
    grad, scales = torch.randn(numel) * 0.1, torch.tensor([0.5, -0.5, -0.0, -1e-30])

    def stepped(level):
        _C.set_cpu_level(level)
        lists = [
            [x.clone()] for x in (torch.zeros(numel), grad, codes[0], scales, codes[1], scales)
        ]
        torch.ops.headroom.adamw8bit_(
            *lists, [torch.ones(())], [], lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0,
            eps=1e-8, maximize=False, decoupled=True, block_size=BLOCK, weights_mode=0,
        )  # fmt: skip
        return [x for (x,) in lists]

    wanted = stepped(_C.CpuLevel.BASELINE)
    for level in levels:
        assert_same_bits(stepped(level), wanted)


@pytest.mark.parametrize("factor", [1 + 2.0**-11, 1 - 2.0**-12, 0.5, 2.0**-10, 3.0, 2.0**-20])
def test_every_f16_is_read_and_rounded_alike(factor, levels):
    """Times factors that make ties, denormals, zeros and infinities of them; and their norm."""

    def unscaled(level):
        _C.set_cpu_level(level)
        grad = PARAMS.view(torch.float16).clone()[1:]  # an odd address and count
        norms = torch.zeros(4)
        factors, parts = torch.tensor(factor), [part.clone() for part in grad.split(20_000)]
        torch.ops.headroom.unscale_norm_(parts, clip_coef=factors, norms=norms)
        found_inf, checked = torch.zeros(()), grad.clone()
        torch.ops.headroom.unscale_norm_([checked], clip_coef=factors, found_inf=found_inf)
        torch.ops.headroom.unscale_norm_([grad], clip_coef=factors)
        return grad, norms, found_inf, checked, *parts

    wanted = unscaled(_C.CpuLevel.BASELINE)
    assert wanted[0].nan_to_num().unique().numel() > 2**10
    for level in levels:
        assert_same_bits(unscaled(level), wanted)


@pytest.mark.parametrize("mode", ["nearest", "stochastic", "kahan"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_with_all_in_16_bits_are_alike(dtype, mode, levels):
    """Params of every bit pattern, and so moments and gradients, NaNs and negative second moments
    among them; from an odd element on. Wanted is what parts give that are too small for a vector:
    the formula, an element at a time."""
    number = {"nearest": 0, "stochastic": 1, "kahan": 2}[mode]

    def stepped(level, size=2**16):
        _C.set_cpu_level(level)
        torch.manual_seed(3)
        whole = [PARAMS[torch.randperm(2**16)].view(dtype)[1:] for _ in range(5)]
        param, grad, exp_avg, exp_avg_sq, residual = (list(x.split(size)) for x in whole)
        places = [n for k, x in enumerate(param) for n in (k * size, x.numel(), 0)]
        stochastic = mode == "stochastic"
        torch.ops.headroom.adamw_(
            param, grad, exp_avg, exp_avg_sq, [], [torch.ones(()) for _ in param],
            residual if mode == "kahan" else [], lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1,
            eps=1e-8, amsgrad=False, maximize=False, decoupled=True, weights_mode=number,
            weight_seeds=[5] * len(param) if stochastic else None,
            places=places if stochastic else None,
        )  # fmt: skip
        return whole

    wanted = stepped(_C.CpuLevel.BASELINE, 63)
    for level in (_C.CpuLevel.BASELINE, *levels):
        assert_same_bits(stepped(level), wanted)


@pytest.mark.parametrize("offset", [0, 5, 2**35 - 300, 2**35, 2**38 - 7], ids=str)
@pytest.mark.parametrize("run", [37, 1000])
def test_random_bits_are_those_of_each_element_alone(run, offset, levels):
    """Also where a call has counters with two second words, the first of which ends with element
    2^35 - 1."""

    def stepped(level, size):
        _C.set_cpu_level(level)
        whole = torch.full((1000,), 1 + 2.0**-8).bfloat16()
        param = list(whole.split(size))
        grad = [torch.full_like(x, 1.0) for x in param]
        moments = [torch.zeros_like(x) for x in param], [torch.zeros_like(x) for x in param]
        starts = [offset + i // run * 2048 + i % run for i in range(0, 1000, size)]
        torch.ops.headroom.adamw_(
            param, grad, *moments, [], [torch.zeros(()) for _ in param], [], lr=2.0**-9, beta1=0.9,
            beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False, decoupled=True,
            weights_mode=1, weight_seeds=[2**40 + 9] * len(param),
            places=[n for start in starts for n in (start, min(run, size), 2048)],
        )  # fmt: skip
        return whole

    wanted = stepped(_C.CpuLevel.BASELINE, 1)
    assert wanted.unique().numel() == 2
    for level in (_C.CpuLevel.BASELINE, *levels):
        assert_same_bits([stepped(level, 1000)], [wanted])


def test_a_norm_that_is_streamed_has_the_bits_of_its_parts(levels):
    cols = 4096 + 16  # the last tile of a row is a short one
    rows = 2**22 // cols + 9  # more than 16 MiB, of which a part is not streamed
    x, dy = torch.randn(rows, cols, requires_grad=True), torch.randn(rows, cols)
    weight, bias = torch.randn(cols), torch.randn(cols)

    def normed(x, dy):
        y = layer_norm(x, weight, bias)
        return [y.detach(), *torch.autograd.grad(y, x, dy)]

    for level in (_C.CpuLevel.BASELINE, *levels):
        _C.set_cpu_level(level)
        parts = [normed(*part) for part in zip(x.split(100), dy.split(100))]
        assert_same_bits(normed(x, dy), [torch.cat(part) for part in zip(*parts)])
