"""The op with 8-bit moments: the tensor lists of a call, and the step in float64 with the codes
that its moments may get."""

import math
from dataclasses import dataclass, field, fields

import headroom
import torch

from helpers.reference import adamw64, torch_fused
from helpers.samples import DEFAULTS
from helpers.samples import sample as f32_sample

OPTIONS = {name: value for name, value in DEFAULTS.items() if name != "amsgrad"}
TINY = 2.0**-22  # more than any chain of float32 roundings here loses, relative to its terms


def published_map(signed):
    """The dynamic map of arXiv:2110.02861 with 7 exponent bits, in the steps and precisions of
    bitsandbytes' create_dynamic_map()."""
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1)
        means = (edges[:-1] + edges[1:]) / 2.0
        values += (10 ** (i - 6) * means).tolist()
        values += (-(10 ** (i - 6)) * means).tolist() if signed else []
    return torch.tensor(sorted(values))


SHAPES = ((31, 17), (256,), (255,), (257,), (1,), (), (40, 100))
MAPS = {signed: published_map(signed).double() for signed in (True, False)}


def blocks_of(tensor, block_size):
    """[blocks, block_size], float64, with zeros after the end."""
    flat = tensor.detach().cpu().double().flatten()
    padding = -flat.numel() % block_size
    return torch.nn.functional.pad(flat, (0, padding)).view(-1, block_size)


def decoded(codes, absmax, signed, block_size=256):
    """The moments that codes stand for, float64, in the shape of the codes."""
    values = MAPS[signed][codes.cpu().flatten().int()]
    scales = absmax.cpu().double().repeat_interleave(block_size)[: values.numel()]
    return (values * scales).view(codes.shape)


def nearest(y, signed):
    """The codes nearest to y, ties to the lower one."""
    edges = (MAPS[signed][:-1] + MAPS[signed][1:]) / 2
    return torch.bucketize(y, edges)


def encoded(moment, signed, block_size=256):
    """Codes and scales of a moment. No positive second moment becomes zero."""
    blocks = blocks_of(moment, block_size)
    absmax = blocks.abs().amax(1) if blocks.numel() else blocks.new_zeros(0)
    codes = nearest(blocks / absmax.clamp(min=1e-300)[:, None], signed)
    if not signed:
        codes = torch.where(blocks > 0, codes.clamp(min=1), codes)
    codes = codes.flatten()[: moment.numel()].view(moment.shape)
    return codes.to(moment.device, torch.uint8), absmax.to(moment.device, torch.float32)


@dataclass
class Sample:
    """The tensor lists of one call, in the order of the op's arguments."""

    params: list = field(default_factory=list)
    grads: list = field(default_factory=list)
    exp_avgs: list = field(default_factory=list)
    exp_avg_absmaxs: list = field(default_factory=list)
    exp_avg_sqs: list = field(default_factory=list)
    exp_avg_sq_absmaxs: list = field(default_factory=list)
    steps: list = field(default_factory=list)

    def lists(self):
        return [getattr(self, f.name) for f in fields(self)]

    def tensors(self):
        return [tensor for column in self.lists() for tensor in column]

    def clone(self):
        return Sample(*([t.clone() for t in column] for column in self.lists()))

    def shaped(self, function):
        """With a function applied to the tensors of the parameters' shapes."""
        p, g, m, m_scales, v, v_scales, steps = self.lists()
        p, g, m, v = ([function(t) for t in column] for column in (p, g, m, v))
        return Sample(p, g, m, m_scales, v, v_scales, steps)

    def at(self, where):
        return Sample(*(column[where] for column in self.lists()))

    def wide(self):
        """A copy with parameters and gradients in float32."""
        copy = self.clone()
        copy.params, copy.grads = ([t.float() for t in c] for c in (copy.params, copy.grads))
        return copy


def sample(shapes=((37, 15), (1,), (64,)), *args, block_size=256, **options):
    lists = f32_sample(shapes, *args, **options)
    exp_avgs = [encoded(m, True, block_size) for m in lists.exp_avgs]
    exp_avg_sqs = [encoded(v, False, block_size) for v in lists.exp_avg_sqs]
    columns = [list(column) for pairs in (exp_avgs, exp_avg_sqs) for column in zip(*pairs)]
    return Sample(lists.params, lists.grads, *columns, lists.steps)


def run(lists, **options):
    """One step of the op, in place; returns the lists."""
    headroom.functional.adamw8bit_(*lists.lists(), **(OPTIONS | options))
    return lists


def moments(lists, k, block_size=256):
    first = decoded(lists.exp_avgs[k], lists.exp_avg_absmaxs[k], True, block_size)
    return first, decoded(lists.exp_avg_sqs[k], lists.exp_avg_sq_absmaxs[k], False, block_size)


def as_f32(lists, block_size=256):
    """A sample for the op with float32 moments, of the same values."""
    out = f32_sample(shapes=())
    for k, (param, grad) in enumerate(zip(lists.params, lists.grads)):
        out.params.append(param.float())
        out.grads.append(grad.float())
        m, v = moments(lists, k, block_size)
        out.exp_avgs.append(m.float().to(param.device))
        out.exp_avg_sqs.append(v.float().to(param.device))
    out.steps = [step.clone() for step in lists.steps]
    return out


