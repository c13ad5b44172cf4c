"""Compares the held-out loss of adapters of Headroom with that of PEFT and bitsandbytes.

    python examples/convergence_adapters.py [--steps N] [--seeds N] [--out FILE.json]

A small Llama of transformers is trained in full on English, the topics of Python's `help()`. Then
adapters of rank 8 are trained on the demo's text beside its frozen weights, in these settings:

NF4: weights in 4 bits, by bitsandbytes with adapters of PEFT, and by `headroom.quantize` with those
of `headroom.lora`, in blocks that keep no x at level L1. B is zero at first: where it has no
gradient, adapters add nothing, and the loss stays that of the quantized model.

float32: the same adapters beside the weights as they were.

A seed decides the adapters' A, the same for all modes, and the batches. A mode is close if its mean
over the seeds differs from PEFT's by no more than PEFT's seeds differ from each other.
`transformers`, `peft` and `bitsandbytes` must be installed.
"""

import copy
import functools
import math
import pydoc_data.topics
from collections.abc import Callable

import headroom
import torch
from torch import Tensor, nn

import data
from convergence import Setting, compare

CONTEXT, BATCH, VOCABULARY = 128, 4, 256
BASE_STEPS, BASE_LR, LR = 300, 2e-3, 2e-3
RANK, ALPHA = 8, 16
WINDOWS = 64  # of held-out text
Params = list[nn.Parameter]


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            use_cache=False,
        )
    )


def loss_of(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy in nats per token."""
    tokens, targets = pair
    logits = model(input_ids=tokens).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(
    model: nn.Module, params: Params, text: data.Text, seed: int, steps: int, lr: float
) -> None:
    """Trains parameters of a model with a warm-up of 20 steps, and then a straight decay."""
    optimizer = torch.optim.AdamW(params, lr=lr, weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / 20, 1 - step / steps)
        loss_of(model, data.batch(text, seed, step, BATCH, CONTEXT)).backward()
        optimizer.step()
        optimizer.zero_grad()


@functools.cache
def base() -> nn.Module:
    """Returns the model that was trained in full, once."""
    english, _ = data.load(pydoc_data.topics.__file__, CONTEXT)
    torch.manual_seed(0)
    model = llama()
    train(model, [*model.parameters()], english, 0, BASE_STEPS, BASE_LR)
    return model


def of_peft(model: nn.Module, few_bits: bool) -> nn.Module:
    import peft

    if few_bits:
        from bitsandbytes.nn import Linear4bit, Params4bit

        for layer in model.model.layers:
            for part in (layer.self_attn, layer.mlp):
                for name, linear in [*part.named_children()]:
                    if isinstance(linear, nn.Linear):
                        rows, columns = linear.weight.shape
                        small = Linear4bit(
                            columns, rows, bias=False, compute_dtype=torch.float32, quant_type="nf4"
                        )
                        weight = linear.weight.data
                        small.weight = Params4bit(weight, requires_grad=False, quant_type="nf4")
                        setattr(part, name, small.to("cpu"))
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    return peft.get_peft_model(model, config)


def of_headroom(model: nn.Module, few_bits: bool) -> nn.Module:
    if few_bits:
        headroom.quantize(model)
    headroom.lora(model, RANK, alpha=ALPHA)
    headroom.patch(model, "L1")
    return model


def without_gradients_of_b(model: nn.Module, few_bits: bool) -> nn.Module:
    model = of_headroom(model, few_bits)
    for name, param in model.named_parameters():
        if ".lora_B." in name:
            param.register_hook(torch.zeros_like)
    return model


NO_GRADIENT = "B's gradient is zero"
OURS = {"Headroom": of_headroom, NO_GRADIENT: without_gradients_of_b}
SETTINGS = {
    "NF4": Setting({"PEFT and bitsandbytes": of_peft} | OURS, (NO_GRADIENT,)),
    "float32": Setting({"PEFT": of_peft} | OURS, (NO_GRADIENT,)),
}


def held_out(
    setting: Setting,
    adapt: Callable[[nn.Module, bool], nn.Module],
    seed: int,
    steps: int,
    path: str | None = None,
) -> float:
    """Held-out bits per byte after adapters were trained; infinite if they diverged to NaN."""
    text, unseen = data.load(path, CONTEXT)
    model = copy.deepcopy(base())
    model = adapt(model, setting is SETTINGS["NF4"]).train()
    torch.manual_seed(seed)
    for name, param in model.named_parameters():
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(param, math.sqrt(5))
    train(model, [p for p in model.parameters() if p.requires_grad], text, seed, steps, LR)
    model.eval()
    pair = data.held_out(unseen, WINDOWS, CONTEXT)
    with torch.no_grad():
        loss = loss_of(model, pair).item()
    bits = unseen.bits_per_byte(loss, pair[1])
    return bits if math.isfinite(bits) else math.inf


if __name__ == "__main__":
    compare(__doc__, SETTINGS, 300, held_out)
