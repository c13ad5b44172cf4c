"""Layers and models of bitsandbytes, and gradients of models whose weights are in few bits."""

import torch
from torch import nn


def freeze(model):
    """Lets vectors train alone, such as norms and biases, and returns the model."""
    for p in model.parameters():
        if p.is_floating_point():
            p.requires_grad_(p.dim() == 1)
    return model


def gradients(model, **inputs):
    """Returns the loss and the gradients of a step, by name."""
    torch.manual_seed(7)
    loss = model(**inputs).loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"loss": loss.detach()} | grads


def error(got, exact):
    """Returns the norm of all differences, of tensors by name, over that of the tensors."""
    assert got.keys() == exact.keys()
    squares = [(got[k].double() - exact[k].double()).square().sum() for k in exact]
    return (sum(squares) / sum(x.double().square().sum() for x in exact.values())).sqrt().item()


def bitsandbytes_layer(kind, weight, bias=None, *, nested=True, storage=torch.uint8, compute=None):
    """Returns a layer that bitsandbytes has quantized."""
    import bitsandbytes as bnb

    out, in_ = weight.shape
    if kind == "int8":
        layer = bnb.nn.Linear8bitLt(in_, out, bias=bias is not None, has_fp16_weights=False)
        layer.weight = bnb.nn.Int8Params(weight, requires_grad=False)
    else:
        options = dict(quant_type=kind, compress_statistics=nested, quant_storage=storage)
        layer = bnb.nn.Linear4bit(in_, out, bias is not None, compute, **options)
        layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, module=layer, **options)
    if bias is not None:
        layer.bias = nn.Parameter(bias)
    return layer.to("cpu")


def with_bitsandbytes(model, kind, **options):
    """Puts layers of bitsandbytes in the place of those below the head, and returns the model."""
    for name, module in [*model.named_modules()]:
        if name.endswith(("lm_head", "decoder")):
            continue
        weight = getattr(module, "weight", None)
        if type(module).__name__ == "Conv1D":
            weight = weight.t().contiguous()
        elif type(module) is not nn.Linear:
            continue
        bias = None if module.bias is None else module.bias.detach()
        parent, _, own = name.rpartition(".")
        layer = bitsandbytes_layer(kind, weight.detach(), bias, **options)
        setattr(model.get_submodule(parent), own, layer)
    return model.train()
