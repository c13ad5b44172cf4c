"""Prints what QLoRA of Llama-3-8B takes on a GPU, by kind, as `headroom.plan` computes it, beside
what PEFT and bitsandbytes do: `python -m benchmarks._qlora_8b`. Needs no GPU and no weights.

Adapters of rank 16 on the seven linear layers of each block, in float32; 4 sequences of 2,048
tokens, bfloat16, AdamW with 8-bit moments. Functions of bitsandbytes cannot be followed without
values, so its layers are stood in for by layers that do the same with Headroom's bytes: they cast x
to bfloat16, decode the whole weight for a product and again for its gradient, and keep neither.
Layers with adapters are PEFT's own. A plan says what tensors take, and what the allocator adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._llama_8b import GIB, llama_8b

BUDGET = "12 GiB"
RANK, SEQUENCES, TOKENS = 16, 4, 2048
KINDS = ("gradients", "optimizer_state", "activations", "temporaries")  # besides parameters
ROWS = [
    "weights, embeddings and head",
    "adapters",
    "gradients",
    "states of the optimizer",
    "activations",
    "temporaries: logits, decoded weights, workspaces",
    "cuBLAS",
    "CUDA context",
    "rounding and fragmentation",
    "**total**",
    f"within {BUDGET}",
]


class WholeProduct(torch.autograd.Function):
    """x times a weight that is decoded whole, as bitsandbytes' MatMul4Bit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.dequantize(x.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy @ ctx.layer.dequantize(dy.dtype), None


def decoding_whole(layer: nn.Module) -> None:
    """Gives a layer of :func:`headroom.quantize` the forward of bitsandbytes' Linear4bit."""

    def forward(x: Tensor) -> Tensor:
        return WholeProduct.apply(x.to(torch.bfloat16), layer).to(x.dtype)

    layer.forward = forward


def of_peft(prepared: bool) -> nn.Module:
    """Returns the model with adapters of PEFT, whose blocks are checkpointed.

    Args:
        prepared: by ``prepare_model_for_kbit_training``, which casts what is not in 4 bits to
            float32.
    """
    import headroom
    import peft
    from peft.tuners.lora import Linear
    from peft.tuners.lora.bnb import Linear4bit

    model = llama_8b()
    headroom.quantize(model)
    for layer in model.modules():
        if isinstance(layer, headroom.nn.Linear4bit):
            decoding_whole(layer)
    if prepared:
        model.is_loaded_in_4bit = True
        model = peft.prepare_model_for_kbit_training(model)
    else:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    settings = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear")
    model = peft.get_peft_model(model, settings)
    for layer in model.modules():
        if type(layer) is Linear:
            layer.__class__ = Linear4bit
    in_float32(model)
    return model


def in_float32(model: nn.Module) -> None:
    """Casts adapters to the dtype that PEFT gives them over layers of bitsandbytes."""
    for name, module in model.named_modules():
        if ".lora_" in name:
            module.float()


def of_headroom(level: str) -> nn.Module:
    import headroom

    model = llama_8b()
    headroom.quantize(model)
    headroom.lora(model, RANK)
    headroom.patch(model, save=level, loss=True)
    return model


def of_peft_patched(level: str) -> nn.Module:
    """Returns the model with adapters of PEFT, whose layers call Headroom's kernels."""
    import headroom
    import peft

    model = llama_8b()
    headroom.quantize(model)
    settings = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear")
    model = peft.get_peft_model(model, settings)
    in_float32(model)
    headroom.patch(model, save=level, loss=True)
    return model


WAYS: dict[str, tuple[Callable[[Any], nn.Module], Any, torch.dtype | None]] = {
    "PEFT + bitsandbytes, prepared": (of_peft, True, torch.bfloat16),
    "PEFT + bitsandbytes": (of_peft, False, None),
    "PEFT, patched, L5": (of_peft_patched, "L5", None),
    "Headroom, L5": (of_headroom, "L5", None),
    "Headroom, L2": (of_headroom, "L2", None),
}


def column(make: Callable[[Any], nn.Module], value: Any, amp: torch.dtype | None) -> list[str]:
    """Returns the plan of a way to train, in GiB by kind, and whether it fits."""
    import headroom

    ids = torch.zeros(SEQUENCES, TOKENS, dtype=torch.int64)
    batch, model = {"input_ids": ids, "labels": ids}, make(value)
    plan = headroom.plan(model, headroom.optim.AdamW8bit, batch, device="cuda", amp=amp)
    adapters = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    kinds, share = plan.peak_by_kind, plan.device_share
    sizes = [kinds["parameters"] - adapters, adapters, *(kinds[kind] for kind in KINDS)]
    sizes += [share.workspaces, share.context, share.rounding + share.fragmentation]
    assert sum(sizes) + kinds["batch"] + kinds["buffers"] == plan.total_bytes
    shown = [f"{size / GIB:.2f}" for size in (*sizes, plan.total_bytes)]
    return [*shown, "yes" if plan.fits(BUDGET) else "no"]


def main() -> None:
    columns = [[f"{name} |", "---:|", *column(*way)] for name, way in WAYS.items()]
    print("| GiB |", *(one[0] for one in columns))
    print("|---|" + "".join(one[1] for one in columns))
    for name, *values in zip(ROWS, *(one[2:] for one in columns)):
        print(f"| {name} | {' | '.join(values)} |")


if __name__ == "__main__":
    main()
