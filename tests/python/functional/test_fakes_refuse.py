"""What an op refuses, its fake refuses too, and nothing else: a graph would fail when it runs."""

from contextlib import nullcontext

import pytest
import torch
from headroom import functional as F
from headroom.functional.gemm import gemm_into
from torch._subclasses.fake_tensor import FakeTensorMode

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
I8, I16, I32, I64, U8 = torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8


def t(*shape, dtype=F32):
    return torch.zeros(shape, dtype=dtype)


def join(
    values=F32, params=BF16, residual=I16, shape=(5,), kept=(5,), count=1, master="remainder16"
):
    residuals = [t(*kept, dtype=residual) for _ in range(count)]
    given = [[t(*shape, dtype=values)], [t(5, dtype=params)], residuals]
    F.join_weights_(*given, master=master)


def split(values=F32, params=BF16, residual=I16, shape=(5,), kept=(5,), count=1):
    residuals = [t(*kept, dtype=residual) for _ in range(count)]
    given = [[t(5, dtype=params)], residuals, [t(*shape, dtype=values)]]
    F.split_weights_(*given, master="remainder16")


def scale(dtypes=(F32, I32, F32, I32), sizes=(1, 1, 1, 1)):
    scale, grown, found, tracker = (t(n, dtype=d) for n, d in zip(sizes, dtypes))
    F.update_scale_(scale + 1, grown, found, hysteresis_tracker=tracker, hysteresis=2)


def measure(grads=(F32, BF16, F16), **outputs):
    F.unscale_norm_([t(3, dtype=dtype) for dtype in grads], **outputs)


def quantize(values=F32, block_size=64):
    F.quantize_blocks(t(130, dtype=values), is_signed=True, block_size=block_size)


def dequantize(codes=U8, absmax=F32, count=3, block_size=64, stride=1):
    scales = t(count * stride, dtype=absmax)[::stride]
    F.dequantize_blocks(t(130, dtype=codes), scales, is_signed=True, block_size=block_size)


def few_bits(dtype=F32, shape=(5, 30), to=1, block_size=64, nested=True):
    op = torch.ops.headroom.quantize_matrix
    op(t(*shape, dtype=dtype), to, block_size, nested, False)


def elements(codes=75, scales=12, shape=(5, 30), dtypes=(U8, U8, F16), to=1, size=64, nested=True):
    """Of 3 blocks: their codes, padding, a scale and an offset."""
    given = [t(n, dtype=dtype) for n, dtype in zip((codes, scales), dtypes)]
    torch.ops.headroom.dequantize_matrix(*given, *shape, to, size, nested, dtypes[2])


MXFP4 = {"to": 4, "codes": 80, "scales": 5, "shape": (5, 32), "size": 32, "nested": False}


def rope(q=(2, 4, 3, 8), k=(2, 2, 3, 8), cos=(3, 4), sin=None, dtypes=(F32,) * 4, ids=None, **how):
    shapes = q, k, cos, cos if sin is None else sin
    tensors = [t(*shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes)]
    ids = None if ids is None else t(*ids, dtype=how.pop("kind", I64))
    F.rope(*tensors, position_ids=ids, **how)


def gemm(a=(2, 3), b=(3, 4), **how):
    F.gemm(t(*a), t(*b), **how)


def into(c=(2, 4), dtype=F32, batch=()):
    gemm_into(t(*batch, *c, dtype=dtype), t(*batch, 2, 3), t(*batch, 3, 4))


def divergence(student=(7, 4), teacher=(7, 6)):
    """The op itself: the function that users call checks before."""
    heads = [t(3, 4), t(*student), None, t(3, 6), t(*teacher), None]
    wants = [False] * 3
    torch.ops.headroom.linear_divergence(*heads, None, 0.5, 1.0, 1, 4, *wants)


def adafactor(rms=(1, 1), dtype=F32):
    """Of a vector and a number."""
    params, steps = [t(3), t()], [torch.ones(()) for _ in range(2)]
    values = [t(n, dtype=dtype) for n in rms]
    F.adafactor_(params, [t(3), t()], [], [], [t(3), t(1)], [], values, steps)


