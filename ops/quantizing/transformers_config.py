"""Describes quantized layers in the config of a model of transformers, for bitsandbytes, and lets
transformers save experts as they are."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..functional.quantize_matrix import MXFP4
from ..nn.experts import QuantizedExperts
from ..nn.quantized import QuantizedLinear
from .choice import is_linear

CONVERSIONS = "_weight_conversions"  # of a model: what transformers does the other way as it saves
BEFORE = "_headroom_weight_conversions"
OF_FILES = "_headroom_quantization_config"  # of a model whose experts were in MXFP4: what said so


def describe(model: nn.Module) -> None:
    """Sets or removes ``config.quantization_config``: ``from_pretrained`` then makes layers of
    bitsandbytes for the weights that ``save_pretrained`` wrote. Layers of several formats have no
    such description."""
    for module in model.modules():  # one of PEFT, say, holds the one that is saved
        if hasattr(module, "save_pretrained"):
            _keep_stacks(module)
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    attributes = vars(model)
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    kinds = {layer.format for layer in layers}
    if len(kinds) == 1:
        left = [name for name, module in model.named_modules() if is_linear(module)]
        config.quantization_config = _description(kinds.pop(), layers[0], left)
    elif _is_in_mxfp4(model):
        if OF_FILES in attributes:
            config.quantization_config = attributes.pop(OF_FILES)
    elif hasattr(config, "quantization_config"):
        if _is_of_mxfp4(config.quantization_config):
            attributes[OF_FILES] = config.quantization_config
        del config.quantization_config


def _is_of_mxfp4(description: Any) -> bool:
    if not isinstance(description, dict):
        description = vars(description)
    return description.get("quant_method") == "mxfp4"


def _is_in_mxfp4(model: nn.Module) -> bool:
    """Returns whether a model has experts in MXFP4, which its own config describes."""
    found = (module for module in model.modules() if isinstance(module, QuantizedExperts))
    return any(q.format == MXFP4 for module in found for q in module.stacks())


def _keep_stacks(model: Any) -> None:
    """Lets ``save_pretrained`` write stacks of few bits, which transformers would take apart as if
    they were matrices, under their names in the model."""
    attributes = vars(model)
    if any(isinstance(module, QuantizedExperts) for module in model.modules()):
        attributes.setdefault(BEFORE, attributes.get(CONVERSIONS))
        attributes[CONVERSIONS] = []
    elif BEFORE in attributes:
        attributes[CONVERSIONS] = attributes.pop(BEFORE)


def _description(kind: str, layer: QuantizedLinear, left: list[str]) -> dict[str, Any]:
    is_4bit = kind != "int8"
    found: dict[str, Any] = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": left}
    found |= {"load_in_4bit": is_4bit, "load_in_8bit": not is_4bit}
    if is_4bit:
        found["bnb_4bit_quant_type"] = kind
        found["bnb_4bit_use_double_quant"] = layer.nested
        found["bnb_4bit_quant_storage"] = "uint8"
        found["bnb_4bit_compute_dtype"] = str(layer.weight_dtype).removeprefix("torch.")
    return found
