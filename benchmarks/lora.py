"""A layer with adapters over a dense or an NF4 weight, and a step of a Llama of such layers, beside
PEFT and bitsandbytes. A step is forward, loss and backward; the peak is above the weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ._layers import held_bytes, trained
from .block import PEAK as STEP_PEAK
from .block import TINY, Shape
from .harness import Bar, Case, Contender, Rotation, Share, Unavailable, filled, sets_needed
from .instructions.row import Row, evenly

F32, BF16 = torch.float32, torch.bfloat16
RANK, PEAK = 16, "peak bytes"


@dataclass
class Layer:
    """``call`` is a function of ``x``, and ``trained`` what else has a gradient."""

    x: Tensor
    dy: Tensor
    call: Callable[[Tensor], Tensor]
    trained: list[Tensor]


def base(out: int, width: int, dtype: torch.dtype, device: torch.device) -> nn.Linear:
    made = nn.Linear(width, out, bias=False, device=device, dtype=dtype).requires_grad_(False)
    with torch.no_grad():
        made.weight.copy_(filled(out * width, dtype, device).view(out, width))
    return made


def headroom_layer(plain: nn.Linear, few_bits: bool, dropout: float) -> Any:
    from headroom.functional import lora_linear, quantize_matrix

    weight = quantize_matrix(plain.weight) if few_bits else plain.weight
    out, width = plain.weight.shape
    a, b = (
        filled(m * n, F32, plain.weight.device).view(m, n).requires_grad_()
        for m, n in ((RANK, width), (out, RANK))
    )
    return lambda x: lora_linear(x, weight, None, a, b, dropout=dropout), [a, b]


def headroom_dora(plain: nn.Linear, few_bits: bool, dropout: float) -> Any:
    import headroom

    model = nn.Sequential(plain)
    if few_bits:
        headroom.quantize(model, skip=[])
    headroom.lora(model, RANK, targets=["0"], dropout=dropout, dora=True)
    nn.init.normal_(model.get_parameter("0.lora_B.default.weight"), std=0.1)
    return model, [p for p in model.parameters() if p.requires_grad]


def bitsandbytes_layer(plain: nn.Linear) -> nn.Module:
    try:
        from bitsandbytes.nn import Linear4bit, Params4bit
    except ImportError as error:
        raise Unavailable("bitsandbytes is not installed") from error
    weight = plain.weight.data
    out, width = weight.shape
    layer = Linear4bit(width, out, bias=False, compute_dtype=weight.dtype, quant_type="nf4")
    layer.weight = Params4bit(weight, requires_grad=False, quant_type="nf4")
    return layer.to(weight.device)


def peft_layer(plain: nn.Linear, few_bits: bool, dropout: float, dora: bool = False) -> Any:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise Unavailable("not installed") from error
    layer = bitsandbytes_layer(plain) if few_bits else plain
    config = LoraConfig(
        r=RANK, lora_alpha=RANK, lora_dropout=dropout, target_modules=["0"],
        init_lora_weights=False, use_dora=dora,
    )  # fmt: skip
    model = inject_adapter_in_model(config, nn.Sequential(layer))
    own = [p.requires_grad_() for n, p in model.named_parameters() if "lora" in n]
    for p in own:
        p.data = p.data.float()
    return model, own


def case(
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    quick: bool,
    few_bits: bool = False,
    dropout: float = 0.0,
    dora: bool = False,
) -> Case:
    rows, out, width = (24, 32, 64) if quick else sizes

    def setup(device: torch.device) -> dict[str, Any]:
        def contender(make: Callable[[nn.Linear, bool, float], Any]) -> Contender:
            held = rows * (width + out) * 2 * dtype.itemsize
            held += out * width // 2 if few_bits else out * width * dtype.itemsize
            layers = []
            for _ in range(sets_needed(held, device)):
                call, own = make(base(out, width, dtype, device), few_bits, dropout)
                x, dy = (filled(rows * n, dtype, device).view(rows, n) for n in (width, out))
                layers.append(Layer(x.requires_grad_(), dy, call, own))
            call = trained(
                Rotation(layers), lambda d: d.call(d.x), lambda d: (d.x, *d.trained), lambda d: d.dy
            ).call
            return Contender(call, counts=lambda: {PEAK: held_bytes(call, device)[1]})

        return {
            "headroom": lambda: contender(headroom_dora if dora else headroom_layer),
            "PEFT": lambda: contender(functools.partial(peft_layer, dora=dora)),
        }

    name = "f32" if dtype == F32 else "bf16"
    kind = "nf4" if few_bits else "dense"
    dropped = (", DoRA" if dora else "") + (f", dropout {dropout}" if dropout else "")
    work = 2 * rows * (2 * out * width + 3 * RANK * (out + width))
    return Case(
        f"{'dora-' if dora else ''}{kind}-{name}-{sizes[0]}{'-dropout' if dropout else ''}",
        f"{sizes[0]:,} rows of {sizes[2]:,} to {sizes[1]:,}, {kind}, {name}{dropped}, both passes",
        setup,
        "PEFT",
        work,
        "flop",
        dtype,
        [Bar("ratio", 2.0 if dora else 1.1, "cpu")],
    )


# ---- A step of a model ---------------------------------------------------------------------------

LLAMA_12M = Shape(512, 1376, 8, 4, 4, 1000, 1, 512)  # 12.1M parameters
# What blocks keep, one after another. Those of several levels keep what the bars of memory leave.
LEVELS = {
    **{f"L{k}": [f"L{k}"] * LLAMA_12M.layers for k in range(3)},
    "L2 L1 L1 L1": ["L2", "L1", "L1", "L1"],
    "L2 L2 L2 L1": ["L2", "L2", "L2", "L1"],
}


class Step:
    """Models with the same weights and adapters, and a batch."""

    def __init__(
        self, shape: Shape, dtype: torch.dtype, few_bits: bool, device: torch.device
    ) -> None:
        self.model = functools.partial(shape.model, dtype, device)
        self.few_bits, self.device = few_bits, device
        generator = torch.Generator().manual_seed(0)
        size = shape.sequences, shape.tokens
        self.ids = torch.randint(shape.vocabulary, size, generator=generator).to(device)
        self.adapters: dict[str, Tensor] = {}
        self.loss: float | None = None
        # Scales that are quantized themselves are not the same to the bit in bitsandbytes.
        self.tolerance = max(4 * torch.finfo(dtype).eps, 1e-4)

    def headroom(self, level: str) -> Contender:
        import headroom

        model = self.model()
        if self.few_bits:
            headroom.quantize(model)
        headroom.lora(model, RANK)
        headroom.patch(model, LEVELS[level][: len(model.model.layers)])
        return self._contender(model)

    def peft(self) -> Contender:
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise Unavailable("not installed") from error
        model = self.model()
        names = [
            name
            for name, one in model.named_modules()
            if type(one) is nn.Linear and name != "lm_head"
        ]
        for name in names if self.few_bits else ():
            parent, _, own = name.rpartition(".")
            plain = model.get_submodule(name)
            assert isinstance(plain, nn.Linear)
            setattr(model.get_submodule(parent), own, bitsandbytes_layer(plain))
        config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=names)
        return self._contender(get_peft_model(model, config))

    def _contender(self, model: Any) -> Contender:
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        for name, param in trained:
            key = name.removeprefix("base_model.model.")
            if key not in self.adapters:
                values = filled(param.numel(), F32, torch.device("cpu")).view(param.shape)
                self.adapters[key] = values * 0.05
            with torch.no_grad():
                param.copy_(self.adapters[key])

        def loss() -> Tensor:
            return model(input_ids=self.ids, labels=self.ids, use_cache=False).loss

        def call() -> None:
            loss().backward()
            for _, param in trained:
                param.grad = None

        found = loss().item()
        self.loss = found if self.loss is None else self.loss
        if abs(found - self.loss) > self.tolerance * self.loss:
            raise AssertionError(f"the loss is {found}, that of another {self.loss}")
        return Contender(call, counts=lambda: {STEP_PEAK: held_bytes(call, self.device)[1]})


def step_case(
    dtype: torch.dtype, few_bits: bool, level: str, time: float, peak: float, quick: bool
) -> Case:
    """``headroom`` is at ``level``, at which it is to reach both bars."""
    shape = TINY if quick else LLAMA_12M

    def setup(device: torch.device) -> dict[str, Callable[[], Contender]]:
        step = Step(shape, dtype, few_bits, device)
        others = {f"L{k}" for k in range(3)} - {level}
        each = {f"headroom {k}": functools.partial(step.headroom, k) for k in sorted(others)}
        return {"headroom": functools.partial(step.headroom, level), **each, "PEFT": step.peft}

    name, kind = "f32" if dtype == F32 else "bf16", "nf4" if few_bits else "dense"
    return Case(
        f"step-{kind}-{name}",
        f"a step of a 12.1M Llama, {shape.sequences} x {shape.tokens} tokens, {kind}, {name}; "
        f"headroom is {level}",
        setup,
        "PEFT",
        bars=[Bar("ratio", time, "cpu"), Share(STEP_PEAK, "headroom", "PEFT", peak, "cpu")],
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    sizes = (512, 2048, 2048)
    layers = [
        case(sizes, dtype, quick, few_bits, dropout)
        for dtype in (F32, BF16)
        for few_bits in (False, True)
        for dropout in (0.0, 0.1)
    ]
    dora = [
        case((rows, 2048, 2048), dtype, quick, few_bits, dora=True)
        for rows in (128, 512)
        for dtype in (F32, BF16)
        for few_bits in (False, True)
    ]
    return [
        *layers,
        *dora,
        step_case(F32, False, "L2 L1 L1 L1", 1.1, 0.6, quick),
        step_case(F32, True, "L2 L2 L2 L1", 1.15, 0.5, quick),
        step_case(BF16, True, "L1", 1.15, 0.5, quick),
    ]


DROPS = {
    "f32": evenly(19.9) | {"75": 20.4},
    "bf16": evenly(19.1) | {"75": 26.9},
    "f16": evenly(19.1) | {"75": 20.8},
}
WIDE = ("IMAD.WIDE.U32",)  # 20 of a group of eight are Philox's, 3 lead to it
BUDGETS = [
    Row("lora_rows_kernel", "f32, dropping", 8, 4, 4, WIDE, 2.875, DROPS["f32"]),
    Row("lora_rows_kernel", "bf16, dropping", 4, 2, 2, WIDE, 2.875, DROPS["bf16"]),
    Row("lora_rows_kernel", "f16, dropping", 4, 2, 2, WIDE, 2.875, DROPS["f16"], f16=True),
    Row("lora_rows_kernel", "f32 to bf16", 6, 4, 2, WIDE, 0.375, evenly(5.6) | {"75": 13.3}),
    Row(
        "lora_rows_kernel", "f32 to f16", 6, 4, 2, WIDE, 0.375, evenly(5.6) | {"75": 6.9}, f16=True
    ),
]