def segments(q=(5, 4, 8), k=(5, 2, 8), v=None, dtypes=(F32,) * 3, ends=(2,), kind=I32, window=0):
    shapes = q, k, k if v is None else v
    heads = [t(*shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes)]
    cu_seqlens = t(*ends, dtype=kind)
    cu_seqlens[1:] = 5
    torch.ops.headroom.attention_segments(*heads, cu_seqlens, True, window, None)


def segments_backward(**given):
    shapes = {name: (5, 4, 8) for name in ("dout", "q", "out")} | {"sums": (5, 4)}
    shapes |= {"k": (5, 2, 8), "v": (5, 2, 8)} | given.pop("shapes", {})
    made = {name: t(*shape, dtype=given.get(name, F32)) for name, shape in shapes.items()}
    heads = [made[name] for name in ("dout", "q", "k", "v", "out", "sums")]
    ends = t(2, dtype=I32)
    ends[1:] = 5
    torch.ops.headroom.attention_segments_backward(*heads, ends, True, 0, None)


GOOD = {
    join: [{}, {"params": F16, "master": "f32", "residual": F32}],
    split: [{}],
    scale: [{}],
    measure: [{}, {"grads": (F32,)}],
    quantize: [{}, {"values": F16}, {"block_size": 4096}],
    dequantize: [{}, {"block_size": 4096, "count": 1}],
    few_bits: [{}, {"dtype": F16, "nested": False}, {"to": 3, "block_size": 1, "nested": False}],
    elements: [
        *({}, {"nested": False}, {"size": 32, "scales": 16}),
        {"to": 3, "codes": 150, "scales": 20, "dtypes": (I8, U8, BF16), "nested": False},
        MXFP4,
    ],
    rope: [
        *({"cos": (9, 8)}, {"cos": (2, 3, 8)}, {"cos": (1, 3, 8)}, {"ids": (3,)}, {"ids": (1, 3)}),
        *({"ids": (2, 3)}, {"q": (4, 3, 8), "k": (2, 3, 8)}, {"cos": (3, 2), "rotary_dim": 4}),
        {"q": (2, 3, 4, 8), "k": (2, 3, 2, 8), "token_major": True},
        {"dtypes": (BF16, BF16, F32, F32)},
    ],
    gemm: [{}, {"a": (5, 2, 3), "b": (5, 3, 4)}],
    into: [{}],
    divergence: [{}],
    adafactor: [{}, {"rms": ()}],
    segments: [{}, {"kind": I64}, {"k": (5, 4, 8)}, {"dtypes": (F16,) * 3}, {"window": 2}],
    segments_backward: [{}],
}
BAD = {
    join: [
        *({"values": F16}, {"values": BF16}, {"params": F64}, {"residual": I64}, {"kept": (4,)}),
        *({"shape": (4,)}, {"count": 2}),
    ],
    split: [{"values": F16}, {"params": F64}, {"residual": I64}, {"kept": (4,)}, {"shape": (6,)}],
    scale: [
        *({"dtypes": (F64, I32, F32, I32)}, {"dtypes": (F32, I64, F32, I32)}),
        *({"dtypes": (F32, I32, F64, I32)}, {"dtypes": (F32, I32, F32, F32)}),
        *({"sizes": (2, 1, 1, 1)}, {"sizes": (1, 2, 1, 1)}, {"sizes": (1, 1, 2, 1)}),
        {"sizes": (1, 1, 1, 2)},
    ],
    measure: [{"grads": (F32, F64)}, {"grads": (I32,)}],
    quantize: [{"values": I32}, {"values": F64}, {"block_size": 100}, {"block_size": 32}],
    dequantize: [
        *({"codes": I8}, {"absmax": F64}, {"count": 2}, {"count": 4}, {"block_size": 8192}),
        {"stride": 2},
    ],
    few_bits: [
        *({"dtype": F64}, {"shape": (5,)}, {"shape": (2, 3, 4)}, {"to": 0}, {"to": 5}, {"to": 3}),
        {"to": 4, "shape": (5, 32), "block_size": 32, "nested": False},
        *({"block_size": 16}, {"block_size": 96}, {"block_size": 8192}),
    ],
    elements: [
        *({"codes": 74}, {"scales": 16}, {"shape": (5, 32)}, {"shape": (-5, -30)}, {"to": 0}),
        *({"to": 3}, {"size": 16}, {"dtypes": (I8, U8, F16)}, {"dtypes": (U8, I8, F16)}),
        *({"dtypes": (U8, U8, F64)}, MXFP4 | {"size": 64}, MXFP4 | {"nested": True}),
        *(MXFP4 | {"shape": (4, 40)}, MXFP4 | {"codes": 79}, MXFP4 | {"scales": 20}),
    ],
    rope: [
        *({"q": (3, 8)}, {"q": (1, 2, 4, 3, 8)}, {"k": (2, 2, 4, 8)}, {"k": (3, 2, 3, 8)}),
        *({"k": (2, 2, 3, 6)}, {"cos": (3,)}, {"cos": (3, 3, 8)}, {"cos": (2, 4, 8)}),
        *(
            {"cos": (3, 4), "rotary_dim": 6},
            {"cos": (3, 4), "sin": (2, 4)},
            {"dtypes": (F64, F64, F32, F32)},
        ),
        *({"dtypes": (F32, F32, F64, F64)}, {"dtypes": (F32, F32, F32, BF16)}),
        *({"dtypes": (F32, BF16, F32, F32)}, {"ids": (2,)}, {"ids": (3, 3)}, {"ids": (2, 3, 1)}),
        {"ids": (3,), "kind": I32},
    ],
    gemm: [{"a": (2, 4)}, {"a": (3,), "b": (3, 4)}, {"a": (5, 2, 3), "b": (4, 3, 4)}],
    into: [{"c": (2, 5)}, {"c": (3, 4)}, {"dtype": BF16}, {"batch": (2,)}],
    divergence: [{"student": (6, 4)}, {"student": (7, 5)}, {"teacher": (7, 4)}],
    adafactor: [{"rms": (1, 2)}, {"rms": (1,)}, {"dtype": BF16}],
    segments: [
        *({"q": (5, 3, 8)}, {"q": (6, 4, 8)}, {"q": (5, 4, 9)}, {"q": (1, 5, 4, 8)}),
        *({"v": (5, 1, 8)}, {"v": (5, 2, 9)}, {"k": (5, 16)}, {"dtypes": (F64,) * 3}),
        *({"dtypes": (F32, F16, F32)}, {"dtypes": (F32, F32, F16)}, {"kind": F32}),
        *({"ends": (2, 1)}, {"window": -1}),
    ],
    segments_backward: [
        *({"dout": F16}, {"out": F16}, {"sums": F16}, {"q": F16}, {"shapes": {"sums": (4, 5)}}),
        *({"shapes": {"dout": (5, 4, 9)}}, {"shapes": {"out": (5, 2, 8)}}),
        {"shapes": {"k": (5, 2, 9)}},
    ],
}


