"""The encoder layers of torch, which in ``eval()`` read the weights of their linear layers past
them."""

from __future__ import annotations

from torch import nn

from .quantized import QuantizedLinear


def call_linears(model: nn.Module) -> None:
    """Makes torch's encoder layers call linear layers that have adapters or few bits. Their fast
    path would leave adapters out, and takes no weight of few bits."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            if any(map(_is_changed, module.layers)):
                module.use_nested_tensor = False  # which that path alone takes
        elif isinstance(module, nn.TransformerEncoderLayer) and _is_changed(module):
            module.activation_relu_or_gelu = 0  # an unknown one, for which there is no such path


def _is_changed(layer: nn.Module) -> bool:
    linears = getattr(layer, "linear1", None), getattr(layer, "linear2", None)
    return any(not isinstance(x, nn.Linear) or isinstance(x, QuantizedLinear) for x in linears)