EXACT = OPTIONS | dict(factor=1.0, block_size=256, skip_nonfinite=False, bnb_exact=False)


def bnb64(p, g, m, v, t, *, lr, beta1, beta2, weight_decay, eps, maximize, factor, **_):
    """What bitsandbytes' CUDA kernel does: the decay last, nothing for a bad gradient, and 1 - beta
    from the float32 beta, which for 0.999 is another number than 0.001."""
    c1, c2 = 1 - beta1**t, math.sqrt(1 - beta2**t)
    beta1, beta2 = torch.tensor([beta1, beta2]).tolist()
    finite = g.isfinite()
    g = torch.where(finite, g * (-factor if maximize else factor), 0.0)
    m = torch.where(finite, m * beta1 + (1 - beta1) * g, 0.0)
    v = torch.where(finite, v * beta2 + (1 - beta2) * g * g, 0.0)
    new = (p - lr * c2 / c1 * m / (v.sqrt() + c2 * eps)) * (1 - lr * weight_decay)
    return torch.where(finite, new, p), m, v


def step64(before, k, options):
    """Parameter k and its moments after a step in float64, and how far the moments may be from that
    in float32."""
    rule = {name: options[name] for name in (*OPTIONS, "factor")}
    p, g = before.params[k].cpu().double(), before.grads[k].cpu().double()
    m, v = moments(before, k, options["block_size"])
    t = before.steps[k].item() + 1
    if options["bnb_exact"]:
        new = bnb64(p, g, m, v, t, **rule)
    else:
        new = adamw64(p, g, m, v, v, t, amsgrad=False, **rule)[:3]
    if options["skip_nonfinite"]:
        new = [torch.where(g.isfinite(), a, b) for a, b in zip(new, (p, m, v))]
    finite = g.isfinite()  # others leave nothing to compute
    g = g.nan_to_num(0, 0, 0).abs() * abs(options["factor"])
    g += 0 if options["decoupled"] else options["weight_decay"] * p.abs()
    beta1, beta2 = options["beta1"], options["beta2"]
    loose = beta1 * m.abs() + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    return *new, *(TINY * finite * terms for terms in loose)


def bnb_codes(blocks, y, signed):
    codes = nearest(y, signed)
    if signed:
        towards = torch.where(blocks > 0, 1, -1)
        codes = torch.where(MAPS[True][codes].signbit() != blocks.signbit(), codes + towards, codes)
    return codes


def codes_between(blocks, loose, signed, bnb_exact):
    """The lowest and the highest code that a moment may get if it is wrong by `loose`, and the
    scales of its blocks."""
    absmax = blocks.abs().amax(1, keepdim=True)
    y, loose = (torch.where(absmax > 0, x / absmax, 0.0) for x in (blocks, loose))
    loose = loose + 4 * TINY * y.abs()
    ends = []
    for end, undefined in ((y - loose, 0), (y + loose, 255)):
        if bnb_exact:
            codes = torch.where(absmax > 0, bnb_codes(blocks, end, signed), undefined)
        else:
            codes = nearest(end, signed)
            codes = codes if signed else torch.where(blocks > 0, codes.clamp(min=1), codes)
        ends.append(codes)
    return *ends, absmax.flatten()


def check_moments(got, before, **options):
    """Holds codes and scales against float64. Few codes may be one of two."""
    options = EXACT | options
    unsure = []
    for k in range(len(before.params)):
        _, m, v, *loose = step64(before, k, options)
        for signed, moment, slack in ((True, m, loose[0]), (False, v, loose[1])):
            name = "exp_avg" if signed else "exp_avg_sq"
            blocks, slack = (blocks_of(x, options["block_size"]) for x in (moment, slack))
            *ends, absmax = codes_between(blocks, slack, signed, options["bnb_exact"])
            codes = getattr(got, f"{name}s")[k].cpu().flatten().int()
            low, high = (end.flatten()[: codes.numel()] for end in ends)
            wrong = (codes < low) | (codes > high)
            assert not wrong.any(), f"{name}s[{k}]: {codes[wrong]}, not {low[wrong]}, {high[wrong]}"
            scales = getattr(got, f"{name}_absmaxs")[k].cpu().double()
            assert ((scales - absmax).abs() <= slack.amax(1) + TINY * absmax).all()
            unsure.append((low != high).double())
        assert got.steps[k].item() == before.steps[k].item() + 1
    assert torch.cat(unsure).mean() < 1e-3


def check_params(got, before, **options):
    """float32 parameters are at most twice as far from float64 as torch's with the same moments."""
    options = EXACT | options
    exact = torch.cat([step64(before, k, options)[0].flatten() for k in range(len(before.params))])
    theirs = as_f32(before, options["block_size"])
    theirs.grads = [grad * options["factor"] for grad in theirs.grads]
    torch_fused(theirs, amsgrad=False, **{name: options[name] for name in OPTIONS})
    ours, theirs = (
        torch.cat([p.cpu().double().flatten() for p in x.params]) for x in (got, theirs)
    )
    # One rounding is allowed where torch happens to be exact, and one of the factor.
    slack = 2**-24 if options["factor"] == 1.0 else 2**-23
    assert (ours - exact).norm() <= 2 * (theirs - exact).norm() + slack * exact.norm()