def output(name, dtype, numel):
    return lambda: measure(**{name: torch.ones(numel, dtype=dtype)})


# Outputs and factors of three gradients.
for _name, _dtype, _numel in (
    *(("norm", F32, 1), ("norms", F32, 3), ("found_inf", F32, 1), ("culprit", I64, 1)),
    *(("clip", F32, 1), ("grad_scale", F32, 1), ("clip_coef", F32, 1)),
):
    GOOD[output(_name, _dtype, _numel)] = [{}]
    BAD[output(_name, F64 if _dtype == F32 else I32, _numel)] = [{}]
    BAD[output(_name, _dtype, _numel + 1)] = [{}]


@pytest.mark.parametrize("is_fake", [False, True], ids=["real", "fake"])
def test_what_is_taken(is_fake):
    for call, cases in GOOD.items():
        for options in cases:
            with FakeTensorMode() if is_fake else nullcontext():
                call(**options)


@pytest.mark.parametrize("is_fake", [False, True], ids=["real", "fake"])
def test_what_is_refused(is_fake):
    for call, cases in BAD.items():
        for options in cases:
            with FakeTensorMode() if is_fake else nullcontext():
                try:
                    call(**options)
                except (RuntimeError, ValueError):
                    continue
            pytest.fail(f"{call.__name__} takes {options}")


@pytest.mark.parametrize("which", [2, 3])
def test_tables_of_angles_get_no_gradient(which):
    tensors = [t(2, 4, 3, 8), t(2, 2, 3, 8), t(3, 4), t(3, 4)]
    tensors[which].requires_grad_()
    with pytest.raises(RuntimeError, match="no derivative with respect to cos and sin"):
        F.rope(*tensors)
